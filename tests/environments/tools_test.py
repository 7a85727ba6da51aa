"""Tools: their schemas, and what a policy reads of calls that go wrong."""

import asyncio
import functools
import re
import sys
import threading
import time
from typing import Any
from typing import Literal
from typing import Optional

import numpy as np
import pytest

from grpo_jax.environments import base
from grpo_jax.environments import tools


def search(
  query: str,
  limit: int = 5,
  near: list[float] | None = None,
  kind: Literal['new', 'old'] = 'new',
  also: Any = None,
  more: 'dict[str, int] | str' = '',
  exact: Optional[bool] = None,  # noqa: UP045
) -> str:
  """Finds goods.

  In all shops.

  Args:
    query: What to look for: words,
      or a number.
    limit (int): How many.

  Returns:
    Their names.
  """
  return f'{query} {limit} {near} {kind} {also} {more} {exact}'


def test_a_schema_comes_from_the_signature_and_the_docstring():
  assert tools.schema(search) == {
    'type': 'function',
    'function': {
      'name': 'search',
      'description': 'Finds goods.\n\nIn all shops.',
      'parameters': {
        'type': 'object',
        'properties': {
          'query': {
            'type': 'string',
            'description': 'What to look for: words, or a number.',
          },
          'limit': {'type': 'integer', 'description': 'How many.'},
          'near': {
            'anyOf': [
              {'type': 'array', 'items': {'type': 'number'}},
              {'type': 'null'},
            ]
          },
          'kind': {'enum': ['new', 'old']},
          'also': {},
          'more': {
            'anyOf': [
              {'type': 'object', 'additionalProperties': {'type': 'integer'}},
              {'type': 'string'},
            ]
          },
          'exact': {'type': ['boolean', 'null']},
        },
        'required': ['query'],
      },
    },
  }


class Thing:
  pass


def untyped(a, b: int): ...
def many(*a: int): ...
def named(**a: int): ...
def strict(a: int, /): ...
def odd(a: Thing): ...
def unknown(a: 'Nowhere'): ...  # noqa: F821


@pytest.mark.parametrize(
  'function, said',
  [
    (untyped, "argument 'a' of the tool 'untyped' has no type"),
    (many, r"tool 'many' takes \*a: int"),
    (named, r"tool 'named' takes \*\*a: int"),
    (strict, "tool 'strict' takes a: int"),
    (odd, "argument 'a' of the tool 'odd' has the type Thing"),
    (unknown, "types of the tool 'unknown' cannot be read .*Nowhere"),
    (lambda a: a, 'has no name'),
    (functools.partial(search, 'x'), 'has no name'),
  ],
)
def test_a_tool_that_no_model_can_be_told_of_is_refused(function, said):
  with pytest.raises(ValueError, match=said) as error:
    tools.schema(function)
  assert '\n' not in str(error.value) and str(error.value).endswith('.')


def call(name, arguments, problem='', place=0):
  return base.ToolCall(f'call_{place}', name, arguments, '', problem)


def run(functions, *calls, secs=60.0, **options):
  calls = [
    one if isinstance(one, base.ToolCall) else call(*one, place=place)
    for place, one in enumerate(calls)
  ]

  async def both():
    with tools.counted() as counts:
      named = {one.__name__: one for one in functions}
      return await tools.run_calls(calls, named, secs, **options), counts

  return asyncio.run(both())


def contents(outcomes):
  return [one.message['content'] for one in outcomes]


def test_results_come_in_the_order_of_the_calls():
  """Each waits until the one behind it is done: they run side by side."""
  done = [threading.Event() for _ in range(5)]
  done[4].set()

  def wait(place: int) -> str:
    assert done[place + 1].wait(60)
    done[place].set()
    return f'result {place}'

  async def rest(place: int) -> str:
    while not done[place + 1].is_set():
      await asyncio.sleep(0)
    done[place].set()
    return f'result {place}'

  calls = [
    (('wait', 'rest')[place % 2], {'place': place}) for place in range(4)
  ]
  outcomes, counts = run([wait, rest], *calls)
  assert contents(outcomes) == [f'result {place}' for place in range(4)]
  assert [one.message for one in outcomes][1] == {
    'role': 'tool', 'tool_call_id': 'call_1', 'name': 'rest',
    'content': 'result 1',
  }  # fmt: skip
  assert not any(one.error for one in outcomes)
  assert (counts.calls, counts.errors) == (4, 0)


def fine(a: int = 0) -> str:
  return f'fine {a}'


def fails(a: int) -> str:
  raise KeyError('first\nsecond')


def leaves() -> str:
  sys.exit(3)


def interrupts() -> str:
  raise KeyboardInterrupt


def stops() -> str:
  raise StopIteration('here')


async def fails_later() -> str:
  await asyncio.sleep(0)
  raise ValueError('later')


