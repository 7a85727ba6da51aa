"""Files in the shapes of other packages, and the fields that read each.

`python -m tests.readmes` makes the table of `grpo_jax/data/README.md` of them;
`peer_files_test.py` reads every one of them.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import json
from typing import Any
from typing import NamedTuple


class Shape(NamedTuple):
  """One shape of records.

  Attributes:
    columns: What the table says they hold.
    records: As the file has them.
    settings: What a person sets, by the name of the field.
    prompts: What becomes of the records.
    answers: Likewise.
    note: What the table says beside.
  """

  columns: str
  records: Sequence[Mapping[str, Any]]
  settings: Mapping[str, Any]
  prompts: Sequence[Any]
  answers: Sequence[Any]
  note: str = ''


def turn(role, content, **more):
  return {'role': role, 'content': content, **more}


QUESTION = 'Natalia sold 48 clips, then half as many. How many?'
WHOLE = 'Half of 48 is 24.\n#### 72'
ASK = turn('user', QUESTION)
SYSTEM = turn('system', 'You are a helpful assistant.')
SAID = turn('assistant', '72')
CHAT = {'data.chat': True}
TOOL = {
  'type': 'function',
  'function': {
    'name': 'add',
    'description': 'Adds two numbers.',
    'parameters': {
      'type': 'object',
      'properties': {'a': {'type': 'number'}, 'b': {'type': 'number'}},
    },
  },
}
CALLED = {'name': 'add', 'arguments': {'a': 48, 'b': 24}}
CALLS = [{'id': 'call_1', 'type': 'function', 'function': CALLED}]
# As OpenAI writes it.
WRITTEN = [
  {
    'id': 'call_1',
    'type': 'function',
    'function': {'name': 'add', 'arguments': '{"a": 48, "b": 24}'},
  }
]
CALL = {'role': 'assistant', 'content': None, 'tool_calls': WRITTEN}
RESULT = turn('tool', '72', tool_call_id='call_1')
TRUTH = {'data.answer_field': 'reward_model.ground_truth'}
MESSAGES = {'data.prompt_field': 'messages'}

SHAPES = {
  'verl': Shape(
    'data_source, prompt (messages), ability, reward_model {style, '
    'ground_truth}, extra_info',
    [
      {
        'data_source': 'openai/gsm8k',
        'prompt': [ASK],
        'ability': 'math',
        'reward_model': {'style': 'rule', 'ground_truth': '72'},
        'extra_info': {
          'split': 'train',
          'index': 0,
          'answer': WHOLE,
          'question': QUESTION,
        },
      }
    ],
    CHAT | TRUTH,
    [[ASK]],
    ['72'],
  ),
  'DAPO-Math-17k': Shape(
    'data_source, prompt (messages), ability, reward_model {ground_truth, '
    'style}, extra_info',
    [
      {
        'data_source': 'math_dapo',
        'prompt': [{'content': QUESTION, 'role': 'user'}],
        'ability': 'MATH',
        'reward_model': {
          'ground_truth': '72',
          'style': 'rule-lighteval/MATH_v2',
        },
        'extra_info': {'index': '9a9b6eb4-a1cb-49d1-8c1e-62eaf2f74079'},
      }
    ],
    CHAT | TRUTH,
    [[ASK]],
    ['72'],
  ),
  'TRL, prompt only': Shape(
    'prompt, solution',
    [{'prompt': QUESTION, 'solution': '72'}],
    {'data.answer_field': 'solution'},
    [QUESTION],
    ['72'],
    'a column `answer` needs no answer_field',
  ),
  'TRL, conversational': Shape(
    'prompt (messages), answer',
    [{'prompt': [SYSTEM, ASK], 'answer': '72'}],
    CHAT,
    [[SYSTEM, ASK]],
    ['72'],
  ),
  'OpenAI, chats': Shape(
    'messages',
    [
      {'messages': [SYSTEM, ASK, {**SAID, 'weight': 1}]},
      {'messages': [turn('user', [{'type': 'text', 'text': 'Hi'}]), SAID]},
    ],
    CHAT | MESSAGES,
    [[SYSTEM, ASK], [turn('user', 'Hi')]],
    ['72', '72'],
    'the last turn is the answer; contents in parts are joined by line ends',
  ),
  'OpenAI, calls of tools': Shape(
    'messages, tools, parallel_tool_calls',
    [
      {
        'messages': [ASK, CALL, RESULT, SAID],
        'tools': [TOOL],
        'parallel_tool_calls': False,
      },
      {
        'messages': [ASK, CALL],
        'tools': [TOOL],
        'parallel_tool_calls': False,
      },
    ],
    CHAT | MESSAGES,
    [
      [
        {'tools': [TOOL], **ASK},
        turn('assistant', '', tool_calls=CALLS),
        RESULT,
      ],
      [{'tools': [TOOL], **ASK}],
    ],
    ['72', json.dumps([CALLED])],
    'the chat template gets the tools; a last turn that only calls is an '
    'answer in JSON',
  ),
  'OpenAI, reinforcement': Shape(
    'messages, reference_answer',
    [{'messages': [turn('developer', 'Be brief.'), ASK],
      'reference_answer': '72'}],
    CHAT | MESSAGES | {'data.answer_field': 'reference_answer'},
    [[turn('developer', 'Be brief.'), ASK]],
    ['72'],
    '`developer` is `system` for a template that does not know it',
  ),
  'ShareGPT': Shape(
    'conversations (from, value)',
    [
      {
        'id': 'a',
        'conversations': [
          {'from': 'system', 'value': SYSTEM['content']},
          {'from': 'human', 'value': QUESTION},
          {'from': 'gpt', 'value': '72'},
        ],
      }
    ],
    CHAT | {'data.prompt_field': 'conversations'},
    [[SYSTEM, ASK]],
    ['72'],
    'the last turn is the answer',
  ),
  'OpenRLHF': Shape(
    'input, label',
    [{'input': QUESTION, 'label': '72'}],
    {'data.prompt_field': 'input', 'data.answer_field': 'label'},
    [QUESTION],
    ['72'],
    'with `apply_chat_template`, `input` holds messages: data.chat=True',
  ),
  'NeMo RL': Shape(
    'input, output',
    [{'input': QUESTION, 'output': '72'}],
    {'data.prompt_field': 'input', 'data.answer_field': 'output'},
    [QUESTION],
    ['72'],
  ),
  'Alpaca': Shape(
    'instruction, input, output',
    [
      {'instruction': 'Add them.', 'input': '48, 24', 'output': '72'},
      {'instruction': QUESTION, 'input': '', 'output': '72'},
    ],
    {
      'data.prompt_field': 'instruction+input',
      'data.answer_field': 'output',
    },
    ['Add them.\n\n48, 24', QUESTION],
    ['72', '72'],
    'a plus joins texts by an empty line, and leaves out those that are empty',
  ),
  'JSON in columns of texts': Shape(
    'messages (a JSON text), reward_model (a JSON text)',
    [
      {
        'messages': json.dumps([ASK]),
        'reward_model': '{"ground_truth": ["72"]}',
      }
    ],
    CHAT | MESSAGES | {'data.answer_field': 'reward_model.ground_truth.0'},
    [[ASK]],
    ['72'],
    'a number is a place in a list, -1 the last',
  ),
}  # fmt: skip


def markdown() -> str:
  """The table of the README."""
  rows = [
    '| file of | columns | what a person sets | beside |',
    '|---' * 4 + '|',
  ]
  for name, shape in SHAPES.items():
    steps = ', '.join(f'`{k}={v!r}`' for k, v in shape.settings.items())
    rows.append(f'| {name} | {shape.columns} | {steps} | {shape.note} |')
  return '\n'.join(rows)
