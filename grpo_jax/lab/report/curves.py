"""Curves of runs: binned where there are many points, with intervals.

A curve of more points than it may have is cut into bins of the axis. A point
then is the mean of its bin, and the least and the largest value go with it, so
that a spike cannot vanish.
"""

from collections.abc import Sequence
import math
import warnings

import numpy as np

from grpo_jax.lab.report import intervals
from grpo_jax.lab.report.types import Curve
from grpo_jax.lab.report.types import Ends

Points = tuple[np.ndarray, np.ndarray]  # x and values, x ascending

_TENTH = 10


def of_runs(
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
  >>> of_runs('', [tuple(map(np.array, run)) for run in runs]).mean
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
  of_each = np.full((len(points), count), np.nan)
  least, most = np.full(count, np.inf), np.full(count, -np.inf)
  for row, (x, y) in enumerate(points):
    into = bins[np.searchsorted(places, x)]
    number = np.bincount(into, minlength=count)
    with np.errstate(invalid='ignore', divide='ignore'):
      of_each[row] = np.bincount(into, y, minlength=count) / number
    np.minimum.at(least, into, y)
    np.maximum.at(most, into, y)
  since, until = np.full(count, np.inf), np.full(count, -np.inf)
  np.minimum.at(since, bins, places)
  np.maximum.at(until, bins, places)
  mean, half = _means(of_each)
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
    of_each if len(points) > 1 else of_each[:0],
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
    half[same] = intervals.quantile(n) * deviation[same] / math.sqrt(n)
  return mean, half


def _ends(points: Sequence[Points]) -> Ends:
  """The first and the last tenth of each run; the mean over runs of them.

  Runs may end at different x. Each counts with a tenth of its own, so that none
  is left out because another goes on for longer.
  """
  firsts, lasts, noises = [], [], []
  for _, y in points:
    size = max(1, len(y) // _TENTH)
    first, last = y[:size], y[-size:]
    firsts.append(float(np.mean(first)))
    lasts.append(float(np.mean(last)))
    noises.append(max(float(np.std(first)), float(np.std(last))))
  last = intervals.of_mean(lasts)
  return Ends(
    float(np.mean(firsts)), last.mean, float(np.mean(noises)), last.half
  )
