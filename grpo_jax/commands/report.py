"""A page about runs: `grpo-jax report`."""

from collections.abc import Sequence
import os
import time
from typing import Any

from grpo_jax.commands import printing
from grpo_jax.commands.arguments import Arguments
from grpo_jax.lab import report


def run(arguments: Arguments) -> None:
  """`grpo-jax report`."""
  out = 'report.html' if arguments.out is None else arguments.out
  made = write([arguments.workdir, *arguments.run], out)
  printing.show_json(made) if arguments.json else show(made)


def write(workdirs: Sequence[str], out: str) -> dict[str, Any]:
  """Reads runs and writes a page about them.

  Args:
    workdirs: Those of the runs, at least one.
    out: The file to write.

  Returns:
    `out`, the absolute path of the page; `bytes`, its size; `secs`, how long it
    took; `title`, and `warnings`, what is wrong with the runs.

  Raises:
    ValueError: A workdir holds no run, or `out` is empty.
    OSError: The page cannot be written.
  """
  if not out:
    raise ValueError('--out is empty; give a file, as in --out=report.html.')
  start = time.monotonic()
  page = report.make_page(workdirs)
  size = report.write(out, page)
  warnings = [
    part.text
    for part in page.sections[0].parts
    if isinstance(part, report.Text) and part.kind == 'warning'
  ]
  return {
    'out': os.path.abspath(out),
    'bytes': size,
    'secs': round(time.monotonic() - start, 2),
    'title': page.title,
    'warnings': warnings,
  }


def show(made: dict[str, Any]) -> None:
  """Prints what `write` returned, for a person."""
  for warning in made['warnings']:
    printing.say(warning)
  size = f'{made["bytes"] / 1e6:.1f} MB'
  printing.say(f'{made["out"]} ({size}, {made["secs"]:.1f} s)')
