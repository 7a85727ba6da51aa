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
from grpo_jax.lab.report import words
from grpo_jax.lab.report.read import Group
from grpo_jax.lab.report.read import Run
from grpo_jax.lab.report.sections import Charts
from grpo_jax.lab.report.types import Part
from grpo_jax.lab.report.types import Section
from grpo_jax.lab.report.types import Table
from grpo_jax.lab.report.types import Text

_PREFIX = 'geometry_'
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
  second = _step(-reward_std)
  if second is None:
    return Phases(
      None,
      None,
      'No phases can be told: the deviation of rewards within groups does not '
      'fall in a step.',
    )
  further = _step(cosine_std[second:])
  if further is not None:
    later = cosine_std[second:]
    levels = np.mean(later[:further] ** 2), np.mean(later[further:] ** 2)
    if levels[1] - levels[0] > np.mean(noise[second:] ** 2):
      return Phases(second, second + further, '')
  return Phases(
    second,
    None,
    'No third phase can be told: the deviation of cosines does not rise in a '
    'step that is larger than the noise.',
  )


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
    rest: f64[N], what two levels leave of a series.
  """
  squares = float(np.sum(rest**2))
  if not squares:
    return 1.0
  found = float(np.sum(rest[1:] * rest[:-1])) / squares
  most = min(max(0.0, found + 2 / math.sqrt(len(rest))), _MOST_ALIKE)
  return (1 + most) / (1 - most)


def section(groups: Sequence[Group], charts: Charts) -> list[Section]:
  """Gradients of prompts, if a run has compared them; else nothing."""
  names = [name for name in charts.left if name.startswith(_PREFIX)]
  first = monitor.GROUPS['gradients of prompts']
  parts = charts.make([*first, *sorted(set(names) - set(first))])
  if not parts:
    return []
  said = [
    part for group in groups for run in group.runs for part in _phases(run)
  ]
  return [Section('Gradients of prompts', [*said, Text(_RULE, 'note'), *parts])]


def _phases(run: Run) -> list[Part]:
  """The phases of a run, and the means of metrics in each of them."""
  wanted = *_COLUMNS, 'cosine_noise'
  points = [run.metrics.points(_PREFIX + name) for name in wanted]
  # A rollout with fewer than two gradients has no cosines.
  steps = functools.reduce(np.intersect1d, [steps for steps, _ in points])
  if not len(steps):
    return []
  by_name = {
    name: values[np.isin(at, steps)]
    for name, (at, values) in zip(wanted, points)
  }
  noise = by_name.pop('cosine_noise')
  found = phases(by_name['reward_std'], by_name['cosine_std'], noise)
  if found.second is None:
    return [Text(f'{run.name}: {found.reason}')]
  begins = [0, found.second, found.third or len(steps), len(steps)]
  rows = [
    (
      name,
      f'{steps[start]:,} to {steps[end - 1]:,}',
      *(
        words.number(one[start:end].mean(), words.unit(_PREFIX + column))
        for column, one in by_name.items()
      ),
    )
    for name, start, end in zip('I II III'.split(), begins, begins[1:])
    if start < end
  ]
  number = words.plural(len(rows), 'phase')
  title = f'{number} of {run.name}, by {len(steps):,} measured rollouts'
  head = [words.label(_PREFIX + name) for name in _COLUMNS]
  table = Table(title, ('phase', 'rollouts', *head), rows)
  return [table, *([Text(found.reason)] if found.reason else [])]
