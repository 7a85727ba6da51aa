"""An engine of others, asked over HTTP through the same protocol.

Requests go in and what was sampled comes out, as with `LocalEngine`; nobody
above knows the difference. Every completion is a request of its own, with a
seed that has the bits of its key, so what is drawn does not depend on which
server draws it, nor on how often it is asked for.
"""

from collections.abc import Callable
from collections.abc import Generator
from collections.abc import Sequence
import dataclasses
import queue
import secrets
from typing import Any

import numpy as np

from grpo_jax.config import http_client
from grpo_jax.engines import protocol
from grpo_jax.engines.http import dialects
from grpo_jax.engines.http import servers as servers_lib
from grpo_jax.engines.http.versions import Versions

_TURN_SECS = 0.2  # after which the caller has its turn, whatever has come
_TRIES = 4  # of a completion that a server gives up, or answers unusably
_KEPT = 2  # policies that a server is left with, beside those that draw


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
    say: Is told what people should know.
  """

  capabilities = protocol.Capabilities(filters=False, queues=True)

  def __init__(
    self,
    servers: servers_lib.Servers,
    dialect: dialects.Dialect,
    versions: Versions,
    adapters: bool,
    say: Callable[[str], None] = lambda text: None,
  ):
    self.versions = versions
    self._servers, self._dialect, self._adapters = servers, dialect, adapters
    self._say, self._run = say, secrets.token_hex(4)
    self._folder, self._version = '', -1
    self._named: dict[str, int] = {}  # the versions of policies
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
    self._folder, self._version = params, version
    self._named[self._policy] = version

    async def bring_to_all(opened):
      errors = []
      for server in self._servers.every:
        try:
          await self._bring(opened, server)
        except (http_client.NotAnswered, dialects.Unusable) as error:
          errors.append(f'{server.url} answers {error}')
          server.has = None
      return errors

    errors = self._servers.run(bring_to_all)
    if len(errors) == len(self._servers.every):
      raise servers_lib.Away(
        f'No server has taken version {version}: {"; ".join(errors)}. See that '
        'they run, and read the folder in config.engine.folder.'
      )
    for error in errors:
      self._say(f'Version {version} goes on without a server: {error}.')

  def unload(self) -> None:
    """See `Engine`; the servers keep what they have."""

  def submit(self, request: protocol.Request) -> int:
    """See `Engine`."""
    number, self._count = self._count, self._count + 1
    before = request.follows and self._homes.get(request.follows[0])
    home = before or self._servers.least()
    home.load += len(request.keys)
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
    if not self._folder:
      raise ValueError('An engine has no parameters before `load`.')
    found: queue.SimpleQueue[Any] = queue.SimpleQueue()
    left: dict[int, int] = {}  # completions that have not come, by request
    try:
      with self._servers.opened() as start:
        while self._waiting or left:
          for one in self._waiting:
            left[one.number] = len(one.request.keys)
            for number in range(len(one.request.keys)):
              self._start(start, one, number, found.put)
          self._waiting = []
          turn = [x for x in _heard(found) if x.request in left]
          for one in turn:
            left[one.request] -= 1
          for number in [
            n for n in left if n in self._forgotten or not left[n]
          ]:
            del left[number]
          yield turn
    finally:
      self._waiting, self._forgotten = [], set()
      for server in self._servers.every:
        server.load = 0

  def _start(
    self,
    start: Any,
    waiting: _Waiting,
    number: int,
    tell: Callable[[Any], None],
  ) -> None:
    """Asks for a completion."""
    policy = self._policy

    async def ask(opened):
      try:
        return await self._sampled(opened, waiting, number, policy)
      finally:
        waiting.home.load -= 1

    start(ask, tell)

  async def _sampled(
    self, opened: Any, waiting: _Waiting, number: int, policy: str
  ) -> protocol.Sampled:
    """One completion, by the first server that draws it."""
    request = waiting.request
    asked = dialects.Completion(
      request.ids,
      dialects.key_to_seed(request.keys[number]),
      request.limit,
      request.sampling,
      policy,
    )
    tried: list[servers_lib.Server] = []
    errors: list[str] = []
    server, tries = waiting.home, 0
    while True:
      try:
        drawn = await self._drawn(opened, server, asked)
        break
      except dialects.Unusable as error:
        errors.append(f'{server.url} gives {error}')
        tries += 1
      except http_client.NotAnswered as error:
        errors.append(f'{server.url} answers {error}')
        if error.status is not None and error.status < 500:
          server.has = None  # it may have forgotten the policy
          tries += 1
        else:
          tried.append(server)
      try:
        if tries == _TRIES:
          raise servers_lib.Away
        server = self._servers.least(tried)
      except servers_lib.Away:
        said = '; '.join(dict.fromkeys(errors))
        raise servers_lib.Away(
          f'No server completes {request.name}: {said}.'
        ) from None
    return protocol.Sampled(
      waiting.number,
      number,
      drawn.ids,
      drawn.logp,
      np.zeros(len(drawn.ids), np.float32),
      self._versions_of(drawn),
      drawn.finish,
    )

  async def _drawn(
    self, opened: Any, server: servers_lib.Server, asked: dialects.Completion
  ) -> dialects.Drawn:
    """A completion by one server, which is told of the policy if need be.

    Raises:
      http_client.NotAnswered: It does not answer, or refuses.
      Unusable: By its answer, or it is of another policy.
    """
    if server.has is None:
      await self._bring(opened, server)
    call = self._dialect.complete(asked)
    answer = await self._servers.ask(opened, server, call)
    drawn = self._dialect.drawn(answer, asked)
    oldest = self._named[asked.policy]
    for policy, _ in drawn.spans:
      if self._named.get(policy, -1) < oldest:
        server.has = None  # it has other weights than it was told of
        raise dialects.Unusable(
          f'a completion by {policy!r:.60}, though {asked.policy!r} was asked '
          'for'
        )
    return drawn

  def _versions_of(self, drawn: dialects.Drawn) -> np.ndarray:
    """i32[t], which version drew each token."""
    found, begin = np.zeros(len(drawn.ids), np.int32), 0
    for policy, end in drawn.spans:
      found[begin:end], begin = self._named[policy], end
    return found

  @property
  def _policy(self) -> str:
    """By which name the servers know the policy."""
    return f'{self._run}-{self._version}'

  async def _bring(self, opened: Any, server: servers_lib.Server) -> None:
    """Tells a server of the policy, and lets it forget older ones."""
    policy, folder = self._policy, self._folder
    if server.has is not None and policy in server.has:
      return
    if not self._adapters:
      calls = self._dialect.load_weights(policy, folder)
    else:
      calls = self._dialect.load_adapter(policy, folder)
    for call in calls:
      await self._servers.ask(opened, server, call)
    known = {*(server.has or ()), policy}
    for old in sorted(known, key=self._named.__getitem__)[:-_KEPT]:
      if self._adapters:
        for call in self._dialect.unload_adapter(old):
          await self._servers.ask(opened, server, call)
      known.discard(old)
    server.has = known

  def score(
    self, texts: Sequence[Sequence[int]], top: int = 0
  ) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """The log-probabilities of known tokens; see `Dialect.scored`."""
    policy = self._policy
    found: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with self._servers.opened() as start:
      for number, ids in enumerate(texts):

        async def ask(opened, number=number, ids=ids):
          server = self._servers.least()
          call = self._dialect.score(ids, top, policy)
          answer = await self._servers.ask(opened, server, call)
          return number, self._dialect.scored(answer, ids, top)

        start(ask, found.put)
      scored = dict(_one(found) for _ in texts)
    return [scored[number] for number in range(len(texts))]


def _one(found: queue.SimpleQueue[Any]) -> Any:
  """The next that has come; raises it if it is an error."""
  one = found.get()
  if isinstance(one, BaseException):
    raise one
  return one


def _heard(found: queue.SimpleQueue[Any]) -> list[protocol.Sampled]:
  """What has come; waits for a while if nothing has."""
  turn: list[protocol.Sampled] = []
  try:
    one = found.get(timeout=_TURN_SECS)
    while True:
      if isinstance(one, BaseException):
        raise one
      turn.append(one)
      one = found.get_nowait()
  except queue.Empty:
    return turn
