"""Experiments on coasting: what Adam does where the gradient has become zero.

- E1, `coasting_ratio`: how far it still moves a coordinate.
- E2, `coasting_distance`: how far past its bound a clipped probability coasts.
- E3, `momentum_split`: what moves clipped samples outward, old momentum or the
  new gradient.
"""

from typing import Any
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax

from grpo_jax import losses
from grpo_jax import optim
from grpo_jax.lab.studies import claims
from grpo_jax.lab.studies.claims import FONTANA
from grpo_jax.lab.studies.claims import Claim
from grpo_jax.lab.studies.claims import Experiment
from grpo_jax.lab.studies.claims import Measured
from grpo_jax.lab.studies.figures import SERIES
from grpo_jax.lab.studies.papers import bandits

_HIGH = 1.2  # the bound of the ratio

# E1: how far Adam still moves a coordinate whose gradient has become zero.

BETAS_RATIO = (0.9, 0.95), (0.9, 0.99), (0.9, 0.999), (0.9, 0.8)
LIVE = 1, 2, 5, 28, 20_000  # steps with a gradient before the coast
_COORDINATES, _STEPS_RATIO = 16, 400

_RATIO_CLAIMS = {
  'formula': Claim(
    'Equation 36 is exact for random gradients, for all betas and T '
    '(largest relative error).',
    f'{FONTANA}, eq. 36',
    high=1e-12,
  ),
  'five_steps': Claim(
    'With betas (0.9, 0.95) the step after five clipped ones is 0.66 of the '
    'last live one.',
    f'{FONTANA}, section on momentum',
    0.655,
    0.665,
  ),
  'five_steps_right': Claim(
    'With betas (0.9, 0.95) the step after five clipped ones is 0.6713 of the '
    'last live one.',
    'derived',
    0.67125,
    0.67135,
  ),
  'distance': Claim(
    'With betas (0.9, 0.95) the coast adds up to 12.05 times the last step '
    'before clipping.',
    'derived',
    12.045,
    12.055,
  ),
  'distance_999': Claim(
    'With betas (0.9, 0.999) the coast adds up to 9.05 times the last step '
    'before clipping.',
    'derived',
    9.045,
    9.055,
  ),
  'grows': Claim(
    'If b2 < b1^2 the step grows once the gradient is zero: betas (0.9, 0.8), '
    'step 16 over step 1.',
    'derived',
    1 + 1e-6,
  ),
}


def _run_ratio() -> dict[str, Any]:
  """Runs Adam on random gradients, then on zeros.

  Returns:
    The sizes of the steps relative to the last live one, `sizes[b][t][k]`, for
    betas, live steps and k = 1, 2, ... clipped steps.
  """
  sizes = bandits.over_betas(_coast_ratio, BETAS_RATIO, LIVE)
  return {'betas': BETAS_RATIO, 'live': LIVE, 'sizes': sizes.tolist()}


def _coast_ratio(b1, b2, live):
  """Sizes of the steps of a coast after `live` random gradients, f64[K]."""
  adam = optax.scale_by_adam(b1, b2, eps=0.0)
  params = jnp.zeros(_COORDINATES)

  def step(i, carry):
    _, state = carry
    # Mean 1 and deviation 1: the sign is not constant.
    key = jax.random.fold_in(jax.random.key(0), i)
    gradient = 1 + jax.random.normal(key, params.shape)
    return adam.update(gradient, state, params)

  last, state = jax.lax.fori_loop(0, live, step, (params, adam.init(params)))
  norms = optim.coast(adam, state, params, _STEPS_RATIO).norms
  return norms / jnp.linalg.norm(last)


def _law(numbers) -> np.ndarray:
  """Equation 36 at the numbers' betas, live steps and clipped steps."""
  b1, b2 = np.array(numbers['betas']).T[..., None, None]
  live = np.array(numbers['live'])[:, None]
  steps = np.arange(1, np.shape(numbers['sizes'])[-1] + 1)
  with warnings.catch_warnings():
    # The last pair of betas is meant to be one that the law warns of.
    warnings.simplefilter('ignore', UserWarning)
    return optim.coasting_ratio(steps, b1, b2, live)


