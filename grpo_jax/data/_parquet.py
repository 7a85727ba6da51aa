"""Prompts in Parquet files.

Parquet is written in row groups, each of which is decoded as a whole. So a few
row groups are kept in memory. A record of another one costs decoding it, which
takes 8 ms for a thousand rows, and some writers put a million rows into one. So
larger files are written out once, batch by batch, as an Arrow stream in a
temporary file, which then is read row by row through a memory map.

A file keeps texts that repeat as a dictionary and numbers. They stay so in
memory: a megabyte can stand for gigabytes of texts.
"""

import collections
from collections.abc import Sequence
import functools
import os
import pathlib
import tempfile
import threading
from typing import Any

import numpy as np

from grpo_jax.data import _arrow
from grpo_jax.data import _files
from grpo_jax.data import _records

_KEPT_BYTES = 2**26  # of decoded row groups, in memory
_WRITTEN_BYTES = 2**33  # of a temporary file, if row groups are small
_GROUP_BYTES = 2**22  # of a small row group
_BATCH_ROWS = 1000  # of the temporary file
_NUMBER_BYTES = 8  # of a decoded number, or of a text's place in a dictionary
_DICTIONARY_BYTES = 2**20  # writers begin no larger one
_SAVING_BYTES = 24  # for each text in the file; unlike ones take more
_ASKED_GROUPS = 20  # for their dictionaries
_TEXTS = ('STRING', 'JSON', 'ENUM', 'NONE')  # what may be a dictionary


