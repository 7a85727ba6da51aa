"""Means of a few independent runs, and how sure one can be of them."""

from collections.abc import Sequence
import functools
import math
from typing import NamedTuple

import numpy as np

CONFIDENCE = 0.95


class Interval(NamedTuple):
  """A mean, and half the width of its confidence interval."""

  mean: float
  half: float  # NaN for a single value


def of_mean(values: Sequence[float]) -> Interval:
  r"""The mean of independent values with its 95 % confidence interval.

  .. math:: \bar x \pm t_{0.975, n - 1} \, s / \sqrt n

  with s the standard deviation of the n values and t the quantile of Student's
  distribution, which is right for few values if they are about normal.

  Args:
    values: At least one number.

  Returns:
    An `Interval`.

  >>> round(of_mean([1.0, 2.0, 3.0]).half, 3)
  2.484
  """
  mean, number = float(np.mean(values)), len(values)
  if number == 1:
    return Interval(mean, math.nan)
  error = float(np.std(values, ddof=1)) / math.sqrt(number)
  return Interval(mean, quantile(number) * error)


@functools.cache
def quantile(number: int) -> float:
  """Standard errors in half an interval for the mean of at least two values.

  >>> round(quantile(3), 3)
  4.303
  """
  from scipy import stats  # takes a second to import

  return float(stats.t.ppf((1 + CONFIDENCE) / 2, number - 1))
