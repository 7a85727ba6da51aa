"""Being asked to stop: SIGTERM from a scheduler, Ctrl-C from a person."""

from collections.abc import Iterator
import contextlib
import os
import signal
from types import FrameType


class Stopped(KeyboardInterrupt):
  """Raised where a stop need not wait; see `Stop.at_once`.

  A `KeyboardInterrupt`, because event loops and reward functions let that pass.
  """


class Stop:
  """Turns the first signal into a wish, and the second Ctrl-C into an end.

  The training loop asks between the parts of a step, then saves and returns,
  and the command exits with 128 plus the number of the signal: 143 after
  SIGTERM, 130 after Ctrl-C. While rewards are waited for, which may take
  minutes, nothing is lost by leaving, and the signal is raised. A second Ctrl-C
  raises `KeyboardInterrupt` wherever the program is.

  A context manager; handlers are put back at its end.

  Attributes:
    signal: The signal that came, None before.
  """

  SIGNALS = (signal.SIGTERM, signal.SIGINT)

  def __init__(self):
    self.signal: signal.Signals | None = None
    self._earlier = {}
    self._raises = False

  def __call__(self) -> bool:
    """Whether to stop."""
    return self.signal is not None

  @contextlib.contextmanager
  def at_once(self) -> Iterator[None]:
    """Within this context a signal raises `Stopped`; so does an earlier one."""
    self._raises = True
    try:
      if self():
        raise Stopped
      yield
    finally:
      self._raises = False

  def __enter__(self) -> 'Stop':
    self._earlier = {
      number: signal.signal(number, self._receive) for number in self.SIGNALS
    }
    return self

  def __exit__(self, *_) -> None:
    for number, handler in self._earlier.items():
      signal.signal(number, handler)

  def _receive(self, number: int, frame: FrameType | None) -> None:
    del frame
    again = self.signal is not None
    if again and number == signal.SIGINT:
      raise KeyboardInterrupt
    self.signal = signal.Signals(number)
    if not again:
      text = f'\ngrpo-jax: {self.signal.name}: saves and ends; a second Ctrl-C '
      # Nobody may be reading any more, and print cannot be entered twice.
      with contextlib.suppress(OSError):
        os.write(2, f'{text}ends at once.\n'.encode())
    if self._raises:
      raise Stopped
