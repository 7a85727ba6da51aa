"""Logits, log-probabilities and greedy texts equal those of transformers.

The reference values are files, see `make_golden`; `reference_test` compares
with transformers itself.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import engines
from grpo_jax import models
from grpo_jax.models import layout
from grpo_jax.models.attention import over_layout
from tests import drawing
from tests.models.weights import golden

EXACT = functools.partial(jax.default_matmul_precision, 'highest')


@functools.partial(jax.jit, static_argnames='model')
def logits(model, params, rows):
  """f32[R,S,V]."""
  attention = over_layout(rows, model.config.attention)
  hidden, _ = model.hidden(params, rows.tokens, rows.position, attention)
  return model.head(params, hidden)


@pytest.mark.parametrize('name', golden.NAMES)
def test_logits_equal_with_padding_on_either_side(name):
  one = golden.golden(name)
  for side in ('right', 'left'):
    rows = golden.padded(one.rows, side)
    with EXACT():
      found = logits(one.model, one.params, rows)[rows.segment > 0]
    expected = one.expected[side]
    scale = np.abs(expected).max()
    np.testing.assert_allclose(found, expected, atol=1e-5 * scale, rtol=0)


@pytest.mark.parametrize('name', ['gemma3', 'qwen2_window'])
def test_a_group_that_shares_its_prompt_has_the_same_log_probabilities(name):
  one = golden.golden(name)
  row = one.rows[0]
  tokens = np.stack([row[4:], row[4:]])[None]
  rows = layout.shared_prompt([row[:4]], tokens, np.full((1, 2), 8), 4)
  with EXACT():
    found = jax.jit(functools.partial(models.score, one.model))(
      one.params, rows
    ).logp
  expected = jax.nn.log_softmax(jnp.asarray(one.expected['right'][3:11]))
  expected = expected[np.arange(8), row[4:]]
  for completion in found[0]:
    np.testing.assert_allclose(completion, expected, atol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize('name', ['qwen3_moe', 'gemma3', 'gemma2', 'qwen2'])
def test_prefill_and_decode_continue_the_same(name):
  """Beyond windows, in caches of their length, and with scaled positions."""
  one = golden.golden(name)
  greedy = one.expected['greedy']
  engine = engines.LocalEngine(
    one.model, prompt_buckets=(12,), completion_buckets=(4, 8)
  )
  engine.load(one.params, version=0)
  sampling, prompts = (
    engines.Sampling(temperature=0.0),
    [row.tolist() for row in one.rows],
  )
  with EXACT():
    drawn = drawing.completions(engine, prompts, sampling, 8, group=1)
  np.testing.assert_array_equal(drawn.tokens[:, 0], greedy)
  expected = one.expected['greedy_logp']
  np.testing.assert_allclose(drawn.logp[:, 0], expected, atol=1e-4)
