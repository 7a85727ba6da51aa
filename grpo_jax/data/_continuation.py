"""Chats that go on: the ids that stand between two turns of a model.

The ids of a chat grow at their end alone: those of its first messages, those
that the model sampled, and for each message behind them what the template
writes there. That text does not depend on the chat before it. So it is rendered
behind a short chat that stands in for the real one,

    user: Xq6 | assistant: Xq7 | the new messages

and what follows the assistant's Xq7 is taken. Nothing that a model has sampled
is ever decoded and encoded again, and no history is rendered anew. Templates
that write something else behind a longer chat are found, and refused, by
`check`.
"""

from collections.abc import Collection
from collections.abc import Mapping
from collections.abc import Sequence
import functools
import itertools
import json
import re
from typing import Any
from typing import NamedTuple
from typing import Protocol

from grpo_jax.data import _spelled
from grpo_jax.data._chat import ChatTemplate
from grpo_jax.data._chat import Message
from grpo_jax.data._chat import Prompt
from grpo_jax.data._chat import PromptFormat
from grpo_jax.data._chat import is_by_assistant
from grpo_jax.data._chat import leaves
from grpo_jax.data._chat import prompt_problem
from grpo_jax.data._messages import read_prompt

Tools = Sequence[Mapping[str, Any]]

_CALL_ID = 'call00001'  # nine letters and digits, which Mistral's demand
_NEXT, _LATER = 'Xq4', 'Xq5'  # stand in no template
_ASKED = {'role': 'user', 'content': 'Xq6'}
_SHORT = (_ASKED,)
_LONG = (
  {'role': 'user', 'content': 'Xq2, and then Xq3?'},
  {'role': 'assistant', 'content': 'Xq1.'},
  _ASKED,
)
# How templates mark reasoning: what opens and what closes it.
_REASONING = (
  ('<think>', '</think>'),
  ('[THINK]', '[/THINK]'),
  ('<seed:think>', '</seed:think>'),
  ('<|START_THINKING|>', '<|END_THINKING|>'),
  ('<|channel>', '<channel|>'),
)
# What templates call the reasoning of a message, and how they read it.
_REASONING_FIELDS = 'reasoning_content', 'reasoning', 'thinking'
_REASONING_FIELD = re.compile(
  rf"""(?:\w\.|[("'[]["']?)({'|'.join(_REASONING_FIELDS)})\b"""
)


class WritesChats(_spelled.Encodes, Protocol):
  """What is read of a `Tokenizer`."""

  @property
  def chat_template(self) -> ChatTemplate | None: ...
  @property
  def prompt_format(self) -> PromptFormat: ...
  def turn_end_id(self) -> int | None: ...


class TurnEnd(NamedTuple):
  """How a template ends a turn of the assistant.

  Attributes:
    token_id: The id of the token.
    text: Its text.
  """

  token_id: int
  text: str


def begin(
  tokenizer: WritesChats,
  prompt: Prompt,
  tools: Tools,
  sampled: Collection[int] = (),
) -> list[int]:
  """See `Tokenizer.begin_chat`."""
  # Where reasoning has a field of its own, no text has marks of it.
  has_field = reasoning_field(tokenizer)
  marks = () if has_field else [*itertools.chain(*_REASONING)]
  aside = _spelled.set_aside(tokenizer, _read(prompt), sampled, marks)
  return _spelled.encode(
    tokenizer, _text(tokenizer, aside.messages, tools), aside
  )


def text(tokenizer: WritesChats, prompt: Prompt, tools: Tools) -> str:
  """See `Tokenizer.chat_text`."""
  return _text(tokenizer, _read(prompt), tools)


def go_on(
  tokenizer: WritesChats,
  new: Prompt,
  tools: Tools,
  cut: bool,
  opened_reasoning: bool,
) -> list[int]:
  """See `Tokenizer.continue_chat`."""
  aside = _spelled.set_aside(tokenizer, _read(new))
  is_result = aside.messages[0]['role'] == 'tool'
  end = turn_end(tokenizer, tools, is_result)
  behind = _behind(tokenizer, aside.messages, tools)
  _, found, rest = behind.partition(end.text)
  if not found:
    roles = [one['role'] for one in aside.messages]
    raise ValueError(
      f'The chat template does not end the turn of the assistant by'
      f' {end.text!r} before messages with the roles {roles}, as it does'
      ' before others; give other messages.'
    )
  closing = reasoning_marks(tokenizer)[1] if cut and opened_reasoning else ''
  if closing:
    closing = f'\n{closing}\n\n{end.text}'
  # The turn's end stands before the rest: a tokenizer may encode the beginning
  # of a text otherwise than the same words in the middle.
  ids = _spelled.encode(tokenizer, end.text + closing + rest, aside)
  return ids if cut and not closing else ids[1:]


