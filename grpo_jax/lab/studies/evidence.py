"""The numbers of an experiment as tables of a page.

A few numbers are shown one by one, and many by their shape, least, mean and
most. The file `claims.json` beside the page has all of them.
"""

from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import math
from typing import Any

from grpo_jax.lab import report
from grpo_jax.lab.studies.claims import Numbers

FILE = 'claims.json'
"""Where all numbers are, beside the page."""

_FEW = 12  # numbers that are shown one by one
_MOST_ROWS = 80  # of a table


def parts(numbers: Numbers) -> list[report.Part]:
  """Tables of what an experiment measured, and where the rest is.

  Args:
    numbers: What its `run` returned, or a copy from JSON.

  Returns:
    A table of what has at most 12 numbers, one of what has more, and a link to
    `claims.json`. A table without rows is left out. The first is open, so that
    a reader who comes for the numbers sees some; what follows is folded.
  """
  few, many = [], []
  for name, value in _leaves('', numbers):
    if _is_short(value):
      few.append((name, _short(value)))
    else:
      many.append((name, *_summary(value)))
  tables = (
    ('Numbers that were measured', ('numbers', 'value'), few),
    (
      'Numbers that are too many to show',
      ('numbers', 'shape', 'least', 'mean', 'most'),
      many,
    ),
  )
  found: list[report.Part] = []
  for title, head, rows in tables:
    if rows:
      left = len(rows) - _MOST_ROWS
      title += f' (the first {_MOST_ROWS} lines)' if left > 0 else ''
      found.append(report.Table(title, head, rows[:_MOST_ROWS], bool(found)))
  return [*found, report.Link(f'All numbers: {FILE}', FILE)]


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
  """Lists, single values and dicts of single values, with their names."""
  if isinstance(value, Mapping):
    if name and not any(isinstance(x, Mapping | list) for x in value.values()):
      yield name, value
      return
    for key, inner in value.items():
      yield from _leaves(f'{name}.{key}' if name else str(key), inner)
  elif isinstance(value, list) and value and _are_mappings(value):
    # Of several cases alike: for each name the values of all.
    keys = dict.fromkeys(key for one in value for key in one)
    columns = {key: [one.get(key) for one in value] for key in keys}
    yield from _leaves(f'{name}[]', columns)
  else:
    yield name, value


def _are_mappings(values: Sequence[Any]) -> bool:
  return all(isinstance(one, Mapping) for one in values)


def _is_short(value: Any) -> bool:
  if isinstance(value, Mapping):
    return len(value) <= _FEW
  if isinstance(value, list):
    is_flat = not any(isinstance(one, Mapping | list) for one in value)
    return is_flat and len(value) <= _FEW
  return True


def _short(value: Any) -> str:
  """Values one by one.

  >>> _short({'a': 0.25, 'b': None}), _short([1, 2.5e-7]), _short('text')
  ('a: 0.25, b: -', '1, 2.5e-07', 'text')
  """
  if isinstance(value, Mapping):
    return ', '.join(f'{key}: {_short(one)}' for key, one in value.items())
  if isinstance(value, list):
    return ', '.join(map(_short, value))
  return value if isinstance(value, str) else _number(value)


def _number(value: Any) -> str:
  if isinstance(value, bool):
    return str(value).lower()
  number = _float(value)
  return f'{number:.6g}' if math.isfinite(number) else '-'


def _float(value: Any) -> float:
  """A number; NaN in the place of everything else."""
  try:
    return float(value) if isinstance(value, int | float) else math.nan
  except OverflowError:  # an integer beyond floats
    return math.nan


def _summary(value: Any) -> tuple[str, str, str, str]:
  """The shape, least, mean and most of many numbers.

  >>> _summary([[1.0, 2.0], [3.0, None]])
  ('2 × 2', '1', '2', '3')
  """
  if isinstance(value, Mapping):
    value = list(value.values())
  known = [x for x in map(_float, _flat(value)) if math.isfinite(x)]
  shape = ' × '.join(_lengths(value))
  if not known:
    return shape, '-', '-', '-'
  mean = math.fsum(one / len(known) for one in known)
  least, most = min(known), max(known)
  return shape, f'{least:.6g}', f'{mean:.6g}', f'{most:.6g}'


def _flat(value: Any) -> Iterator[Any]:
  if isinstance(value, Mapping):
    value = list(value.values())
  if isinstance(value, list):
    for one in value:
      yield from _flat(one)
  else:
    yield value


def _lengths(value: Any) -> Iterator[str]:
  """The length of a list, and those of the lists in it, and so on.

  >>> [*_lengths([[1, 2], [3]])]
  ['2', '1 to 2']
  """
  lists = [value]
  while lists:
    lengths = [len(one) for one in lists]
    least, most = min(lengths), max(lengths)
    yield f'{least}' if least == most else f'{least} to {most}'
    lists = [one for some in lists for one in some if isinstance(one, list)]
