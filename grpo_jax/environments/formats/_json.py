"""Calls as JSON: between marks, as the whole turn, or in a fenced block."""

import json
import math
import re
from typing import Any

from grpo_jax.environments.formats import _turns

Unreadable = _turns.Unreadable
_MOST_DIGITS = 1000


def integer(text: str) -> int:
  """A whole number of bounded length.

  Raises:
    Unreadable: It is too long.
  """
  if len(text) > _MOST_DIGITS:
    raise Unreadable(f'has a number of {len(text)} digits')
  return int(text)


def decimal(text: str) -> float:
  """A finite number.

  Raises:
    Unreadable: It is too large.
  """
  value = float(text)
  if not math.isfinite(value):
    raise Unreadable(f'has a number that is too large: {text:.20}')
  return value


def _constant(text: str) -> None:
  raise Unreadable(f'is no JSON: it has {text}')


_DECODER = json.JSONDecoder(
  parse_int=integer, parse_float=decimal, parse_constant=_constant
)


def load(text: str, at: int = 0) -> tuple[Any, int]:
  """The JSON value that begins at a place of a text, and where it ends.

  Raises:
    Unreadable: There is none.
  """
  try:
    return _DECODER.raw_decode(text, at)
  except Unreadable:
    raise
  except json.JSONDecodeError as error:
    raise Unreadable(
      f'is no JSON: {error.msg} at character {error.pos - at}'
    ) from None
  except RecursionError:
    raise Unreadable('is nested too deeply') from None


def call(value: Any) -> _turns.Call:
  """The call that a JSON value is.

  Raises:
    Unreadable: It is none.
  """
  value = _inner(value)
  if not isinstance(value, dict):
    raise Unreadable('is no JSON object with "name" and "arguments"')
  name = value.get('name')
  if not isinstance(name, str) or not name:
    raise Unreadable('has no text in "name"')
  arguments = value.get('arguments', value.get('parameters'))
  if isinstance(arguments, str):  # JSON in JSON, which the OpenAI API has
    arguments, _ = load(arguments.strip() or '{}')
  if arguments is None:
    arguments = {}
  if not isinstance(arguments, dict):
    raise Unreadable('has "arguments" that are no JSON object')
  return name, arguments


def _inner(value: Any) -> Any:
  """What is in the field "function", as the OpenAI API writes calls."""
  if isinstance(value, dict) and isinstance(value.get('function'), dict):
    return value['function']
  return value


def _call_or_error(value: Any) -> _turns.Call | Unreadable:
  try:
    return call(value)
  except Unreadable as error:
    return error


def calls(text: str) -> list[_turns.Call]:
  """The calls of a text that holds nothing else: one, or a list of them.

  Raises:
    Unreadable: It holds something else.
  """
  text = text.strip()
  value, end = load(text)
  if text[end:]:
    raise Unreadable(f'goes on behind its JSON with {text[end:].strip():.20}')
  return [call(one) for one in (value if isinstance(value, list) else [value])]


# The call of a turn that is nothing else. An answer may be JSON too, so a call
# has both fields.
_BEGINS = re.compile(r'[\s;,]*(?=\{\s*"(?:name|type|function|parameters)"\s*:)')
_HAS_ARGUMENTS = re.compile(r'"(?:parameters|arguments)"\s*:')


def bare(text: str) -> _turns.Bare:
  """The calls with which a text begins, as Llama 3 writes them."""
  found, at = [], 0
  while begins := _BEGINS.match(text, at):
    try:
      value, end = load(text, begins.end())
    except Unreadable as error:
      if _HAS_ARGUMENTS.search(text, at):
        found.append((text[begins.end() :], error))
        at = len(text)
      break
    if not _is_call(value):
      break
    raw, at = text[begins.end() : end], end
    found.append((raw, _call_or_error(value)))
  return _turns.Bare(text[at:], tuple(found))


def _is_call(value: Any) -> bool:
  """Whether a JSON value is meant as a call, however bad."""
  value = _inner(value)
  return isinstance(value, dict) and (
    'name' in value and ('arguments' in value or 'parameters' in value)
  )


_FENCE = re.compile(r'^[ \t]*```[ \t]*([\w-]*)[^\S\n]*$', re.MULTILINE)
_KINDS = ('json', 'tool_call', 'tool', '')


def blocks(text: str) -> _turns.Bare:
  """The calls in the fenced blocks of a text.

  A block of JSON that is no call is a part of the text: an answer, say.
  """
  kept, found, at, start = [], [], 0, None
  for fence in _FENCE.finditer(text):
    if start is None:
      start = fence
      continue
    if fence[1]:  # a closing fence has no word: the open one is no block
      start = fence
      continue
    body = text[start.end() : fence.start()]
    calls = _block(body) if start[1] in _KINDS else ()
    if calls:
      kept.append(text[at : start.start()])
      found += [(body.strip(), one) for one in calls]
      at = fence.end()
    start = None
  return _turns.Bare(''.join((*kept, text[at:])), tuple(found))


def _block(body: str) -> list[_turns.Call | Unreadable]:
  """The calls of a block; none if it is not meant as calls."""
  try:
    value, _ = load(body.strip())
  except Unreadable as error:
    meant = '"name"' in body and _HAS_ARGUMENTS.search(body)
    return [error] if meant else []
  values = value if isinstance(value, list) else [value]
  if not values or not all(map(_is_call, values)):
    return []
  return [_call_or_error(one) for one in values]
