"""What clients send, as clients of several packages write it, and answers."""

import json

import pytest

from grpo_jax.environments import chats
from grpo_jax.environments.base import ToolCall
from grpo_jax.serving import wire

ADD = {
  'type': 'function',
  'function': {
    'name': 'add',
    'parameters': {
      'type': 'object',
      'properties': {'a': {'type': 'integer'}, 'b': {'type': 'integer'}},
    },
  },
}
QUESTION = {'role': 'user', 'content': 'How much is 2+3?'}
RESULT = {'role': 'tool', 'tool_call_id': 'call_0_0', 'content': '5'}


def called(arguments='{"a": 2,"b":  3}', **beside):
  function = {'name': 'add', 'arguments': arguments}
  call = {'id': 'call_0_0', 'type': 'function', 'function': function}
  return {'role': 'assistant', 'tool_calls': [call], **beside}


def body(*messages, **fields):
  return json.dumps(
    {'model': 'policy', 'messages': messages, **fields}
  ).encode()


# What each package sends behind a tool's result, by its own serializer.
SENT = {
  'openai': body(
    QUESTION,
    called(content=' Let me add.\n', reasoning_content='hmm'),
    RESULT,
    tools=[ADD],
  ),
  'openai-agents': body(
    {'role': 'system', 'content': 'Be brief.'},
    QUESTION,
    called(content=' Let me add.\n'),
    RESULT,
    tools=[ADD],
    stream=False,
  ),
  'pydantic-ai': body(
    {'role': 'developer', 'content': 'Be brief.'},
    QUESTION,
    called('{"a":2,"b":3}', content=' Let me add.\n', reasoning_content='hmm'),
    RESULT,
    tools=[ADD],
    tool_choice='auto',
    stream=False,
    n=1,
  ),
  'langgraph': body(
    QUESTION,
    called('{"a": 2, "b": 3}', content=' Let me add.\n'),
    RESULT,
    tools=[ADD],
    temperature=0.2,
    parallel_tool_calls=None,
  ),
  'smolagents': body(
    {'role': 'system', 'content': [{'type': 'text', 'text': 'Be brief.'}]},
    {'role': 'user', 'content': [{'type': 'text', 'text': 'How much is 2+3?'}]},
    {
      'role': 'assistant',
      'content': [
        {'type': 'text', 'text': 'Let me add.'},
        {'type': 'text', 'text': 'Calling tools: add'},
      ],
    },
    {'role': 'user', 'content': [{'type': 'text', 'text': 'Observation: 5'}]},
    tools=[ADD],
    tool_choice='required',
    stop=['Observation:', 'Calling tools:'],
  ),
}


@pytest.mark.parametrize('client', SENT)
def test_what_packages_send_is_read(client):
  read = wire.chat(SENT[client], strict=True)
  assert read.tools == (ADD,) and read.model == 'policy' and not read.stream
  roles = [message['role'] for message in read.messages]
  assert set(roles) <= {'system', 'user', 'assistant', 'tool'}
  if client == 'smolagents':
    assert read.stop == ('Observation:', 'Calling tools:')
    assert read.overridden == ('tool_choice',)
    assert read.messages[2] == {
      'role': 'assistant',
      'content': 'Let me add.\nCalling tools: add',
    }
    return
  *_, turn, result = read.messages
  assert turn['content'] == ' Let me add.\n' and result == RESULT
  function = turn['tool_calls'][0]['function']
  assert function == {'name': 'add', 'arguments': {'a': 2, 'b': 3}}
  thought = turn.get('reasoning_content')
  assert thought == ('hmm' if client in ('openai', 'pydantic-ai') else None)
  sampling = {'temperature': 0.2} if client == 'langgraph' else {}
  assert read.sampling == sampling and read.overridden == (*sampling,)


def test_what_was_answered_is_known_again_whatever_a_client_makes_of_it():
  call = ToolCall('call_0_0', 'add', {'b': 3, 'a': 2}, 'raw')
  answer = wire.Answer(' Let me add.\n', 'hmm', (call,), 'tool_calls')
  sent = wire.chat_json(answer, 1)['choices'][0]['message']
  (own,) = wire.chat({'messages': [sent]}).messages
  for client in ('openai', 'openai-agents', 'pydantic-ai', 'langgraph'):
    *_, turn, _ = wire.chat(SENT[client]).messages
    assert chats.key(turn) == chats.key(own)


