"""Agents as environments: somebody's agent plays an episode over HTTP.

`play` is an environment. Each process that plays episodes has one server, on
loopback; an episode has an address of its own there, which only its agent is
told. The agent is a command, or a function that is called in this process.
"""

import asyncio
import collections
from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Mapping
import contextlib
import functools
import inspect
import json
import logging
import os
import secrets
import shlex
import shutil
import threading
from typing import Any
from typing import BinaryIO

from grpo_jax.config import importing
from grpo_jax.environments import threads
from grpo_jax.environments.base import Ended
from grpo_jax.environments.base import Policy
from grpo_jax.environments.base import Unavailable
from grpo_jax.rewards import agent_process
from grpo_jax.rewards import sandbox
from grpo_jax.serving import app
from grpo_jax.serving import listening
from grpo_jax.serving import wire
from grpo_jax.serving.episode import EpisodeService

_LOG = logging.getLogger(__name__)
PLAY = f'{__name__}:play'
"""The name of the environment."""
_HOSTS = '127.0.0.1', 'localhost'
_GRACE_SECS = 5.0  # to end by itself, once a limit is met
_MOST_TOLD = 1 << 16  # bytes of what a command prints that are kept
_MOST_ENDED = 1 << 16  # episodes that are remembered as over
_KEPT = 'PATH', 'LANG', 'LC_ALL', 'TZ', 'SSL_CERT_FILE', 'LD_LIBRARY_PATH'


class AgentFailed(Exception):
  """An agent has ended otherwise than well."""


class _Server:
  """The episodes of this process, and the server that their agents call."""

  def __init__(self):
    self._services: dict[str, EpisodeService] = {}
    self._ended: dict[str, None] = {}
    made = app.app(self._find, hosts=_HOSTS, strict=True)
    before = {*threading.enumerate()}
    self._listening = listening.Listening(made, listening.bound(_HOSTS[0]))
    self._listening.__enter__()
    threads.own.update({*threading.enumerate()} - before)

  @property
  def port(self) -> int:
    """That it listens on."""
    return self._listening.address[1]

  @contextlib.asynccontextmanager
  async def serves(self, service: EpisodeService):
    """The token of an episode, as long as it goes on."""
    token = secrets.token_urlsafe(16)
    self._services[token] = service
    try:
      yield token
    finally:
      await service.settle()
      del self._services[token]
      self._ended[token] = None
      if len(self._ended) > _MOST_ENDED:
        del self._ended[next(iter(self._ended))]
      service.end()

  def address(self, token: str) -> str:
    """Where an episode is served."""
    return f'{self._listening.origin}/e/{token}/v1'

  def _find(self, token: str | None) -> EpisodeService:
    if token is None:
      raise wire.Refused(
        401, 'There is no token; use the address that the agent was given.'
      )
    found = self._services.get(token)
    if found is None and token in self._ended:
      raise wire.Refused(410, 'The episode is over.', 'episode_over')
    if found is None:
      raise wire.Refused(404, 'There is no such episode.')
    return found


_lock = threading.Lock()


@functools.cache
def _started() -> _Server:
  return _Server()


def _server() -> _Server:
  with _lock:
    return _started()


def check(
  command: str = '',
  function: str | Callable[..., Any] = '',
  kwargs: Mapping[str, Any] | None = None,
  trains: str = '',
  confine: str = 'auto',
  **_: Any,
) -> None:
  """Checks that an agent can be played; see `play`.

  Raises:
    ValueError: A package is missing, or there is no such agent.
  """
  for name in 'starlette', 'uvicorn':
    listening.package(name)
  if trains:
    importing.imported(trains, 'config.agent.trains')
  if function:
    agent = function
    if isinstance(function, str):
      agent = importing.imported(function, 'config.agent.function')
    _parameters(agent, kwargs or {})
    return
  words = _words(command)
  if shutil.which(words[0]) is None:
    raise ValueError(
      f'config.agent.command={command!r:.80} begins with {words[0]!r}, which '
      'is no program that can be found here; correct it.'
    )
  try:
    way = agent_process.way(confine)
  except sandbox.SandboxError as error:
    raise ValueError(f'config.agent.command cannot be run: {error}') from error
  level = logging.INFO if way == 'namespaces' else logging.WARNING
  _LOG.log(level, agent_process.what_is_open(way))


