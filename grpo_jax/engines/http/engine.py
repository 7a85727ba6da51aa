"""An engine of others, asked over HTTP through the same protocol.

Requests go in and what was sampled comes out, as with `LocalEngine`; nobody
above knows the difference. Every completion is a request of its own, with a
seed that has the bits of its key, so what is drawn does not depend on which
server draws it, nor on how often it is asked for.
"""

import asyncio
from collections.abc import Callable
from collections.abc import Generator
from concurrent.futures import Future
import contextlib
import dataclasses
import pathlib
import queue
from typing import Any

import numpy as np

from grpo_jax.config import http_client
from grpo_jax.engines import protocol
from grpo_jax.engines.http import dialects
from grpo_jax.engines.http import servers as servers_lib
from grpo_jax.engines.http.versions import Versions

_TURN_SECS = 0.2  # after which the caller has its turn, whatever has come
_KEPT = 2  # policies that a server has: the newest, and the one before
_END_SECS = 5.0  # in which servers forget the policies of a run that ends


@dataclasses.dataclass(frozen=True)
class _Waiting:
  """A request whose completions are asked for."""

  number: int
  request: protocol.Request
  home: servers_lib.Server


class HttpEngine:
  """Samples from servers; see `protocol.Engine`.

  Args:
    servers: They draw.
    dialect: How they are asked.
    versions: Writes parameters where the servers read them.
    adapters: Whether what is written is an adapter, which gets a name of its
      own for every version. Otherwise all weights are replaced.

  Attributes:
    versions: See `versions`.
    tell: Is told what people should know.
  """

  capabilities = protocol.Capabilities(filters=False, queues=True)

  def __init__(
    self,
    servers: servers_lib.Servers,
    dialect: dialects.Dialect,
    versions: Versions,
    adapters: bool,
  ):
    self.versions = versions
    self.tell: Callable[[str], None] = lambda text: None
    self._servers, self._dialect, self._adapters = servers, dialect, adapters
    self._newest = '', ''  # the policy to draw by, and its folder
    # The versions of policies, the one that was taken last behind the others.
    self._named: dict[str, int] = {}
    self._waiting: list[_Waiting] = []
    self._homes: dict[int, servers_lib.Server] = {}
    self._forgotten: set[int] = set()
    self._count = 0

  def load(self, params: Any, version: int) -> None:
    """See `Engine`; the servers read the parameters from files."""
    self.versions.publish(params, version)
    self.take(self.versions.fetch(version), version)
    self.versions.drop({version})

  def take(self, params: Any, version: int) -> None:
    """See `Engine`.

    Args:
      params: The folder with the parameters.
      version: How many rollouts the policy has learned from.

    Raises:
      Away: No server has taken them.
    """
    policy = pathlib.Path(params).name
    self._named.pop(policy, None)
    self._named[policy] = version

    async def bring(opened, server):
      try:
        async with server.alone():
          await self._bring(opened, server, policy, params)
      except (http_client.NotAnswered, dialects.Unusable) as error:
        server.lose(str(error), server.told)
        return f'{server.url}: {error}'

    async def bring_to_all(opened):
      every = [bring(opened, server) for server in self._servers.every]
      return [error for error in await asyncio.gather(*every) if error]

    errors = self._servers.run(bring_to_all)
    self._newest = policy, params
    if len(errors) == len(self._servers.every):
      raise servers_lib.Away(
        f'No server has taken version {version}: {"; ".join(errors)}. See that '
        'they run, and read the folder in config.engine.folder.'
      )
    for error in errors:
      self.tell(f'Version {version} goes on without a server: {error}.')

  def unload(self) -> None:
    """See `Engine`; the servers keep what they have."""

  def close(self) -> None:
    """Lets the servers forget its adapters, and removes all folders."""

    async def forget(opened, server):
      for policy in await self._own(opened, server):
        with contextlib.suppress(http_client.NotAnswered, dialects.Unusable):
          await self._unload(opened, server, policy)

    async def forget_all(opened):
      every = [forget(opened, server) for server in self._servers.every]
      with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_END_SECS):
          await asyncio.gather(*every)

    if self._adapters and self._named:
      self._servers.run(forget_all)
    self.versions.close()

  def submit(self, request: protocol.Request) -> int:
    """See `Engine`."""
    number, self._count = self._count, self._count + 1
    before = request.follows and self._homes.get(request.follows[0])
    home = before or self._servers.least()
    home.drawing |= {(number, n) for n in range(len(request.keys))}
    if request.calls:
      self._homes[number] = home
    self._waiting.append(_Waiting(number, request, home))
    return number

  def forget(self, request: int) -> None:
    """See `Engine`."""
    self._homes.pop(request, None)
    self._forgotten.add(request)

  def completed(
    self, every_tokens: int | None = None
  ) -> Generator[list[protocol.Sampled], None, None]:
    """See `Engine`; nothing is reported that goes on.

    Raises:
      Away: No server draws.
    """
    del every_tokens
    if not self._named:
      raise ValueError('An engine has no parameters before `load`.')
    found: queue.SimpleQueue[Any] = queue.SimpleQueue()
    left: dict[int, int] = {}  # completions that have not come, by request
    started: dict[int, tuple[servers_lib.Server, list[Future]]] = {}
    try:
      with self._servers.opened() as start:
        while self._waiting or left:
          for one in self._waiting:
            count = len(one.request.keys)
            left[one.number] = count
            started[one.number] = (
              one.home,
              [self._start(start, one, n, found.put) for n in range(count)],
            )
          self._waiting = []
          turn = []
          for number in [n for n in left if n in self._forgotten]:
            del left[number]
            home, its = started.pop(number)
            for n, one in enumerate(its):
              one.cancel()
              home.drawing.discard((number, n))
          for number, one in _heard(found):
            if number not in left:
              continue
            if isinstance(one, BaseException):
              raise one
            turn.append(one)
            left[number] -= 1
            if not left[number]:
              del left[number], started[number]
          yield turn
    finally:
      self._waiting, self._forgotten = [], set()
      for server in self._servers.every:
        server.drawing.clear()

  def _start(
    self,
    start: Any,
    waiting: _Waiting,
    number: int,
    tell: Callable[[Any], None],
  ) -> Future:
    """Asks for a completion; what is told has the number of its request."""
    request, home = waiting.request, waiting.home

    def draw(opened, server):
      return self._drawn(opened, server, request, number)

    async def ask(opened):
      drawn = await self._servers.by_any(
        opened, draw, request.name, home, self._forgets
      )
      return self._sampled(waiting.number, number, drawn)

    def end(one):
      home.drawing.discard((waiting.number, number))
      tell((waiting.number, one))

    return start(ask, end)

  def _forgets(self, error: http_client.NotAnswered) -> bool:
    """Whether a server that refuses may just not know the policy."""
    return self._adapters and error.status in (400, 404)

  def _sampled(
    self, request: int, number: int, drawn: dialects.Drawn
  ) -> protocol.Sampled:
    """What has been drawn, as the protocol has it."""
    return protocol.Sampled(
      request,
      number,
      drawn.ids,
      drawn.logp,
      np.zeros(len(drawn.ids), np.float32),
      self._versions_of(drawn),
      drawn.finish,
    )

  async def _drawn(
    self,
    opened: Any,
    server: servers_lib.Server,
    request: protocol.Request,
    number: int,
  ) -> dialects.Drawn:
    """A completion by one server, by the policy that is the newest by then.

    Raises:
      http_client.NotAnswered: It does not answer, or refuses.
      Unusable: By its answer, or it is of another policy.
    """
    await self._bring_back(opened, server)
    asked = dialects.Completion(
      request.ids,
      dialects.key_to_seed(request.keys[number]),
      request.limit,
      request.sampling,
      self._newest[0],
    )
    call, told = self._dialect.complete(asked), server.told
    try:
      answer = await self._servers.ask(opened, server, call)
    except http_client.NotAnswered as error:
      if self._forgets(error):
        server.lose(str(error), told)
      if server.told != told:  # it refuses while it is told, and not after
        raise dialects.GivenUp(str(error)) from None
      raise
    drawn = self._dialect.drawn(answer, asked)
    oldest = self._named[asked.policy]
    for policy, _ in drawn.spans:
      if self._named.get(policy, -1) < oldest:
        why = f'a completion by {policy!r:.60} in place of {asked.policy!r}'
        server.lose(why, told)  # it has other weights than it was told of
        raise dialects.Unusable(why)
    return drawn

  def _versions_of(self, drawn: dialects.Drawn) -> np.ndarray:
    """i32[t], which version drew each token."""
    found, begin = np.zeros(len(drawn.ids), np.int32), 0
    for policy, end in drawn.spans:
      found[begin:end], begin = self._named[policy], end
    return found

  async def _bring_back(self, opened: Any, server: servers_lib.Server) -> None:
    """Tells a server of the policy, if it has been away; one task does it.

    Raises:
      http_client.NotAnswered: It is still away.
      Unusable: It has not taken the policy.
    """
    async with server.alone() as waited:
      if server.has is None and waited:
        raise http_client.NotAnswered(server.why)
      if server.has is None:
        await self._bring(opened, server, *self._newest)

  async def _bring(
    self, opened: Any, server: servers_lib.Server, policy: str, folder: str
  ) -> None:
    """Tells a server of a policy, and lets it forget older ones."""
    has = server.has or ()
    if policy in (has if self._adapters else has[-1:]):
      return
    server.told += 1
    if self._adapters and not has:
      has = await self._clear(opened, server)
    if not self._adapters:
      calls = self._dialect.load_weights(policy, folder)
    else:
      calls = self._dialect.load_adapter(policy, folder)
    for call in calls:
      await self._servers.ask(opened, server, call)
    known = *(one for one in has if one != policy), policy
    for old in known[:-_KEPT] if self._adapters else ():
      await self._unload(opened, server, old)
    server.has = known[-_KEPT:]

  async def _clear(
    self, opened: Any, server: servers_lib.Server
  ) -> tuple[str, ...]:
    """Lets a server forget adapters of the run that nobody will ask for.

    A start that was killed has left them, or this one while the server could
    not be reached.

    Returns:
      The last policies of this start, as far as the server has them.

    Raises:
      http_client.NotAnswered: It does not answer.
    """
    try:
      listed = await self._listed(opened, server)
    except dialects.Unusable:
      return ()
    except http_client.NotAnswered as error:
      if error.status is None or error.status >= 500:
        raise
      return ()  # it does not tell what it has
    last = [*self._named][-_KEPT:]
    for name in listed:
      if name.startswith(f'{self.versions.run}-') and name not in last:
        # What stays takes memory there, and the next start tries again.
        with contextlib.suppress(http_client.NotAnswered, dialects.Unusable):
          await self._unload(opened, server, name)
    return tuple(name for name in last if name in listed)

  async def _own(self, opened: Any, server: servers_lib.Server) -> list[str]:
    """The policies of this start that a server has, as far as anybody knows."""
    if server.has is not None:
      return [*server.has]
    try:  # it was away, or refused something, and may have them even so
      listed = await self._listed(opened, server)
    except (http_client.NotAnswered, dialects.Unusable):
      return []
    return [name for name in listed if name in self._named]

  async def _listed(self, opened: Any, server: servers_lib.Server) -> list[str]:
    """The names of the models and adapters that a server has."""
    answer = await self._servers.ask(opened, server, dialects.MODELS)
    return dialects.names(answer)

  async def _unload(
    self, opened: Any, server: servers_lib.Server, policy: str
  ) -> None:
    for call in self._dialect.unload_adapter(policy):
      await self._servers.ask(opened, server, call)


def _heard(found: queue.SimpleQueue[Any]) -> list[Any]:
  """What has come; waits for a while if nothing has."""
  turn = []
  try:
    turn.append(found.get(timeout=_TURN_SECS))
    while True:
      turn.append(found.get_nowait())
  except queue.Empty:
    return turn
