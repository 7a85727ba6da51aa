"""Asks a server over HTTP, within limits, and again where that may help."""

import asyncio
from collections.abc import AsyncIterator
import contextlib
import dataclasses
import datetime
import email.utils
import json
import os
import random
import threading
import time
from typing import Any

from grpo_jax.config import plain_text

_SHOWN = 200  # characters of a server's words in a message

_clock = time.monotonic
_sleep = asyncio.sleep
_random = random.Random()  # not the global one, which a user may have seeded


class NotAnswered(Exception):
  """There is no answer, and the message says why.

  Args:
    reason: Why not.
    status: Of HTTP; None: nobody has answered.
    said: What the server has said beside it. It may count its requests, say,
      and reasons should be the same as often as they are.
  """

  def __init__(self, reason: str, status: int | None = None, said: str = ''):
    super().__init__(reason)
    self.status, self.said = status, said


class _TryAgain(Exception):
  """There is no answer yet.

  Args:
    reason: Why not.
    status: See `NotAnswered`.
    said: See `NotAnswered`.
    wait_secs: How long the server asks to wait; None: it does not say.
  """

  def __init__(
    self,
    reason: str,
    status: int | None = None,
    said: str = '',
    wait_secs: float | None = None,
  ):
    super().__init__(reason)
    self.reason, self.status, self.said = reason, status, said
    self.wait_secs = wait_secs


class Limits:
  """How many requests may begin in a minute, and be under way at once.

  They hold for all threads and event loops of this process together.

  Args:
    requests_per_minute: Requests begin this far apart; 0: at any time.
    concurrency: The most requests that are under way.
  """

  def __init__(self, requests_per_minute: float, concurrency: int):
    self._interval = 60 / requests_per_minute if requests_per_minute else 0.0
    self._slots = threading.BoundedSemaphore(concurrency)
    self._lock = threading.Lock()
    self._next = self._paused_until = -float('inf')

  def pause(self, secs: float) -> None:
    """Lets no request begin for a while."""
    with self._lock:
      until = _clock() + secs
      self._paused_until = max(self._paused_until, until)
      self._next = max(self._next, until)

  @contextlib.asynccontextmanager
  async def turn(self) -> AsyncIterator[None]:
    """Waits until a request may begin; it is under way inside."""
    # Asked for again and again, because a semaphore of asyncio belongs to one
    # event loop, and one of threads would stop the loop.
    while not self._slots.acquire(blocking=False):
      await _sleep(0.01)
    try:
      while True:
        with self._lock:
          now = _clock()
          begin = max(now, self._next)
          self._next = begin + self._interval
        if begin > now:
          await _sleep(begin - now)
        # A pause may have begun meanwhile; a sleep may end a little early.
        if _clock() > self._paused_until - 1e-3:
          break
      yield
    finally:
      self._slots.release()


