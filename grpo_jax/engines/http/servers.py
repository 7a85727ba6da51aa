"""Asks servers of one policy, from a thread that has no event loop."""

import asyncio
from collections.abc import AsyncIterator
from collections.abc import Callable
from collections.abc import Coroutine
from collections.abc import Iterator
from collections.abc import Sequence
from concurrent.futures import Future
import contextlib
import json
import queue
import threading
from typing import Any

from grpo_jax.config import http_client
from grpo_jax.config import waits
from grpo_jax.engines.http import dialects
from grpo_jax.engines.http.dialects import Call
from grpo_jax.engines.http.dialects import Unusable

_END_SECS = 10.0
_LOOK_SECS = 0.01  # between two looks at a server that is being changed
_AGAIN_SECS = 0.5  # before a server is asked again for what it could not do
_AGAIN = 4  # times, at most
TRIES = 4  # of what a server gives up, or answers unusably
_SHOWN = 200  # characters of a server's words in a message


_sleep = asyncio.sleep


class Away(OSError):
  """No server answers, or none as it must."""


class Server:
  """One server.

  Attributes:
    url: Where it is.
    drawing: The requests and numbers of completions that are drawn there, or
      are to be.
    has: The policies that it has been told of, in order; None: nobody knows,
      because it has been away.
    why: It has been away.
    told: How often it has been told of a policy, or is being told.
  """

  def __init__(self, url: str):
    self.url = url.rstrip('/')
    self.drawing: set[tuple[int, int]] = set()
    self.has: tuple[str, ...] | None = ()
    self.why, self.told = '', 0
    self._changing = threading.Lock()

  def lose(self, why: str, told: int) -> None:
    """Says that it must be told of its policy again.

    Args:
      why: It must.
      told: See `Server`, when it was asked. If it has been told since, there is
        nothing to be done.
    """
    if self.told == told:
      self.has, self.why = None, why

  @contextlib.asynccontextmanager
  async def alone(self) -> AsyncIterator[bool]:
    """In it nobody else changes what the server draws by.

    Yields:
      Whether somebody just has. Event loops of several threads may wait.
    """
    waited = False
    while not self._changing.acquire(blocking=False):
      waited = True
      await _sleep(_LOOK_SECS)
    try:
      yield waited
    finally:
      self._changing.release()


