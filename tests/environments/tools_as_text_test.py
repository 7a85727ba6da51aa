"""Tools for templates that know nothing of tools."""

import json

import pytest

from grpo_jax.environments import formats
from grpo_jax.environments import schemas
from grpo_jax.environments import tools_as_text

pytestmark = pytest.mark.quick


def add(a: int, b: int) -> int:
  """Adds."""
  return a + b


TOOLS = [schemas.describe(add)]
ASKED = {'role': 'user', 'content': 'How much?'}


@pytest.mark.parametrize(
  'messages, place',
  [
    ([ASKED], 0),
    ([{'role': 'system', 'content': 'Be good.'}, ASKED], 0),
    ([{'role': 'assistant', 'content': 'Hm.'}, ASKED], 1),
  ],
)
def test_tools_are_told_once_before_all_else(messages, place):
  before = [dict(one) for one in messages]
  found = tools_as_text.written(messages, TOOLS)
  assert messages == before and len(found) == len(messages)
  told = found[place]['content']
  assert told.endswith(f'\n\n{messages[place]["content"]}')
  schema = told.removesuffix(messages[place]['content']).strip()
  assert json.loads(schema.splitlines()[-1]) == TOOLS[0]['function']
  found[place] = messages[place]
  assert found == messages


def test_without_a_message_of_theirs_the_tools_are_one():
  (told,) = tools_as_text.written([], TOOLS)
  assert told['role'] == 'user' and '"add"' in told['content']


def test_results_are_one_message_of_the_user():
  results = [
    {'role': 'tool', 'tool_call_id': f'call_{n}', 'name': 'add', 'content': n}
    for n in ('3', '4')
  ]
  assert tools_as_text.written([*results, ASKED, results[0]]) == [
    {'role': 'user', 'content': 'Result of add:\n3\n\nResult of add:\n4'},
    ASKED,
    {'role': 'user', 'content': 'Result of add:\n3'},
  ]


def test_what_a_model_is_told_to_write_is_read_and_so_are_calls_before():
  call = {'function': {'name': 'add', 'arguments': {'a': 1, 'b': 2}}}
  said = {'role': 'assistant', 'content': 'Well.', 'tool_calls': [call, call]}
  (found,) = tools_as_text.written([said])
  assert set(found) == {'role', 'content'} and said['tool_calls']
  format = formats.find(tools_as_text.FORMAT)
  parsed = formats.parse(format, [(found['content'], False)])
  assert parsed.text.strip() == 'Well.'
  calls = [(one.name, one.arguments) for one in parsed.calls]
  assert calls == [('add', {'a': 1, 'b': 2})] * 2
  (told,) = tools_as_text.written([], TOOLS)
  shown = formats.parse(format, [(told['content'], False)])
  assert [one.name for one in shown.calls] == ['TOOL']
