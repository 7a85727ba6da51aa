"""Calls as Python writes them, as Gemma does, and as tags with parameters."""

import re

from grpo_jax.environments.formats import _json
from grpo_jax.environments.formats import _turns
from grpo_jax.environments.formats import _values

Unreadable = _turns.Unreadable

_BEGINS = re.compile(r'\s*\[\s*[^\W\d][\w.]*\s*\(')
_IS_JSON = re.compile(r'\s*\[?\s*\{')


def python(text: str) -> list[_turns.Call]:
  """The calls `[f(a=1), g()]` or `f(a=1)`, or JSON in their place.

  Raises:
    Unreadable: The text is something else.
  """
  if _IS_JSON.match(text):
    return _json.calls(text)
  reader = _values.Reader(text)
  calls = _python(reader)
  if not reader.ended():
    raise Unreadable(f'goes on with {text[reader.at :].strip():.20}')
  return calls


def llama(text: str) -> list[_turns.Call]:
  """What stands behind Llama's mark: JSON, several of it too, or Python.

  Raises:
    Unreadable: The text is something else.
  """
  if not _IS_JSON.match(text):
    return python(text)
  rest, found = _json.bare(text)
  if rest.strip() or not found:
    return _json.calls(text)  # which says what is wrong
  for _, one in found:
    if isinstance(one, Unreadable):
      raise one
  return [one for _, one in found if not isinstance(one, Unreadable)]


def bare_python(text: str) -> _turns.Bare:
  """The list of calls with which a text begins."""
  if not _BEGINS.match(text):
    return _turns.Bare(text)
  reader = _values.Reader(text)
  try:
    calls = _python(reader)
  except Unreadable as error:
    return _turns.Bare('', ((text.strip(), error),))
  raw = text[: reader.at].strip()
  return _turns.Bare(text[reader.at :], tuple((raw, one) for one in calls))


def _python(reader: _values.Reader) -> list[_turns.Call]:
  calls = []
  in_list = reader.next('[')
  while not (in_list and reader.next(']')):
    name = reader.take(_values.NAME)
    if not name:
      raise Unreadable('is no list of calls such as [f(a=1)]')
    reader.need('(')
    # Llama writes NAME.call(...) for the tools that it was trained with.
    calls.append((name[0].removesuffix('.call'), _arguments(reader)))
    if not in_list:
      break
    if reader.need(',', ']') == ']':
      break
  return calls


_ARGUMENT = re.compile(r'([^\W\d]\w*)\s*=')


def _arguments(reader: _values.Reader) -> dict[str, object]:
  arguments = {}
  while not reader.next(')'):
    name = reader.take(_ARGUMENT)
    if not name:
      raise Unreadable(
        'has an argument without its name; write them as in f(a=1)'
      )
    arguments[name[1]] = reader.value()
    if reader.need(',', ')') == ')':
      break
  return arguments


_GEMMA = re.compile(r'call:\s*([^\s{]+)')


def gemma(text: str) -> list[_turns.Call]:
  """The calls `call:f{a:1}`.

  Raises:
    Unreadable: The text is something else.
  """
  reader = _values.Reader(text)
  calls = []
  while not calls or not reader.ended():
    name = reader.take(_GEMMA)
    if not name:
      raise Unreadable('is none of the form call:NAME{...}')
    if not reader.text.startswith('{', reader.at):
      raise Unreadable('has no { behind its name')
    calls.append((name[1], reader.value()))
  return calls


_FUNCTION = re.compile(r'\s*<function=([^<>\n]*)>')
_PARAMETER = re.compile(r'\s*<parameter=([^<>\n]*)>')
_END = re.compile(r'\s*</function>\s*')


def xml(text: str) -> list[_turns.Call]:
  """The calls `<function=f><parameter=a>1</parameter></function>`.

  One line end on each side of a value is a part of the notation.

  Raises:
    Unreadable: The text is something else.
  """
  calls, at = [], 0
  while not calls or at < len(text):
    name = _FUNCTION.match(text, at)
    if not name:
      raise Unreadable('is none of the form <function=NAME>...</function>')
    arguments, at = {}, name.end()
    while parameter := _PARAMETER.match(text, at):
      end = text.find('</parameter>', parameter.end())
      if end < 0:
        raise Unreadable(f'does not close <parameter={parameter[1]:.40}>')
      value = text[parameter.end() : end]
      value = value.removeprefix('\n').removesuffix('\n')
      arguments[parameter[1].strip()] = value
      at = end + len('</parameter>')
    closed = _END.match(text, at)
    if not closed:
      raise Unreadable('needs <parameter=NAME> or </function>')
    calls.append((name[1].strip(), arguments))
    at = closed.end()
  return calls
