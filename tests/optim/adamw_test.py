"""AdamW against a loop in NumPy; the schedule against closed forms."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from grpo_jax import optim

pytestmark = pytest.mark.quick


def reference(
  params, gradients, rate, b1=0.9, b2=0.999, epsilon=1e-8, weight_decay=0.0,
  clip_norm=1.0,
):  # fmt: skip
  """AdamW (arXiv:1711.05101) after a clip of the global norm, in float64."""
  params = {name: np.array(value, float) for name, value in params.items()}
  first = {name: np.zeros_like(value) for name, value in params.items()}
  second = {name: np.zeros_like(value) for name, value in params.items()}
  for step, gradient in enumerate(gradients, start=1):
    norm = np.sqrt(sum(np.sum(np.square(g)) for g in gradient.values()))
    shrink = min(1.0, (clip_norm or np.inf) / norm)
    for name, value in params.items():
      g = shrink * gradient[name]
      first[name] = b1 * first[name] + (1 - b1) * g
      second[name] = b2 * second[name] + (1 - b2) * np.square(g)
      root = np.sqrt(second[name] / (1 - b2**step))
      move = first[name] / (1 - b1**step) / (root + epsilon)
      decay = weight_decay * value
      params[name] = value - rate(step - 1) * (move + decay)
  return params


def problem(scale=1.0):
  """A matrix, a vector and a scalar; gradients of norms 4, 1/2 and 2."""
  rng = np.random.default_rng(0)
  shapes = {'matrix': (2, 3), 'vector': (3,), 'scalar': ()}
  params = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
  gradients = []
  for norm in (4.0, 0.5, 2.0):
    g = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    total = np.sqrt(sum(np.sum(np.square(x)) for x in g.values()))
    gradients.append({k: scale * norm / total * x for k, x in g.items()})
  return params, gradients


def descend(tx, params, gradients, **extra):
  params = {name: jnp.float32(value) for name, value in params.items()}
  state = tx.init(params)
  for gradient in gradients:
    gradient = {name: jnp.float32(value) for name, value in gradient.items()}
    updates, state = tx.update(gradient, state, params, **extra)
    params = optax.apply_updates(params, updates)
  return params


@pytest.mark.parametrize(
  'arguments',
  [
    {},
    {'clip_norm': None},
    {'clip_norm': 0.1},
    {'weight_decay': 0.3},
    {'b1': 0.5, 'b2': 0.8, 'epsilon': 0.1},
  ],
  ids=['defaults', 'no-clip', 'clip', 'decay', 'moments'],
)
def test_adamw_matches_the_loop(arguments):
  params, gradients = problem()
  result = descend(optim.adamw(0.1, **arguments), params, gradients)
  expected = reference(params, gradients, lambda step: 0.1, **arguments)
  for name, value in expected.items():
    np.testing.assert_allclose(result[name], value, rtol=1e-5, atol=1e-6)


def test_the_default_epsilon_matters_to_tiny_gradients():
  params, gradients = problem(scale=1e-8)
  result = descend(optim.adamw(0.1), params, gradients)
  expected = reference(params, gradients, lambda step: 0.1)
  np.testing.assert_allclose(result['matrix'], expected['matrix'], rtol=1e-4)


def test_adamw_follows_a_schedule_and_ignores_extra_arguments():
  params, gradients = problem()
  schedule = optim.learning_rate(0.1, 2, 'linear', 4)
  tx = optim.adamw(schedule)
  result = descend(tx, params, gradients, first_of_rollout=True)
  expected = reference(params, gradients, schedule)
  np.testing.assert_allclose(result['matrix'], expected['matrix'], rtol=1e-5)


@pytest.mark.parametrize(
  'b1, b2',
  [(5.0, -1.0), (0.9, -1e-9), (-0.1, 0.0), (1.0, 0.0), (0.9, 1.0), (1.0, 0.9),
   (1.0, 1.0), (float('nan'), 0.9), (0.9, float('nan'))],
)  # fmt: skip
def test_betas_outside_their_range_are_refused(b1, b2):
  with pytest.raises(ValueError) as caught:
    optim.adamw(1e-3, b1=b1, b2=b2)
  assert str(caught.value) == (
    f'adamw got b1={b1} and b2={b2}; give for each at least 0 and less than 1.'
  )


def test_betas_of_zero_are_allowed():
  params, gradients = problem()
  result = descend(optim.adamw(0.1, b1=0.0, b2=0.0), params, gradients)
  expected = reference(params, gradients, lambda step: 0.1, b1=0.0, b2=0.0)
  np.testing.assert_allclose(result['matrix'], expected['matrix'], rtol=1e-5)


@pytest.mark.parametrize(
  'arguments, expected',
  [
    ((), [2, 2, 2, 2, 2]),
    ((2,), [0, 1, 2, 2, 2]),
    ((0, 'linear', 4), [2, 1.5, 1, 0.5, 0]),
    ((0, 'cosine', 4), [2, 1 + 0.5**0.5, 1, 1 - 0.5**0.5, 0]),
    ((2, 'cosine', 4), [0, 1, 2, 1, 0]),
    ((3, 'linear', 4), [0, 2 / 3, 4 / 3, 2, 0]),
    ((0, 'warmup-stable-decay', 4, 0.5), [2, 2, 2, 1, 0]),
    ((1, 'warmup-stable-decay', 4, 0.5), [0, 2, 2, 1, 0]),
    ((2, 'warmup-stable-decay', 4, 0.01), [0, 1, 2, 2, 0]),
  ],
)
def test_learning_rate(arguments, expected):
  schedule = optim.learning_rate(2.0, *arguments)
  rates = [float(schedule(step)) for step in range(5)]
  np.testing.assert_allclose(rates, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
  'arguments, words',
  [
    ({'decay': 'square'}, "decay='square'"),
    ({'decay': 'linear'}, 'total_steps=0'),
    ({'decay': 'warmup-stable-decay'}, 'a warmup-stable-decay decay needs'),
    ({'decay_share': 0.0}, 'decay_share=0.0'),
    ({'decay_share': 1.5}, 'decay_share=1.5; give at most 1'),
    (
      {'decay': 'cosine', 'warmup_steps': 4, 'total_steps': 4},
      'warmup_steps=4',
    ),
  ],
)
def test_a_decay_without_steps_is_refused(arguments, words):
  with pytest.raises(ValueError, match=words):
    optim.learning_rate(1.0, **arguments)