def check(tokenizer: WritesChats, tools: Tools, appends: bool) -> None:
  """See `Tokenizer.check_continuation`."""
  asked = [{'role': 'user', 'content': _NEXT}]
  _check_new(tokenizer, tools, asked, appends)
  if not tools:
    return
  _check_descriptions(tokenizer, tools)
  results = [_result(tools, _NEXT), _result(tools, _LATER)]
  _check_new(tokenizer, tools, results[:1], appends)
  _check_new(tokenizer, tools, results, appends)


def turn_ends(tokenizer: WritesChats, tools: Tools) -> tuple[int, ...]:
  """See `Tokenizer.turn_end_ids`."""
  ends = [turn_end(tokenizer, tools, False).token_id]
  if tools:
    ends += [turn_end(tokenizer, tools, True).token_id]
  ends += [tokenizer.turn_end_id()]  # behind the last answer
  return tuple(one for one in tokenizer.eos_ids if one in ends)


def turn_end(tokenizer: WritesChats, tools: Tools, is_result: bool) -> TurnEnd:
  """How the template ends a turn before a user's message, or a result.

  Raises:
    ValueError: it ends none there by a token that is one of `eos_ids`.
  """
  return _turn_end(tokenizer, json.dumps([*tools]), is_result)


# Held by the tokenizer's identity: an equal one is looked at anew.
@functools.lru_cache(maxsize=64)
def _turn_end(tokenizer: WritesChats, tools: str, is_result: bool) -> TurnEnd:
  described = json.loads(tools)
  new = {'role': 'user', 'content': _NEXT}
  if is_result:
    new = _result(described, _NEXT)
  behind = _behind(tokenizer, [new], described)
  between, found, _ = behind.partition(_NEXT)
  if not found:
    raise _lost(new['role'], behind)
  ends = [
    TurnEnd(token_id, tokenizer.backend.id_to_token(token_id) or '')
    for token_id in tokenizer.eos_ids
  ]
  last = tokenizer.turn_end_id()
  end = _first(between, ends)
  if not end and not is_result and last in tokenizer.eos_ids:
    # A turn may end by one token where it is sampled, and be closed by another
    # where the chat goes on, as in GPT-OSS.
    added = tokenizer.backend.get_added_tokens_decoder()
    end = _first(
      between,
      [TurnEnd(i, one.content) for i, one in added.items() if one.special],
    )
  if end and tokenizer.encode(end.text) == [end.token_id]:
    return end
  if last is not None and last not in tokenizer.eos_ids:
    token = tokenizer.backend.id_to_token(last)
    raise ValueError(
      f'The chat template ends a turn of the assistant by {token!r}, which is'
      f' none of the end tokens {[one.text for one in ends]}, so that a turn'
      ' would never end; name it in config.data.eos_tokens.'
    )
  raise ValueError(
    'The chat template writes no end token between a turn of the assistant and'
    f' the next message (it writes {between!r:.80}), so that nobody could say'
    ' where a turn ends; take a model whose template ends turns by a token such'
    f' as <|im_end|>, or name that token in config.data.eos_tokens (now'
    f' {[one.text for one in ends]}).'
  )


def _first(text: str, ends: Sequence[TurnEnd]) -> TurnEnd | None:
  """The token that stands first in a text; of two there, the longer one."""
  places = [
    (text.find(end.text), -len(end.text), end)
    for end in ends
    if end.text and end.text in text
  ]
  return min(places)[-1] if places else None


def reasoning_marks(tokenizer: WritesChats) -> tuple[str, str]:
  """What opens and what closes reasoning; empty if the template has neither."""
  template = tokenizer.chat_template
  source = template.source if template else ''
  marks = (pair for pair in _REASONING if any(mark in source for mark in pair))
  return next(marks, ('', ''))


