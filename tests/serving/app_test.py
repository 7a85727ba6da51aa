"""The routes, over loopback sockets, with a service that does as it is told."""

import asyncio
import contextlib
import http.client
import json
import logging
import socket
import sys
import threading
import time

import pytest

from grpo_jax.environments.base import ToolCall
from grpo_jax.serving import app as app_lib
from grpo_jax.serving import listening
from grpo_jax.serving import wire

TOKEN = 'b1946ac92492d2347c6235b4d2611184'
QUESTION = {'messages': [{'role': 'user', 'content': 'Hi'}]}


class Says:
  """A service: an answer, in parts, after a while."""

  def __init__(self):
    self.answer = wire.Answer('Hello.', read=3, tokens=2, id='known')
    self.parts, self.error, self.waits = (), None, None
    self.asked, self.clients, self.told = [], [], []
    self.began, self.ended = threading.Event(), threading.Event()

  def models(self):
    return ['policy', 'other']

  async def chat(self, request, client, heard):
    self.asked.append(request)
    self.clients.append(client)
    self.began.set()
    try:
      for part in self.parts if heard else ():
        heard(part)
      if self.waits:
        await asyncio.sleep(self.waits)
      if self.error:
        raise self.error
      return self.answer
    finally:
      self.ended.set()

  async def complete(self, request, client, heard):
    answers = []
    for index, prompt in enumerate(request.prompt):
      if heard:
        heard(index, wire.Piece(f'{prompt}!'))
      answers.append(self.answer._replace(text=f'{prompt}!'))
    return answers

  def sent(self, answer, whole):
    self.told.append((answer.id, whole))

  async def control(self, name, body, secret):
    if secret != 'second':
      raise wire.Refused(403, 'The secret is missing.')
    return {'name': name, **body}


class Episodes:
  """Finds one episode, knows another that is over."""

  def __init__(self):
    self.service = Says()

  def __call__(self, token):
    if token is None:
      raise wire.Refused(404, 'Give a token.')
    if token == 'over':
      raise wire.Refused(410, 'The episode is over.')
    if token != TOKEN:
      raise wire.Refused(404, 'There is no such episode.')
    return self.service


@contextlib.contextmanager
def served(find, **options):
  app = app_lib.app(find, **{'hosts': ('127.0.0.1', 'localhost'), **options})
  with listening.Listening(app, listening.bound()) as server:
    yield server


@pytest.fixture(scope='module')
def running():
  found = Episodes()
  with served(found, most_bytes=10_000, strict=True) as server:
    yield found, server


@pytest.fixture
def service(running):
  found, _ = running
  found.service = Says()
  return found.service


@pytest.fixture
def ask(running, service):
  """Asks for a path of the episode; status, headers, and what is said."""
  _, server = running

  def asked(
    path='/chat/completions', body=QUESTION, root=f'/e/{TOKEN}/v1', **x
  ):
    return request(server.address, root + path, body, **x)

  return asked


def request(address, path, body=None, method=None, **headers):
  sent = body if body is None or isinstance(body, bytes) else json.dumps(body)
  if sent is not None:
    headers = {'Content-Type': 'application/json', **headers}
  connection = http.client.HTTPConnection(*address, timeout=30)
  with contextlib.closing(connection):
    method = method or ('GET' if body is None else 'POST')
    named = {name.replace('_', '-'): value for name, value in headers.items()}
    connection.request(method, path, sent, named)
    answer = connection.getresponse()
    data = answer.read()
    kind = answer.getheader('content-type', '')
    said = json.loads(data) if kind == 'application/json' else data
    return answer.status, dict(answer.getheaders()), said


def refusal(answer):
  status, _, said = answer
  assert set(said) == {'error'} and said['error']['message'].endswith('.')
  return status, said['error']['message']


def events(data):
  *lines, end = data.decode().split('\n\n')
  assert end == '' and lines.pop() == 'data: [DONE]'
  return [json.loads(line.removeprefix('data: ')) for line in lines]


def wait(condition, secs=10):
  until = time.monotonic() + secs
  while not condition():
    assert time.monotonic() < until
    time.sleep(0.005)


def test_a_chat_is_answered(ask, service):
  status, headers, said = ask(X_Stainless_Retry_Count='2', X_Grpo_Train='0')
  assert status == 200 and said['choices'][0]['message']['content'] == 'Hello.'
  assert said['id'] == 'known' and said['usage']['total_tokens'] == 5
  assert not [name for name in headers if 'access-control' in name.lower()]
  assert 'server' not in {name.lower() for name in headers}
  (client,) = service.clients
  assert client.retry == 2 and not client.trains and client.secret == ''
  assert json.loads(client.body) == QUESTION
  wait(lambda: service.told == [('known', True)])


