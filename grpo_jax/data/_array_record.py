"""Prompts in ArrayRecord files, and in data sets of TensorFlow Datasets.

The records of a file are JSON objects in UTF-8. Those of a data set are what
`tfds.data_source` finds, which needs no TensorFlow. The data set must have been
prepared in ArrayRecord files, as `tfds_builders.py` does for GSM8K and MATH,
and as `download_and_prepare` of a builder does that was made with
`file_format='array_record'`. Most builders of TFDS itself prepare their data
without TensorFlow too; one that calls it says so when it is run.
"""

from collections.abc import Sequence
import functools
import os
import threading
from typing import Any

import numpy as np

from grpo_jax.config import plain_text
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
    functools.partial(raw_rows, absolute),
    prompt_field,
    answer_field,
    last_turn,
  )


class _Records:
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


def raw_rows(paths: Sequence[str]) -> _Records:
  """Random access to the records of files, as bytes."""
  return _Records([(path, 0, None) for path in paths])


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


def tfds_source(
  name: str,
  split: str,
  data_dir: str | os.PathLike[str] | None = None,
  prompt_field: str = 'prompt',
  answer_field: str | None = 'answer',
  last_turn: str = 'answer',
) -> _records.FileSource:
  """Random access to a prepared data set of TensorFlow Datasets.

  Texts become `str`, and arrays become lists.

  Args:
    name: As `tfds.data_source` takes it: 'gsm8k', or with a config and a
      version, as in 'wiki/en:1.0.0'.
    split: Such as 'train', or a part of one, as in 'train[:90%]'.
    data_dir: Where the data was prepared; None for ~/tensorflow_datasets.
    prompt_field: The field that holds the prompt.
    answer_field: The field that holds the answer; None if none is needed.
    last_turn: Whether a last turn by the assistant is the 'answer', or stays as
      a 'prefill' of the completion.

  Returns:
    A `FileSource`.

  Raises:
    ValueError: tensorflow-datasets is not installed, the data set has not been
      prepared, it has no such split, or a record cannot be used.
  """
  where = None
  if data_dir is not None:
    where = os.path.abspath(os.path.expanduser(data_dir))
  return _records.FileSource(
    f"'tfds:{name}' (split {split!r})",
    functools.partial(_Examples, name, split, where),
    prompt_field,
    answer_field,
    last_turn,
  )


def _imported() -> Any:
  """The package tensorflow_datasets.

  Raises:
    ValueError: It is not installed.
  """
  try:
    import tensorflow_datasets
  except ImportError as error:
    raise ValueError(
      f'TensorFlow Datasets cannot be imported ({error}); install it with pip'
      " install 'grpo_jax[tfds]'."
    ) from error
  return tensorflow_datasets


class _Examples:
  """The examples, as plain Python values."""

  def __init__(self, name: str, split: str, data_dir: str | None):
    tfds = _imported()
    place = data_dir or '~/tensorflow_datasets'
    try:
      # Nothing is downloaded: a run must not begin with an hour of it.
      found = tfds.data_source(
        name, split=split, data_dir=data_dir, download=False
      )
    except (tfds.core.DatasetNotFoundError, AssertionError) as error:
      raise ValueError(
        f"'tfds:{name}' has not been prepared in {place}; prepare it first, as"
        ' `python -m grpo_jax.data.tfds_builders gsm8k` does for GSM8K, or'
        ' give its data_dir in the kwargs of the source.'
      ) from error
    except Exception as error:  # a builder of TFDS may raise anything
      reason = plain_text.first_line(error)
      raise ValueError(
        f"The split {split!r} of 'tfds:{name}' in {place} cannot be read"
        f' ({plain_text.kind(error)}: {reason}); name a split that it has in'
        ' the kwargs of the source, and prepare the data with file_format='
        "'array_record'."
      ) from error

    about = found.dataset_info
    self._features = about.features
    # Read by ourselves, because TFDS takes 8 ms for each of a million records.
    self._records = _Records(
      [
        (str(part.filename), part.skip, part.take)
        for part in about.splits[split].file_instructions
      ]
    )

  def __len__(self) -> int:
    return len(self._records)

  def __getitem__(self, place: int) -> dict[str, Any]:
    example = self._features.deserialize_example_np(self._records[place])
    return _plain(example)


def _plain(value: Any) -> Any:
  """A value of TFDS without NumPy; bytes that are UTF-8 become a text."""
  if isinstance(value, dict):
    return {name: _plain(item) for name, item in value.items()}
  if isinstance(value, np.ndarray | np.generic):
    if value.dtype.kind == 'f' and value.dtype.itemsize < 8:
      # The float32 that is 0.1 is meant, and not the double next to it.
      return (
        [*map(_plain, np.asarray(value))] if value.ndim else float(str(value))
      )
    return _plain(value.tolist())
  if isinstance(value, list | tuple):
    return [_plain(item) for item in value]
  if isinstance(value, bytes):
    try:
      return value.decode()
    except UnicodeDecodeError:  # an image, say
      return value
  return value
