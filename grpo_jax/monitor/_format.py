"""Numbers and durations as a person reads them, and the time left."""

import collections
from collections.abc import Callable
import math
import time

_DURATIONS = 20  # steps in the moving average


def number(value: float) -> str:
  """A number in at most eight characters.

  Args:
    value: Any number.

  Returns:
    Three to four digits that matter.

  >>> [number(x) for x in (0, 3.2e-4, 0.0123, 0.5, 42.25, 512.0, 75_100)]
  ['0', '3.2e-04', '0.0123', '0.500', '42.2', '512.0', '75.1k']
  """
  size = abs(value)
  if size == 0 or not math.isfinite(value):
    return f'{value:.0f}'
  if size < 1e-3 or size >= 1e15:
    return f'{value:.1e}'
  if size < 0.1:
    return f'{value:.4f}'
  if size < 10:
    return f'{value:.3f}'
  if size < 1e3:
    return f'{value:.1f}'
  if size < 1e4:
    return f'{value:.0f}'
  power = int(math.log10(size)) // 3
  scaled = value / 10 ** (3 * power)
  return f'{scaled:.{0 if abs(scaled) >= 100 else 1}f}{" kMGT"[power]}'


def duration(secs: float) -> str:
  """Seconds as a clock shows them.

  Args:
    secs: Seconds, at least 0.

  Returns:
    Minutes and seconds, with hours and days where there are any.

  >>> [duration(x) for x in (42, 725, 3723, 100_000)]
  ['0:42', '12:05', '1:02:03', '1d 3:46:40']
  """
  minutes, seconds = divmod(int(secs), 60)
  hours, minutes = divmod(minutes, 60)
  days, hours = divmod(hours, 24)
  if days or hours:
    clock = f'{hours}:{minutes:02}:{seconds:02}'
    return f'{days}d {clock}' if days else clock
  return f'{minutes}:{seconds:02}'


class Pace:
  """How long a step takes, and how long the rest of the run will.

  A moving average of the last steps of this process. The first step, which
  compiles, is left out: it has no earlier one to be measured from.

  Args:
    total: Rollouts of the whole run.
    clock: Seconds since whenever.
  """

  def __init__(self, total: int, clock: Callable[[], float] = time.monotonic):
    self._total, self._clock = total, clock
    self._durations = collections.deque(maxlen=_DURATIONS)  # secs per step
    self._step, self._time = None, 0.0

  def tick(self, step: int) -> None:
    """A rollout is done; step 0, the evaluation before the first, is none."""
    now = self._clock()
    if self._step is not None and step > self._step:
      self._durations.append((now - self._time) / (step - self._step))
    if step > 0:
      self._step, self._time = step, now

  def last(self) -> float | None:
    """Seconds of the last step; None before the second."""
    return self._durations[-1] if self._durations else None

  def left(self) -> float | None:
    """Seconds to the end of the run; None before the second step."""
    if self._step is None or not self._durations:
      return None
    mean = sum(self._durations) / len(self._durations)
    since = self._clock() - self._time
    return max(0.0, (self._total - self._step) * mean - since)
