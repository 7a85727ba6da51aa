"""The section about gradients of prompts, and the phases of a run.

References:
  Ge et al., `Why GRPO Needs Normalization: A Local-Curvature Perspective on
  Adaptive Gradients <https://arxiv.org/abs/2601.23135>`_, 2026
"""

from collections.abc import Sequence
import functools
import math
from typing import NamedTuple

import numpy as np

from grpo_jax import monitor
from grpo_jax.lab.report import curves
from grpo_jax.lab.report import read
from grpo_jax.lab.report import words
from grpo_jax.lab.report.read import Group
from grpo_jax.lab.report.read import Run
from grpo_jax.lab.report.sections import Charts
from grpo_jax.lab.report.types import Part
from grpo_jax.lab.report.types import Section
from grpo_jax.lab.report.types import Table
from grpo_jax.lab.report.types import Text

NAMES = 'I', 'II', 'III'
"""Of the phases."""
FACTOR = 8 / 3
"""C(T) of the paper over the mean deviation of rewards within groups."""
_PREFIX = 'geometry_'
_METHOD = 'learner.method'  # and its arguments, whose names begin so
_LEAST = 5  # measured rollouts on each side of a step
_ERRORS = 4  # standard errors that a step is larger than
_MOST_ALIKE = 0.99  # autocorrelation
_COLUMNS = (
  'reward_std', 'cosine_mean', 'cosine_std', 'cosine_small', 'cosine_negative',
)  # fmt: skip
_RULE = (
  'Phases are those of Ge et al. (arXiv:2601.23135). The second begins where '
  'the deviation of rewards within groups falls in a step, the third where '
  'after that the deviation of cosines rises in a step. A step is the best '
  f'division in two levels, each of {_LEAST} measured rollouts or more. It '
  f'counts if the levels differ by {_ERRORS} standard errors and fit better '
  'than a straight line; and the variance of cosines must rise by more than '
  'sketching adds to it. The standard errors allow for rollouts that resemble '
  'the one before, as far as the autocorrelation about the levels may go: of '
  'series that only wander, at most about one in twenty has a step.'
)
_BOUND = (
  'C(T) of that paper is 8/3 times the mean deviation of rewards within '
  'groups, if rewards are 0 or 1. Below 1, its bound on the gradients of GRPO '
  'is better than its bound without the division by the deviation. The '
  'deviation of a group as it was drawn is smaller than that of its prompt, by '
  'a sixth in groups of 8 with a success rate of 0.2.'
)
_ONE_SEED = (
  'One seed gives no interval: what chance does to a training lasts, so the '
  'rollouts of one pair of runs do not tell how another pair would differ.'
)
_WHOSE = (
  'Phases of one run favour it: where its rewards rise by chance before those '
  'of the other run, its second phase begins there.'
)


class Phases(NamedTuple):
  """Where the phases of a run begin, counted in measured rollouts."""

  second: int | None  # the first rollout of the second phase, if it is found
  third: int | None
  reason: str  # why a phase is not found; '' if all three are


def phases(
  reward_std: np.ndarray, cosine_std: np.ndarray, noise: np.ndarray
) -> Phases:
  """The phases in the metrics of a run; `_RULE` says by which rule.

  Args:
    reward_std: f64[N], the metric `geometry_reward_std` of N measured rollouts,
      in their order.
    cosine_std: f64[N], `geometry_cosine_std` of these.
    noise: f64[N], `geometry_cosine_noise` of these.
  """
  if len(reward_std) < 2 * _LEAST:
    return Phases(None, None, f'No phases can be told: {_few(reward_std)}.')
  second = _step(-reward_std)
  if second is None:
    return Phases(
      None,
      None,
      'No phases can be told: the deviation of rewards within groups does not '
      'fall in a step.',
    )
  later = cosine_std[second:]
  if len(later) < 2 * _LEAST:
    reason = f'No third phase can be told: after the fall, {_few(later)}.'
    return Phases(second, None, reason)
  further = _step(later)
  if further is not None:
    levels = np.mean(later[:further] ** 2), np.mean(later[further:] ** 2)
    if levels[1] - levels[0] > np.mean(noise[second:] ** 2):
      return Phases(second, second + further, '')
  return Phases(
    second,
    None,
    'No third phase can be told: the deviation of cosines does not rise in a '
    'step that is larger than the noise.',
  )


def _few(values: np.ndarray) -> str:
  """That there are too few measured rollouts for a step."""
  return (
    f'gradients of two prompts or more were compared in {len(values)} of the '
    f'{2 * _LEAST} rollouts that it takes'
  )


