"""Numbers in few characters, and the time left."""

import math
import random

import pytest

from grpo_jax.monitor import formatting


@pytest.mark.parametrize(
  'value, shown',
  [
    (0.0, '0'),
    (1e-6, '1.0e-06'),
    (-3.2e-4, '-3.2e-04'),
    (0.0123, '0.0123'),
    (1.0, '1.000'),
    (-0.5, '-0.500'),
    (99.96, '100.0'),
    (3456.0, '3456'),
    (75_123.0, '75.1k'),
    (181_000.0, '181k'),
    (1.5e6, '1.5M'),
    (2e9, '2.0G'),
    (math.nextafter(1e15, 0), '1000T'),
    (-math.nextafter(1e15, 0), '-1000T'),
    (1e15, '1.0e+15'),
    (float('nan'), 'nan'),
    (float('-inf'), '-inf'),
  ],
)
def test_number(value, shown):
  assert formatting.number(value) == shown


def test_numbers_are_short_and_right():
  generator = random.Random(0)
  units = {'k': 1e3, 'M': 1e6, 'G': 1e9, 'T': 1e12}
  for _ in range(2000):
    value = generator.uniform(-10, 10) * 10 ** generator.uniform(-12, 16)
    shown = formatting.number(value)
    assert len(shown) <= 8
    unit = units.get(shown[-1], 1.0)
    assert float(shown.rstrip('kMGT')) * unit == pytest.approx(value, rel=0.051)


def test_duration():
  for secs, shown in ((0, '0:00'), (59.9, '0:59'), (3600, '1:00:00')):
    assert formatting.duration(secs) == shown
  assert formatting.duration(2 * 86400 + 5) == '2d 0:00:05'


class Clock:
  def __init__(self):
    self.now = 100.0

  def __call__(self):
    return self.now


def test_the_step_that_compiles_is_left_out():
  clock = Clock()
  pace = formatting.Pace(50, clock)
  for step, secs in ((0, 30.0), (1, 60.0)):
    clock.now += secs
    pace.tick(step)
    assert pace.left() is None
  for step, secs in ((2, 2.0), (3, 4.0)):
    clock.now += secs
    pace.tick(step)
  assert pace.left() == 47 * 3.0
  clock.now += 10.0
  assert pace.left() == 47 * 3.0 - 10.0
  clock.now += 1000.0
  assert pace.left() == 0.0


def test_the_average_moves():
  clock = Clock()
  pace = formatting.Pace(101, clock)
  for step in range(41, 101):  # a run that goes on from step 40
    clock.now += 7.0 if step <= 80 else 3.0
    pace.tick(step)
  assert pace.left() == pytest.approx(3.0)


def test_a_jump_counts_its_steps():
  clock = Clock()
  pace = formatting.Pace(20, clock)
  pace.tick(1)
  clock.now += 8.0
  pace.tick(5)
  assert pace.left() == 30.0
