"""Plays many episodes at once in one event loop.

The loop belongs to one thread, which calls `Stage.run`; it is the same in the
process of the run and in a worker. Who plays tells it what to do by `tell`,
from any thread.
"""

import asyncio
import collections
from collections.abc import Callable
import contextlib
import threading
from typing import Any

from grpo_jax.environments import episode_threads
from grpo_jax.environments import events
from grpo_jax.environments import forms
from grpo_jax.environments import playing
from grpo_jax.environments import session as session_lib
from grpo_jax.environments.base import Reply

_TIDY_SECS = 1.0  # until what an episode has left behind counts as stuck


class Stage:
  """Sessions in an event loop.

  Args:
    resolved: Finds an environment by its name.
    running: A byte for each slot; see `session.Session`.
    tool_secs: The longest that one call of a tool may take.
    emit: Takes the events of one turn of the loop.
    idle: Called when no session is left; whether the process is as it was.
  """

  def __init__(
    self,
    resolved: Callable[[str], forms.Made],
    running: Any,
    tool_secs: float,
    emit: Callable[[list[events.Word]], None],
    idle: Callable[[], bool] = lambda: True,
  ):
    self._resolved, self._running = resolved, running
    self._tool_secs, self._emit, self._idle = tool_secs, emit, idle
    self._sessions: dict[int, session_lib.Session] = {}
    self._kept: dict[str, list[playing.Playing]] = {}
    self._mains: set[asyncio.Task[Any]] = set()
    self._words: list[events.Word] = []
    self._told: collections.deque[tuple[Any, ...]] = collections.deque()
    self._is_woken = False  # and has not looked into what it was told yet
    self._lock = threading.Lock()
    self._is_closed = False
    self._loop = asyncio.new_event_loop()
    self._loop.set_task_factory(_task)
    self._loop.set_exception_handler(lambda *_: None)
    self._own_threads = episode_threads.Threads(contextlib.nullcontext())
    self._loop.set_default_executor(episode_threads.Executor(self._threads))

  def run(self) -> None:
    """Runs the loop until `close`."""
    asyncio.set_event_loop(self._loop)
    while not self._is_closed:
      try:
        self._loop.run_forever()
      except (SystemExit, KeyboardInterrupt):  # of a task, which has it too
        continue
      except BaseException:  # somebody has closed the files of the loop
        break
    for one in self._sessions.values():
      one.stop('the player was closed')
    with contextlib.suppress(BaseException):
      self._loop.run_until_complete(
        asyncio.wait(self._mains, timeout=_TIDY_SECS)
        if self._mains
        else asyncio.sleep(0)
      )
    with contextlib.suppress(BaseException):
      self._loop.run_until_complete(self._close_kept())
    for one in self._sessions.values():
      one.threads.close()
      one.leave()
    self._own_threads.close()
    with contextlib.suppress(BaseException):
      self._loop.run_until_complete(self._loop.shutdown_asyncgens())
    asyncio.set_event_loop(None)
    self._loop.close()

  def tell(self, name: str, *arguments: Any) -> None:
    """Calls one of the methods below in the thread of the loop."""
    self._told.append((getattr(self, name), *arguments))
    if self._is_woken:  # once for many: each time takes as long as an answer
      return
    self._is_woken = True
    with contextlib.suppress(RuntimeError):  # it is closed
      self._loop.call_soon_threadsafe(self._hear)

  def _hear(self) -> None:
    self._is_woken = False  # first, so that nothing told from now on is missed
    while self._told:
      self._loop.call_soon(*self._told.popleft())

  def begin(self, begin: events.Begin, slot: int) -> None:
    """Begins an episode."""
    self._running[slot] = 0
    made = session_lib.Session(
      begin, slot, self._running, self.say, self._stopping
    )
    self._sessions[begin.episode] = made
    main = self._loop.create_task(self._play(made, begin.environment))
    self._mains.add(main)
    main.add_done_callback(self._mains.discard)

  def answer(self, episode: int, context: int, reply: Reply) -> None:
    """The policy has answered in a context."""
    if episode in self._sessions:
      self._sessions[episode].answer(context, reply)

  def refuse(self, episode: int, context: int, why: str) -> None:
    """What a context was asked cannot be read."""
    if episode in self._sessions:
      self._sessions[episode].refuse(context, why)

  def cancel(self, episode: int, why: str) -> None:
    """A limit has ended an episode; it may still say what it is worth."""
    if episode in self._sessions:
      self._sessions[episode].cancel(why)

  def stop(self, episode: int, why: str) -> None:
    """Ends an episode with no regard for what it does."""
    if episode in self._sessions:
      self._sessions[episode].stop(why)

  def close(self) -> None:
    """Ends the loop, and all that runs in it."""
    self._is_closed = True
    self._loop.stop()

  def say(self, word: events.Word) -> None:
    """Gathers what is said in one turn of the loop; from any thread.

    Contexts that ask in the same turn, as those of an `asyncio.gather` do, are
    heard together.
    """
    with self._lock:
      self._words.append(word)
      if len(self._words) > 1:
        return
    with contextlib.suppress(RuntimeError):
      self._loop.call_soon_threadsafe(self._flush)

  def _flush(self) -> None:
    with self._lock:
      words, self._words = self._words, []
    self._emit(words)

  async def _play(self, made: session_lib.Session, environment: str) -> None:
    await made.play(lambda: self._ready(environment))
    if made.kept is not None and self._resolved(environment).reusable:
      self._kept.setdefault(environment, []).append(made.kept)
    await self._tidy(made)

  def _ready(self, environment: str) -> session_lib.Ready:
    """What plays an episode: what has played another one, or a new one."""
    found = self._resolved(environment)
    kept = self._kept.get(environment)
    play = kept.pop() if kept else found.make(tool_secs=self._tool_secs)
    return tuple(events.plain(found.tools)), play

  async def _tidy(self, made: session_lib.Session) -> None:
    """Ends what an episode has left behind, or says that it cannot."""
    me = asyncio.current_task()
    until = self._loop.time() + _TIDY_SECS
    left = {one for one in made.tasks if one is not me and not one.done()}
    for task in left:
      task.cancel()
    if left:
      with contextlib.suppress(asyncio.CancelledError):
        await asyncio.wait(left, timeout=_TIDY_SECS)
    made.threads.close()
    await self._until(lambda: not made.is_busy(), until)
    self._sessions.pop(made.episode, None)
    made.leave(me)
    if made.is_busy() or any(not task.done() for task in left):
      self.say(
        events.Stuck(made.episode)
        if made.why_stopped
        else events.Spoiled('a thread or a task was left behind')
      )
    elif not (self._sessions or any(self._kept.values()) or self._idle()):
      # What is kept may have threads and processes.
      self.say(events.Spoiled('the process is not as it was'))

  async def _until(self, fits: Callable[[], bool], until: float) -> None:
    pause = 0.001
    while not fits() and self._loop.time() < until:
      await asyncio.sleep(pause)
      pause = min(2 * pause, 0.05)

  async def _close_kept(self) -> None:
    kept = [one for some in self._kept.values() for one in some]
    await asyncio.gather(*(one.close() for one in kept), return_exceptions=True)

  def _stopping(self, made: session_lib.Session) -> None:
    self._loop.call_later(_TIDY_SECS, self._check_stopped, made)

  def _check_stopped(self, made: session_lib.Session) -> None:
    if self._sessions.get(made.episode) is not made:
      return
    if made.is_parked:  # it is left where it waits
      del self._sessions[made.episode]
      made.threads.close()
      made.leave()
      self.say(events.Spoiled('an episode does not end'))
    else:
      self.say(events.Stuck(made.episode))

  def _threads(self) -> episode_threads.Threads:
    found = session_lib.current()
    return self._own_threads if found is None else found.threads


def _task(
  loop: asyncio.AbstractEventLoop, coroutine: Any, **kwargs: Any
) -> asyncio.Task[Any]:
  """Makes the tasks of an episode known to it."""
  found = session_lib.current()
  if found is None:
    return asyncio.Task(coroutine, loop=loop, **kwargs)
  return found.task(loop, coroutine, **kwargs)
