"""What does it cost to learn from what older policies drew? Trains runs.

Rollout k is drawn by version k - a, as `config.sampler.ahead=a` has it. Fontana
et al. (arXiv:2601.05002) show that Adam's momentum carries clipped tokens on,
past the clip. Tokens of an older policy lie further from ratio 1 to begin with,
so more of them are clipped at once, and momentum carries all of these.

Arms differ in the age a, and in what the ratio is taken to: `corrected` to the
policy that drew (`learner.anchor='sampler'`), `plain` to the one that is about
to learn (`'learner'`), as if that had drawn.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.config import Config
from grpo_jax.lab.report import curves
from grpo_jax.lab.studies import claims
from grpo_jax.lab.studies import sweeps
from grpo_jax.lab.studies.claims import FONTANA
from grpo_jax.lab.studies.claims import Claim
from grpo_jax.lab.studies.claims import Experiment
from grpo_jax.lab.studies.claims import Measured
from grpo_jax.run import bare
from grpo_jax.run.build import build
from grpo_jax.run.build import environment as build_environment
from grpo_jax.run.build import rewards as build_rewards

AGES = 0, 1, 2, 4
_EVERY = 5  # rollouts; a measured one takes more than twice as long
ANCHORS = {'corrected': 'sampler', 'plain': 'learner'}


@dataclasses.dataclass(frozen=True)
class Arm:
  """One way to train.

  Attributes:
    ahead: The age of the policy that draws, in versions.
    ratio: A name in `ANCHORS`.
    label: Its name.

  >>> Arm(2, 'plain').label
  '2-plain'
  """

  ahead: int
  ratio: str
  label: str = dataclasses.field(init=False)

  def __post_init__(self):
    # A frozen dataclass refuses plain assignment, here too.
    object.__setattr__(self, 'label', f'{self.ahead}-{self.ratio}')


# At age 0 both ratios are the same.
ARMS = Arm(0, 'corrected'), *(Arm(a, x) for a in AGES[1:] for x in ANCHORS)


@dataclasses.dataclass(frozen=True)
class Outcome:
  """What one run has measured.

  Attributes:
    arm: How it was trained.
    seed: Of everything random, the warm-up included.
    steps: Rollouts.
    numbers: By name, a value of each rollout: `reward`, the mean; `clipped`,
      the share of trained tokens without a gradient; `ess`, the effective
      sample size of what was drawn. And of each `_EVERY`-th rollout, NaN
      between: `carried`, how far momentum moves a clipped token outward in an
      update, nats, times the share of such tokens; `moved`, the same of all
      that an update does; `outside`, the share of trained tokens outside of the
      clip behind the last update of a rollout.
  """

  arm: Arm
  seed: int
  steps: int
  numbers: dict[str, list[float]]


def config_of(config: Config, arm: Arm, seed: int) -> Config:
  """The config of a run: what all arms share, an arm's own, and a seed."""
  return dataclasses.replace(
    config,
    seed=seed,
    sampler=dataclasses.replace(config.sampler, ahead=arm.ahead),
    learner=dataclasses.replace(config.learner, anchor=ANCHORS[arm.ratio]),
    optim=dataclasses.replace(config.optim, overshoot_every_steps=_EVERY),
  )


def train(config: Config, arm: Arm, seed: int, params: Any) -> Outcome:
  """Does one run from given parameters; see `sweeps.Sweep.train`."""
  run = build.run(config_of(config, arm, seed))
  updater = build.updater(run, build.frozen_params(run))
  with (
    build_rewards.workers(run.limits, run.rewards) as workers,
    build_environment.player(run.environment) as player,
  ):
    run = dataclasses.replace(run, workers=workers, player=player)
    # Copied: `init` donates its argument, and other arms need it again.
    state = updater.compiled.init(jax.tree.map(jnp.copy, params))
    rows = [_numbers(one) for one in bare.trained(run, updater, state)]
  numbers = {name: [row[name] for row in rows] for name in rows[0]}
  return Outcome(arm, seed, len(rows), numbers)


def _numbers(one: bare.Trained) -> dict[str, float]:
  measured = one.measured
  clipped = measured['clipped_high'] + measured['clipped_low']

  def outward(name):
    if 'rollout_outside' not in measured:
      return math.nan  # nothing is measured in this rollout
    # Where nothing is clipped there is none.
    return clipped * measured[name] if name in measured else 0.0

  return {
    'reward': float(one.rollout.batch.reward.mean()),
    'clipped': clipped,
    'carried': outward('overshoot_carried'),
    'moved': outward('overshoot'),
    'outside': measured.get('rollout_outside', math.nan),
    'ess': measured['ess_token'],
  }


