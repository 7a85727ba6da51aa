"""Prompts in a folder that `save_to_disk` of Hugging Face datasets has written.

Such a folder holds Arrow streams. They are read through a memory map, so a file
may be larger than the memory. The package `datasets` is not needed.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
import functools
import json
import os
import pathlib
from typing import Any

import numpy as np

from grpo_jax.data import _files
from grpo_jax.data import _records


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
    prompt_field: See `JsonlSource`.
    answer_field: See `JsonlSource`.
    last_turn: See `JsonlSource`.

  Returns:
    A `FileSource`.

  Raises:
    OSError: A file is not there.
    ValueError: The folder holds no such dataset, or has no such split, or a
      record cannot be used.
  """
  whole, name = pathlib.Path(os.path.abspath(folder)), str(folder)
  if (whole / 'dataset_dict.json').exists():
    splits = _json(whole / 'dataset_dict.json').get('splits')
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
  files = _data_files(whole, name)
  opened = functools.partial(_rows, files)
  return _records.FileSource(
    repr(name), opened, prompt_field, answer_field, last_turn
  )


def as_meant(kind: Any) -> Callable[[Any], Any] | None:
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
    item = as_meant(kind.value_type)
    return item and (lambda x: None if x is None else [*map(item, x)])
  return row_as_meant(kind) if pa.types.is_struct(kind) else None


def row_as_meant(fields: Iterable[Any]) -> Callable[[Any], Any] | None:
  """As `as_meant`, of a dict with these fields, each a `pyarrow.Field`."""
  found = {one.name: as_meant(one.type) for one in fields}
  meant = {name: of_field for name, of_field in found.items() if of_field}
  if not meant:
    return None
  return lambda x: (
    x and {**x, **{name: f(x[name]) for name, f in meant.items()}}
  )


class Rows:
  """Random access to the rows of record batches.

  Args:
    batches: `pyarrow.RecordBatch`es of one schema.
  """

  def __init__(self, batches: Iterable[Any]):
    self._batches = [batch for batch in batches if batch.num_rows]
    sizes = [batch.num_rows for batch in self._batches]
    self._ends = np.cumsum(sizes, dtype=np.int64)
    schema = self._batches[0].schema if self._batches else ()
    self._meant = row_as_meant(schema)

  def __len__(self) -> int:
    return int(self._ends[-1]) if len(self._ends) else 0

  def __getitem__(self, place: int) -> dict[str, Any]:
    batch = int(np.searchsorted(self._ends, place, 'right'))
    first = int(self._ends[batch - 1]) if batch else 0
    (row,) = self._batches[batch].slice(place - first, 1).to_pylist()
    return self._meant(row) if self._meant else row


def stream_batches(path: str) -> Iterable[Any]:
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


def _rows(files: Sequence[str]) -> Rows:
  return Rows(batch for path in files for batch in stream_batches(path))


def _data_files(folder: pathlib.Path, name: str) -> tuple[str, ...]:
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
