"""Threads for what the code of an episode calls by `asyncio.to_thread`.

Sync methods of environments and sync tools have those of `threads`.
"""

from collections.abc import Callable
from concurrent import futures
import contextlib
import contextvars
import queue
import threading
from typing import Any

from grpo_jax.environments import base
from grpo_jax.environments import threads


class Threads:
  """The threads of one episode.

  What is called one after the other is called in the same thread, which some
  libraries need (sqlite3 is one). What is called at the same time has a thread
  each. They are daemons: one that never returns keeps no process alive.

  Args:
    marks: A context in which each call is made.
  """

  def __init__(self, marks: contextlib.AbstractContextManager[Any]):
    self._marks = marks
    self._lock = threading.Lock()
    self._idle: list[queue.SimpleQueue[Any]] = []
    self._closed = False

  def submit(self, call: Callable[[], Any]) -> futures.Future[Any]:
    """Makes a call in a thread that is idle, or in a new one."""
    made: futures.Future[Any] = futures.Future()
    with self._lock:
      if self._closed:
        raise RuntimeError(base.OVER)
      if self._idle:
        calls = self._idle.pop()
      else:
        calls = queue.SimpleQueue()
        thread = threading.Thread(
          target=self._serve, args=(calls,), name='episode', daemon=True
        )
        threads.own.add(thread)
        thread.start()
    calls.put((made, call))
    return made

  def close(self) -> None:
    """Ends the threads that are idle, and the others when they return."""
    with self._lock:
      self._closed = True
      while self._idle:
        self._idle.pop().put(None)

  def _serve(self, calls: queue.SimpleQueue[Any]) -> None:
    while (job := calls.get()) is not None:
      made, call = job
      result, error = None, None
      if made.set_running_or_notify_cancel():
        try:
          with self._marks:
            result = call()
        except StopIteration as stopped:
          # No future takes it: who awaits this one would wait for ever.
          error = RuntimeError('StopIteration was raised')
          error.__cause__ = stopped
        except BaseException as raised:
          error = raised
      with self._lock:
        closed = self._closed
        if not closed:
          self._idle.append(calls)  # before the next call can come
      if made.running():
        if error is not None:
          made.set_exception(error)
        else:
          made.set_result(result)
      job = made = call = result = error = None
      if closed:
        return


class Executor(futures.ThreadPoolExecutor):
  """The default executor of an event loop: each episode has its own threads.

  asyncio takes no other class than this one; nothing of it is used.

  Args:
    current: The threads of the episode that calls.
  """

  def __init__(self, current: Callable[[], Threads]):
    self._current = current

  def submit(
    self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
  ) -> futures.Future[Any]:
    """Makes a call in a thread of the episode that calls."""
    context = contextvars.copy_context()
    return self._current().submit(lambda: context.run(fn, *args, **kwargs))

  def shutdown(
    self, wait: bool = True, *, cancel_futures: bool = False
  ) -> None:
    """Does nothing: the threads end with their episodes."""
