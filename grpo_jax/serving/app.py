"""The routes of OpenAI's API, over services that know how to answer.

Whoever calls is found by a token: that of an address, `/e/TOKEN/v1/...`, or of
`Authorization: Bearer TOKEN`. No address is listed, and none is logged.
"""

import asyncio
from collections.abc import Awaitable
from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Mapping
from collections.abc import Sequence
import hmac
import logging
import re
import secrets
import time
import traceback
from typing import Any
from typing import NamedTuple
from typing import Protocol

from grpo_jax.serving import listening
from grpo_jax.serving import wire

_LOG = logging.getLogger(__name__)
_ROOTS = '', '/v1', '/e/{token}', '/e/{token}/v1'
_SECRET = re.compile(r'(/e/)[^/\s\'"]+|(Bearer\s+)\S+', re.IGNORECASE)


class Client(NamedTuple):
  """Who asks.

  Attributes:
    retry: How often the client has asked for this before, by its own account.
    body: What it has sent, to compare.
    trains: Whether the answer may be learned from, by its own account.
    secret: A second secret; ''.
  """

  retry: int = 0
  body: bytes = b''
  trains: bool = True
  secret: str = ''


Heard = Callable[[wire.Piece], None]
HeardOf = Callable[[int, wire.Piece], None]
Posted = Callable[[Mapping[str, Any]], Awaitable[Mapping[str, Any]]]


class Service(Protocol):
  """Who answers.

  What a client no longer waits for is cancelled. A service that goes on
  nevertheless shields itself.
  """

  def models(self) -> Sequence[str]:
    """What may be named as a model; the first is named in streams."""
    ...

  async def chat(
    self, request: wire.Chat, client: Client, heard: Heard | None
  ) -> wire.Answer:
    """Answers a chat.

    Args:
      request: What is asked.
      client: Who asks.
      heard: Is called with the parts of the answer as they come, all of them or
        none; None where nobody wants them. In the event loop of the app.

    Raises:
      Refused: It is not answered.
    """
    ...

  async def complete(
    self, request: wire.Completion, client: Client, heard: HeardOf | None
  ) -> Sequence[wire.Answer]:
    """Answers each prompt; `heard` gets its index too. See `chat`."""
    ...

  def sent(self, answer: wire.Answer, whole: bool) -> None:
    """An answer is out; or the client was gone before (`whole` is False)."""
    ...

  async def control(
    self, name: str, body: Mapping[str, Any], secret: str
  ) -> Mapping[str, Any]:
    """Does what else an agent may ask for, 'reward' or 'discard'."""
    ...


def app(
  find: Callable[[str | None], Service],
  *,
  hosts: Collection[str],
  key: str | None = None,
  most_bytes: int = 16 << 20,
  strict: bool = False,
  posted: Mapping[str, Posted] = {},
) -> Any:
  """An ASGI app.

  Args:
    find: Who answers for a token; None where none is given. Raises `Refused`.
    hosts: Names and addresses, without ports, that clients may call this
      machine by. So no page of a browser reaches it by a name of its own.
    key: What every client must give as its bearer token; then neither hosts
      nor types of contents are checked, because no page knows it. None: any or
      no token will do.
    most_bytes: Of a body.
    strict: See `wire.chat`.
    posted: What else is answered, by the address of the server alone.

  Raises:
    ValueError: starlette is not installed.
  """
  applications = listening.package('starlette.applications')
  exceptions = listening.package('starlette.exceptions')
  routing = listening.package('starlette.routing')
  doors = _Doors(find, frozenset(hosts), key, most_bytes, strict)
  routes = []
  for root in _ROOTS:
    for path, method, do in (
      ('/chat/completions', 'POST', doors.chat),
      ('/completions', 'POST', doors.complete),
      ('/reward', 'POST', doors.control),
      ('/discard', 'POST', doors.control),
      ('/models', 'GET', doors.models),
      ('/models/{name:path}', 'GET', doors.models),
      ('/health', 'GET', doors.health),
    ):
      routes.append(
        routing.Route(root + path, doors.guarded(do), methods=[method])
      )

  for path, do in posted.items():
    endpoint = doors.guarded(doors.posted(do))
    routes.append(routing.Route(path, endpoint, methods=['POST']))

  async def refuse(request, error):
    refused = wire.Refused(404, 'There is no such address here.')
    if error.status_code == 405:
      refused = wire.Refused(
        405, f'{request.method} is not done at this address.'
      )
    return _Json(wire.error_json(refused), refused.status)

  made = applications.Starlette(
    routes=routes, exception_handlers={exceptions.HTTPException: refuse}
  )
  made.router.redirect_slashes = False
  return made