def _measure_ratio(numbers) -> dict[str, Measured]:
  sizes = np.array(numbers['sizes'])
  long = sizes[:, -1]  # after the longest history
  return {
    'formula': Measured(float(np.abs(sizes / _law(numbers) - 1).max())),
    'five_steps': Measured(
      float(long[0, 4]),
      example=f'Smallest case: {0.9**5 / 0.95**2.5:.4f} = 0.9^5 / 0.95^2.5.',
    ),
    'five_steps_right': Measured(float(long[0, 4])),
    'distance': Measured(float(long[0].sum())),
    'distance_999': Measured(float(long[2].sum())),
    'grows': Measured(float(long[3, 15] / long[3, 0])),
  }


def _draw_ratio(numbers, found, figure, colors) -> str:
  axes, law = figure.subplots(), _law(numbers)
  steps = np.arange(1, 41)
  for i, (name, betas) in enumerate(zip(SERIES, numbers['betas'])):
    sizes = np.array(numbers['sizes'][i][-1])
    axes.plot(steps, law[i, -1, :40], color=colors[name], label=f'{betas}')
    axes.plot(steps, sizes[:40], 'o', ms=4, color=colors[name])
  axes.axhline(0.66, color=colors['faint'], ls=':', lw=1)
  axes.annotate(
    "the paper's 0.66 at 5 steps",
    (5, 0.66),
    (9, 0.78),
    arrowprops={'arrowstyle': '-', 'color': colors['faint']},
  )
  axes.set(
    yscale='log',
    xlabel='steps without a gradient',
    ylim=(0.01, 2),
    ylabel='size of the step / last live step',
  )
  axes.legend(title='betas; line: law, dots: Adam')
  return (
    f"Adam's coast is off the law by {found['formula'].mean:.0e}; after five "
    f'clipped steps {found["five_steps"].mean:.4f} of a step is left'
  )


# E2: how far past its bound a clipped probability coasts.

RATES = 0.005, 0.01, 0.02, 0.05
BETAS_DISTANCE = (0.9, 0.95), (0.9, 0.99), (0.9, 0.999)
_OLD, _STEPS_DISTANCE = 0.3, 120

_DISTANCE_CLAIMS = {
  'law': Claim(
    'A clipped probability ends where the last live step times the coasting '
    'law puts it (largest relative error of the ratio).',
    f'derived from {FONTANA}, eq. 36',
    high=1e-6,
  ),
  'collapse': Claim(
    'The distance that the logit moves after the crossing, over (rate x law), '
    'is the size of the last live step, about 1 for a gradient of one sign '
    '(least over rates and betas).',
    'derived',
    0.9,
    1.1,
  ),
  'adam': Claim(
    'Adam(0.9, 0.95) at rate 0.02 ends beyond the bound of 1.2, at 1.398.',
    'derived',
    1.3975,
    1.3985,
  ),
  'sgd': Claim(
    'SGD stops at its first step across the bound (distance that the logit '
    'moves after that step).',
    f'derived from {FONTANA}, prop. 3',
    0,
    0,
  ),
  'rmsprop': Claim(
    'RMSProp, which has no first moment, stops at its first step across the '
    'bound (distance that the logit moves after that step).',
    'derived',
    0,
    0,
  ),
  'momentum': Claim(
    'With SGD and momentum 0.9 the coast adds up to 9 times the last step '
    'before clipping.',
    'derived',
    8.99,
    9.01,
  ),
}


