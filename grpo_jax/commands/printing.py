"""Printing tables and sentences for a person."""

import shutil
from typing import Any

from grpo_jax.config import plain_text


def show(*parts: Any) -> None:
  """Prints parts as wide as the terminal; in a pipe, 80 columns.

  rich pads every line to the full width; the spaces at the end are left out.
  """
  from rich import console

  width = shutil.get_terminal_size((80, 24)).columns
  out = plain_text.guarded(
    console.Console(width=width, highlight=False, markup=False)
  )
  with out.capture() as captured:
    for part in parts:
      out.print(part)
  for line in captured.get().splitlines():
    print(line.rstrip())