def test_a_call_that_cannot_be_read_comes_back_as_it_was_written():
  call = ToolCall('call_1_0', '', None, '<tool_call>{"na', 'It is not closed.')
  answer = wire.Answer('', calls=(call,), finish='tool_calls')
  sent = wire.chat_json(answer, 1)['choices'][0]['message']
  assert sent['content'] is None
  (turn,) = wire.chat({'messages': [sent]}).messages
  function = turn['tool_calls'][0]['function']
  assert function == {'name': '', 'arguments': '<tool_call>{"na'}


def test_all_fields_of_a_chat():
  read = wire.chat(
    body(
      QUESTION,
      max_tokens=5,
      max_completion_tokens=7,
      stop='x',
      stream=True,
      stream_options={'include_usage': True},
      logprobs=True,
      top_logprobs=2,
      return_token_ids=True,
      temperature=0,
      top_p=0.5,
      top_k=-1,
      min_p=0.1,
      seed=-3,
      presence_penalty=0,
      parallel_tool_calls=False,
      user='me',
      metadata={},
      logit_bias=None,
      response_format={'type': 'text'},
    )
  )
  given = dict(temperature=0.0, top_p=0.5, min_p=0.1, top_k=-1, seed=-3)
  assert read == wire.Chat(
    messages=(QUESTION,),
    max_tokens=7,
    stop=('x',),
    stream=True,
    include_usage=True,
    logprobs=2,
    return_token_ids=True,
    sampling=given,
    overridden=('parallel_tool_calls', *given),
    model='policy',
  )


def test_no_tool_may_be_called():
  assert wire.chat(body(QUESTION, tools=[ADD], tool_choice='none')).tools == ()


def test_penalties_are_noted_in_training_and_refused_elsewhere():
  sent = body(QUESTION, presence_penalty=1)
  assert wire.chat(sent, strict=True).overridden == ('presence_penalty',)
  with pytest.raises(wire.Refused, match='presence_penalty=1.0 cannot be'):
    wire.chat(sent)


def test_prompts_of_completions():
  read = lambda prompt: wire.completion({'prompt': prompt}).prompt
  assert read('a') == ('a',) and read(['a', 'b']) == ('a', 'b')
  assert read([1, 2]) == ((1, 2),) and read([[1], [2, 3]]) == ((1,), (2, 3))
  asked = wire.completion(
    {'prompt': [1, 2], 'max_tokens': 0, 'echo': True, 'logprobs': 1}
  )
  assert asked.echo and asked.max_tokens == 0 and asked.logprobs == 1


