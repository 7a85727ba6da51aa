"""Completions that a person reads, on one line each."""

from collections.abc import Callable
from typing import NamedTuple


class Sample(NamedTuple):
  """One completion and what it earned."""

  prompt: str
  completion: str
  reward: float


def escape(text: str) -> str:
  r"""The text with everything that does not print escaped as in Python.

  That is: newlines, control characters (a completion may hold commands for a
  terminal), invisible characters, and those that reverse the direction of
  writing. A backslash is not escaped, because LaTeX is full of backslashes.

  Args:
    text: Any text.

  Returns:
    One line of printable characters.

  >>> print(escape('a\n\x1b[31m\\frac'))
  a\n\x1b[31m\frac
  """
  return ''.join(
    char if char.isprintable() else ascii(char)[1:-1] for char in text
  )


def shorten(text: str, width: int, measure: Callable[[str], int] = len) -> str:
  r"""The escaped text, its middle cut out if it is too wide.

  The middle goes, because a completion opens with its approach and ends with
  its answer.

  Args:
    text: Any text.
    width: Most columns of the result, at least 1.
    measure: Columns that a text takes; `rich.cells.cell_len` on a terminal,
      where some characters take two.

  Returns:
    One line.

  >>> shorten('abcdefgh\n', 6)
  'abc…\\n'
  """
  cut = len(text) > 4 * width
  if cut:  # spares the work on very long completions
    text = text[: 2 * width] + text[-2 * width :]
  pieces = [escape(char) for char in text]
  if not cut and measure(''.join(pieces)) <= width:
    return ''.join(pieces)
  # Characters without a width may all fit, so head and tail share none of them.
  half = len(pieces) // 2 if cut else len(pieces)
  tail = _fitting(reversed(pieces[-half:]), (width - 1) // 2, measure)
  head = _fitting(pieces[:half], width - 1 - (width - 1) // 2, measure)
  return ''.join(head) + '…' + ''.join(reversed(tail))


def _fitting(pieces, width: int, measure) -> list[str]:
  """The longest beginning of `pieces` that is no wider than `width`."""
  kept = []
  for piece in pieces:
    width -= measure(piece)
    if width < 0:
      break
    kept.append(piece)
  return kept
