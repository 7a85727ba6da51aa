"""Several generations at once, on the cores of a CPU.

XLA runs most products of a small model on one core: they are too small to be
worth dividing. So the prompts are divided, and every piece has a thread and
calls of its own; on two cores a decode step of 64 rows then takes half the time
or three quarters. Each piece reads all weights, which must be little beside its
rows. The product with the output layer, if that is the larger part, uses all
cores by itself.
"""

from collections.abc import Iterator
from collections.abc import Sequence
import queue
import threading
from typing import Any

_MOST_BYTES = 2**22  # of weights, for each row of a piece
_LEAST_WORK = 2**25  # weights in bytes, times the rows of a piece


def pieces(cores: int, prompts: int, group: int, layers: int, head: int) -> int:
  """Into how many pieces to divide prompts.

  Args:
    cores: At most so many.
    prompts: As many as are drawn at once.
    group: Completions of each.
    layers: Bytes of the weights of all layers.
    head: Bytes of the output layer's.
  """
  if head > layers:
    return 1
  weights = layers + head
  rows = max(_LEAST_WORK / weights, weights / _MOST_BYTES)
  most = int(prompts * group / rows)
  return max(1, min(cores, prompts, most))


def run(steps: Sequence[Iterator[Any]]) -> Iterator[None]:
  """Takes all steps of some iterators, each iterator in a thread of its own.

  Yields after every step of any of them. What one raises is raised here; the
  others then end after their present step, for which nothing waits.
  """
  if len(steps) == 1:
    for _ in steps[0]:
      yield
    return
  taken: queue.SimpleQueue[Any] = queue.SimpleQueue()
  left, end = threading.Event(), object()

  def take(one):
    try:
      for _ in one:
        if left.is_set():
          return
        taken.put(None)
      taken.put(end)
    except BaseException as error:
      taken.put(error)

  going = len(steps)
  try:
    for one in steps:
      # No daemon: Python waits for the step before it ends, and would abort in
      # XLA otherwise. A command need not wait; see `commands.main.run`.
      threading.Thread(target=take, args=(one,), name='sampling').start()
    while going:
      step = taken.get()
      if isinstance(step, BaseException):
        raise step
      going -= step is end
      yield
  finally:
    left.set()
