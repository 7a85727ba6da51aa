"""A thread that owns an engine, and draws for whoever asks.

Devices are used by this thread alone. What is asked while others are drawn
joins them; what nobody waits for any more is given up.
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

from grpo_jax import engines
from grpo_jax.engines.scoring import Known
from grpo_jax.engines.scoring import Scorer

_LOG = logging.getLogger(__name__)
_END_SECS = 60.0


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
    number: What the engine has returned; None while it waits here.
  """

  request: engines.Request
  heard: Callable[[engines.Sampled], None] | None
  loop: asyncio.AbstractEventLoop
  future: asyncio.Future
  number: int | None = None


@dataclasses.dataclass(eq=False)
class _Text:
  """A text that waits to be scored."""

  ids: Sequence[int]
  top: int
  temperature: float
  loop: asyncio.AbstractEventLoop
  future: asyncio.Future


class Desk:
  """Draws and scores; a context manager, inside which its thread runs.

  Args:
    engine: With parameters, and one that `queues`. Nobody else uses it.
    score: Scores texts that are known.
    rows: How many requests are drawn at once, at most; others wait.
  """

  def __init__(self, engine: engines.Engine, score: Scorer, rows: int):
    self._engine, self._score, self._rows = engine, score, rows
    self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    self._jobs: dict[int, _Job] = {}  # by the numbers of the engine
    # The last request that has finished, while nothing else is drawn: an
    # engine that keeps nothing gives up its caches, and makes them anew.
    self._kept: int | None = None
    self._is_closed = False
    self._thread = threading.Thread(target=self._run, name='desk', daemon=True)

  def __enter__(self) -> 'Desk':
    self._thread.start()
    return self

  def __exit__(self, *_) -> None:
    self._is_closed = True
    self._inbox.put(None)
    self._thread.join(_END_SECS)
    self._refuse_waiting()

  async def draw(
    self,
    request: engines.Request,
    heard: Callable[[engines.Sampled], None] | None = None,
  ) -> engines.Sampled:
    """Draws what is asked; whoever is cancelled gives it up.

    Args:
      request: Of one completion.
      heard: Is called with what there is so far, token by token.

    Raises:
      ValueError: The engine refuses it.
      Closed: The desk draws no more.
    """
    loop = asyncio.get_running_loop()
    request = request._replace(calls=self._rows)
    job = _Job(request, heard, loop, loop.create_future())
    self._put(job)
    try:
      return await job.future
    except asyncio.CancelledError:
      self._put(lambda: self._give_up(job))
      raise

  async def score(
    self, ids: Sequence[int], top: int = 0, temperature: float = 1.0
  ) -> Known:
    """Scores a text; see `Scorer`."""
    loop = asyncio.get_running_loop()
    text = _Text(ids, top, temperature, loop, loop.create_future())
    self._put(text)
    return await text.future

  def _put(self, what: Any) -> None:
    if self._is_closed:
      raise Closed
    self._inbox.put(what)

  def _run(self) -> None:
    turns: Any = iter(())
    while self._take():
      try:
        if (turn := next(turns, None)) is None:
          turns = self._engine.completed(every_tokens=1)
          continue
        for one in turn:
          self._hear(one)
      except Exception as error:  # the engine has given up what was drawn
        _LOG.exception('The engine has failed.')
        turns, self._kept = iter(()), None
        self._fail(error)
    with contextlib.suppress(AttributeError):
      turns.close()
    self._forget_kept()

  def _take(self) -> bool:
    """Does what others want; waits if nothing is drawn. False: it ends."""
    while not self._is_closed:
      try:
        what = self._inbox.get(block=not self._jobs)
      except queue.Empty:
        return True
      if isinstance(what, _Job):
        self._submit(what)
      elif isinstance(what, _Text):
        self._score_now(what)
      elif what is not None:
        what()
    self._fail(Closed())
    self._refuse_waiting()
    return False

  def _refuse_waiting(self) -> None:
    while not self._inbox.empty():
      if isinstance(what := self._inbox.get(), _Job | _Text):
        _tell(what.loop, _end, what.future, Closed())

  def _submit(self, job: _Job) -> None:
    if job.future.cancelled():
      return
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
      found: Any = self._score(text.ids, text.top, text.temperature)
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
    _tell(job.loop, _end, job.future, one)

  def _give_up(self, job: _Job) -> None:
    if job.number is not None and self._jobs.pop(job.number, None):
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