def _words(command: str) -> list[str]:
  try:
    words = shlex.split(command)
  except ValueError as error:
    words, said = [], f' ({error})'
  else:
    said = ''
  if not words:
    raise ValueError(
      f'config.agent.command={command!r:.80} is no command{said}; give one '
      "such as 'python my_agent.py'."
    )
  return words


def _parameters(agent: Any, kwargs: Mapping[str, Any]) -> Collection[str]:
  """The names of the parameters of a function that is an agent.

  Raises:
    ValueError: It cannot be called as one.
  """
  given = ['example', 'base_url', 'api_key', *kwargs]
  signature = inspect.signature(agent)
  names = signature.parameters
  given += [name for name in ('secret',) if name in names]
  try:
    signature.bind(**dict.fromkeys(given))
  except TypeError as error:
    raise ValueError(
      f'config.agent.function takes {signature}, but is called with '
      f'({", ".join(f"{name}=..." for name in given)}): {error}; correct one '
      'of the two.'
    ) from error
  return names


async def play(
  policy: Policy,
  example: Mapping[str, Any],
  *,
  command: str = '',
  function: str | Callable[..., Any] = '',
  kwargs: Mapping[str, Any] | None = None,
  variables: Mapping[str, str] | None = None,
  readable: Collection[str] = (),
  confine: str = 'auto',
  trains: str = '',
  trust_agent: bool = False,
) -> float | None:
  """Lets an agent play an episode; see `config.Agent` for the arguments.

  Returns:
    What the agent says that it is worth, if it is trusted; else None.

  Raises:
    AgentFailed: It has ended with another code than 0.
    Ended: A limit was met.
    Unavailable: It cannot be started beside what others have started.
  """
  wanted = importing.imported(trains, 'agent.trains') if trains else None
  service = EpisodeService(policy, trust_agent, wanted)
  server = await asyncio.to_thread(_server)
  async with server.serves(service) as token:
    address = server.address(token)
    if command:
      env = {name: os.environ[name] for name in _KEPT if name in os.environ}
      env |= {'OPENAI_BASE_URL': address, 'OPENAI_API_BASE': address}
      env |= {'OPENAI_API_KEY': token, 'NO_PROXY': '*', **(variables or {})}
      start = functools.partial(
        agent_process.start,
        _words(command),
        port=server.port,
        env=env,
        readable=tuple(readable),
        confine=confine,
      )
      running = _run(start, example, service)
    else:
      running = _call(function, example, address, token, service, kwargs or {})
    value = await _until_limit(running, service)
  return value if trust_agent else None


async def _until_limit(running: Any, service: EpisodeService) -> float | None:
  """What an agent returns, which has a while once a limit is met."""
  task = asyncio.ensure_future(running)
  met = asyncio.ensure_future(service.met.wait())
  try:
    await asyncio.wait({task, met}, return_when=asyncio.FIRST_COMPLETED)
    if service.fault is None and service.limit:
      await asyncio.wait({task}, timeout=_GRACE_SECS)
  finally:
    met.cancel()
    if not task.done():
      task.cancel()
      await asyncio.wait({task})
  if service.fault is not None:
    raise service.fault
  if service.limit:  # however the agent took it
    with contextlib.suppress(asyncio.CancelledError, Exception):
      task.result()  # so that nobody misses it
    raise Ended(service.limit)
  return task.result()


async def _call(
  function: str | Callable[..., Any],
  example: Mapping[str, Any],
  address: str,
  token: str,
  service: EpisodeService,
  kwargs: Mapping[str, Any],
) -> float | None:
  """Calls a function that is an agent."""
  agent: Any = function
  if isinstance(function, str):
    agent = importing.imported(function, 'agent.function')
  given = {**kwargs, 'example': dict(example)}
  given |= {'base_url': address, 'api_key': token}
  if 'secret' in _parameters(agent, kwargs):
    given['secret'] = service.secret
  if inspect.iscoroutinefunction(agent):
    value = await agent(**given)
  else:
    value = await asyncio.to_thread(agent, **given)
  return None if value is None else float(value)


