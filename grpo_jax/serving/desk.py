"""A thread that owns an engine, and draws for whoever asks.

Devices are used by this thread alone. What is asked while others are drawn
joins them; what nobody waits for any more is given up. There may be several
policies, which draw in turn: one begins when nothing is drawn by another, with
all that waits for it.
"""

import asyncio
from collections.abc import Callable
from collections.abc import Sequence
import contextlib
import dataclasses
import logging
import queue
import threading
from typing import Any
from typing import NamedTuple

from grpo_jax import engines
from grpo_jax.engines.scoring import Known
from grpo_jax.engines.scoring import Scorer

_LOG = logging.getLogger(__name__)
_END_SECS = 60.0
_LOOK_SECS = 0.01


class Closed(Exception):
  """The desk draws no more."""


@dataclasses.dataclass(eq=False)
class _Job:
  """A request that waits or is drawn.

  Attributes:
    request: What is asked.
    heard: Is told what there is so far; None: nobody wants to know.
    loop: Where `heard` is called, and `future` is waited for.
    future: Of what was drawn.
    policy: The name of the policy that draws.
    number: What the engine has returned; None while it waits here.
    drawn_by: The policy that draws, whatever has its name by now.
  """

  request: engines.Request
  heard: Callable[[engines.Sampled], None] | None
  loop: asyncio.AbstractEventLoop
  future: asyncio.Future
  policy: str = ''
  number: int | None = None
  drawn_by: '_Policy | None' = None


class Drawn(NamedTuple):
  """What was drawn.

  Attributes:
    sampled: By the engine.
    version: What clients are told of the parameters that drew it.
  """

  sampled: engines.Sampled
  version: str


@dataclasses.dataclass(eq=False)
class _Text:
  """A text that waits to be scored."""

  ids: Sequence[int]
  top: int
  temperature: float
  policy: str
  loop: asyncio.AbstractEventLoop
  future: asyncio.Future


@dataclasses.dataclass(eq=False)
class _Policy:
  """A policy.

  Attributes:
    score: Has its parameters.
    version: What clients are told of these.
  """

  score: Scorer
  version: str


@dataclasses.dataclass(eq=False)
class _Work:
  """Something else that the thread does."""

  do: Callable[[], Any]
  loop: asyncio.AbstractEventLoop
  future: asyncio.Future


_FIRST_LOAD = 2**30  # above the version that the engine came with


class Paused(Exception):
  """The desk draws nothing for a while."""


