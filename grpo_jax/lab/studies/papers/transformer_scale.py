"""E4 on a transformer: how nearly AdamW is blind to the scale of rewards.

From one policy the transformer of `configs/arithmetic.py` takes the same four
updates under every factor on its rewards: on the same rollouts, with AdamW as
in that config. What differs is the factor, Adam's epsilon, and whether the norm
of the gradient is clipped. Everything is float32, as in a run.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from grpo_jax import optim
from grpo_jax.lab.studies.claims import FONTANA
from grpo_jax.lab.studies.claims import Claim
from grpo_jax.lab.studies.claims import Experiment
from grpo_jax.lab.studies.claims import Measured
from grpo_jax.lab.studies.figures import SERIES
from grpo_jax.lab.studies.papers import _arithmetic
from grpo_jax.losses import contrib

FACTORS = 1e-4, 1e-2, 1.0, 1e2, 1e4
_UPDATES = 4
_NEVER = 1e30  # a norm of the gradient that is never reached
ARMS = {  # epsilon, largest norm
  '1e-15': (1e-15, _NEVER),
  '1e-08': (1e-8, _NEVER),
  '1e-05': (1e-5, _NEVER),
  'clipped': (1e-15, 1.0),
}

CLAIMS = {
  'tiny': Claim(
    'On a transformer, with epsilon 1e-15, factors of 1e-4 to 1e4 on the '
    'rewards do not change the distance the parameters move in 4 updates, nor '
    'its direction (largest change / distance).',
    f'{FONTANA}, prop. 2',
    high=0.01,
  ),
  'usual_up': Claim(
    'On a transformer, with epsilon 1e-8, factors up to 1e4 on the rewards do '
    'not change the distance the parameters move, nor its direction (largest '
    'change / distance).',
    f'{FONTANA}, prop. 2',
    high=0.01,
  ),
  'usual_down': Claim(
    'On a transformer, with epsilon 1e-8, factors down to 1e-4 on the rewards '
    'do not change the distance the parameters move, nor its direction '
    '(largest change / distance).',
    f'{FONTANA}, prop. 2',
    high=0.01,
  ),
  'large': Claim(
    'On a transformer, with epsilon 1e-5, a factor of 1e-4 on the rewards '
    'takes more than half of the distance the parameters move (what is left / '
    'distance).',
    'derived',
    high=0.5,
  ),
  'clipped': Claim(
    'On a transformer, with epsilon 1e-15 and the norm of the gradient '
    'clipped at 1, which acts at some scales only, factors of 1e-4 to 1e4 on '
    'the rewards do not change the distance the parameters move, nor its '
    'direction (largest change / distance).',
    f'{FONTANA}, prop. 2, which has no clipping',
    high=0.01,
  ),
}


def run(full: bool = False) -> dict[str, Any]:
  """Takes the updates under every factor and arm.

  Args:
    full: Begin with a policy that is warmed up, and with its own rewards.

  Returns:
    For every arm, by factor: `change`, the norm of the difference between where
    the parameters move under this factor and under 1, over the distance under
    1; `way`, the distance over the same. `gradient`: quantiles of the absolute
    entries that are not 0 of the first gradient, at factor 1.
  """
  given = _arithmetic.rollouts(_UPDATES, warm=full)
  take = jax.jit(lambda *arm: _take(given, *arm))
  ways = {
    name: [np.asarray(take(factor, *arm)[0]) for factor in FACTORS]
    for name, arm in ARMS.items()
  }
  first = np.abs(np.asarray(take(1.0, *ARMS['1e-08'])[1]))
  change, way = {}, {}
  for name, of_arm in ways.items():
    one = of_arm[FACTORS.index(1.0)]
    size = np.linalg.norm(one)
    change[name] = [float(np.linalg.norm(x - one) / size) for x in of_arm]
    way[name] = [float(np.linalg.norm(x) / size) for x in of_arm]
  shares = (0.05, 0.25, 0.5, 0.75, 0.95)
  return {
    'factors': FACTORS,
    'change': change,
    'way': way,
    'shares': shares,
    'gradient': np.quantile(first[first > 0], shares).tolist(),
  }


def _take(given: _arithmetic.Rollouts, factor, epsilon, norm):
  """Where `_UPDATES` updates move, f32[D], and the first gradient, f32[D]."""
  method = contrib.grpo_without_std(kl_coefficient=0.0)
  adam = optim.adamw(
    3e-4, b2=0.99, epsilon=epsilon, weight_decay=0.01, clip_norm=norm
  )

  def update(carry, rollout):
    theta, state = carry
    layout, mask, reward = rollout
    # All rollouts were drawn by the first policy, so that every factor sees the
    # same tokens.
    old = given.score(given.params, layout)
    batch, credited = _arithmetic.credited(method, mask, factor * reward, old)

    def loss(theta):
      logp = given.score(theta, layout)
      return _arithmetic.loss_of(method, logp, batch, credited)

    gradient = jax.grad(loss)(theta)
    step, state = adam.update(gradient, state, theta)
    return (optax.apply_updates(theta, step), state), gradient

  rollouts = given.layout, given.mask, given.reward
  (theta, _), gradients = jax.lax.scan(
    update, (given.params, adam.init(given.params)), rollouts
  )
  return jnp.asarray(theta) - given.params, gradients[0]


def measure(numbers) -> dict[str, Measured]:
  """See `Experiment`."""
  change, factors = numbers['change'], np.array(numbers['factors'])
  usual = np.array(change['1e-08'])
  least = int(factors.argmin())
  e = 1e-8 / (factors[least] * np.array(numbers['gradient']))
  return {
    'tiny': Measured(max(change['1e-15'])),
    'usual_up': Measured(float(usual[factors > 1].max())),
    'usual_down': Measured(
      float(usual[factors < 1].max()),
      example='Smallest case: the first step, where epsilon / (phi sqrt(v)) is '
      f'{e[2]:.2g} for the median entry.',
    ),
    'large': Measured(numbers['way']['1e-05'][least]),
    'clipped': Measured(
      max(change['clipped']),
      example=f'Smallest case: {_UPDATES} updates; a norm below 1 keeps how '
      'large the gradients are beside each other.',
    ),
  }


def draw(numbers, figure, colors) -> str:
  """See `Experiment`."""
  left, right = figure.subplots(1, 2)
  labels = {'clipped': 'epsilon 1e-15, norm clipped at 1'}
  for (name, change), color in zip(numbers['change'].items(), SERIES):
    given = dict(color=colors[color], label=labels.get(name, f'epsilon {name}'))
    left.plot(numbers['factors'], np.maximum(change, 1e-9), 'o-', ms=4, **given)
    right.plot(numbers['factors'], numbers['way'][name], 'o-', ms=4, **given)
  for axes in (left, right):
    axes.set(xscale='log', xlabel='factor on all rewards')
  left.set(yscale='log')
  left.set_ylabel('change / distance (factor 1)')
  right.set_ylabel('distance / distance (factor 1)')
  right.legend()
  found = measure(numbers)
  return (
    'AdamW on a transformer: rewards of 1e-4 change where the parameters move '
    f'by {found["usual_down"].mean:.1%} of that distance at epsilon 1e-8, and '
    f'leave {found["large"].mean:.1%} of it at 1e-5'
  )


EXPERIMENT = Experiment(
  'E4b', 'the scale of the rewards of a transformer',
  CLAIMS, run, measure, draw,
)  # fmt: skip
