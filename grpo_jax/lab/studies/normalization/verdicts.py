"""What the runs say: the claims, the numbers that they are about, a figure."""

from collections.abc import Iterable
from typing import Any

from grpo_jax.lab.studies import claims
from grpo_jax.lab.studies.claims import GE
from grpo_jax.lab.studies.claims import Claim
from grpo_jax.lab.studies.claims import Experiment
from grpo_jax.lab.studies.claims import Measured
from grpo_jax.lab.studies.normalization.arms import METHODS
from grpo_jax.lab.studies.normalization.arms import Plan
from grpo_jax.lab.studies.papers import normalized_optimizer

_TENTH = 0.1375  # log2 of 1.1
_LOG2 = (
  'log2 of those without it / with it, in doublings; failures are 1 - mean '
  'reward of a training; rates are chosen on the same seeds'
)
_ASKED = {
  'SGD': 'sgd',
  'momentum': 'momentum',
  'Adam': 'adam',
  'AdamW': 'adamw',
  'AdamW-epsilon-0.01': 'large_epsilon',
}

CLAIMS = {
  'unequal': Claim(
    'Prompts are of unequal difficulty (deviation over prompts of the mean '
    'reward of a group, first rollout).',
    'wanted of a fair comparison',
    low=0.2,
  ),
  **{
    claim: Claim(
      f'{optimizer}, on a language model: with each way at its best rate, '
      f'dividing by the deviation lowers the failures ({_LOG2}).',
      f'asked by {GE}',
      low=0.0,
    )
    for optimizer, claim in _ASKED.items()
  },
  'adam_same': Claim(
    'Adam, on a language model: with each way at its best rate, dividing by '
    'the deviation changes the failures by less than a tenth, either way '
    f'({_LOG2}).',
    'derived',
    -_TENTH,
    _TENTH,
  ),
  'inside': Claim(
    'No best rate lies at an end of its grid (share of them).',
    'wanted of a fair comparison',
    1.0,
    1.0,
  ),
}


def numbers(plan: Plan, outcomes: Iterable[Any]) -> dict[str, Any]:
  """The failures of each optimizer of which all arms were run.

  Args:
    plan: The optimizers and their rates.
    outcomes: One per arm and seed.

  Returns:
    `failure[optimizer][method]`, [R,S], at the rates `rates[optimizer]`, and
    `spread`, one for each seed.
  """
  of_arm: dict[Any, dict[int, Any]] = {}
  for one in outcomes:
    of_arm.setdefault(one.arm, {})[one.seed] = one
  failure, rates = {}, {}
  for name, optimizer in plan.optimizers.items():
    arms = [arm for arm in plan.arms if arm.optimizer == name]
    if not all(arm in of_arm for arm in arms):
      continue
    rates[name] = list(optimizer.rates)
    failure[name] = {
      method: [
        [one.failure for _, one in sorted(of_arm[arm].items())]
        for arm in arms
        if arm.method == method
      ]
      for method in METHODS
    }
  # All arms of a seed begin alike, so their first rollouts are the same.
  spread = {
    one.seed: one.spread for of in of_arm.values() for one in of.values()
  }
  return {'rates': rates, 'failure': failure, 'spread': [*spread.values()]}


def measure(numbers) -> dict[str, Measured]:
  """See `Experiment`."""
  failure = numbers['failure']
  gains = {
    name: normalized_optimizer.gain(arms) for name, arms in failure.items()
  }
  adam = gains.get('Adam', claims.UNKNOWN)
  return {
    'unequal': claims.over_seeds(numbers['spread']),
    **{
      claim: gains.get(name, claims.UNKNOWN) for name, claim in _ASKED.items()
    },
    'adam_same': adam,
    'inside': normalized_optimizer.inside(numbers['rates'], failure),
  }


def draw(numbers, figure, colors) -> str:
  """See `Experiment`."""
  left, right = figure.subplots(1, 2)
  names = list(numbers['failure'])
  normalized_optimizer.draw_rates(
    left, numbers['rates'], numbers['failure'], names, colors
  )
  gains = [normalized_optimizer.gain(numbers['failure'][k]) for k in names]
  normalized_optimizer.draw_gains(right, names, gains, colors['first'])
  right.axvline(0, color=colors['faint'], lw=1)
  right.set_title('each at its best rate; 95 % intervals')
  adam = measure(numbers)['adam']
  return (
    'Dividing by the deviation under Adam, on a language model: log2 of the '
    f'failures without / with it is {claims.value(adam)}'
  )


EXPERIMENT = Experiment(
  'E10b',
  'dividing by the deviation on a language model',
  CLAIMS,
  lambda full: {},
  measure,
  draw,
)


def experiment(plan: Plan) -> Experiment:
  """`EXPERIMENT` without the claims on optimizers that a plan does not have."""
  left_out = {_ASKED[name] for name in _ASKED if name not in plan.optimizers}
  kept = {name: c for name, c in CLAIMS.items() if name not in left_out}
  return EXPERIMENT._replace(claims=kept)
