"""Reads values as Python and Gemma write them, with no parser of Python.

Python's own would need memory and stack without a bound for what a model may
write.
"""

import re
from typing import Any

from grpo_jax.environments.formats import _json
from grpo_jax.environments.formats import _turns

Unreadable = _turns.Unreadable
_MOST_DEPTH = 100

_SPACE = re.compile(r'\s*')
NAME = re.compile(r'[^\W\d][\w.-]*')
_KEY = re.compile(r'[^\s:,{}\[\]()\'"]+')
_NUMBER = re.compile(
  r'[-+]?(?:[0-9][0-9_]*(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?'
)
_STRINGS = {
  quote: re.compile(rf'((?:(?!{quote})[^\\]|\\.)*+){quote}', re.DOTALL)
  for quote in ('"""', "'''", '"', "'")
}
_ESCAPE = re.compile(
  r'\\(\r?\n|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U000[0-9a-fA-F]{5}|.)', re.DOTALL
)
_LETTERS = {'n': '\n', 't': '\t', 'r': '\r', '0': '\0', 'b': '\b', 'f': '\f'}
_WORDS = {
  'True': True, 'true': True, 'False': False, 'false': False,
  'None': None, 'null': None,
}  # fmt: skip
_CLOSING = {'[': ']', '(': ')', '{': '}'}


class Reader:
  """A text, and a place in it up to which it has been read."""

  def __init__(self, text: str):
    self.text = text
    self.at = 0

  def take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
    """What matches here, behind white space; then it has been read."""
    found = pattern.match(self.text, self._behind_space())
    if found:
      self.at = found.end()
    return found

  def next(self, *signs: str) -> str:
    """The sign that stands here, which then has been read; '' if none does."""
    self.at = self._behind_space()
    for sign in signs:
      if self.text.startswith(sign, self.at):
        self.at += len(sign)
        return sign
    return ''

  def need(self, *signs: str) -> str:
    """Like `next`, but one of the signs must stand here.

    Raises:
      Unreadable: None does.
    """
    return self.next(*signs) or self._fail(' or '.join(map(repr, signs)))

  def ended(self) -> bool:
    """Whether nothing is left but white space."""
    return self._behind_space() == len(self.text)

  def _behind_space(self) -> int:
    space = _SPACE.match(self.text, self.at)
    return space.end() if space else self.at

  def _fail(self, wanted: str) -> Any:
    here = self.text[self.at : self.at + 20].strip()
    raise Unreadable(
      f'needs {wanted} at character {self.at}, '
      + (f'but has {here!r}' if here else 'where it ends')
    )

  def value(self, depth: int = 0) -> Any:
    """The value that stands here.

    Raises:
      Unreadable: None does.
    """
    if depth > _MOST_DEPTH:
      raise Unreadable('is nested too deeply')
    if sign := self.next(*_turns.QUOTES):
      end = self.text.find(sign, self.at)
      if end < 0:
        raise Unreadable('has a text that does not end')
      start, self.at = self.at, end + 1
      return self.text[start:end]
    if sign := self.next(*_STRINGS):
      found = _STRINGS[sign].match(self.text, self.at)
      if not found:
        raise Unreadable('has a text that does not end')
      self.at = found.end()
      return _ESCAPE.sub(_unescaped, found[1])
    if sign := self.next(*_CLOSING):
      return self._collection(_CLOSING[sign], depth)
    if found := self.take(_NUMBER):
      return _number(found[0].replace('_', ''))
    if found := self.take(NAME):
      if found[0] in _WORDS:
        return _WORDS[found[0]]
      self.at = found.start()
    return self._fail('a value')

  def _collection(self, closing: str, depth: int) -> Any:
    values, fields = [], {}
    while not self.next(closing):
      if closing == '}':
        key = self.key()
        self.need(':')
        fields[key] = self.value(depth + 1)
      else:
        values.append(self.value(depth + 1))
      if self.need(',', closing) == closing:
        break
    return fields if closing == '}' else values

  def key(self) -> str:
    """The name of a field: in quotes, or as it is."""
    if found := self.take(_KEY):
      if found[0][0] not in _turns.QUOTES:
        return found[0]
      self.at = found.start()
    key = self.value(_MOST_DEPTH)
    return key if isinstance(key, str) else self._fail('the name of a field')


def _number(text: str) -> int | float:
  if set(text) & set('.eE'):
    return _json.decimal(text)
  return _json.integer(text)


def _unescaped(found: re.Match[str]) -> str:
  said = found[1]
  if said[0] in 'xuU' and said[1:]:
    return chr(int(said[1:], 16))
  if said.endswith('\n'):
    return ''
  return _LETTERS.get(said, said if said in '\\\'"' else found[0])
