"""Prompts in ArrayRecord files, whose records are JSON objects in UTF-8."""

from collections.abc import Sequence
import functools
import os

from grpo_jax.data import _records


def array_record_source(
  paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
  prompt_field: str = 'prompt',
  answer_field: str | None = 'answer',
) -> _records.FileSource:
  """Random access to the records of ArrayRecord files, one after the other.

  ArrayRecord holds records of bytes; here each is a JSON object, as on a line
  of a JSONL file. Write the files with the option 'group_size:1': reading a
  record unpacks the whole group that it is in.

  Args:
    paths: One file or several.
    prompt_field: See `JsonlSource`.
    answer_field: See `JsonlSource`.

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
  )


def _rows(paths: Sequence[str]):
  """The records as bytes."""
  from array_record.python import array_record_data_source

  for path in paths:
    open(path, 'rb').close()  # whose error says in a word what is wrong
  try:
    return array_record_data_source.ArrayRecordDataSource(list(paths))
  except (RuntimeError, ValueError) as error:
    raise ValueError(
      f'{", ".join(map(repr, paths))} cannot be read as ArrayRecord ({error});'
      ' give files that array_record has written.'
    ) from error
