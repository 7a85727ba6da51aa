"""Chat templates in our own words, one for each trap between two turns.

Beside each stands what it writes between a turn of the assistant and the next,
in Python: what `Tokenizer.continue_chat` must give, found without Jinja.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import json
from typing import Any
from typing import NamedTuple

Message = Mapping[str, Any]

TOOLS = (
  {
    'type': 'function',
    'function': {
      'name': 'add',
      'description': 'Adds two numbers.',
      'parameters': {
        'type': 'object',
        'properties': {'a': {'type': 'integer'}, 'b': {'type': 'integer'}},
      },
    },
  },
)


class Trap(NamedTuple):
  """A template.

  Attributes:
    source: In Jinja.
    end: The token that ends a turn of the assistant.
    between: What is written behind that token, for new messages.
    tools: Whether it writes tools, calls and results.
    appends: Whether a longer chat begins with the text of a shorter one.
    alternates: Whether users and the assistant must take turns.
  """

  source: str
  end: str
  between: Callable[[Sequence[Message]], str]
  tools: bool = False
  appends: bool = True
  alternates: bool = False


_OPEN = (
  "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_TURN = "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
_SYSTEM = (
  "{% if messages[0].role != 'system' %}"
  "{{ '<|im_start|>system\\nBe good.<|im_end|>\\n' }}{% endif %}"
)
# Calls as JSON between marks, behind what is said.
_CALLS = (
  '{% for call in m.tool_calls %}'
  "{{ '\\n<tool_call>' ~ call.function | tojson ~ '</tool_call>' }}"
  '{% endfor %}'
)
_TOOLS = (
  '{% if tools %}'
  "{{ '<|im_start|>system\\n' ~ tools | tojson ~ '<|im_end|>\\n' }}{% endif %}"
)


def _chatml(new: Sequence[Message], opener: str = '') -> str:
  turns = [
    f'<|im_start|>{one["role"]}\n{one["content"]}<|im_end|>\n' for one in new
  ]
  return '\n' + ''.join(turns) + '<|im_start|>assistant\n' + opener


# A line end stands behind the end of a turn: sampled is the end alone.
SEPARATOR = Trap(
  '{% for m in messages %}' + _TURN + '{% endfor %}' + _OPEN,
  '<|im_end|>',
  _chatml,
)
# What was thought is left out of turns that are over.
THINKING = Trap(
  '{% for m in messages %}'
  "{% if m.role == 'assistant' and '</think>' in m.content %}"
  "{{ '<|im_start|>assistant\\n' + m.content.split('</think>')[-1].strip()"
  " + '<|im_end|>\\n' }}"
  '{% else %}' + _TURN + '{% endif %}{% endfor %}' + _OPEN,
  '<|im_end|>',
  _chatml,
  appends=False,
)
# Reasoning is opened for the model.
OPENER = Trap(
  THINKING.source.replace('assistant\\n\' }}{% endif', 'assistant\\n<think>\\n'
                          "' }}{% endif"),
  '<|im_end|>',
  lambda new: _chatml(new, '<think>\n'),
  appends=False,
)  # fmt: skip
# A system message that nobody has given stands before every chat.
DEFAULT_SYSTEM = Trap(_SYSTEM + SEPARATOR.source, '<|im_end|>', _chatml)
# Descriptions of tools stand there, and results have turns of their own.
TOOLS_IN_SYSTEM = Trap(
  _TOOLS + "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
  '{{ m.content }}{% if m.tool_calls %}' + _CALLS + '{% endif %}'
  "{{ '<|im_end|>\\n' }}{% endfor %}" + _OPEN,
  '<|im_end|>',
  _chatml,
  tools=True,
)


def _wrapped(one: Message) -> Message:
  """A result as the user's turn that some templates make of it."""
  if one['role'] != 'tool':
    return one
  content = f'<tool_response>\n{one["content"]}\n</tool_response>'
  return {'role': 'user', 'content': content}


# Results are turns of the user.
RESULTS_AS_USER = Trap(
  _TOOLS + '{% for m in messages %}'
  "{% if m.role == 'tool' %}{{ '<|im_start|>user\\n<tool_response>\\n' +"
  " m.content + '\\n</tool_response><|im_end|>\\n' }}"
  "{% else %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}"
  '{% if m.tool_calls %}' + _CALLS + '{% endif %}'
  "{{ '<|im_end|>\\n' }}{% endif %}{% endfor %}" + _OPEN,
  '<|im_end|>',
  lambda new: _chatml([*map(_wrapped, new)]),
  tools=True,
)


# The clock, to the microsecond: no chat is ever rendered twice alike.
DATE = Trap(
  "{{ '<|im_start|>system\\nNow: ' + strftime_now('%d %b %Y %H:%M:%S.%f') +"
  " '<|im_end|>\\n' }}" + SEPARATOR.source,
  '<|im_end|>',
  _chatml,
  appends=False,
)
# The first token by name; nothing opens the assistant's turn.
BOS = Trap(
  '{{ bos_token }}{% for m in messages %}'
  "{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
  "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}",
  '</s>',
  lambda new: ''.join(f'[INST] {one["content"]} [/INST]' for one in new),
)
# Outer white space is lost, and roles must alternate.
STRIPS = Trap(
  '{{ bos_token }}{% for m in messages %}'
  "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
  "{{ raise_exception('Roles must alternate') }}{% endif %}"
  "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role)"
  " + '\\n' + m.content | trim + '<end_of_turn>\\n' }}{% endfor %}"
  '{% if add_generation_prompt %}'
  "{{ '<start_of_turn>model\\n' }}{% endif %}",
  '<end_of_turn>',
  lambda new: ''.join(
    ['\n']
    + [
      f'<start_of_turn>{one["role"]}\n{one["content"].strip()}<end_of_turn>\n'
      for one in new
    ]
    + ['<start_of_turn>model\n']
  ),
  alternates=True,
)