async def leaves_later() -> str:
  await asyncio.sleep(0)
  raise SystemExit(3)


async def cancels() -> str:
  raise asyncio.CancelledError


def forgets():
  "no result"


def does() -> None:
  "no result is wanted"


def thing() -> Any:
  return Thing()


def deep() -> Any:
  value: list = []
  for _ in range(100_000):
    value = [value]
  return value


class Rude(BaseException):
  pass


def rude() -> str:
  raise Rude('x')


async def rude_later() -> str:
  raise Rude('x')


class Unkind(Exception):
  def __str__(self):
    raise RuntimeError


def unkind() -> str:
  raise Unkind


BAD = (
  (('zzz', {}), "There is no tool 'zzz'; there are: fine, fails"),
  (('fien', {}), r"There is no tool 'fien' \(did you mean 'fine'\?\)"),
  (('fine', {'a': 'x'}), "'a' of the tool 'fine' must be an integer, .* 'x'"),
  (('fine', {'a': True}), 'must be an integer, but is True'),
  (('fine', {'a': 1.5}), 'must be an integer, but is 1.5'),
  (('fine', {'b': 1}), "The tool 'fine' has no argument 'b'"),
  (('fails', {}), "The tool 'fails' needs the argument 'a'"),
  (('fails', {'a': 1}), "'fails' failed: KeyError: 'first"),
  (('leaves', {}), "'leaves' failed: Stopped: SystemExit: 3"),
  (('interrupts', {}), "'interrupts' failed: Stopped: KeyboardInterrupt"),
  (('stops', {}), "'stops' failed: Stopped: StopIteration"),
  (('fails_later', {}), "'fails_later' failed: ValueError: later"),
  (('leaves_later', {}), "'leaves_later' failed: Stopped: SystemExit: 3"),
  (('cancels', {}), "'cancels' failed: Stopped: CancelledError"),
  (('forgets', {}), "'forgets' returned nothing"),
  (('thing', {}), "'thing' returned a Thing, which is no text"),
  (('deep', {}), "'deep' returned a list"),
  (('rude', {}), "'rude' failed: Stopped: Rude: x"),
  (('rude_later', {}), "'rude_later' failed: Stopped: Rude: x"),
  (('unkind', {}), "'unkind' failed: Unkind: its text cannot be shown"),
  (call('', None, 'The call is no JSON.'), 'The call is no JSON'),
  (call('fine', None), 'The call could not be read'),
  (call('', None, 'Two\nlines.'), 'Two lines'),
)
EVERY = (
  fine, fails, leaves, interrupts, stops, fails_later, leaves_later, cancels,
  forgets, does, thing, deep, unkind, rude, rude_later,
)  # fmt: skip


def test_what_goes_wrong_is_one_line_and_spoils_nothing():
  calls = [one for bad, _ in BAD for one in (bad, ('fine', {'a': 7}))]
  outcomes, counts = run(EVERY, *calls)
  for (bad, said), outcome in zip(BAD, outcomes[::2]):
    content = outcome.message['content']
    assert content.startswith('Error: '), bad
    assert '\n' not in content and content == f'Error: {outcome.error}'
    assert re.search(said, content), content
  assert contents(outcomes[1::2]) == ['fine 7'] * len(BAD)
  assert (counts.calls, counts.errors) == (2 * len(BAD), len(BAD))


def test_results_that_are_no_texts_become_texts():
  results = [3, 2.5, True, [1, {'a': None}], np.int32(4), np.ones(2), 'so', '']

  def give(place: int) -> Any:
    return results[place]

  calls = [('give', {'place': place}) for place in range(len(results))]
  outcomes, counts = run([give, does], *calls, ('does', {}))
  assert contents(outcomes) == [
    '3', '2.5', 'true', '[1, {"a": null}]', '4', '[1.0, 1.0]', 'so', '',
    'Done.',
  ]  # fmt: skip
  assert not counts.errors


def test_arguments_are_turned_to_what_the_schema_wants():
  given = {
    'query': '12', 'limit': '3', 'near': '[0.5, 1]', 'kind': 'old',
    'also': '4', 'more': '{"a": 1}', 'exact': 'True',
  }  # fmt: skip
  outcomes, _ = run([search], ('search', given))
  assert contents(outcomes) == ['12 3 [0.5, 1] old 4 {"a": 1} True']
  huge = 10**400
  outcomes, _ = run([search], ('search', {'query': 'x', 'near': [huge]}))
  assert str(huge) in contents(outcomes)[0]
  outcomes, _ = run([search], ('search', {'query': 'x', 'limit': 4.0}))
  assert contents(outcomes) == ['x 4 None new None  None']
  for wrong in (
    {'query': 3},
    {'query': 'x', 'kind': 'older'},
    {'query': 'x', 'near': [1, 'y']},
    {'query': 'x', 'near': 'y'},
    {'query': 'x', 'near': '[NaN]'},
    {'query': 'x', 'near': '[1e999]'},
    {'query': 'x', 'more': {'a': 'b'}},
    {'query': 'x', 'exact': 'maybe'},
  ):
    (outcome,), _ = run([search], ('search', wrong))
    assert outcome.error, wrong


