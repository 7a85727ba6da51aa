"""The learner's door: the addresses at which generators reach its desk.

All are POST, with a message of `wire.py` both ways. Both sides sign: a message
whose signature is wrong is not read. What does not fit into the bounds of size
and time is cut off.
"""

import asyncio
from collections.abc import Callable
from collections.abc import Mapping
import contextlib
import json
import time
from typing import Any

from grpo_jax.config import plain_text
from grpo_jax.run.jobs import desk as desk_lib
from grpo_jax.run.jobs import wire

TAKE_SECS = 5.0
"""How long an answer to a generator waits for a part."""
NONCE, DIGEST, SIGNATURE = 'x-grpo-nonce', 'x-grpo-digest', 'x-grpo-signature'

_LOOK_SECS = 0.01  # between two looks for a part
_IDLE_SECS = 30.0  # in which more of a body must come
_MOST_BYTES = 1 << 20  # of a body that brings nothing
_MOST_LARGE = 4  # bodies that bring something, at the same time

Weights = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""`(what a generator asks for)` -> how it gets it; see `engines.offering`."""


class Door:
  """An ASGI app.

  Args:
    desk: Has the parts.
    signer: Has the secret.
    hello: What a generator is told of the run, for JSON; its 'run' is a word
      that tells this run from others.
    refuse: `(what a generator says of itself)`: why it may not draw for this
      run; '' if it may.
    weights: Hands out parameters. Called in threads.
  """

  def __init__(
    self,
    desk: desk_lib.Desk,
    signer: wire.Signer,
    hello: Mapping[str, Any],
    refuse: Callable[[Mapping[str, Any]], str] = lambda about: '',
    weights: Weights = lambda wanted: {},
  ):
    self._desk, self._signer, self._hello = desk, signer, hello
    self._refuse, self._weights = refuse, weights
    self.is_closing = False
    self._large = asyncio.Semaphore(_MOST_LARGE)
    self._does = {
      '/hello': self._say_hello,
      '/join': self._join,
      '/beat': self._beat,
      '/take': self._take,
      '/bring': self._bring,
      '/fail': self._fail,
      '/release': self._release,
      '/leave': self._leave,
      '/weights': self._fetch,
    }

  async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
    """Answers a request."""
    assert scope['type'] == 'http'
    path = scope['path']
    headers = {k.decode('latin-1'): v for k, v in scope['headers']}
    nonce = headers.get(NONCE, b'')[:64]
    large = self._large if path == '/bring' else contextlib.nullcontext()
    try:
      async with large:  # so many bodies are in memory
        do = self._does.get(path)
        if do is None or scope['method'] != 'POST':
          raise wire.Refused(404, 'There is no such address here.')
        most = wire.MOST_BYTES if path == '/bring' else _MOST_BYTES
        signature = headers.get(SIGNATURE, b'').decode('latin-1')
        digest = headers.get(DIGEST, b'')
        parts = b'ask', path.encode(), nonce, digest
        if not nonce or not self._signer.knows(signature, *parts):
          raise wire.Refused(403, 'The secret is another one here, or none.')
        body = await _body(headers, receive, most)
        if wire.digest(body) != digest:
          raise wire.Refused(400, 'The message has changed on its way.')
        values, blobs = wire.unpack(body)
        if not isinstance(values, dict):
          raise wire.Unreadable('This is no message of grpo_jax.')
        del body
        status, answer = 200, wire.pack(await do(values, blobs))
    except _Left:
      return
    except Exception as error:
      known = isinstance(error, ValueError)
      theirs = known or isinstance(error, (LookupError, TypeError))
      status = 400 if theirs else 500
      if isinstance(error, wire.Refused):
        status = error.status
      text = plain_text.said(error) if known else plain_text.first_line(error)
      answer = wire.pack({'refused': text})
    said = self._signer.sign(
      b'answer', path.encode(), nonce, str(status).encode(), answer
    )
    await send(
      {
        'type': 'http.response.start',
        'status': status,
        'headers': [
          (b'content-type', b'application/octet-stream'),
          (b'content-length', str(len(answer)).encode()),
          (SIGNATURE.encode(), said.encode()),
          *([(b'connection', b'close')] if status != 200 else []),
        ],
      }
    )
    await send({'type': 'http.response.body', 'body': answer})

  async def _say_hello(self, values: Any, blobs: Any) -> dict[str, Any]:
    del values, blobs
    return dict(self._hello)

  async def _join(self, values: Any, blobs: Any) -> dict[str, Any]:
    del blobs
    self._check_run(values)
    if why := self._refuse(values['about']):
      raise wire.Refused(409, why)
    return {'word': self._desk.join(str(values['name'])[:200])}

  async def _beat(self, values: Any, blobs: Any) -> dict[str, Any]:
    del blobs
    known = self._desk.beat(_text(values, 'word'))
    return {'known': known, **self._state(values.get('ticket'))}

  async def _take(self, values: Any, blobs: Any) -> dict[str, Any]:
    del blobs
    self._check_run(values)
    word, until = _text(values, 'word'), time.monotonic() + TAKE_SECS
    while not (self._desk.is_done or self.is_closing):
      if not self._desk.beat(word):
        return {'known': False, **self._state()}
      if taken := self._desk.take(word):
        ticket, job = taken
        return {
          'known': True, **self._state(), 'ticket': ticket,
          'job': job._asdict(),
        }  # fmt: skip
      if time.monotonic() > until:
        break
      await asyncio.sleep(_LOOK_SECS)
    return {'known': True, **self._state()}

  async def _bring(self, values: Any, blobs: Any) -> dict[str, Any]:
    ticket, word = _text(values, 'ticket'), _text(values, 'word')
    taken = False
    if self._desk.is_open(ticket):
      part = await asyncio.to_thread(wire.collected_from_bytes, blobs)
      taken = self._desk.bring(word, ticket, part, float(values['secs']))
    return {'taken': taken, **self._state()}

  async def _fail(self, values: Any, blobs: Any) -> dict[str, Any]:
    del blobs
    taken = self._desk.fail(
      _text(values, 'word'),
      _text(values, 'ticket'),
      _text(values, 'text'),
      _text(values, 'trace'),
      bool(values['inside']),
    )
    return {'taken': taken}

  async def _release(self, values: Any, blobs: Any) -> dict[str, Any]:
    del blobs
    self._desk.release(_text(values, 'word'))
    return {}

  async def _leave(self, values: Any, blobs: Any) -> dict[str, Any]:
    del blobs
    self._desk.leave(_text(values, 'word'), _text(values, 'why')[:1000])
    return {}

  async def _fetch(self, values: Any, blobs: Any) -> dict[str, Any]:
    del blobs
    self._check_run(values)
    return dict(await asyncio.to_thread(self._weights, values))

  def _state(self, ticket: Any = None) -> dict[str, Any]:
    state = {'newest': self._desk.newest, 'done': self._desk.is_done}
    if ticket is not None:
      state['open'] = self._desk.is_open(str(ticket))
    return state

  def _check_run(self, values: Any) -> None:
    if values.get('run') != self._hello.get('run'):
      raise wire.Refused(
        409,
        'Another run, or this one with another config, is at this address '
        'now; start the generator again.',
      )


class _Left(Exception):
  """The other side has gone."""


def _text(values: Mapping[str, Any], name: str) -> str:
  found = values.get(name)
  if not isinstance(found, str):
    raise wire.Unreadable(f'The message lacks {json.dumps(name)}.')
  return found


async def _body(headers: Any, receive: Any, most: int) -> bytes:
  """The body of a request.

  Raises:
    wire.Refused: It is too large, or comes too slowly.
  """
  length = headers.get('content-length', b'0')
  large = wire.Refused(413, f'More than {most} bytes are not read here.')
  if not length.isdigit() or int(length) > most:
    raise large
  parts, size = [], 0
  while True:
    try:
      event = await asyncio.wait_for(receive(), _IDLE_SECS)
    except TimeoutError:
      raise wire.Refused(408, 'Nothing has come for too long.') from None
    if event['type'] == 'http.disconnect':
      raise _Left
    parts.append(event.get('body', b''))
    size += len(parts[-1])
    if size > most:
      raise large
    if not event.get('more_body'):
      return b''.join(parts)
