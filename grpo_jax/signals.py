"""Being asked to stop: SIGTERM from a scheduler, Ctrl-C from a person."""

import signal
import sys
from types import FrameType


class Stop:
  """Turns the first signal into a wish, and the second Ctrl-C into an end.

  Between rollouts the loop asks; it then saves and returns, and the command
  exits with 128 plus the number of the signal: 143 after SIGTERM, 130 after
  Ctrl-C. A second Ctrl-C raises `KeyboardInterrupt` wherever the program is.

  A context manager; handlers are put back at its end.

  Attributes:
    signal: The signal that came, None before.
  """

  SIGNALS = (signal.SIGTERM, signal.SIGINT)

  def __init__(self):
    self.signal: signal.Signals | None = None
    self._earlier = {}

  def __call__(self) -> bool:
    """Whether to stop."""
    return self.signal is not None

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
    if number == signal.SIGINT and self.signal is not None:
      raise KeyboardInterrupt
    self.signal = signal.Signals(number)
    print(
      f'\ngrpo-jax: {self.signal.name}: saves after this step and ends; a '
      'second Ctrl-C ends at once.',
      file=sys.stderr,
      flush=True,
    )
