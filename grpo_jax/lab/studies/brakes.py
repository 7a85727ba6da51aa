"""The study of brakes: what each does to the overshoot of clipped tokens.

A token that the trust region has clipped has no gradient, but Adam's momentum
still moves it: it overshoots. A brake is a change of the optimizer or of the
loss that acts against this. The study trains a small model with each brake, and
without one, at several learning rates and numbers of updates per rollout.

An arm is one way to train: a brake, a learning rate, a number of updates.

Three studies differ in their arms: `brakes`; `brakes_updates`, with more
updates on one rollout, which mean more clipped tokens and more momentum for a
brake to act on; and `brakes_smollm2`, with fewer arms for SmolLM2-135M, of
which a run takes minutes.

All of it is one file, because each part reads the same arm: how it trains, what
is kept of it, how arms are summed up, the verdicts and the tables of these.
"""

import collections
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import inspect
import math
import statistics
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax import losses
from grpo_jax.config import Config
from grpo_jax.lab.report import curves
from grpo_jax.lab.report.curves import Interval
from grpo_jax.lab.studies import claims
from grpo_jax.lab.studies import figures
from grpo_jax.lab.studies import pages
from grpo_jax.lab.studies import sweeps
from grpo_jax.lab.studies.claims import FONTANA
from grpo_jax.lab.studies.claims import Claim
from grpo_jax.lab.studies.claims import Experiment
from grpo_jax.lab.studies.claims import Measured
from grpo_jax.lab.studies.pages import mean_and_half
from grpo_jax.lab.studies.pages import number
from grpo_jax.lab.studies.pages import without_nan
from grpo_jax.run import bare
from grpo_jax.run import sampling
from grpo_jax.run.build import build
from grpo_jax.run.build import rewards as build_rewards

BASE_UPDATES = 8
_GROUP = 8  # completions per prompt
# Rollouts over which the learning rate rises linearly from 0: a third of a
# short training, and no more than this.
_RISE = 5
_MEASURED_EVERY = 5  # rollouts from one measurement of overshoot to the next
_METHOD = 'grpo'
_KL_COEFFICIENT = (
  inspect.signature(losses.methods.grpo).parameters['kl_coefficient'].default
)
# The brakes that are losses: that method with another clip, and nothing else
# that differs. The others are values of optim.brake.
_LOSSES = {
  'narrow': 'grpo_jax.losses.contrib:coasting_grpo',
  'rollback': 'grpo_jax.losses.contrib:rollback_grpo',
}


@dataclasses.dataclass(frozen=True)
class Arm:
  """One way to train.

  Attributes:
    brake: A value of `config.optim.brake`, or 'narrow' or 'rollback', which are
      losses.
    updates: Updates per rollout, each on the whole rollout.
    lr: Peak learning rate.
    label: Its name: the brake, then what differs from the base, which has
      `BASE_UPDATES` updates and the default learning rate.

  >>> Arm('project', lr=1e-4).label
  'project-lr0.0001'
  """

  brake: str = 'none'
  updates: int = BASE_UPDATES
  lr: float = 3e-4
  label: str = dataclasses.field(init=False)

  def __post_init__(self):
    updates = f'-mu{self.updates}' if self.updates != BASE_UPDATES else ''
    lr = f'-lr{self.lr:g}' if self.lr != Arm.lr else ''
    # A frozen dataclass refuses plain assignment, here too.
    object.__setattr__(self, 'label', f'{self.brake}{updates}{lr}')

  @property
  def kind(self) -> tuple[str, int]:
    """The brake and the updates: arms of one kind differ in their rates."""
    return self.brake, self.updates


# The first arm is the base. A brake also makes the policy move less, which a
# lower learning rate or fewer updates would do too. So there are arms without a
# brake at lower rates and with half the updates, to compare a brake with an arm
# that moves as little.
ARMS = (
  *(
    Arm(brake)
    for brake in (
      'none', 'reset', 'reset_first', 'decay', 'project', 'narrow', 'rollback',
    )
  ),
  Arm(updates=4),
  *(
    Arm(brake, updates, lr)
    for lr in (1e-4, 5e-5)
    for brake, updates in (
      ('none', 8), ('none', 4), ('decay', 8), ('project', 8), ('narrow', 8),
      ('rollback', 8),
    )
  ),
)  # fmt: skip


