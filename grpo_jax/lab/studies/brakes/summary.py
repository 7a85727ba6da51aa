"""Compares the arms of the study of brakes, over seeds; NumPy only."""

from collections.abc import Iterable
import dataclasses
import math
from typing import Any
from typing import NamedTuple

import numpy as np

from grpo_jax.lab.report import intervals
from grpo_jax.lab.report.intervals import Interval
from grpo_jax.lab.studies.brakes.arms import BASE_UPDATES
from grpo_jax.lab.studies.brakes.arms import Arm
from grpo_jax.lab.studies.tables import without_nan


@dataclasses.dataclass(frozen=True)
class Outcome:
  """What one run has measured; NaN where there was nothing to measure.

  The fields from `overshoot` to `kl_rollout` are means over the rollouts in
  which overshoot is measured; see `learner.overshoot` for what they are.

  Attributes:
    arm: How the run was trained.
    seed: Of everything random, the warm-up included.
    steps: Rollouts.
    reward: Mean reward over all rollouts.
    reward_last: Mean reward over the last third of the rollouts.
    accuracy: Of greedy answers to held-out problems, after the last rollout.
    overshoot: How far an update moves clipped tokens outward, nats.
    overshoot_positive: The same, counting only tokens that do move outward.
    overshoot_carried: The part of the overshoot that momentum from earlier
      updates causes, to first order, nats.
    overshoot_fresh: The part that the update's own gradient causes, to first
      order, nats.
    ends_clipped: Share of tokens that have no gradient after an update.
    rollout_outside: Share of tokens outside the trust region after the last
      update of a rollout.
    kl_rollout: KL(old || policy) after the last update of a rollout, nats per
      token.
    secs_per_update: Seconds from a sampled rollout to the end of its updates,
      scoring included, divided by the number of updates. The median over
      rollouts in which overshoot is not measured, without the first rollouts,
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


# The measured fields of an `Outcome`; the first three say which run it was.
METRICS = tuple(field.name for field in dataclasses.fields(Outcome))[3:]
# Those that a brake should reduce.
REDUCED = ('overshoot', 'overshoot_positive', 'kl_rollout')


class Row(NamedTuple):
  """One arm, over its seeds.

  The base of an arm with a brake is the arm without one, with as many updates
  and the same learning rate; that of an arm without one has `BASE_UPDATES`.

  Attributes:
    arm: The arm.
    seeds: How many runs it has.
    means: Mean and interval of each of `METRICS`, by name.
    factors: For each of `REDUCED`, by name, the base's mean divided by the
      arm's, over the seeds that both have. None if one of the means is not
      above 0. Empty for a base, and for an arm whose base was not run.
    gap: The arm's reward minus the base's, paired by seed; None where `factors`
      is empty.
  """

  arm: Arm
  seeds: int
  means: dict[str, Interval]
  factors: dict[str, float | None]
  gap: Interval | None


BEST, NEAREST, CALMER = 'best rates', 'nearest KL', 'no more KL'


class Match(NamedTuple):
  """An arm with a brake beside a control: a comparable arm without one.

  Attributes:
    arm: The arm with a brake.
    control: The arm without a brake.
    by: How the control was chosen. `NEAREST` is the arm without a brake whose
      KL is nearest by ratio; `CALMER` is the one of the highest reward among
      those whose KL is not above the arm's. `BEST` compares a brake at its best
      rate with no brake at its best one, for the same number of updates.
    kl: Of the arm and of the control, nats per token.
    gap: The arm's reward minus the control's, paired by seed.
  """

  arm: Arm
  control: Arm
  by: str
  kl: tuple[float, float]
  gap: Interval


class Summary(NamedTuple):
  """The comparison of all arms.

  Attributes:
    rows: One per arm.
    best: For every brake and number of updates that was run at several learning
      rates, the row of the highest reward.
    matches: The controls of every arm with a brake.
  """

  rows: list[Row]
  best: list[Row]
  matches: list[Match]


def summarise(outcomes: Iterable[Outcome]) -> Summary:
  """Compares arms.

  Args:
    outcomes: One per arm and seed; the arms are shown in this order.

  Returns:
    A `Summary`.
  """
  of_arm: dict[Arm, dict[int, Outcome]] = {}
  for outcome in outcomes:
    of_arm.setdefault(outcome.arm, {})[outcome.seed] = outcome
  rows = [_row(arm, of_arm) for arm in of_arm]
  # Arms that differ in the learning rate alone compete for the best rate.
  kinds: dict[tuple[str, int], list[Row]] = {}
  for row in rows:
    kinds.setdefault((row.arm.brake, row.arm.updates), []).append(row)
  best = [
    max(kind, key=lambda row: row.means['reward'].mean)
    for kind in kinds.values()
    if len(kind) > 1
  ]
  matches = _matches(rows, of_arm) + _of_best(best, of_arm)
  return Summary(rows, best, matches)


def _of_best(
  best: list[Row], of_arm: dict[Arm, dict[int, Outcome]]
) -> list[Match]:
  """Each brake beside no brake, both at their best rates."""
  plain = {row.arm.updates: row for row in best if row.arm.brake == 'none'}
  matches = []
  for row in best:
    control = plain.get(row.arm.updates)
    if row.arm.brake == 'none' or control is None:
      continue
    if pairs := _pairs(of_arm, control.arm, row.arm):
      kl = row.means['kl_rollout'].mean, control.means['kl_rollout'].mean
      matches.append(Match(row.arm, control.arm, BEST, kl, _gap(pairs)))
  return matches


def _row(arm: Arm, of_arm: dict[Arm, dict[int, Outcome]]) -> Row:
  """One arm beside its base."""
  mine = list(of_arm[arm].values())
  means = {
    name: intervals.of_mean([getattr(outcome, name) for outcome in mine])
    for name in METRICS
  }
  # The brake, or without one the number of updates, is all that differs.
  updates = BASE_UPDATES if arm.brake == 'none' else arm.updates
  base = Arm(updates=updates, lr=arm.lr)
  pairs = _pairs(of_arm, base, arm)
  if base == arm or not pairs:
    return Row(arm, len(mine), means, {}, None)
  factors = {}
  for name in REDUCED:
    before, after = (
      np.mean([getattr(outcome, name) for outcome in side])
      for side in zip(*pairs, strict=True)
    )
    # Overshoot can be negative, where clipped tokens move back inward. A brake
    # has then removed all of it, and no factor says by how much.
    above = before > 0 and after > 0
    factors[name] = float(before / after) if above else None
  return Row(arm, len(mine), means, factors, _gap(pairs))


def _pairs(
  of_arm: dict[Arm, dict[int, Outcome]], first: Arm, second: Arm
) -> list[tuple[Outcome, Outcome]]:
  """The outcomes of two arms, for each seed that both have."""
  ours, theirs = of_arm.get(first, {}), of_arm.get(second, {})
  return [(ours[seed], theirs[seed]) for seed in ours if seed in theirs]


def _gap(pairs: list[tuple[Outcome, Outcome]]) -> Interval:
  """The reward of the second minus that of the first, over pairs."""
  return intervals.of_mean(
    [after.reward - before.reward for before, after in pairs]
  )


def _matches(
  rows: list[Row], of_arm: dict[Arm, dict[int, Outcome]]
) -> list[Match]:
  """For each arm with a brake, the arms without one that move as much."""
  kl = {row.arm: row.means['kl_rollout'].mean for row in rows}
  reward = {row.arm: row.means['reward'].mean for row in rows}
  matches = []
  for arm in kl:
    controls = [
      other
      for other in kl
      if other.brake == 'none' and _pairs(of_arm, other, arm)
      if min(kl[other], kl[arm]) > 0  # else it has no logarithm, or is NaN
    ]
    if arm.brake == 'none' or not controls:
      continue
    # By the ratio of the two, because KL spans orders of magnitude.
    chosen = {
      NEAREST: min(
        controls, key=lambda other: abs(math.log(kl[other] / kl[arm]))
      )
    }
    if calm := [other for other in controls if kl[other] <= kl[arm]]:
      chosen[CALMER] = max(calm, key=lambda other: reward[other])
    for by, other in chosen.items():
      gap = _gap(_pairs(of_arm, other, arm))
      matches.append(Match(arm, other, by, (kl[arm], kl[other]), gap))
  return matches


def to_json(summary: Summary) -> dict[str, Any]:
  """A summary as JSON can hold it.

  Args:
    summary: See `Summary`.

  Returns:
    `arms`, `best` and `matches`. An interval is a list of mean and half-width,
    and NaN is null.
  """

  def row(one: Row):
    return {
      **dataclasses.asdict(one.arm),
      'seeds': one.seeds,
      **{name: list(mean) for name, mean in one.means.items()},
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
