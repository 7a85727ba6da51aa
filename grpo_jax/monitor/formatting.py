"""Numbers, durations and completions as a person reads them; the time left."""

import collections
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import json
import math
import time
from typing import Any
from typing import NamedTuple

Points = Sequence[tuple[float, float]]  # (rollout, value), oldest first

_LETTERS = ' kMGT'  # of a thousand, a million and so on
_DIGITS = {0.1: 4, 10: 3, 1e3: 1, 1e4: 0}  # behind the point, below a size
_DURATIONS = 20  # steps in the moving average


def message_text(message: Mapping[str, Any]) -> str:
  """The content of a message of a chat; what is no text, as JSON.

  >>> message_text({'content': 'So.'}), message_text({'content': None})
  ('So.', '')
  """
  content = message.get('content')
  if isinstance(content, str):
    return content
  return '' if content is None else json.dumps(content)


def number(value: float) -> str:
  """A number in at most eight characters.

  Args:
    value: Any number.

  Returns:
    Two to four significant digits.

  >>> [number(x) for x in (0, 3.2e-4, 0.0123, 0.5, 42.25, 512.0, 75_100)]
  ['0', '3.2e-04', '0.0123', '0.500', '42.2', '512.0', '75.1k']
  """
  size = abs(value)
  if size == 0 or not math.isfinite(value):
    return f'{value:.0f}'
  if size < 1e-3 or size >= 1e15:
    return f'{value:.1e}'
  for limit, digits in _DIGITS.items():
    if size < limit:
      return f'{value:.{digits}f}'
  # log10 rounds: just below 1e15 it is 15, for which there is no letter.
  power = min(int(math.log10(size)) // 3, len(_LETTERS) - 1)
  scaled = value / 10 ** (3 * power)
  return f'{scaled:.{0 if abs(scaled) >= 100 else 1}f}{_LETTERS[power]}'


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


def percent(share: float) -> str:
  """A share in percent, without the sign.

  Args:
    share: Mostly between 0 and 1.

  >>> [percent(x) for x in (0, 0.00012, 0.0123, 0.254, 1)]
  ['0', '0.012', '1.2', '25.4', '100']
  """
  value = 100 * share
  if value == 0 or not 0.01 <= abs(value) < 1e4:
    return number(value)
  digits = 1 if abs(value) >= 1 else 2 if abs(value) >= 0.1 else 3
  return f'{value:.{digits}f}'.removesuffix('.0')


def seconds(secs: float) -> str:
  """How long something took, as a person says it.

  Args:
    secs: Seconds, at least 0.

  Returns:
    Tenths below ten seconds, a clock from a minute on.

  >>> [seconds(x) for x in (0.42, 12.3, 75)]
  ['0.4 s', '12 s', '1:15']
  """
  if secs >= 59.5:
    return duration(secs)
  return f'{secs:.1f} s' if secs < 9.95 else f'{secs:.0f} s'


def at(step: int | None) -> str:
  """The first words of a warning: after which rollout it came."""
  return '' if step is None else f'rollout {step}: '


def took(doing: str, secs_text: str) -> str:
  """The line about something that is done."""
  return f'  {doing:<{_DOING}} {secs_text:>7}'


_DOING = 56  # columns


class Pace:
  """Estimates the seconds to the end of a run.

  The estimate rests on the mean duration of the last steps of this process. The
  first step, which compiles, does not count: a duration is measured from the
  end of one step to the end of the next.

  Args:
    total: Steps of the whole run.
    clock: Returns seconds, counted from any moment.
  """

  def __init__(self, total: int, clock: Callable[[], float] = time.monotonic):
    self._total, self._clock = total, clock
    self._durations = collections.deque(maxlen=_DURATIONS)  # secs per step
    self._step, self._time = None, 0.0

  def tick(self, step: int) -> None:
    """Notes that a step is done. Step 0, the first evaluation, is no step."""
    now = self._clock()
    if self._step is not None and step > self._step:
      self._durations.append((now - self._time) / (step - self._step))
    if step > 0:
      self._step, self._time = step, now

  def left(self) -> float | None:
    """Seconds to the end of the run; None before the second step."""
    if self._step is None or not self._durations:
      return None
    mean = sum(self._durations) / len(self._durations)
    since = self._clock() - self._time
    # Negative while the last step takes longer than the others did.
    return max(0.0, (self._total - self._step) * mean - since)


class Sample(NamedTuple):
  """One completion and what it earned."""

  prompt: str
  completion: str
  reward: float


def escape(text: str) -> str:
  r"""The text with everything that does not print escaped as in Python.

  That is: newlines, control characters (a completion may hold commands for a
  terminal), invisible characters, and those that reverse the direction of
  writing. A backslash is not escaped, because LaTeX is full of backslashes.

  Args:
    text: Any text.

  Returns:
    One line of printable characters.

  >>> print(escape('a\n\x1b[31m\\frac'))
  a\n\x1b[31m\frac
  """
  return ''.join(
    char if char.isprintable() else ascii(char)[1:-1] for char in text
  )


def shorten(text: str, width: int, measure: Callable[[str], int] = len) -> str:
  r"""The escaped text, its middle cut out if it is too wide.

  The middle goes, because a completion opens with its approach and ends with
  its answer.

  Args:
    text: Any text.
    width: Most columns of the result, at least 1.
    measure: Columns that a text takes; `rich.cells.cell_len` on a terminal,
      where some characters take two.

  Returns:
    One line.

  >>> shorten('abcdefgh\n', 6)
  'abc…\\n'
  """
  cut = len(text) > 4 * width
  if cut:  # spares the work on very long completions
    text = text[: 2 * width] + text[-2 * width :]
  pieces = [escape(char) for char in text]
  if not cut and measure(''.join(pieces)) <= width:
    return ''.join(pieces)
  # Characters without a width may all fit, so head and tail share none of them.
  half = len(pieces) // 2 if cut else len(pieces)
  tail = _fitting(reversed(pieces[-half:]), (width - 1) // 2, measure)
  head = _fitting(pieces[:half], width - 1 - (width - 1) // 2, measure)
  return ''.join(head) + '…' + ''.join(reversed(tail))


def _fitting(pieces, width: int, measure) -> list[str]:
  """The longest beginning of `pieces` that is no wider than `width`."""
  kept = []
  for piece in pieces:
    width -= measure(piece)
    if width < 0:
      break
    kept.append(piece)
  return kept
