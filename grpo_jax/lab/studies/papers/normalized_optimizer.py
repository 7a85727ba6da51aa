"""E10: does dividing by the deviation of a group still matter under Adam?

Prompts of unequal difficulty share a part of their features. Each optimizer
learns them with and without the division, at every rate of a grid, and both are
compared at equal rates, and at their own best rate. Adam divides each
coordinate of the gradient by its size. So it can do what the division does
where a prompt has coordinates of its own, and cannot where prompts share them.

As a control, all prompts are equally difficult. Then the division is about one
factor on all gradients. Adam hides such a factor as far as it is constant, but
the deviation falls while prompts are learned, and sampled groups differ in it.

The best rates are chosen on other seeds than those on which they are compared.
"""

import functools
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from grpo_jax import losses
from grpo_jax.lab.studies import claims
from grpo_jax.lab.studies.claims import Claim
from grpo_jax.lab.studies.claims import Experiment
from grpo_jax.lab.studies.claims import Measured
from grpo_jax.lab.studies.figures import SERIES
from grpo_jax.lab.studies.papers import bandits

_PROMPTS, _ANSWERS, _GROUP, _SHARED, _STEPS = 16, 8, 8, 16, 200
_HARDEST, _EASIEST = 0.02, 0.9
_BLOCKS = 8  # of seeds; see `_held_out`
_ALIKE = 0.3  # the success rate of all prompts in the control
SHARES = 0.0, 0.5, 0.9
"""Of the squared length of features, how much prompts have in common."""


class Optimizer(NamedTuple):
  """One of the optimizers, and the rates that are tried."""

  adaptive: bool
  settings: tuple[float, float]  # decay and epsilon, or momentum and nothing
  rates: tuple[float, ...]


def _rates(first: int, last: int) -> tuple[float, ...]:
  return tuple(2.0**power for power in range(first, last + 1))


OPTIMIZERS = {
  'SGD': Optimizer(False, (0.0, 0.0), _rates(0, 10)),
  'momentum 0.9': Optimizer(False, (0.9, 0.0), _rates(-3, 7)),
  'Adam': Optimizer(True, (0.0, 1e-8), _rates(-8, 2)),
  'AdamW': Optimizer(True, (0.01, 1e-8), _rates(-8, 2)),
  'Adam, epsilon 0.01': Optimizer(True, (0.0, 0.01), _rates(-6, 4)),
}
METHODS = {
  'divided': functools.partial(losses.methods.grpo, kl_coefficient=0.0),
  'plain': functools.partial(losses.methods.dr_grpo, max_tokens=1),
}

_LOG2 = (
  'log2 of the failures without dividing over those with it, in doublings; '
  'failures are 1 - expected reward, the mean of a training'
)
_LOW_RATES = (
  'at rates of at most a quarter of the best one of either way, the same rates '
  'for both ways'
)

CLAIMS = {
  'sgd_same': Claim(
    f'SGD, {_LOW_RATES}: dividing by the deviation lowers the failures (least '
    f'{_LOG2}, over rates and shares of common features).',
    'derived from arXiv:2601.23135, theorem 3.2',
    low=0.1,
  ),
  'adam_same': Claim(
    f'Adam, {_LOW_RATES}: dividing by the deviation changes the failures by '
    f'less than 7 %, either way (largest |{_LOG2}|, over rates and shares of '
    'common features).',
    'derived',
    high=0.1,
  ),
  'sgd_best': Claim(
    'SGD, each way at its best rate, half of the features shared: dividing by '
    f'the deviation lowers the failures ({_LOG2}).',
    'asked by arXiv:2601.23135',
    low=0.0,
  ),
  'adam_best': Claim(
    'Adam, each way at its best rate, half of the features shared: dividing by '
    f'the deviation lowers the failures ({_LOG2}).',
    'asked by arXiv:2601.23135',
    low=0.0,
  ),
  'large_epsilon_best': Claim(
    'Adam with epsilon 0.01, which is above most gradients here, each way at '
    'its best rate, nine tenths of the features shared: dividing by the '
    f'deviation lowers the failures ({_LOG2}).',
    'derived',
    low=0.0,
  ),
  'adam_alike': Claim(
    f'Adam, all prompts equally difficult, {_LOW_RATES}: dividing by the '
    f'deviation changes the failures by less than 7 % (largest |{_LOG2}|, over '
    'rates).',
    'derived from arXiv:2601.05002, prop. 2',
    high=0.1,
  ),
  'sgd_alike': Claim(
    f'SGD, all prompts equally difficult, {_LOW_RATES}: dividing by the '
    f'deviation still lowers the failures (least {_LOG2}, over rates).',
    'derived from arXiv:2601.23135, theorem 3.2',
    low=0.1,
  ),
  'adam_alike_best': Claim(
    'Adam, all prompts equally difficult, each way at its best rate: dividing '
    f'by the deviation changes the failures by less than 7 % ({_LOG2}).',
    'derived from arXiv:2601.05002, prop. 2',
    -0.1,
    0.1,
  ),
  'inside': Claim(
    'Where features are shared, no best rate lies at an end of its grid (share '
    'of them).',
    'derived',
    1.0,
    1.0,
  ),
}


