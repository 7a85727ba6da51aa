"""Tools for a chat template that knows nothing of tools: as texts of users.

What is called is read by the format 'json_block'.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import itertools
import json
from typing import Any

from grpo_jax.environments.base import Message

FORMAT = 'json_block'
"""The format of the calls that a model is told to write."""

_HOW = """\
You can call tools. To call one, write a block of JSON with its name and its
arguments, like this, and end your turn:

```json
{"name": "TOOL", "arguments": {"ARGUMENT": "VALUE"}}
```

These are the tools:

"""


def written(
  messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
) -> list[dict[str, Any]]:
  """The messages without roles and fields of tools.

  Results that follow each other become one message of the user: templates may
  want users and the assistant to take turns.

  >>> written([{'role': 'tool', 'name': 'add', 'content': '3'}])
  [{'role': 'user', 'content': 'Result of add:\\n3'}]

  Args:
    messages: Of an environment.
    tools: What the model is told before all else, in the first message of the
      system, or else of the user.
  """
  found: list[dict[str, Any]] = []
  for is_result, some in itertools.groupby(
    messages, lambda one: one['role'] == 'tool'
  ):
    if is_result:
      told = [f'Result of {one.get("name")}:\n{one["content"]}' for one in some]
      found.append({'role': 'user', 'content': '\n\n'.join(told)})
    else:
      found += map(_without_calls, some)
  if not tools:
    return found
  said = _HOW + '\n'.join(json.dumps(one['function']) for one in tools)
  for role in ('system', 'user'):
    for place, one in enumerate(found):
      if one['role'] == role and isinstance(one['content'], str):
        content = f'{said}\n\n{one["content"]}'
        return [
          *found[:place],
          {**one, 'content': content},
          *found[place + 1 :],
        ]
  return [{'role': 'user', 'content': said}, *found]


def _without_calls(message: Message) -> dict[str, Any]:
  """A message whose calls are blocks in its text."""
  kept = {k: v for k, v in message.items() if k != 'tool_calls'}
  blocks = []
  for call in message.get('tool_calls') or ():
    function = call.get('function', call)
    named = {name: function.get(name) for name in ('name', 'arguments')}
    blocks.append(f'```json\n{json.dumps(named)}\n```')
  if blocks:
    kept['content'] = '\n'.join(filter(None, [kept.get('content'), *blocks]))
  return kept