def _run_distance() -> dict[str, Any]:
  """Pushes one probability up until it is clipped, and 120 updates in all.

  Returns:
    For Adam `ratios[b][r][t]` of betas and rates; for the other optimizers
    `others[name][t]`. The ratio before the first update is the first.
  """
  paths = bandits.over_betas(
    lambda b1, b2, rate: _path(optax.adam(rate, b1, b2, eps=1e-300)),
    BETAS_DISTANCE,
    RATES,
  )
  with jax.enable_x64(True):
    others = jax.jit(
      lambda: {
        'sgd': _path(optax.sgd(0.02)),
        'rmsprop': _path(optax.rmsprop(0.02, 0.95, eps=1e-300)),
        'momentum': _path(optax.sgd(0.02, momentum=0.9)),
      }
    )()
  return {
    'betas': BETAS_DISTANCE,
    'rates': RATES,
    'ratios': paths.tolist(),
    'others': {name: np.asarray(x).tolist() for name, x in others.items()},
  }


def _path(optimizer) -> jax.Array:
  """The probability over the old one, before and after every update, f64[T]."""
  method = losses.chain(
    losses.use_reward(),
    losses.mean_over_tokens(),
    losses.ppo_clip(0.2, _HIGH - 1),
  )
  one = jnp.ones((1, 1, 1))
  batch, state = bandits.credited(
    method, one > 0, one[..., 0], logp_old=jnp.log(_OLD) * one
  )

  def loss(logit):
    logp = jax.nn.log_sigmoid(logit) * one
    return losses.surrogate_loss(method, logp, batch, state)[0]

  def step(carry, _):
    logit, memory = carry
    update, memory = optimizer.update(jax.grad(loss)(logit), memory)
    return (logit + update, memory), jax.nn.sigmoid(logit) / _OLD

  start = jnp.log(_OLD / (1 - _OLD))
  return jax.lax.scan(
    step, (start, optimizer.init(start)), length=_STEPS_DISTANCE
  )[1]


def _logit(ratio):
  p = np.asarray(ratio) * _OLD
  return np.log(p / (1 - p))


def _coast_distance(path) -> tuple[int, float, float]:
  """Live steps, the logit's last live step, and its way after that."""
  live = int(np.argmax(np.array(path) > _HIGH))  # the first that is clipped
  logit = _logit(path)
  return live, logit[live] - logit[live - 1], logit[-1] - logit[live]


def _coasts(numbers):
  """For every beta and rate: predicted ratio, measured ratio, way / law."""
  rows = []
  for betas, paths in zip(numbers['betas'], numbers['ratios'], strict=True):
    for rate, path in zip(numbers['rates'], paths, strict=True):
      live, last, way = _coast_distance(path)
      left = len(path) - 1 - live
      law = optim.coasting_steps(*betas, num_steps=left, live_steps=live)
      end = _logit(path[live]) + last * law
      rows.append(
        (
          1 / (1 + np.exp(-end)) / _OLD,
          path[-1],
          way / (rate * law),
          rate * law,
          way,
        )
      )
  return np.array(rows)


def _measure_distance(numbers) -> dict[str, Measured]:
  rows, others = _coasts(numbers), numbers['others']
  _, last, way = _coast_distance(others['momentum'])
  found = {
    'law': float(np.abs(rows[:, 0] / rows[:, 1] - 1).max()),
    'collapse': float(rows[:, 2].min()),
    'adam': numbers['ratios'][0][2][-1],
    'sgd': float(_coast_distance(others['sgd'])[2]),
    'rmsprop': float(_coast_distance(others['rmsprop'])[2]),
    'momentum': float(way / last),
  }
  return {name: Measured(value) for name, value in found.items()}