CLAIMS = {
  'clipped': Claim(
    'Corrected, more tokens are clipped at age 4 than at age 0.',
    'derived',
    low=claims.ABOVE_0,
  ),
  'carried': Claim(
    'Corrected, momentum moves clipped tokens further out at age 4 than at '
    'age 0: nats per trained token and update.',
    f'derived from {FONTANA}, third claim',
    low=claims.ABOVE_0,
  ),
  'carried_rises': Claim(
    'It moves them further at age 4 than at age 1.',
    f'derived from {FONTANA}, third claim',
    low=claims.ABOVE_0,
  ),
  'plain_carried': Claim(
    'Plain, momentum moves clipped tokens further out at age 4 than at age 0.',
    f'derived from {FONTANA}, third claim',
    low=claims.ABOVE_0,
  ),
  'outside': Claim(
    'Corrected, more tokens lie outside of the clip behind the last update of '
    'a rollout at age 4 than at age 0.',
    'derived',
    low=claims.ABOVE_0,
  ),
  'ess': Claim(
    'What was drawn is worth fewer samples of the policy at age 4 than at 0.',
    'derived',
    low=claims.ABOVE_0,
  ),
  'one_is_free': Claim(
    'Corrected, a training at age 1 earns at most 0.02 less than at age 0.',
    'wanted of drawing ahead',
    high=0.02,
  ),
  'four_is_free': Claim(
    'Corrected, a training at age 4 earns at most 0.02 less than at age 0.',
    'wanted of drawing ahead',
    high=0.02,
  ),
  'correction': Claim(
    'At age 4 a corrected training earns more than a plain one.',
    'asked by many',
    low=claims.ABOVE_0,
  ),
}


def numbers(outcomes: Sequence[Outcome]) -> dict[str, Any]:
  """The means of each training, by measure, arm and seed; and curves.

  Returns:
    `means`: {measure: {arm: {seed: mean over rollouts}}}; `curves`: {arm:
    rewards of each rollout, means over seeds}. Rewards are those of the policy
    that drew. So that all arms count policies of the same numbers of updates,
    their means leave out the first rollouts of an old arm, and the last of a
    young one.
  """
  means: dict[str, dict[str, dict[str, float]]] = {}
  rewards: dict[str, list[list[float]]] = {}
  for one in outcomes:
    rewards.setdefault(one.arm.label, []).append(one.numbers['reward'])
    for name, values in one.numbers.items():
      if name == 'reward' and one.steps > max(AGES):
        age = one.arm.ahead
        values = values[age : age + one.steps - max(AGES)]
      of_arm = means.setdefault(name, {}).setdefault(one.arm.label, {})
      # As numbers, because a file has None in the place of NaN.
      of_arm[str(one.seed)] = float(np.nanmean(np.array(values, float)))
  return {
    'means': means,
    'curves': {k: np.mean(x, axis=0).tolist() for k, x in rewards.items()},
  }


def _by_seed(means: Mapping[str, Any], name: str, arm: str) -> dict[str, float]:
  """The means of an arm."""
  return claims.known(means[name].get(arm, {}))


def measure(found: Mapping[str, Any]) -> dict[str, Measured]:
  """See `Experiment`."""
  means = found['means']

  def between(name: str, one: str, other: str) -> Measured:
    """One arm minus another, seed by seed."""
    arms = (_by_seed(means, name, arm) for arm in (one, other))
    return claims.difference(*arms)

  young, old = '0-corrected', '4-corrected'
  return {
    'clipped': between('clipped', old, young),
    'carried': between('carried', old, young),
    'carried_rises': between('carried', old, '1-corrected'),
    'plain_carried': between('carried', '4-plain', young),
    'outside': between('outside', old, young),
    'ess': between('ess', young, old),
    'one_is_free': between('reward', young, '1-corrected'),
    'four_is_free': between('reward', young, old),
    'correction': between('reward', old, '4-plain'),
  }


_DRAWN = {
  'reward': 'mean reward of a training',
  'clipped': 'clipped tokens',
  'carried': 'moved out by momentum, nats',
}


def draw(found, measured, figure, colors) -> str:
  """See `Experiment`: what depends on the age, with and without correction."""
  for axes, (name, title) in zip(
    figure.subplots(1, len(_DRAWN)), _DRAWN.items(), strict=True
  ):
    for ratio, color in zip(ANCHORS, (colors['first'], colors['second'])):
      points = [(age, _interval(found, name, age, ratio)) for age in AGES]
      points = [(age, x) for age, x in points if x is not None]
      ages = [age for age, _ in points]
      mean = np.array([x.mean for _, x in points])
      half = np.array([x.half for _, x in points])
      axes.plot(ages, mean, color=color, marker='o', label=ratio)
      axes.fill_between(ages, mean - half, mean + half, color=color, alpha=0.2)
    axes.set_title(title)
    axes.set_xlabel('age, rollouts')
    axes.set_xticks(AGES)
  figure.axes[0].legend()
  gap = measured['four_is_free']
  if math.isnan(gap.mean):
    return 'Learning from what older policies drew'
  return (
    'Learning from what older policies drew: reward of a corrected training '
    f'at age 0 minus that at age 4, {claims.value(gap)}'
  )


def _interval(
  found: Mapping[str, Any], name: str, age: int, ratio: str
) -> curves.Interval | None:
  arm = Arm(age, ratio if age else 'corrected').label
  values = [*_by_seed(found['means'], name, arm).values()]
  return curves.mean_interval(values) if values else None


EXPERIMENT = Experiment(
  'E15',
  'learning from what older policies drew',
  CLAIMS,
  measure,
  draw,
)


def study(name: str) -> sweeps.Study:
  """The study, by its one name."""
  sweep = sweeps.Sweep(
    name,
    ARMS,
    Arm,
    Outcome,
    train,
    lambda one: f'reward {one.numbers["reward"][-1]:.3f}',
  )
  return sweeps.Study(sweep, EXPERIMENT, numbers)
