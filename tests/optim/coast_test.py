"""Coasting optimizers against the closed forms, and against plain loops."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from grpo_jax.optim import _coast
from grpo_jax.optim import _coasting_law as _law

pytestmark = pytest.mark.quick

STEPS = 6
SHAPES = {'matrix': (3, 4), 'vector': (5,), 'scalar': ()}


@pytest.fixture(autouse=True)
def float64():
  with jax.enable_x64(True):
    yield


def tree(seed, shift=0.0):
  rng = np.random.default_rng(seed)
  return {
    name: jnp.asarray(rng.normal(shift, 1.0, shape))
    for name, shape in SHAPES.items()
  }


def trained(optimizer, live_steps=5):
  """Parameters, state and the last update after steps with gradients."""
  params = tree(0, 1.0)
  state = optimizer.init(params)
  update = jax.jit(optimizer.update)
  updates = None
  for seed in range(1, 1 + live_steps):
    updates, state = update(tree(seed), state, params)
    params = optax.apply_updates(params, updates)
  return params, state, updates


def looped(optimizer, state, params):
  """The same by a plain loop: every update, and where it ends."""
  update = jax.jit(optimizer.update)
  zeros = jax.tree.map(jnp.zeros_like, params)
  path = []
  for _ in range(STEPS):
    updates, state = update(zeros, state, params)
    params = optax.apply_updates(params, updates)
    path.append(updates)
  return path, params, state


@functools.cache
def jitted(optimizer):
  run = functools.partial(_coast.coast, optimizer, num_steps=STEPS)
  return jax.jit(lambda state, params: run(state, params))


def close(got, wanted, rtol=1e-12, atol=1e-14):
  assert jax.tree.structure(got) == jax.tree.structure(wanted)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted)):
    assert a.dtype == b.dtype
    np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


def total(updates):
  return jax.tree.map(lambda *x: sum(x), *updates)


def global_norm(updates):
  return np.sqrt(sum(np.sum(np.square(x)) for x in jax.tree.leaves(updates)))


@pytest.mark.parametrize('b2', [0.95, 0.999])
def test_adam_coasts_by_the_law(b2):
  optimizer = optax.adam(0.02, b2=b2, eps=0.0)
  params, state, last = trained(optimizer)
  coasted = jitted(optimizer)(state, params)
  law = _law.coasting_ratio(np.arange(1, 1 + STEPS), 0.9, b2, 5)
  np.testing.assert_allclose(coasted.norms / global_norm(last), law, rtol=1e-12)
  way = _law.coasting_steps(0.9, b2, STEPS, 5)
  close(coasted.moved, jax.tree.map(lambda u: u * way, last))


def test_adam_with_epsilon_coasts_by_the_law_of_each_coordinate():
  optimizer, epsilon = optax.adam(0.02, b2=0.95, eps=0.3), 0.3
  params, state, last = trained(optimizer)
  coasted = jitted(optimizer)(state, params)
  root = jax.tree.map(lambda v: np.sqrt(v / (1 - 0.95**5)), state[0].nu)
  for name in params:
    n = np.arange(1, 1 + STEPS).reshape(-1, *[1] * params[name].ndim)
    law = _law.coasting_ratio(n, 0.9, 0.95, 5, epsilon / root[name])
    np.testing.assert_allclose(
      coasted.moved[name], last[name] * law.sum(0), rtol=1e-12
    )


def test_one_scalar_parameter():
  optimizer = optax.adam(0.02, b2=0.95, eps=0.0)
  params = 1.0  # not even an array
  updates, state = optimizer.update(
    jnp.float64(0.3), optimizer.init(jnp.float64(params)), params
  )
  coasted = _coast.coast(optimizer, state, params, 9)
  law = _law.coasting_ratio(np.arange(1, 10), 0.9, 0.95, 1)
  np.testing.assert_allclose(coasted.norms / abs(updates), law, rtol=1e-12)
  np.testing.assert_allclose(coasted.params, 1.0 + coasted.moved, rtol=1e-14)


@pytest.mark.parametrize('masked', [False, True])
def test_adamw_is_adam_and_decay_apart(masked):
  rate, decay = 0.02, 0.7
  mask = {'matrix': True, 'vector': False, 'scalar': True}
  optimizer = optax.adamw(
    rate, weight_decay=decay, mask=mask if masked else None
  )
  params, state, _ = trained(optimizer)
  coasted = jitted(optimizer)(state, params)
  _, bare, _ = trained(optax.adam(rate))  # the same gradients and moments
  steps, _, _ = looped(optax.adam(rate), bare, params)
  close(coasted.moved, total(steps))
  np.testing.assert_allclose(
    coasted.norms, [global_norm(u) for u in steps], rtol=1e-12
  )
  for name, start in params.items():
    kept = 1 - rate * decay * (mask[name] or not masked)
    end = start * kept**STEPS + sum(
      u[name] * kept ** (STEPS - 1 - k) for k, u in enumerate(steps)
    )
    np.testing.assert_allclose(coasted.params[name], end, rtol=1e-12)
    np.testing.assert_allclose(
      coasted.decayed[name],
      end - start - sum(u[name] for u in steps),
      rtol=1e-10,
      atol=1e-14,
    )
    if name == 'vector' and masked:
      assert not np.any(coasted.decayed[name])


@pytest.mark.parametrize('nesterov', [False, True])
def test_heavy_ball_is_a_geometric_series(nesterov):
  optimizer = optax.sgd(0.1, momentum=0.8, nesterov=nesterov)
  params, state, _ = trained(optimizer)
  coasted = jitted(optimizer)(state, params)
  powers = 0.8 ** np.arange(1 + nesterov, 1 + nesterov + STEPS)
  trace = state[0].trace
  norms = 0.1 * powers * global_norm(trace)
  np.testing.assert_allclose(coasted.norms, norms, rtol=1e-12)
  close(coasted.moved, jax.tree.map(lambda t: -0.1 * t * powers.sum(), trace))
  assert not any(np.any(x) for x in jax.tree.leaves(coasted.decayed))


def test_lion_keeps_its_step():
  rate, decay = 0.01, 0.3
  optimizer = optax.lion(rate, weight_decay=decay)
  params, state, _ = trained(optimizer)
  coasted = jitted(optimizer)(state, params)
  count = sum(x.size for x in jax.tree.leaves(params))
  np.testing.assert_allclose(
    coasted.norms, np.full(STEPS, rate * np.sqrt(count)), rtol=1e-12
  )
  close(
    coasted.moved,
    jax.tree.map(lambda m: -rate * STEPS * jnp.sign(m), state[0].mu),
  )


@pytest.mark.parametrize('decay', [0.0, 0.7])
def test_schedule_free_goes_on_to_what_it_averages(decay):
  """Of `y`, `z` and `x` by hand; what decays is told apart at every step."""
  rate, b1, live = 0.05, 0.8, 7
  base = optax.chain(optax.add_decayed_weights(decay), optax.sgd(rate))
  optimizer = optax.contrib.schedule_free(base, rate, b1)
  params, state, _ = trained(optimizer, live)
  coasted = jitted(optimizer)(state, params)
  for name in params:
    y, z = params[name], state.z[name]
    moved = decayed = 0.0
    for n in range(1, 1 + STEPS):
      c = 1 / (live + n)
      moved += c * (z - y)
      fresh = -rate * decay * y
      decayed += (b1 * c + 1 - b1) * fresh
      x = (1 - c) * (y - (1 - b1) * z) / b1 + c * (z + fresh)
      z = z + fresh
      y = b1 * x + (1 - b1) * z
    for got, wanted in (
      (coasted.moved, moved),
      (coasted.decayed, decayed),
      (coasted.params, y),
    ):
      np.testing.assert_allclose(got[name], wanted, rtol=1e-10, atol=1e-14)
    if not decay:
      way = (state.z[name] - params[name]) * STEPS / (live + STEPS)
      np.testing.assert_allclose(coasted.moved[name], way, rtol=1e-10)


def test_schedule_free_with_a_copy_in_half_precision_coasts():
  """The copy differs from the parameters by its rounding too, as it moves."""
  optimizer = optax.contrib.schedule_free(
    optax.sgd(0.05), 0.05, state_dtype=jnp.bfloat16
  )
  params, state, _ = trained(optimizer)
  assert state.z['vector'].dtype == jnp.bfloat16
  coasted = jitted(optimizer)(state, params)
  way = jax.tree.map(jnp.add, coasted.moved, coasted.decayed)
  path, _, _ = looped(optimizer, state, params)
  close(way, total(path), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize('optimizer', [optax.rmsprop(0.1), optax.sgd(0.1)])
def test_without_momentum_nothing_moves(optimizer):
  params, state, _ = trained(optimizer)
  coasted = jitted(optimizer)(state, params)
  np.testing.assert_array_equal(coasted.norms, np.zeros(STEPS))
  close(coasted.params, params, rtol=0, atol=0)


clip_and_decay = optax.chain(
  optax.clip_by_global_norm(1.0),
  optax.scale_by_adam(),
  optax.masked(
    optax.add_decayed_weights(0.1),
    {'matrix': True, 'vector': True, 'scalar': False},
  ),
  optax.scale(-0.1),
)
falling = optax.linear_schedule(0.1, 0.0, 8)  # 0 after three of six
OPTIMIZERS = {
  'nadam': optax.nadam(0.1),
  'amsgrad': optax.amsgrad(0.1),
  'lamb': optax.lamb(0.1, weight_decay=0.1),
  'adafactor': optax.adafactor(
    0.1, min_dim_size_to_factor=2, momentum=0.9, weight_decay_rate=0.1
  ),
  'muon': optax.contrib.muon(0.1, weight_decay=0.1),
  'averaged': optax.contrib.schedule_free(
    optax.adamw(0.1, b1=0.0, weight_decay=0.1), 0.1
  ),
  # Found where it is wrapped, too.
  'averaged, injected': optax.inject_hyperparams(
    optax.contrib.schedule_free_sgd
  )(0.1, weight_decay=0.1),
  'averaged, every second': optax.MultiSteps(
    optax.chain(
      optax.clip(1.0),
      optax.contrib.schedule_free(optax.sgd(0.1), 0.1),
      optax.add_decayed_weights(-0.01),
    ),
    2,
  ),
  'chain': clip_and_decay,
  'schedule': optax.adamw(falling, weight_decay=0.1),
  'lion, schedule': optax.lion(falling, weight_decay=0.0),
  'injected': optax.inject_hyperparams(optax.adamw)(0.1, weight_decay=0.2),
  'injected schedule': optax.inject_hyperparams(optax.sgd)(
    falling, momentum=0.9
  ),
  'every second': optax.MultiSteps(optax.adamw(0.1, weight_decay=0.2), 2),
  'by kind': optax.multi_transform(
    {'fast': optax.adam(0.1), 'slow': optax.sgd(0.01, momentum=0.5)},
    {'matrix': 'fast', 'vector': 'slow', 'scalar': 'fast'},
  ),
}
NO_DECAY = (
  'nadam',
  'amsgrad',
  'lion, schedule',
  'injected schedule',
  'by kind',
)


@pytest.mark.parametrize('name', OPTIMIZERS)
def test_it_is_the_loop_over_zero_gradients(name):
  optimizer = OPTIMIZERS[name]
  params, state, _ = trained(optimizer)
  coasted = jitted(optimizer)(state, params)
  path, end, after = looped(optimizer, state, params)
  assert any(np.any(u) for u in jax.tree.leaves(path))
  close(coasted.params, end, rtol=1e-9)
  close(coasted.state, after, rtol=1e-9)
  way = jax.tree.map(jnp.add, coasted.moved, coasted.decayed)
  close(way, total(path), rtol=1e-9, atol=1e-12)
  assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(coasted))
  decays = any(np.any(x) for x in jax.tree.leaves(coasted.decayed))
  assert decays == (name not in NO_DECAY)
  if not decays:
    norms = [global_norm(u) for u in path]
    np.testing.assert_allclose(coasted.norms, norms, rtol=1e-9)
  if 'schedule' in name:
    assert np.all(coasted.norms[:3] > 0) and not np.any(coasted.norms[3:])


@pytest.mark.parametrize('name', ['injected', 'adafactor', 'muon'])
def test_decay_apart_is_the_optimizer_without_decay(name):
  """`moved` as if the decay were 0; the parameters do not feed back."""
  factored = functools.partial(
    optax.adafactor,
    0.1,
    min_dim_size_to_factor=2,
    momentum=0.9,
    multiply_by_parameter_scale=False,
  )
  optimizer, without = {
    'injected': (OPTIMIZERS['injected'], optax.adam(0.1)),
    'adafactor': (factored(weight_decay_rate=0.1), factored()),
    'muon': (OPTIMIZERS['muon'], optax.contrib.muon(0.1)),
  }[name]
  params, state, _ = trained(optimizer)
  _, bare, _ = trained(without)  # the same gradients, so the same moments
  coasted = jitted(optimizer)(state, params)
  path, _, _ = looped(without, bare, params)
  close(coasted.moved, total(path), rtol=1e-9, atol=1e-12)
  np.testing.assert_allclose(
    coasted.norms, [global_norm(u) for u in path], rtol=1e-9
  )


def test_an_accumulator_that_is_half_full_still_acts():
  optimizer = optax.MultiSteps(optax.sgd(0.1), 2)
  params, state, _ = trained(optimizer, live_steps=1)
  coasted = jitted(optimizer)(state, params)
  close(
    coasted.moved,
    jax.tree.map(lambda g: -0.1 * g / 2, tree(1)),
    rtol=1e-6,  # optax accumulates in float32
  )
  assert coasted.norms[0] > 0 and not np.any(coasted.norms[1:])


def test_eager_is_jitted_and_the_length_is_the_callers():
  optimizer = OPTIMIZERS['chain']
  params, state, _ = trained(optimizer)
  close(
    _coast.coast(optimizer, state, params, STEPS),
    jitted(optimizer)(state, params),
  )
  nowhere = _coast.coast(optimizer, state, params, np.int64(0))
  assert nowhere.norms.shape == (0,) and nowhere.norms.dtype == np.float64
  zeros = jax.tree.map(jnp.zeros_like, params)
  close(nowhere[:2], (zeros, zeros))
  close(nowhere[3:], (params, state))
