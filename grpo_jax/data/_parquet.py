"""Prompts in Parquet files, and in what `save_to_disk` of `datasets` writes.

Parquet is written in row groups, each of which is decoded as a whole. So a few
row groups are kept in memory. A record of another one costs decoding it, which
takes 8 ms for a thousand rows, and some writers put a million rows into one. So
larger files are written out once, batch by batch, as an Arrow stream in a
temporary file, which then is read row by row through a memory map.

A file keeps texts that repeat as a dictionary and numbers. They stay so in
memory: a megabyte can stand for gigabytes of texts.

The folders that `save_to_disk` of Hugging Face datasets has written hold Arrow
streams, which are read through a memory map too. The package `datasets` is not
needed.
"""

import collections
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
import functools
import json
import os
import pathlib
import tempfile
import threading
from typing import Any

import numpy as np

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
    prompt_field: The field that holds the prompt.
    answer_field: The field that holds the answer; None if none is needed.
    last_turn: Whether a last turn by the assistant is the 'answer', or stays as
      a 'prefill' of the completion.

  Returns:
    A `FileSource`.

  Raises:
    OSError: A file is not there.
    ValueError: A file cannot be read, or a record cannot be used.
  """
  if isinstance(paths, str | os.PathLike):
    paths = [paths]
  absolute = tuple(os.path.abspath(path) for path in paths)
  return _records.FileSource(
    ', '.join(repr(str(path)) for path in paths),
    functools.partial(_parquet_rows, absolute),
    prompt_field,
    answer_field,
    last_turn,
  )


def _parquet_rows(paths: Sequence[str]) -> Any:
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

  # Asking each of a thousand row groups takes longer than decoding one.
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


def _as_meant(kind: Any) -> Callable[[Any], Any] | None:
  """What makes the number that was meant of one of 16 or 32 bits.

  Arrow gives the float32 that is 0.1 as 0.10000000149011612, which no answer of
  a model is equal to.

  Args:
    kind: A `pyarrow.DataType`.

  Returns:
    A function of a value of this type; None if there is no such number in it.
  """
  import pyarrow as pa

  if pa.types.is_float16(kind) or pa.types.is_float32(kind):
    narrow = kind.to_pandas_dtype()
    return lambda x: None if x is None else float(str(narrow(x)))
  if (
    pa.types.is_list(kind)
    or pa.types.is_large_list(kind)
    or pa.types.is_fixed_size_list(kind)
  ):
    item = _as_meant(kind.value_type)
    return item and (lambda x: None if x is None else [*map(item, x)])
  return _row_as_meant(kind) if pa.types.is_struct(kind) else None


def _row_as_meant(fields: Iterable[Any]) -> Callable[[Any], Any] | None:
  """As `_as_meant`, of a dict with these fields, each a `pyarrow.Field`."""
  found = {one.name: _as_meant(one.type) for one in fields}
  meant = {name: function for name, function in found.items() if function}
  if not meant:
    return None
  return lambda x: (
    x and {**x, **{name: f(x[name]) for name, f in meant.items()}}
  )


class _BatchRows:
  """Random access to the rows of record batches.

  Args:
    batches: `pyarrow.RecordBatch`es of one schema.
  """

  def __init__(self, batches: Iterable[Any]):
    self._batches = [batch for batch in batches if batch.num_rows]
    sizes = [batch.num_rows for batch in self._batches]
    self._ends = np.cumsum(sizes, dtype=np.int64)
    schema = self._batches[0].schema if self._batches else ()
    self._meant = _row_as_meant(schema)

  def __len__(self) -> int:
    return int(self._ends[-1]) if len(self._ends) else 0

  def __getitem__(self, place: int) -> dict[str, Any]:
    batch = int(np.searchsorted(self._ends, place, 'right'))
    first = int(self._ends[batch - 1]) if batch else 0
    (row,) = self._batches[batch].slice(place - first, 1).to_pylist()
    return self._meant(row) if self._meant else row


def _stream_batches(path: str) -> Iterable[Any]:
  """The record batches of an Arrow stream, which stay on the disk."""
  import pyarrow as pa

  _files.refuse_special(path)
  try:
    with pa.memory_map(path) as file:
      yield from pa.ipc.open_stream(file)
  except pa.ArrowInvalid as error:
    raise ValueError(
      f'{path!r} cannot be read as an Arrow stream ({error}); save the dataset'
      ' again.'
    ) from error


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
    # The schema of the files that were read last, and `_row_as_meant` of it.
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
      self._meant = table.schema, _row_as_meant(table.schema)
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
def _written_out(paths: tuple[str, ...], changed: Any) -> _BatchRows:
  """The rows in temporary files, which have lost their names already.

  Args:
    paths: The files.
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
  return _BatchRows(batches)


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
    return list(_stream_batches(copy.name))


