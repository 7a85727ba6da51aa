"""What five packages send, as their own code has written it; see bodies/.

`python -m tests.clients.recorded FOLDER --write` writes them anew.
"""

import json
import pathlib

import pytest

from grpo_jax.environments import chats
from grpo_jax.serving import wire

FOLDER = pathlib.Path(__file__).parent / 'bodies'
NAMES = 'openai', 'openai_agents', 'pydantic_ai', 'langgraph', 'smolagents'
CALLING = NAMES[:4]  # which send calls as calls


def read(name):
  return wire.chat((FOLDER / f'{name}.json').read_bytes(), True)


def test_all_bodies_are_read_here():
  assert {path.stem for path in FOLDER.iterdir()} == {*NAMES}


@pytest.mark.parametrize('name', CALLING)
def test_a_chat_is_known_again_whichever_package_has_sent_it(name):
  chat = read(name)
  assert chat.overridden == () and chat.stop == () and not chat.stream
  known = [chats.key(one) for one in chat.messages]
  assert known == [chats.key(one) for one in read('openai').messages]
  said = [one for one in chat.messages if one['role'] == 'assistant']
  calls = [call for one in said for call in one.get('tool_calls', ())]
  assert [call['id'] for call in calls] == ['call_0_0', 'call_1_0', 'call_1_1']
  assert calls[2]['function'] == {
    'name': 'calculator',
    'arguments': {'expression': '√'},
  }
  (tool,) = chat.tools
  assert tool['function']['name'] == 'calculator'
  assert tool['function']['description'] == 'Calculates.'


@pytest.mark.parametrize('name', CALLING)
def test_arguments_and_reasoning_are_spelled_as_each_package_does(name):
  """So the packages differ, and are not one file five times."""
  body = json.loads((FOLDER / f'{name}.json').read_bytes())
  said = [one for one in body['messages'] if 'tool_calls' in one]
  spelled = {
    'pydantic_ai': '{"expression":"12 * 34 + 5"}',
    'langgraph': '{"expression": "12 * 34 + 5"}',
  }
  arguments = said[0]['tool_calls'][0]['function']['arguments']
  assert arguments == spelled.get(name, '{"expression":  "12 * 34 + 5"}')
  keeps = name in ('openai', 'pydantic_ai')
  assert ('reasoning_content' in said[0]) == keeps


def test_smolagents_writes_calls_into_texts():
  chat = read('smolagents')
  assert chat.overridden == ('tool_choice',)
  assert chat.stop == ('Observation:', 'Calling tools:')
  roles = [one['role'] for one in chat.messages]
  assert roles == ['system', 'user', 'assistant', 'user', 'assistant', 'user']
  assert 'Calling tools:' in chat.messages[2]['content']
  assert 'tool_calls' not in chat.messages[2]
  assert chat.messages[3]['content'] == 'Observation:\n413'
  names = [tool['function']['name'] for tool in chat.tools]
  assert names == ['calculator', 'final_answer']
