"""Figures of an experiment, each for a light and for a dark page, and parts."""

from collections.abc import Iterator
import pathlib
from typing import Any

import numpy as np

from grpo_jax.lab import report
from grpo_jax.lab.studies.claims import Experiment
from grpo_jax.lab.studies.claims import Numbers

LIGHT = {
  'page': '#ffffff',
  'text': '#1f2328',
  'faint': '#8c959f',
  'first': '#1b6ca8',
  'second': '#c8442c',
  'third': '#2e7d4f',
  'fourth': '#8a5fb0',
  'fifth': '#b7791f',
}
DARK = {
  'page': '#161614',
  'text': '#ecebe4',
  'faint': '#a8a79e',
  'first': '#58a6ff',
  'second': '#ff7b6b',
  'third': '#56d364',
  'fourth': '#c297ff',
  'fifth': '#e3b341',
}
SERIES = 'first', 'second', 'third', 'fourth', 'fifth'
"""Names of the colors for curves, in the order in which to take them."""


def save(
  name: str, experiment: Experiment, numbers: Numbers, folder: pathlib.Path
) -> dict[str, str]:
  """Draws an experiment into `NAME-light.png` and `NAME-dark.png`.

  Args:
    name: Of the experiment.
    experiment: What to draw.
    numbers: What its `run` returned.
    folder: Where to; it exists.

  Returns:
    The files' names by 'light' and 'dark', and the title of the figure.
  """
  from matplotlib import rc_context

  files = {}
  for mode, colors in (('light', LIGHT), ('dark', DARK)):
    figure, title = drawn(experiment, numbers, colors)
    files[mode] = f'{name}-{mode}.png'
    with rc_context(style(colors)):
      figure.savefig(folder / files[mode], dpi=144)
  return {**files, 'title': title}


def drawn(
  experiment: Experiment, numbers: Numbers, colors: dict[str, str]
) -> tuple[Any, str]:
  """The figure of matplotlib, and its title.

  Args:
    experiment: What to draw.
    numbers: What its `run` returned.
    colors: `LIGHT` or `DARK`.
  """
  from matplotlib import rc_context
  from matplotlib.figure import Figure  # no global state, no display

  with rc_context(style(colors)):
    figure = Figure(figsize=(8, 4.2), layout='constrained')
    found = experiment.measure(numbers)
    title = experiment.draw(numbers, found, figure, colors)
    figure.suptitle(title, x=0.012, ha='left', fontsize=11.5, wrap=True)
  return figure, title


def style(colors: dict[str, str]) -> dict[Any, Any]:
  """Settings of matplotlib for a page of these colors."""
  parts = (
    'text.color', 'axes.labelcolor', 'xtick.color', 'ytick.color',
    'axes.titlecolor',
  )  # fmt: skip
  return {
    **dict.fromkeys(parts, colors['text']),
    'figure.facecolor': colors['page'],
    'axes.facecolor': colors['page'],
    'savefig.facecolor': colors['page'],
    'axes.edgecolor': colors['faint'],
    'axes.spines.top': False,
    'axes.spines.right': False,
    'axes.grid': True,
    'grid.color': colors['faint'],
    'grid.alpha': 0.25,
    'grid.linewidth': 0.6,
    'font.size': 9.5,
    'axes.titlesize': 10,
    'axes.titlelocation': 'left',
    'legend.frameon': False,
    'lines.linewidth': 1.7,
  }


_MOST_CURVES = 8  # that have colors of their own
_SCALES = {'linear', 'log'}
_MOST_POINTS = 200  # of a line


def make_charts(
  experiment: Experiment, numbers: Numbers
) -> tuple[list[report.Chart], bool]:
  """The charts of an experiment's figure, and whether they are all of it.

  Args:
    experiment: What to draw.
    numbers: What its `run` returned.

  Returns:
    A chart for each part of the figure that consists of curves from left to
    right, with texts at most. Bars, areas and clouds of points have none.
  """
  figure, _ = drawn(experiment, numbers, LIGHT)
  found = [_chart(axes) for axes in figure.axes]
  charts = [one for one in found if one is not None]
  return charts, len(charts) == len(found)