IMAGE = {'type': 'image_url', 'image_url': {'url': 'data:...'}}
REFUSED = [
  (b'{', 'body', 'is no JSON in UTF-8'),
  (b'\xff', 'body', 'is no JSON in UTF-8'),
  (b'{"messages": NaN}', 'body', 'NaN is no number'),
  (b'{"a": "\\ud800"}', 'body', 'is no JSON in UTF-8'),
  (b'[' * 100_000, 'body', 'nested too deeply'),
  (b'[]', 'body', 'must be a JSON object'),
  ({}, 'messages', 'messages is empty'),
  ({'messages': 'hi'}, 'messages', 'must be a list of messages'),
  ({'messages': ['hi']}, 'messages', 'an object with a role'),
  ({'messages': [{'role': 'chef'}]}, 'messages', "has the role 'chef'"),
  ({'messages': [{'role': []}]}, 'messages', 'has the role'),
  ({'messages': [{'role': 'user'}]}, 'messages', 'has no content'),
  (
    {'messages': [{'role': 'user', 'content': 3}]},
    'messages',
    'must be a text',
  ),
  (
    {'messages': [{'role': 'user', 'content': [IMAGE]}]},
    'messages',
    "part of type 'image_url'",
  ),
  (
    {'messages': [{'role': 'tool', 'content': '5'}]},
    'messages',
    'without a tool_call_id',
  ),
  (
    {'messages': [called(reasoning_content=3)]},
    'messages',
    'reasoning_content must be a text',
  ),
  (
    {'messages': [{'role': 'assistant', 'function_call': {'name': 'f'}}]},
    'messages',
    'give tool_calls',
  ),
  (
    {'messages': [{'role': 'assistant', 'tool_calls': 3}]},
    'messages',
    'must be a list',
  ),
  (
    {'messages': [{'role': 'assistant', 'tool_calls': [{'id': 'x'}]}]},
    'messages',
    r'tool_calls\[0\] must be',
  ),
]
FIELDS = [
  ({'n': 2}, 'n', 'n=2 answers at once'),
  ({'n': 0}, 'n', 'whole number from 1'),
  ({'logit_bias': {'1': 2}}, 'logit_bias', 'cannot be honoured'),
  ({'functions': [{}]}, 'functions', 'cannot be honoured'),
  ({'audio': {'voice': 'x'}}, 'audio', 'cannot be honoured'),
  ({'guided_json': {'x': 1}}, 'guided_json', 'cannot be honoured'),
  ({'modalities': ['audio']}, 'modalities', 'must be'),
  (
    {'response_format': {'type': 'json_object'}},
    'response_format',
    "'json_object' cannot be honoured",
  ),
  ({'temperature': True}, 'temperature', 'must be a number from 0 up'),
  ({'temperature': -1}, 'temperature', 'must be a number from 0 up'),
  ({'top_p': 1.5}, 'top_p', 'from 0 to 1'),
  ({'top_k': 1.5}, 'top_k', 'must be a whole number'),
  ({'seed': 'x'}, 'seed', 'must be a whole number'),
  ({'max_tokens': 0}, 'max_tokens', 'whole number from 1'),
  ({'max_completion_tokens': '9'}, 'max_completion_tokens', 'whole number'),
  ({'stop': ['']}, 'stop', 'none of them empty'),
  ({'stop': 3}, 'stop', 'must be a text or a list'),
  ({'stop': ['x'] * 17}, 'stop', 'at most 16'),
  ({'stream': 1}, 'stream', 'true or false'),
  ({'stream_options': 1}, 'stream_options', 'an object'),
  ({'top_logprobs': 2}, 'top_logprobs', 'needs logprobs=true'),
  ({'logprobs': True, 'top_logprobs': 21}, 'top_logprobs', 'from 0 to 20'),
  ({'model': 3}, 'model', 'must be a text'),
  ({'tools': {}}, 'tools', 'must be a list'),
  ({'tools': [{'type': 'custom'}]}, 'tools', r'tools\[0\] must be'),
  ({'tools': [{'function': {'name': ''}}]}, 'tools', r'tools\[0\] must be'),
  ({'tool_choice': 'add'}, 'tool_choice', 'tool_choice must be'),
  (
    {
      'tools': [ADD],
      'tool_choice': {'type': 'function', 'function': {'name': 'sub'}},
    },
    'tool_choice',
    r'one of the tools \(add\)',
  ),
]
COMPLETIONS = [
  ({}, 'prompt', 'prompt must be'),
  ({'prompt': ''}, 'prompt', 'none of them empty'),
  ({'prompt': ['a', '']}, 'prompt', 'none of them empty'),
  ({'prompt': [1, True]}, 'prompt', 'prompt must be'),
  ({'prompt': [-1]}, 'prompt', 'prompt must be'),
  ({'prompt': 'a', 'max_tokens': 0}, 'max_tokens', 'asks for nothing'),
  ({'prompt': 'a', 'best_of': 2}, 'best_of', 'best_of must be 1'),
  ({'prompt': 'a', 'suffix': 'b'}, 'suffix', 'cannot be honoured'),
  ({'prompt': 'a', 'logprobs': 21}, 'logprobs', 'from 0 to 20'),
]