class Servers:
  """Some servers, each of which draws by the same policies.

  Args:
    urls: Their addresses.
    client: Asks them. Its limits are those of all servers together.
    concurrency: How many requests are under way at once, at most.
  """

  def __init__(
    self, urls: Sequence[str], client: http_client.Client, concurrency: int
  ):
    self.every = [Server(url) for url in urls]
    self._client, self._concurrency = client, concurrency
    client.key()  # at the start, and not after a rollout

  def least(
    self, but: Sequence[Server] = (), failed: Sequence[Server] = ()
  ) -> Server:
    """The server with the fewest completions.

    Args:
      but: Those that are not to be asked.
      failed: Those that have failed before, as often; others come first.

    Raises:
      Away: There is none.
    """
    left = [one for one in self.every if one not in but]
    if not left:
      raise Away
    # One that was away comes last: it must be told of its policy first.
    return min(
      left,
      key=lambda one: (
        failed.count(one), one.has is None, len(one.drawing)
      ),
    )  # fmt: skip

  async def by_any(
    self,
    opened: Any,
    do: Callable[[Any, Server], Coroutine[Any, Any, Any]],
    name: str,
    home: Server,
    forgets: Callable[[http_client.NotAnswered], bool] = lambda error: False,
  ) -> Any:
    """What the first server gives that does as it must.

    Args:
      opened: As of `Servers.ask`.
      do: Asks a server.
      name: What is asked for.
      home: Is asked first.
      forgets: Whether a server that refuses may do it when asked again.

    Raises:
      Away: None does.
    """
    server, errors = home, {}
    out: list[Server] = []  # they are not asked again
    failed: list[Server] = []
    most = max(TRIES, len(self.every))
    while True:
      try:
        return await do(opened, server)
      except dialects.Unusable as error:
        errors[f'{server.url}: {error}'] = None
      except http_client.NotAnswered as error:
        errors[f'{server.url}: {error}'] = None
        if not forgets(error):
          out.append(server)
      failed.append(server)
      try:
        server = self.least(out, failed)
        if len(failed) == most:
          raise Away
      except Away:
        raise Away(
          f'No server completes {name}: {"; ".join(errors)}. See that they '
          'run, and what they write of it.'
        ) from None

  async def ask(self, opened: Any, server: Server, call: Call) -> Any:
    """What a server answers, as JSON says it, or else its text.

    Raises:
      http_client.NotAnswered: It does not answer, or refuses.
      Unusable: The answer is too long, or says that it was not done.
    """
    url, said, told = server.url + call.path, '', server.told
    most = _AGAIN if call.wanted else 1
    for attempt in range(most):
      if attempt:
        await _sleep(_AGAIN_SECS)
      try:
        answer = await self._client.ask(opened, url, call.body)
      except http_client.NotAnswered as error:
        if call.fine and call.fine in str(error):
          return None
        if error.status == 400 and attempt < most - 1:
          continue  # a cache is not emptied while something is drawn, say
        why = self._explain(error, call)
        if error.status is None or error.status >= 500:
          server.lose(why, told)
        if error.status == 200:
          raise Unusable(why) from None
        raise http_client.NotAnswered(why, error.status) from None
      try:
        found = json.loads(answer)
      except (ValueError, RecursionError):
        found = answer.decode(errors='replace')
      if not call.wanted or dialects.field(found, call.wanted) is True:
        return found
      said = answer[:_SHOWN].decode(errors='replace')
    raise Unusable(f'no {call.wanted}, to {call.path}: {said}')

  def _explain(self, error: http_client.NotAnswered, call: Call) -> str:
    """Why there is no answer, and what to do if it is known."""
    why = f'{error}, to {call.path}'
    why += f': {error.said}' if error.said else ''
    if call.needs and error.status == 404 and '"detail"' in why:
      why += f'; start it with {call.needs}'
    if error.status in (401, 403):
      name = self._client.api_key_env
      sent = f'the key of {name}' if name else 'no key'
      why += f'; it was sent {sent}, see the field key_env'
    return why

  def run(self, do: Callable[[Any], Coroutine[Any, Any, Any]]) -> Any:
    """What a coroutine returns; it gets what `ask` needs."""
    with self.opened() as start:
      found: queue.SimpleQueue[Any] = queue.SimpleQueue()
      start(do, found.put)
      result = waits.take(found)
    if isinstance(result, BaseException):
      raise result
    return result

  @contextlib.contextmanager
  def opened(self) -> Iterator[Callable[[Any, Callable[[Any], None]], Future]]:
    """In it an event loop runs in a thread of its own.

    Yields:
      Starts a coroutine of what `ask` needs there, calls a function in that
      thread with what it returns or with the error that it raises, and returns
      what cancels it. What has not ended when the context does is cancelled
      too: servers then hear that nobody waits.
    """
    loop = asyncio.new_event_loop()
    thread = threading.Thread(
      target=loop.run_forever, name='servers', daemon=True
    )
    thread.start()
    client: Any = None

    async def begin():
      nonlocal client
      client = await self._client.opened(self._concurrency).__aenter__()
      return asyncio.Semaphore(self._concurrency)

    async def end():
      tasks = asyncio.all_tasks() - {asyncio.current_task()}
      for task in tasks:
        task.cancel()
      await asyncio.gather(*tasks, return_exceptions=True)
      if client is not None:
        await client.aclose()

    def start(do, tell):
      async def one():
        try:
          async with slots:
            found = await do(client)
        except asyncio.CancelledError:
          raise
        except BaseException as error:
          found = error
        tell(found)

      return asyncio.run_coroutine_threadsafe(one(), loop)

    try:
      slots = asyncio.run_coroutine_threadsafe(begin(), loop).result()
      yield start
    finally:
      with contextlib.suppress(TimeoutError):
        asyncio.run_coroutine_threadsafe(end(), loop).result(_END_SECS)
      loop.call_soon_threadsafe(loop.stop)
      thread.join(_END_SECS)
      if not thread.is_alive():
        loop.close()