# By the updates per rollout: wider than grids at whose ends best rates lay.
_RATES = {
  4: (1e-3, 5e-4, 2e-4, 1e-4),
  8: (1e-3, 5e-4, 2e-4, 1e-4, 5e-5),
  16: (5e-4, 2e-4, 1e-4, 5e-5, 2e-5),
}
# Four times as far apart: of rates nearer by, few seeds cannot tell the best.
_RATES_SMOLLM2 = {
  4: (1.6e-4, 4e-5, 1e-5, 2.5e-6),
  8: (4e-5, 1e-5, 2.5e-6),
  16: (2e-5, 5e-6, 1.25e-6),
}


def _over(
  rates: Mapping[int, Sequence[float]], brakes: Sequence[str]
) -> tuple[Arm, ...]:
  """Every brake at every rate of every number of updates."""
  return tuple(
    Arm(brake, updates, lr)
    for updates, tried in rates.items()
    for lr in tried
    for brake in brakes
  )


STUDIES = {
  'brakes': ARMS,
  'brakes_updates': _over(
    _RATES, ('none', 'decay', 'project', 'narrow', 'rollback')
  ),
  'brakes_smollm2': _over(_RATES_SMOLLM2, ('none', 'project', 'narrow')),
}


def config_of(config: Config, arm: Arm, seed: int) -> Config:
  """The config of one run.

  Args:
    config: What all arms share.
    arm: Sets brake, updates and learning rate.
    seed: Of the run.

  Returns:
    The config, with the group, the rise of the learning rate and the
    measurements of overshoot that this study fixes.
  """
  optimizer = dataclasses.replace(
    config.optim,
    lr=arm.lr,
    # In updates, so that the rise takes as many rollouts in every arm.
    warmup_steps=min(_RISE, config.steps // 3) * arm.updates,
    brake='none' if arm.brake in _LOSSES else arm.brake,
    overshoot_every_steps=_MEASURED_EVERY,
  )
  # One batch, so that an update is a step on the whole rollout.
  learner = dataclasses.replace(config.learner, batches=1, epochs=arm.updates)
  if arm.brake in _LOSSES:
    learner = dataclasses.replace(
      learner,
      method=_LOSSES[arm.brake],
      # By themselves they have another KL term: none.
      method_kwargs={
        'kl_coefficient': _KL_COEFFICIENT,
        **learner.method_kwargs,
      },
    )
  return dataclasses.replace(
    config,
    seed=seed,
    sampler=dataclasses.replace(config.sampler, group=_GROUP),
    optim=optimizer,
    learner=learner,
  )


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
  by_arm: dict[Arm, dict[int, Outcome]] = {}
  for outcome in outcomes:
    by_arm.setdefault(outcome.arm, {})[outcome.seed] = outcome
  rows = [_row(arm, by_arm) for arm in by_arm]
  # Arms of one kind compete for the best rate.
  kinds = dict.fromkeys(row.arm.kind for row in rows)
  rivals = [[row for row in rows if row.arm.kind == kind] for kind in kinds]
  best = [
    max(some, key=lambda row: row.means['reward'].mean)
    for some in rivals
    if len(some) > 1
  ]
  return Summary(rows, best, _matches(rows, best, by_arm))


def _row(arm: Arm, by_arm: dict[Arm, dict[int, Outcome]]) -> Row:
  """One arm beside its base."""
  mine = list(by_arm[arm].values())
  means = {
    name: curves.mean_interval([getattr(outcome, name) for outcome in mine])
    for name in METRICS
  }
  # The brake, or without one the number of updates, is all that differs.
  updates = BASE_UPDATES if arm.brake == 'none' else arm.updates
  base = Arm(updates=updates, lr=arm.lr)
  pairs = _pairs(by_arm, base, arm)
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
  by_arm: dict[Arm, dict[int, Outcome]], first: Arm, second: Arm
) -> list[tuple[Outcome, Outcome]]:
  """The outcomes of two arms, for each seed that both have."""
  ours, theirs = by_arm.get(first, {}), by_arm.get(second, {})
  return [(ours[seed], theirs[seed]) for seed in ours if seed in theirs]


