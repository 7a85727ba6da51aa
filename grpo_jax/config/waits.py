"""Waits that a signal ends."""

import queue
from typing import Any

_LOOK_SECS = 0.5


def take(found: queue.SimpleQueue[Any]) -> Any:
  """The next of a queue, as soon as it is there.

  Python handles a signal behind a wait that it comes just before, and such a
  wait would have no end. So this one begins again and again.
  """
  while True:
    try:
      return found.get(timeout=_LOOK_SECS)
    except queue.Empty:
      continue
