"""What runs of several arms and seeds say together; NumPy only."""

from collections.abc import Iterable
from collections.abc import Sequence
import dataclasses
import math
from typing import Any
from typing import NamedTuple

import numpy as np

# Quantiles of Student's t at 0.975 for 1, 2, ... 30 degrees of freedom; with
# more, the last makes an interval that is up to 4 % too wide.
_T = (
  12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
  2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
  2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
BASE_UPDATES = 8


@dataclasses.dataclass(frozen=True)
class Arm:
  """One way to train.

  Attributes:
    brake: Of config.optim, or 'narrow' or 'rollback', which are losses.
    updates: Optimizer steps per rollout (mu), each on the whole rollout.
    lr: Peak learning rate.
    label: Its name, made of what is not as in the base.
  """

  brake: str = 'none'
  updates: int = BASE_UPDATES
  lr: float = 3e-4
  label: str = dataclasses.field(init=False)

  def __post_init__(self):
    updates = f'-mu{self.updates}' if self.updates != BASE_UPDATES else ''
    lr = f'-lr{self.lr:g}' if self.lr != Arm.lr else ''
    object.__setattr__(self, 'label', f'{self.brake}{updates}{lr}')


@dataclasses.dataclass(frozen=True)
class Outcome:
  """What one run has measured; NaN where there was nothing to measure.

  Attributes:
    arm: How it was trained.
    seed: Of everything random, the warm-up included.
    steps: Rollouts.
    reward: Mean over all rollouts.
    reward_last: Mean over the last third of them.
    accuracy: Of greedy answers to held-out problems, at the end.
    overshoot: Outward motion of clipped tokens in an update, nats. This and
      what follows, but for the seconds, are means over the rollouts that are
      measured; see `overshoot.of_step` and `learner.rollout_end`.
    overshoot_positive: Of that, what goes outward at all.
    overshoot_carried: Of the overshoot, to first order, by momentum.
    overshoot_fresh: The same by the gradient of the update itself.
    ends_clipped: Share of tokens without gradient after an update.
    rollout_outside: Share of tokens outside at the rollout's end.
    kl_rollout: KL(old || policy) at the rollout's end, nats per token.
    secs_per_update: Of all that is done with a rollout once it is sampled;
      median over the rollouts that are not measured, without the first ones,
      which compile.
  """

  arm: Arm
  seed: int
  steps: int
  reward: float
  reward_last: float
  accuracy: float
  overshoot: float
  overshoot_positive: float
  overshoot_carried: float
  overshoot_fresh: float
  ends_clipped: float
  rollout_outside: float
  kl_rollout: float
  secs_per_update: float


METRICS = tuple(field.name for field in dataclasses.fields(Outcome))[3:]
REDUCED = ('overshoot', 'overshoot_positive', 'kl_rollout')


class Interval(NamedTuple):
  """A mean, and the half-width of its 95 % interval (NaN for one value)."""

  mean: float
  half: float


class Row(NamedTuple):
  """One arm, over its seeds.

  Attributes:
    arm: Which.
    seeds: How many.
    means: By the names of `METRICS`.
    factors: By the names of `REDUCED`: how many times the base's mean is the
      arm's, over the seeds of both; None unless both are above 0. The base has
      no brake, as many updates as `BASE_UPDATES` and the same learning rate.
    gap: Its reward minus the base's, paired by seed; None without the base.
  """

  arm: Arm
  seeds: int
  means: dict[str, Interval]
  factors: dict[str, float | None]
  gap: Interval | None


class Match(NamedTuple):
  """A braked arm beside one without a brake, which may be what it is worth.

  Attributes:
    arm: With a brake.
    control: Without.
    by: How the control was chosen: 'nearest KL', or 'no more KL', the one of
      most reward among those whose KL is at most the arm's.
    kl: Of the arm and of the control, nats per token.
    gap: The arm's reward minus the control's, paired by seed.
  """

  arm: Arm
  control: Arm
  by: str
  kl: tuple[float, float]
  gap: Interval


class Summary(NamedTuple):
  """All that a study says.

  Attributes:
    rows: One per arm.
    best: Of every brake and number of updates that has several learning rates,
      the row of most reward.
    matches: Of every arm with a brake, its controls.
  """

  rows: list[Row]
  best: list[Row]
  matches: list[Match]


def interval(values: Sequence[float]) -> Interval:
  """The mean of independent values and its 95 % t-interval.

  Args:
    values: At least one.

  Returns:
    An `Interval`, of n - 1 degrees of freedom.

  >>> round(interval([1.0, 2.0, 3.0]).half, 3)
  2.484
  """
  mean = float(np.mean(values))
  number = len(values)
  if number == 1:
    return Interval(mean, math.nan)
  error = float(np.std(values, ddof=1)) / math.sqrt(number)
  return Interval(mean, _T[min(number - 1, len(_T)) - 1] * error)


def summarise(outcomes: Iterable[Outcome]) -> Summary:
  """The tables of a study.

  Args:
    outcomes: One per arm and seed, in the order in which arms are shown.

  Returns:
    A `Summary`.
  """
  of_arm: dict[Arm, dict[int, Outcome]] = {}
  for outcome in outcomes:
    of_arm.setdefault(outcome.arm, {})[outcome.seed] = outcome
  rows = [_row(arm, of_arm) for arm in of_arm]
  kinds: dict[tuple[str, int], list[Row]] = {}
  for row in rows:
    kinds.setdefault((row.arm.brake, row.arm.updates), []).append(row)
  best = [
    max(kind, key=lambda row: row.means['reward'].mean)
    for kind in kinds.values()
    if len(kind) > 1
  ]
  return Summary(rows, best, _matches(rows, of_arm))


def _row(arm: Arm, of_arm: dict[Arm, dict[int, Outcome]]) -> Row:
  mine = list(of_arm[arm].values())
  means = {
    name: interval([getattr(outcome, name) for outcome in mine])
    for name in METRICS
  }
  base = Arm(lr=arm.lr)
  pairs = _pairs(of_arm, base, arm)
  if base == arm or not pairs:
    return Row(arm, len(mine), means, {}, None)
  factors = {}
  for name in REDUCED:
    before, after = (
      np.mean([getattr(outcome, name) for outcome in side])
      for side in zip(*pairs, strict=True)
    )
    # A mean that is not above 0 has no factor: all of it is gone.
    above = before > 0 and after > 0
    factors[name] = float(before / after) if above else None
  return Row(arm, len(mine), means, factors, _gap(pairs))


def _pairs(
  of_arm: dict[Arm, dict[int, Outcome]], first: Arm, second: Arm
) -> list[tuple[Outcome, Outcome]]:
  """The outcomes of two arms that share their seed."""
  ours, theirs = of_arm.get(first, {}), of_arm.get(second, {})
  return [(ours[seed], theirs[seed]) for seed in ours if seed in theirs]


def _gap(pairs: list[tuple[Outcome, Outcome]]) -> Interval:
  """By how much the second has more reward than the first."""
  return interval([after.reward - before.reward for before, after in pairs])


def _matches(
  rows: list[Row], of_arm: dict[Arm, dict[int, Outcome]]
) -> list[Match]:
  """For each arm with a brake, the arms without that its KL points to."""
  kl = {row.arm: row.means['kl_rollout'].mean for row in rows}
  reward = {row.arm: row.means['reward'].mean for row in rows}
  matches = []
  for arm in kl:
    controls = [
      other
      for other in kl
      if other.brake == 'none' and _pairs(of_arm, other, arm)
      if min(kl[other], kl[arm]) > 0  # not NaN, and has a logarithm
    ]
    if arm.brake == 'none' or not controls:
      continue
    chosen = {
      'nearest KL': min(
        controls, key=lambda other: abs(math.log(kl[other] / kl[arm]))
      )
    }
    if calm := [other for other in controls if kl[other] <= kl[arm]]:
      chosen['no more KL'] = max(calm, key=lambda other: reward[other])
    for by, other in chosen.items():
      gap = _gap(_pairs(of_arm, other, arm))
      matches.append(Match(arm, other, by, (kl[arm], kl[other]), gap))
  return matches


def to_json(summary: Summary) -> dict[str, Any]:
  """A summary as JSON can hold it: null for NaN, [mean, half] for intervals."""

  def row(one: Row):
    return {
      **dataclasses.asdict(one.arm),
      'seeds': one.seeds,
      **{name: list(interval) for name, interval in one.means.items()},
      'factors': one.factors,
      'reward_gap': one.gap and list(one.gap),
    }

  return without_nan(
    {
      'arms': [row(one) for one in summary.rows],
      'best': [one.arm.label for one in summary.best],
      'matches': [
        {
          'label': match.arm.label,
          'control': match.control.label,
          'by': match.by,
          'kl_rollout': list(match.kl),
          'reward_gap': list(match.gap),
        }
        for match in summary.matches
      ],
    }
  )


def without_nan(value: Any) -> Any:
  """The same with None for every NaN."""
  if isinstance(value, dict):
    return {name: without_nan(inner) for name, inner in value.items()}
  if isinstance(value, list):
    return [without_nan(inner) for inner in value]
  return None if isinstance(value, float) and math.isnan(value) else value