class _Doors:
  """What is done at each address."""

  def __init__(
    self,
    find: Callable[[str | None], Service],
    hosts: frozenset[str],
    key: str | None,
    most_bytes: int,
    strict: bool,
  ):
    self._find, self._key, self._strict = find, key, strict
    self._hosts = frozenset(host.strip('[]').lower() for host in hosts)
    self._most_bytes = most_bytes
    self._created = int(time.time())

  def guarded(self, do: Callable[[Any], Awaitable[Any]]) -> Any:
    """An endpoint that lets in whom it may, and says what is wrong."""

    async def endpoint(request):
      try:
        self._admit(request)
        return await do(request)
      except wire.Refused as refused:
        return _Json(wire.error_json(refused), refused.status)
      except Exception as error:
        return _Json(wire.error_json(_failed(error)), 500)

    return endpoint

  def _admit(self, request: Any) -> None:
    """Raises `Refused` unless a client may ask."""
    if self._key is not None:
      given = _bearer(request) or ''
      if not hmac.compare_digest(given.encode(), self._key.encode()):
        raise wire.Refused(
          401,
          'The key is missing or wrong; give it as Authorization: Bearer KEY.',
          'invalid_api_key',
        )
      return
    host = _without_port(request.headers.get('host', ''))
    if host not in self._hosts:
      raise wire.Refused(
        403,
        f'The host {host!r:.80} is not served here; call this server by '
        f'{" or ".join(sorted(self._hosts))}.',
      )
    kind = request.headers.get('content-type', '').partition(';')[0].strip()
    if request.method == 'POST' and kind.lower() != 'application/json':
      raise wire.Refused(
        415,
        f'The content type is {kind!r:.80}; give Content-Type: '
        'application/json.',
      )

  def _service(self, request: Any) -> Service:
    token = request.path_params.get('token')
    if token is None and self._key is None:
      token = _bearer(request)
    return self._find(token)

  async def _body(self, request: Any) -> bytes:
    """The body, unless it is too long."""
    parts, size = [], 0
    declared = request.headers.get('content-length', '')
    too_long = declared.isdecimal() and int(declared) > self._most_bytes
    if not too_long:
      async for part in request.stream():
        parts.append(part)
        size += len(part)
        if too_long := size > self._most_bytes:
          break
    if too_long:
      raise wire.Refused(
        413,
        f'The body has more than {self._most_bytes:,} bytes; send less.',
      )
    return b''.join(parts)

  async def chat(self, request: Any) -> Any:
    """POST chat/completions."""
    service, body = self._service(request), await self._body(request)
    asked = wire.chat(body, self._strict)
    client = _client(request, body)

    async def ask(heard: HeardOf | None) -> Sequence[wire.Answer]:
      one = None if heard is None else lambda piece: heard(0, piece)
      return [await service.chat(asked, client, one)]

    return _Answering(service, asked, ask)

  async def complete(self, request: Any) -> Any:
    """POST completions."""
    service, body = self._service(request), await self._body(request)
    asked = wire.completion(body, self._strict)
    client = _client(request, body)

    async def ask(heard: HeardOf | None) -> Sequence[wire.Answer]:
      return await service.complete(asked, client, heard)

    return _Answering(service, asked, ask)

  async def control(self, request: Any) -> Any:
    """POST reward and POST discard."""
    service, body = self._service(request), await self._body(request)
    name = request.url.path.rpartition('/')[2]
    secret = request.headers.get('x-grpo-secret', '')
    said = await service.control(name, wire.read_object(body or b'{}'), secret)
    return _Json(said)

  def posted(self, do: Posted) -> Callable[[Any], Awaitable[Any]]:
    """POST of an object, of which another is the answer.

    What a client no longer waits for is cancelled.
    """

    async def endpoint(request):
      body = await self._body(request)
      gone = asyncio.ensure_future(_hang_up(request.receive))
      try:
        said = await _unless(gone, do(wire.read_object(body or b'{}')))
      finally:
        gone.cancel()
      return _Json(said or {})  # or nobody reads it

    return endpoint

  async def models(self, request: Any) -> Any:
    """GET models, and GET models/NAME."""
    names = self._service(request).models()
    name = request.path_params.get('name')
    if name is None:
      return _Json(wire.models_json(names, self._created))
    if name not in names:
      raise wire.Refused(
        404, f'There is no model {name!r:.80}; there is {", ".join(names)}.'
      )
    return _Json(wire.model_json(name, self._created))

  async def health(self, request: Any) -> Any:
    """GET health."""
    if request.path_params.get('token') is not None:
      self._service(request)
    return _Json({'status': 'ok'})


