"""What a function takes: as a JSON schema, and whether arguments fit it."""

import collections.abc
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import inspect
import json
import math
import re
import types
import typing
from typing import Any

from grpo_jax.config import importing
from grpo_jax.config import plain_text

_SIMPLE = {
  str: 'string', int: 'integer', float: 'number', bool: 'boolean',
  type(None): 'null', dict: 'object', list: 'array', tuple: 'array',
}  # fmt: skip
_LISTS = list, tuple, collections.abc.Sequence, collections.abc.Iterable
_OBJECTS = dict, collections.abc.Mapping
_TAKEN = (
  'str, int, float, bool, list[...], dict[str, ...], Literal[...] or None'
)


def describe(
  function: Callable[..., Any], is_method: bool = False
) -> dict[str, Any]:
  """The schema of a function, as chat templates read it.

  Args:
    function: Its arguments have types, its docstring is in Google style.
    is_method: Whether the first argument is the instance.

  Returns:
    `{'type': 'function', 'function': {'name', 'description', 'parameters'}}`.

  Raises:
    ValueError: An argument has no type, or one that no schema describes; or the
      function takes any number of arguments.
  """
  name = getattr(function, '__name__', '')
  if not name or name == '<lambda>':
    raise ValueError(
      f'The tool {plain_text.shown(function)} has no name, by which a model '
      'could call it; give a function that is made by def.'
    )
  try:
    taken = [*inspect.signature(function).parameters.values()]
    hints = typing.get_type_hints(function)
  except Exception as error:
    raise ValueError(
      f'The types of the tool {name!r} cannot be read '
      f'({plain_text.named(error)}); correct its signature.'
    ) from error
  description, said = _docstring(inspect.getdoc(function) or '')
  fields, required = {}, []
  for one in taken[1 if is_method else 0 :]:
    if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD, one.POSITIONAL_ONLY):
      raise ValueError(
        f'The tool {name!r} takes {one}, but a model gives arguments by their '
        'names; name each of them.'
      )
    if one.name not in hints:
      raise ValueError(
        f'The argument {one.name!r} of the tool {name!r} has no type, which '
        f'the model is told; annotate it, as in {one.name}: str.'
      )
    fields[one.name] = _type_schema(hints[one.name], one.name, name)
    if one.name in said:
      fields[one.name]['description'] = said[one.name]
    if one.default is one.empty:
      required.append(one.name)
  parameters = {'type': 'object', 'properties': fields, 'required': required}
  return {
    'type': 'function',
    'function': {
      'name': name,
      'description': description,
      'parameters': parameters,
    },
  }


def _type_schema(hint: Any, argument: str, tool: str) -> dict[str, Any]:
  """The schema of a type.

  Raises:
    ValueError: No schema here describes it.
  """
  origin, inner = typing.get_origin(hint), typing.get_args(hint)
  again = lambda one: _type_schema(one, argument, tool)
  if hint is Any:
    return {}
  if hint in _SIMPLE:
    return {'type': _SIMPLE[hint]}
  if origin is typing.Literal:
    return {'enum': [*inner]}
  if origin in (typing.Union, types.UnionType):
    some = [again(one) for one in inner]
    if all([*one] == ['type'] for one in some):
      return {'type': [one['type'] for one in some]}
    return {'anyOf': some}
  if (origin or hint) in _LISTS:
    items = [one for one in inner if one is not ...]
    if len(items) <= 1:
      return {'type': 'array', **({'items': again(items[0])} if items else {})}
  if (origin or hint) in _OBJECTS:
    schema = {'type': 'object'}
    if inner and inner[0] is str:
      return {**schema, 'additionalProperties': again(inner[1])}
    if not inner:
      return schema
  raise ValueError(
    f'The argument {argument!r} of the tool {tool!r} has the type '
    f'{getattr(hint, "__name__", hint)}, which JSON does not have; use '
    f'{_TAKEN}.'
  )


_SECTION = re.compile(
  r'^(Args|Arguments|Returns|Raises|Yields|Examples?|Notes?):\s*$', re.MULTILINE
)
_ARGUMENT = re.compile(r'\*{0,2}(\w+)\s*(?:\([^)]*\))?:\s*(.*)')


def _docstring(text: str) -> tuple[str, dict[str, str]]:
  """What a docstring says of a function, and of each argument."""
  parts = _SECTION.split(text)
  said, name = {}, ''
  sections = dict(zip(parts[1::2], parts[2::2]))
  lines = sections.get('Args', sections.get('Arguments', '')).splitlines()
  lines = [line for line in lines if line.strip()]
  margin = min((_indent(line) for line in lines), default=0)
  for line in lines:
    found = _ARGUMENT.match(line.strip()) if _indent(line) == margin else None
    if found:
      name = found[1]
      said[name] = found[2].strip()
    elif name:
      said[name] = f'{said[name]} {line.strip()}'.strip()
  return parts[0].strip(), said


def _indent(line: str) -> int:
  return len(line) - len(line.lstrip())


