"""E7: whether the value of a surrogate loss says how training goes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax import losses
from grpo_jax.lab.studies import claims
from grpo_jax.lab.studies.claims import FONTANA
from grpo_jax.lab.studies.claims import Claim
from grpo_jax.lab.studies.claims import Experiment
from grpo_jax.lab.studies.claims import Measured
from grpo_jax.lab.studies.papers import _settings

_STEPS, _GROUP, _RATE, _LONGEST, _SEEDS = 150, 8, 20.0, 12, 5
_METHODS = {
  'grpo': lambda: losses.methods.grpo(kl_coefficient=0),
  'dr_grpo': lambda: losses.methods.dr_grpo(_LONGEST),
}
WORLDS = 'right is long', 'right is short'

CLAIMS = {
  'grpo_zero': Claim(
    'The loss of GRPO is 0 at the first update of every rollout (largest '
    'absolute value of a training).',
    f'{FONTANA}, prop. 4, case 1',
    high=1e-12,
  ),
  'grpo_learns': Claim(
    'While the loss of GRPO is 0, the expected reward rises (least rise of a '
    'training).',
    'derived',
    0.1,
  ),
  'lengths': Claim(
    'The loss of Dr. GRPO at the first update of every rollout is '
    '-Cov(r, L) / L_max (largest |difference|, over the largest |loss|).',
    f'{FONTANA}, prop. 4, case 2',
    high=1e-9,
  ),
  'long_right': Claim(
    'Where right answers are long, the loss of Dr. GRPO rises while the '
    'policy improves (correlation of loss and expected reward).',
    'derived',
    0.3,
  ),
  'short_right': Claim(
    'Where right answers are short, the loss of Dr. GRPO falls while the '
    'policy improves (correlation of loss and expected reward).',
    'derived',
    high=-0.3,
  ),
}


def run(full: bool = False) -> dict[str, Any]:
  """Trains a bandit whose answers differ in length, one update a rollout.

  Args:
    full: Not used.

  Returns:
    By method, for worlds, seeds and steps: `loss`, `value` (expected reward),
    `covariance` (of reward and length, mean over groups).
  """
  del full
  names = 'loss', 'value', 'covariance'
  with jax.enable_x64(True):
    train = _settings.jit(
      lambda sign, seed: {name: _train(name, sign, seed) for name in _METHODS}
    )
    each = jax.vmap(jax.vmap(train, (None, 0)), (0, None))
    found = each(np.array([1.0, -1.0]), np.arange(_SEEDS))
    return {
      method: {
        name: np.asarray(one).tolist()
        for name, one in zip(names, found[method], strict=True)
      }
      for method in _METHODS
    }


def _train(name, sign, seed):
  """Loss, value and covariance at every step, f64[T] each."""
  method = _METHODS[name]()
  reward = np.random.default_rng(0).uniform(size=(8, 6))
  middle = _LONGEST / 2
  long = jnp.round(middle + sign * (middle - 1) * (2 * reward - 1))
  bandit = _settings.tabular(reward, long.astype(jnp.int32), _LONGEST)
  key = jax.random.key(seed)

  def step(theta, t):
    uniform = jax.random.uniform(jax.random.fold_in(key, t), (8, _GROUP))
    answer = _settings.sample(bandit, theta, uniform)
    batch, state = _settings.rollout(method, bandit, theta, answer)
    loss, gradient = _settings.loss_and_gradient(
      method, bandit, theta, answer, batch, state
    )
    length = jnp.take_along_axis(bandit.length, answer, 1)
    earned = jnp.take_along_axis(bandit.reward, answer, 1)
    centred = earned - earned.mean(1, keepdims=True)
    seen = loss, _settings.value(bandit, theta), jnp.mean(centred * length)
    return theta - _RATE * gradient, seen

  start = jnp.zeros(bandit.reward.size)
  return jax.lax.scan(step, start, jnp.arange(_STEPS))[1]


def _correlations(numbers, method, one, other):
  """Correlations over the steps, f64[worlds, seeds]."""
  x, y = (np.array(numbers[method][name]) for name in (one, other))
  x, y = (z - z.mean(-1, keepdims=True) for z in (x, y))
  return np.sum(x * y, -1) / np.sqrt(np.sum(x * x, -1) * np.sum(y * y, -1))


def measure(numbers) -> dict[str, Measured]:
  """See `Experiment`."""
  value = np.array(numbers['grpo']['value'])
  loss, covariance = (
    np.array(numbers['dr_grpo'][name]) for name in ('loss', 'covariance')
  )
  off = np.abs(loss + covariance / _LONGEST).max() / np.abs(loss).max()
  progress = _correlations(numbers, 'dr_grpo', 'loss', 'value')
  return {
    'grpo_zero': Measured(float(np.abs(numbers['grpo']['loss']).max())),
    'grpo_learns': Measured(float((value[..., -1] - value[..., 0]).min())),
    'lengths': Measured(float(off)),
    'long_right': claims.over_seeds(progress[0].tolist()),
    'short_right': claims.over_seeds(progress[1].tolist()),
  }


def draw(numbers, figure, colors) -> str:
  """See `Experiment`."""
  left, right = figure.subplots(1, 2)
  for world, (text, name) in enumerate(zip(WORLDS, ('second', 'fourth'))):
    loss = np.array(numbers['dr_grpo']['loss'])[world].T
    right.plot(loss, color=colors[name], alpha=0.25, lw=1)
    right.plot(loss.mean(1), color=colors[name], label=f'Dr. GRPO, {text}')
  zero = np.array(numbers['grpo']['loss'])[0].mean(0)
  right.plot(zero, color=colors['first'], label='GRPO')
  for method, name in (('grpo', 'first'), ('dr_grpo', 'second')):
    value = np.array(numbers[method]['value'])[0].mean(0)
    left.plot(value, color=colors[name], label=method)
  left.set(xlabel='rollouts', ylabel='expected reward')
  right.set(xlabel='rollouts', ylabel='value of the loss', ylim=(-0.08, 0.11))
  left.legend(loc='lower right')
  right.legend(loc='upper right')
  found = measure(numbers)
  return (
    f"GRPO's loss is at most {found['grpo_zero'].mean:.0e} while its reward "
    f"rises by {found['grpo_learns'].mean:.2f}; Dr. GRPO's correlates with the "
    f'reward by {found["long_right"].mean:+.2f} or '
    f'{found["short_right"].mean:+.2f}'
  )


EXPERIMENT = Experiment(
  'E7', 'the value of the loss', CLAIMS, run, measure, draw
)
