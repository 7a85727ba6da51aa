"""Functions that a policy may call, and how they are called.

Nothing that a policy writes and nothing that a tool does ends an episode: the
policy reads one line that says what was wrong. `Unavailable` and `Ended` alone
go through.
"""

import asyncio
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import contextvars
import copy
import dataclasses
import functools
import inspect
import json
from typing import Any
from typing import NamedTuple
from typing import TypeVar

from grpo_jax.config import importing
from grpo_jax.config import plain_text
from grpo_jax.environments import base
from grpo_jax.environments import schemas
from grpo_jax.environments import threads

_MARK = 'grpo_jax_tool'
_Function = TypeVar('_Function', bound=Callable[..., Any])
_MOST_CHARACTERS = 100_000
_ERROR_CHARACTERS = 500


class Outcome(NamedTuple):
  """What came of a call.

  Attributes:
    message: The result, or the line in its place, as the policy reads it.
    error: '' or what went wrong, in a sentence.
  """

  message: base.Message
  error: str = ''


@dataclasses.dataclass
class Counts:
  """How many calls there were, and how many of them went wrong."""

  calls: int = 0
  errors: int = 0


_counts: contextvars.ContextVar[Counts | None] = contextvars.ContextVar(
  'counts', default=None
)


@contextlib.contextmanager
def counted() -> Iterator[Counts]:
  """Counts the calls that `run_calls` runs in this task and those it starts."""
  counts = Counts()
  token = _counts.set(counts)
  try:
    yield counts
  finally:
    _counts.reset(token)


def tool(function: _Function) -> _Function:
  """Marks a method as a tool of its class.

  >>> class Shop:
  ...   @tool
  ...   def search(self, query: str) -> str:
  ...     '''Finds goods.'''
  ...     return f'no {query}'

  Args:
    function: Its arguments have types; see `schema`.

  Returns:
    The same function, marked.
  """
  setattr(getattr(function, '__func__', function), _MARK, True)
  return function


def is_tool(function: Any) -> bool:
  """Whether a function is marked by `tool`."""
  return bool(getattr(function, _MARK, None))


def described(function: _Function, schema: Mapping[str, Any]) -> _Function:
  """Gives a function a schema that its signature does not say.

  Args:
    function: Called with keyword arguments.
    schema: As `schema` returns it, such as a server of tools has it.

  Returns:
    The same function.
  """
  setattr(function, _MARK, schema)
  return function


def schema(
  function: Callable[..., Any], is_method: bool = False
) -> dict[str, Any]:
  """The JSON schema of a tool, as chat templates read it.

  >>> def add(a: int, b: int = 0) -> int:
  ...   '''Adds.
  ...
  ...   Args:
  ...     a: The first number.
  ...   '''
  ...   return a + b
  >>> schema(add)['function']['parameters']['properties']['a']
  {'type': 'integer', 'description': 'The first number.'}

  Args:
    function: Typed, with a docstring in Google style.
    is_method: Whether its first argument is the instance.

  Returns:
    `{'type': 'function', 'function': {'name', 'description', 'parameters'}}`.

  Raises:
    ValueError: It says no schema: an argument has no type, say.
  """
  mark = getattr(function, _MARK, None)
  if isinstance(mark, Mapping):
    return dict(mark)
  return schemas.describe(function, is_method)


async def run_calls(
  calls: Sequence[base.ToolCall],
  tools: Mapping[str, Callable[..., Any]],
  secs: float,
  characters: int = _MOST_CHARACTERS,
) -> list[Outcome]:
  """Runs calls side by side.

  A tool that is no `async def` runs in a thread of its own. One that is late is
  left alone: a thread cannot be ended, but nobody waits for it.

  Args:
    calls: Those of a turn.
    tools: By name.
    secs: For each call, by the clock.
    characters: Of a result, at most; see `shorten`.

  Returns:
    One for each call, in the order of the calls, whichever is done first.

  Raises:
    Unavailable: From a tool.
    Ended: From a tool.
  """
  done = await asyncio.gather(
    *(_run(call, tools, secs) for call in calls), return_exceptions=True
  )
  outcomes = []
  for call, one in zip(calls, done):
    if isinstance(one, BaseException):
      raise one
    text, error = one
    text = shorten(_encodable(text), characters)
    message = {
      'role': 'tool', 'tool_call_id': call.id, 'name': call.name,
      'content': text,
    }  # fmt: skip
    outcomes.append(Outcome(message, _encodable(error)))
  counts = _counts.get()
  if counts is not None:
    counts.calls += len(outcomes)
    counts.errors += sum(bool(one.error) for one in outcomes)
  return outcomes


