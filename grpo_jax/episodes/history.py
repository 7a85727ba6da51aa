"""What a context reads if the chat template writes the whole chat each turn.

Templates such as Qwen3's leave the reasoning out of turns that are over, and
servers render the whole chat for every answer. So does this: a turn reads what
it would read there, and what has been sampled is written by its text, its
reasoning and its calls.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import numpy as np

from grpo_jax.data import Tokenizer
from grpo_jax.data import is_by_assistant
from grpo_jax.data import tool_call
from grpo_jax.environments import formats
from grpo_jax.episodes.transcript import Part
from grpo_jax.episodes.transcript import Turn

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]

Written = Callable[[Sequence[Message], Tools], Sequence[Message]]
"""`(messages, tools)`: how a template is given what an environment has said."""

_ASKED, _SAID, _NEXT = 'Xq6', 'Xq7', 'Xq4'  # stand in no template


def message(
  tokenizer: Tokenizer, parsed: formats.Parsed, whole: str, tools: Tools
) -> Message:
  """A turn as its message.

  A call that could not be read stays in the text, as it was written. So do all
  calls if the template is given no tools.

  Args:
    tokenizer: Has the template.
    parsed: The turn.
    whole: All of its text.
    tools: Those that the template is given.
  """
  read = [one for one in parsed.calls if tools and one.arguments is not None]
  calls = [tool_call(one.id, one.name, one.arguments or {}) for one in read]
  # Several calls may have been written as one.
  raw = dict.fromkeys(one.raw for one in parsed.calls if one not in read)
  text = '\n'.join(filter(None, [parsed.text, *raw]))
  return tokenizer.turn_message(whole, text, parsed.reasoning, calls)


def ids(
  tokenizer: Tokenizer,
  parts: Sequence[Part],
  new: Sequence[Message],
  tools: Tools,
  written: Written,
  shown: Tools,
) -> np.ndarray | None:
  """i32[n], the ids of a whole chat, up to its next turn.

  Args:
    tokenizer: Has the template.
    parts: Of a context, in order.
    new: What is said behind them.
    tools: Those of the environment, which are told first.
    written: Turns messages into those of the template.
    shown: The tools that the template is given.

  Returns:
    The ids; None if the template refuses the chat. It may, behind what a model
    says: a result whose call could not be read, say.
  """
  messages: list[Message] = []
  sampled = []
  for part in parts:
    if not isinstance(part, Turn):
      if part.chat:
        messages, sampled = [*written(part.chat, tools)], []
      else:
        messages += written(part.messages, () if messages else tools)
      continue
    said = part.message['content']
    if messages and is_by_assistant(messages[-1]):  # which the turn went on
      said = messages.pop()['content'] + said
    sampled.append(len(messages))
    messages.append({**part.message, 'content': said})
  messages += written(new, ())
  try:
    return np.array(tokenizer.begin_chat(messages, shown, sampled), np.int32)
  except ValueError:
    return None


def check(
  tokenizer: Tokenizer, format: formats.Format, tools: Tools = ()
) -> None:
  """Checks that a template can write what has been sampled.

  Args:
    tokenizer: Has the template.
    format: How turns are read.
    tools: Those that the template is given.

  Raises:
    ValueError: It refuses a turn with reasoning, leaves out what was said, or
      writes a turn as no turn is read.
  """
  parsed = formats.Parsed(_SAID, 'Xq1')
  said = message(tokenizer, parsed, f'<think>\nXq1\n</think>\n\n{_SAID}', ())
  chat = [
    {'role': 'user', 'content': _ASKED},
    said,
    {'role': 'user', 'content': _NEXT},
  ]
  try:
    written = tokenizer.chat_text(chat, tools)
  except ValueError as error:
    raise ValueError(
      "config.environment.history='template' writes the whole chat each turn,"
      f' but a turn with reasoning is refused: {error}'
    ) from error
  _, _, behind = written.partition(_ASKED)
  before, found, rest = behind.partition(_SAID)
  _, _, opener = rest.partition(_NEXT)

  def read(text: str) -> str:
    """What is read of a text, without white space."""
    parsed = formats.parse(format._replace(own=None), [(text, False)])
    return ''.join(parsed.text.split())

  if not found or read(before + _SAID) != read(opener) + _SAID:
    raise ValueError(
      "config.environment.history='template' writes the whole chat each turn,"
      f' but where {_SAID!r} was said, the template writes {behind!r:.200},'
      ' which is not read as such a turn; set'
      " config.environment.history='append'."
    )
