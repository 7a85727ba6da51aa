"""The frame that the live display draws: lines for a width and a height."""

from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import itertools
import math
import textwrap
from typing import NamedTuple

from rich.cells import cell_len
from rich.text import Text

from grpo_jax.monitor import formatting
from grpo_jax.monitor import table

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
  points: formatting.Points = ()
  more: str = ''  # such as the best value so far


def value_text(one: Tile) -> str:
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

  points: formatting.Points = ()
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


def columns(points: formatting.Points, width: int) -> list[float]:
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
) -> list[Text]:
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
  number = value_text(one)
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
  points: formatting.Points, width: int, height: int, axis: str
) -> list[Text]:
  """A curve, its extremes beside it, its first and last rollout below it."""
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


_INDENT = 2  # columns
_GAP = 2  # columns between two tiles, or between two columns of metrics
_LEAST_TILE = 19  # columns; narrower tiles stand below each other
# Columns of a metric: label, number and unit, and the spaces between them.
_WIDE_UNIT, _NARROW_UNIT = len('tokens per second'), len('tok/s')
_WIDE_CELL = table.LABEL + 1 + 8 + 1 + _WIDE_UNIT
_NARROW_CELL = 36
_MOST_CELL = 54  # in a wider one the number is too far from its label
_MOST_CURVE = 20  # lines
_SHARE_ALONE = 0.45  # of the height, for a frame with curves but no metrics
_REWARD = 8  # columns of a sample's reward
_LAST_RANK = 2  # see `table.Row`


class View(NamedTuple):
  """Everything that a frame shows."""

  label: str = ''  # what is counted; '' before anything is
  step: int = 0
  total: int = 0
  doing: str = ''  # what is being done now
  doing_secs: float | None = None  # for how long
  tiles: Sequence[Tile] = ()  # what matters most
  groups: Mapping[str, Sequence[table.Shown]] = {}  # the rest, by heading
  samples: Sequence[formatting.Sample] = ()
  note: str = ''  # what a reader of the samples must know
  warnings: Sequence[str] = ()  # oldest first
  elapsed: float = 0.0  # seconds
  left: float | None = None  # seconds


class Plan(NamedTuple):
  """How generous a frame is with its lines."""

  cell: int = _WIDE_CELL  # least columns of a metric
  full_warnings: bool = True
  gaps: bool = True  # empty lines between metrics under each other
  large: bool = True  # numbers over three lines
  curve: int = 3  # lines
  axis: bool = True  # the rollouts below a curve
  samples: int = 99
  rank: int = _LAST_RANK  # highest rank of the metrics that are shown


# From the most generous plan to the one for the lowest terminal, in the order
# in which parts are given up. If the last one does not fit either, the frame
# shows as many metrics as it has room for.
_PLANS = list(
  itertools.accumulate(
    [
      {'cell': _NARROW_CELL},
      {'full_warnings': False},
      {'axis': False},
      {'curve': 2},
      {'gaps': False},
      {'rank': 1},
      {'samples': 2},
      {'rank': 0},
      {'samples': 1},
      {'large': False},
      {'curve': 1},
      {'samples': 0},
      {'curve': 0},
    ],
    lambda plan, changes: plan._replace(**changes),
    initial=Plan(),
  )
)


def plan_for(view: View, width: int, height: int) -> Plan:
  """The most generous plan whose frame fits.

  Rows that are left over make the curves higher. A plan does not depend on what
  is being done, the clocks and the bar, so it can be kept while these change.

  Args:
    view: What to show.
    width: Columns of the terminal.
    height: Rows of the terminal.
  """
  if view.tiles and not view.groups:
    # This is the warm-up. The lines printed before it stay visible above.
    height = round(_SHARE_ALONE * height)
  lines, plan = [], _PLANS[-1]
  for plan in _PLANS:
    lines = _lines(view, plan, width)
    if len(lines) <= height:
      break
  room = max(0, height - len(lines))
  return plan._replace(curve=min(_MOST_CURVE, plan.curve + room))