def reasoning_field(tokenizer: WritesChats) -> str:
  """Where a message holds its reasoning; '' if the template knows no field."""
  template = tokenizer.chat_template
  found = _REASONING_FIELD.findall(template.source if template else '')
  return next((name for name in _REASONING_FIELDS if name in found), '')


def turn_message(
  tokenizer: WritesChats,
  whole: str,
  text: str,
  reasoning: str,
  calls: Sequence[Mapping[str, Any]],
) -> Message:
  """See `Tokenizer.turn_message`."""
  message: dict[str, Any] = {'role': 'assistant', 'content': text}
  field = reasoning_field(tokenizer)
  if reasoning and field:
    message[field] = reasoning
  elif not field and not calls:
    message['content'] = whole  # as it was spelled
  elif reasoning:
    marks = reasoning_marks(tokenizer)
    opening, closing = marks if any(marks) else _REASONING[0]
    message['content'] = f'{opening}\n{reasoning}\n{closing}\n\n{text}'
  if calls:
    message['tool_calls'] = [*calls]
  return message


def opens_reasoning(tokenizer: WritesChats) -> bool:
  """See `Tokenizer.opens_reasoning`."""
  opening, closing = reasoning_marks(tokenizer)
  if not opening:
    return False
  _, _, opener = _text(tokenizer, [_ASKED], ()).rpartition(_ASKED['content'])
  return opener.rfind(opening) > opener.rfind(closing)


def reasoning_is_open(
  tokenizer: WritesChats, pieces: Sequence[tuple[str, bool]]
) -> bool:
  """See `Tokenizer.reasoning_is_open`."""
  marks = reasoning_marks(tokenizer)
  if not marks[0]:
    return False
  is_open = opens_reasoning(tokenizer)
  added = {
    token.content
    for token in tokenizer.backend.get_added_tokens_decoder().values()
  }
  for text, is_token in pieces:
    # Where a mark is a token, the same word in letters is none.
    found = [
      -1 if mark in added and not is_token else text.rfind(mark)
      for mark in marks
    ]
    if max(found) >= 0:
      is_open = found[0] > found[1]
  return is_open


def _read(given: Prompt) -> list[Message]:
  """Messages as templates take them, made anew.

  Raises:
    ValueError: they are no messages.
  """
  if isinstance(given, str):
    return [{'role': 'user', 'content': given}]
  messages = read_prompt([*given] if isinstance(given, Sequence) else given)
  if problem := prompt_problem(messages):
    raise ValueError(
      'A chat begins and goes on with messages such as'
      f" {{'role': 'user', 'content': 'How much is 1+2?'}}, but {problem};"
      ' correct what the environment gives.'
    )
  last = messages[-1]
  if is_by_assistant(last) and last.get('tool_calls'):
    raise ValueError(
      f'The last message is a call of tools by the assistant ({last!r:.80}),'
      ' behind which its results must stand; add them, or leave it out.'
    )
  return messages


def _text(
  tokenizer: WritesChats, messages: Sequence[Message], tools: Tools
) -> str:
  """A chat as text, up to where the assistant is to write.

  Raises:
    ValueError: prompts are no chats, or the template refuses the messages.
  """
  form, template = tokenizer.prompt_format, tokenizer.chat_template
  if not form.chat or template is None:
    raise ValueError(
      'Turns are messages, and prompts are no chats here; set'
      ' config.data.chat=True, with the tokenizer of a chat model.'
    )
  messages = form.messages(messages)
  begun = ''
  if is_by_assistant(messages[-1]):
    begun = messages.pop()['content']
  if tools and messages:
    messages[0] = {**messages[0], 'tools': [*tools]}
  text = template.render(messages, **form.chat_kwargs)
  return text + begun + form.completion_prefix