def _made(
  shared: float, seed: int, alike: bool = False
) -> tuple[np.ndarray, np.ndarray]:
  """Features f64[P,K,D] of prompts, and the policy at the start f64[D]."""
  rng = np.random.default_rng([19, seed])
  own = np.eye(_PROMPTS * _ANSWERS).reshape(_PROMPTS, _ANSWERS, -1)
  common = rng.standard_normal((_PROMPTS, _ANSWERS, _SHARED)) / _SHARED**0.5
  features = np.concatenate(
    [(1 - shared) ** 0.5 * own, shared**0.5 * common], axis=-1
  )
  ends = (_ALIKE, _ALIKE) if alike else (_HARDEST, _EASIEST)
  p = np.linspace(*ends, _PROMPTS)
  logit = np.zeros((_PROMPTS, _ANSWERS))
  logit[:, 0] = np.log(p / (1 - p) * (_ANSWERS - 1)) / (1 - shared) ** 0.5
  return features, np.concatenate([logit.reshape(-1), np.zeros(_SHARED)])


@functools.partial(jax.jit, static_argnames=('arm', 'adaptive'))
def _train(features, theta, settings, rates, keys, *, arm, adaptive):
  """Mean failure rates f64[R,S] of trainings at R rates, of S bandits."""
  method = METHODS[arm]()
  decay, epsilon = settings
  reward = jnp.zeros((_PROMPTS, _ANSWERS)).at[:, 0].set(1.0)
  if adaptive:
    optimizer = optax.chain(
      optax.scale_by_adam(0.9, 0.999, eps=epsilon),
      optax.add_decayed_weights(decay),
    )
  else:
    optimizer = optax.trace(decay)

  def one(rate, features, theta, key):
    bandit = bandits.tabular(reward)._replace(features=features)

    def step(carry, key):
      theta, state = carry
      failure = 1 - bandits.value(bandit, theta)
      uniform = jax.random.uniform(key, (_PROMPTS, _GROUP))
      answer = bandits.sample(bandit, theta, uniform)
      batch, credited = bandits.rollout(method, bandit, theta, answer)
      _, gradient = bandits.loss_and_gradient(
        method, bandit, theta, answer, batch, credited
      )
      update, state = optimizer.update(gradient, state, theta)
      return (theta - rate * update, state), failure

    carry = theta, optimizer.init(theta)
    return jnp.mean(jax.lax.scan(step, carry, jax.random.split(key, _STEPS))[1])

  over_seeds = jax.vmap(one, (None, 0, 0, 0))
  return jax.vmap(over_seeds, (0, None, None, None))(
    rates, features, theta, keys
  )


def _run(full: bool = False) -> dict[str, Any]:
  """Trains every optimizer at every rate, with and without the division.

  Args:
    full: 160 seeds instead of 32.

  Returns:
    `failure[share][optimizer][arm]`: mean failure rates of a training of 200
    steps, [R,S], at the rates `rates[optimizer]`; `alike[optimizer][arm]`: the
    same where all prompts are equally difficult, at the second share.
  """
  seeds, failure = 160 if full else 32, {}
  with jax.enable_x64(True):
    keys = jax.random.split(jax.random.key(10), seeds)

    def trained(share, alike, names):
      made = [_made(share, seed, alike) for seed in range(seeds)]
      features, theta = map(np.stack, zip(*made, strict=True))
      return {
        name: {
          arm: _train(
            features, theta, np.array(one.settings), np.array(one.rates), keys,
            arm=arm, adaptive=one.adaptive,
          ).tolist()
          for arm in METHODS
        }
        for name, one in OPTIMIZERS.items()
        if name in names
      }  # fmt: skip

    for share in SHARES:
      failure[str(share)] = trained(share, False, OPTIMIZERS)
    alike = trained(SHARES[1], True, ('SGD', 'Adam'))
  rates = {name: list(one.rates) for name, one in OPTIMIZERS.items()}
  return {'rates': rates, 'failure': failure, 'alike': alike}


def best(failures) -> tuple[int, np.ndarray]:
  """The best rate, by its place, and the failure rates of its seeds."""
  failures = np.array(failures)
  at = int(np.nanargmin(failures.mean(1)))
  return at, failures[at]


def gain(arms) -> Measured:
  """log2 of failures without the division over those with it, at best rates.

  The rates are best on the same seeds, so the failures of both are a little
  too low. `_held_out` needs more seeds, and has no such bias.

  Args:
    arms: Failure rates [R,S] of 'plain' and 'divided'.
  """
  plain, divided = (best(arms[arm])[1] for arm in ('plain', 'divided'))
  return claims.over_seeds(np.log2(plain / divided).tolist())


def _held_out(arms) -> Measured:
  """The same, with rates that are best on other seeds than those compared.

  Which rate is best is a matter of chance too. So seeds are dealt out to 8
  blocks, each of which chooses rates on one half of its seeds and compares on
  the other, and the interval is over blocks.
  """
  found = []
  for block in range(_BLOCKS):
    chosen = []
    for arm in ('plain', 'divided'):
      failures = np.array(arms[arm])[:, block::_BLOCKS]
      chosen.append(failures[best(failures[:, ::2])[0], 1::2])
    found.append(float(np.log2(chosen[0] / chosen[1]).mean()))
  return claims.over_seeds(found)