@pytest.mark.parametrize(
  'read, given, param, said',
  [
    *((wire.chat, *row) for row in REFUSED),
    *((wire.chat, {'messages': [QUESTION], **x}, *y) for x, *y in FIELDS),
    *((wire.completion, *row) for row in COMPLETIONS),
  ],
)
def test_what_cannot_be_honoured_is_refused_in_a_sentence(
  read, given, param, said
):
  for strict in (False, True):
    with pytest.raises(wire.Refused, match=said) as caught:
      read(given, strict)
    refused = caught.value
    assert refused.status == 400 and refused.message.endswith('.')
    assert refused.param == (None if param == 'body' else param)
    error = wire.error_json(refused)['error']
    assert error['type'] == 'invalid_request_error'
    assert len(refused.message) < 400 and '\n' not in refused.message


SCORED = (
  wire.Scored('a', b'a', None),
  wire.Scored(
    'b',
    b'b',
    -1.5,
    (wire.Likely('c', b'c', -0.5), wire.Likely('c', b'!', -2)),
    1,
  ),
  wire.Scored('d', b'd', float('-inf'), (), 2),
)


def test_answers_of_completions():
  answer = wire.Answer(
    'bd', finish='length', read=1, tokens=2, id='x', logprobs=SCORED,
    prompt_ids=(7,), ids=(8, 9),
  )  # fmt: skip
  found = wire.completion_json([answer, answer._replace(text='!')], 5)
  first, second = found['choices']
  assert first['logprobs'] == {
    'tokens': ['a', 'b', 'd'],
    'token_logprobs': [None, -1.5, -9999.0],
    'top_logprobs': [None, {'b': -1.5, 'c': -0.5}, {}],
    'text_offset': [0, 1, 2],
  }
  assert (first['index'], second['index'], second['text']) == (0, 1, '!')
  assert first['token_ids'] == [8, 9] and first['prompt_token_ids'] == [7]
  assert found['usage']['total_tokens'] == 6
  json.dumps(found, allow_nan=False)


def test_answers_of_chats():
  answer = wire.Answer('bd', 'why', finish='stop', logprobs=SCORED[1:], id='x')
  found = wire.chat_json(answer, 5)
  choice = found['choices'][0]
  assert choice['message'] == {
    'role': 'assistant', 'content': 'bd', 'reasoning_content': 'why',
  }  # fmt: skip
  first, last = choice['logprobs']['content']
  assert first['top_logprobs'][0] == {
    'token': 'c', 'logprob': -0.5, 'bytes': [99],
  }  # fmt: skip
  assert last['logprob'] == -9999.0 and 'token_ids' not in choice
  json.dumps(found, allow_nan=False)


def events(data):
  """What a stream says; a small parser."""
  *lines, end = data.decode().split('\n\n')
  assert end == '' and lines[-1] == 'data: [DONE]'
  return [json.loads(line.removeprefix('data: ')) for line in lines[:-1]]


def test_a_stream_of_a_chat():
  calls = [ToolCall(f'c{n}', 'add', {'a': n}, '') for n in range(3)]
  stream = wire.Events('x', 5, 'policy', True, include_usage=True)
  said = stream.pieces(wire.Piece(reasoning='hm', ids=(1,)))
  said += stream.pieces(wire.Piece('Hi', calls=(calls[0],)))
  said += stream.pieces(wire.Piece(calls=(*calls[1:],)))
  said += stream.end([wire.Answer('Hi', finish='tool_calls', read=2, tokens=3)])
  found = events(said)
  deltas = [one['choices'][0]['delta'] for one in found[:-1]]
  assert deltas[0] == {
    'role': 'assistant', 'content': '', 'reasoning_content': 'hm',
  }  # fmt: skip
  numbers = [c['index'] for d in deltas for c in d.get('tool_calls', ())]
  assert numbers == [0, 1, 2] and 'role' not in deltas[1]
  assert found[0]['choices'][0]['token_ids'] == [1]
  ends = [one['choices'][0]['finish_reason'] for one in found[:-1]]
  assert ends == [None, None, None, 'tool_calls']
  assert found[-1]['choices'] == [] and found[-1]['usage']['total_tokens'] == 5


def test_an_empty_stream_names_its_role():
  found = events(wire.Events('x', 5, 'p', True).end([wire.Answer('')]))
  assert found[0]['choices'][0]['delta'] == {'role': 'assistant', 'content': ''}
  assert all('usage' not in one for one in found)
