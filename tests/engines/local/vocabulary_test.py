"""A vocabulary that is split over devices: the tokens and bytes of one.

The cases lie on the edges: of shards, of blocks, of the random numbers.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import engines
from grpo_jax.engines.local import next_token as next_token_lib
from grpo_jax.mesh import sharding
from grpo_jax.planning import hlo
from tests import tiny
from tests.chosen import chosen
from tests.drawing import alike
from tests.drawing import next_token

FILTERS = {
  'none': {},
  'warm': {'temperature': 1.7},
  'greedy': {'temperature': 0.0},
  'top_k': {'top_k': 3},
  'top_k of all': {'top_k': 10_000},
  'top_p': {'top_p': 0.7},
  'little top_p': {'top_p': 1e-6},
  'min_p': {'min_p': 0.2},
  'min_tokens': {'min_tokens': 2, 'eos_ids': (0, 5, 57)},
  'greedy min_tokens': {
    'temperature': 0.0,
    'min_tokens': 2,
    'eos_ids': (0, 5, 57),
  },
  'all': {
    'top_k': 20,
    'top_p': 0.9,
    'min_p': 0.01,
    'min_tokens': 2,
    'eos_ids': (0, 5, 57),
  },
}
ROWS = 64
MESHES = {
  'tensor=4,data=2': dict(tensor=4, data=2),
  'tensor=2,fsdp=2,expert=2': dict(tensor=2, fsdp=2, expert=2),
}


def random_logits(vocab):
  rng = np.random.default_rng(vocab)
  logits = 3 * rng.standard_normal((ROWS, vocab))
  logits[:, rng.random(vocab) < 0.2] = -np.inf
  logits[:, -1] = 0
  return logits


def edges(vocab):
  """Logits on which a split vocabulary could go wrong, by row."""
  logits = random_logits(vocab)
  shard = np.arange(vocab) // (vocab // 4)
  logits[0] = 1  # ties everywhere
  logits[1] = np.where(np.arange(vocab) % 7 == 3, 2.0, -np.inf)  # some tie
  for k in range(4):  # a token with all mass, at both ends of each shard
    logits[2 + 2 * k] = -np.inf
    logits[2 + 2 * k, np.argmax(shard == k)] = 5
    logits[3 + 2 * k] = -np.inf
    logits[3 + 2 * k, vocab - 1 - np.argmax(shard[::-1] == k)] = -5
    logits[10 + k] = np.where(shard == k, logits[10 + k], -np.inf)
    logits[10 + k, np.argmax(shard == k)] = 0
    logits[14 + k] = np.where(shard == k, -np.inf, 1.0)  # none in shard k
  logits[18] = np.where(shard == 3, 0, -200)  # mass that underflows
  logits[19] = 80 * np.sign(logits[19])  # mass that underflows between ties
  logits[:, -1] = np.where(np.isneginf(logits).all(1), 0, logits[:, -1])
  return logits


UNIFORM = {
  'random': np.random.default_rng(0).random(ROWS),
  'first': np.zeros(ROWS),
  'last': np.full(ROWS, 1 - 2**-24),
  # On the edges of shards, where masses are equal.
  'quarters': np.arange(ROWS) % 4 / 4,
}


@functools.cache
def drawing(options, vocab, mesh=None):
  """`next_token` compiled, the logits split as the output layer leaves them."""
  ways = alike(options, ROWS, vocab)

  def run(*given):
    with sharding.use(mesh):
      return next_token_lib.next_token(*given, *ways)

  if mesh is None:
    return jax.jit(run)
  rows = sharding.rows(mesh)
  spec = jax.sharding.PartitionSpec(sharding.ROW_AXES, 'tensor')
  split = jax.sharding.NamedSharding(mesh, spec)
  return jax.jit(run, in_shardings=(split, rows, rows))


def assert_drawn_as_whole(logits, uniform, options, mesh):
  logits = np.asarray(logits, np.float32)
  given = logits, np.asarray(uniform, np.float32), np.arange(ROWS) % 4
  expected = jax.device_get(drawing(options, logits.shape[1])(*given))
  got = jax.device_get(drawing(options, logits.shape[1], mesh)(*given))
  np.testing.assert_array_equal(got[0], expected[0])
  for x, y in zip(got[1:], expected[1:], strict=True):
    np.testing.assert_allclose(x, y, atol=1e-5)
  assert np.all(np.isfinite(logits[np.arange(ROWS), got[0]]))
  return got[0]


# Each filter has code of its own, and 4100 is no whole number of blocks.
IN_THE_SUITE = {
  ('tensor=4,data=2', 4100, name)
  for name in ('none', 'greedy min_tokens', 'top_k of all', 'top_p', 'min_p')
} | {('tensor=4,data=2', 64, 'all'), ('tensor=4,data=2', 4100, 'all')}


@pytest.mark.parametrize(
  'mesh, vocab, filters',
  chosen(
    [
      case
      for case in itertools.product(MESHES, (64, 4100), FILTERS)
      if case[0] == 'tensor=4,data=2' or case[2] == 'all'
    ],
    IN_THE_SUITE,
  ),
)
def test_a_split_vocabulary_draws_the_tokens_of_a_whole_one(
  mesh, vocab, filters
):
  options = engines.Sampling(**FILTERS[filters])
  devices = sharding.make_mesh(**MESHES[mesh])
  for uniform in UNIFORM.values():
    for logits in (random_logits(vocab), edges(vocab)):
      assert_drawn_as_whole(logits, uniform, options, devices)


def test_every_shard_draws():
  options = engines.Sampling()
  mesh = sharding.make_mesh(tensor=4)
  equal, uniform = np.zeros((ROWS, ROWS)), np.arange(ROWS) / ROWS
  tokens = assert_drawn_as_whole(equal, uniform, options, mesh)
  np.testing.assert_array_equal(tokens, np.arange(ROWS))


@pytest.mark.parametrize('rows, vocab', [(6, 64), (64, 63)])
def test_what_a_mesh_does_not_divide_is_drawn_too(rows, vocab):
  options = engines.Sampling()
  mesh = sharding.make_mesh(tensor=2, data=4)
  given = random_logits(vocab)[:rows], UNIFORM['random'][:rows]
  given = *map(jnp.float32, given), jnp.zeros(rows, int)

  ways = alike(options, rows, vocab)

  def run(*given):
    with sharding.use(mesh):
      return next_token_lib.next_token(*given, *ways)

  expected = next_token(*given, options)
  got = jax.jit(run)(*jax.device_put(given, sharding.replicated(mesh)))
  for x, y in zip(got, expected, strict=True):
    np.testing.assert_allclose(x, y, atol=1e-5)


def sent(program, options, **axes):
  """The collectives of a program of the engine, and rows on each device."""
  mesh = sharding.make_mesh(**axes)
  model = tiny.model(vocab_size=8192, num_layers=1)
  engine = engines.LocalEngine(model, (4,), (8,), mesh=mesh)
  shapes = jax.eval_shape(model.init, jax.random.key(0))
  place = sharding.param_shardings(mesh, shapes, model.logical_axes)
  params = jax.tree.map(
    lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at),
    shapes,
    place,
  )
  lowered = engine.lowering(params, 4, 4, options, 8)[program]()
  found = hlo.Program(lowered.compile().as_text(), trips=5, devices=mesh.size)
  return found.collectives(), 16 // sharding.row_shards(mesh)


@pytest.mark.parametrize(
  'filters, tensor, program',
  [
    ('none', 4, 'decode'),
    ('all', 4, 'prefill'),
    *(
      pytest.param(*case, marks=pytest.mark.long)
      for case in (
        ('none', 2, 'decode'),
        ('none', 2, 'prefill'),
        ('none', 4, 'prefill'),
        ('greedy', 2, 'decode'),
        ('greedy', 2, 'prefill'),
        ('greedy', 4, 'decode'),
        ('greedy', 4, 'prefill'),
        ('all', 2, 'decode'),
        ('all', 2, 'prefill'),
        ('all', 4, 'decode'),
      )
    ),
  ],
)
def test_no_logits_are_sent(filters, tensor, program):
  options = engines.Sampling(**FILTERS[filters])
  found, rows = sent(program, options, data=2, tensor=tensor)
  assert program == 'prefill' or all(one.times >= 5 for one in found)
  # A prompt has 4 positions, and as many completions.
  activations = rows * tiny.CONFIG.width
  candidates = rows * tensor * options.top_k
  most = max(activations, candidates)
  assert most < rows * 8192 / tensor / 10
  assert max(one.bytes for one in found) <= 4 * most
