"""Prompts in ArrayRecord files, whose records are JSON objects in UTF-8."""

from collections.abc import Sequence
import functools
import os
import threading
from typing import Any

import numpy as np

from grpo_jax.data import _files
from grpo_jax.data import _records


def array_record_source(
  paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
  prompt_field: str = 'prompt',
  answer_field: str | None = 'answer',
  last_turn: str = 'answer',
) -> _records.FileSource:
  """Random access to the records of ArrayRecord files, one after the other.

  ArrayRecord holds records of bytes; here each is a JSON object, as on a line
  of a JSONL file. Write the files with the option 'group_size:1': reading a
  record unpacks the whole group that it is in.

  Args:
    paths: One file or several.
    prompt_field: See `JsonlSource`.
    answer_field: See `JsonlSource`.
    last_turn: See `JsonlSource`.

  Returns:
    A `FileSource`.

  Raises:
    OSError: A file is not there.
    ValueError: A file cannot be read, or a record cannot be used.
  """
  if isinstance(paths, str | os.PathLike):
    paths = [paths]
  whole = tuple(os.path.abspath(path) for path in paths)
  return _records.FileSource(
    ', '.join(repr(str(path)) for path in paths),
    functools.partial(_rows, whole),
    prompt_field,
    answer_field,
    last_turn,
  )


class Rows:
  """Random access to the records of ArrayRecord files, as bytes.

  `ArrayRecordDataSource` of the package does this too, but reads a record of a
  file with a million in 8 ms (array_record 0.8), because it hands over a list
  of places. Reading a range takes 5 us.

  Args:
    files: The path of each file, the place in it of the first record to read,
      and how many to read; None: all.
  """

  def __init__(self, files: Sequence[tuple[str, int, int | None]]):
    self._readers = [_opened(path) for path, _, _ in files]
    self._first = [first for _, first, _ in files]
    sizes = [
      reader.num_records() if count is None else count
      for reader, (_, _, count) in zip(self._readers, files, strict=True)
    ]
    self._ends = np.cumsum(sizes, dtype=np.int64)
    self._lock = threading.Lock()

  def __len__(self) -> int:
    return int(self._ends[-1]) if len(self._ends) else 0

  def __getitem__(self, place: int) -> bytes:
    number = int(np.searchsorted(self._ends, place, 'right'))
    before = int(self._ends[number - 1]) if number else 0
    place += self._first[number] - before
    with self._lock:
      return self._readers[number].read(place, place + 1)[0]


def _rows(paths: Sequence[str]) -> Rows:
  return Rows([(path, 0, None) for path in paths])


def _opened(path: str) -> Any:
  """A reader of one file, which does not read ahead."""
  import importlib

  # It is built in C++, and no type checker knows it.
  array_record_module: Any = importlib.import_module(
    'array_record.python.array_record_module'
  )

  _files.refuse_special(path)
  try:
    reader = array_record_module.ArrayRecordReader(
      path, options='readahead_buffer_size:0', file_reader_buffer_size=2**15
    )
    if not reader.ok():  # closing it raises an error that says why
      reader.close()
    return reader
  except (RuntimeError, ValueError) as error:
    raise ValueError(
      f'{path!r} cannot be read as ArrayRecord ({error}); give a file that'
      ' array_record has written.'
    ) from error