def _gap(pairs: list[tuple[Outcome, Outcome]]) -> Interval:
  """The reward of the second minus that of the first, over pairs."""
  return curves.mean_interval(
    [after.reward - before.reward for before, after in pairs]
  )


def _matches(
  rows: list[Row], best: list[Row], by_arm: dict[Arm, dict[int, Outcome]]
) -> list[Match]:
  """Each arm with a brake beside arms without one; see `Match`."""
  kl = {row.arm: row.means['kl_rollout'].mean for row in rows}
  reward = {row.arm: row.means['reward'].mean for row in rows}
  matches = []

  def match(arm: Arm, control: Arm, by: str) -> None:
    gap = _gap(_pairs(by_arm, control, arm))
    matches.append(Match(arm, control, by, (kl[arm], kl[control]), gap))

  for arm in kl:
    controls = [
      other
      for other in kl
      if other.brake == 'none' and _pairs(by_arm, other, arm)
      if min(kl[other], kl[arm]) > 0  # else it has no logarithm, or is NaN
    ]
    if arm.brake == 'none' or not controls:
      continue
    # By the ratio of the two, because KL spans orders of magnitude.
    apart = {x: abs(math.log(kl[x] / kl[arm])) for x in controls}
    match(arm, min(controls, key=apart.__getitem__), NEAREST)
    if calm := [other for other in controls if kl[other] <= kl[arm]]:
      match(arm, max(calm, key=reward.__getitem__), CALMER)
  plain = {row.arm.updates: row.arm for row in best if row.arm.brake == 'none'}
  for arm in (row.arm for row in best if row.arm.brake != 'none'):
    control = plain.get(arm.updates)
    if control and _pairs(by_arm, control, arm):
      match(arm, control, BEST)
  return matches


def summary_to_json(summary: Summary) -> dict[str, Any]:
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


_SMALL = 0.05  # of a reward between 0 and 1

GENERAL = {
  'carried': Claim(
    'Without a brake, momentum moves clipped tokens outward (the carried part '
    'of an update, nats; the arm of which this is least sure).',
    f'{FONTANA}, prop. 3',
    low=claims.ABOVE_0,
  ),
  'fresh': Claim(
    'The fresh gradient has little part in it (size of its part / that of the '
    'carried part; the arm whose interval reaches highest).',
    'derived',
    high=0.2,
  ),
  'project': Claim(
    'The projection ends the overshoot (with it / without a brake, at the same '
    'rate and number of updates; the arm whose interval reaches highest).',
    'derived',
    high=0.1,
  ),
  'gain': Claim(
    'With each at its best rate, no brake raises the mean reward by more than '
    f'{_SMALL} (the gain whose interval reaches highest).',
    'asked by this project',
    high=_SMALL,
  ),
  'inside': Claim(
    'No best rate lies at an end of its grid (share of them).',
    'wanted of a fair comparison',
    1.0,
    1.0,
  ),
}


_TITLES = {
  'brakes': ('E3c', 'brakes on clipped tokens'),
  'brakes_updates': ('E3b', 'brakes on clipped tokens, by updates per rollout'),
  'brakes_smollm2': ('E3d', 'brakes on clipped tokens of SmolLM2-135M'),
}