def _draw_distance(numbers, found, figure, colors) -> str:
  left, right = figure.subplots(1, 2)
  for path, name, label in (
    (numbers['ratios'][0][2], 'first', 'Adam (0.9, 0.95)'),
    (numbers['ratios'][2][2], 'third', 'Adam (0.9, 0.999)'),
    (numbers['others']['rmsprop'], 'fourth', 'RMSProp'),
    (numbers['others']['sgd'], 'second', 'SGD'),
  ):
    left.plot(path, color=colors[name], label=label)
  left.axhline(_HIGH, color=colors['faint'], ls=':')
  left.text(80, _HIGH - 0.012, 'bound', color=colors['faint'], va='top')
  left.set(
    xlabel='updates', title='rate 0.02', ylabel='probability / old probability'
  )
  left.legend()
  rows = _coasts(numbers)
  per = len(numbers['rates'])
  for i, (betas, name) in enumerate(
    zip(numbers['betas'], ('first', 'second', 'third'), strict=True)
  ):
    some = rows[i * per : (i + 1) * per]
    right.plot(
      some[:, 3], some[:, 4], 'o', color=colors[name], label=str(tuple(betas))
    )
  most = rows[:, 3].max()
  right.plot([0, most], [0, most], color=colors['faint'], lw=1, zorder=0)
  right.set(
    xlabel='rate x law',
    title='4 rates x 3 betas, one line',
    ylabel='distance of the logit after the crossing',
  )
  right.legend()
  return (
    f'Adam carries a clipped probability from 1.2 to {found["adam"].mean:.2f} '
    f'of its old value; the law is off by {found["law"].mean:.0e} at most'
  )


# E3: what moves clipped samples outward, old momentum or the new gradient.

UPDATES = 4, 16  # per rollout
_RATE, _ROLLOUTS, _GROUP, _LOW = 0.03, 60, 8, 0.8

_SPLIT_CLAIMS = {
  'carried': Claim(
    'Momentum carries clipped samples outward (mean change of the log-ratio by '
    'the carried part of a step, 16 updates a rollout).',
    f'{FONTANA}, prop. 3',
    0,
  ),
  'fresh': Claim(
    'The fresh gradient does not carry clipped samples outward (mean change '
    'of the log-ratio by the fresh part of a step, 16 updates a rollout).',
    'derived',
    high=0,
  ),
  'carried_4': Claim(
    'With 4 updates a rollout too, momentum carries clipped samples outward '
    '(mean change of the log-ratio by the carried part of a step).',
    f'{FONTANA}, prop. 3',
    0,
  ),
  'fresh_4': Claim(
    'With 4 updates a rollout too, the fresh gradient does not carry clipped '
    'samples outward (mean change of the log-ratio by the fresh part of a '
    'step).',
    'derived',
    high=0,
  ),
  'outward': Claim(
    'Most clipped samples go on outward (share of them, 16 updates a rollout).',
    'derived',
    0.5,
  ),
}


def _run_split(full: bool = False) -> dict[str, Any]:
  """Trains a policy with shared features, several updates per rollout.

  Args:
    full: 20 seeds in place of 5.

  Returns:
    By the number of updates, for every seed, over all steps of already clipped
    samples: mean outward change of the log-ratio by the `carried` and the
    `fresh` part of Adam's step, and the share that moved `outward`.
  """
  found, seeds = {}, np.arange(20 if full else 5)
  with jax.enable_x64(True):
    for updates in UPDATES:
      train = bandits.jit(jax.vmap(lambda seed, n=updates: _train(seed, n)))
      sums, count = train(seeds)
      found[str(updates)] = {
        name: np.asarray(total / count).tolist() for name, total in sums.items()
      }
  return found