def test_an_answer_without_an_id_gets_one(ask, service):
  service.answer = wire.Answer('x')
  (_, _, one), (_, _, other) = ask(), ask()
  assert one['id'].startswith('chatcmpl-') and one['id'] != other['id']
  wait(lambda: service.told == [(one['id'], True), (other['id'], True)])


@pytest.mark.parametrize('root', ['', '/v1', f'/e/{TOKEN}', f'/e/{TOKEN}/v1'])
def test_all_addresses(ask, root):
  token = {} if TOKEN in root else {'Authorization': f'Bearer {TOKEN}'}
  assert ask('/chat/completions', root=root, **token)[0] == 200
  assert ask('/completions', {'prompt': 'a'}, root=root, **token)[0] == 200
  _, _, said = ask('/models', None, root=root, **token)
  assert [one['id'] for one in said['data']] == ['policy', 'other']
  assert ask('/models/other', None, root=root, **token)[2]['id'] == 'other'
  assert ask('/models/x', None, root=root, **token)[0] == 404
  assert ask('/health', None, root=root, **token)[2] == {'status': 'ok'}
  beside = {'X_Grpo_Secret': 'second', **token}
  for name in ('reward', 'discard'):
    status, _, said = ask(f'/{name}', {'turn': 1}, root=root, **beside)
    assert status == 200 and said == {'name': name, 'turn': 1}


def test_who_is_not_found(ask):
  assert refusal(ask(root='/v1')) == (404, 'Give a token.')
  status, said = refusal(ask(root='/e/other/v1'))
  assert (status, said) == (404, 'There is no such episode.')
  assert refusal(ask(root='/e/over/v1'))[0] == 410
  assert refusal(ask('/health', None, root='/e/over/v1'))[0] == 410
  assert refusal(ask(root='/v1', Authorization='Bearer over'))[0] == 410
  assert refusal(ask('/reward', {}, X_Grpo_Secret='no'))[0] == 403
  # The token of an address counts, whatever key a client sends beside it.
  assert ask(Authorization='Bearer over')[0] == 200


def test_what_is_not_there(ask):
  assert refusal(ask('/responses')) == (404, 'There is no such address here.')
  assert refusal(ask('/chat/completions/'))[0] == 404  # and no redirection
  status, said = refusal(ask('/chat/completions', None))
  assert (status, said) == (405, 'GET is not done at this address.')
  status, headers, _ = ask(method='OPTIONS', Origin='http://evil.example')
  assert status == 405
  assert not [name for name in headers if 'access-control' in name.lower()]


@pytest.mark.parametrize(
  'host', ['evil.example', 'evil.example:80', '', '127.0.0.1.evil', '[::1]:1']
)
def test_other_names_of_this_machine_are_refused(ask, service, host):
  status, said = refusal(ask(Host=host))
  assert status == 403 and 'call this server by 127.0.0.1 or localhost' in said
  assert refusal(ask('/models', None, Host=host))[0] == 403
  assert refusal(ask('/health', None, Host=host))[0] == 403
  assert not service.asked


def test_hosts_may_have_ports(ask):
  assert ask(Host='LocalHost:1234')[0] == 200


@pytest.mark.parametrize('kind', ['text/plain', '', 'multipart/form-data; x'])
def test_what_a_page_may_post_unasked_is_refused(ask, service, kind):
  status, said = refusal(ask(Content_Type=kind))
  assert status == 415 and 'application/json' in said and not service.asked


def test_content_types_may_have_parameters(ask):
  assert ask(Content_Type='Application/JSON; charset=utf-8')[0] == 200


def test_long_bodies_are_refused(ask, service, running):
  long = {'messages': [{'role': 'user', 'content': 'x' * 10_000}]}
  status, said = refusal(ask(body=long))
  assert status == 413 and '10,000 bytes' in said
  # By what comes, too, and not only by what is announced.
  _, server = running
  connection = http.client.HTTPConnection(*server.address, timeout=30)
  with contextlib.closing(connection):
    connection.request(
      'POST',
      f'/e/{TOKEN}/v1/chat/completions',
      iter([b'x' * 4_000] * 3),
      {'Content-Type': 'application/json'},
      encode_chunked=True,
    )
    assert connection.getresponse().status == 413
  assert not service.asked


def test_a_key_is_asked_for():
  service = Says()
  tokens = []

  def find(token):
    tokens.append(token)
    return service

  with served(find, key='open sesame', hosts=()) as server:

    def ask(**headers):
      return request(
        server.address, '/v1/chat/completions', QUESTION, **headers
      )

    for wrong in (
      {},
      {'Authorization': 'Bearer x'},
      {'Authorization': 'sesame'},
    ):
      status, said = refusal(ask(**wrong))
      assert status == 401 and 'Authorization: Bearer KEY' in said
    assert ask()[1]['www-authenticate'] == 'Bearer'
    assert request(server.address, '/health')[0] == 401
    right = {'Authorization': 'Bearer open sesame'}
    # No page knows the key, so it may go by any name.
    assert ask(Host='lab.example', Content_Type='text/plain', **right)[0] == 200
  assert tokens == [None]