def _at_low_rates(*failure) -> list[Measured]:
  """The gain at each equal rate of at most a quarter of the best one.

  What is best under chance says less than the rates well below. An empty list
  if the grid has no such rate.

  Args:
    *failure: Failure rates [R,S] by arm.
  """
  found = []
  for arms in failure:
    plain, divided = (np.array(arms[arm]) for arm in ('plain', 'divided'))
    number = max(0, min(best(plain)[0], best(divided)[0]) - 1)
    for gains in np.log2(plain / divided)[:number]:
      found.append(claims.over_seeds(gains.tolist()))
  return found


def _largest(gains: list[Measured]) -> Measured:
  """The one that may be farthest from 0, without its sign."""
  return claims.furthest(one._replace(mean=abs(one.mean)) for one in gains)


def inside(rates, *failure) -> Measured:
  """The share of best rates that lie at no end of their grid.

  Args:
    rates: By optimizer.
    *failure: Failure rates [R,S] by optimizer and arm.
  """
  found = [
    0 < best(failures)[0] < len(rates[name]) - 1
    for of_optimizer in failure
    for name, arms in of_optimizer.items()
    for failures in arms.values()
  ]
  return Measured(float(np.mean(found)) if found else float('nan'))


def _gain(numbers, share: float, name: str) -> Measured:
  return _held_out(numbers['failure'][str(share)][name])


def _measure(numbers) -> dict[str, Measured]:
  _, half, most = SHARES
  alike = numbers['alike']
  low = {
    name: _at_low_rates(*(numbers['failure'][str(s)][name] for s in SHARES))
    for name in ('SGD', 'Adam')
  }
  return {
    'sgd_same': claims.furthest(low['SGD'], -1),
    'adam_same': _largest(low['Adam']),
    'sgd_best': _gain(numbers, half, 'SGD'),
    'adam_best': _gain(numbers, half, 'Adam'),
    'large_epsilon_best': _gain(numbers, most, 'Adam, epsilon 0.01'),
    'adam_alike': _largest(_at_low_rates(alike['Adam'])),
    'sgd_alike': claims.furthest(_at_low_rates(alike['SGD']), -1),
    'adam_alike_best': _held_out(alike['Adam']),
    'inside': inside(
      numbers['rates'], *(numbers['failure'][str(s)] for s in (half, most))
    ),
  }


def draw_rates(axes, rates, failure, names, colors) -> None:
  """Draws failures against the learning rate, for some optimizers."""
  for name, color in zip(names, SERIES, strict=False):
    for arm, style in (('divided', '-'), ('plain', '--')):
      mean = np.array(failure[name][arm]).mean(1)
      axes.plot(
        rates[name], mean, style, marker='o', ms=3, color=colors[color],
        label=f'{name}, {arm}',
      )  # fmt: skip
  axes.set(xscale='log', yscale='log', xlabel='learning rate')
  axes.set(ylabel='failures (1 - reward), mean of a training')
  if names:
    axes.legend(fontsize=7)


def draw_gains(axes, names, gains, color, offset=0.0, label=None) -> None:
  """Draws the gain of each optimizer, with its interval."""
  axes.errorbar(
    [one.mean for one in gains], np.arange(len(gains)) + offset,
    xerr=[one.half for one in gains], fmt='o', ms=4, color=color, label=label,
  )  # fmt: skip
  axes.set_yticks(np.arange(len(names)), list(names))
  axes.set(xlabel='log2 (failures, plain / divided)')


def _draw(numbers, found, figure, colors) -> str:
  left, right = figure.subplots(1, 2)
  half = numbers['failure'][str(SHARES[1])]
  draw_rates(left, numbers['rates'], half, ('SGD', 'Adam'), colors)
  left.set_title('half of the features shared')
  for k, (share, color) in enumerate(zip(SHARES, SERIES, strict=False)):
    gains = [_gain(numbers, share, name) for name in OPTIMIZERS]
    draw_gains(
      right, OPTIMIZERS, gains, colors[color], 0.2 * (k - 1),
      f'{share:.0%} shared',
    )  # fmt: skip
  right.set_title('each at its best rate; 95 % intervals')
  right.axvline(0, color=colors['faint'], lw=1)
  # Beside the intervals, wherever they lie.
  right.legend(loc='upper center', bbox_to_anchor=(0.4, -0.16), ncols=3)
  sgd, adam = found['sgd_same'].mean, found['adam_same'].mean
  return (
    'Dividing by the deviation, at equal rates well below the best: failures '
    f'change at most {2**adam:.2f}-fold under Adam, at least {2**sgd:.2f}-fold '
    'under SGD'
  )


EXPERIMENTS = {
  'normalized_optimizer': Experiment(
    'E10', 'dividing by the deviation under Adam', CLAIMS, _measure, _draw, _run
  )
}
