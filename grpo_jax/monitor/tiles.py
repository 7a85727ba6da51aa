"""Large numbers and curves made of block characters."""

from collections.abc import Iterable
from collections.abc import Sequence
import itertools
import math
from typing import Any
from typing import NamedTuple

from grpo_jax.monitor import formatting

Points = Sequence[tuple[float, float]]  # (rollout, value), oldest first

_MOST_POINTS = 2000  # of a curve; more than a terminal has columns
_BARS = ' ▁▂▃▄▅▆▇█'
_EIGHTHS = 8  # heights of a bar within one line
_SCALE = 9  # columns of a curve's scale: a space and a number
# Five rows of pixels for each character; two rows of pixels make a line.
_PIXELS = {
  '0': '### #.# #.# #.# ###',
  '1': '.#. ##. .#. .#. ###',
  '2': '### ..# ### #.. ###',
  '3': '### ..# ### ..# ###',
  '4': '#.# #.# ### ..# ..#',
  '5': '### #.. ### ..# ###',
  '6': '### #.. ### #.# ###',
  '7': '### ..# ..# ..# ..#',
  '8': '### #.# ### #.# ###',
  '9': '### #.# ### ..# ###',
  '.': '. . . . #',
  '-': '... ... ### ... ...',
  'k': '#.. #.# ##. #.# #.#',
  'M': '#...# ##.## #.#.# #...# #...#',
}
_HALVES = {'..': ' ', '#.': '▀', '.#': '▄', '##': '█'}
BIG_LINES = 3  # of a large number


class Tile(NamedTuple):
  """One quantity: its name, its value and its history."""

  label: str
  value: float | None  # None: not measured yet
  points: Points = ()
  more: str = ''  # such as the best value so far


def text_of(one: Tile) -> str:
  """The value of a tile in a few characters."""
  return '-' if one.value is None else formatting.number(one.value)


def big(text: str) -> list[str] | None:
  """A number in characters of three lines.

  Args:
    text: Digits and a few signs.

  Returns:
    Three strings of one length; None if `text` has a character that cannot be
    drawn.

  >>> print('\\n'.join(big('0.7')))
  █▀█   ▀▀█
  █ █     █
  ▀▀▀ ▀   ▀
  """
  if not text or any(character not in _PIXELS for character in text):
    return None
  lines = []
  for line in range(BIG_LINES):
    pieces = []
    for character in text:
      rows = [*_PIXELS[character].split(), '.....']
      pairs = zip(rows[2 * line], rows[2 * line + 1])
      pieces.append(''.join(_HALVES[upper + lower] for upper, lower in pairs))
    lines.append(' '.join(pieces))
  return lines


def curve(
  values: Sequence[float], height: int, low: float, high: float
) -> list[str]:
  """A filled curve.

  Args:
    values: Finite numbers, one for each column.
    height: Lines.
    low: The lower end of the scale, at most each of the values.
    high: The upper end of the scale, at least each of the values.

  Returns:
    `height` strings, the upper one first.

  >>> print('\\n'.join(curve([0.0, 1.0, 2.0, 3.0], 2, 0.0, 3.0)))
    ▃█
  ▁▆██
  """
  most = height * _EIGHTHS
  levels = [
    # At least one eighth, so that the lowest value can be seen.
    round(1 + (value - low) / (high - low) * (most - 1))
    if high > low
    else most // 2
    for value in values
  ]
  return [
    ''.join(_BARS[min(_EIGHTHS, max(0, level - below))] for level in levels)
    for below in range(most - _EIGHTHS, -1, -_EIGHTHS)
  ]


