"""What a policy has chosen, read from a text."""

from collections.abc import Sequence
import re

_MOST_CHARACTERS = 100_000


def chosen(text: str, names: Sequence[str]) -> int | None:
  """The place of the name that a text says last; None if it says none.

  A name counts where it stands by itself. Of several that end at the same
  place, the longest one counts, so 'up-left' is not 'left'.

  >>> chosen('I go left. No: RIGHT!', ['left', 'right'])
  1
  >>> chosen('copyright', ['right']) is None
  True

  Args:
    text: What a policy said.
    names: Of what it may choose.
  """
  found = (-1, 0, None)
  text = text[-_MOST_CHARACTERS:].lower()
  for place, name in enumerate(names):
    wanted = name.lower().strip()
    at = len(text)
    while wanted and (at := text.rfind(wanted, 0, at + len(wanted) - 1)) >= 0:
      end = at + len(wanted)
      if _alone(text, at, end):
        found = max(found, (end, len(wanted), place), key=lambda one: one[:2])
        break
  return found[2]


def _alone(text: str, start: int, end: int) -> bool:
  """Whether no word goes on at either end of a part of a text."""
  before, first = text[start - 1 : start], text[start]
  last, after = text[end - 1], text[end : end + 1]
  joins = lambda a, b: a.isalnum() and b.isalnum()
  return not joins(before, first) and not joins(last, after)


def last_number(text: str) -> int | None:
  """The last whole number of a text.

  >>> last_number('not 3, but -4.')
  -4
  """
  found = re.findall(r'(?<![\w.])-?\d{1,9}(?![\w]|\.\d)', text)
  return int(found[-1]) if found else None
