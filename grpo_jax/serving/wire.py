"""OpenAI's API as JSON: what clients ask is read here, and answers are written.

Names that OpenAI's API lacks are those of vLLM: `return_token_ids`, `min_p`,
`reasoning_content`. What cannot be honoured is refused in a sentence, and never
passed over.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import json
import math
from typing import Any
from typing import NamedTuple

from grpo_jax.environments.base import ToolCall

_ROLES = {
  'system': 'system', 'developer': 'system', 'user': 'user',
  'assistant': 'assistant', 'tool': 'tool',
}  # fmt: skip
# How clients may change what is drawn, and between which numbers.
_NUMBERS = {
  'temperature': (0.0, math.inf), 'top_p': (0.0, 1.0), 'min_p': (0.0, 1.0),
  'presence_penalty': (-2.0, 2.0), 'frequency_penalty': (-2.0, 2.0),
  'repetition_penalty': (0.0, math.inf),
}  # fmt: skip
# What those are where nothing is changed, and cannot be otherwise here.
_NEUTRAL = {
  'presence_penalty': 0.0, 'frequency_penalty': 0.0, 'repetition_penalty': 1.0,
}  # fmt: skip
_WHOLE = {'top_k': (-1, 2**31 - 1), 'seed': (-(2**63), 2**63 - 1)}
# Fields that would change the answer in ways that are not known here.
_UNKNOWN = (
  'logit_bias', 'functions', 'function_call', 'audio', 'prediction',
  'web_search_options', 'suffix', 'guided_json', 'guided_regex',
  'guided_choice', 'guided_grammar', 'structured_outputs',
)  # fmt: skip
ENDING = 'The server is ending; ask another one.'
_MOST_STOPS = 16
_MOST_TOP = 20
_LEAST_LOGP = -9999.0  # JSON has no infinity


class Refused(Exception):
  """A request that is not answered; a client reads why.

  Args:
    status: Of HTTP.
    message: A sentence.
    code: A word for programs.
    param: The field of the request that is to blame.
  """

  def __init__(
    self,
    status: int,
    message: str,
    code: str | None = None,
    param: str | None = None,
  ):
    super().__init__(message)
    self.status, self.message = status, message
    self.code, self.param = code, param


class Chat(NamedTuple):
  """A request for the next message of a chat.

  Attributes:
    messages: As chat templates read them. A developer is the system, parts of a
      text are joined by line ends, and no content is ''. Calls of tools have
      their arguments as a mapping; what is no JSON object stays a text.
    tools: Schemas, as given.
    max_tokens: Of the answer, at most; None: not said.
    stop: Texts that end the answer.
    stream: Whether the answer is wanted in parts.
    include_usage: Whether a stream ends with the numbers of tokens.
    logprobs: None: no log-probabilities; 0: those of the answer; more: of so
      many likeliest tokens at each place too.
    return_token_ids: Whether ids are wanted too.
    sampling: What was given of temperature, top_p, top_k, min_p, seed and
      penalties.
    overridden: The names of fields that training sets in another way.
    model: As given; '' without one.
  """

  messages: tuple[Mapping[str, Any], ...]
  tools: tuple[Mapping[str, Any], ...] = ()
  max_tokens: int | None = None
  stop: tuple[str, ...] = ()
  stream: bool = False
  include_usage: bool = False
  logprobs: int | None = None
  return_token_ids: bool = False
  sampling: Mapping[str, Any] = {}
  overridden: tuple[str, ...] = ()
  model: str = ''


class Completion(NamedTuple):
  """A request to go on from each of some prompts; see `Chat`.

  Attributes:
    prompt: Texts or ids, at least one of each.
    echo: Whether the prompt is a part of the answer.
    prompt_logprobs: None: no log-probabilities of the prompt; 0: those of its
      tokens; more: of so many likeliest tokens at each place too.
    end_ids: Ids that end the answer too.
    ignores_ends: Whether the end tokens of the model do not end it.
    names_ids: Whether tokens are named by their ids, as 'token_id:7'.
    names_version: Whether the version of the weights is wanted.
  """

  prompt: tuple[str | tuple[int, ...], ...]
  max_tokens: int | None = None
  echo: bool = False
  logprobs: int | None = None
  stop: tuple[str, ...] = ()
  stream: bool = False
  include_usage: bool = False
  return_token_ids: bool = False
  sampling: Mapping[str, Any] = {}
  overridden: tuple[str, ...] = ()
  model: str = ''
  prompt_logprobs: int | None = None
  end_ids: tuple[int, ...] = ()
  ignores_ends: bool = False
  names_ids: bool = False
  names_version: bool = False


class Likely(NamedTuple):
  """A token that might have been drawn: its text, bytes, log-probability."""

  text: str
  data: bytes
  logp: float
  id: int = -1


class Scored(NamedTuple):
  """A token of an answer, or of an echoed prompt.

  Attributes:
    text: Of the token.
    data: Its bytes, which may be a part of a character.
    logp: Its log-probability; None for a first token.
    top: The likeliest tokens there, the likeliest first.
    offset: Where the text begins, in characters of the whole text.
    id: Of the token.
  """

  text: str
  data: bytes
  logp: float | None
  top: tuple[Likely, ...] = ()
  offset: int = 0
  id: int = -1


class Piece(NamedTuple):
  """A part of an answer, for a stream. All pieces joined are the answer."""

  text: str = ''
  reasoning: str = ''
  calls: tuple[ToolCall, ...] = ()
  ids: tuple[int, ...] = ()
  logprobs: tuple[Scored, ...] = ()


class Answer(NamedTuple):
  """What is answered.

  Attributes:
    text: Without reasoning and calls.
    reasoning: What was thought.
    calls: Of tools.
    finish: 'stop', 'length' or 'tool_calls'.
    read: Tokens of the prompt.
    tokens: Tokens of the answer.
    model: Whose answer it is.
    prompt_ids: Given where ids were asked for.
    ids: Likewise.
    logprobs: Given where they were asked for.
    prompt_logprobs: Likewise.
    names_ids: See `Completion`.
    names_version: Likewise.
    version: Of the weights that have drawn it.
    id: Of the answer; '': the app makes one.
  """

  text: str
  reasoning: str = ''
  calls: Sequence[ToolCall] = ()
  finish: str = 'stop'
  read: int = 0
  tokens: int = 0
  model: str = 'policy'
  prompt_ids: tuple[int, ...] = ()
  ids: tuple[int, ...] = ()
  logprobs: Sequence[Scored] | None = None
  prompt_logprobs: Sequence[Scored] | None = None
  names_ids: bool = False
  names_version: bool = False
  version: str = ''
  id: str = ''


def chat(body: bytes | Mapping[str, Any], strict: bool = False) -> Chat:
  """Reads a request for a chat.

  Args:
    body: JSON, or what it says.
    strict: Whether a run trains on the answer. It sets how tokens are drawn, so
      penalties are noted and not refused.

  Raises:
    Refused: It cannot be read, or asks for what is not done here.
  """
  fields = read_object(body)
  messages = _of_kind(fields, 'messages', list, 'a list of messages', ())
  if not messages:
    raise _wrong('messages is empty; give at least one message.', 'messages')
  tools = tuple(_tool(x, n) for n, x in enumerate(_list(fields, 'tools')))
  tools, overridden = _choice(fields, tools)
  if fields.get('parallel_tool_calls') is False:
    overridden += ('parallel_tool_calls',)
  wants = _bool(fields, 'logprobs')
  top = _whole(fields, 'top_logprobs', 0, _MOST_TOP)
  if top and not wants:
    raise _wrong(
      f'top_logprobs={top} needs logprobs=true; give both.', 'top_logprobs'
    )
  most = _whole(fields, 'max_completion_tokens', 1)
  if most is None:
    most = _whole(fields, 'max_tokens', 1)
  return Chat(
    messages=tuple(_message(x, n) for n, x in enumerate(messages)),
    tools=tools,
    max_tokens=most,
    logprobs=(top or 0) if wants else None,
    **_common(fields, strict, overridden),
  )


def completion(
  body: bytes | Mapping[str, Any], strict: bool = False
) -> Completion:
  """Reads a request to go on from prompts; see `chat`."""
  fields = read_object(body)
  wanted = fields.get('logprobs')
  if isinstance(wanted, bool):  # as some clients have it
    logprobs = 0 if wanted else None
  else:
    logprobs = _whole(fields, 'logprobs', 0, _MOST_TOP)
  most = _whole(fields, 'max_tokens', 0)
  echo = _bool(fields, 'echo')
  if most == 0 and not echo:
    raise _wrong(
      'max_tokens=0 asks for nothing; give more, or echo=true.', 'max_tokens'
    )
  if (_whole(fields, 'best_of', 1) or 1) > 1:
    raise _wrong('best_of must be 1; ask several times.', 'best_of')
  return Completion(
    prompt=_prompts(fields.get('prompt')),
    max_tokens=most,
    echo=echo,
    logprobs=logprobs,
    prompt_logprobs=_whole(fields, 'prompt_logprobs', 0, _MOST_TOP),
    end_ids=_list_of_ids(fields, 'stop_token_ids'),
    ignores_ends=_bool(fields, 'ignore_eos'),
    names_ids=_bool(fields, 'return_tokens_as_token_ids'),
    names_version=_bool(fields, 'return_weight_versions'),
    **_common(fields, strict, ()),
  )


def read_object(body: bytes | Mapping[str, Any]) -> Mapping[str, Any]:
  """The object that a body of JSON says.

  Raises:
    Refused: It is no JSON, or says something else.
  """
  if isinstance(body, Mapping):
    return body
  try:
    found = json.loads(body.decode(), parse_constant=_no_constant)
    # Half of a surrogate pair is no character, though JSON may spell it.
    json.dumps(found, ensure_ascii=False).encode()
  except (ValueError, RecursionError) as error:
    problem = 'is nested too deeply'
    if not isinstance(error, RecursionError):
      problem = f'is no JSON in UTF-8 ({error})'
    raise _wrong(f'The body {problem:.200}; correct it.') from error
  if not isinstance(found, dict):
    raise _wrong('The body must be a JSON object; give {"model": ...}.')
  return found


def _no_constant(name: str) -> Any:
  raise ValueError(f'{name} is no number of JSON')


def _wrong(message: str, param: str | None = None) -> Refused:
  return Refused(400, message, 'invalid_value', param)


def _common(
  fields: Mapping[str, Any], strict: bool, overridden: tuple[str, ...]
) -> dict[str, Any]:
  """What chats and completions have in common."""
  _refuse_unknown(fields)
  sampling: dict[str, Any] = {}
  for name, bounds in _NUMBERS.items():
    if (value := _number(fields, name, *bounds)) is not None:
      sampling[name] = value
  for name, bounds in _WHOLE.items():
    if (value := _whole(fields, name, *bounds)) is not None:
      sampling[name] = value
  for name, neutral in _NEUTRAL.items():
    if sampling.get(name, neutral) == neutral:
      sampling.pop(name, None)
    elif not strict:
      raise _wrong(
        f'{name}={sampling[name]} cannot be honoured, because tokens are drawn '
        f'without penalties here; leave it out.',
        name,
      )
  options = _of_kind(fields, 'stream_options', Mapping, 'an object', {})
  model = _of_kind(fields, 'model', str, 'a text', '')
  return dict(
    stop=_stops(fields.get('stop')),
    stream=_bool(fields, 'stream'),
    include_usage=_bool(options, 'include_usage'),
    return_token_ids=_bool(fields, 'return_token_ids'),
    sampling=sampling,
    overridden=(*overridden, *sampling),
    model=model,
  )


def _refuse_unknown(fields: Mapping[str, Any]) -> None:
  if (_whole(fields, 'n', 1) or 1) > 1:
    raise _wrong(
      f'n={fields["n"]} answers at once cannot be had; ask several times.', 'n'
    )
  for name in _UNKNOWN:
    if fields.get(name):
      raise _wrong(
        f'{name} cannot be honoured by this server; leave it out.', name
      )
  form = _of_kind(fields, 'response_format', Mapping, 'an object', {})
  if form and form.get('type') != 'text':
    raise _wrong(
      f'response_format {form.get("type")!r:.40} cannot be honoured, because '
      'nothing constrains which tokens are drawn; leave it out, and say in a '
      'message what is wanted.',
      'response_format',
    )
  modes = _list(fields, 'modalities')
  if any(mode != 'text' for mode in modes):
    raise _wrong('modalities must be ["text"]; leave it out.', 'modalities')


def _choice(
  fields: Mapping[str, Any], tools: tuple[Mapping[str, Any], ...]
) -> tuple[tuple[Mapping[str, Any], ...], tuple[str, ...]]:
  """The tools that may be called, and what of the choice is not obeyed."""
  choice = fields.get('tool_choice')
  if choice in (None, 'auto'):
    return tools, ()
  if choice == 'none':
    return (), ()
  if choice == 'required':
    return tools, ('tool_choice',)
  function = choice.get('function') if isinstance(choice, Mapping) else None
  name = function.get('name') if isinstance(function, Mapping) else None
  names = [tool['function']['name'] for tool in tools]
  if name not in names:
    raise _wrong(
      f"tool_choice must be 'auto', 'none', 'required' or name one of the "
      f'tools ({", ".join(names)}); it is {choice!r:.80}.',
      'tool_choice',
    )
  return tools, ('tool_choice',)


def _tool(tool: Any, number: int) -> Mapping[str, Any]:
  function = tool.get('function') if isinstance(tool, Mapping) else None
  if (
    not isinstance(tool, Mapping)
    or tool.get('type', 'function') != 'function'
    or not isinstance(function, Mapping)
    or not isinstance(function.get('name'), str)
    or not function['name']
    or not isinstance(function.get('parameters') or {}, Mapping)
  ):
    raise _wrong(
      f'tools[{number}] must be {{"type": "function", "function": {{"name": '
      f'..., "parameters": {{...}}}}}}; it is {tool!r:.80}.',
      'tools',
    )
  return tool


def _message(message: Any, number: int) -> Mapping[str, Any]:
  """A message as chat templates read it."""
  where = f'messages[{number}]'
  if not isinstance(message, Mapping):
    raise _wrong(f'{where} must be an object with a role.', 'messages')
  role = message.get('role')
  if not isinstance(role, str) or role not in _ROLES:
    raise _wrong(
      f'{where} has the role {role!r:.40}; it must be one of '
      f'{", ".join(_ROLES)}.',
      'messages',
    )
  found: dict[str, Any] = {
    'role': _ROLES[role],
    'content': _content(message.get('content'), where),
  }
  if role != 'assistant' and message.get('content') is None:
    raise _wrong(f'{where} has no content; give a text.', 'messages')
  if isinstance(name := message.get('name'), str) and name:
    found['name'] = name
  if role == 'tool':
    call = message.get('tool_call_id')
    if not isinstance(call, str) or not call:
      raise _wrong(
        f'{where} is a result without a tool_call_id; give that of its call.',
        'messages',
      )
    found['tool_call_id'] = call
  if role == 'assistant':
    found |= _thought_and_called(message, where)
  return found


def _content(content: Any, where: str) -> str:
  """The text of a message; its parts are joined by line ends."""
  if content is None:
    return ''
  if isinstance(content, str):
    return content
  if not isinstance(content, list):
    raise _wrong(
      f'{where}.content must be a text or a list of parts; it is '
      f'{content!r:.80}.',
      'messages',
    )
  texts = []
  for part in content:
    kind = part.get('type') if isinstance(part, Mapping) else None
    text = None
    if isinstance(part, str):
      text = part
    elif kind in ('text', 'refusal'):
      text = part.get(kind)
    if not isinstance(text, str):
      raise _wrong(
        f'{where} has a part of type {kind!r:.40}, but only texts can be read '
        'here; give {"type": "text", "text": ...}.',
        'messages',
      )
    texts.append(text)
  return '\n'.join(texts)


def _thought_and_called(
  message: Mapping[str, Any], where: str
) -> dict[str, Any]:
  """What an assistant has beside its text."""
  found: dict[str, Any] = {}
  for name in ('reasoning_content', 'reasoning'):
    thought = message.get(name)
    if thought is not None and not isinstance(thought, str):
      raise _wrong(f'{where}.{name} must be a text.', 'messages')
    if thought:
      found.setdefault('reasoning_content', thought)
  if message.get('function_call'):
    raise _wrong(
      f'{where} has a function_call; give tool_calls in its place.', 'messages'
    )
  calls = message.get('tool_calls')
  if calls is None or calls == []:
    return found
  if not isinstance(calls, list):
    raise _wrong(f'{where}.tool_calls must be a list.', 'messages')
  found['tool_calls'] = [
    _call(call, f'{where}.tool_calls[{n}]') for n, call in enumerate(calls)
  ]
  return found


def _call(call: Any, where: str) -> Mapping[str, Any]:
  function = call.get('function') if isinstance(call, Mapping) else None
  if (
    not isinstance(call, Mapping)
    or not isinstance(function, Mapping)
    or not isinstance(call.get('id'), str)
    or not isinstance(function.get('name'), str)
    or not isinstance(function.get('arguments'), str | Mapping | None)
  ):
    raise _wrong(
      f'{where} must be {{"id": ..., "type": "function", "function": {{"name": '
      f'..., "arguments": "..."}}}}; it is {call!r:.80}.',
      'messages',
    )
  return {
    'id': call['id'],
    'type': 'function',
    'function': {
      'name': function['name'],
      'arguments': _arguments(function.get('arguments')),
    },
  }


def _arguments(given: str | Mapping[str, Any] | None) -> Any:
  """Arguments as a mapping; a text that is no JSON object stays."""
  if not given:
    return {}
  if isinstance(given, Mapping):
    return given
  try:
    found = json.loads(given)
    json.dumps(found, ensure_ascii=False).encode()
  except (ValueError, RecursionError):
    return given
  return found if isinstance(found, dict) else given


def _prompts(given: Any) -> tuple[str | tuple[int, ...], ...]:
  """The prompts of a completion."""
  if isinstance(given, str) and given:
    return (given,)
  if isinstance(given, list) and given:
    if ids := _ids(given):
      return (ids,)
    each = [x if isinstance(x, str) and x else _ids(x) for x in given]
    if all(each):
      return tuple(x for x in each if x)
  raise _wrong(
    'prompt must be a text, a list of ids or a list of these, none of them '
    f'empty; it is {given!r:.80}.',
    'prompt',
  )


def _ids(given: Any) -> tuple[int, ...]:
  """A list of ids; () for anything else."""
  if isinstance(given, list) and all(
    isinstance(x, int) and not isinstance(x, bool) and 0 <= x < 2**31
    for x in given
  ):
    return tuple(given)
  return ()


def _stops(given: Any) -> tuple[str, ...]:
  stops = [given] if isinstance(given, str) else given
  if stops is None:
    return ()
  if (
    not isinstance(stops, list)
    or len(stops) > _MOST_STOPS
    or not all(isinstance(stop, str) and stop for stop in stops)
  ):
    raise _wrong(
      f'stop must be a text or a list of at most {_MOST_STOPS} texts, none of '
      f'them empty; it is {given!r:.80}.',
      'stop',
    )
  return tuple(stops)


def _of_kind(
  fields: Mapping[str, Any], name: str, kind: Any, wanted: str, default: Any
) -> Any:
  """A field; its default where it is missing or null."""
  value = fields.get(name)
  if value is None:
    return default
  if not isinstance(value, kind):
    raise _wrong(f'{name} must be {wanted}; it is {value!r:.80}.', name)
  return value


def _list(fields: Mapping[str, Any], name: str) -> list[Any]:
  return _of_kind(fields, name, list, 'a list', [])


def _list_of_ids(fields: Mapping[str, Any], name: str) -> tuple[int, ...]:
  found = _list(fields, name)
  for one in found:
    if not isinstance(one, int) or isinstance(one, bool) or one < 0:
      raise _wrong(f'{name} must be a list of ids; it has {one!r:.80}.', name)
  return tuple(found)


def _bool(fields: Mapping[str, Any], name: str) -> bool:
  return _of_kind(fields, name, bool, 'true or false', False)


def _whole(
  fields: Mapping[str, Any], name: str, least: int, most: int = 2**31 - 1
) -> int | None:
  """A whole number between bounds, or None."""
  value = fields.get(name)
  if value is None:
    return None
  is_whole = isinstance(value, int) and not isinstance(value, bool)
  if not is_whole or not least <= value <= most:
    raise _wrong(
      f'{name} must be a whole number from {least} to {most}; it is '
      f'{value!r:.80}.',
      name,
    )
  return value


def _number(
  fields: Mapping[str, Any], name: str, least: float, most: float
) -> float | None:
  """A finite number between bounds, or None."""
  value = fields.get(name)
  if value is None:
    return None
  is_number = isinstance(value, int | float) and not isinstance(value, bool)
  if not is_number or not least <= value <= most or value == math.inf:
    bound = 'up' if most == math.inf else f'to {most:g}'
    raise _wrong(
      f'{name} must be a number from {least:g} {bound}; it is {value!r:.80}.',
      name,
    )
  return float(value)


def chat_json(answer: Answer, created: int) -> dict[str, Any]:
  """An answer of a chat.

  Args:
    answer: What is answered.
    created: Seconds since 1970.
  """
  message: dict[str, Any] = {
    'role': 'assistant',
    'content': answer.text if answer.text or not answer.calls else None,
  }
  if answer.reasoning:
    message['reasoning_content'] = answer.reasoning
  if answer.calls:
    message['tool_calls'] = [*map(_call_json, answer.calls)]
  choice = {
    'index': 0,
    'message': message,
    'logprobs': _chat_logprobs(answer.logprobs),
    'finish_reason': answer.finish,
  }
  found = _head(answer.id, 'chat.completion', created, answer.model)
  found |= {'choices': [choice], 'usage': _usage([answer])}
  if answer.prompt_ids or answer.ids:
    choice['token_ids'] = [*answer.ids]
    found['prompt_token_ids'] = [*answer.prompt_ids]
  return found


def completion_json(answers: Sequence[Answer], created: int) -> dict[str, Any]:
  """The answers of a completion, one for each prompt; see `chat_json`."""
  choices = []
  for index, answer in enumerate(answers):
    choice = {
      'index': index,
      'text': answer.text,
      'logprobs': _completion_logprobs(answer.logprobs, answer.names_ids),
      'finish_reason': answer.finish,
    }
    if answer.names_version:
      span = {'version': answer.version, 'start': 0, 'end': answer.tokens}
      choice['weight_versions'] = [span]
    if answer.prompt_logprobs is not None:
      choice['prompt_logprobs'] = [*map(_place, answer.prompt_logprobs)]
    if answer.prompt_ids or answer.ids:
      choice['token_ids'] = [*answer.ids]
      choice['prompt_token_ids'] = [*answer.prompt_ids]
    choices.append(choice)
  first = answers[0]
  found = _head(first.id, 'text_completion', created, first.model)
  return found | {'choices': choices, 'usage': _usage(answers)}


def models_json(names: Sequence[str], created: int) -> dict[str, Any]:
  """What may be named as the model of a request."""
  return {
    'object': 'list',
    'data': [model_json(name, created) for name in names],
  }


def model_json(name: str, created: int) -> dict[str, Any]:
  """A model."""
  return {
    'id': name,
    'object': 'model',
    'created': created,
    'owned_by': 'grpo_jax',
  }


def error_json(refused: Refused) -> dict[str, Any]:
  """Why a request is not answered."""
  kind = 'server_error' if refused.status >= 500 else 'invalid_request_error'
  return {
    'error': {
      'message': refused.message,
      'type': kind,
      'param': refused.param,
      'code': refused.code,
    }
  }


def _head(id: str, kind: str, created: int, model: str) -> dict[str, Any]:
  return {'id': id, 'object': kind, 'created': created, 'model': model}


def _usage(answers: Sequence[Answer]) -> dict[str, int]:
  read = sum(answer.read for answer in answers)
  tokens = sum(answer.tokens for answer in answers)
  return {
    'prompt_tokens': read,
    'completion_tokens': tokens,
    'total_tokens': read + tokens,
  }


def _call_json(call: ToolCall) -> dict[str, Any]:
  """A call; one that could not be read has what was written as arguments."""
  arguments = call.raw
  if call.arguments is not None:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
  return {
    'id': call.id,
    'type': 'function',
    'function': {'name': call.name, 'arguments': arguments},
  }


def _logp(value: float) -> float:
  return max(float(value), _LEAST_LOGP)


def _chat_logprobs(scored: Sequence[Scored] | None) -> dict[str, Any] | None:
  if scored is None:
    return None

  def one(text, data, logp):
    return {'token': text, 'logprob': _logp(logp), 'bytes': [*data]}

  return {
    'content': [
      one(x.text, x.data, x.logp or 0.0)
      | {'top_logprobs': [one(*likely[:3]) for likely in x.top]}
      for x in scored
    ]
  }


def _place(x: Scored) -> dict[str, Any] | None:
  """What is known of a token of a prompt, by ids; the token itself first."""
  if x.logp is None:
    return None
  every = Likely(x.text, x.data, x.logp, x.id), *x.top
  return {
    str(one.id): {'logprob': _logp(one.logp), 'decoded_token': one.text}
    for one in reversed(every)
  }


def _completion_logprobs(
  scored: Sequence[Scored] | None, names_ids: bool = False
) -> dict[str, Any] | None:
  if scored is None:
    return None

  def named(x: Scored | Likely) -> str:
    return f'token_id:{x.id}' if names_ids else x.text

  def top(x: Scored) -> dict[str, float] | None:
    if x.logp is None:
      return None
    found = {named(x): _logp(x.logp)} if x.top else {}
    for likely in reversed(x.top):  # of equal texts the likeliest stays
      found[named(likely)] = _logp(likely.logp)
    return found

  return {
    'tokens': [named(x) for x in scored],
    'token_logprobs': [
      None if x.logp is None else _logp(x.logp) for x in scored
    ],
    'top_logprobs': [top(x) for x in scored],
    'text_offset': [x.offset for x in scored],
  }


class Events:
  """Writes an answer as the events of a stream, in bytes.

  Args:
    id: Of the answer.
    created: Seconds since 1970.
    model: Whose answer it is.
    is_chat: Whether it is one of a chat; else it is a completion.
    include_usage: Whether the stream ends with the numbers of tokens.
  """

  def __init__(
    self,
    id: str,
    created: int,
    model: str,
    is_chat: bool,
    include_usage: bool = False,
  ):
    kind = 'chat.completion.chunk' if is_chat else 'text_completion'
    self._head = _head(id, kind, created, model)
    self._is_chat, self._include_usage = is_chat, include_usage
    self._calls = 0
    self._has_begun = False

  def pieces(self, piece: Piece, index: int = 0) -> bytes:
    """A part of the answer to the prompt with an index."""
    if not self._is_chat:
      choice: dict[str, Any] = {'text': piece.text}
      logprobs: Callable[..., Any] = _completion_logprobs
    else:
      delta: dict[str, Any] = {}
      if not self._has_begun:
        delta |= {'role': 'assistant', 'content': ''}
      if piece.text:
        delta['content'] = piece.text
      if piece.reasoning:
        delta['reasoning_content'] = piece.reasoning
      if piece.calls:
        delta['tool_calls'] = [
          {'index': n, **_call_json(call)}
          for n, call in enumerate(piece.calls, self._calls)
        ]
        self._calls += len(piece.calls)
      choice, logprobs = {'delta': delta}, _chat_logprobs
    self._has_begun = True
    choice['logprobs'] = logprobs(piece.logprobs or None)
    if piece.ids:
      choice['token_ids'] = [*piece.ids]
    return self._chunk({'index': index, **choice, 'finish_reason': None})

  def end(self, answers: Sequence[Answer]) -> bytes:
    """Behind the last part: why each answer ends, and the end of the stream."""
    events = []
    if not self._has_begun:
      events.append(self.pieces(Piece()))
    for index, answer in enumerate(answers):
      part = {'delta': {}} if self._is_chat else {'text': ''}
      choice: dict[str, Any] = {'index': index, **part, 'logprobs': None}
      if answer.prompt_ids:
        choice['prompt_token_ids'] = [*answer.prompt_ids]
      events.append(self._chunk({**choice, 'finish_reason': answer.finish}))
    if self._include_usage:
      tail = {**self._head, 'choices': [], 'usage': _usage(answers)}
      events.append(_event(tail))
    return b''.join([*events, b'data: [DONE]\n\n'])

  def _chunk(self, choice: dict[str, Any]) -> bytes:
    usage = {'usage': None} if self._include_usage else {}
    return _event({**self._head, 'choices': [choice], **usage})


def error_event(refused: Refused) -> bytes:
  """What a stream says that cannot go on."""
  return _event(error_json(refused))


def whole(answer: Answer) -> Piece:
  """An answer as a single part of a stream."""
  return Piece(
    answer.text,
    answer.reasoning,
    tuple(answer.calls),
    answer.ids,
    tuple(answer.logprobs or ()),
  )


def _event(value: Mapping[str, Any]) -> bytes:
  return b'data: ' + dumped(value) + b'\n\n'


def dumped(value: Mapping[str, Any]) -> bytes:
  """JSON in one line."""
  return json.dumps(value, ensure_ascii=False, separators=(',', ':')).encode()
