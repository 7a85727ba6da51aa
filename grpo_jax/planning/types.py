"""What a check of the machines is, and what is found by it."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

OK, SLOW, FAILED, SKIPPED = 'ok', 'slow', 'failed', 'skipped'

Measured = dict[str, Any]
"""What one process has measured: numbers, texts, and lists of them."""


class Judged(NamedTuple):
  """What is said of the measurements of all processes."""

  measured: str
  expected: str = ''  # the figure to compare with, in words
  verdict: str = OK


class Line(NamedTuple):
  """One line of the report; the same in all processes but for its times."""

  name: str
  verdict: str
  measured: str = ''
  expected: str = ''
  secs: float = 0.0  # from beginning to end, the wait for other processes too
  compile_secs: float = 0.0  # how much of it this process has compiled
  values: tuple[Measured | None, ...] = ()  # by process; None if it has failed
  failures: tuple[tuple[int, str], ...] = ()  # process, and a sentence
  trace: str = ''  # the traceback of this process, if it has failed


class Check(NamedTuple):
  """One check.

  Attributes:
    name: As the report shows it.
    measure: Measures in this process. What it raises makes the check fail.
    judge: From the measurements, by the numbers of processes that have not
      failed, to what is said of them. It is called in all processes, and says
      the same in all. An error of it makes the check fail too.
    left_out: From the lines so far to the reason why the check is left out, ''
      if it is not; the same in all processes.
    is_joint: Whether the processes wait for each other while they measure.
    late: What may be wrong, and what to do, if it does not come back.
  """

  name: str
  measure: Callable[[], Measured]
  judge: Callable[[Mapping[int, Measured]], Judged]
  left_out: Callable[[Sequence[Line]], str] = lambda lines: ''
  is_joint: bool = False
  late: str = (
    'A device hangs, or devices of different hosts cannot reach each other; '
    'restart the host of the device, or look at the network.'
  )
