"""`metrics.jsonl`: one JSON object per rollout.

The file survives restarts and full disks: part of a line that a kill or a full
disk has left is removed before the next line is written.
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
    path: The file. Its directory is made if there is none.
    resumed_step: Rollouts done at the checkpoint that the run goes on from. The
      file is cut back to the lines up to this rollout, and `elapsed_secs` goes
      on from the last of them. None for a fresh start: an earlier file is kept
      as `metrics.1.jsonl`, `metrics.2.jsonl` and so on.
    warn: Is given a sentence when lines cannot be written.
  """

  def __init__(
    self,
    path: pathlib.Path,
    resumed_step: int | None,
    warn: Callable[[str], None],
  ):
    self._path, self._warn = path, warn
    self._pending: list[bytes] = []  # lines that could not be written yet
    self._points: dict[str, list[tuple[int, float]]] = {}
    self.failed_writes = 0  # in a row
    path.parent.mkdir(parents=True, exist_ok=True)
    records = []
    if resumed_step is None:
      _rotate(path)
    else:
      records = _cut_back(path, resumed_step)
    for record in records:
      self._remember(record)
    # Size of the file up to its last whole line.
    self._good_bytes = path.stat().st_size if path.exists() else 0
    before = (records[-1].get('elapsed_secs') if records else None) or 0.0
    self._start = time.monotonic() - before

  def elapsed(self) -> float:
    """Seconds of the run, including those of earlier starts."""
    return time.monotonic() - self._start

  def series(self, name: str) -> list[float]:
    """Every value of a metric that is not null, oldest first."""
    return [value for _, value in self.points(name)]

  def points(self, name: str) -> list[tuple[int, float]]:
    """As `series`, each value with the number of its rollout."""
    return list(self._points.get(name, ()))

  def write(self, step: int, scalars: Mapping[str, float | None]) -> None:
    """Writes one line, or keeps it for the next try.

    Args:
      step: Rollouts done.
      scalars: Numbers by name; a number that is not finite becomes null.
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
    """Tries once more to write the waiting lines, and warns if that fails."""
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
        self._points.setdefault(name, []).append((record['step'], value))

  def _flush(self) -> None:
    """Appends the waiting lines; after an OSError they wait on."""
    try:
      # Whatever the failed try has written of its lines.
      if self.failed_writes:
        self._drop_half_line()
      with self._path.open('ab') as file:
        file.write(b''.join(self._pending))
        file.flush()
        end = file.tell()
    except OSError as error:
      # If this fails too, the next flush begins with it.
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
  """The number, or None if it is not finite, which JSON cannot hold."""
  if value is None or not math.isfinite(value):
    return None
  return value if isinstance(value, int) else float(value)


def _rotate(path: pathlib.Path) -> None:
  """Renames a file that is not empty to `metrics.N.jsonl`, with N unused."""
  if path.exists() and path.stat().st_size:
    names = (
      path.with_name(f'{path.stem}.{n}{path.suffix}')
      for n in itertools.count(1)
    )
    path.rename(next(name for name in names if not name.exists()))


def _cut_back(path: pathlib.Path, step: int) -> list[dict[str, Any]]:
  """Drops incomplete lines and those after `step`; returns the others."""
  found = path.read_bytes() if path.exists() else b''
  records, kept = [], []
  for line in found.splitlines():
    record = _parse(line)
    if record is not None and record['step'] <= step:
      records.append(record)
      kept.append(line + b'\n')
  if b''.join(kept) != found:
    # `os.replace` is atomic: a kill here leaves either the old file or the new.
    other = path.with_name(path.name + '.tmp')
    with other.open('wb') as file:
      file.writelines(kept)
      file.flush()
      os.fsync(file.fileno())
    os.replace(other, path)
  return records


def _parse(line: bytes) -> dict[str, Any] | None:
  """The record of a line, or None if the line is incomplete."""
  try:
    record = json.loads(line)
  except ValueError:
    return None
  whole = isinstance(record, dict) and isinstance(record.get('step'), int)
  return record if whole else None