def spans(
  found: Phases, measured: Sequence[int] | np.ndarray, first: int, end: int
) -> dict[str, range]:
  """The rollouts of each phase that was found, by its name.

  Args:
    found: What `phases` returned.
    measured: The numbers of the measured rollouts, ascending.
    first: The number of the first rollout of the run.
    end: One more than that of the last.

  Returns:
    Ranges of the numbers of rollouts, which together are the run. The last is
    that of the last phase that was found; nothing if there are no phases.

  >>> spans(Phases(2, None, ''), [2, 4, 6, 8], 1, 10)
  {'I': range(1, 6), 'II': range(6, 10)}
  """
  begins = [int(measured[x]) for x in found[:2] if x is not None]
  if not begins:
    return {}
  cuts = [first, *begins, end]
  return dict(zip(NAMES, map(range, cuts, cuts[1:])))


def _step(values: np.ndarray) -> int | None:
  """Where a series rises in a step: the first place on the upper level."""
  number = len(values)
  places = range(_LEAST, number - _LEAST + 1)
  if not places:
    return None

  def left(place):
    """The sum of squares that two levels leave."""
    return sum(np.sum((x - x.mean()) ** 2) for x in np.split(values, [place]))

  best = min(places, key=left)
  low, high = np.split(values, [best])
  error = left(best) / (number - 2) * (1 / len(low) + 1 / len(high))
  error *= _inflation(np.concatenate([low - low.mean(), high - high.mean()]))
  rises = high.mean() - low.mean() > _ERRORS * math.sqrt(error)
  time = np.arange(number)
  line = np.polyval(np.polyfit(time, values, 1), time)
  return best if rises and left(best) < np.sum((values - line) ** 2) else None


def _inflation(rest: np.ndarray) -> float:
  r"""By how much alike neighbours enlarge the variance of a mean.

  .. math:: (1 + r) / (1 - r)

  This is the number of values over the number of independent ones that would
  tell as much, if each value depends on the one before alone. As r stands the
  upper end of its interval: the levels have been fitted to the series, which
  takes much of the autocorrelation out of a short one.

  Args:
    rest: f64[N], what two levels leave of a series, or its mean.
  """
  squares = float(np.sum(rest**2))
  if not squares:
    return 1.0
  found = float(np.sum(rest[1:] * rest[:-1])) / squares
  most = min(max(0.0, found + 2 / math.sqrt(len(rest))), _MOST_ALIKE)
  return (1 + most) / (1 - most)


def mean_over_rollouts(values: np.ndarray) -> curves.Interval:
  """The mean of rollouts of one run that follow each other.

  The interval is that of Student's t, made longer by how much a rollout may
  resemble the one before; see `_inflation`. It tells what another drawing of
  the same rollouts would give, by the same policies. It does not tell what a
  run with another seed would give.

  Args:
    values: f64[N], at least one, in the order of the rollouts.

  >>> mean_over_rollouts(np.array([0.5, 0.5]))
  Interval(mean=0.5, half=0.0, count=0)
  """
  mean, half, _ = curves.mean_interval(values.tolist())
  longer = math.sqrt(_inflation(values - mean))
  return curves.Interval(mean, half * longer)


def section(groups: Sequence[Group], charts: Charts) -> list[Section]:
  """Gradients of prompts, if a run has compared them; else nothing."""
  names = [name for name in charts.left if name.startswith(_PREFIX)]
  first = monitor.GROUPS['gradients of prompts']
  parts = charts.make([*first, *sorted(set(names) - set(first))])
  told = {
    run.name: found
    for group in groups
    for run in group.runs
    if (found := _found(run)) is not None
  }
  if not parts and not told:
    return []
  runs = [run for group in groups for run in group.runs if run.name in told]
  said = [part for run in runs for part in _phases(run, told[run.name])]
  said += [part for pair in _pairs(groups) for part in _gains(*pair, told)]
  notes = [Text(_RULE, 'note'), Text(_BOUND, 'note')]
  return [Section('Gradients of prompts', [*said, *notes, *parts])]


class _Found(NamedTuple):
  """What a run tells of its phases.

  Attributes:
    spans: See `spans`.
    reason: See `Phases`.
    steps: i64[N], the rollouts in which pairs of gradients were compared.
    values: f64[N] by name, what was measured in them.
  """

  spans: dict[str, range]
  reason: str
  steps: np.ndarray
  values: dict[str, np.ndarray]


