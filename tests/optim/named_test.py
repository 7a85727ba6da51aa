"""Optimizers of stacked parameters against optax on the unstacked model."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from grpo_jax import optim

pytestmark = pytest.mark.quick

LAYERS, WIDTH, HEADS, SIZE, MLP, VOCAB = 3, 6, 2, 3, 8, 7
# Of one layer, as the model has it, and as a matrix with its heads merged.
LAYER = {
  'query': ((WIDTH, HEADS, SIZE), (WIDTH, HEADS * SIZE)),
  'output': ((HEADS, SIZE, WIDTH), (HEADS * SIZE, WIDTH)),
  'bias': ((HEADS, SIZE), (HEADS * SIZE,)),
  'down': ((MLP, WIDTH), (MLP, WIDTH)),
  'norm': ((WIDTH,), (WIDTH,)),
}
AXES = {
  'query': optim.Matrix((-3,), (-2, -1)),
  'output': optim.Matrix((-3, -2), (-1,)),
  'bias': optim.Matrix((), (-2, -1)),
  'down': optim.Matrix((-2,), (-1,)),
  'norm': optim.Matrix((), (-1,)),
  'embedding': optim.Matrix((-2,), (-1,), hidden=False),
}
DECAY = ('query', 'output', 'down', 'embedding')


def long(*values):
  return pytest.param(*values, marks=pytest.mark.long)


def name_of(path):
  return path[-1].key


def matrices(tree):
  return jax.tree_util.tree_map_with_path(lambda p, _: AXES[name_of(p)], tree)


def decays(tree):
  return jax.tree_util.tree_map_with_path(
    lambda p, _: name_of(p) in DECAY, tree
  )


def tree(seed):
  rng = np.random.default_rng(seed)
  draw = lambda *shape: np.float32(rng.standard_normal(shape))
  blocks = {name: draw(LAYERS, *one) for name, (one, _) in LAYER.items()}
  return {'blocks': blocks, 'embedding': draw(VOCAB, WIDTH)}


def unstacked(params):
  """The same numbers as a model has them whose layers are apart."""
  layers = [
    {name: x[i].reshape(LAYER[name][1]) for name, x in params['blocks'].items()}
    for i in range(LAYERS)
  ]
  return {'layers': layers, 'embedding': params['embedding']}


def steps(tx, params, apart):
  """Parameters after some updates."""
  state = tx.init(params)
  update = jax.jit(tx.update)
  for step in range(3):
    # Layers of very different gradients, which one scale would not serve.
    gradient = tree(100 + step)
    sizes = 10.0 ** np.arange(LAYERS, dtype=np.float32)
    gradient['blocks'] = {
      name: x * sizes.reshape(-1, *(1,) * (x.ndim - 1))
      for name, x in gradient['blocks'].items()
    }
    gradient = unstacked(gradient) if apart else gradient
    updates, state = update(gradient, state, params)
    params = optax.apply_updates(params, updates)
  return params, state


def rate(count):
  return 0.01 * (1 + count)


def theirs_muon(tree):
  numbers = optax.contrib.MuonDimensionNumbers()
  names = ('query', 'output', 'down')
  return jax.tree_util.tree_map_with_path(
    lambda path, _: numbers if name_of(path) in names else None, tree
  )


QUICK = ('muon', 'adafactor')
PAIRS = {
  'muon': (
    lambda: optim.muon(rate, matrices, b2=0.9, ns_steps=2),
    lambda: optax.contrib.muon(
      rate,
      adam_b2=0.9,
      ns_steps=2,
      consistent_rms=0.2,
      muon_weight_dimension_numbers=theirs_muon,
    ),
  ),
  'muon by width': (
    lambda: optim.muon(rate, matrices, nesterov=False, consistent_rms=None),
    lambda: optax.contrib.muon(
      rate, nesterov=False, muon_weight_dimension_numbers=theirs_muon
    ),
  ),
  'adafactor': (
    lambda: optim.adafactor(rate, matrices, min_dim_size_to_factor=6),
    lambda: optax.adafactor(rate, min_dim_size_to_factor=6),
  ),
  'adafactor, all of it': (
    lambda: optim.adafactor(
      0.01,
      matrices,
      0.3,
      decays,
      min_dim_size_to_factor=7,  # leaves some matrices whole
      decay_rate=0.6,
      multiply_by_parameter_scale=False,
      clipping_threshold=0.5,
      momentum=0.9,
    ),
    lambda: optax.adafactor(
      0.01,
      min_dim_size_to_factor=7,
      decay_rate=0.6,
      multiply_by_parameter_scale=False,
      clipping_threshold=0.5,
      momentum=0.9,
      weight_decay_rate=0.003,
      weight_decay_mask=decays,
    ),
  ),
  'lion': (
    lambda: optim.lion(rate, 0.3, decays, b1=0.8),
    lambda: optax.lion(rate, b1=0.8, weight_decay=0.3, mask=decays),
  ),
  'sgd': (
    lambda: optim.sgd(rate, momentum=0.9, nesterov=True),
    lambda: optax.sgd(rate, momentum=0.9, nesterov=True),
  ),
}


@pytest.mark.parametrize(
  'name',
  [name if name in QUICK else long(name) for name in PAIRS],
)
def test_stacked_parameters_move_as_those_of_the_unstacked_model(name):
  ours, theirs = (make() for make in PAIRS[name])
  params = tree(0)
  found, _ = steps(ours, params, apart=False)
  expected, _ = steps(theirs, unstacked(params), apart=True)
  moved = jax.tree.map(
    lambda a, b: np.asarray(a) - b, expected, unstacked(params)
  )
  assert all(np.any(x) for x in jax.tree.leaves(moved))
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6),
    unstacked(found),
    expected,
  )


def test_adafactor_keeps_rows_and_columns_alone():
  tx = optim.adafactor(rate, matrices, min_dim_size_to_factor=6)
  chained: Any = tx.init(tree(0))
  state = chained[0]
  assert state.rows['blocks']['query'].shape == (LAYERS, WIDTH, 1, 1)
  assert state.columns['blocks']['query'].shape == (LAYERS, 1, HEADS, SIZE)
  assert state.whole['blocks']['query'].shape == (1, 1, 1, 1)
  assert state.whole['blocks']['norm'].shape == (LAYERS, WIDTH)
  assert state.rows['blocks']['norm'].shape == (1, 1)


@pytest.mark.parametrize(
  'name', ['sgd', long('adafactor'), long('lion'), long('muon')]
)
def test_decay_is_decoupled_and_of_the_chosen_parameters_alone(name):
  make = getattr(optim, name)
  given = (matrices,) if name in ('adafactor', 'muon') else ()
  plain, decayed = (make(0.1, *given, x, decays) for x in (0.0, 0.5))
  params, gradient = tree(0), tree(1)
  first, second = (
    tx.update(gradient, tx.init(params), params)[0] for tx in (plain, decayed)
  )

  def check(path, a, b, x):
    wanted = -0.05 * x if name_of(path) in DECAY else jnp.zeros_like(x)
    np.testing.assert_allclose(b - a, wanted, atol=1e-6)

  jax.tree_util.tree_map_with_path(check, first, second, params)


@pytest.mark.parametrize(
  'name',
  ['sgd', long('adafactor'), long('lion'), long('muon')],
)
def test_schedules_follow_the_run_and_moments_do_not(name):
  make = getattr(optim, name)
  given = (matrices,) if name in ('adafactor', 'muon') else ()
  seen = make(lambda count: 1.0 * (count == 7), *given)
  params, gradient = tree(0), tree(1)
  state = seen.init(params)
  still, _ = seen.update(gradient, state, params)
  assert not any(jnp.any(x) for x in jax.tree.leaves(still))
  moved, after = seen.update(gradient, optim.set_schedules(state, 7), params)
  assert all(jnp.any(x) for x in jax.tree.leaves(moved))
  counts = [
    int(x)
    for path, x in jax.tree_util.tree_leaves_with_path(after)
    if getattr(path[-1], 'name', '') == 'count'
  ]
  assert sorted(counts)[-1] == 8 and set(counts[:-1]) <= {1}


@pytest.mark.parametrize(
  'name, kwargs',
  [
    ('lion', {'b1': 1.0}),
    ('sgd', {'momentum': 1.0}),
    ('sgd', {'weight_decay': -1.0}),
    ('muon', {'beta': 1.0}),
    ('muon', {'ns_steps': 1.5}),
    ('muon', {'consistent_rms': 0.0}),
    ('adafactor', {'momentum': -0.1}),
    ('adafactor', {'clipping_threshold': 0.0}),
    ('adafactor', {'decay_rate': 0.0}),
  ],
)
def test_numbers_without_meaning_are_refused(name, kwargs):
  given = (matrices,) if name in ('adafactor', 'muon') else ()
  (argument,) = kwargs
  with pytest.raises(ValueError, match=f'{name} got {argument}='):
    getattr(optim, name)(0.1, *given, **kwargs)
