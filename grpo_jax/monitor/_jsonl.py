"""`metrics.jsonl`: one JSON object per rollout.

It goes on through restarts and full disks. What a kill or a full disk left of a
line is cut away before anything follows it.
"""

from collections.abc import Callable
from collections.abc import Mapping
import contextlib
import itertools
import json
import math
import os
import pathlib
import time
from typing import Any


class Lines:
  """The file `metrics.jsonl` of a workdir.

  Args:
    path: The file; its directory is made if it is not there.
    resumed_step: Rollouts done at the checkpoint that the run goes on from: the
      file is cut back to the lines up to it, and `elapsed_secs` goes on from
      the last of them. None for a fresh start: a file that is there is kept
      beside the new one, as `metrics.1.jsonl` and so on.
    warn: Takes a sentence when lines cannot be written.
  """

  def __init__(
    self,
    path: pathlib.Path,
    resumed_step: int | None,
    warn: Callable[[str], None],
  ):
    self._path, self._warn = path, warn
    self._pending: list[bytes] = []  # lines that could not be written yet
    self._series: dict[str, list[float]] = {}
    self.failed_writes = 0  # in a row
    path.parent.mkdir(parents=True, exist_ok=True)
    records = []
    if resumed_step is None:
      _rotate(path)
    else:
      records = _cut_back(path, resumed_step)
    for record in records:
      self._remember(record)
    self._good_bytes = path.stat().st_size if path.exists() else 0
    before = (records[-1].get('elapsed_secs') if records else None) or 0.0
    self._start = time.monotonic() - before

  def elapsed(self) -> float:
    """Seconds of the run, those of earlier starts included."""
    return time.monotonic() - self._start

  def series(self, name: str) -> list[float]:
    """Every value of a metric that is not null, oldest first."""
    return list(self._series.get(name, ()))

  def write(self, step: int, scalars: Mapping[str, float | None]) -> None:
    """Writes one line, or keeps it for the next try.

    Args:
      step: Rollouts done.
      scalars: Numbers by name; what is not finite becomes null.
    """
    record = {
      'step': step,
      'elapsed_secs': round(self.elapsed(), 3),
      **{name: _json_number(value) for name, value in scalars.items()},
    }
    self._remember(record)
    self._pending.append(json.dumps(record).encode() + b'\n')
    self._flush()

  def close(self) -> None:
    """Tries once more to write what waits; says so if it is lost."""
    if self._pending:
      self._flush()
    if self._pending:
      self._warn(
        f'{len(self._pending)} lines of {self._path.name} are lost: they could '
        'not be written to the end of the run.'
      )

  def _remember(self, record: Mapping[str, Any]) -> None:
    for name, value in record.items():
      if isinstance(value, int | float):
        self._series.setdefault(name, []).append(value)

  def _flush(self) -> None:
    """Appends what waits; after an OSError the file is as it was before."""
    try:
      if self.failed_writes:
        self._drop_half_line()
      with self._path.open('ab') as file:
        file.write(b''.join(self._pending))
        file.flush()
        end = file.tell()
    except OSError as error:
      with contextlib.suppress(OSError):
        self._drop_half_line()
      if not self.failed_writes:
        self._warn(
          f'{self._path.name} cannot be written ({error}); its lines wait in '
          'memory and are tried again after every rollout.'
        )
      self.failed_writes += 1
    else:
      self._good_bytes, self.failed_writes = end, 0
      self._pending.clear()

  def _drop_half_line(self) -> None:
    if self._path.exists() and self._path.stat().st_size > self._good_bytes:
      os.truncate(self._path, self._good_bytes)


def _json_number(value: Any) -> float | None:
  """A number that JSON has; numpy's become Python's."""
  if value is None or not math.isfinite(value):
    return None
  return value if isinstance(value, int) else float(value)


def _rotate(path: pathlib.Path) -> None:
  """Renames a file that holds something to the next free number."""
  if path.exists() and path.stat().st_size:
    names = (
      path.with_name(f'{path.stem}.{n}{path.suffix}')
      for n in itertools.count(1)
    )
    path.rename(next(name for name in names if not name.exists()))


def _cut_back(path: pathlib.Path, step: int) -> list[dict[str, Any]]:
  """Drops lines after `step` and halves of lines; returns what is kept."""
  found = path.read_bytes() if path.exists() else b''
  records, kept = [], []
  for line in found.splitlines():
    record = _parse(line)
    if record is not None and record['step'] <= step:
      records.append(record)
      kept.append(line + b'\n')
  if b''.join(kept) != found:
    # Another file takes its place at once, so a kill here leaves one or the
    # other.
    other = path.with_name(path.name + '.tmp')
    with other.open('wb') as file:
      file.writelines(kept)
      file.flush()
      os.fsync(file.fileno())
    os.replace(other, path)
  return records


def _parse(line: bytes) -> dict[str, Any] | None:
  """The record of a line, or None if it is not a whole one."""
  try:
    record = json.loads(line)
  except ValueError:
    return None
  whole = isinstance(record, dict) and isinstance(record.get('step'), int)
  return record if whole else None
