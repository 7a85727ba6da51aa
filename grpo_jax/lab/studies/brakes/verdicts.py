"""What the runs say: the claims, the numbers that they are about, a figure."""

from collections.abc import Iterable
from collections.abc import Sequence
import dataclasses
from typing import Any

from grpo_jax.lab.studies import claims
from grpo_jax.lab.studies import figures
from grpo_jax.lab.studies import sweeps
from grpo_jax.lab.studies.brakes.arms import Arm
from grpo_jax.lab.studies.brakes.summary import BEST
from grpo_jax.lab.studies.brakes.summary import NEAREST
from grpo_jax.lab.studies.brakes.summary import Match
from grpo_jax.lab.studies.brakes.summary import Outcome
from grpo_jax.lab.studies.brakes.summary import Summary
from grpo_jax.lab.studies.brakes.summary import summarise
from grpo_jax.lab.studies.claims import FONTANA
from grpo_jax.lab.studies.claims import Claim
from grpo_jax.lab.studies.claims import Experiment
from grpo_jax.lab.studies.claims import Measured
from grpo_jax.lab.studies.tables import without_nan

_SMALL = 0.05  # of a reward between 0 and 1

GENERAL = {
  'carried': Claim(
    'Without a brake, momentum moves clipped tokens outward (the carried part '
    'of an update, nats; the arm of which this is least sure).',
    f'{FONTANA}, prop. 3',
    low=0.0,
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


def experiment(arms: Sequence[Arm]) -> Experiment:
  """The claims on these arms, and how to test them."""
  asked = dict(GENERAL)
  for brake, updates in _kinds(arms):
    asked[f'{brake}_{updates}'] = Claim(
      f'{brake}, {updates} updates per rollout: with each at its best rate, '
      'the brake raises the mean reward (with it - without).',
      'asked by this project',
      low=0.0,
    )
    asked[f'{brake}_{updates}_kl'] = Claim(
      f'{brake}, {updates} updates per rollout: at its best rate the brake '
      'raises the mean reward over that of the arm without one whose KL per '
      'rollout is nearest (with it - without).',
      'asked by this project',
      low=0.0,
    )
  return Experiment(
    'E3b', 'brakes on clipped tokens', asked, lambda full: {}, measure, draw
  )


def _kinds(arms: Iterable[Arm]) -> list[tuple[str, int]]:
  """Brakes that have several rates, each with its number of updates."""
  rates: dict[tuple[str, int], int] = {}
  for arm in arms:
    if arm.brake != 'none':
      key = arm.brake, arm.updates
      rates[key] = rates.get(key, 0) + 1
  return [kind for kind, number in rates.items() if number > 1]


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
    (match.arm.brake, match.arm.updates): match
    for match in summary.matches
    if match.arm in best and match.by == by
  }


def measure(numbers) -> dict[str, Measured]:
  """See `Experiment`."""
  outcomes = _outcomes(numbers)
  summary = summarise(outcomes)
  of_run = {(one.arm, one.seed): one for one in outcomes}
  carried: dict[Arm, list[float]] = {}
  fresh: dict[Arm, list[float]] = {}
  left: dict[Arm, list[float]] = {}
  for (arm, seed), one in of_run.items():
    base = of_run.get((dataclasses.replace(arm, brake='none'), seed))
    if arm.brake == 'none' and one.overshoot_carried:
      carried.setdefault(arm, []).append(one.overshoot_carried)
      part = abs(one.overshoot_fresh / one.overshoot_carried)
      fresh.setdefault(arm, []).append(part)
    if arm.brake == 'project' and base and base.overshoot:
      left.setdefault(arm, []).append(one.overshoot / base.overshoot)
  at_best, at_kl = _gains(summary, BEST), _gains(summary, NEAREST)
  found = {
    'carried': _of_arms(carried, -1),
    'fresh': _of_arms(fresh),
    'project': _of_arms(left),
    'gain': claims.furthest(
      Measured(*one.gap, f'({one.arm.label})') for one in at_best.values()
    ),
    'inside': _inside(summary),
  }
  kinds = _kinds(row.arm for row in summary.rows)
  for of_kind, end in ((at_best, ''), (at_kl, '_kl')):
    for brake, updates in kinds:
      match = of_kind.get((brake, updates))
      found[f'{brake}_{updates}{end}'] = (
        claims.UNKNOWN
        if match is None
        else Measured(*match.gap, f'{match.arm.label}, {match.control.label}.')
      )
  return found


def _of_arms(values: dict[Arm, list[float]], sign: int = 1) -> Measured:
  """The mean over seeds of the arm that `claims.furthest` chooses."""
  return claims.furthest(
    (claims.over_seeds(one, f'({arm.label})') for arm, one in values.items()),
    sign,
  )


def _inside(summary: Summary) -> Measured:
  """The share of best rates at no end of their grid, brakes or not."""
  rates: dict[tuple[str, int], set[float]] = {}
  for row in summary.rows:
    key = row.arm.brake, row.arm.updates
    rates.setdefault(key, set()).add(row.arm.lr)
  inside = [
    min(tried) < row.arm.lr < max(tried)
    for row in summary.best
    for tried in [rates[row.arm.brake, row.arm.updates]]
  ]
  return Measured(sum(inside) / len(inside)) if inside else claims.UNKNOWN


def draw(numbers, figure, colors) -> str:
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
    for color, updates in zip(figures.SERIES, counts):
      kinds = [kind for kind in gains if kind[1] == updates]
      axes.errorbar(
        [gains[kind].gap.mean for kind in kinds],
        [_place(names.index(kind[0]), color) for kind in kinds],
        xerr=[gains[kind].gap.half for kind in kinds],
        fmt='o',
        markersize=4,
        color=colors[color],
        label=f'{updates} updates',
      )
    axes.axvline(0, color=colors['faint'], linewidth=1)
    axes.set_yticks(range(len(names)), names)
    axes.locator_params(axis='x', nbins=5)
    axes.set_xlabel('reward with the brake - without')
    axes.set_title(f'{title}; 95 % intervals')
  if not at_best:
    return 'No brake was run at several rates, beside none at several rates'
  handles = panels[0].get_legend_handles_labels()
  figure.legend(*handles, loc='outside lower center', ncols=len(handles[0]))
  most = max(at_best.values(), key=lambda match: match.gap.mean)
  return (
    'The most that a brake adds to the mean reward, each at its best rate: '
    f'{claims.value(Measured(*most.gap))} ({most.arm.label})'
  )


def _place(row: int, color: str) -> float:
  """Where on the axis: series of one brake lie beneath each other."""
  return row + 0.16 * (figures.SERIES.index(color) - 1)
