"""Stopping on a signal: SIGTERM from a scheduler, Ctrl-C from a person.

Code of the user's does not stop a run: `no_exit` makes an error of its exit.
"""

from collections.abc import Iterator
import contextlib
import os
import signal
import sys
import threading
import traceback
from types import FrameType
from typing import Any

from grpo_jax.config import plain_text


class Stopped(KeyboardInterrupt):
  """Raised where a stop need not wait; see `Stop.at_once`.

  It is a `KeyboardInterrupt` and no `Exception`, so that an `except Exception`
  in an event loop or a reward function does not swallow it.
  """


@contextlib.contextmanager
def no_exit() -> Iterator[None]:
  """Makes an error of what would end the process, as `sys.exit` does.

  Code of the user's may raise what is no `Exception`: a reward function, a
  method, a source of data. After `sys.exit(0)` a command that has done half its
  work would report success. Signals are not meant: a `KeyboardInterrupt`
  passes.

  Raises:
    ValueError: The body has raised `SystemExit`, `GeneratorExit` or another
      exception that is neither an `Exception` nor a `KeyboardInterrupt`. The
      sentence names the line of code.
  """
  try:
    yield
  except (Exception, KeyboardInterrupt):
    raise
  except BaseException as error:
    line = traceback.extract_tb(error.__traceback__)[-1]
    raise ValueError(
      f'Line {line.lineno} of {line.filename} raised {plain_text.kind(error)}'
      f'({plain_text.said(error)}), which would end the process before its '
      'work is done; let that code return, or raise an error such as '
      'ValueError.'
    ) from error


class Stop:
  """Records the first signal as a request; a second Ctrl-C ends the program.

  The training loop asks for it between the parts of a step, then saves and
  returns, and the command exits with 128 plus the number of the signal: 143
  after SIGTERM, 130 after Ctrl-C. Waiting for rewards may take minutes, and
  nothing is lost by leaving then, so there the signal raises `Stopped`. A
  second Ctrl-C raises `KeyboardInterrupt` wherever the program is.

  Python ignores what is raised in a finalizer or a callback of its garbage
  collector, after it has printed a traceback. If a signal comes there, it is
  sent once more.

  A context manager: it installs its handlers, and puts the earlier ones back at
  its end.

  Attributes:
    signal: The signal that was received last; None if there was none.
  """

  SIGNALS = (signal.SIGTERM, signal.SIGINT)

  def __init__(self):
    self.signal: signal.Signals | None = None
    self._earlier = {}
    self._raises = self._is_repeated = self._is_taken = False

  def __call__(self) -> bool:
    """Whether a signal has asked to stop."""
    return self.signal is not None

  @contextlib.contextmanager
  def at_once(self) -> Iterator[None]:
    """In this context a signal raises `Stopped`; an earlier one, on entry."""
    try:
      self._raises = True  # in here: a signal may come right behind it
      if self():
        raise Stopped
      yield
    finally:
      self._raises = False

  def take(self, number: int) -> None:
    """Stops by a signal that another process has got.

    A launcher may send it to all of them. So the first Ctrl-C that comes here
    afterwards is not the second one.
    """
    self.signal = signal.Signals(number)
    self._is_taken = number == signal.SIGINT

  def deliver(self, number: int) -> None:
    """As `take`, from another thread; what waits in `at_once` is ended."""
    self._is_taken = number == signal.SIGINT
    if not self._send(number):
      self.take(number)  # nobody waits who could be ended

  def _send(self, number: int) -> bool:
    """Sends the main thread a signal, unless another handler would get it."""
    if signal.getsignal(number) != self._receive:
      return False
    main = threading.main_thread().ident
    assert main is not None  # it runs
    signal.pthread_kill(main, number)
    return True

  def __enter__(self) -> 'Stop':
    self._earlier = {
      number: signal.signal(number, self._receive) for number in self.SIGNALS
    }
    self._hook, sys.unraisablehook = sys.unraisablehook, self._ignored
    return self

  def __exit__(self, *_) -> None:
    sys.unraisablehook = self._hook
    for number, handler in self._earlier.items():
      signal.signal(number, handler)

  def _ignored(self, what: Any) -> None:
    if what.exc_type is not Stopped:
      self._hook(what)
      return
    self._is_repeated = True
    threading.Timer(0.01, self._repeat).start()

  def _repeat(self) -> None:
    # Another handler may end the process: nobody waits any more.
    if self.signal:
      self._send(self.signal)

  def _receive(self, number: int, frame: FrameType | None) -> None:
    del frame
    again, repeated = self.signal is not None, self._is_repeated
    self._is_repeated = False
    if again and number == signal.SIGINT and not repeated:
      if not self._is_taken:
        raise KeyboardInterrupt
      self._is_taken = False
    self.signal = signal.Signals(number)
    if not again:
      text = f'\ngrpo-jax: {self.signal.name}: saves and ends; a second Ctrl-C '
      # Not print: the signal may come inside a print, which is not reentrant.
      # OSError, if nobody reads standard error any more.
      with contextlib.suppress(OSError):
        os.write(2, f'{text}ends at once.\n'.encode())
    if self._raises:
      raise Stopped
