"""Scores: closed forms, chunks, and the memory of a large vocabulary."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np
import optax
import pytest

from grpo_jax import models
from grpo_jax.mesh import sharding
from grpo_jax.mesh import shards
from grpo_jax.models import layout
from grpo_jax.models import scores
from grpo_jax.planning import hlo
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


def test_likeliest_tokens_and_given_ids_closed_form():
  logits = jax.random.normal(jax.random.key(0), (2, 3, 7)) * 3
  target = jnp.array([[0, 6, 2], [2, 5, 5]])
  everything = np.asarray(jax.nn.log_softmax(logits))
  order = np.argsort(-everything, axis=-1)[..., :4]
  found = scores.token_scores(logits, target, models.Wanted(likeliest=4))
  np.testing.assert_array_equal(found.top_ids, order)
  given = scores.token_scores(logits, target, models.Wanted(ids=order))
  wanted = np.take_along_axis(everything, order, axis=-1)
  np.testing.assert_allclose(given.top_logp, wanted, atol=1e-6)
  np.testing.assert_array_equal(given.top_logp, found.top_logp)
  assert given.top_ids is None and given.entropy is None
  own = scores.token_scores(
    logits, target, models.Wanted(ids=target[..., None])
  )
  np.testing.assert_array_equal(own.top_logp[..., 0], own.logp)


def test_an_id_that_the_policy_lacks_has_no_probability_and_no_slope():
  logits, target = jnp.zeros((1, 1, 4)), jnp.zeros((1, 1), jnp.int32)
  ids = jnp.array([[[1, 4, 9]]])

  def logp(logits):
    return scores.token_scores(logits, target, models.Wanted(ids=ids)).top_logp

  found, pull = jax.vjp(logp, logits)
  np.testing.assert_allclose(found[0, 0, 0], -np.log(4), rtol=1e-6)
  assert np.all(found[0, 0, 1:] < -1e29)
  (slope,) = pull(jnp.array([[[0.0, 1.0, 1.0]]]))
  np.testing.assert_allclose(slope[0, 0], [-0.5] * 4)  # of the mass alone


def over_tensor(function, *args, parts=4):
  """Compiles a function on data shards whose vocabulary is split."""
  mesh = sharding.make_mesh(tensor=parts)
  is_split = args[0].shape[-1] % parts == 0
  at = PartitionSpec(*(None, None, 'tensor') * is_split)

  def run(logits, *args):
    call = shards.call(
      lambda logits, args: function(logits, *args),
      in_specs=(PartitionSpec(),) * 2,
      out_specs=PartitionSpec(),
    )
    with sharding.use(mesh):
      return call(logits, args)

  logits = jax.device_put(args[0], NamedSharding(mesh, at))
  compiled = jax.jit(run).lower(logits, *args[1:]).compile()
  text = compiled.as_text()
  sent = sum(
    one.bytes * one.times for one in hlo.Program(text, 1, parts).collectives()
  )
  return compiled(logits, *args[1:]), sent


@pytest.mark.parametrize('vocab', [512, 510, 16])
def test_a_vocabulary_that_is_split_sends_what_is_asked_for(vocab):
  """Not its logits; 510 are not split, and of 16 a part has too few."""
  rng, number = np.random.default_rng(0), 6
  logits = rng.integers(0, 200, (2, 8, vocab)) / np.float32(16)  # with ties
  target = jnp.zeros((2, 8), jnp.int32)
  top = lambda logits: scores.token_scores(
    logits, target, models.Wanted(likeliest=number)
  )
  expected = top(jnp.asarray(logits))
  found, sent = over_tensor(top, logits)
  np.testing.assert_array_equal(found.top_ids, expected.top_ids)
  np.testing.assert_allclose(found.top_logp, expected.top_logp, atol=1e-6)
  # Three sums for each place, and from each part the values and ids it found.
  few = 4 * 16 * (3 + 2 * 4 * number)
  assert sent <= few or vocab == 510

  def slope(logits, ids):
    def loss(logits):
      asked = models.Wanted(ids=ids)
      return jnp.sin(scores.token_scores(logits, target, asked).top_logp).sum()

    # Not a plain sum, which is 0 for any slope in logits.
    by_id = jnp.cos(jnp.arange(vocab))[None, None]
    return jnp.sum(by_id * jax.grad(loss)(logits), axis=-1)

  ids = expected.top_ids
  expected = slope(jnp.asarray(logits), ids)
  found, sent = over_tensor(slope, logits, ids)
  assert np.abs(expected).min() > 1e-3
  np.testing.assert_allclose(found, expected, atol=1e-5)
  # The values themselves, and sums.
  assert vocab == 510 or sent <= 4 * 16 * (4 + number)


@pytest.mark.parametrize('kind', ['padded', 'shared', 'packed'])
def test_given_ids_meet_their_tokens_in_every_row(kind):
  """Packed rows have fewer columns than places, so they are scored there."""
  model, rng = tiny.model(num_layers=1), np.random.default_rng(0)
  params = tiny.params(model)
  prompts, tokens, length = tiny.ragged()
  tokens = np.pad(tokens, ((0, 0), (0, 0), (0, 10)))
  rows = {
    'padded': lambda: layout.padded_rows(prompts, tokens, length, 26),
    'shared': lambda: layout.shared_prompt(prompts, tokens, length, 9),
    'packed': lambda: layout.packed_rows(prompts, tokens, length, 30),
  }[kind]()
  ids = rng.integers(0, 40, (*tokens.shape, 3)).astype(np.int32)
  of_rows = np.take(
    ids.reshape(-1, *ids.shape[2:]), rows.completion, axis=0, mode='clip'
  )
  wanted = models.Wanted(entropy=True, ids=of_rows)
  found = tiny.score(model, params, rows, wanted=wanted)
  likeliest = models.Wanted(likeliest=40)
  every = tiny.score(model, params, rows, wanted=likeliest)
  order = np.argsort(every.top_ids, axis=-1)
  by_id = np.take_along_axis(np.asarray(every.top_logp), order, axis=-1)
  expected = np.take_along_axis(by_id, of_rows, axis=-1)
  inside = np.zeros((length.size + 1, 16), bool)
  inside[:-1] = (np.arange(16) < length[..., None]).reshape(-1, 16)
  here = inside[rows.completion]
  assert here.sum() == length.sum()
  np.testing.assert_allclose(found.top_logp[here], expected[here], atol=1e-5)
  np.testing.assert_array_equal(found.logp[here], every.logp[here])
  own = np.take_along_axis(by_id, np.asarray(rows.target)[..., None], axis=-1)
  np.testing.assert_allclose(found.logp[here], own[here][:, 0], atol=1e-5)


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


@pytest.mark.parametrize('beside', ['nothing', 'entropy', 'ids'])
def test_no_array_of_all_positions_times_the_vocabulary(beside):
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

  ids = jnp.zeros((*rows.target.shape, 16), jnp.int32)
  wanted = {
    'nothing': models.LOGP,
    'entropy': models.Wanted(entropy=True),
    'ids': models.Wanted(ids=ids),
  }[beside]

  def loss(params, rows, wanted):
    got = tiny.score(model, params, rows, wanted=wanted)
    return sum(jnp.sum(x) for x in jax.tree.leaves(got))

  memory = jax.jit(jax.grad(loss)).lower(params, rows, wanted).compile()
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