@dataclasses.dataclass(frozen=True)
class Client:
  """Asks servers.

  Args:
    who: Asks, for messages.
    api_key_env: The environment variable with the key; '': no key is sent.
    timeout_secs: The longest that one request may take, from its begin to the
      last byte of its answer.
    retries: How often a request is repeated that got the status 408, 429 or 5xx
      or no answer at all.
    backoff_secs: About how long to wait before the first repetition; before
      each further one it is twice as long. Half of it is random.
    longest_wait_secs: The longest wait before a repetition. A server that asks
      by Retry-After for a longer one is not asked again.
    limits: Of all requests.
    most_bytes: Of one answer.
  """

  who: str
  api_key_env: str
  timeout_secs: float
  retries: int
  backoff_secs: float
  longest_wait_secs: float
  limits: Limits
  most_bytes: int = 4 << 20

  def key(self) -> str:
    """The key; '' if there is none.

    Raises:
      ValueError: The environment variable is not set.
    """
    if not self.api_key_env:
      return ''
    key = os.environ.get(self.api_key_env, '').strip()
    if not key:
      raise ValueError(
        f'{self.who} is to read its key from the environment variable'
        f' {self.api_key_env!r}, which is not set; set it on every host, or'
        " give api_key_env=''."
      )
    return key

  def opened(self, requests: int) -> Any:
    """A client for the event loop of the caller, an async context manager.

    Args:
      requests: The most that are under way at once.

    Raises:
      ValueError: httpx2 is not installed.
    """
    httpx = self._import_httpx()
    limits = httpx.Limits(max_connections=requests)
    # Its own time limits start anew with every byte; `_ask_once` has the limit.
    return httpx.AsyncClient(timeout=None, limits=limits)

  async def ask(self, opened: Any, url: str, body: Any = None) -> bytes:
    """The answer to a request.

    Args:
      opened: What `opened` gave.
      url: Whom to ask.
      body: What is posted, as JSON; None: it is a GET.

    Raises:
      NotAnswered: There is none, for the reason in the message.
      ValueError: There is no key.
    """
    data = None if body is None else json.dumps(body).encode()
    for attempt in range(self.retries + 1):
      try:
        async with self.limits.turn():
          return await self._ask_once(opened, url, data)
      except _TryAgain as error:
        reason, status, wait = error.reason, error.status, error.wait_secs
        said = error.said
      if attempt == self.retries:
        break
      backoff = min(self.backoff_secs * 2.0**attempt, self.longest_wait_secs)
      backoff *= _random.uniform(0.5, 1.0)
      if wait is not None:
        if wait > self.longest_wait_secs:
          text = f'{reason}, to be asked again in {wait:.0f} s'
          raise NotAnswered(text, status, said)
        # For everybody, because the limit that was met is everybody's.
        self.limits.pause(wait)
      await _sleep(backoff)
    raise NotAnswered(f'{reason}, {self.retries + 1} times', status, said)

  async def _ask_once(self, opened: Any, url: str, data: bytes | None) -> bytes:
    """The answer to one request."""
    headers, key = {'Content-Type': 'application/json'}, self.key()
    if key:
      headers['Authorization'] = f'Bearer {key}'
    received, method = bytearray(), 'GET' if data is None else 'POST'
    try:
      async with asyncio.timeout(self.timeout_secs):
        async with opened.stream(
          method, url, content=data, headers=headers
        ) as response:
          async for piece in response.aiter_bytes():
            received += piece
            if len(received) > self.most_bytes:
              text = f'an answer of more than {self.most_bytes} bytes'
              raise NotAnswered(text, response.status_code)
    except TimeoutError as error:
      raise _TryAgain(f'no answer in {self.timeout_secs:g} s') from error
    except self._import_httpx().RequestError as error:
      name = plain_text.kind(error)
      said = _shorten(plain_text.said(error), key)
      raise _TryAgain(f'{name}: {said}' if said else name) from error
    status = response.status_code
    if status == 200:
      return bytes(received)
    said = _shorten(received.decode(errors='replace'), key)
    reason = f'HTTP {status}: {said}' if said else f'HTTP {status}'
    if status in (408, 429) or status >= 500:
      wait = _wait_secs(response.headers.get('Retry-After'))
      raise _TryAgain(f'HTTP {status}', status, said, wait)
    raise NotAnswered(reason, status)

  def _import_httpx(self) -> Any:
    try:
      import httpx2
    except ImportError as error:
      raise ValueError(
        f'{self.who} requires the package httpx2, which is not installed; run '
        "pip install 'grpo_jax[http]'."
      ) from error
    return httpx2


def _shorten(text: str, key: str) -> str:
  """The words of a server for a message; some repeat the key."""
  text = text.replace(key, '***') if key else text
  return ' '.join(text[:_SHOWN].split())


def _wait_secs(header: str | None) -> float | None:
  """The seconds of a Retry-After, which is a number or a date."""
  if header is None:
    return None
  try:
    secs = float(header)
  except ValueError:
    try:
      until = email.utils.parsedate_to_datetime(header)
    except ValueError:
      return None
    if until.tzinfo is None:
      until = until.replace(tzinfo=datetime.UTC)
    secs = (until - datetime.datetime.now(datetime.UTC)).total_seconds()
  return max(0.0, secs) if secs < float('inf') else None
