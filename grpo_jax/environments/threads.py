"""Runs functions of users beside an event loop that nothing may block or end.

What a user's code does by `sys.exit` or a `KeyboardInterrupt` of its own is an
error of this code, `Stopped`, and not the end of a process that plays others.
"""

import asyncio
from collections.abc import Awaitable
from collections.abc import Callable
from concurrent import futures
import contextlib
import contextvars
import inspect
import queue
import threading
from typing import Any
import weakref

from grpo_jax.config import plain_text
from grpo_jax.environments import base


class Late(Exception):
  """A call has met its deadline."""


class Stopped(RuntimeError):
  """Code of a user has raised what would end a process."""


watch: contextvars.ContextVar[contextlib.AbstractContextManager[Any] | None]
watch = contextvars.ContextVar('watch', default=None)
"""A context manager that is entered around each call in a thread; a session
counts by it which calls run."""

own: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
"""Threads of episodes, which are not left behind by code of a user."""

_kept: set[asyncio.Future[Any]] = set()


class Thread:
  """A thread that calls one function after the other, once there is one.

  It is a daemon: a call that never returns keeps no process from ending.
  """

  def __init__(self):
    self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
    self._thread: threading.Thread | None = None

  async def call(
    self, function: Callable[..., Any], /, *args: Any, **kwargs: Any
  ) -> Any:
    """Calls a function in the thread; what it returns is awaited here.

    Raises:
      Stopped: It has raised `SystemExit` or the like.
    """
    loop = asyncio.get_running_loop()
    future = loop.create_future()
    context = contextvars.copy_context()
    run = lambda: context.run(_watched, function, *args, **kwargs)
    self._jobs.put((loop, future, run))
    if self._thread is None:
      self._thread = threading.Thread(target=_serve, args=[self._jobs])
      self._thread.daemon = True
      own.add(self._thread)
      self._thread.start()
    result = await future
    return await guarded(result) if inspect.isawaitable(result) else result

  def end(self) -> None:
    """Ends the thread when it has done what was asked for."""
    self._jobs.put(None)


def _watched(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
  with watch.get() or contextlib.nullcontext():
    return function(*args, **kwargs)


def _serve(jobs: queue.SimpleQueue[Any]) -> None:
  while (job := jobs.get()) is not None:
    loop, future, run = job
    result, error = None, None
    try:
      result = run()
    except StopIteration as stop:  # which no future takes
      error = Stopped(plain_text.named(stop))
    except Exception as raised:
      error = raised
    except BaseException as stop:
      error = Stopped(plain_text.named(stop))
    try:
      loop.call_soon_threadsafe(_settle, future, result, error)
    except RuntimeError:  # the loop is closed; a job may close an instance
      pass
    del job, loop, future, run, result, error  # while it waits for the next


def _settle(
  future: asyncio.Future[Any], result: Any, error: Exception | None
) -> None:
  if future.cancelled():
    if inspect.iscoroutine(result):
      result.close()
  elif error is not None:
    future.set_exception(error)
  else:
    future.set_result(result)


async def guarded(awaitable: Awaitable[Any]) -> Any:
  """Awaits what a user's code has made.

  Raises:
    Stopped: It has raised `SystemExit` or the like.
  """
  try:
    return await awaitable
  except (Exception, GeneratorExit):
    raise
  except BaseException as stop:
    task = asyncio.current_task()
    cancelled = isinstance(stop, asyncio.CancelledError)
    if cancelled and (task is None or task.cancelling()):
      raise
    raise Stopped(plain_text.named(stop)) from stop


async def limited(
  function: Callable[..., Any], secs: float, /, **kwargs: Any
) -> Any:
  """Calls a function with a deadline: here if it is async, else in a thread.

  Args:
    function: Of a user.
    secs: By the clock. What is late then is cancelled, and nobody waits for it.
    **kwargs: For the function.

  Raises:
    Late: It has not returned.
    Stopped: It has raised `SystemExit` or the like.
  """
  if inspect.iscoroutinefunction(function):
    task = asyncio.ensure_future(guarded(function(**kwargs)))
  else:
    thread = Thread()
    task = asyncio.ensure_future(thread.call(function, **kwargs))
    task.add_done_callback(lambda _: thread.end())
  return await _within(task, secs)


async def _within(task: asyncio.Future[Any], secs: float) -> Any:
  """Waits for a task, at most so long; then it is cancelled and left alone.

  Raises:
    Late: It is not done.
  """
  try:
    await asyncio.wait({task}, timeout=secs)
  finally:
    if not task.done():
      keep(task)
      task.cancel()
  if not task.done():
    raise Late
  return task.result()


def keep(task: asyncio.Future[Any]) -> None:
  """Keeps a task until it is done, also if nobody waits for it any more."""
  _kept.add(task)
  task.add_done_callback(_forget)


def _forget(task: asyncio.Future[Any]) -> None:
  _kept.discard(task)
  if not task.cancelled():
    task.exception()  # so that nothing is printed of it


class Blocking:
  """A policy for code that runs in a thread: `say` waits for the reply.

  In the event loop itself, where nothing may wait, it is the policy as it is.
  """

  def __init__(self, policy: Any, waiting: set[Any] | None = None):
    self._policy = policy
    self._loop = asyncio.get_running_loop()
    self._waiting = set() if waiting is None else waiting

  def say(self, *new: Any, **options: Any) -> Any:
    """See `base.Policy.say`."""
    return self._wait(lambda: self._policy.say(*new, **options))

  def chat(self, *args: Any, **options: Any) -> Any:
    """See `base.Policy.chat`."""
    return self._wait(lambda: self._policy.chat(*args, **options))

  def fork(self) -> Any:
    """See `base.Policy.fork`."""
    return self._wait(self._fork)

  def _fork(self) -> 'Blocking':
    return Blocking(self._policy.fork(), self._waiting)

  def reward(self, value: float, turn: int | None = None) -> None:
    """See `base.Policy.reward`."""
    self._wait(lambda: self._policy.reward(value, turn))

  def leave_out(self, turn: int) -> None:
    """See `base.Policy.leave_out`."""
    self._wait(lambda: self._policy.leave_out(turn))

  def count(self, name: str, number: int = 1) -> None:
    """See `base.Policy.count`."""
    self._wait(lambda: self._policy.count(name, number))

  def _wait(self, ask: Callable[[], Any]) -> Any:
    try:
      asyncio.get_running_loop()
    except RuntimeError:
      pass
    else:
      return ask()

    async def asked():
      result = ask()
      return await result if inspect.isawaitable(result) else result

    if None in self._waiting:
      raise base.Ended(base.OVER)
    future = asyncio.run_coroutine_threadsafe(asked(), self._loop)
    self._waiting.add(future)
    if None in self._waiting:  # since then
      future.cancel()
    try:
      return future.result()
    except futures.CancelledError:
      raise base.Ended(base.OVER) from None
    finally:
      self._waiting.discard(future)

  def end(self) -> None:
    """Ends what waits for the policy: the episode is over."""
    self._waiting.add(None)
    for future in [*self._waiting]:
      if future is not None:
        future.cancel()
