"""Chats as files hold them, made into messages with 'role' and 'content'.

Files of other packages write a chat in several ways: with 'from' and 'value'
(ShareGPT), with a content in parts or none beside calls of tools (OpenAI), as a
JSON text in a column of texts, or with a null for every field that some other
message has (Parquet). Each of these becomes one list of messages whose contents
are texts; what is none of them is left as it is, for `prompt_problem` to name.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import json
import re
from typing import Any

# How a JSON list of messages begins in a column of texts.
_LIST = re.compile(r'\s*\[\s*\{')
_ROLES = {  # of ShareGPT, where they differ
  'human': 'user',
  'prompter': 'user',
  'gpt': 'assistant',
  'chatgpt': 'assistant',
  'bing': 'assistant',
  'bard': 'assistant',
  'observation': 'tool',
  'function_response': 'tool',
}
_NO_CALLS = {'', 'none', 'null', 'nan', 'auto'}  # as files write it
_TEXT_PARTS = {'text', 'input_text', 'output_text'}


def read_prompt(value: Any, tools: Any = None) -> Any:
  """A prompt, with its messages as chat templates take them.

  >>> read_prompt([{'from': 'human', 'value': 'How much is 1+2?'}])
  [{'role': 'user', 'content': 'How much is 1+2?'}]

  Args:
    value: What a file holds.
    tools: What the record says of tools, as OpenAI writes it: a list of
      objects with a 'function', or that as a JSON text. Anything else is the
      record's own business. The first message carries them to the template.

  Returns:
    New messages, or the value itself if it is no list of dicts.

  Raises:
    ValueError: A message holds an image or a sound, or calls of tools that
      cannot be told.
  """
  if isinstance(value, str) and _is_chat(found := _from_json(value)):
    value = found
  if not isinstance(value, list | tuple):
    return value
  messages = [_message(place, one) for place, one in enumerate(value)]
  described = _tools(tools)
  if described and messages and isinstance(messages[0], dict):
    messages[0] = {'tools': described, **messages[0]}
  return messages


def call_text(message: Mapping[str, Any]) -> str:
  """The calls of tools in a message as a JSON text; '' if there are none.

  Raises:
    ValueError: They are no calls.
  """
  calls = _calls('The last turn', message.get('tool_calls'))
  plain = [one.get('function', one) for one in calls]
  return json.dumps(plain, ensure_ascii=False) if plain else ''


def _from_json(text: str) -> Any:
  """The list of dicts in a JSON text, or the text if it is none."""
  found = _loaded(text) if _LIST.match(text) else None
  is_list = isinstance(found, list) and all(isinstance(x, dict) for x in found)
  return found if is_list else text


def _is_chat(value: Any) -> bool:
  """Whether some object of a list is a message, and not just data.

  A text prompt may itself be JSON, as in 'Which of [{"x": 1}, {"x": 2}]'.
  """
  return isinstance(value, list) and any(
    'role' in one or {'from', 'value'} <= one.keys() for one in value
  )


def _message(place: int, message: Any) -> Any:
  """A message with 'role', and with a text in 'content' where it can be one."""
  if not isinstance(message, Mapping):
    return message
  found = _without_nulls(message)
  if 'role' not in found and {'from', 'value'} <= found.keys():
    found = _from_sharegpt(found)
  where = f'message {place}'
  # As OpenAI wrote a call before there were many.
  if older := _calls(where, found.pop('function_call', None)):
    calls = [{'type': 'function', 'function': one} for one in older]
    found.setdefault('tool_calls', calls)
  if calls := _calls(where, found.pop('tool_calls', None)):
    found['tool_calls'] = calls
  content = found.get('content')
  if content is None and found.get('tool_calls'):
    found['content'] = ''
  elif isinstance(content, list | tuple) and content:
    found['content'] = _joined(place, content)
  return found


def _from_sharegpt(message: dict[str, Any]) -> dict[str, Any]:
  """A message of ShareGPT, with the names that templates read."""
  rest = {k: v for k, v in message.items() if k not in ('from', 'value')}
  role, value = str(message['from']), message['value']
  call = _object(value) if role == 'function_call' else None
  if call and 'name' in call:
    calls = [{'type': 'function', 'function': call}]
    return {'role': 'assistant', 'content': '', 'tool_calls': calls, **rest}
  return {'role': _ROLES.get(role, role), 'content': value, **rest}


def _calls(where: str, value: Any) -> list[dict[str, Any]]:
  """The calls of tools of a message, as templates read them.

  A file may hold the list or each call as a JSON text, or a single call.

  Args:
    where: How an error names the message.
    value: What it has in 'tool_calls'; None if it has nothing.

  Raises:
    ValueError: They are no calls.
  """
  found = _loaded(value) if isinstance(value, str) else value
  if not found and (
    found is not None or str(value).strip().lower() in _NO_CALLS
  ):
    return []
  several = found if isinstance(found, list | tuple) else [found]
  calls = []
  for one in several:
    call = _object(one) if isinstance(one, str) else one
    if not isinstance(call, Mapping):
      raise ValueError(
        f"{where} has {value!r:.60} in 'tool_calls', but calls are a list of "
        'objects with a name and arguments, or that as a JSON text'
      )
    calls.append(_call(call))
  return calls


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
  """A call whose arguments are an object; OpenAI writes them as a JSON text."""
  function = call.get('function')
  function = _object(function) or function
  if not isinstance(function, Mapping):
    return dict(call)
  arguments = _object(function.get('arguments'))
  told = {} if arguments is None else {'arguments': arguments}
  return {**call, 'function': {**function, **told}}


def _joined(place: int, parts: Sequence[Any]) -> Any:
  """The texts of a content in parts, a line for each.

  Returns:
    A text; or the parts, if one of them is none that is known.
  """
  texts = []
  for part in parts:
    kind = part.get('type') if isinstance(part, Mapping) else None
    if isinstance(part, str):
      texts.append(part)
    elif kind in _TEXT_PARTS and isinstance(part.get('text'), str):
      texts.append(part['text'])
    elif isinstance(kind, str) and kind not in _TEXT_PARTS:
      raise ValueError(
        f'message {place} holds a part of type {kind!r}, but models here read '
        'texts alone; leave out records with images, sounds or files'
      )
    else:
      return parts
  return '\n'.join(texts)


def _tools(value: Any) -> list[Any]:
  """Descriptions of tools, if a value is a list of them; else none."""
  if isinstance(value, str):
    value = _from_json(value)
  if not isinstance(value, list | tuple):
    return []
  found = [*map(_without_nulls, value)]
  return found if all(map(_is_tool, found)) else []


def _is_tool(value: Any) -> bool:
  function = value.get('function', value) if isinstance(value, dict) else None
  return isinstance(function, dict) and isinstance(function.get('name'), str)


def _without_nulls(value: Any) -> Any:
  """A value without the fields that are null, in dicts within it too.

  Parquet has one type for all messages of a column, so each of them has every
  field of the others.
  """
  if isinstance(value, Mapping):
    return {
      name: _without_nulls(item)
      for name, item in value.items()
      if item is not None
    }
  if isinstance(value, list | tuple):
    return [*map(_without_nulls, value)]
  return value


def _object(value: Any) -> dict[str, Any] | None:
  """The JSON object in a text; None if it is no text, or of no object."""
  found = _loaded(value) if isinstance(value, str) else None
  return found if isinstance(found, dict) else None


def _loaded(text: str) -> Any:
  """What a JSON text says; None if it is none."""
  try:
    return json.loads(text)
  except (ValueError, RecursionError):
    return None
