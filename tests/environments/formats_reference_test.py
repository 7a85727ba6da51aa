"""Calls as the chat templates of trl write them, read back.

Of trl only its files are needed: `pip install --no-deps trl`, and
`pytest -n 0 -m reference tests/environments`.
"""

import importlib.util
import os
import pathlib

import pytest

from grpo_jax.data import _chat
from grpo_jax.environments import formats
from grpo_jax.environments import schemas

pytestmark = [
  pytest.mark.reference,
  pytest.mark.skipif(
    importlib.util.find_spec('trl') is None, reason='needs trl'
  ),
]

CALLS = (
  {'a': 1, 's': 'its "x"\n{y}', 'l': [1, {'k': None, 'b': True}]},
  {'a': -2, 'x': 0.5},
)
# What ends a turn.
ENDS = '<|im_end|>', '<|eot_id|>', '<turn|>', '<|tool_response>'
# Written in a way that no format here reads; and one that writes no calls.
UNKNOWN = {'glm4moe', 'gptoss', 'muse_glimmer'}
SILENT = {'lfm2'}


def add(a: int, s: str = '', l: list = [], x: float = 0.0):  # noqa: B006, E741
  """Adds."""


def templates():
  place = importlib.util.find_spec('trl')
  assert place is not None and place.origin is not None
  folder = pathlib.Path(place.origin).parent / 'chat_templates'
  return sorted(folder.glob('*.jinja'))


def written(template, arguments):
  """How a prompt ends, and what the template writes behind it."""
  calls = [
    {
      'id': f'call_{place:09}',
      'type': 'function',
      'function': {'name': 'add', 'arguments': one},
    }
    for place, one in enumerate(arguments)
  ]
  asked = [{'role': 'user', 'content': 'q'}]
  answer = {
    'role': 'assistant',
    'content': 'QQ',
    'reasoning_content': 'why',
    'tool_calls': calls,
  }
  tools = [schemas.describe(add)]
  before = template.render(asked, True, tools=tools)
  after = template.render([*asked, answer], False, tools=tools)
  text = after[len(os.path.commonprefix([before, after])) :].rstrip('\n')
  for end in ENDS:
    text = text.removesuffix(end)
  return before, text


def test_each_template_is_read_back():
  read = 0
  for path in templates():
    source = path.read_text(encoding='utf-8')
    tokens = {'bos_token': '<bos>', 'eos_token': '<eos>'}
    template = _chat.ChatTemplate(source, tokens)
    family = path.stem.removesuffix('_training')
    try:
      template.check(['tools'])
    except ValueError:
      continue  # it reads no tools
    name = formats.guess(source)
    assert bool(name) == (family not in UNKNOWN), path.stem
    if not name or family in SILENT:
      continue
    try:
      calls = CALLS
      before, text = written(template, calls)
    except ValueError:  # Llama 3 writes one call alone
      calls = CALLS[:1]
      before, text = written(template, calls)
    parsed = formats.parse(
      formats.find(name),
      [(text, False)],
      opened_reasoning=before.rstrip().endswith('<think>'),
      tools=[schemas.describe(add)],
    )
    found = [(one.name, one.arguments) for one in parsed.calls]
    assert found == [('add', one) for one in calls], path.stem
    assert parsed.reasoning in ('', 'why'), path.stem
    read += 1
  assert read >= 30
