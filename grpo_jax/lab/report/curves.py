"""Curves of runs: binned where there are many points, with intervals.

A curve of more points than it may have is cut into bins of the axis. A point
then is the mean of its bin, and the least and the largest value go with it, so
that a spike cannot vanish.
"""

from collections.abc import Sequence
import functools
import math
from typing import NamedTuple
import warnings

import numpy as np

from grpo_jax.lab.report.types import Curve
from grpo_jax.lab.report.types import Ends

CONFIDENCE = 0.95


class Interval(NamedTuple):
  """A mean, and half the width of its confidence interval."""

  mean: float
  half: float  # NaN for a single value
  count: int = 0  # of independent values; 0 where that says nothing


def mean_interval(values: Sequence[float]) -> Interval:
  r"""The mean of independent values with its 95 % confidence interval.

  .. math:: \bar x \pm t_{0.975, n - 1} \, s / \sqrt n

  with s the standard deviation of the n values and t the quantile of Student's
  distribution, which is right for few values if they are about normal.

  Args:
    values: At least one number.

  Returns:
    An `Interval`.

  >>> round(mean_interval([1.0, 2.0, 3.0]).half, 3)
  2.484
  """
  mean, number = float(np.mean(values)), len(values)
  if number == 1:
    return Interval(mean, math.nan, 1)
  deviation = float(np.std(values, ddof=1))
  return Interval(mean, half_width(deviation, number), number)


def half_width(deviation: float, number: int) -> float:
  """Half of the 95 % interval of the mean of some values.

  Args:
    deviation: s, of the values.
    number: How many they are, 2 or more.

  >>> round(half_width(1.0, 3), 3)
  2.484
  """
  return _quantile(number) * deviation / math.sqrt(number)


@functools.cache
def _quantile(number: int) -> float:
  """Standard errors in half an interval for the mean of at least two values.

  >>> round(_quantile(3), 3)
  4.303
  """
  from scipy import stats  # takes a second to import

  return float(stats.t.ppf((1 + CONFIDENCE) / 2, number - 1))


Points = tuple[np.ndarray, np.ndarray]  # x and values, x ascending

_TENTH = 10


def make_curve(
  name: str, points: Sequence[Points], most_points: int = 240
) -> Curve | None:
  """The curve of runs that differ in their seeds alone.

  Args:
    name: In the legend.
    points: For each run, x and the value there.
    most_points: Above this number of different x, these are cut into so many
      bins of equal width.

  Returns:
    The mean over the runs. The band is the 95 % t-interval of it, or for a
    single run the least and the largest value of each bin. None if no run has a
    value.

  >>> runs = [([1, 2], [0.0, 1.0]), ([1, 2], [0.5, 2.0])]
  >>> make_curve('', [tuple(map(np.array, run)) for run in runs]).mean
  array([0.25, 1.5 ])
  """
  points = [(x, y) for x, y in points if len(x)]
  if not points:
    return None
  places = np.unique(np.concatenate([x for x, _ in points]))
  is_binned = len(places) > most_points
  bins = np.arange(len(places))
  if is_binned:
    # Of equal width, and of whole numbers equally many: else bins of one and of
    # two values would alternate.
    span = float(places[-1] - places[0])
    width = span / most_points
    if np.all(places == np.round(places)):
      width = math.ceil((span + 1) / most_points)
    into = np.minimum((places - places[0]) // width, most_points - 1)
    bins = np.unique(into, return_inverse=True)[1]
  count = int(bins[-1]) + 1
  means = np.full((len(points), count), np.nan)
  least, most = np.full(count, np.inf), np.full(count, -np.inf)
  for row, (x, y) in enumerate(points):
    into = bins[np.searchsorted(places, x)]
    number = np.bincount(into, minlength=count)
    with np.errstate(invalid='ignore', divide='ignore'):
      means[row] = np.bincount(into, y, minlength=count) / number
    np.minimum.at(least, into, y)
    np.maximum.at(most, into, y)
  # Places ascend, and so do their bins.
  ends = places.astype(np.float64)
  since = ends[np.searchsorted(bins, np.arange(count))]
  until = ends[np.searchsorted(bins, np.arange(count), 'right') - 1]
  mean, half = _means(means)
  low, high, band = mean - half, mean + half, ''
  if len(points) > 1:
    band = '95 % interval of the mean over runs'
  elif is_binned:
    low, high, band = least, most, 'least to largest value'
  return Curve(
    name,
    (since + until) / 2,
    since,
    until,
    mean,
    low,
    high,
    least,
    most,
    means if len(points) > 1 else means[:0],
    band,
    _ends(points),
  )


def _means(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Mean and half the interval of each column, of the runs that have it."""
  number = np.isfinite(values).sum(0)
  with warnings.catch_warnings():  # columns of a single run
    warnings.simplefilter('ignore', RuntimeWarning)
    mean = np.nanmean(values, 0)
    deviation = np.nanstd(values, 0, ddof=1)
  half = np.full(len(mean), np.nan)
  for n in set(number.tolist()) - {0, 1}:
    same = number == n
    half[same] = _quantile(n) * deviation[same] / math.sqrt(n)
  return mean, half


def _ends(points: Sequence[Points]) -> Ends:
  """The first and the last tenth of each run; the mean over runs of them.

  Runs may end at different x. Each counts with a tenth of its own, so that none
  is left out because another goes on for longer.
  """
  sizes = [max(1, len(y) // _TENTH) for _, y in points]
  tenths = [(y[:n], y[-n:]) for (_, y), n in zip(points, sizes)]
  noise = [max(np.std(first), np.std(last)) for first, last in tenths]
  first = np.mean([np.mean(first) for first, _ in tenths])
  last = mean_interval([float(np.mean(last)) for _, last in tenths])
  return Ends(float(first), last.mean, float(np.mean(noise)), last.half)