class Desk:
  """Draws and scores; a context manager, inside which its thread runs.

  Args:
    engine: With parameters, and one that `queues`. Nobody else uses it.
    score: Scores texts that are known.
    rows: How many requests are drawn at once, at most; others wait.

  Attributes:
    is_paused: Whether it draws nothing for a while.
    is_closed: Whether it draws no more.
  """

  def __init__(self, engine: engines.Engine, score: Scorer, rows: int):
    self._engine, self._rows = engine, rows
    self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    self._jobs: dict[int, _Job] = {}  # by the numbers of the engine
    self._later: list[_Job] = []  # until nothing is drawn by another policy
    self._policies = {'': _Policy(score, 'default')}
    self._loads = _FIRST_LOAD
    self.is_paused = False
    self._loaded: str | None = ''  # None: the newest of its name is not
    self._turns: Any = iter(())
    # The last request that has finished, while nothing else is drawn: an
    # engine that keeps nothing gives up its caches, and makes them anew.
    self._kept: int | None = None
    self.is_closed = False
    self._thread = threading.Thread(target=self._run, name='desk', daemon=True)

  def __enter__(self) -> 'Desk':
    self._thread.start()
    return self

  def __exit__(self, *_) -> None:
    self.is_closed = True
    self._inbox.put(None)
    self._thread.join(_END_SECS)
    self._refuse_waiting()

  async def draw(
    self,
    request: engines.Request,
    heard: Callable[[engines.Sampled], None] | None = None,
    policy: str = '',
  ) -> Drawn:
    """Draws what is asked; whoever is cancelled gives it up.

    Args:
      request: Of one completion.
      heard: Is called with what there is so far, token by token.
      policy: The name of the policy that draws; ''  is the first.

    Raises:
      ValueError: The engine refuses it, or there is no such policy.
      Paused: The desk draws nothing for a while.
      Closed: The desk draws no more.
    """
    if self.is_paused:
      raise Paused
    loop = asyncio.get_running_loop()
    request = request._replace(calls=self._rows)
    job = _Job(request, heard, loop, loop.create_future(), policy)
    self._put(job)
    try:
      return await job.future
    except asyncio.CancelledError:
      self._put(lambda: self._give_up(job))
      raise

  async def score(
    self,
    ids: Sequence[int],
    top: int = 0,
    temperature: float = 1.0,
    policy: str = '',
  ) -> Known:
    """Scores a text; see `Scorer`."""
    loop = asyncio.get_running_loop()
    text = _Text(ids, top, temperature, policy, loop, loop.create_future())
    self._put(text)
    return await text.future

  def policies(self) -> list[str]:
    """The names of the policies but the first."""
    return [name for name in self._policies if name]

  async def pause(self) -> None:
    """Draws nothing new; returns when nothing is drawn any more."""
    self.is_paused = True
    # Asked in the thread, which has then taken what was asked before.
    while await self._do(lambda: bool(self._jobs or self._later)):
      await asyncio.sleep(_LOOK_SECS)

  def name_version(self, version: str) -> None:
    """What clients are told of the first policy as it is."""
    self._policies[''].version = version

  async def know(
    self, policy: str, read: Callable[[], Any], version: str = 'default'
  ) -> None:
    """Makes a policy known by a name, or another one known by it.

    Args:
      policy: The name.
      version: See `version`.
      read: Returns its parameters, in the thread of the desk. What is being
        drawn by the one before is drawn by it to its end.

    Raises:
      Exception: What `read` raises; nothing has changed then.
    """

    def replace():
      first = self._policies[''].score
      score = dataclasses.replace(first, params=read())
      self._policies[policy] = _Policy(score, version)
      if policy == self._loaded:
        self._loaded = None  # it is loaded once nothing is drawn

    await self._do(replace)

  async def forget(self, policy: str) -> None:
    """Forgets a policy, if there is one of that name."""
    await self._do(lambda: self._policies.pop(policy, None))

  async def _do(self, do: Callable[[], Any]) -> Any:
    loop = asyncio.get_running_loop()
    work = _Work(do, loop, loop.create_future())
    self._put(work)
    return await work.future

  def _put(self, what: Any) -> None:
    if self.is_closed:
      raise Closed
    self._inbox.put(what)
    if self.is_closed and not self._thread.is_alive():
      self._refuse_waiting()  # it ended meanwhile, and nobody takes this

  def _run(self) -> None:
    while self._take():
      try:
        if (turn := next(self._turns, None)) is None:
          self._turns = self._engine.completed(every_tokens=1)
          continue
        for one in turn:
          self._hear(one)
      except Exception as error:  # the engine has given up what was drawn
        _LOG.exception('The engine has failed.')
        self._turns, self._kept = iter(()), None
        self._fail(error)
    self._end_turns()

  def _end_turns(self) -> None:
    """Nothing is drawn any more."""
    with contextlib.suppress(AttributeError):
      self._turns.close()
    self._turns = iter(())
    self._forget_kept()

  def _take(self) -> bool:
    """Does what others want; waits if nothing is drawn. False: it ends."""
    while not self.is_closed:
      self._begin()
      try:
        what = self._inbox.get(block=not self._jobs)
      except queue.Empty:
        return True
      if isinstance(what, _Job):
        self._later.append(what)
      elif isinstance(what, _Text):
        self._score_now(what)
      elif isinstance(what, _Work):
        self._do_now(what)
      elif what is not None:
        what()
    self._fail(Closed())
    self._refuse_waiting()
    return False

  def _begin(self) -> None:
    """Submits what waits, as far as one policy draws it."""
    while self._later and not self.is_closed:
      job = self._later[0]
      if job.policy not in self._policies:
        error = ValueError(f'There is no policy {job.policy!r:.80} here.')
        _tell(job.loop, _end, self._later.pop(0).future, error)
      elif job.policy == self._loaded:
        self._submit(self._later.pop(0))
      elif self._jobs:
        return
      else:
        self._load(job.policy)

  def _load(self, policy: str) -> None:
    """Gives the engine, which draws nothing, another policy."""
    self._end_turns()
    self._loads, self._loaded = self._loads + 1, None
    try:
      self._engine.load(self._policies[policy].score.params, self._loads)
    except Exception as error:
      job = self._later.pop(0)
      _tell(job.loop, _end, job.future, error)
      return
    self._loaded = policy
    # What waits for it goes first, and in its order: what is asked from here on
    # comes behind those that wait for others.
    self._later.sort(key=lambda job: job.policy != policy)

  def _do_now(self, work: _Work) -> None:
    try:
      found = work.do()
    except Exception as error:
      found = error
    _tell(work.loop, _end, work.future, found)

  def _refuse_waiting(self) -> None:
    for job in self._later:
      _tell(job.loop, _end, job.future, Closed())
    self._later = []
    with contextlib.suppress(queue.Empty):
      while True:  # several threads may do this: whoever comes late waits not
        what = self._inbox.get_nowait()
        if isinstance(what, _Job | _Text | _Work):
          _tell(what.loop, _end, what.future, Closed())

  def _submit(self, job: _Job) -> None:
    if job.future.cancelled():
      return
    job.drawn_by = self._policies[job.policy]
    try:
      job.number = self._engine.submit(job.request)
    except Exception as error:
      _tell(job.loop, _end, job.future, error)
      return
    self._jobs[job.number] = job
    self._forget_kept()

  def _score_now(self, text: _Text) -> None:
    if text.future.cancelled():
      return
    try:
      score = self._policies[text.policy].score
      found: Any = score(text.ids, text.top, text.temperature)
    except KeyError:
      found = ValueError(f'There is no policy {text.policy!r:.80} here.')
    except Exception as error:
      found = error
    _tell(text.loop, _end, text.future, found)

  def _hear(self, one: engines.Sampled) -> None:
    """Tells who waits for it what was drawn."""
    job = self._jobs.get(one.request)
    if job is None:
      return
    if one.finish == engines.GOING:
      if job.heard is not None:
        _tell(job.loop, job.heard, one)
      return
    del self._jobs[one.request]
    self._kept = one.request
    if self._jobs:
      self._forget_kept()
    assert job.drawn_by is not None
    drawn = Drawn(one, job.drawn_by.version)
    _tell(job.loop, _end, job.future, drawn)

  def _give_up(self, job: _Job) -> None:
    if job in self._later:
      self._later.remove(job)
    elif job.number is not None and self._jobs.pop(job.number, None):
      self._engine.forget(job.number)

  def _forget_kept(self) -> None:
    kept, self._kept = self._kept, None
    if kept is not None:
      self._engine.forget(kept)

  def _fail(self, error: Exception) -> None:
    jobs, self._jobs = self._jobs, {}
    for job in jobs.values():
      _tell(job.loop, _end, job.future, error)


def _tell(loop: asyncio.AbstractEventLoop, do: Any, *given: Any) -> None:
  """Calls something in an event loop, unless that is gone."""
  with contextlib.suppress(RuntimeError):
    loop.call_soon_threadsafe(do, *given)


def _end(future: asyncio.Future, found: Any) -> None:
  if future.done():
    return
  if isinstance(found, Exception):
    future.set_exception(found)
  else:
    future.set_result(found)