def experiment(name: str) -> Experiment:
  """The claims on the arms of a study, and how to test them.

  Args:
    name: One of `STUDIES`.
  """
  asked = dict(GENERAL)
  for brake, updates in _kinds(STUDIES[name]):
    asked[f'{brake}_{updates}'] = Claim(
      f'{brake}, {updates} updates per rollout: with each at its best rate, '
      'the brake raises the mean reward (with it - without).',
      'asked by this project',
      low=claims.ABOVE_0,
    )
    asked[f'{brake}_{updates}_kl'] = Claim(
      f'{brake}, {updates} updates per rollout: at its best rate the brake '
      'raises the mean reward over that of the arm without one whose KL per '
      'rollout is nearest (with it - without).',
      'asked by this project',
      low=claims.ABOVE_0,
    )
  return Experiment(*_TITLES[name], asked, measure, draw)


def _kinds(arms: Iterable[Arm]) -> list[tuple[str, int]]:
  """Brakes that have several rates, each with its number of updates."""
  number = collections.Counter(a.kind for a in arms if a.brake != 'none')
  return [kind for kind in number if number[kind] > 1]


def numbers(outcomes: Iterable[Outcome]) -> dict[str, Any]:
  """All outcomes, as JSON can hold them."""
  return without_nan({'runs': [dataclasses.asdict(one) for one in outcomes]})


def _outcomes(numbers: claims.Numbers) -> list[Outcome]:
  """The outcomes, from the numbers alone."""
  return [sweeps.outcome_of(Arm, Outcome, line) for line in numbers['runs']]


def _gains(summary: Summary, by: str) -> dict[tuple[str, int], Match]:
  """For the best arm of each brake and number of updates, its match."""
  best = {row.arm for row in summary.best}
  return {
    match.arm.kind: match
    for match in summary.matches
    if match.arm in best and match.by == by
  }


def measure(numbers) -> dict[str, Measured]:
  """See `Experiment`."""
  outcomes = _outcomes(numbers)
  summary = summarise(outcomes)
  plain = {
    (one.arm, one.seed): one for one in outcomes if one.arm.brake == 'none'
  }
  carried = [one for one in plain.values() if one.overshoot_carried]
  projected = []
  for one in outcomes:
    base = plain.get((dataclasses.replace(one.arm, brake='none'), one.seed))
    if one.arm.brake == 'project' and base and base.overshoot:
      projected.append((one, base))
  at_best, at_kl = _gains(summary, BEST), _gains(summary, NEAREST)
  found = {
    'carried': _furthest(((x.arm, x.overshoot_carried) for x in carried), -1),
    'fresh': _furthest(
      (x.arm, abs(x.overshoot_fresh / x.overshoot_carried)) for x in carried
    ),
    'project': _furthest(
      (one.arm, one.overshoot / base.overshoot) for one, base in projected
    ),
    'gain': claims.furthest(
      Measured(*one.gap, f'({one.arm.label})') for one in at_best.values()
    ),
    'inside': _inside(summary),
  }
  for kind in _kinds(row.arm for row in summary.rows):
    for matches, end in ((at_best, ''), (at_kl, '_kl')):
      match = matches.get(kind)
      found[f'{kind[0]}_{kind[1]}{end}'] = (
        claims.UNKNOWN
        if match is None
        else Measured(*match.gap, f'{match.arm.label}, {match.control.label}.')
      )
  return found


def _furthest(values: Iterable[tuple[Arm, float]], sign: int = 1) -> Measured:
  """The mean over seeds of the arm that `claims.furthest` chooses."""
  by_arm: dict[Arm, list[float]] = {}
  for arm, value in values:
    by_arm.setdefault(arm, []).append(value)
  return claims.furthest(
    (claims.over_seeds(one, f'({arm.label})') for arm, one in by_arm.items()),
    sign,
  )


def _inside(summary: Summary) -> Measured:
  """The share of best rates at no end of their grid, brakes or not."""
  arms = [row.arm for row in summary.rows]
  inside = [
    min(tried) < best.arm.lr < max(tried)
    for best in summary.best
    for tried in [[arm.lr for arm in arms if arm.kind == best.arm.kind]]
  ]
  return Measured(sum(inside) / len(inside)) if inside else claims.UNKNOWN