def _merged(new: Sequence[Message]) -> str:
  results = [one for one in new if one['role'] == 'tool']
  others = [one for one in new if one['role'] != 'tool']
  joined = '\n'.join(_wrapped(one)['content'] for one in results)
  turns = [{'role': 'user', 'content': joined}] if results else []
  return _chatml(turns + others)


# Results that follow one another are one turn of the user.
MERGES_RESULTS = Trap(
  _TOOLS + '{% for m in messages %}'
  "{% if m.role == 'tool' %}"
  "{{ '<|im_start|>user' if loop.previtem.role != 'tool' }}"
  "{{ '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}"
  "{{ '<|im_end|>\\n' if loop.last or loop.nextitem.role != 'tool' }}"
  "{% else %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}"
  '{% if m.tool_calls %}' + _CALLS + '{% endif %}'
  "{{ '<|im_end|>\\n' }}{% endif %}{% endfor %}" + _OPEN,
  '<|im_end|>',
  _merged,
  tools=True,
)
# It reads tools, and writes no call of one.
DROPS_CALLS = Trap(_TOOLS + SEPARATOR.source, '<|im_end|>', _chatml, tools=True)
# Nothing but the next speaker's name says that a turn is over.
NO_END = Trap(
  "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"
  "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}",
  '<|im_end|>',
  lambda new: '',
)

ALL = {
  'separator': SEPARATOR,
  'thinking': THINKING,
  'opener': OPENER,
  'default_system': DEFAULT_SYSTEM,
  'tools_in_system': TOOLS_IN_SYSTEM,
  'results_as_user': RESULTS_AS_USER,
  'date': DATE,
  'bos': BOS,
  'strips': STRIPS,
  'merges_results': MERGES_RESULTS,
  'drops_calls': DROPS_CALLS,
  'no_end': NO_END,
}
REFUSED = ('no_end',)
REFUSED_WITH_TOOLS = tuple(
  name
  for name, trap in ALL.items()
  if not trap.tools or name in ('drops_calls', 'no_end')
)

# Beyond one trap each: ends that differ between a turn and its history.
NEXT_SPEAKER_ENDS = Trap(  # as in GLM 4
  '{{ tools | tojson if tools }}{% for m in messages %}'
  "{{ {'user': '<|user|>', 'tool': '<|observation|>'}.get(m.role,"
  " '<|assistant|>') + '\\n' + m.content }}{% if m.tool_calls %}"
  + _CALLS
  + '{% endif %}{% endfor %}'
  "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}",
  '<|user|>',
  lambda new: f'\n{new[0]["content"]}<|assistant|>\n',
  tools=True,
)
CLOSED_OTHERWISE = Trap(  # as in GPT-OSS
  '{% for m in messages %}'
  "{{ '<|start|>' + m.role + '\\n' + m.content }}"
  "{{ '<|return|>' if loop.last and m.role == 'assistant' else '<|end|>' }}"
  "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant' }}"
  '{% endif %}',
  '<|return|>',
  lambda new: f'<|start|>user\n{new[0]["content"]}<|end|><|start|>assistant',
)
RESULTS_BEFORE_WORDS = Trap(  # as in Gemma 4
  '{{ tools | tojson if tools }}{% for m in messages %}'
  "{% if m.role != 'tool' %}{{ '<|turn>' + m.role + '\\n' }}"
  '{% if m.tool_calls %}' + _CALLS + '{% for r in messages[loop.index:] %}'
  "{% if r.role != 'tool' %}{% break %}{% endif %}"
  "{{ '<|tool_response>' + r.content + '<tool_response|>' }}{% endfor %}"
  '{% endif %}{{ m.content }}'
  "{{ '<turn|>\\n' if m.content or not m.tool_calls }}{% endif %}{% endfor %}"
  "{% if add_generation_prompt and messages[-1].role != 'tool' %}"
  "{{ '<|turn>model\\n' }}{% endif %}",
  '<turn|>',
  lambda new: f'{new[0]["content"]}<tool_response|>',
  tools=True,
)
ROUNDS = (  # as in ChatGLM 2
  "{% for m in messages %}{% if m.role == 'user' %}"
  "{{ '[Round ' ~ (loop.index0 // 2 + 1) ~ ']\\n' }}{% endif %}"
  "{{ m.content + '<|im_end|>' }}{% endfor %}"
)


def call(number: int, a: int) -> Message:
  """A turn of the assistant that calls the tool."""
  function = {'name': 'add', 'arguments': {'a': a, 'b': 2}}
  return {
    'role': 'assistant',
    'content': None,
    'tool_calls': [
      {'type': 'function', 'id': f'call{number:05}', 'function': function}
    ],
  }


def call_text(message: Message) -> str:
  """What the templates here write of it."""
  function = message['tool_calls'][0]['function']
  return f'\n<tool_call>{json.dumps(function)}</tool_call>'


def result(number: int, content: str) -> Message:
  """What the tool has given."""
  return {
    'role': 'tool',
    'tool_call_id': f'call{number:05}',
    'name': 'add',
    'content': content,
  }
