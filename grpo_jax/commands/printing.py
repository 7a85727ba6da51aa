"""Printing tables and sentences for a person, and JSON for a program."""

from collections.abc import Sequence
import json
import shutil
from typing import Any

from grpo_jax.config import plain_text


def columns() -> int:
  """How wide the terminal is; a pipe has 80 columns."""
  return shutil.get_terminal_size((80, 24)).columns


def show(*parts: Any) -> None:
  """Prints parts as wide as the terminal.

  rich pads every line to the full width; the spaces at the end are left out.
  """
  from rich import console

  out = plain_text.guarded(
    console.Console(width=columns(), highlight=False, markup=False)
  )
  with out.capture() as captured:
    for part in parts:
      out.print(part)
  for line in captured.get().splitlines():
    print(line.rstrip())


def say(*texts: str, end: str = '\n', file: Any = None) -> None:
  """Prints texts that may be anybody's, at once."""
  print(plain_text.printable(' '.join(texts)), end=end, file=file, flush=True)


def show_json(values: Any) -> None:
  """Prints a line of JSON."""
  print(json.dumps(values), flush=True)


def table(names: Sequence[str], left: int = 1, **options: Any) -> Any:
  """A table of rich without lines between its columns.

  Args:
    names: Of the columns.
    left: How many of the first columns hold texts; the others hold numbers.
    **options: Of rich's `Table`.
  """
  from rich import box
  from rich import table as tables

  usual = {'box': box.SIMPLE, 'title_justify': 'left', 'pad_edge': False}
  made = tables.Table(**{**usual, **options})
  for place, name in enumerate(names):
    made.add_column(name, justify='left' if place < left else 'right')
  return made
