"""The metrics of a run, read from `metrics.jsonl`.

It has null where a number was not finite and where there was nothing to
measure, so a run that breaks leaves curves that end, and nothing else. A line
that cannot be read is left out, as a kill may have cut it off.
"""

import collections
from collections.abc import Iterator
import json
import math
import pathlib
from typing import Any
from typing import NamedTuple

import numpy as np

# Larger steps are not exact as the floats that charts are drawn with.
_MOST_STEPS = 2**53
# No metric comes near it, and sums of squares of what is below are finite.
_LARGEST = 1e100


class Metrics(NamedTuple):
  """The lines of `metrics.jsonl`, one for each rollout, N of them.

  Attributes:
    steps: i64[N], ascending: rollouts done.
    values: f64[N] by name, NaN where there is no number: it was not finite, or
      there was nothing to measure.
    broken: How many lines could not be read.
  """

  steps: np.ndarray
  values: dict[str, np.ndarray]
  broken: int

  def points(self, name: str) -> tuple[np.ndarray, np.ndarray]:
    """The steps at which a metric has a number, and these numbers."""
    values = self.values.get(name, np.full(len(self.steps), np.nan))
    known = np.isfinite(values)
    return self.steps[known], values[known]

  def records(self) -> Iterator[tuple[int, dict[str, float | None]]]:
    """Step by step, each metric that has a number."""
    for place, step in enumerate(self.steps.tolist()):
      yield (
        step,
        {
          name: float(values[place])
          for name, values in self.values.items()
          if math.isfinite(values[place])
        },
      )


NONE = Metrics(np.zeros(0, np.int64), {}, 0)


def read(file: pathlib.Path) -> Metrics:
  """The lines of a file; none without a file.

  Raises:
    ValueError: The file cannot be read.
  """
  try:
    lines = file.read_bytes().splitlines()
  except FileNotFoundError:
    lines = []
  except OSError as error:
    why = error.strerror or error
    raise ValueError(
      f'{file} cannot be read ({why}), so there is nothing to report on.'
    ) from error
  records, broken = {}, 0
  for line in lines:
    record = _record(line)
    if record is None:
      broken += bool(line.strip())
    else:  # a rollout that was done again has its last line
      records[record['step']] = record
  steps = np.array(sorted(records), np.int64)
  values = collections.defaultdict(lambda: np.full(len(steps), np.nan))
  for place, step in enumerate(steps.tolist()):
    del records[step]['step']
    for name, value in records[step].items():
      if isinstance(value, int | float) and math.isfinite(value):
        values[name][place] = value
  return Metrics(steps, dict(values), broken)


def _record(line: bytes) -> dict[str, Any] | None:
  """The object in a line; None if the line is broken."""
  try:
    record = json.loads(line)
  except (ValueError, RecursionError):
    return None
  if not isinstance(record, dict) or type(record.get('step')) is not int:
    return None
  if not 0 <= record['step'] < _MOST_STEPS:
    return None
  numbers = [abs(x) for x in record.values() if isinstance(x, int | float)]
  # Infinity stands for no number, as NaN does.
  return None if any(_LARGEST < x < math.inf for x in numbers) else record