def test_refusals_of_a_service_have_their_status(ask, service):
  service.error = wire.Refused(
    400, 'It is too long.', 'context_length_exceeded', 'messages'
  )
  status, _, said = ask()
  assert status == 400 and said['error'] == {
    'message': 'It is too long.',
    'type': 'invalid_request_error',
    'param': 'messages',
    'code': 'context_length_exceeded',
  }
  assert ask(body={**QUESTION, 'stream': True})[0] == 400
  assert refusal(ask(body=b'{'))[0] == 400
  assert service.told == []


def test_a_fault_is_told_without_internals(ask, service, caplog):
  service.error = KeyError(f'/e/{TOKEN}/v1 and Bearer {TOKEN}')
  status, said = refusal(ask())
  assert status == 500 and said == (
    'The server could not answer, by a fault of its own.'
  )
  assert ask(body={**QUESTION, 'stream': True})[0] == 500
  assert 'KeyError' in caplog.text and TOKEN not in caplog.text


def test_no_log_has_a_token(ask, service, running, caplog):
  caplog.set_level(logging.DEBUG)
  ask()
  ask(body={**QUESTION, 'stream': True})
  ask('/nothing')
  ask(body=b'{')
  ask(Host='evil.example')
  _, server = running
  with socket.create_connection(server.address) as connection:
    connection.sendall(f'GET /e/{TOKEN}/v1/\0 HTTP/9\r\n\r\n'.encode())
    connection.recv(1000)
  service.waits = 30
  hang_up(server.address, service, {})
  service.error, service.waits = RuntimeError('no'), None
  ask()
  assert TOKEN not in caplog.text
  assert caplog.text  # something was logged


def hang_up(address, service, fields):
  """Asks, and goes away while the service works."""
  body = json.dumps({**QUESTION, **fields}).encode()
  service.began.clear()
  with socket.create_connection(address) as connection:
    connection.sendall(
      (
        f'POST /e/{TOKEN}/v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n'
        'Content-Type: application/json\r\n'
        f'Content-Length: {len(body)}\r\n\r\n'
      ).encode()
      + body
    )
    assert service.began.wait(10)


@pytest.mark.parametrize('fields', [{}, {'stream': True}])
def test_who_hangs_up_ends_the_work(running, service, fields, caplog):
  _, server = running
  service.waits = 60
  hang_up(server.address, service, fields)
  assert service.ended.wait(10)  # long before the minute is over
  assert request(server.address, '/health')[0] == 200
  assert service.told == [] and 'ERROR' not in caplog.text


@pytest.mark.parametrize('fields', [{}, {'stream': True}])
def test_who_hangs_up_within_a_stream_ends_the_work(running, service, fields):
  _, server = running
  service.waits, service.parts = 60, (wire.Piece('He'), wire.Piece('llo.'))
  hang_up(server.address, service, fields)
  assert service.ended.wait(10) and service.told == []


class Shielded(Says):
  """Has an answer although nobody waits for it."""

  async def chat(self, request, client, heard):
    with contextlib.suppress(asyncio.CancelledError):
      await super().chat(request, client, heard)
    return self.answer


@pytest.mark.parametrize('fields', [{}, {'stream': True}])
def test_an_answer_that_could_not_be_sent_is_said_to_be_so(running, fields):
  found, server = running
  found.service = service = Shielded()
  service.waits = 60
  hang_up(server.address, service, fields)
  wait(lambda: service.told == [('known', False)])


def test_a_stream_in_parts(ask, service):
  service.parts = (
    wire.Piece(reasoning='hm'),
    wire.Piece('Hel'),
    wire.Piece('lo.'),
  )
  options = {'stream': True, 'stream_options': {'include_usage': True}}
  status, headers, said = ask(body={**QUESTION, **options})
  assert status == 200
  assert headers['content-type'].startswith('text/event-stream')
  found = events(said)
  deltas = [one['choices'][0]['delta'] for one in found[:-1]]
  assert [delta.get('content') for delta in deltas] == ['', 'Hel', 'lo.', None]
  assert deltas[0]['reasoning_content'] == 'hm'
  assert {one['model'] for one in found} == {'policy'}
  assert len({one['id'] for one in found}) == 1
  assert found[-1]['usage']['completion_tokens'] == 2
  wait(lambda: [whole for _, whole in service.told] == [True])


