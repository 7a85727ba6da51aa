"""Scores: closed forms, chunks, and the memory of a large vocabulary."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from grpo_jax import models
from grpo_jax.models import layout
from grpo_jax.models import scores
from tests import tiny

pytestmark = pytest.mark.quick


def test_token_scores_closed_form():
  logits = jax.random.normal(jax.random.key(0), (1, 5, 7)) * 3
  target = jnp.array([[0, 6, 2, 2, 5]])
  got = scores.token_scores(logits, target, models.Wanted(entropy=True))
  everything = jax.nn.log_softmax(logits)
  np.testing.assert_allclose(
    got.logp[0], everything[0, jnp.arange(5), target[0]], atol=1e-6
  )
  entropy = -jnp.sum(jnp.exp(everything) * everything, axis=-1)
  np.testing.assert_allclose(got.entropy, entropy, atol=1e-6)
  assert scores.token_scores(logits, target, models.LOGP).entropy is None


@pytest.mark.parametrize(
  'chunk_tokens',
  [5, 1000, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 72))],
)
def test_chunks_change_nothing(chunk_tokens):
  model = tiny.model()
  params = tiny.params(model)
  rows = layout.padded_rows(*tiny.ragged(), 16)

  def run(params, size):
    got = tiny.score(
      model, params, rows, 1.3, models.Wanted(entropy=True), size
    )
    return jnp.sum(jnp.cos(got.logp)) + jnp.sum(got.entropy), got

  run = jax.grad(run, has_aux=True)
  gradient, got = run(params, chunk_tokens)
  expected_gradient, expected = run(params, 10_000)
  tiny.assert_trees_close(got, expected, 1e-6)
  tiny.assert_trees_close(gradient, expected_gradient, 1e-6)


def test_one_chunk_needs_no_loop():
  """A loop would keep no logits for the gradient, and compute them again."""
  model = tiny.model()
  rows = layout.padded_rows(*tiny.ragged(), 16)  # 12 rows of 6 tokens
  params = jax.eval_shape(model.init, jax.random.key(0))

  def loops(size):
    run = lambda params: models.score(model, params, rows, chunk_tokens=size)
    return str(jax.make_jaxpr(run)(params)).count('scan[')

  assert loops(72) == loops(10_000) == loops(71) - 1


def test_temperature_is_inside_the_softmax():
  model = tiny.model()
  params = tiny.params(model)
  rows = layout.padded_rows(*tiny.ragged(), 16)
  hot = {**params, 'head': params['head'] / 2}
  np.testing.assert_allclose(
    tiny.score(model, params, rows, 2.0).logp,
    tiny.score(model, hot, rows, 1.0).logp,
    atol=1e-6,
  )


@pytest.mark.parametrize('with_entropy', [False, True])
def test_no_array_of_all_positions_times_the_vocabulary(with_entropy):
  """The compiler's own figure, forward and backward, at V = 151,936."""
  vocab, prompts, group, tokens = 151_936, 4, 8, 128
  model = tiny.model(vocab_size=vocab)
  rows = layout.padded_rows(
    [[1, 2]] * prompts,
    np.ones((prompts, group, tokens), np.int32),
    np.full((prompts, group), tokens),
    tokens + 2,
  )
  params = jax.eval_shape(model.init, jax.random.key(0))

  def loss(params, rows):
    got = tiny.score(model, params, rows, wanted=models.Wanted(with_entropy))
    return jnp.sum(got.logp) + jnp.sum(got.entropy if with_entropy else 0.0)

  memory = jax.jit(jax.grad(loss)).lower(params, rows).compile()
  temporary = memory.memory_analysis().temp_size_in_bytes
  everything = 4 * prompts * group * tokens * vocab  # 2.5 GB
  parameters = 4 * 2 * vocab * tiny.CONFIG.width
  assert temporary < everything / 5
  # A few chunks of 78 MB and copies of the output layer, not more.
  assert temporary < 5 * 4 * 128 * vocab + 2 * parameters


@pytest.mark.parametrize('kind', ['padded', 'shared', 'packed', 'dense'])
def test_the_fewest_positions_meet_the_vocabulary(kind, monkeypatch):
  """Columns or places for completion tokens, whichever are fewer."""
  model, short = tiny.model(), np.full((1, 4), 2)
  ids, tokens = [[1, 2, 3]], np.ones((1, 4, 8), np.int32)
  rows, expected = {
    'padded': (layout.padded_rows(ids, tokens, short, 16), 8),
    'shared': (layout.shared_prompt(ids, tokens, short, 4), 32),
    'packed': (layout.packed_rows(ids, tokens, short, 32), 32),
    # 12 columns, and the first tokens of 4 completions.
    'dense': (layout.packed_rows(ids, tokens, short, 12), 16),
  }[kind]
  assert tiny.scored_positions(model, rows, monkeypatch) == [expected]


@pytest.mark.parametrize(
  'kind',
  [
    'shared',
    pytest.param('padded', marks=pytest.mark.long),
    pytest.param('packed', marks=pytest.mark.long),
  ],
)
def test_forward_mode_is_the_transpose_of_reverse_mode(kind):
  """<c, J v> = <J^T c, v>, and the same scores."""
  model = tiny.model()
  params = tiny.params(model)
  ids, tokens, length = tiny.ragged()
  rows = {
    'padded': lambda: layout.padded_rows(ids, tokens, length, 16),
    'shared': lambda: layout.shared_prompt(ids, tokens, length, 8),
    'packed': lambda: layout.packed_rows(ids, tokens, length, 30),
  }[kind]()
  tangent = tiny.params(model, 3)

  def logp(params, forward_mode):
    return models.score(model, params, rows, forward_mode=forward_mode).logp

  @jax.jit
  def both():
    scores, pull_back = jax.vjp(lambda p: logp(p, False), params)
    again, moved = jax.jvp(lambda p: logp(p, True), (params,), (tangent,))
    c = jax.random.normal(jax.random.key(0), scores.shape)
    slopes = optax.tree.vdot(pull_back(c)[0], tangent)
    return scores, again, jnp.vdot(c, moved), slopes

  scores, again, forward, reverse = both()
  np.testing.assert_array_equal(again, scores)
  np.testing.assert_allclose(forward, reverse, rtol=1e-4)


@pytest.mark.parametrize(
  'vocab, width, platform, positions',
  [
    (32768, 128, 'cpu', 128),  # 16 MiB of logits
    (2048, 128, 'cpu', 2048),
    (49152, 576, 'cpu', 576),  # the output layer's own bytes
    (151936, 64, 'cpu', 128),
    (32768, 4096, 'tpu', 512),  # 64 MiB
    (151936, 4096, 'gpu', 128),
  ],
)
def test_chunks_of_logits_fit_where_they_are_computed(
  vocab, width, platform, positions
):
  assert models.chunk_positions(vocab, width, platform) == positions