async def _run(
  start: Callable[[], agent_process.Process],
  example: Mapping[str, Any],
  service: EpisodeService,
) -> float | None:
  """Runs a command that is an agent, and ends all that it has started."""
  said = json.dumps(example).encode() + b'\n'
  if service.is_trusted:
    said += service.secret.encode() + b'\n'
  printed, errors, started = _Tail(), _Tail(), _Started()
  try:
    try:
      process = await asyncio.to_thread(started.start, start)
    except sandbox.SandboxError as error:
      raise AgentFailed(f'cannot start: {error}') from error
    except (BlockingIOError, MemoryError, RuntimeError) as error:
      # Others have used up the processes, threads or memory of this worker.
      raise Unavailable(f'no room for an agent: {error}') from error
    except (OSError, ValueError) as error:
      raise AgentFailed(f'cannot start: {error}') from error
    talks = (
      asyncio.to_thread(_tell, process.stdin, said),
      asyncio.to_thread(printed.read, process.stdout),
      asyncio.to_thread(errors.read, process.stderr),
    )
    talking = [*map(asyncio.ensure_future, talks)]
    over, loop = asyncio.Event(), asyncio.get_running_loop()
    loop.add_reader(process.status, over.set)
    try:
      await over.wait()
    finally:
      loop.remove_reader(process.status)
  finally:
    started.leave()  # at once, whoever waits for the rest
    ending = asyncio.ensure_future(asyncio.to_thread(started.end))
    await asyncio.shield(ending)
  await asyncio.wait(talking)
  ended = ending.result()
  if ended.failure:
    how = f'was ended by {ended.failure}'
    if ended.failure.startswith('exit '):
      how = f'exited with {ended.failure.removeprefix("exit ")}'
    last = errors.last() or printed.last()
    raise AgentFailed(f'{how}: {last:.200}' if last else how)
  return _worth(printed.last()) if service.is_trusted else None


class _Started:
  """A process that is ended, though nobody may be there when it has started."""

  def __init__(self):
    self._lock = threading.Lock()
    self._process: agent_process.Process | None = None
    self._is_left = False

  def start(
    self, start: Callable[[], agent_process.Process]
  ) -> agent_process.Process:
    """Starts it."""
    process = start()
    with self._lock:
      self._process = process
      is_left = self._is_left
    if is_left:
      process.end()
    return process

  def leave(self) -> None:
    """Tells it to end, also if it is only about to be started."""
    with self._lock:
      self._is_left = True
      process = self._process
    if process is not None:
      process.close()

  def end(self) -> Any:
    """Ends it, and says how it ended; None if it has not been started."""
    return self._process and self._process.end()


def _worth(line: str) -> float | None:
  """The reward in what was printed last; None if it is none."""
  try:
    return float(line)
  except ValueError:
    return None


def _tell(stream: BinaryIO, data: bytes) -> None:
  """Writes to a process, which need not read."""
  with contextlib.suppress(OSError, ValueError), stream:
    left = memoryview(data)
    while left:
      left = left[stream.write(left) :]


class _Tail:
  """The end of all that a process prints."""

  def __init__(self):
    self._kept: collections.deque[bytes] = collections.deque()

  def read(self, stream: BinaryIO) -> None:
    """Reads until nobody can write any more, and closes it."""
    size = 0
    with stream:
      while part := stream.read(1 << 16):
        self._kept.append(part)
        size += len(part)
        while size - len(self._kept[0]) >= _MOST_TOLD:
          size -= len(self._kept.popleft())

  def last(self) -> str:
    """The last line that is not empty."""
    text = b''.join(self._kept)[-_MOST_TOLD:].decode(errors='replace')
    return ([line for line in text.splitlines() if line.strip()] or [''])[-1]
