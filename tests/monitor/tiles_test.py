"""Large numbers and curves."""

import pytest

from grpo_jax.monitor import formatting
from grpo_jax.monitor import view


@pytest.mark.parametrize('value', [0.743, -0.25, 75_100.0, 1.5e6, 0.0, 1.0])
def test_a_large_number_is_three_equal_lines(value):
  text = formatting.number(value)
  lines = view.big(text)
  assert lines is not None and len(lines) == view.BIG_LINES
  assert len({len(line) for line in lines}) == 1
  assert len(lines[0]) <= 4 * len(text) + 2


def test_the_digits_differ():
  drawn = {tuple(view.big(digit) or ()) for digit in '0123456789'}
  assert len(drawn) == 10


@pytest.mark.parametrize('text', ['', 'nan', '-inf', '3.2e-04'])
def test_what_cannot_be_drawn(text):
  assert view.big(text) is None


@pytest.mark.parametrize(
  'values, height, low, high, drawn',
  [
    (range(8), 1, 0, 7, ['▁▂▃▄▅▆▇█']),
    ([0.0, 7.0, 3.5], 1, 0, 7, ['▁█▄']),
    ([2.0, 2.0], 1, 2, 2, ['▄▄']),
    ([2.0, 2.0], 2, 2, 2, ['  ', '██']),
    ([-7.0, 0.0], 2, -7, 0, [' █', '▁█']),
    ([1.0, 2.0], 1, 0, 4, ['▃▄']),
  ],
)
def test_a_curve(values, height, low, high, drawn):
  assert view.curve(list(values), height, low, high) == drawn


@pytest.mark.parametrize(
  'points, width, values',
  [
    ([], 3, []),
    ([(5, 2.0)], 3, [2.0, 2.0, 2.0]),
    # Four rollouts in two columns: the means of two each.
    ([(1, 1.0), (2, 3.0), (3, 5.0), (4, 7.0)], 2, [2.0, 6.0]),
    # Measured at 0 and 20: a straight line between.
    ([(0, 0.0), (20, 1.0)], 5, [0.0, 0.25, 0.5, 0.75, 1.0]),
    ([(0, 0.0), (20, 1.0), (40, 1.0)], 5, [0.0, 0.5, 1.0, 1.0, 1.0]),
  ],
)
def test_columns(points, width, values):
  assert view.columns(points, width) == pytest.approx(values)


def test_a_long_run_keeps_a_bounded_curve():
  curve, total = view.Series(), 12_345
  for step in range(total):
    curve = curve.added(step, float(step))
  assert 1000 <= len(curve.points) <= 2000
  width = curve.every
  assert width == 8
  for n, (step, value) in enumerate(curve.points[:-1]):
    assert step == (n + 1) * width - 1
    assert value == step - (width - 1) / 2  # the mean of so many rollouts
  assert curve.points[-1][0] == total - 1
  assert curve.added(total, float('nan')) == curve


@pytest.mark.parametrize('total', [1, 2, 2001, 12_345])
def test_a_history_becomes_the_curve_that_its_points_would(total):
  points = [(n, float('nan') if n % 7 == 3 else n % 11) for n in range(total)]
  curve = view.Series()
  for step, value in points:
    curve = curve.added(step, value)
  assert view.Series().extended(points) == curve


def test_a_curve_knows_the_best_of_its_values_not_of_its_means():
  points = [(n, 1.0 if n == 1234 else 0.5) for n in range(5000)]
  curve = view.Series().extended(points)
  assert max(value for _, value in curve.points) < 1.0
  assert curve.best == 1.0 and view.Series().best is None
  assert view.Series().added(0, -3.0).best == -3.0


def test_a_short_run_keeps_every_point():
  curve = view.Series()
  for step in range(2000):
    curve = curve.added(step, 0.5 * step)
  assert curve.points == [(n, 0.5 * n) for n in range(2000)]


def tile(width, curve_lines=2, large=True, axis='rollout', more='best 0.830'):
  points = [(0, 0.25), (20, 0.5), (40, 0.8125)]
  one = view.Tile('held-out accuracy', 0.8125, points, more)
  lines = view.tile(one, width, curve_lines, large, axis)
  assert all(line.cell_len <= width for line in lines)
  return [line.plain for line in lines]


def test_a_tile_has_its_scale_and_its_rollouts():
  lines = tile(40)
  assert len(lines) == 1 + 3 + 2 + 1
  assert lines[0] == 'held-out accuracy'
  assert lines[3].endswith('  best 0.830')
  assert lines[4].endswith('█ 0.812') and lines[5].endswith('█ 0.250')
  assert lines[6].split() == ['rollout', '0', '40']
  assert len(lines[6]) == lines[4].rindex('█') + 1


def test_a_small_tile():
  assert tile(24, large=False, curve_lines=0) == [
    'held-out accuracy',
    '0.812  best 0.830',
  ]
  assert tile(16, large=False, curve_lines=0)[1] == '0.812'
  assert len(tile(24, axis='')) == 6


@pytest.mark.parametrize('first', [0, 990, 12_345, 123_456_789])
def test_the_axis_fits_every_width(first):
  one = view.Tile('r', 0.5, [(first, 0.25), (first + 20, 0.5)])
  for width in range(12, 41):
    axis = view.tile(one, width, 2, True, 'rollout')[-1]
    assert axis.cell_len <= width
    words = axis.plain.split()
    # The last rollout is the last to go, and no number touches another.
    assert words[-1] == str(first + 20)
    assert words[:-1] in (['rollout', str(first)], [str(first)], [])


def test_before_two_points_there_is_room_for_a_curve():
  one = view.Tile('reward', None)
  lines = view.tile(one, 24, 2, True, 'rollout')
  assert [line.plain for line in lines] == [
    'reward', '   ', '▀▀▀', '   ', '', '', '',
  ]  # fmt: skip
