"""Charts as HTML with SVG, complete without a script; `script.js` adds to them.

The drawing is stretched to the width of the page: its units are thousandths of
the plot. Texts beside it are HTML, so they keep their size.
"""

from collections.abc import Iterable
from collections.abc import Sequence
import json
import math
from typing import Any
from typing import NamedTuple

import numpy as np

from grpo_jax.lab.report import words
from grpo_jax.lab.report.types import Chart
from grpo_jax.lab.report.types import Curve
from grpo_jax.lab.report.types import Timeline

_SIZE = 1000  # units of the drawing, in both directions
_FEW = 25  # points, which are also drawn as dots
_BEYOND = (
  0.4  # how far intervals may widen an axis, in lengths of that of lines
)
_TINY = 1e-300  # what is below has too few digits for an axis
_COLORS = 8
_DASHES = 4  # of each colour


class Scale(NamedTuple):
  """An axis, from `low` to `high`."""

  low: float
  high: float
  log: bool = False

  def at(self, values: Any) -> Any:
    """Where values are on the axis, 0 to 1."""
    low, high = self.low, self.high
    if self.log:
      values, low, high = np.log10(values), math.log10(low), math.log10(high)
    return (values - low) / (high - low)

  def ticks(self, number: int, whole: bool = False) -> list[float]:
    """About so many round numbers on the axis.

    >>> Scale(0, 1).ticks(4)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    >>> Scale(0.01, 100, True).ticks(4)
    [0.01, 0.1, 1.0, 10.0, 100.0]
    >>> Scale(2, 64, True).ticks(4)
    [2.0, 5.0, 10.0, 20.0, 50.0]
    """
    if self.log:
      first = math.ceil(math.log10(self.low) - 1e-9)
      last = math.floor(math.log10(self.high) + 1e-9)
      step = max(1, round((last - first) / max(number, 1)))
      found = [10.0**power for power in range(first, last + 1, step)]
      if len(found) > 1:
        return found
      found = [
        float(f'{factor * 10.0**power:.10g}')
        for power in range(first - 1, last + 1)
        for factor in (1, 2, 5)
      ]
      found = [one for one in found if self.low <= one <= self.high]
      if len(found) > 1:
        return found
    rough = (self.high - self.low) / max(number, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * min((1, 2, 5, 10), key=lambda k: abs(k * power - rough))
    if whole:
      step = max(1.0, step)
    first, last = math.ceil(self.low / step - 1e-9), self.high / step + 1e-9
    return [
      float(f'{k * step:.10g}') for k in range(first, math.floor(last) + 1)
    ]


def chart(made: Chart, number: int) -> str:
  """A chart as a `figure`.

  Args:
    made: See `Chart`.
    number: A number that no other chart of the page has, for its id.
  """
  x, y = _axes(made)
  drawn = [_curve(curve, _look(k), x, y) for k, curve in enumerate(made.curves)]
  # Bands lie below all lines.
  inner = ''.join(band for band, _ in drawn) + ''.join(
    line for _, line in drawn
  )
  key = f' <code>{words.escaped(made.key)}</code>' if made.key else ''
  legend = ''
  if len(made.curves) > 1:
    legend = _legend([curve.name for curve in made.curves])
  notes = ' '.join(filter(None, [_bands(made), made.note]))
  return (
    f'<figure class="chart" id="chart-{number}" data-x="'
    f'{words.escaped(made.x_label)}"><figcaption>'
    f'<h3>{words.escaped(made.title)}</h3>'
    f'<p class="measured">{words.escaped(made.measured)}{key}</p>{legend}'
    f'</figcaption>{_plot(made.title, made.x_label, inner, x, y, made.unit)}'
    f'<p class="reading"></p><p class="notes">{words.escaped(notes)}</p>'
    f'<script type="application/json">{_data(made, x, y)}</script></figure>'
  )


def timeline(made: Timeline) -> str:
  """A timeline as a `figure`: a line of marks for each thing that happened."""
  x = Scale(*_widened(made.first, made.last))
  rows = []
  for what, places in made.rows:
    marks = ''.join(
      f'<i style="left:{100 * x.at(place):.2f}%" title="'
      f'{words.escaped(made.x_label)} {words.number(place)}"></i>'
      for place in places
    )
    rows.append(
      f'<div class="row"><span>{words.escaped(what)}</span>'
      f'<div class="marks">{marks}</div></div>'
    )
  ticks = _labels(x, 5, 'left', whole=True)
  return (
    f'<figure class="timeline"><figcaption><h3>{words.escaped(made.title)}</h3>'
    f'</figcaption>{"".join(rows)}<div class="row"><span></span><div '
    f'class="x">{ticks}</div></div><p class="axis">'
    f'{words.escaped(made.x_label)}</p></figure>'
  )


def _look(number: int) -> str:
  """The classes of a curve: its colour and, once all are taken, its dashes.

  >>> _look(1), _look(9), _look(17)
  ('c1', 'c1 d1', 'c1 d2')
  """
  dashes = number // _COLORS % _DASHES
  return f'c{number % _COLORS}' + (f' d{dashes}' if dashes else '')


def log_suits(curves: Sequence[Curve], unit: str) -> bool:
  """Whether the values of curves are told apart on a logarithmic axis alone."""
  values = _finite(part for curve in curves for part in _measured(curve))
  if unit == '%' or not len(values) or values.min() < _TINY:
    return False
  return float(values.max() / np.median(values)) > 30


def _legend(names: Sequence[str]) -> str:
  """Each name behind a short piece of the line of its curve."""
  items = [
    '<li><svg class="swatch" viewBox="0 0 28 6" aria-hidden="true"><path '
    f'class="line {_look(k)}" d="M0 3H28"/></svg>{words.escaped(name)}</li>'
    for k, name in enumerate(names)
  ]
  return f'<ul class="legend">{"".join(items)}</ul>'


def _plot(title, x_label, inner, x: Scale, y: Scale, unit: str) -> str:
  grid = ''.join(
    f'M0 {_SIZE * (1 - y.at(tick)):.1f}H{_SIZE}' for tick in y.ticks(4)
  )
  hint = 'Arrow keys read values, plus and minus zoom, Escape shows all.'
  return (
    f'<div class="plot" tabindex="0" role="group" aria-label="'
    f'{words.escaped(title)}. {hint}"><div class="y">'
    f'{_labels(y, 4, "bottom", unit=unit)}</div><div class="canvas"><svg '
    f'viewBox="0 0 {_SIZE} {_SIZE}" preserveAspectRatio="none" role="img" '
    f'aria-label="{words.escaped(title)}"><path class="grid" d="{grid}"/>'
    f'{inner}</svg></div>'
    f'<div class="x">{_labels(x, 5, "left", whole=True)}</div>'
    f'<p class="axis">{words.escaped(x_label)}</p></div>'
  )


def _labels(scale: Scale, number: int, side: str, whole=False, unit='') -> str:
  return ''.join(
    f'<span style="{side}:{100 * scale.at(tick):.2f}%">'
    f'{words.number(tick, unit)}</span>'
    for tick in scale.ticks(number, whole and not scale.log)
  )


def _curve(curve: Curve, look: str, x: Scale, y: Scale) -> tuple[str, str]:
  """The band of a curve and its lines."""
  across = _SIZE * x.at(curve.x)

  def up(values):
    # Far outside lines are cut by the edge of the drawing in any case.
    if y.log:
      values = np.where(values > 0, values, y.low)
    return _SIZE * (1 - np.clip(y.at(values), -2, 3))

  band, known = '', np.isfinite(curve.low) & np.isfinite(curve.high)
  for part in _stretches(known):
    top = list(zip(across[part], up(curve.high[part])))
    bottom = list(zip(across[part], up(curve.low[part])))[::-1]
    if len(top) > 1:
      band += f'M{_joined(top + bottom)}Z'
  lines = [
    f'<path class="{kind} {look}" d="{_line(across, up(values), values)}"/>'
    for kind, values in (
      *(('run', run) for run in curve.runs),
      ('line', curve.mean),
    )
  ]
  if len(curve.x) <= _FEW:
    dots = ''.join(
      f'M{px:.1f} {py:.1f}h0'
      for px, py in zip(across, up(curve.mean))
      if math.isfinite(py)
    )
    lines.append(f'<path class="dots {look}" d="{dots}"/>')
  area = f'<path class="band {look}" d="{band}"/>' if band else ''
  return area, ''.join(lines)


def _line(across, up, values) -> str:
  parts = [
    _joined(zip(across[part], up[part]))
    for part in _stretches(np.isfinite(values))
  ]
  return ''.join(f'M{part}' for part in parts)


def _joined(points: Iterable[tuple[float, float]]) -> str:
  return 'L'.join(f'{px:.1f} {py:.1f}' for px, py in points)


def _stretches(known: np.ndarray) -> list[slice]:
  """The runs of entries that are known."""
  edges = np.flatnonzero(np.diff(np.concatenate([[0], known, [0]])))
  return [slice(*pair) for pair in edges.reshape(-1, 2).tolist()]


def _axes(made: Chart) -> tuple[Scale, Scale]:
  across = _finite([*(curve.x for curve in made.curves), made.x_range])
  # What was measured is all shown; an interval may be cut.
  lines = _finite(part for curve in made.curves for part in _measured(curve))
  low, high = (float(lines.min()), float(lines.max())) if len(lines) else (0, 1)
  bands = _finite(
    part for curve in made.curves for part in (curve.low, curve.high)
  )
  if made.y_log:
    bands = bands[bands > 0]
  if len(bands):
    room = _BEYOND * (high - low) or math.inf
    # An interval may leave the range of what it is about; the axis does not.
    floor = 0.0 if low >= 0 else -math.inf
    top = 1.0 if made.unit == '%' and high <= 1 else math.inf
    low = min(low, max(float(bands.min()), low - room, floor))
    high = max(high, min(float(bands.max()), high + room, top))
  if made.y_log:
    y = Scale(low / 1.2, high * 1.2, True)
  else:
    if 0 < low < 0.4 * high:
      low = 0.0
    low, high = _widened(low, high)
    pad = 0.04 * (high - low)
    y = Scale(low if low == 0 else low - pad, high + pad)
  left, right = float(across.min()), float(across.max())
  if made.x_log:
    return Scale(left / 1.1, right * 1.1, True), y
  left, right = _widened(left, right)
  pad = 0.015 * (right - left)
  return Scale(left - pad, right + pad), y


def _measured(curve: Curve) -> list[np.ndarray]:
  """The mean, and each run's; of a single run the least and the largest."""
  if len(curve.runs):
    return [curve.mean, curve.runs]
  return [curve.mean, curve.least, curve.most]


def _widened(low: float, high: float) -> tuple[float, float]:
  """A range that is not empty."""
  if high - low > _TINY:
    return low, high
  room = 0.1 * abs(low) if abs(low) > _TINY else 1.0
  return low - room, high + room


def _finite(parts: Iterable[Any]) -> np.ndarray:
  values = np.concatenate([np.ravel(part) for part in parts])
  return values[np.isfinite(values)]


def _bands(made: Chart) -> str:
  """What a point and a band stand for."""
  said = []
  most = max(float(np.max(curve.until - curve.since)) for curve in made.curves)
  if most >= 1:
    said.append(
      f'Each point is the mean of up to {most + 1:,.0f} {made.x_label}s.'
    )
  bands = dict.fromkeys(curve.band for curve in made.curves if curve.band)
  if bands:
    said.append(f'Band: {"; ".join(bands)}.')
  if any(len(curve.runs) for curve in made.curves):
    said.append('Thin lines: single runs.')
  return ' '.join(said)


def _data(made: Chart, x: Scale, y: Scale) -> str:
  """What the script reads: the numbers of the curves."""

  def rounded(values):
    return [
      float(f'{value:.5g}') if math.isfinite(value) else None
      for value in values.tolist()
    ]

  curves = []
  for curve in made.curves:
    one = {
      'name': curve.name,
      'x': rounded(curve.x),
      'mean': rounded(curve.mean),
    }
    if np.any(curve.until > curve.since):
      one |= {'since': rounded(curve.since), 'until': rounded(curve.until)}
    if np.any(np.isfinite(curve.low)):
      one |= {'low': rounded(curve.low), 'high': rounded(curve.high)}
    differ = np.any(curve.most > curve.least)
    if differ and not np.array_equal(curve.low, curve.least):
      one |= {'least': rounded(curve.least), 'most': rounded(curve.most)}
    if len(curve.runs):
      one['runs'] = [rounded(run) for run in curve.runs]
    curves.append(one)
  data = {
    'x': [x.low, x.high],
    'y': [y.low, y.high],
    'xLog': made.x_log,
    'yLog': made.y_log,
    'unit': made.unit,
    'label': made.x_label,
    'curves': curves,
  }
  return as_script(data)


def as_script(value: Any) -> str:
  """JSON that may stand inside a `script`: no tag can end or begin in it."""
  text = json.dumps(value, separators=(',', ':'))
  for char in '<>&\u2028\u2029':
    text = text.replace(char, f'\\u{ord(char):04x}')
  return text
