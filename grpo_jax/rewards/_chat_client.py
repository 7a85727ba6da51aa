"""Asks a chat model over HTTP, within limits, and again where that may help.

The server speaks the chat completions of OpenAI's API, as vLLM, SGLang and
llama.cpp do: https://platform.openai.com/docs/api-reference/chat.
"""

import asyncio
from collections.abc import AsyncIterator
from collections.abc import Mapping
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
from typing import NamedTuple

from grpo_jax.config import plain_text

_MOST_BYTES = 4 << 20  # of one answer; a judgement has some thousand
_SHOWN = 200  # characters of a server's words in a message

_clock = time.monotonic
_sleep = asyncio.sleep
_random = random.Random()  # not the global one, which a user may have seeded


class Answer(NamedTuple):
  """What the model has written.

  Attributes:
    text: Its message.
    cut: Whether the message ended at the limit of tokens.
  """

  text: str
  cut: bool


class NotAnswered(Exception):
  """There is no answer, and the message says why."""


class _TryAgain(Exception):
  """There is no answer yet.

  Args:
    reason: Why not.
    wait_secs: How long the server asks to wait; None: it does not say.
  """

  def __init__(self, reason: str, wait_secs: float | None = None):
    super().__init__(reason)
    self.reason = reason
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
class ChatClient:
  """Asks one server.

  Args:
    url: The base, such as 'http://127.0.0.1:8000/v1'.
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
  """

  url: str
  api_key_env: str
  timeout_secs: float
  retries: int
  backoff_secs: float
  longest_wait_secs: float
  limits: Limits

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
        'http_judge is to read its key from the environment variable'
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
    httpx = _import_httpx()
    limits = httpx.Limits(max_connections=requests)
    # Its own time limits start anew with every byte; `_answered` has the limit.
    return httpx.AsyncClient(timeout=None, limits=limits)

  async def ask(self, opened: Any, body: Mapping[str, Any]) -> Answer:
    """The answer to a request.

    Args:
      opened: What `opened` gave.
      body: The request, without its key.

    Raises:
      NotAnswered: There is none, for the reason in the message.
      ValueError: The server refuses the key, or knows no such model.
    """
    data = json.dumps(body).encode()
    for attempt in range(self.retries + 1):
      try:
        async with self.limits.turn():
          return await self._ask_once(opened, data)
      except _TryAgain as error:
        reason, wait = error.reason, error.wait_secs
      if attempt == self.retries:
        break
      backoff = min(self.backoff_secs * 2.0**attempt, self.longest_wait_secs)
      backoff *= _random.uniform(0.5, 1.0)
      if wait is not None:
        if wait > self.longest_wait_secs:
          raise NotAnswered(f'{reason}, to be asked again in {wait:.0f} s')
        # For everybody, because the limit that was met is everybody's.
        self.limits.pause(wait)
      await _sleep(backoff)
    raise NotAnswered(f'{reason}, {self.retries + 1} times')

  async def _ask_once(self, opened: Any, data: bytes) -> Answer:
    """The answer to one request."""
    headers, key = {'Content-Type': 'application/json'}, self.key()
    if key:
      headers['Authorization'] = f'Bearer {key}'
    url = self.url.rstrip('/') + '/chat/completions'
    received = bytearray()
    try:
      async with asyncio.timeout(self.timeout_secs):
        async with opened.stream(
          'POST', url, content=data, headers=headers
        ) as response:
          async for piece in response.aiter_bytes():
            received += piece
            if len(received) > _MOST_BYTES:
              raise NotAnswered(f'an answer of more than {_MOST_BYTES} bytes')
    except TimeoutError as error:
      raise _TryAgain(f'no answer in {self.timeout_secs:g} s') from error
    except _import_httpx().RequestError as error:
      name = plain_text.kind(error)
      said = _shorten(plain_text.said(error), key)
      raise _TryAgain(f'{name}: {said}' if said else name) from error
    status = response.status_code
    if status == 200:
      return _parse(bytes(received))
    said = _shorten(received.decode(errors='replace'), key)
    reason = f'HTTP {status}: {said}' if said else f'HTTP {status}'
    if status in (408, 429) or status >= 500:
      wait = _wait_secs(response.headers.get('Retry-After'))
      # The words of the server may count its requests, say.
      raise _TryAgain(f'HTTP {status}', wait)
    if status in (401, 404):
      raise ValueError(
        f'{url} answers http_judge with {reason}; correct url, model or the key'
        f' in the environment variable {self.api_key_env!r}.'
      )
    raise NotAnswered(reason)


def _parse(received: bytes) -> Answer:
  """The message in the answer of a server."""
  try:
    choice = json.loads(received)['choices'][0]
    text, finish = choice['message']['content'], choice.get('finish_reason')
  except (
    ValueError, RecursionError, KeyError, IndexError, TypeError, AttributeError
  ):  # fmt: skip
    raise NotAnswered('an answer that is no chat completion') from None
  if not isinstance(text, str) or not text.strip():
    raise NotAnswered('an empty message')
  return Answer(text, finish == 'length')


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


def _import_httpx() -> Any:
  try:
    import httpx2
  except ImportError as error:
    raise ValueError(
      'The reward http_judge requires the package httpx2, which is not'
      " installed; run pip install 'grpo_jax[http]'."
    ) from error
  return httpx2
