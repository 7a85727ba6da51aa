"""Sliding windows, from a config to the attention of each layer."""

import json

import jax
import numpy as np
import pytest

from grpo_jax.models import layout
from grpo_jax.run import loop
from grpo_jax.run.build import build
from tests import runs
from tests import tiny

# Four layers, as the two windows repeat: 3 tokens, all, 3 tokens, all.
WINDOWS = {
  'model.num_layers': 4,
  'model.window_tokens': (3, 0),
  'reward': 'tests.judges:even',
}
TOKENS = 9


def reference(windows):
  """Textbook attention whose windows are those of the config, in turn."""
  calls = []

  def attention(query, key, value, cache, window, cap):
    del window, cap  # what the model says of it is what is tested
    size = windows[len(calls) % len(windows)]
    calls.append(size)
    mixed = jax.nn.dot_product_attention(
      query,
      key,
      value,
      is_causal=True,
      local_window_size=(size - 1, 0) if size else None,
      implementation='xla',
    )
    return mixed, cache

  return attention, calls


@pytest.mark.parametrize(
  'kind', ['padded', 'shared', pytest.param('packed', marks=pytest.mark.long)]
)
def test_windows_of_a_config_are_those_of_the_reference_attention(kind):
  model = build.run(runs.small(**WINDOWS)).model
  params = tiny.params(model)
  rng = np.random.default_rng(0)
  prompts = [rng.integers(2, 14, size).tolist() for size in (3, 5)]
  tokens = rng.integers(2, 14, (2, 2, 4)).astype(np.int32)
  length = np.array([[4, 2], [3, 4]], np.int32)
  rows = {
    'padded': lambda: layout.padded_rows(prompts, tokens, length, TOKENS),
    'packed': lambda: layout.packed_rows(prompts, tokens, length, 14),
    'shared': lambda: layout.shared_prompt(prompts, tokens, length, 5),
  }[kind]()
  logp = tiny.gather(tiny.score(model, params, rows).logp, rows, length)

  whole = np.zeros((4, TOKENS), np.int32)
  for row, (p, g) in enumerate(np.ndindex(length.shape)):
    ids = [*prompts[p], *tokens[p, g, : length[p, g]]]
    whole[row, : len(ids)] = ids
  place = np.broadcast_to(np.arange(TOKENS), whole.shape)

  @jax.jit
  def everything(params):
    attention, calls = reference((3, 0))
    hidden, _ = model.hidden(model.unstack(params), whole, place, attention)
    assert calls == [3, 0, 3, 0]
    return jax.nn.log_softmax(model.head(params, hidden))

  expected = everything(params)
  for row, (p, g) in enumerate(np.ndindex(length.shape)):
    columns = len(prompts[p]) + np.arange(length[p, g])
    np.testing.assert_allclose(
      logp[p, g, : length[p, g]],
      expected[row, columns - 1, whole[row, columns]],
      atol=1e-5,
    )


@pytest.mark.long
def test_a_run_with_windows_trains_and_its_config_keeps_them(tmp_path):
  config = runs.small(**WINDOWS, steps=2)
  loop.train(config, tmp_path)
  assert runs.records(tmp_path)[-1]['update_norm'] > 0
  saved = json.loads((tmp_path / 'config.json').read_text())
  assert saved['model']['window_tokens'] == [3, 0]
  wider = runs.small(**{**WINDOWS, 'model.window_tokens': (0,)}, steps=2)
  with pytest.raises(ValueError, match=r'=\[3, 0\], and now it is \[0\]'):
    loop.train(wider, tmp_path)
