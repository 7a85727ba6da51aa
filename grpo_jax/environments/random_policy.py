"""A policy without a model: what it says is drawn at random, from a seed."""

from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import json
import random
import re
from typing import Any

from grpo_jax.environments.base import Reply
from grpo_jax.environments.base import ToolCall
from grpo_jax.environments.events import Say

_OTHERWISE = 'ok'
_ENDS = 0.25  # the share of turns without a call, behind the first turn
_DEEPEST = 8  # of schemas in schemas
_BRACKETS = re.compile(r'\[[^\[\]\n]{1,40}\]')
_QUOTED = re.compile(r"""(?<!\w)['"`]([^'"`\n]{1,40})['"`](?!\w)""")


class RandomPolicy:
  """Answers the contexts of one episode.

  It calls tools with arguments that fit their schemas. Without tools it says
  one of `replies`; without these, something that the environment has put in
  brackets or quotes, as lists of actions are written; else 'ok'. What it says
  depends on the seed and on what the context has read, and on nothing else.

  Args:
    seed: Of the episode.
    replies: Texts to say.
  """

  def __init__(self, seed: int, replies: Sequence[str] = ()):
    self._seed, self._replies = seed, tuple(replies)
    self._turn = 0
    self._turns: dict[int, int] = {}  # of each context
    self._offered: dict[int, list[str]] = {}

  def answer(self, say: Say) -> Reply:
    """What it says to the new messages of a context."""
    context, turn = say.context, self._turns.get(say.context, 0)
    drawn = random.Random(f'{self._seed} {context} {turn}')
    found = offered(texts(say.messages))
    words = self._offered[context] = found or self._offered.get(context, [])
    number, self._turn = self._turn, self._turn + 1
    self._turns[context] = turn + 1
    if say.tools and (not turn or drawn.random() >= _ENDS):
      tool = drawn.choice(say.tools)
      function = tool.get('function', tool)
      call = _call(function, f'call_{number}', drawn, words)
      return Reply('', calls=(call,), turn=number)
    text = drawn.choice(self._replies or words or [_OTHERWISE])
    return Reply(text, turn=number)


def texts(messages: Iterable[Mapping[str, Any]]) -> list[str]:
  """The texts in messages, those in parts of a content too."""
  found = []
  for message in messages:
    content = message.get('content')
    for part in content if isinstance(content, list) else [content]:
      text = part.get('text') if isinstance(part, Mapping) else part
      if isinstance(text, str):
        found.append(text)
  return found


def offered(found: Iterable[str]) -> list[str]:
  """What texts have in brackets, which are kept, or else in quotes.

  >>> offered(["Say '[up]' or '[down]'; don't stay."])
  ['[up]', '[down]']
  >>> offered(['Answer "yes" or "no".'])
  ['yes', 'no']
  """
  text = '\n'.join(found)  # neither of them goes over the end of a line
  return [*dict.fromkeys(_BRACKETS.findall(text) or _QUOTED.findall(text))]


def _call(
  function: Mapping[str, Any],
  name: str,
  drawn: random.Random,
  words: Sequence[str],
) -> ToolCall:
  parameters = {'type': 'object', **(function.get('parameters') or {})}
  arguments = _Values(drawn, words, parameters).draw(parameters)
  written = json.dumps(arguments)
  return ToolCall(name, str(function.get('name')), arguments, written)


class _Values:
  """Draws values that fit schemas."""

  def __init__(
    self, drawn: random.Random, words: Sequence[str], root: Mapping[str, Any]
  ):
    self._drawn, self._root = drawn, root
    self._words = [word.strip('[]') for word in words] or [_OTHERWISE]

  def draw(self, schema: Any, depth: int = 0) -> Any:
    """A value for a schema."""
    schema = self._followed(schema)
    if depth > _DEEPEST or not schema:
      return self._drawn.choice(self._words)
    if 'const' in schema:
      return schema['const']
    if schema.get('enum'):
      return self._drawn.choice(schema['enum'])
    if some := schema.get('anyOf') or schema.get('oneOf'):
      return self.draw(self._drawn.choice(some), depth + 1)
    kind = schema.get('type', 'object' if 'properties' in schema else 'string')
    kind = self._drawn.choice(kind) if isinstance(kind, list) else kind
    match kind:
      case 'null':
        return None
      case 'boolean':
        return self._drawn.random() < 0.5
      case 'integer':
        return self._drawn.randint(*map(int, _range(schema, 1)))
      case 'number':
        return round(self._drawn.uniform(*_range(schema, 0.01)), 2)
      case 'array':
        least = schema.get('minItems', 0)
        size = min(least + self._drawn.randint(0, 2), schema.get('maxItems', 9))
        items = schema.get('items', {})
        return [self.draw(items, depth + 1) for _ in range(size)]
      case 'object':
        return self._object(schema, depth)
    text = self._drawn.choice(self._words)
    text = text.ljust(schema.get('minLength', 0), 'x')
    return text[: schema.get('maxLength')]

  def _object(self, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
    required = schema.get('required', ())
    fields = schema.get('properties', {})
    return {
      name: self.draw(one, depth + 1)
      for name, one in fields.items()
      if name in required or (self._drawn.random() < 0.5 and depth < _DEEPEST)
    }

  def _followed(self, schema: Any) -> Mapping[str, Any]:
    """A schema in the place of a reference to it."""
    for _ in range(_DEEPEST):
      if not isinstance(schema, Mapping) or '$ref' not in schema:
        break
      found: Any = self._root
      for word in str(schema['$ref']).removeprefix('#/').split('/'):
        found = found.get(word) if isinstance(found, Mapping) else None
      schema = found
    return schema if isinstance(schema, Mapping) else {}


def _range(schema: Mapping[str, Any], step: float) -> tuple[float, float]:
  """The least and the greatest number, ends included.

  Args:
    schema: Of a number.
    step: To the next number from one that is left out.
  """
  low, high = schema.get('minimum'), schema.get('maximum')
  if low is None and 'exclusiveMinimum' in schema:
    low = schema['exclusiveMinimum'] + step
  if high is None and 'exclusiveMaximum' in schema:
    high = schema['exclusiveMaximum'] - step
  if low is None:
    low = 0 if high is None else min(0, high)
  return low, max(low, low + 9 if high is None else high)