def _behind(
  tokenizer: WritesChats,
  new: Sequence[Message],
  tools: Tools,
  history: Sequence[Message] = _SHORT,
) -> str:
  """What the template writes behind the words of a dummy assistant.

  Args:
    tokenizer: It has the template.
    new: The messages behind the assistant's turn.
    tools: As the template reads them.
    history: Messages before that turn.

  Returns:
    The text, the end of the turn included.

  Raises:
    ValueError: the template refuses the messages, or leaves out the turn, or
      its calls of tools although there are tools.
  """
  held = [one for one in leaves([*new]) if isinstance(one, str)]
  said, called = _unused('Xq7', held), _unused('Xq8', held)
  calls = []
  for message in new:
    if message['role'] != 'tool':
      break
    calls += [_call(message, tools, called)]
  text = ''
  # Nothing is said beside calls: some leave it out, or write it behind results.
  for number in (len(calls), 1) if calls else ():
    answer = {'role': 'assistant', 'content': '', 'tool_calls': calls[:number]}
    try:
      text = _text(tokenizer, [*history, answer, *new], tools)
      break
    except ValueError:  # some write a single call of a turn alone
      if number == 1:
        raise
  if called not in text:
    if calls and tools:
      raise ValueError(
        'The chat template leaves out the calls of tools in a turn of the'
        ' assistant, so that the model was not trained on them; take a model'
        " whose template writes 'tool_calls', or do without tools."
      )
    answer = {'role': 'assistant', 'content': said}
    text = _text(tokenizer, [*history, answer, *new], tools)
  _, found, behind = text.rpartition(called if called in text else said)
  if not found:
    raise _lost('assistant', behind)
  return behind


def _unused(mark: str, held: Sequence[str]) -> str:
  """A mark that none of some texts holds."""
  while any(mark in text for text in held):
    mark += 'q'
  return mark


def _call(result: Message, tools: Tools, argument: str) -> dict[str, Any]:
  """The call that a result answers, as the turn before it had it."""
  name = result.get('name') or _tool_name(tools)
  call_id = result.get('tool_call_id') or _CALL_ID
  return tool_call(call_id, name, {'x': argument})


def tool_call(
  call_id: str, name: str, arguments: Mapping[str, Any]
) -> dict[str, Any]:
  """A call of a tool, as messages of the assistant have it in `tool_calls`.

  Args:
    call_id: By which its result names it.
    name: Of the tool.
    arguments: By their names.
  """
  function = {'name': name, 'arguments': arguments}
  return {'type': 'function', 'id': call_id, 'function': function}


def _result(tools: Tools, content: str) -> dict[str, str]:
  return {
    'role': 'tool',
    'tool_call_id': _CALL_ID,
    'name': _tool_name(tools),
    'content': content,
  }


def _tool_name(tools: Tools) -> str:
  for tool in tools:
    return str(tool.get('function', tool).get('name', 'tool'))
  return 'tool'


def _lost(role: str, text: str) -> ValueError:
  return ValueError(
    f'The chat template leaves out messages with the role {role!r} (it writes'
    f' {text!r:.80}), so that the model would not read them; take a model whose'
    ' template writes them.'
  )


def _check_new(
  tokenizer: WritesChats, tools: Tools, new: Sequence[Message], appends: bool
) -> None:
  """Checks that messages can follow a turn of the assistant.

  Raises:
    ValueError: they cannot; the template's fault is named.
  """
  end = turn_end(tokenizer, tools, new[0]['role'] == 'tool')
  short = _behind(tokenizer, new, tools)
  long = _behind(tokenizer, new, tools, _LONG)
  if appends and short != long:
    raise ValueError(
      'The chat template writes a message otherwise behind a short chat'
      f' ({short!r:.80}) than behind a longer one ({long!r:.80}), so that a'
      ' chat cannot grow at its end alone; take a model whose template does not'
      " look back, or set config.environment.history='template'."
    )
  _, _, rest = short.partition(end.text)
  for message in new:
    if message['content'] not in rest:
      raise _lost(message['role'], rest)
  ids = tokenizer.encode(end.text + rest)
  if ids[:1] != [end.token_id]:
    raise ValueError(
      f'The end of a turn, {end.text!r}, is the token {end.token_id} alone, but'
      f' {ids[:4]} with what the chat template writes behind it; correct the'
      ' tokenizer.json.'
    )


def _check_descriptions(tokenizer: WritesChats, tools: Tools) -> None:
  bare, text = (_text(tokenizer, _SHORT, some) for some in ((), tools))
  for tool in tools:
    name = _tool_name([tool])
    if text.count(name) <= bare.count(name):
      raise ValueError(
        f'The chat template does not say to the model that there is a tool'
        f' {name!r}; take a model whose template writes the tools.'
      )