def _train(seed, updates):
  """Sums over clipped samples and steps, f64[] each, and their number."""
  key = jax.random.key(seed)
  features = jax.random.normal(key, (8, 10, 24)) / 24**0.5
  reward = jax.random.uniform(jax.random.fold_in(key, 1), (8, 10))
  ones = jnp.ones(reward.shape, jnp.int32)
  bandit = bandits.Bandit(features, reward, ones, 1)
  method = losses.chain(
    losses.normalize_by_group(),
    losses.mean_over_sequences(),
    losses.ppo_clip(1 - _LOW, _HIGH - 1),
  )
  adam = optim.adamw(_RATE, 0.9, 0.95, epsilon=1e-12, clip_norm=None)

  def rollout(carry, t):
    theta, _ = carry
    uniform = jax.random.uniform(jax.random.fold_in(key, 2 + t), (8, _GROUP))
    answer = bandits.sample(bandit, theta, uniform)
    batch, credited = bandits.rollout(method, bandit, theta, answer)
    logp = lambda theta: bandits.token_logp(bandit, theta, answer)

    def update(carry, _):
      theta, state = carry
      _, gradient = bandits.loss_and_gradient(
        method, bandit, theta, answer, batch, credited
      )
      step, after = adam.update(gradient, state, theta)
      parts = optim.split_update(adam, state, after, step, theta)
      advantage, old = batch.advantage, batch.logp_old
      assert advantage is not None and old is not None  # credit has set them
      way = jnp.sign(advantage)
      moved = {
        name: way * jax.jvp(logp, (theta,), (part,))[1]
        for name, part in (('carried', parts.carried), ('fresh', parts.fresh))
      }
      ratio = jnp.exp(logp(theta) - old)
      clipped = ((way > 0) & (ratio > _HIGH)) | ((way < 0) & (ratio < _LOW))
      total = moved['carried'] + moved['fresh']
      moved['outward'] = jnp.where(total > 0, 1.0, 0.0)
      sums = {k: jnp.sum(jnp.where(clipped, v, 0)) for k, v in moved.items()}
      return (theta + step, after), (sums, jnp.sum(clipped))

    return jax.lax.scan(update, carry, length=updates)

  theta = jnp.zeros(features.shape[-1])
  _, seen = jax.lax.scan(
    rollout, (theta, adam.init(theta)), jnp.arange(_ROLLOUTS)
  )
  return jax.tree.map(jnp.sum, seen)


def _measure_split(numbers) -> dict[str, Measured]:
  many = numbers['16']
  return {
    'carried': claims.over_seeds(many['carried']),
    'fresh': claims.over_seeds(many['fresh']),
    'carried_4': claims.over_seeds(numbers['4']['carried']),
    'fresh_4': claims.over_seeds(numbers['4']['fresh']),
    'outward': claims.over_seeds(many['outward']),
  }


def _draw_split(numbers, found, figure, colors) -> str:
  axes = figure.subplots()
  for i, (part, name) in enumerate((('carried', 'second'), ('fresh', 'first'))):
    for j, runs in enumerate(numbers.values()):
      x = 3 * j + i
      over = claims.over_seeds(runs[part])
      label = f'{part} part' if j == 0 else None
      axes.bar(x, over.mean, 0.8, color=colors[name], label=label, alpha=0.8)
      axes.errorbar(x, over.mean, over.half, color=colors['text'], capsize=4)
      axes.plot(
        [x] * len(runs[part]), runs[part], '.', color=colors['text'], ms=4
      )
  axes.axhline(0, color=colors['text'], lw=1)
  axes.set_xticks([0.5, 3.5], [f'{n} updates a rollout' for n in numbers])
  axes.set_ylabel('outward change of the log-ratio, per step')
  axes.grid(False, axis='x')
  axes.legend()
  return (
    'A step moves clipped samples outward by '
    f'{found["carried"].mean:+.3f} through old momentum, and by '
    f'{found["fresh"].mean:+.3f} through the new gradient'
  )


EXPERIMENTS = {
  'coasting_ratio': Experiment(
    'E1',
    'the closed form of the coast',
    _RATIO_CLAIMS,
    _measure_ratio,
    _draw_ratio,
    lambda full: _run_ratio(),
  ),
  'coasting_distance': Experiment(
    'E2',
    'the distance past the bound',
    _DISTANCE_CLAIMS,
    _measure_distance,
    _draw_distance,
    lambda full: _run_distance(),
  ),
  'momentum_split': Experiment(
    'E3',
    'momentum beyond the clip',
    _SPLIT_CLAIMS,
    _measure_split,
    _draw_split,
    _run_split,
  ),
}