def _bearer(request: Any) -> str | None:
  kind, _, token = request.headers.get('authorization', '').partition(' ')
  return token.strip() or None if kind.lower() == 'bearer' else None


def _without_port(host: str) -> str:
  """The name in a Host header.

  >>> _without_port('[::1]:80'), _without_port('localhost:80')
  ('::1', 'localhost')
  """
  if host.startswith('['):
    return host[1:].partition(']')[0].lower()
  return host.partition(':')[0].lower()


def _client(request: Any, body: bytes) -> Client:
  headers = request.headers
  retry = headers.get('x-stainless-retry-count', '')
  return Client(
    retry=int(retry) if retry.isdecimal() and len(retry) < 9 else 0,
    body=body,
    trains=headers.get('x-grpo-train', '').strip() != '0',
    secret=headers.get('x-grpo-secret', ''),
  )


def _failed(error: BaseException) -> wire.Refused:
  """What a client is told of a fault here; the log says more."""
  text = ''.join(traceback.format_exception(error))
  _LOG.error('A request has failed: %s', redacted(text))
  return wire.Refused(
    500, 'The server could not answer, by a fault of its own.'
  )


def redacted(text: str) -> str:
  """A text for logs, without tokens.

  >>> redacted('POST /e/a1b2/v1/models, Bearer a1b2')
  'POST /e/.../v1/models, Bearer ...'
  """
  return _SECRET.sub(lambda x: f'{x[1] or x[2]}...', text)


class _Json:
  """A response of JSON, whole."""

  def __init__(self, value: Mapping[str, Any], status: int = 200):
    self._body, self._status = wire.dumped(value), status

  async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
    await _send_json(send, self._body, self._status)


async def _send_json(
  send: Any, body: bytes, status: int = 200, more: bool = False
) -> None:
  headers = [
    (b'content-type', b'application/json'),
    (b'content-length', str(len(body)).encode()),
  ]
  if status == 401:
    headers.append((b'www-authenticate', b'Bearer'))
  await _start(send, status, headers)
  await _part(send, body, more)


async def _start(send: Any, status: int, headers: Any) -> None:
  await send(
    {'type': 'http.response.start', 'status': status, 'headers': headers}
  )


async def _part(send: Any, body: bytes, more: bool = True) -> None:
  await send({'type': 'http.response.body', 'body': body, 'more_body': more})


async def _hang_up(receive: Any) -> None:
  """Returns when the client has gone."""
  while (await receive())['type'] != 'http.disconnect':
    pass