@pytest.mark.parametrize('is_async', [False, True])
def test_a_late_tool_is_left_alone(is_async):
  end, ended = threading.Event(), threading.Event()

  def hangs() -> str:
    end.wait(600)
    ended.set()
    return 'too late'

  async def hangs_later() -> str:
    while True:  # nor does it let itself be cancelled
      try:
        await asyncio.sleep(0.01)
      except asyncio.CancelledError:
        pass
      if end.is_set():
        return 'too late'

  late = hangs_later if is_async else hangs
  name = late.__name__

  async def both():
    named = {name: late, 'fine': fine}
    outcomes = await tools.run_calls([call(name, {})], named, 0.02)
    outcomes += await tools.run_calls([call('fine', {})], named, 600)
    end.set()  # or asyncio.run would wait for the task for ever
    return outcomes

  start = time.monotonic()
  one, other = asyncio.run(both())
  assert time.monotonic() - start < 120
  assert one.error == f'The tool {name!r} gave no result in 0.02 s.'
  assert other.message['content'] == 'fine 0'
  assert is_async or ended.wait(60)


@pytest.mark.parametrize('error', [base.Ended, base.Unavailable])
def test_the_end_of_an_episode_goes_through(error):
  async def ends() -> str:
    raise error('so')

  def ends_too() -> str:
    raise error('so')

  for one in (ends, ends_too):
    with pytest.raises(error):
      run([one, fine], ('fine', {}), (one.__name__, {}))


def test_a_long_result_is_cut_in_the_middle():
  def long() -> str:
    return 'a' * 500 + 'b' * 500

  (outcome,), counts = run([long], ('long', {}), characters=100)
  content = outcome.message['content']
  assert content.startswith('a' * 30) and content.endswith('b' * 30)
  assert '[... 938 characters are left out ...]' in content
  kept = re.sub(r'\[\.\.\. .* \.\.\.\]', '', content)
  assert len(kept) == 1000 - 938 and len(content) <= 100
  assert not counts.errors and not outcome.error
  assert tools.shorten('x' * 100, 100) == 'x' * 100
  assert tools.shorten('x' * 101, 0) == '[... 101 characters are left out ...]'

  def shouts() -> str:
    raise ValueError('x' * 10_000)

  (outcome,), _ = run([shouts], ('shouts', {}))
  assert len(outcome.error) <= 500


def test_a_result_can_be_encoded():
  def half() -> str:
    return 'a\ud800b\0'

  (outcome,), _ = run([half], ('half', {}))
  assert outcome.message['content'] == 'a?b\0'


def test_a_function_may_have_a_schema_of_its_own():
  schema = {
    'type': 'function',
    'function': {
      'name': 'far-away',
      'parameters': {
        'type': 'object',
        'properties': {'at': {'type': 'object', 'required': ['x']}},
        'additionalProperties': True,
      },
    },
  }

  async def ask(**arguments):
    return arguments

  far = tools.described(ask, schema)
  assert tools.schema(far) == schema

  async def both():
    calls = [
      call('far-away', {'at': {'x': 1}, 'b-c': 2}),
      call('far-away', {'at': {}}),
    ]
    return await tools.run_calls(calls, {'far-away': far}, 60)

  good, bad = asyncio.run(both())
  assert good.message['content'] == '{"at": {"x": 1}, "b-c": 2}'
  assert "must be an object with 'x', but is {}" in bad.error


def test_arguments_may_have_any_name_and_be_changed():
  def wait(secs: int, function: str, self: list, kwargs: Any) -> str:
    self.append(secs)
    kwargs['new'] = 1
    return f'{secs} {function} {self} {kwargs}'

  given = {'secs': 1, 'function': 'f', 'self': [], 'kwargs': {}}
  (outcome,), _ = run([wait], ('wait', given))
  assert outcome.message['content'] == "1 f [1] {'new': 1}"
  assert given == {'secs': 1, 'function': 'f', 'self': [], 'kwargs': {}}


def test_a_cancelled_turn_leaves_no_tool_behind():
  begun, seen = threading.Event(), []

  async def waits() -> str:
    begun.set()
    try:
      await asyncio.sleep(600)
    except asyncio.CancelledError:
      seen.append('cancelled')
      raise
    return ''

  async def both():
    task = asyncio.ensure_future(
      tools.run_calls([call('waits', {})], {'waits': waits}, 600)
    )
    while not begun.is_set():
      await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
      await task
    for _ in range(10):
      await asyncio.sleep(0)
    return [*seen]  # before asyncio.run cancels what is left

  assert asyncio.run(both()) == ['cancelled']