def shorten(text: str, characters: int) -> str:
  """Cuts the middle out of a text that is too long, and says so there.

  >>> shorten('0123456789' * 10, 60)
  '012345678901[... 77 characters are left out ...]90123456789'

  Args:
    text: Any.
    characters: How many are wanted. The mark may take more.
  """
  if len(text) <= characters:
    return text
  mark = f'[... {len(text)} characters are left out ...]'
  kept = max(0, characters - len(mark))
  left = len(text) - kept
  last = text[len(text) - kept // 2 :] if kept // 2 else ''
  mark = f'[... {left} characters are left out ...]'
  return f'{text[: kept - kept // 2]}{mark}{last}'


def _encodable(text: str) -> str:
  """Halves of surrogate pairs are no characters: tokenizers refuse them."""
  return text.encode('utf-8', 'replace').decode()


async def _run(
  call: base.ToolCall, tools: Mapping[str, Callable[..., Any]], secs: float
) -> tuple[str, str]:
  """The text of a result, and what went wrong or ''."""
  function = tools.get(call.name)
  if call.problem or call.arguments is None:
    return _wrong(call.problem or 'The call could not be read.')
  if function is None:
    return _wrong(
      f'There is no tool {call.name!r}{importing.nearest(call.name, tools)}; '
      f'there are: {", ".join(tools) or "none"}.'
    )
  given = copy.deepcopy(call.arguments)  # a tool may change what it is given
  arguments, problem = schemas.fit(given, _parameters(function), call.name)
  if problem:
    return _wrong(problem)
  try:
    result = await threads.limited(function, secs, **arguments)
    return _text(call.name, function, result)
  except (base.Unavailable, base.Ended):
    raise
  except threads.Late:
    return _wrong(f'The tool {call.name!r} gave no result in {secs:g} s.')
  except Exception as error:
    said = f'{plain_text.kind(error)}: {plain_text.first_line(error)}'
    return _wrong(f'The tool {call.name!r} failed: {said}')


def _wrong(sentence: str) -> tuple[str, str]:
  sentence = shorten(' '.join(sentence.split()), _ERROR_CHARACTERS)
  return f'Error: {sentence}', sentence


def _parameters(function: Callable[..., Any]) -> Mapping[str, Any]:
  mark = getattr(function, _MARK, None)
  if isinstance(mark, Mapping):
    return mark['function']['parameters']
  inner = getattr(function, '__func__', None)
  if inner is not None:  # a method of an instance that is made for an episode
    return _parameters_once(inner, True)
  return _parameters_once(function, False)


@functools.lru_cache(maxsize=1024)
def _parameters_once(
  function: Callable[..., Any], is_method: bool
) -> Mapping[str, Any]:
  return schemas.describe(function, is_method)['function']['parameters']


def _text(
  name: str, function: Callable[..., Any], result: Any
) -> tuple[str, str]:
  """A result as text."""
  if isinstance(result, str):
    return str(result), ''
  if result is None:
    hints = getattr(function, '__annotations__', {})
    if hints.get('return', '') in (None, 'None'):
      return 'Done.', ''
    return _wrong(f'The tool {name!r} returned nothing.')
  try:
    return json.dumps(result, ensure_ascii=False, default=_plain), ''
  except (TypeError, ValueError, RecursionError):
    return _wrong(
      f'The tool {name!r} returned a {plain_text.kind(result)}, which is no '
      'text and nothing that JSON has.'
    )


def _plain(value: Any) -> Any:
  """What NumPy calls a number or an array, for JSON."""
  turn = getattr(value, 'tolist', None)
  if turn is None or inspect.isclass(value):
    raise TypeError
  return turn()