def _chart(axes: Any) -> report.Chart | None:
  scales = axes.get_xscale(), axes.get_yscale()
  others = axes.collections, axes.patches, axes.images, axes.containers
  if any(map(len, others)) or not set(scales) <= _SCALES:
    return None
  try:
    curves = list(_curves(axes, scales))
  except _NoCurve:
    return None
  if not 0 < len(curves) <= _MOST_CURVES:
    return None
  title, measured = axes.get_title('left'), axes.get_ylabel()
  return report.Chart(
    title or measured,
    measured if title else '',
    curves,
    note=' '.join(f'{text.get_text()}.' for text in axes.texts),
    x_label=axes.get_xlabel(),
    x_log=scales[0] == 'log',
    y_log=scales[1] == 'log',
  )


class _NoCurve(Exception):
  """A line is no function of x, or nothing names it."""


def _curves(axes: Any, scales: tuple[str, str]) -> Iterator[report.Curve]:
  """The curves of axes whose x and y have some scales."""
  groups: dict[tuple[Any, ...], list[Any]] = {}
  for line in axes.lines:
    groups.setdefault((line.get_color(), line.get_linestyle()), []).append(line)
  names = {key: _name(group) for key, group in groups.items()}
  by_color = {key[0]: name for key, name in names.items() if name}
  for key, group in groups.items():
    name, points = names[key], [_points(line, axes) for line in group]
    if not name and key[1] == 'None' and key[0] in by_color:
      name = f'{by_color[key[0]]}, measured'
    if not name and len(group) == 1 and len(set(points[0][1])) == 1:
      name = f'{points[0][1][0]:g}'  # a level
    if not name and len(groups) > 1:
      raise _NoCurve
    shown = [_shown(x, y, scales) for x, y in points]
    curve = report.make_curve(name, shown)
    if curve is None:
      raise _NoCurve
    if scales[1] == 'log':  # on which an interval may have no lower end
      nothing = np.full(len(curve.x), np.nan)
      curve = curve._replace(low=nothing, high=nothing, band='')
    yield curve


def _name(lines: list[Any]) -> str:
  labels = [str(line.get_label()) for line in lines]
  return next((text for text in labels if not text.startswith('_')), '')


def _points(line: Any, axes: Any) -> tuple[np.ndarray, np.ndarray]:
  """The x and y of a line, from left to right."""
  x, y = (np.asarray(values, float) for values in line.get_data())
  if line.get_transform() != axes.transData:
    if len(set(y)) > 1:
      raise _NoCurve  # a line upwards, across the axes
    # As far as the other lines go.
    ends = [
      np.asarray(one.get_xdata(), float)
      for one in axes.lines
      if one.get_transform() == axes.transData
    ]
    places = np.concatenate(ends or [np.array(axes.get_xlim())])
    if axes.get_xscale() == 'log':
      places = places[places > 0]
    return np.array([places.min(), places.max()]), y
  if len(x) > 1 and x[0] > x[-1]:
    x, y = x[::-1], y[::-1]
  if not np.all(np.diff(x) > 0):
    raise _NoCurve
  return x, y


def _shown(
  x: np.ndarray, y: np.ndarray, scales: tuple[str, str]
) -> tuple[np.ndarray, np.ndarray]:
  """Those of the points that are on the axes; not more than `_MOST_POINTS`.

  Of many, some at equal distances on the axis of x.
  """
  kept = np.isfinite(x) & np.isfinite(y)
  for values, scale in zip((x, y), scales, strict=True):
    kept &= (values > 0) | (scale != 'log')
  x, y = x[kept], y[kept]
  if len(x) <= _MOST_POINTS:
    return x, y
  space = np.geomspace if scales[0] == 'log' else np.linspace
  wanted = space(x[0], x[-1], _MOST_POINTS)
  kept = np.unique(np.minimum(np.searchsorted(x, wanted), len(x) - 1))
  return x[kept], y[kept]
