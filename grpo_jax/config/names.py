"""Names of fields, as `optim.lr`, and of their types."""

import re
from typing import Any


def within(name: str, groups: tuple[str, ...]) -> bool:
  """Whether a field is one of `groups`, or in one of them."""
  return any(name == group or name.startswith(f'{group}.') for group in groups)


def flat(values: Any, name: str = '') -> dict[str, Any]:
  """Nested dicts as one, {'optim.lr': ...}; lists and arguments are values."""
  if not isinstance(values, dict) or name.endswith('_kwargs'):
    return {name: values}
  return {
    path: leaf
    for key, value in values.items()
    for path, leaf in flat(value, f'{name}.{key}' if name else key).items()
  }


def type_name(kind: Any) -> str:
  """A type as it is annotated, without the modules of its classes.

  >>> type_name(float), type_name(str | tuple[re.Pattern, ...])
  ('float', 'str | tuple[Pattern, ...]')
  """
  return (
    kind.__name__ if type(kind) is type else re.sub(r'(\w+\.)+', '', repr(kind))
  )
