"""Intervals against closed forms of Student's distribution."""

import math

import numpy as np
import pytest

from grpo_jax.lab.report import curves

P = 0.975
QUANTILES = {  # by degrees of freedom, in closed form
  1: math.tan(math.pi * (P - 0.5)),
  2: (2 * P - 1) * math.sqrt(2 / (4 * P * (1 - P))),
  4: 2
  * math.sqrt(
    math.cos(math.acos(math.sqrt(4 * P * (1 - P))) / 3)
    / math.sqrt(4 * P * (1 - P))
    - 1
  ),
}


@pytest.mark.parametrize('freedom', QUANTILES)
def test_the_half_width_is_students_quantile_times_the_error(freedom):
  values = np.random.default_rng(freedom).normal(size=freedom + 1)
  got = curves.mean_interval(values.tolist())
  error = values.std(ddof=1) / math.sqrt(freedom + 1)
  assert got.mean == pytest.approx(values.mean(), rel=1e-12)
  assert got.half == pytest.approx(QUANTILES[freedom] * error, rel=1e-9)


def test_many_values_have_the_normal_quantile():
  values = [0.0, 2.0] * 50_000
  normal = 1.959963984540054  # whose error function is 0.95
  assert math.erf(normal / math.sqrt(2)) == pytest.approx(0.95, rel=1e-12)
  error = math.sqrt(100_000 / 99_999) / math.sqrt(100_000)
  half = curves.mean_interval(values).half
  assert half == pytest.approx(normal * error, rel=3e-5)
  assert half > normal * error


def test_a_single_value_has_no_interval():
  one = curves.mean_interval([4.0])
  assert one.mean == 4 and math.isnan(one.half)


def test_the_interval_covers_what_it_should():
  """Of normal values, five at a time."""
  draws = np.random.default_rng(0).normal(size=(4000, 5))
  found = [curves.mean_interval(row.tolist()) for row in draws]
  share = np.mean([abs(one.mean) <= one.half for one in found])
  assert abs(share - curves.CONFIDENCE) < 0.011  # three deviations