def fit(
  arguments: Mapping[str, Any], parameters: Mapping[str, Any], tool: str
) -> tuple[dict[str, Any], str]:
  """Arguments as a function takes them, or why they do not fit.

  Where a schema wants no text, a text is read as JSON: some formats write texts
  alone. A decimal without a fraction is an integer where one is wanted. What a
  schema says beyond types, names, lists and choices is not checked.

  Args:
    arguments: By name.
    parameters: The JSON schema.
    tool: The name, for the sentence.

  Returns:
    The arguments, and '' or a sentence.
  """
  known = parameters.get('properties', {})
  for name in parameters.get('required', ()):
    if name not in arguments:
      return {}, f'The tool {tool!r} needs the argument {name!r}.'
  fitted = {}
  for name, value in arguments.items():
    if name not in known and not parameters.get('additionalProperties'):
      return {}, (
        f'The tool {tool!r} has no argument {name!r}'
        f'{importing.nearest(name, known)}.'
      )
    try:
      fitted[name] = _value(value, known.get(name, {}))
    except _Misfit as error:
      return {}, (
        f'The argument {name!r} of the tool {tool!r} must be {error}, but is '
        f'{plain_text.shown(value)}.'
      )
    except RecursionError:
      return {}, f'The argument {name!r} is nested too deeply.'
  return fitted, ''


def typed(
  name: str, arguments: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]
) -> Mapping[str, Any]:
  """Arguments that were written as texts, as the schema of their tool has them.

  What does not fit stays as it is.
  """
  for tool in tools:
    function = tool.get('function', tool)
    if function.get('name') == name:
      fitted, problem = fit(arguments, function.get('parameters', {}), name)
      return arguments if problem else fitted
  return arguments


class _Misfit(ValueError):
  """What a value must be."""


_KINDS: dict[str, Callable[[Any], bool]] = {
  'string': lambda value: isinstance(value, str),
  'boolean': lambda value: isinstance(value, bool),
  'null': lambda value: value is None,
  'integer': lambda value: type(value) is int,
  'number': lambda value: (
    type(value) is int or (type(value) is float and math.isfinite(value))
  ),
  'array': lambda value: isinstance(value, list | tuple),
  'object': lambda value: isinstance(value, Mapping),
}
_AS_PYTHON = {
  'True': True,
  'False': False,
  'None': None,
}  # as Jinja writes them


def _value(value: Any, schema: Any, turn: bool = True) -> Any:
  """A value as a schema wants it.

  Args:
    value: What was given.
    schema: Of the value.
    turn: Whether it may be turned to another type; see `fit`.

  Raises:
    _Misfit: It does not fit.
  """
  if not isinstance(schema, Mapping):
    return value
  some = schema.get('anyOf') or schema.get('oneOf')
  if some:
    return _any(value, some, turn)
  if 'enum' in schema:
    return _choice(value, schema['enum'], turn)
  wanted = schema.get('type') or ()
  wanted = [wanted] if isinstance(wanted, str) else [*wanted]
  kinds = [_KINDS[one] for one in wanted if one in _KINDS]
  if not any(kind(value) for kind in kinds) and kinds:
    value = _turned(value, wanted, turn)
  if isinstance(value, list | tuple) and 'items' in schema:
    return [_value(one, schema['items'], turn) for one in value]
  if isinstance(value, Mapping):
    return _fields(value, schema, turn)
  return value


def _any(value: Any, schemas: Sequence[Any], turn: bool) -> Any:
  misfits = []
  for turned in (False, True)[: 1 + turn]:  # what fits as it is comes first
    for one in schemas:
      try:
        return _value(value, one, turned)
      except _Misfit as error:
        misfits.append(str(error))
  raise _Misfit(' or '.join(dict.fromkeys(misfits)))


def _choice(value: Any, choices: Sequence[Any], turn: bool) -> Any:
  for one in choices:
    if type(one) is type(value) and one == value:
      return value
  for one in choices:  # 3 may be written as a text
    if turn and isinstance(value, str) and not isinstance(one, str):
      if value in (str(one), json.dumps(one, default=str)):
        return one
  raise _Misfit('one of ' + ', '.join(map(repr, choices)))


def _turned(value: Any, wanted: Sequence[str], turn: bool) -> Any:
  """A value of another type that says the same.

  Raises:
    _Misfit: There is none.
  """
  if turn and isinstance(value, str) and 'string' not in wanted:
    try:
      read = _AS_PYTHON.get(value.strip(), value)
      read = json.loads(value) if read is value else read
    except (ValueError, RecursionError):
      read = value
    if not isinstance(read, str):
      return _value(read, {'type': [*wanted]}, turn)
  whole = type(value) is float and value.is_integer()
  if turn and whole and 'integer' in wanted:
    return int(value)
  articles = {'integer': 'an', 'array': 'an', 'object': 'an'}
  raise _Misfit(
    ' or '.join(f'{articles.get(one, "a")} {one}' for one in wanted)
  )


def _fields(
  value: Mapping[str, Any], schema: Mapping[str, Any], turn: bool
) -> Any:
  known = schema.get('properties', {})
  for name in schema.get('required', ()):
    if name not in value:
      raise _Misfit(f'an object with {name!r}')
  other = schema.get('additionalProperties', {})
  if other is False and set(value) - set(known):
    raise _Misfit(f'an object with {sorted(known)} alone')
  return {
    name: _value(one, known.get(name, other), turn)
    for name, one in value.items()
  }
