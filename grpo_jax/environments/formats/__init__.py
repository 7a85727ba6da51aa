"""How models write calls of tools, and how these are read.

`find` has a format by its name, `guess` the one of a chat template, and `parse`
reads a turn. No turn makes it raise. `help(parse)` says what is a call and what
is not.

A format of your own is a function that a config names `'module:function'`. It
is given the text of a turn without its reasoning, and returns a `Parsed`.
"""

import functools

from grpo_jax.config import importing
from grpo_jax.environments.formats import _calls
from grpo_jax.environments.formats import _json
from grpo_jax.environments.formats._turns import Format
from grpo_jax.environments.formats._turns import Parsed
from grpo_jax.environments.formats._turns import Piece
from grpo_jax.environments.formats._turns import parse

_TAGS = ('<tool_call>', '</tool_call>')
_THOUGHT = ('<think>', '</think>')
FORMATS = (
  Format('hermes', (_TAGS,), _json.calls),
  Format('xml', (_TAGS,), _calls.xml, ends_itself=False, has_types=False),
  Format(
    'llama_json', (('<|python_tag|>', ''),), _calls.llama, bare=_json.bare
  ),
  Format(
    'pythonic',
    (
      ('<|tool_call_start|>', '<|tool_call_end|>'),
      ('<|python_start|>', '<|python_end|>'),
    ),
    _calls.python,
    bare=_calls.bare_python,
  ),
  Format(
    'gemma',
    (
      ('<start_function_call>', '<end_function_call>'),
      ('<|tool_call>', '<tool_call|>'),
    ),
    _calls.gemma,
    quotes=('<escape>', '<|"|>'),
    reasoning=(('<|channel>', '<channel|>'), _THOUGHT),
  ),
  Format('json_block', bare=_json.blocks),
)
NAMES = tuple(one.name for one in FORMATS)


@functools.cache
def find(name: str) -> Format:
  """The format that a config names.

  >>> find('hermes').pairs
  (('<tool_call>', '</tool_call>'),)

  Args:
    name: One of `NAMES`, or 'module:function' of a function `(text) -> Parsed`.

  Raises:
    ValueError: There is none.
  """
  if ':' in name:
    function = importing.imported(name, f'The format {name!r}')
    return Format(name, own=function)
  for one in FORMATS:
    if one.name == name:
      return one
  raise ValueError(
    f'There is no format {name!r}{importing.nearest(name, NAMES)}; give one of '
    f"{', '.join(NAMES)}, or 'module:function' of your own."
  )


# What a template writes, and the format of it; the first that is there counts.
_SHOWN = (
  ('<arg_key>', ''),
  ('<function=', 'xml'),
  ('<start_function_call>', 'gemma'),
  ('<|tool_call>', 'gemma'),
  ('<|tool_call_start|>', 'pythonic'),
  ('<|tool_list_start|>', 'pythonic'),
  ('<|python_start|>', 'pythonic'),
  ('<tool_call>', 'hermes'),
  ('<|python_tag|>', 'llama_json'),
  ('ipython', 'llama_json'),
)


def guess(template_text: str) -> str:
  """The format of the calls that a chat template writes.

  >>> guess("{{ '<tool_call>' + call | tojson + '</tool_call>' }}")
  'hermes'

  Args:
    template_text: The template, in Jinja.

  Returns:
    Its name; 'json_block' for a template that knows nothing of calls; '' for
    one that writes them as no format here does.
  """
  for mark, name in _SHOWN:
    if mark in template_text:
      return name
  return '' if 'tool_calls' in template_text else 'json_block'


__all__ = [
  'FORMATS', 'NAMES', 'Format', 'Parsed', 'Piece', 'find', 'guess', 'parse',
]  # fmt: skip
