"""What a run has left in its workdir, as far as it can be read.

A run that is going on, or was stopped, or has left half a line, is a run too.
Only a folder without a run is refused.
"""

import collections
from collections.abc import Iterator
from collections.abc import Sequence
import contextlib
import json
import math
import os
import pathlib
from typing import Any
from typing import NamedTuple

import numpy as np

from grpo_jax import config as config_lib
from grpo_jax.run.keep import bucket
from grpo_jax.run.keep import records

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


class Run(NamedTuple):
  """One run.

  Attributes:
    name: The end of its address that tells it from the runs read with it.
    path: Its workdir, or a copy of one that is in a bucket.
    saved: Its config, as JSON has it.
    config: The same; None if this version of the package cannot read it.
    metrics: See `Metrics`.
    starts: What `versions.json` says of each start.
    troubles: Sentences about what could not be read, or went wrong.
  """

  name: str
  path: pathlib.Path
  saved: dict[str, Any]
  config: config_lib.Config | None
  metrics: Metrics
  starts: list[dict[str, Any]]
  troubles: list[str]

  @property
  def done(self) -> int:
    """Rollouts that have a line."""
    return int(self.metrics.steps[-1]) if len(self.metrics.steps) else 0


def runs(workdirs: Sequence[str]) -> list[Run]:
  """Reads workdirs, each of them once, under names that tell them apart.

  Raises:
    ValueError: One of them holds no run.
  """
  addresses = {_address(workdir): workdir for workdir in workdirs}
  return [
    run(workdir)._replace(name=name)
    for workdir, name in zip(addresses.values(), _names([*addresses]))
  ]


def run(workdir: str) -> Run:
  """Reads a workdir. The name of the run is that of its folder.

  Args:
    workdir: A directory, or the address of one in a bucket.

  Raises:
    ValueError: It holds no run, or its metrics cannot be read.
  """
  (name,) = _names([_address(workdir)])
  path = bucket.read_only(workdir)
  saved, troubles = records.config_of(path), []
  config = None
  try:
    config = config_lib.dataclass_from_dict(config_lib.Config, saved, 'config')
  except ValueError as error:
    troubles.append(
      f'This version of grpo_jax cannot read all of its config ({error}), so '
      'its method and its alarms are left out.'
    )
  found = metrics(path / 'metrics.jsonl')
  if not len(found.steps):
    troubles.append('It has no line in metrics.jsonl yet.')
  if found.broken:
    lines = 'A line' if found.broken == 1 else f'{found.broken} lines'
    troubles.append(
      f'{lines} of metrics.jsonl could not be read and '
      f'{"is" if found.broken == 1 else "are"} left out.'
    )
  if failure := _failure(path):
    troubles.append(f'A start ended with an error: {failure}')
  return Run(name, path, saved, config, found, _starts(path), troubles)


def _address(workdir: str) -> str:
  """Where a workdir is, from the root of the disk or from a bucket."""
  text = os.fspath(workdir)
  if not text:
    raise ValueError('A workdir is empty; give the workdir of a run.')
  if bucket.is_bucket(text):
    return text.rstrip('/')
  return pathlib.Path(os.path.abspath(text)).as_posix()


def _names(addresses: Sequence[str]) -> list[str]:
  """Of each address the shortest end that no other one has.

  >>> _names(['/runs/e1/seed0', '/runs/e2/seed0', '/runs/e2/seed1'])
  ['e1/seed0', 'e2/seed0', 'seed1']
  """
  ends = []
  for address in addresses:
    parts = address.split('/')
    ends.append(['/'.join(parts[-n:]) for n in range(1, len(parts) + 1)])
  number = collections.Counter(end for some in ends for end in some)
  return [
    next((end for end in some if end and number[end] == 1), address)
    for address, some in zip(addresses, ends)
  ]


def metrics(file: pathlib.Path) -> Metrics:
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
  values: dict[str, np.ndarray] = {}
  for place, step in enumerate(steps.tolist()):
    for name, value in records[step].items():
      if name == 'step':
        continue
      if isinstance(value, int | float) and math.isfinite(value):
        if name not in values:
          values[name] = np.full(len(steps), np.nan)
        values[name][place] = value
  return Metrics(steps, values, broken)


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
  return None if any(map(_is_beyond, record.values())) else record


def _is_beyond(value: Any) -> bool:
  """Whether a value is a number, but one that no run has measured."""
  if not isinstance(value, int | float):
    return False
  return _LARGEST < abs(value) < math.inf  # of infinity, as of NaN: no number


def _starts(path: pathlib.Path) -> list[dict[str, Any]]:
  with contextlib.suppress(OSError, ValueError, RecursionError):
    found = json.loads((path / 'versions.json').read_text())
    if isinstance(found, list):
      return [start for start in found if isinstance(start, dict)]
  return []


def _failure(path: pathlib.Path) -> str:
  """The last line of a traceback that is newer than the last rollout; or ''."""
  with contextlib.suppress(OSError, ValueError):
    trace = path / 'traceback.txt'
    lines = path / 'metrics.jsonl'
    if lines.exists() and lines.stat().st_mtime > trace.stat().st_mtime:
      return ''
    said = trace.read_text().strip().splitlines()
    return said[-1] if said else ''
  return ''