def test_a_stream_of_a_service_that_says_all_at_once(ask, service):
  calls = ToolCall('call_0_0', 'add', {'a': 1}, ''), ToolCall('x', 'f', {}, '')
  service.answer = wire.Answer('Hi', 'hm', calls, 'tool_calls')
  found = events(ask(body={**QUESTION, 'stream': True})[2])
  delta = found[0]['choices'][0]['delta']
  assert delta['content'] == 'Hi' and delta['reasoning_content'] == 'hm'
  assert [call['index'] for call in delta['tool_calls']] == [0, 1]
  assert found[-1]['choices'][0]['finish_reason'] == 'tool_calls'


def test_a_stream_that_cannot_go_on_says_so(ask, service):
  service.parts, service.error = (wire.Piece('He'),), wire.Refused(503, 'Gone.')
  _, _, said = ask(body={**QUESTION, 'stream': True})
  *_, last, end = said.decode().split('\n\n')
  assert json.loads(last.removeprefix('data: '))['error']['message'] == 'Gone.'
  assert not end and b'[DONE]' not in said and not service.told


def test_a_stream_of_completions(ask):
  body = {'prompt': ['a', 'b'], 'stream': True}
  found = events(ask('/completions', body)[2])
  parts = [(c['index'], c['text']) for one in found for c in one['choices']]
  assert parts == [(0, 'a!'), (1, 'b!'), (0, ''), (1, '')]
  assert found[0]['object'] == 'text_completion'


def test_many_at_once(ask, service):
  service.waits = 2.0
  began = time.monotonic()
  threads = [threading.Thread(target=ask) for _ in range(32)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert len(service.asked) == 32 and time.monotonic() - began < 30


def test_a_connection_serves_several_requests(running, service):
  _, server = running
  connection = http.client.HTTPConnection(*server.address, timeout=30)
  with contextlib.closing(connection):
    for _ in range(3):
      connection.request(
        'POST',
        f'/e/{TOKEN}/chat/completions',
        json.dumps(QUESTION),
        {'Content-Type': 'application/json'},
      )
      assert json.loads(connection.getresponse().read())['id'] == 'known'


def test_the_end_leaves_no_thread_and_no_socket():
  before = threading.active_count()
  service = Says()
  with served(lambda _: service) as server:
    assert request(server.address, '/health')[0] == 200
    assert server.origin == f'http://127.0.0.1:{server.address[1]}'
  assert threading.active_count() == before
  with pytest.raises(ConnectionError):
    request(server.address, '/health')


def test_an_address_that_is_taken_or_unknown():
  with contextlib.closing(listening.bound()) as taken:
    taken.listen()
    with pytest.raises(ValueError, match='Nothing can listen at 127.0.0.1:'):
      listening.bound('127.0.0.1', taken.getsockname()[1])
  with pytest.raises(ValueError, match='give another --host or --port'):
    listening.bound('no.such.host.invalid')


@pytest.mark.parametrize('package', ['starlette', 'uvicorn'])
def test_a_missing_package_is_named(monkeypatch, package):
  for name in (package, f'{package}.applications'):
    monkeypatch.setitem(sys.modules, name, None)
  said = (
    f"package {package}.*cannot be imported.*pip install 'grpo_jax\\[server\\]'"
  )
  with pytest.raises(ValueError, match=said):
    with served(lambda _: Says()):
      pass


@pytest.mark.reference
def test_the_client_of_openai_reads_it(running, service):
  openai = pytest.importorskip('openai')
  _, server = running
  client = openai.OpenAI(
    base_url=f'{server.origin}/e/{TOKEN}/v1', api_key='x', max_retries=0
  )
  call = ToolCall('call_0_0', 'add', {'a': 1}, '')
  service.answer = wire.Answer('Hello.', 'hm', (call,), 'tool_calls', 3, 2)
  asked = dict(model='policy', **QUESTION)
  one = client.chat.completions.create(**asked).choices[0]
  assert one.message.content == 'Hello.' and one.finish_reason == 'tool_calls'
  assert one.message.tool_calls[0].function.arguments == '{"a": 1}'
  service.parts = (
    wire.Piece('Hel'),
    wire.Piece('lo.'),
    wire.Piece(calls=(call,)),
  )
  with client.chat.completions.stream(**asked) as stream:
    final = stream.get_final_completion().choices[0]
  assert final.message.content == 'Hello.'
  assert final.message.tool_calls[0].function.name == 'add'
  service.error, service.parts = wire.Refused(400, 'No.', 'a_code'), ()
  with pytest.raises(openai.BadRequestError) as caught:
    client.chat.completions.create(**asked)
  assert caught.value.code == 'a_code'
  service.error = None
  text = client.completions.create(model='policy', prompt=['a', 'b'])
  assert [choice.text for choice in text.choices] == ['a!', 'b!']
  assert client.models.retrieve('other').id == 'other'
