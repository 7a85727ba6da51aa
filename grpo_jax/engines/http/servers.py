"""Asks servers of one policy, from a thread that has no event loop."""

import asyncio
from collections.abc import Callable
from collections.abc import Coroutine
from collections.abc import Iterator
from collections.abc import Sequence
import contextlib
import json
import queue
import threading
from typing import Any

from grpo_jax.config import http_client
from grpo_jax.engines.http import dialects
from grpo_jax.engines.http.dialects import Call
from grpo_jax.engines.http.dialects import Unusable

_END_SECS = 10.0
_SHOWN = 200  # characters of a server's words in a message


class Away(OSError):
  """No server answers, or none as it must."""


class Server:
  """One server.

  Attributes:
    url: Where it is.
    load: How many completions are drawn there, or are to be.
    has: The policies that it has been told of; None: nobody knows, because it
      has been away.
  """

  def __init__(self, url: str):
    self.url, self.load = url.rstrip('/'), 0
    self.has: set[str] | None = set()


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

  def least(self, but: Sequence[Server] = ()) -> Server:
    """The server with the fewest completions.

    Args:
      but: Those that have been tried.

    Raises:
      Away: All have been.
    """
    left = [one for one in self.every if one not in but]
    if not left:
      raise Away
    # One that was away comes last: it must be told of its policy first.
    return min(left, key=lambda one: (one.has is None, one.load))

  async def ask(self, opened: Any, server: Server, call: Call) -> Any:
    """What a server answers, as JSON says it.

    Raises:
      http_client.NotAnswered: It does not answer, or refuses.
      Unusable: The answer says that it was not done.
    """
    url = server.url + call.path
    try:
      answer = await self._client.ask(opened, url, call.body)
    except http_client.NotAnswered as error:
      if call.fine and call.fine in str(error):
        return None
      if error.status is None or error.status >= 500:
        server.has = None
      raise
    try:
      found = json.loads(answer)
    except (ValueError, RecursionError):
      found = None  # as a sentence, or nothing, says that all is well
    if call.wanted and dialects.field(found, call.wanted) is not True:
      said = answer[:_SHOWN].decode(errors='replace')
      raise Unusable(f'{call.path} without {call.wanted}: {said}')
    return found

  def run(self, do: Callable[[Any], Coroutine[Any, Any, Any]]) -> Any:
    """What a coroutine returns; it gets what `ask` needs."""
    with self.opened() as start:
      found: queue.SimpleQueue[Any] = queue.SimpleQueue()
      start(do, found.put)
      result = found.get()
    if isinstance(result, BaseException):
      raise result
    return result

  @contextlib.contextmanager
  def opened(self) -> Iterator[Callable[[Any, Callable[[Any], None]], None]]:
    """In it an event loop runs in a thread of its own.

    Yields:
      Starts a coroutine of what `ask` needs there, and calls a function in that
      thread with what it returns, or with the error that it raises. What has
      not ended when the context does is cancelled: servers then hear that
      nobody waits.
    """
    loop = asyncio.new_event_loop()
    thread = threading.Thread(
      target=loop.run_forever, name='servers', daemon=True
    )
    thread.start()
    tasks: set[asyncio.Task] = set()
    client: Any = None

    async def begin():
      nonlocal client
      client = await self._client.opened(self._concurrency).__aenter__()
      return asyncio.Semaphore(self._concurrency)

    async def end():
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

      def make():
        task = loop.create_task(one())
        tasks.add(task)
        task.add_done_callback(tasks.discard)

      loop.call_soon_threadsafe(make)

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
