"""Figures of an experiment, each for a light and for a dark page."""

import pathlib
from typing import Any

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
    title = experiment.draw(numbers, figure, colors)
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
