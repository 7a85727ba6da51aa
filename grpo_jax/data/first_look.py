"""What a file holds, and which fields of a config read it.

A person who has a file of another package wants to know what to type. So the
first records are read without any config: their columns, the fields that seem
to hold the prompt and the answer, and what a run makes of each record with
these.
"""

from collections.abc import Mapping
import itertools
import os
import pathlib
from typing import Any
from typing import NamedTuple

from grpo_jax.config import plain_text
from grpo_jax.data import _array_record
from grpo_jax.data import _fields
from grpo_jax.data import _files
from grpo_jax.data import _parquet
from grpo_jax.data import _records
from grpo_jax.data import hub


class Made(NamedTuple):
  """What a run makes of a record, or why it makes nothing of it."""

  prompt: Any = None
  answer: Any = None
  problem: str = ''


class Look(NamedTuple):
  """What there is to say of a file.

  Attributes:
    name: What was given.
    columns: Of the first record, by name; of dicts in it too.
    settings: Fields of a config that differ from their defaults, and their
      values, by name.
    records: The first ones.
  """

  name: str
  columns: Mapping[str, Any]
  settings: Mapping[str, Any]
  records: tuple[Made, ...]


def look(
  name: str,
  most: int,
  prompt_field: str | None = None,
  answer_field: str | None = None,
) -> Look:
  """Reads the first records of a file.

  Args:
    name: A file, a pattern, a folder that `save_to_disk` has written, or a
      data set of the Hugging Face Hub, of which one file is downloaded.
    most: How many records to read, at least one.
    prompt_field: Where the prompt is; None looks for it.
    answer_field: Where the answer is; '' for none, None looks for it.

  Raises:
    OSError: There is no such file.
    ValueError: It cannot be read, or holds no record.
  """
  source: Any = name
  path = name
  if hub.parse(name):
    path, kwargs = hub.data_sample(name)
    source = ({'name': name, 'kwargs': kwargs},) if kwargs else name
  found = _first(path, max(most, 1))
  first = found[0]
  prompt, answer = _choose(first, prompt_field, answer_field)
  made = tuple(_make(one, prompt, answer) for one in found)
  settings: dict[str, Any] = {'data.train': source}
  if any(isinstance(one.prompt, list) for one in made):
    settings['data.chat'] = True
  if prompt != 'prompt':
    settings['data.prompt_field'] = prompt
  if answer != 'answer':
    settings['data.answer_field'] = answer
  columns = {
    column: _fields.value_of(first, column) for column in _fields.columns(first)
  }
  return Look(name, columns, settings, made)


def _choose(
  record: Mapping[str, Any], prompt: str | None, answer: str | None
) -> tuple[str, str]:
  """The fields of prompt and answer with which a record can be used.

  If there are none, the usual names, whose error says what is missing.
  """

  def is_made(prompt: str, answer: str = '') -> bool:
    return not _make(record, prompt, answer).problem

  fits = lambda value: value is not None
  asked = [prompt] if prompt else ['prompt']
  if prompt is None:
    asked += _fields.likely(record, 'prompt', True, fits)
  chosen = next(filter(is_made, asked), asked[0])
  if answer is not None:
    return chosen, answer
  names = ['answer', *_fields.likely(record, 'answer', False, fits)]
  parts = {chosen, *chosen.split('+')}
  names = [name for name in names if name not in parts]
  return chosen, next((x for x in names if is_made(chosen, x)), '')


def _make(record: Mapping[str, Any], prompt: str, answer: str) -> Made:
  try:
    made = _records.checked(record, 'Record', prompt, answer or None)
  except ValueError as error:
    return Made(problem=plain_text.said(error))
  return Made(made['prompt'], made.get('answer'))


def _first(name: str, most: int) -> list[dict[str, Any]]:
  """The first records, as the file holds them.

  Raises:
    OSError: There is no such file.
    ValueError: It cannot be read, or holds no record.
  """
  if os.path.isdir(name):
    found = _of_folder(pathlib.Path(name), most)
  else:
    # A name without a known end is that of a JSONL file too.
    read = _READ.get(_files.format_of(name) or '', _of_jsonl)
    # What is not there is said where it is opened.
    path, *_ = *_files.files(name), name
    found = read(path, most)
  if not found:
    raise ValueError(f'{name!r} holds no record; give a file that has some.')
  return found


def _of_jsonl(path: str, most: int) -> list[dict[str, Any]]:
  _files.refuse_special(path)
  with open(path, 'rb') as file:
    lines = (one for one in enumerate(file, start=1) if one[1].strip())
    return [
      _records.parsed(line, f'Line {number} of {path!r}', 'prompt')
      for number, line in itertools.islice(lines, most)
    ]


def _of_parquet(path: str, most: int) -> list[dict[str, Any]]:
  import pyarrow as pa
  from pyarrow import parquet

  _files.refuse_special(path)
  try:
    with parquet.ParquetFile(path) as file:
      batches = file.iter_batches(most, use_threads=False)
      return next(batches).to_pylist() if file.metadata.num_rows else []
  except pa.ArrowInvalid as error:
    raise ValueError(
      f'{path!r} cannot be read as Parquet ({error}); give a file that a'
      ' Parquet writer has closed.'
    ) from error


def _of_array_record(path: str, most: int) -> list[dict[str, Any]]:
  rows = _array_record.raw_rows([path])
  return [
    _records.parsed(rows[place], f'Record {place + 1} of {path!r}', 'prompt')
    for place in range(min(most, len(rows)))
  ]


_READ = {'parquet': _of_parquet, 'array_record': _of_array_record}


def _of_folder(folder: pathlib.Path, most: int) -> list[dict[str, Any]]:
  rows = _parquet.raw_rows(folder)
  return [rows[place] for place in range(min(most, len(rows)))]
