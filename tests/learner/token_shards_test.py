"""Arrays [P,G,T] over the data shards, and the rows that are read of them."""

import itertools
import re

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np
import optax
import pytest

from grpo_jax.learner import programs
from grpo_jax.learner import token_shards
from grpo_jax.mesh import sharding
from grpo_jax.mesh import shards
from tests import bigram
from tests.learning import METHODS
from tests.learning import bigram_learner
from tests.learning import bigram_rollout
from tests.learning import make_updater
from tests.learning import spec

# Of eight data shards with one row of two slots; 6 is nobody.
COMPLETION = np.array(
  [[5, 0], [6, 6], [3, 6], [1, 2], [6, 4], [6, 6], [6, 6], [6, 6]], np.int32
)
ROWS = PartitionSpec(sharding.ROW_AXES)
AXES = {8: ('data', 'fsdp'), 16: ('data', 'fsdp'), 12: ('fsdp',), 5: ()}


def on_shards(function, in_specs, out_specs, *arrays):
  mesh = sharding.make_mesh(data=2, fsdp=4)
  arrays = [
    jax.device_put(x, NamedSharding(mesh, at))
    for x, at in zip(arrays, in_specs, strict=True)
  ]
  with sharding.use(mesh):
    return jax.jit(shards.call(function, in_specs, out_specs))(*arrays)


def expected(x):
  rows = x.reshape(-1, *x.shape[2:])
  return np.concatenate([rows, np.zeros_like(rows[:1])])[COMPLETION]


@pytest.mark.parametrize(
  'width, more, dtype',
  [
    (8, (), np.float32),
    (16, (2, 3), np.int32),
    (12, (), bool),
    (5, (2, 3), np.float32),
    *(
      pytest.param(*row, marks=pytest.mark.long)
      for row in itertools.product(
        [8, 16, 12, 5], [(), (2, 3)], [np.float32, np.int32, bool]
      )
    ),
  ],
)
def test_shards_take_the_completions_of_their_rows(width, more, dtype):
  mesh = sharding.make_mesh(data=2, fsdp=4)
  at = shards.positions(mesh, width)
  assert shards.position_axes(mesh, width) == AXES[width]
  x = np.arange(np.prod((2, 3, width, *more))).reshape(2, 3, width, *more) % 5
  x = x.astype(dtype)
  found = on_shards(
    lambda x, rows: token_shards.take(x, at, rows), (at, ROWS), ROWS,
    x, COMPLETION,
  )  # fmt: skip
  np.testing.assert_array_equal(found, expected(x))
  alone = token_shards.take(x, at, COMPLETION)
  np.testing.assert_array_equal(alone, expected(x))


@pytest.mark.parametrize('width', [8, 16, 12, 5])
def test_what_rows_found_is_put_where_it_belongs(width):
  mesh = sharding.make_mesh(data=2, fsdp=4)
  at = shards.positions(mesh, width)
  x = np.arange(6 * width, dtype=np.float32).reshape(2, 3, width)

  def put(part, rows):
    whole = jnp.zeros(token_shards.local_shape((2, 3, width)))
    whole = token_shards.put(whole, part, rows)
    return jax.lax.psum(whole, token_shards.missing(width))

  part = expected(x)
  found = on_shards(put, (ROWS, ROWS), at, part, COMPLETION)
  np.testing.assert_array_equal(found, x)


@pytest.mark.parametrize('width', [8, 5])
def test_slots_have_the_tokens_that_they_score(width):
  """Two slots of one completion, on two shards, have it between them."""
  mesh = sharding.make_mesh(data=2, fsdp=4)
  at = shards.positions(mesh, width)
  slots = np.where(COMPLETION == 6, 5, COMPLETION)
  slots[:, 1] = np.where(slots[:, 1] == 5, 6, slots[:, 1])
  owner = {n: np.argwhere(slots == n) for n in range(6)}
  inside = np.zeros((*slots.shape, width), bool)
  for places in owner.values():
    for t in range(width):
      inside[tuple(places[t % len(places)])][t] = True
  x = 1 + np.arange(6 * width, dtype=np.float32).reshape(2, 3, width)

  def both(x, rows, inside):
    part = token_shards.take(x, at, rows, inside)
    whole = jnp.zeros(token_shards.local_shape((2, 3, width)))
    # Elsewhere a slot may have anything.
    other = jnp.where(inside, part, jnp.nan)
    whole = token_shards.put(whole, other, rows, inside)
    return part, jax.lax.psum(whole, token_shards.missing(width))

  part, whole = on_shards(both, (at, ROWS, ROWS), (ROWS, at), x, slots, inside)
  rows = x.reshape(-1, width)
  taken = np.concatenate([rows, np.zeros_like(rows[:1])])[slots]
  np.testing.assert_array_equal(part, np.where(inside, taken, 0))
  np.testing.assert_array_equal(whole, x)


def test_sums_have_the_same_order_in_every_process():
  """The order of a set would be another in each of them, and so the program."""
  with sharding.use(sharding.make_mesh(data=2, fsdp=4)):
    found = {width: token_shards.missing(width) for width in (8, 12, 5)}
  axes = ('data', 'fsdp', 'expert')
  assert found == {8: axes[2:], 12: (axes[0], axes[2]), 5: axes}


@pytest.mark.parametrize(
  'method', ['grpo', pytest.param('gspo', marks=pytest.mark.long)]
)
def test_no_device_has_all_positions(method):
  mesh = dict(data=2, fsdp=4)
  learner = bigram.changed(
    bigram_learner(METHODS[method](), optax.adam(1e-3)),
    mesh=sharding.make_mesh(**mesh),
  )
  made = make_updater(learner, bigram.params(), spec('padded', 8), batches=2)
  lowered = programs.lowerings(made, made.layout, bigram_rollout(width=24))
  assert {'train_step', 'credit', 'score_all'} <= set(lowered)
  whole = re.compile(r'\[(4,4|2,4|16|8),24[],]')  # of a rollout, of a batch
  for name, lower in lowered.items():
    program = lower().compile()
    text = program.as_text()
    assert re.search(r'\[(4,4|2,4|16|8),3[],]', text), name
    assert not whole.search(text), (name, whole.search(text))
