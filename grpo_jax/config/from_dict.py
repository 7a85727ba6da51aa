"""Dataclasses from nested dicts, and the names of their fields and types."""

import dataclasses
import difflib
import json
import re
import types
import typing
from typing import Any


def dataclass_from_dict(kind: Any, values: Any, path: str) -> Any:
  """A dataclass from nested dicts, which may leave fields out.

  Args:
    kind: The dataclass. A field is annotated as a plain type, a dataclass, a
      tuple of one of these, a dict, or as `plain type | tuple`. If it may also
      be a bool, `metadata['bools']` has the values that stand for False and
      True.
    values: A dict of values by field; for a dataclass inside, again a dict.
    path: What the values are called in errors.

  Returns:
    A value of type `kind`.

  Raises:
    ValueError: A field is unknown (the nearest known one is named), or a value
      is of the wrong type.

  >>> import dataclasses
  >>> @dataclasses.dataclass
  ... class Point:
  ...   x: float = 0.0
  ...   y: float = 0.0
  >>> dataclass_from_dict(Point, {'y': 1}, 'point')
  Point(x=0.0, y=1.0)
  """
  if not isinstance(values, dict):
    raise ValueError(f'{path} is {values!r}; it must be a group of fields.')
  hints = typing.get_type_hints(kind)
  for name in values:
    if name not in hints:
      near = difflib.get_close_matches(name, hints, 1)
      advice = (
        f'the nearest is {path}.{near[0]}'
        if near
        else (f'the fields are {", ".join(hints)}')
      )
      raise ValueError(f'{path}.{name} is no field of the config; {advice}.')
  return kind(
    **{
      name: converted(
        _renamed(kind, name, value), hints[name], f'{path}.{name}'
      )
      for name, value in values.items()
    }
  )


def _renamed(kind: Any, name: str, value: Any) -> Any:
  """The value, or what a bool stands for, which may be typed as a text."""
  names = kind.__dataclass_fields__[name].metadata.get('bools')
  place = {'false': 0, 'true': 1}.get(str(value).lower()) if names else None
  return value if place is None else names[place]


def converted(value: Any, hint: Any, path: str) -> Any:
  """A value as the annotated type.

  Types must agree exactly: `True` is no int, and 1.5 is not cut to 1. Only an
  int may stand for a float, and a list for a tuple.
  """
  if dataclasses.is_dataclass(hint):
    return dataclass_from_dict(hint, value, path)
  origin = typing.get_origin(hint)
  if origin is types.UnionType:  # a single value, or a tuple of several
    single, several = typing.get_args(hint)
    if isinstance(value, list | tuple):
      return converted(value, several, path)
    if type(value) is single:
      return value
  if origin is tuple and isinstance(value, list | tuple):
    inner = typing.get_args(hint)[0]
    return tuple(
      converted(item, inner, f'{path}[{i}]') for i, item in enumerate(value)
    )
  if origin is dict and isinstance(value, dict):
    return _writable(dict(value), path)
  if hint is float and type(value) is int:
    return float(value)
  if origin is None and type(value) is hint:
    return value
  raise ValueError(
    f'{path} is {value!r}; it must be of type {type_name(hint)}.'
  )


def _writable(values: dict, path: str) -> dict:
  """The values, if each can be written as JSON, as the saved config is."""
  for name, value in values.items():
    try:
      json.dumps(value)
    except TypeError as error:
      raise ValueError(
        f'{path} has {name}={value!r:.80}, which a config cannot hold; put '
        'schedules and controllers into a function of your own that returns '
        "the method, and name it 'module:function'."
      ) from error
  return values


def within(name: str, groups: tuple[str, ...]) -> bool:
  """Whether a field is one of `groups`, or in one of them."""
  return any(name == group or name.startswith(f'{group}.') for group in groups)


# The ends of the names of fields that are dicts of a user's own names.
_DICTS = (
  '_kwargs', '.kwargs', 'learner.fields', 'environment.others',
  'agent.variables',
)  # fmt: skip


def flat(values: Any, name: str = '') -> dict[str, Any]:
  """Nested dicts as one, {'optim.lr': ...}; lists and arguments are values."""
  if not isinstance(values, dict) or name.endswith(_DICTS):
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