def draw(numbers, found, figure, colors) -> str:
  """See `Experiment`."""
  summary = summarise(_outcomes(numbers))
  at_best, at_kl = _gains(summary, BEST), _gains(summary, NEAREST)
  # The panels share their rows.
  names = [*dict.fromkeys(brake for brake, _ in (*at_kl, *at_best))]
  panels = figure.subplots(1, 2, sharey=True)
  for axes, gains, title in (
    (panels[0], at_best, 'each at its best rate'),
    (panels[1], at_kl, 'at the nearest KL per rollout'),
  ):
    counts = sorted({updates for _, updates in gains})
    middle = (len(counts) - 1) / 2
    for place, (color, updates) in enumerate(zip(figures.SERIES, counts)):
      kinds = [kind for kind in gains if kind[1] == updates]
      axes.errorbar(
        [gains[kind].gap.mean for kind in kinds],
        # Series of one brake lie beneath each other, about its row.
        [names.index(brake) + 0.16 * (place - middle) for brake, _ in kinds],
        xerr=[gains[kind].gap.half for kind in kinds],
        fmt='o',
        markersize=4,
        color=colors[color],
        label=f'{updates} updates',
      )
    axes.axvline(0, color=colors['faint'], linewidth=1)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(-0.5, max(len(names), 1) - 0.5)
    axes.locator_params(axis='x', nbins=5)
    axes.set(
      xlabel='reward with the brake - without',
      title=f'{title}; 95 % intervals',
    )
  if not at_best:
    return 'No brake was run at several rates, beside none at several rates'
  handles = panels[0].get_legend_handles_labels()
  figure.legend(*handles, loc='outside lower center', ncols=len(handles[0]))
  most = max(at_best.values(), key=lambda match: match.gap.mean)
  return (
    'The most that a brake adds to the mean reward, each at its best rate: '
    f'{claims.value(Measured(*most.gap))} ({most.arm.label})'
  )


_NOTES = f"""\
a±b: mean over the seeds, and half the width of its 95 % t-interval.
(xk): the mean of the base is k times this mean. The base of an arm has no
brake and the same learning rate and updates per rollout; that of an arm without
a brake has {BASE_UPDATES} updates.
overshoot, positive, carried, fresh: nats per update, over the tokens that the
arm's own trust region clips. The brake 'narrow' clips tokens that the base
still trains.
KL: of the policy before the updates of a rollout and the one after, nats per
token.
clipped: share of tokens that are clipped after an update; outside: share that
are outside the trust region after the last update of a rollout.
The best learning rate is chosen by the reward that is shown, and so is the
control of 'no more KL'. Both rewards are therefore somewhat too high."""


def show(judged: pages.Judged) -> None:
  """Prints tables and verdicts, for a person."""
  pages.show_tables(tables(judged.summary), _NOTES)
  pages.show_judged(judged)


def to_json(judged: pages.Judged) -> dict[str, Any]:
  """Arms, then verdicts, as JSON can hold them."""
  # The numbers are the same as `arms`, run by run.
  verdicts = pages.verdicts_to_json(judged.results)
  return {**summary_to_json(judged.summary), 'claims': verdicts}


def tables(summary: Summary) -> dict[str, list[dict[str, str]]]:
  """The text of every cell, by the title of its table and by its column."""
  return {
    'what is learned': [_learned(row) for row in summary.rows],
    'what clipped tokens do': [_moved(row) for row in summary.rows],
    'the best learning rate of each brake': [
      {
        'arm': row.arm.label,
        'reward': mean_and_half(row.means['reward']),
        'KL': mean_and_half(row.means['kl_rollout']),
        'overshoot': mean_and_half(row.means['overshoot']),
      }
      for row in summary.best
    ],
    'each brake beside an arm without one': [
      {
        'arm': match.arm.label,
        'control': match.control.label,
        'chosen by': match.by,
        'KL of both': ' and '.join(map(number, match.kl)),
        'reward, arm - control': mean_and_half(match.gap, '+'),
      }
      for match in summary.matches
    ],
  }