def _found(run: Run) -> _Found | None:
  """The phases of a run; None if it has not compared gradients."""
  wanted = *_COLUMNS, 'cosine_noise'
  points = {name: run.metrics.points(_PREFIX + name) for name in wanted}
  if not any(len(at) for at, _ in points.values()):
    return None
  # A rollout with fewer than two gradients has no cosines.
  steps = functools.reduce(np.intersect1d, [at for at, _ in points.values()])
  values = {name: x[np.isin(at, steps)] for name, (at, x) in points.items()}
  found = phases(
    values['reward_std'], values['cosine_std'], values['cosine_noise']
  )
  return _Found(
    spans(found, steps, 1, run.done + 1), found.reason, steps, values
  )


def _phases(run: Run, found: _Found) -> list[Part]:
  """The phases of a run, and the means of metrics in each of them."""
  if not found.spans:
    return [Text(f'{run.name}: {found.reason}')]
  rewards, binary = run.metrics.points('reward'), _is_binary(run)

  def cells(span):
    inside = _inside(found.steps, span)
    deviation, *others = (
      (words.unit(_PREFIX + name), float(found.values[name][inside].mean()))
      for name in _COLUMNS
    )
    reward = rewards[1][_inside(rewards[0], span)]
    yield f'{span.start:,} to {span.stop - 1:,}'
    yield words.number(float(reward.mean()) if len(reward) else math.nan)
    yield words.number(deviation[1])
    yield words.number(FACTOR * deviation[1] if binary else math.nan)
    for unit, mean in others:
      yield words.number(mean, unit)

  rows = [(name, *cells(span)) for name, span in found.spans.items()]
  number = words.plural(len(rows), 'phase')
  title = f'{number} of {run.name}, by {len(found.steps):,} measured rollouts'
  deviation, *others = (words.label(_PREFIX + name) for name in _COLUMNS)
  head = 'phase', 'rollouts', 'mean reward', deviation, 'C(T)', *others
  table = Table(title, head, rows)
  reason = f'{run.name}: {found.reason}' if found.reason else ''
  return [table, *([Text(reason)] if reason else [])]


def _inside(steps: np.ndarray, span: range) -> np.ndarray:
  return (steps >= span.start) & (steps < span.stop)


def _is_binary(run: Run) -> bool:
  """Whether rewards are 0 and 1 alone, as far as their means tell."""
  accuracy, reward = (run.metrics.points(x) for x in ('accuracy', 'reward'))
  return (
    len(reward[0]) > 0
    and np.array_equal(accuracy[0], reward[0])
    and np.allclose(accuracy[1], reward[1], rtol=0, atol=1e-6)
  )


def _pairs(groups: Sequence[Group]) -> list[tuple[Group, Group]]:
  """The first group with each other one that differs in its method alone."""
  first, *others = groups

  def differ(other):
    return read.differing([first.first, other.first])

  return [
    (first, other)
    for other in others
    if all(field.startswith(_METHOD) for field in differ(other))
  ]


def _gains(one: Group, other: Group, told: dict[str, _Found]) -> list[Part]:
  """By how much one group earns more than another in each phase.

  Args:
    one: Its phases count, or those of the other if it measured no gradients.
    other: Runs with another method.
    told: The phases of runs, by the names of these.
  """
  by_seed = [
    {str(run.saved.get('seed')): run for run in group.runs}
    for group in (one, other)
  ]
  whose = one if any(run.name in told for run in one.runs) else other
  found = {str(x.saved.get('seed')): told.get(x.name) for x in whose.runs}
  gains: dict[str, dict[str, float]] = {}  # by phase and seed
  for seed in by_seed[0].keys() & by_seed[1].keys():
    known = found[seed]
    for name, span in known.spans.items() if known else ():
      gain = _gain(by_seed[0][seed], by_seed[1][seed], span)
      if math.isfinite(gain):
        gains.setdefault(name, {})[seed] = gain
  rows = [
    (
      name,
      ', '.join(sorted(gains[name])),
      words.with_half(*curves.mean_interval([*gains[name].values()])[:2]),
    )
    for name in NAMES
    if name in gains
  ]
  if not rows:
    return []
  title = (
    f'Reward of {one.name} minus that of {other.name}, by phase of {whose.name}'
  )
  table = Table(title, ('phase', 'seeds', 'difference of rewards'), rows)
  single = any(len(seeds) == 1 for seeds in gains.values())
  notes = [_WHOSE, *([_ONE_SEED] if single else [])]
  return [table, *(Text(note, 'note') for note in notes)]


def _gain(one: Run, other: Run, span: range) -> float:
  """The mean difference of rewards, over rollouts that both have."""
  at, mine = one.metrics.points('reward')
  place, theirs = other.metrics.points('reward')
  both = np.intersect1d(at, place)
  both = both[_inside(both, span)]
  if not len(both):
    return math.nan
  return float(np.mean(mine[np.isin(at, both)] - theirs[np.isin(place, both)]))
