"""Completions that are JSON, and fit a schema."""

from collections.abc import Mapping
import functools
import json
import re
from typing import Any

from grpo_jax.config import plain_text
from grpo_jax.rewards import _marks
from grpo_jax.rewards.verifiers import _shared

# The line that opens or closes a block; a closing line has no more than this.
_FENCE = re.compile(r'^```[^`\n]*$', re.MULTILINE)


def _check(schema: Mapping[str, Any] | None = None) -> None:
  # Without one, each example has its own; the package is needed for any.
  _validator(_text_of({} if schema is None else schema))


@_marks.imports(_check)
@_marks.checked(_check)
def json_schema(
  prompt: str,
  completion: str,
  example: dict[str, Any],
  *,
  schema: Mapping[str, Any] | None = None,
) -> float:
  """1 if the completion is JSON that fits a schema, else 0.

  The completion is one JSON value and nothing else but white space, or it has
  fenced blocks, as Markdown does: then the last block counts. NaN, Infinity and
  two fields of the same name in one object are no JSON here. The field 'format'
  of a schema is not checked, and a '$ref' must lead to a place in the schema. A
  completion of more than 100,000 characters has reward 0. This needs the
  package jsonschema: `pip install 'grpo_jax[json]'`.

  >>> schema = {'type': 'object', 'required': ['name']}
  >>> json_schema('', '{"name": "Ada"}', {}, schema=schema)
  1.0
  >>> json_schema('', '{"age": 36}', {}, schema=schema)
  0.0

  Args:
    prompt: is not used.
    completion: the text that was sampled.
    example: the record of the data source; its 'answer' is the schema, as JSON
      or as a dict, if no `schema` is given; or a list of them, of which any.
    schema: the JSON schema of all completions.

  Returns:
    1.0 or 0.0.

  Raises:
    ValueError: jsonschema is not installed; or there is no schema, or it is not
      valid.
  """
  del prompt
  validators = [_validator(text) for text in _texts_of(schema, example)]
  if len(completion) > _shared.MOST_CHARACTERS:
    return 0.0
  try:
    value = _loaded(_last_block(completion))
  except (ValueError, RecursionError):
    return 0.0
  try:
    return float(any(one.is_valid(value) for one in validators))
  except (RecursionError, OverflowError):  # too deep, or 1e400 among integers
    return 0.0
  except Exception as error:
    # jsonschema checks a '$ref' or a 'pattern' not before it is used.
    raise _invalid(plain_text.named(error)) from error


def _last_block(text: str) -> str:
  """What the last closed block of a text holds; without one, the text."""
  block, start = text, None
  for fence in _FENCE.finditer(text):
    if start is None:
      start = fence.end()
    elif fence.group().rstrip() == '```':
      block, start = text[start : fence.start()], None
  return block


def _texts_of(schema: Any, example: dict[str, Any]) -> list[str]:
  """The schemas of an example, of which any must fit."""
  if schema is not None:
    return [_text_of(schema)]
  given = example.get('answer')
  items = given if isinstance(given, list | tuple) and given else [given]
  if any(isinstance(item, Mapping | bool) for item in items):
    return [i if isinstance(i, str) else _text_of(i) for i in items]
  return [one.text for one in _shared.answers('json_schema', example)]


def _text_of(schema: Any) -> str:
  """A schema as text, which can be the key of a cache."""
  try:
    return json.dumps(_plain(schema))
  except (TypeError, ValueError, RecursionError) as error:
    raise _invalid(plain_text.named(error)) from error


def _plain(schema: Any) -> Any:
  """Dicts and lists, of a ConfigDict too."""
  if isinstance(schema, Mapping):
    return {key: _plain(schema[key]) for key in schema}
  return [*map(_plain, schema)] if isinstance(schema, list | tuple) else schema


@functools.lru_cache(maxsize=64)
def _validator(text: str) -> Any:
  try:
    import jsonschema.validators
    import referencing
  except ImportError as error:
    raise ValueError(
      'The reward json_schema requires the package jsonschema, which is not'
      " installed; run pip install 'grpo_jax[json]'."
    ) from error
  try:
    schema = _loaded(text)
    if type(schema) not in (dict, bool):
      raise ValueError('it is no object, and neither true nor false')
    kind = jsonschema.validators.validator_for(
      schema, default=jsonschema.Draft202012Validator
    )
    kind.check_schema(schema)
  except (ValueError, RecursionError, jsonschema.SchemaError) as error:
    raise _invalid(
      getattr(error, 'message', None) or plain_text.said(error)
    ) from error
  # Without a registry of its own jsonschema would fetch a '$ref' from the web.
  return kind(schema, registry=referencing.Registry())


def _invalid(reason: str) -> ValueError:
  return ValueError(
    f'The schema of the reward json_schema is not valid: {reason:.300}; correct'
    ' `schema`, or the answer of the example.'
  )


def _loaded(text: str) -> Any:
  return json.loads(
    text, parse_constant=_refuse_constant, object_pairs_hook=_object
  )


def _refuse_constant(name: str) -> None:
  raise ValueError(f'{name} is no JSON')


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  fields = dict(pairs)
  if len(fields) < len(pairs):
    raise ValueError('two fields have the same name')
  return fields