def _learned(row: Row) -> dict[str, str]:
  means = row.means
  return {
    'arm': row.arm.label,
    'seeds': str(row.seeds),
    'reward': mean_and_half(means['reward']),
    'reward - base': mean_and_half(row.gap, '+') if row.gap else '',
    'last third': mean_and_half(means['reward_last']),
    'held-out': mean_and_half(means['accuracy']),
    's/update': number(means['secs_per_update'].mean),
  }


def _moved(row: Row) -> dict[str, str]:
  means = row.means

  def reduced(name):
    factor = row.factors.get(name)
    return mean_and_half(means[name]) + (f' (x{factor:.1f})' if factor else '')

  return {
    'arm': row.arm.label,
    'overshoot': reduced('overshoot'),
    'positive': reduced('overshoot_positive'),
    'carried': number(means['overshoot_carried'].mean),
    'fresh': number(means['overshoot_fresh'].mean),
    'KL': reduced('kl_rollout'),
    'clipped': number(means['ends_clipped'].mean),
    'outside': number(means['rollout_outside'].mean),
  }


_COMPILING = 3  # rollouts at the start that compile; their time does not count


def study(name: str) -> sweeps.Study:
  """A study of brakes.

  An arm sets the brake, the updates per rollout and the learning rate. The
  study sets the group (8 completions), the rise of the learning rate (5
  rollouts) and how often overshoot is measured (every 5th rollout).

  Args:
    name: One of `STUDIES`.
  """
  sweep = sweeps.Sweep(
    name, STUDIES[name], Arm, Outcome, run_arm, _progress, _check
  )
  return sweeps.Study(
    sweep, experiment(name), numbers, summarise, show, to_json
  )


def _check(config: Config) -> None:
  if config.learner.method != _METHOD:
    raise ValueError(
      f'learner.method={config.learner.method!r} in a study of brakes, two of '
      f'which are {_METHOD} with another clip; give learner.method={_METHOD!r}.'
    )


def _progress(outcome: Outcome) -> str:
  return (
    f'reward {outcome.reward:.3f}  overshoot {outcome.overshoot:.3f}  '
    f'kl {outcome.kl_rollout:.3f}'
  )


def run_arm(config: Config, arm: Arm, seed: int, params: Any) -> Outcome:
  """Trains one arm from given parameters.

  Args:
    config: What all arms share; `steps` is the number of rollouts.
    arm: How to train.
    seed: Of the sampling and of the order of the prompts.
    params: The parameters to begin with; they are not changed.

  Returns:
    An `Outcome`.
  """
  run = build.run(config_of(config, arm, seed))
  updater, records = build.updater(run, build.frozen_params(run)), []
  # `init` donates its argument, and the next arm needs the parameters again.
  state = updater.compiled.init(jax.tree.map(jnp.copy, params))
  with build_rewards.workers(run.limits, run.rewards) as workers:
    run = dataclasses.replace(run, workers=workers)
    done = bare.trained(run, updater, state)
    for step, (_, scalars, secs, _) in enumerate(done):
      # Measuring overshoot takes time too, so the seconds of these rollouts are
      # kept apart.
      kind = 'secs_watched' if updater.spec.watches(step) else 'secs_per_update'
      records.append({**scalars, kind: secs / arm.updates})
    accuracy = sampling.evaluated(run, run.steps)['heldout_accuracy']
  return _outcome(arm, seed, records, accuracy)


def _outcome(
  arm: Arm, seed: int, records: list[dict[str, float]], accuracy: float | None
) -> Outcome:
  """The outcome of a run from its records, one for each rollout."""

  def average(name, records, mean=np.mean):
    values = [record[name] for record in records if name in record]
    return float(mean(values)) if values else math.nan

  measured = {name: average(name, records) for name in METRICS}
  # Rounded up, so that even a run of one rollout has a last third.
  last = records[-math.ceil(len(records) / 3) :]
  measured |= {
    'reward_last': average('reward', last),
    'accuracy': math.nan if accuracy is None else accuracy,
    'secs_per_update': average(
      'secs_per_update', records[_COMPILING:], statistics.median
    ),
  }
  return Outcome(arm, seed, len(records), **measured)