def frame(
  view: View, width: int, height: int, plan: Plan | None = None
) -> list[Text]:
  """The lines of a frame.

  Args:
    view: What to show.
    width: Columns of the terminal.
    height: Rows of the terminal.
    plan: What `plan_for` returned; None calls it.

  Returns:
    `rich.text.Text` lines, at most `height`, none of them wider than `width`.
    The last one is empty, so that the prompt of a shell after a kill has a line
    of its own.
  """
  lines = _lines(view, plan or plan_for(view, width, height), width)
  if len(lines) > height:
    lines = [*lines[: max(0, height - 1)], lines[-1]]
  for line in lines:
    line.no_wrap, line.overflow = True, 'crop'
    line.truncate(width)
  return lines


def _lines(view: View, plan: Plan, width: int) -> list[Text]:
  """All parts of a frame, with an empty line after each."""
  parts = [
    _head(view, width),
    _headline(view.tiles, view.label if plan.axis else '', plan, width),
    _warnings(view.warnings, plan, width),
    _grid(view.groups, plan, width),
    _samples(view.samples[: plan.samples], view.note, width),
  ]
  lines = []
  for part in parts:
    if part:
      lines += [*part, Text('')]
  return lines or [Text('')]


def _head(view: View, width: int) -> list[Text]:
  """Count, bar, times; below them what is being done."""
  lines = []
  if view.label:
    share = min(1.0, view.step / view.total) if view.total else 1.0
    count = f'{view.label} {view.step}/{view.total}'
    times = _times(view, share, width - 2 * _INDENT - len(count) - 2)
    bar = max(0, width - 2 * _INDENT - len(count) - len(times) - 4)
    done = math.floor(share * bar)
    line = Text(' ' * _INDENT).append(count, 'bold').append('  ')
    line.append('━' * done, 'green').append('─' * (bar - done), 'dim')
    lines.append(line.append(f'  {times}' if bar else times))
  # Once there are metrics, the line stays when nothing is being done, so that
  # the parts below it do not jump.
  if view.doing or view.label and view.groups:
    secs = view.doing_secs
    clock = '' if secs is None else f'  {formatting.seconds(secs)}'
    room = max(9, width - _INDENT - len(clock) - 1)
    line = Text(' ' * _INDENT).append(formatting.shorten(view.doing, room))
    lines.append(line.append(clock if view.doing else '', 'dim'))
  return lines


def _times(view: View, share: float, width: int) -> str:
  """Share, time so far and time left, as far as there is room."""
  parts = [f'{share:4.0%}', f'elapsed {formatting.duration(view.elapsed)}']
  if view.left is not None:
    parts.append(f'left {formatting.duration(view.left)}')
  while len(parts) > 1 and len('   '.join(parts)) > width:
    del parts[-2]  # the time left is the last to go
  return '   '.join(parts)


def _headline(
  tiles: Sequence[Tile], axis: str, plan: Plan, width: int
) -> list[Text]:
  """What matters most, side by side; below each other where it is narrow."""
  if not tiles:
    return []
  room = (width - 2 * _INDENT - (len(tiles) - 1) * _GAP) // len(tiles)
  if room < _LEAST_TILE:
    rows = [
      table.Shown(one.label, value_text(one), '', 0, True) for one in tiles
    ]
    cell = max(1, width - 2 * _INDENT)
    return [Text(' ' * _INDENT).append_text(_cell(row, cell)) for row in rows]
  drawn = any(len(one.points) > 1 for one in tiles)
  curve = plan.curve if drawn else 0
  return _beside(
    [tile(one, room, curve, plan.large, axis) for one in tiles],
    room,
    room,
  )


def _grid(
  groups: Mapping[str, Sequence[table.Shown]], plan: Plan, width: int
) -> list[Text]:
  """The groups of metrics, in as many columns as the width has."""
  blocks = []
  for heading, rows in groups.items():
    rows = [row for row in rows if row.rank <= plan.rank]
    if rows:
      blocks.append((heading, rows))
  if not blocks:
    return []
  room = width - 2 * _INDENT
  # Several narrow columns are better than a single wide one.
  wide, narrow = (
    (room + _GAP) // (cell + _GAP) for cell in (plan.cell, _NARROW_CELL)
  )
  number = min(len(blocks), wide if wide > 1 else max(1, narrow))
  pitch = (room - (number - 1) * _GAP) // number
  cell = min(_MOST_CELL, pitch)
  columns = []
  for part in _split([len(rows) + 1 for _, rows in blocks], number):
    lines = []
    for heading, rows in blocks[part]:
      if lines and plan.gaps:
        lines.append(Text(''))
      lines.append(Text(heading, style='cyan'))
      lines += [_cell(row, cell) for row in rows]
    columns.append(lines)
  return _beside(columns, cell, pitch)


