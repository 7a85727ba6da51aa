"""Prompts in data sets of TensorFlow Datasets, read without TensorFlow.

`tfds.data_source` reads ArrayRecord files, which needs no TensorFlow. The data
set must have been prepared in this format, as `tfds_builders.py` does for GSM8K
and MATH, and as `download_and_prepare` of a builder does that was made with
`file_format='array_record'`. Most builders of TFDS itself prepare their data
without TensorFlow too; one that calls it says so when it is run.
"""

import functools
import os
from typing import Any

import numpy as np

from grpo_jax.config import plain_text
from grpo_jax.data import _array_record
from grpo_jax.data import _records


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
    prompt_field: See `JsonlSource`.
    answer_field: See `JsonlSource`.
    last_turn: See `JsonlSource`.

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
    functools.partial(_Rows, name, split, where),
    prompt_field,
    answer_field,
    last_turn,
  )


def imported() -> Any:
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


class _Rows:
  """The examples, as plain Python values."""

  def __init__(self, name: str, split: str, data_dir: str | None):
    tfds = imported()
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
    self._records = _array_record.Rows(
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
