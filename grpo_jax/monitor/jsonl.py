"""`metrics.jsonl`: one JSON object per rollout.

The file survives restarts and full disks: part of a line that a kill or a full
disk has left is removed before the next line is written.
"""

from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import itertools
import json
import math
import os
import pathlib
import time
from typing import Any

from grpo_jax.config import whole_files

History = dict[str, list[tuple[int, float]]]  # (rollout, value) by metric

_HELDOUT = 'heldout_accuracy'


class Lines:
  """The file `metrics.jsonl` of a workdir.

  An OSError never leaves this class: what earlier starts wrote is put aside,
  and lines are written, as soon as the disk allows it. Of the metrics, only
  what is read back stays in memory.

  Args:
    path: The file. Its directory is made if there is none.
    resumed_step: Rollouts done at the checkpoint that the run goes on from. The
      file is cut back to the lines up to this rollout, and `elapsed_secs` goes
      on from the last of them. None for a fresh start: an earlier file is kept
      as `metrics.1.jsonl`, `metrics.2.jsonl` and so on.
    warn: Is given a sentence when lines cannot be written, or when lines of
      earlier starts are missing.
    history: The metrics of earlier starts that `take_history` is to return.

  Attributes:
    heldout: Every held-out accuracy that is not null, oldest first, each with
      the rollouts done before it.
    failed_writes: How many tries to write have failed in a row.
  """

  def __init__(
    self,
    path: pathlib.Path,
    resumed_step: int | None,
    warn: Callable[[str], None],
    history: Collection[str] = (),
  ):
    self._path, self._warn = path, warn
    self._resumed_step, self._names = resumed_step, history
    self._pending: list[bytes] = []  # lines that could not be written yet
    self._history: History = {}
    self.heldout: list[tuple[int, float]] = []
    self.failed_writes = 0
    self._start = time.monotonic()
    self._recalled = False  # whether the lines of earlier starts have been read
    # Size of the file up to its last whole line; None until what earlier starts
    # wrote is put aside.
    self._good_bytes: int | None = None
    try:
      self._put_aside()
    except OSError as error:
      self._note_failure(error)

  def elapsed(self) -> float:
    """Seconds of the run, including those of earlier starts."""
    return time.monotonic() - self._start

  def take_history(self) -> History:
    """What earlier starts have measured; it is forgotten here."""
    taken, self._history = self._history, {}
    return taken

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
    if record.get(_HELDOUT) is not None:
      self.heldout.append((step, record[_HELDOUT]))
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

  def _put_aside(self) -> None:
    """Renames the file of an earlier run, or cuts it back."""
    self._path.parent.mkdir(parents=True, exist_ok=True)
    if self._resumed_step is None:
      _rotate(self._path)
    else:
      exists = self._path.exists()
      found = self._path.read_bytes() if exists else b''
      kept, records = [], []
      needed = {'step', 'elapsed_secs', _HELDOUT, *self._names}
      for line, record in _up_to(found, self._resumed_step):
        kept.append(line + b'\n')
        # Whole records would take several times the memory of the file.
        records.append({k: v for k, v in record.items() if k in needed})
      if not self._recalled:
        self._recall(records)
        self._recalled = True
        self._note_missing({record['step'] for record in records})
      if exists:
        _cut_back(self._path, found, b''.join(kept))
    size = self._path.stat().st_size if self._path.exists() else 0
    self._good_bytes = size

  def _note_missing(self, steps: Collection[int]) -> None:
    """Warns if a rollout that earlier starts have done has no line."""
    expected = range((self._resumed_step or 0) + 1)
    if missing := [step for step in expected if step not in steps]:
      shown = ', '.join(map(str, missing[:5]))
      self._warn(
        f'{self._path.name} has no whole line of {len(missing)} of '
        f'{len(expected)} rollouts ({shown}{", ..." * (len(missing) > 5)}); '
        'their metrics are lost, and the run goes on.'
      )

  def _recall(self, records: Sequence[Mapping[str, Any]]) -> None:
    """Takes in what earlier starts have measured."""
    found: History = {}
    for record in records:
      for name in {_HELDOUT, *self._names}:
        if isinstance(value := record.get(name), int | float):
          found.setdefault(name, []).append((record['step'], value))
    # If the file could not be read at once, rollouts of this start have come.
    self.heldout[:0] = found.get(_HELDOUT, ())
    self._history = {name: found[name] for name in self._names if name in found}
    self._start -= (records[-1].get('elapsed_secs') if records else None) or 0.0

  def _flush(self) -> None:
    """Appends the waiting lines; after an OSError they wait on."""
    try:
      if self._good_bytes is None:
        self._put_aside()
      # Whatever the failed try has written of its lines.
      elif self.failed_writes:
        self._drop_half_line()
      with self._path.open('ab') as file:
        file.write(b''.join(self._pending))
        file.flush()
        end = file.tell()
    except OSError as error:
      # If this fails too, the next flush begins with it.
      with contextlib.suppress(OSError):
        self._drop_half_line()
      self._note_failure(error)
    else:
      self._good_bytes, self.failed_writes = end, 0
      self._pending.clear()

  def _note_failure(self, error: OSError) -> None:
    """Counts a try that failed, and warns of the first in a row."""
    if not self.failed_writes:
      self._warn(
        f'{self._path.name} cannot be written ({error}); its lines wait in '
        'memory and are tried again after every rollout.'
      )
    self.failed_writes += 1

  def _drop_half_line(self) -> None:
    good = self._good_bytes
    if good is None or not self._path.exists():
      return
    if self._path.stat().st_size > good:
      os.truncate(self._path, good)


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


def _up_to(found: bytes, step: int) -> Iterator[tuple[bytes, dict[str, Any]]]:
  """The complete lines that are not after `step`, and their records."""
  for line in found.splitlines():
    record = _parse(line)
    if record is not None and record['step'] <= step:
      yield line, record


def _cut_back(path: pathlib.Path, found: bytes, kept: bytes) -> None:
  """Replaces what was found in a file by what is kept of it.

  Either way a kill leaves the old file or the new one.
  """
  if found.startswith(kept):
    # Mostly so: later rollouts are at the end. This needs no room on the disk.
    if len(kept) < len(found):
      os.truncate(path, len(kept))
    return
  whole_files.write(path, kept)


def _parse(line: bytes) -> dict[str, Any] | None:
  """The record of a line, or None if the line is incomplete."""
  try:
    record = json.loads(line)
  except (ValueError, RecursionError):
    return None
  whole = isinstance(record, dict) and isinstance(record.get('step'), int)
  return record if whole else None