def parquet_source(
  paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
  prompt_field: str = 'prompt',
  answer_field: str | None = 'answer',
  last_turn: str = 'answer',
) -> _records.FileSource:
  """Random access to the records of Parquet files, one after the other.

  At most 64 MiB of row groups are kept in memory. Larger files are written out
  as a temporary file of about the size of their data, in the user's cache
  directory; texts that repeat take no more room there than in the file. Files
  of more than 8 GiB are not, if they were written with row groups of up to 4
  MiB (`row_group_size=1000`, say); then the row group of each record is
  decoded.

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


def _rows(paths: Sequence[str]) -> Any:
  """The rows of all files, in row groups or through a temporary file."""
  import pyarrow as pa
  from pyarrow import parquet

  groups = []
  for path in paths:
    _files.refuse_special(path)
    try:
      about = parquet.read_metadata(path)
    except pa.ArrowInvalid as error:
      raise ValueError(
        f'{path!r} cannot be read as Parquet ({error}); give a file that a'
        ' Parquet writer has closed.'
      ) from error
    for number in range(about.num_row_groups):
      group = about.row_group(number)
      # In the file, a million equal numbers are a few bytes.
      cells = group.num_rows * group.num_columns
      size = max(group.total_byte_size, cells * _NUMBER_BYTES)
      groups.append((path, number, group.num_rows, size))
  sizes = [size for *_, size in groups]
  small = sum(sizes) > _WRITTEN_BYTES and max(sizes) <= _GROUP_BYTES
  if sum(sizes) > _KEPT_BYTES and not small:
    changed = tuple(os.stat(path).st_mtime_ns for path in paths)
    return _written_out(tuple(paths), changed)
  return _RowGroups([group[:3] for group in groups])


def _dictionaries(about: Any, whole: bool) -> list[str]:
  """The columns of texts that a file keeps as a dictionary and numbers.

  Args:
    about: The metadata of the file.
    whole: Only those that save much, and of which no part is written out as
      plain texts, which a writer does once the dictionary is large. The
      metadata do not say so, but then the column is larger than a dictionary
      and small numbers.
  """

  def is_one(group: int, column: int) -> bool:
    chunk = about.row_group(group).column(column)
    number = chunk.num_values
    most = min(
      _DICTIONARY_BYTES + number * 5 // 2,  # 18 bits and a little
      number * _SAVING_BYTES,
    )
    small = chunk.total_uncompressed_size <= most
    return bool(chunk.has_dictionary_page) and (small or not whole)

  # Of a thousand row groups, asking each would take longer than decoding one.
  groups = _records.some_places(about.num_row_groups, _ASKED_GROUPS)
  found = []
  for place in range(about.num_columns):
    column = about.schema.column(place)
    if (
      column.physical_type == 'BYTE_ARRAY'
      and column.logical_type.type in _TEXTS
    ):
      asked = (is_one(group, place) for group in groups)
      if all(asked) if whole else any(asked):
        found.append(column.path)
  return found


class _RowGroups:
  """Rows by group, of which those that were read last are kept.

  Args:
    groups: The file, the number in it and the rows of each row group.
  """

  def __init__(self, groups: Sequence[tuple[str, int, int]]):
    self._groups = [group for group in groups if group[2]]
    rows = [group[2] for group in self._groups]
    self._ends = np.cumsum(rows, dtype=np.int64)
    self._kept: collections.OrderedDict[int, Any] = collections.OrderedDict()
    self._lock = threading.Lock()
    self._files: dict[str, Any] = {}
    # Of the files that were read last: their schema, and `row_as_meant` of it.
    self._meant: tuple[Any, Any] | None = None

  def __len__(self) -> int:
    return int(self._ends[-1]) if len(self._ends) else 0

  def __getitem__(self, place: int) -> dict[str, Any]:
    number = int(np.searchsorted(self._ends, place, 'right'))
    first = int(self._ends[number - 1]) if number else 0
    table = self._table(number)
    # Of dictionaries, a slice's to_pylist takes twice as long.
    row = {
      name: column[place - first].as_py()
      for name, column in zip(table.column_names, table.columns, strict=True)
    }
    if self._meant is None or not table.schema.equals(self._meant[0]):
      self._meant = table.schema, _arrow.row_as_meant(table.schema)
    meant = self._meant[1]
    return meant(row) if meant else row

  def _table(self, number: int) -> Any:
    """A row group, decoded."""
    from pyarrow import parquet

    with self._lock:
      table = self._kept.pop(number, None)
      if table is None:
        path, group, _ = self._groups[number]
        # Opened once: reading what a file says of a thousand row groups takes
        # longer than reading one of them.
        if path not in self._files:
          about = parquet.read_metadata(path)
          self._files[path] = parquet.ParquetFile(
            path, metadata=about, read_dictionary=_dictionaries(about, False)
          )
        table = self._files[path].read_row_group(group, use_threads=False)
      self._kept[number] = table  # the last one in the order
      while (
        len(self._kept) > 1
        and sum(one.nbytes for one in self._kept.values()) > _KEPT_BYTES
      ):
        self._kept.popitem(last=False)
      return table


@functools.lru_cache(maxsize=4)  # a start opens its data two or three times
def _written_out(paths: tuple[str, ...], changed: Any) -> _arrow.Rows:
  """The rows in temporary files, which have lost their names already.

  Args:
    paths: Of the files.
    changed: When they were; after a change they are written out anew.
  """
  del changed
  # Beside the compiled programs: a temporary folder is often in memory.
  folder = _files.cache_directory()
  try:
    folder.mkdir(parents=True, exist_ok=True)
    batches = [batch for path in paths for batch in _through(path, folder)]
  except OSError as error:
    raise ValueError(
      f'{", ".join(map(repr, paths))} has row groups too large to be decoded'
      f' for each record, and no temporary file can be written to {folder}'
      f' ({error}); make room, or write the file with row_group_size=1000.'
    ) from error
  return _arrow.Rows(batches)


def _through(path: str, folder: pathlib.Path) -> list[Any]:
  """The record batches of a file, as they lie in a copy on the disk."""
  import pyarrow as pa
  from pyarrow import parquet

  about = parquet.read_metadata(path)
  # Each batch holds the dictionary up to there, which is one and the same only
  # if the whole column has it.
  columns = _dictionaries(about, whole=True)
  with (
    parquet.ParquetFile(
      path, metadata=about, read_dictionary=columns
    ) as source,
    tempfile.NamedTemporaryFile(dir=folder, suffix='.arrow') as copy,
  ):
    with pa.ipc.new_stream(copy, source.schema_arrow) as stream:
      # Group by group, because each has its own dictionaries.
      for number in range(source.num_row_groups):
        batches = source.iter_batches(
          _BATCH_ROWS, row_groups=[number], use_threads=False
        )
        for batch in batches:
          stream.write_batch(batch)
    copy.flush()
    # A memory map stays readable once its file has no name any more.
    return list(_arrow.stream_batches(copy.name))