class _Answering:
  """A response that is the answer of a service, or the parts of it.

  Args:
    service: Who answers.
    asked: What.
    ask: Gets the answers.
  """

  def __init__(
    self,
    service: Service,
    asked: wire.Chat | wire.Completion,
    ask: Callable[[HeardOf | None], Awaitable[Sequence[wire.Answer]]],
  ):
    self._service, self._asked, self._ask = service, asked, ask
    self._is_chat = isinstance(asked, wire.Chat)
    kind = 'chatcmpl' if self._is_chat else 'cmpl'
    self._id, self._created = (
      f'{kind}-{secrets.token_hex(12)}',
      int(time.time()),
    )

  async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
    heard: asyncio.Queue[tuple[int, wire.Piece] | None] = asyncio.Queue()
    gone = asyncio.ensure_future(_hang_up(receive))
    work = asyncio.ensure_future(
      self._ask(
        (lambda index, piece: heard.put_nowait((index, piece)))
        if self._asked.stream
        else None
      )
    )
    work.add_done_callback(lambda _: heard.put_nowait(None))
    whole = False
    try:
      whole = await self._respond(send, heard, gone, work)
    finally:
      gone.cancel()
      work.cancel()  # nobody waits for it
      await asyncio.wait({work})
      if not work.cancelled() and work.exception() is None:
        for answer in work.result():
          self._service.sent(self._named(answer), whole)

  async def _respond(
    self, send: Any, heard: asyncio.Queue, gone: Any, work: Any
  ) -> bool:
    """Sends what there is; whether all of it could be sent."""
    first = await _unless(gone, heard.get())
    if gone.done():
      return False
    if first is None and (refused := _refusal(work)) is not None:
      await _send_json(
        send, wire.dumped(wire.error_json(refused)), refused.status
      )
      return False
    if not self._asked.stream:
      await _send_json(send, wire.dumped(self._json(work.result())), more=True)
    elif not await self._stream(send, heard, gone, work, first):
      return False
    await asyncio.sleep(0)  # a client that is gone is noticed
    whole = not gone.done()
    await _part(send, b'', more=False)
    return whole

  async def _stream(
    self, send: Any, heard: asyncio.Queue, gone: Any, work: Any, first: Any
  ) -> bool:
    """Sends the parts of an answer, but for the end of the response."""
    events = wire.Events(
      self._id,
      self._created,
      self._service.models()[0],
      self._is_chat,
      self._asked.include_usage,
    )
    await _start(
      send,
      200,
      [
        (b'content-type', b'text/event-stream; charset=utf-8'),
        (b'cache-control', b'no-cache'),
      ],
    )
    has_heard = first is not None
    while first is not None:
      index, piece = first
      await _part(send, events.pieces(piece, index))
      first = await _unless(gone, heard.get())
      if gone.done():
        return False
    if (refused := _refusal(work)) is not None:
      await _part(send, wire.error_event(refused), more=False)
      return False
    answers = work.result()
    if not has_heard:
      for index, answer in enumerate(answers):
        await _part(send, events.pieces(wire.whole(answer), index))
    await _part(send, events.end(answers))
    return True

  def _json(self, answers: Sequence[wire.Answer]) -> Mapping[str, Any]:
    named = [*map(self._named, answers)]
    if self._is_chat:
      return wire.chat_json(named[0], self._created)
    return wire.completion_json(named, self._created)

  def _named(self, answer: wire.Answer) -> wire.Answer:
    return answer if answer.id else answer._replace(id=self._id)


async def _unless(gone: Any, wanted: Any) -> Any:
  """What is waited for; None if the client goes before."""
  task = asyncio.ensure_future(wanted)
  try:
    await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
    return task.result() if task.done() else None
  finally:
    task.cancel()


def _refusal(work: Any) -> wire.Refused | None:
  """Why there are no answers; None if there are."""
  if work.cancelled():
    return wire.Refused(503, wire.ENDING)
  error = work.exception()
  if error is None or isinstance(error, wire.Refused):
    return error
  return _failed(error)