def _split(sizes: Sequence[int], number: int) -> list[slice]:
  """Splits blocks, in order, into parts whose tallest is as low as possible.

  Args:
    sizes: The lines of each block.
    number: How many parts, at most one for each block.

  Returns:
    The blocks of each part.
  """
  # Every split is tried; there are fewer than ten blocks.
  inside = range(1, len(sizes))
  best = min(
    itertools.combinations(inside, number - 1),
    key=lambda cuts: max(
      sum(sizes[a:b]) + b - a
      for a, b in itertools.pairwise((0, *cuts, len(sizes)))
    ),
  )
  ends = itertools.pairwise((0, *best, len(sizes)))
  return [slice(start, end) for start, end in ends]


def _beside(
  columns: Sequence[Sequence[Text]], width: int, pitch: int
) -> list[Text]:
  """Lines that have the columns side by side.

  Args:
    columns: The lines of each column.
    width: Columns of the terminal that the text of one may take.
    pitch: Columns from the start of one to the start of the next, less `_GAP`.
  """
  lines = []
  for cells in itertools.zip_longest(*columns, fillvalue=Text('')):
    line = Text(' ' * _INDENT)
    for cell in cells:
      cell = cell.copy()
      cell.truncate(width)
      line.append_text(cell).append(' ' * (pitch - cell.cell_len + _GAP))
    line.rstrip()
    lines.append(line)
  return lines


def _cell(row: table.Shown, width: int) -> Text:
  """Label, number, unit; the unit is spelled out where there is room."""
  wide = width >= _WIDE_CELL
  unit = row.unit if wide else table.short(row.unit)
  last = _WIDE_UNIT if wide else _NARROW_UNIT
  room = max(1, width - last - 1 - len(row.value))
  line = Text(f'{row.label[: room - 1]:{room}}', style='dim')
  line.append(row.value, 'not dim bold' if row.finite else 'not dim bold red')
  return line.append(f' {unit}', 'dim')


def _warnings(warnings: Sequence[str], plan: Plan, width: int) -> list[Text]:
  """Each warning in as many lines as it needs, or cut to one."""
  mark = ' ' * _INDENT + '! '
  lines = []
  for text in warnings:
    wrapped = textwrap.wrap(
      text,
      max(width - 1, 20),
      initial_indent=mark,
      subsequent_indent=' ' * len(mark),
    )
    if not plan.full_warnings and len(wrapped) > 1:
      wrapped = [f'{mark}{text}'[: width - 1] + '…']
    lines += [Text(line, style='yellow') for line in wrapped]
  return lines


def _samples(
  samples: Sequence[formatting.Sample], note: str, width: int
) -> list[Text]:
  """A title, then reward, prompt and completion of each, on one line."""
  if not samples:
    return []
  title = Text(' ' * _INDENT)
  title.append('samples', 'cyan').append(': reward, prompt → completion', 'dim')
  if note:
    title.append(f' ({note})', 'dim')
  lines = [title]
  room = max(20, width - 2 * _INDENT - _REWARD - len('   → '))
  prompts = [
    formatting.shorten(s.prompt, int(0.4 * room), cell_len) for s in samples
  ]
  widest = max(map(cell_len, prompts))
  for sample, prompt in zip(samples, prompts, strict=True):
    lines.append(
      Text.assemble(
        ' ' * _INDENT,
        (f'{sample.reward:{_REWARD}.3f}', 'bold'),
        '  ',
        (prompt + ' ' * (widest - cell_len(prompt)), 'dim'),
        ' → ',
        formatting.shorten(sample.completion, room - widest, cell_len),
      )
    )
  return lines