class Series(NamedTuple):
  """The points of a curve, few enough to be drawn twice a second.

  A run may have a hundred thousand rollouts. When there are 2000 points, each
  two are replaced by their mean, and from then on a point is the mean of twice
  as many rollouts.
  """

  points: Points = ()
  every: int = 1  # values in the mean of a point
  last: int = 1  # values in the mean of the last point
  best: float | None = None  # highest of the values, which a mean would hide

  def added(self, step: float, value: float) -> 'Series':
    """The series with one more value, unless that value is not finite."""
    return self.extended([(step, value)])

  def extended(self, more: Iterable[tuple[float, float]]) -> 'Series':
    """The series with more values; those that are not finite are left out."""
    # One copy for all of `more`: a history may have a hundred thousand values.
    points, every, last, best = [*self.points], *self[1:]
    for step, value in more:
      if not math.isfinite(value):
        continue
      best = value if best is None else max(best, value)
      if points and last < every:
        last += 1
        mean = points[-1][1]
        points[-1] = step, mean + (value - mean) / last
        continue
      # An even number of points, each the mean of `every` values, so that the
      # mean of two is exact.
      if len(points) == _MOST_POINTS:
        pairs = zip(points[::2], points[1::2])
        points = [(b[0], (a[1] + b[1]) / 2) for a, b in pairs]
        every *= 2
      points.append((step, value))
      last = 1
    return Series(points, every, last, best)


def columns(points: Points, width: int) -> list[float]:
  """One value for each column of a curve over the rollouts.

  Args:
    points: (rollout, value) by rollout.
    width: Columns from the first rollout to the last.

  Returns:
    The mean of the values that fall into a column. Columns without a value are
    interpolated linearly.
  """
  if not points:
    return []
  first, last = points[0][0], points[-1][0]
  parts: list[list[float]] = [[] for _ in range(width)]
  for step, value in points:
    share = (step - first) / (last - first) if last > first else 0.0
    parts[min(width - 1, int(share * width))].append(value)
  means = {n: math.fsum(p) / len(p) for n, p in enumerate(parts) if p}
  found = [means[0]] * width
  for (start, low), (end, high) in itertools.pairwise(means.items()):
    for n in range(start, end + 1):
      found[n] = low + (high - low) * (n - start) / (end - start)
  return found


def tile(
  one: Tile, width: int, curve_lines: int, large: bool, axis: str
) -> list[Any]:
  """The lines of a tile: label, number, curve with its scale.

  Args:
    one: What to draw.
    width: Columns.
    curve_lines: Lines of the curve; 0 draws none.
    large: Whether to draw the number over three lines.
    axis: What the curve runs over, such as 'rollout'; its first and its last
      number stand below the curve. '' leaves the line out.

  Returns:
    `rich.text.Text` lines, none of them wider than `width`.
  """
  from rich.text import Text

  number = text_of(one)
  finite = one.value is None or math.isfinite(one.value)
  strong = 'bold' if finite else 'bold red'
  drawn = (big(number) or ['', number, '']) if large else [number]
  lines = [Text(one.label[:width], style='cyan')]
  lines += [Text(line, style=strong) for line in drawn]
  if one.more and len(drawn[-1]) + 2 + len(one.more) <= width:
    lines[-1].append('  ' + one.more, 'not bold dim')
  if curve_lines:
    lines += _with_scale(one.points, width, curve_lines, axis)
  return lines


def _with_scale(
  points: Points, width: int, height: int, axis: str
) -> list[Any]:
  """A curve, its extremes beside it, its first and last rollout below it."""
  from rich.text import Text

  if len(points) < 2:
    return [Text('') for _ in range(height + bool(axis))]
  values = columns(points, max(1, width - _SCALE))
  low, high = (end(value for _, value in points) for end in (min, max))
  drawn = curve(values, height, low, high)
  lines = [Text().append(line, 'green') for line in drawn]
  lines[0].append(f' {formatting.number(high)}', 'dim')
  if height > 1:
    lines[-1].append(f' {formatting.number(low)}', 'dim')
  if axis:
    first, last = (f'{points[n][0]:.0f}' for n in (0, -1))
    lines.append(Text(_ends(axis, first, last, len(values)), 'dim'))
  return lines


def _ends(axis: str, first: str, last: str, width: int) -> str:
  """What a curve runs over, and the ends of it, as far as there is room."""
  left = ''
  for left in (f'{axis} {first}', first, ''):
    if len(left) + 1 + len(last) <= width:
      break
  # A number that is wider than the curve reaches into the room of its scale.
  return left + last.rjust(width - len(left))