def arrow_source(
  folder: str | os.PathLike[str],
  split: str | None = None,
  prompt_field: str = 'prompt',
  answer_field: str | None = 'answer',
  last_turn: str = 'answer',
) -> _records.FileSource:
  """Random access to a Hugging Face dataset on disk.

  Args:
    folder: What `save_to_disk` was given, of a `Dataset` or a `DatasetDict`.
    split: The split of a `DatasetDict`, such as 'train'; None for a `Dataset`.
    prompt_field: The field that holds the prompt.
    answer_field: The field that holds the answer; None if none is needed.
    last_turn: Whether a last turn by the assistant is the 'answer', or stays as
      a 'prefill' of the completion.

  Returns:
    A `FileSource`.

  Raises:
    OSError: A file is not there.
    ValueError: The folder holds no such dataset, or has no such split, or a
      record cannot be used.
  """
  whole, name = pathlib.Path(os.path.abspath(folder)), str(folder)
  if splits_file(whole).exists():
    splits = _json(splits_file(whole)).get('splits')
    if not isinstance(splits, list) or split not in splits:
      raise ValueError(
        f'The folder {name!r} has the splits {splits}, and {split!r} was asked'
        " for; name one in the kwargs of the source, as in {'split': 'train'}."
      )
    whole, name = whole / str(split), f'{name}/{split}'
  elif split is not None:
    raise ValueError(
      f'The folder {name!r} holds a single dataset without splits, but split='
      f'{split!r} was asked for; leave the split out.'
    )
  files = _stream_files(whole, name)
  opened = functools.partial(_streamed_rows, files)
  return _records.FileSource(
    repr(name), opened, prompt_field, answer_field, last_turn
  )


def splits_file(folder: pathlib.Path) -> pathlib.Path:
  """The file that names the splits of a dataset, if it has some."""
  return folder / 'dataset_dict.json'


def raw_rows(folder: pathlib.Path) -> _BatchRows:
  """Random access to the records of a dataset on disk, of its first split.

  Raises:
    OSError: A file is not there.
    ValueError: The folder holds no such dataset.
  """
  if splits_file(folder).exists():
    folder = folder / str(next(iter(_json(splits_file(folder))['splits'])))
  return _streamed_rows(_stream_files(folder, str(folder)))


def _streamed_rows(files: Sequence[str]) -> _BatchRows:
  return _BatchRows(batch for path in files for batch in _stream_batches(path))


def _stream_files(folder: pathlib.Path, name: str) -> tuple[str, ...]:
  """The data files of a dataset, in their order."""
  state = _json(folder / 'state.json')
  # Older versions could save an order of the rows beside the rows.
  if state.get('_indices_data_files') or state.get('_indices_files'):
    raise ValueError(
      f'The dataset in {name!r} was saved with an order of its rows apart; call'
      ' flatten_indices() before save_to_disk().'
    )
  files = state.get('_data_files')
  if not isinstance(files, list) or not files:
    raise ValueError(
      f'{name!r}/state.json names no data files; save the dataset again with'
      ' save_to_disk().'
    )
  return tuple(str(folder / one['filename']) for one in files)


def _json(path: pathlib.Path) -> dict[str, Any]:
  try:
    value = json.loads(path.read_text())
  except ValueError as error:
    raise ValueError(
      f'{str(path)!r} is no JSON ({error}); save the dataset again.'
    ) from error
  return value if isinstance(value, dict) else {}
