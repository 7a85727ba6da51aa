"""Numbers of a study as text: cells, tables for a terminal, JSON."""

from collections.abc import Mapping
from collections.abc import Sequence
import math
import shutil
from typing import Any

from grpo_jax.config import plain_text
from grpo_jax.lab.report.intervals import Interval

Lines = Sequence[Mapping[str, str]]


def number(value: float, sign: str = '') -> str:
  """A number with three digits after the point; '-' for NaN.

  Args:
    value: The number.
    sign: '+' writes the sign of a positive number too.

  >>> number(0.25, '+'), number(float('nan'))
  ('+0.250', '-')
  """
  return '-' if math.isnan(value) else f'{value:{sign}.3f}'


def mean_and_half(interval: Interval, sign: str = '') -> str:
  """An interval as `mean±half`; the mean alone if the half-width is NaN.

  Args:
    interval: See `Interval`.
    sign: See `number`.

  >>> mean_and_half(Interval(0.5, 0.02))
  '0.500±0.020'
  """
  half = '' if math.isnan(interval.half) else f'±{interval.half:.3f}'
  return number(interval.mean, sign) + half


def show(tables: Mapping[str, Lines], notes: str) -> None:
  """Prints tables one below the other, and notes that explain them.

  Args:
    tables: By title, the lines of each table: the text of every cell by the
      name of its column. A table without lines is left out.
    notes: Text below the last table.
  """
  from rich import console

  # A pipe has no width; 160 columns are enough for the widest table.
  width = shutil.get_terminal_size((160, 24)).columns
  out = plain_text.guarded(console.Console(width=width, highlight=False))
  for title, lines in tables.items():
    if lines:
      out.print(_table(title, lines))
  out.print(notes, markup=False)


def _table(title: str, lines: Lines):
  """A table of rich; its first column is never wrapped."""
  from rich import box
  from rich import table

  made = table.Table(
    title=title, title_justify='left', box=box.SIMPLE, pad_edge=False
  )
  for place, name in enumerate(lines[0]):
    made.add_column(name, no_wrap=place == 0)
  for line in lines:
    made.add_row(*line.values())
  return made


def without_nan(value: Any) -> Any:
  """Nested dicts and lists with None for NaN and infinity, which JSON lacks."""
  if isinstance(value, dict):
    return {name: without_nan(inner) for name, inner in value.items()}
  if isinstance(value, list):
    return [without_nan(inner) for inner in value]
  is_finite = not isinstance(value, float) or math.isfinite(value)
  return value if is_finite else None
