"""Prompts in a JSONL file, which has one JSON object on each line.

Python's json reads the lines, and not pyarrow.json, which makes columns of one
type. That changes records without a word: a text such as '2024-01-01' becomes a
date, a long integer becomes a float, and a field that one record lacks becomes
None in it. And its errors do not name the line.
"""

from collections.abc import Iterator
import dataclasses
import json
import math
import os
from typing import Any

import numpy as np

from grpo_jax.data._chat import prompt_problem


@dataclasses.dataclass(frozen=True)
class JsonlSource:
  """Random access to the records of a JSONL file.

  At construction the file is read once and every line is checked. Only the
  position of each record in the file is kept, 8 bytes each. Reading a record
  opens the file again, so a source can be pickled and read by several threads.
  Iteration reads the whole file once. The file must not change meanwhile. Blank
  lines are skipped.

  An item is the whole record, with two fields added: 'prompt' and 'answer',
  copies of the named fields. The record {'question': '1+1=', 'solution': 2}
  becomes {'question': '1+1=', 'solution': 2, 'prompt': '1+1=', 'answer': 2}
  with `prompt_field='question'` and `answer_field='solution'`.

  Args:
    path: the file, in UTF-8.
    prompt_field: the field that holds the prompt: a string that is not empty,
      or a list of messages such as {"role": "user", "content": "1+1="}.
    answer_field: the field that holds the reference answer, any JSON value but
      null; None if no reward needs an answer.

  Raises:
    ValueError: the file has no records; or a line is not a JSON object, or
      lacks one of the fields, or has a number in one of them that is NaN or
      infinite. Other fields may hold such numbers, which Python's json and
      pandas write. The message names the file and the line, counted from 1.
  """

  path: str | os.PathLike[str]
  prompt_field: str = 'prompt'
  answer_field: str | None = 'answer'
  _file: str = dataclasses.field(init=False, repr=False, compare=False)
  _offsets: np.ndarray = dataclasses.field(
    init=False, repr=False, compare=False
  )

  def __post_init__(self):
    offsets, offset = [], 0
    # Absolute, because a reward function may change the directory. A frozen
    # dataclass refuses plain assignment, here too.
    object.__setattr__(self, '_file', os.path.abspath(self.path))
    # As bytes: offsets into text are no positions that a file can seek.
    with open(self.path, 'rb') as file:
      for number, line in enumerate(file, start=1):
        if line.strip():
          self._check(number, line)
          offsets.append(offset)
        offset += len(line)
    if not offsets:
      raise ValueError(
        f'The file {str(self.path)!r} holds no record, but a source of prompts'
        ' needs at least one; write one JSON object on each line.'
      )
    object.__setattr__(self, '_offsets', np.asarray(offsets, np.int64))

  def __len__(self) -> int:
    return len(self._offsets)

  def __getitem__(self, index: int) -> dict[str, Any]:
    with open(self._file, 'rb') as file:
      file.seek(self._offsets[index])
      return self._record(file.readline())

  def __iter__(self) -> Iterator[dict[str, Any]]:
    with open(self._file, 'rb') as file:
      for line in file:
        if line.strip():
          yield self._record(line)

  def _record(self, line: bytes) -> dict[str, Any]:
    """The record in a line that `_check` has passed."""
    record = _parse(line)
    fields = {'prompt': record[self.prompt_field]}
    if self.answer_field is not None:
      fields['answer'] = record[self.answer_field]
    return record | fields

  def _check(self, number: int, line: bytes):
    """Raises a ValueError that names the line, if the line cannot be used."""
    where = f'Line {number} of {str(self.path)!r}'
    try:
      record = _parse(line)
    # Bytes that are no UTF-8 raise it too; thousands of lists, one in another,
    # a RecursionError.
    except (ValueError, RecursionError) as error:
      raise ValueError(
        f'{where} is not valid JSON in UTF-8 ({error}); write one JSON object'
        ' on each line.'
      ) from error
    if not isinstance(record, dict):
      raise ValueError(
        f'{where} is {json.dumps(record):.40}, but a JSON object is required;'
        f' write it as {{"{self.prompt_field}": ...}}.'
      )
    if problem := prompt_problem(record.get(self.prompt_field)):
      raise ValueError(
        f'{where} needs a text or a list of messages in the field'
        f' {self.prompt_field!r}, but {problem}, and the fields are'
        f' {sorted(record)}; correct the line or name another prompt_field.'
      )
    if self.answer_field is not None and record.get(self.answer_field) is None:
      raise ValueError(
        f'{where} needs a value in the field {self.answer_field!r}, but has'
        f' the fields {sorted(record)}; correct the line, name another'
        ' answer_field, or pass answer_field=None.'
      )
    # A record's own 'answer' is read too, where no other field is its answer.
    for field in (self.prompt_field, self.answer_field or 'answer'):
      if (unusable := _not_finite(record.get(field))) is not None:
        raise ValueError(
          f'{where} has the number {unusable} in the field {field!r}, but only'
          ' finite numbers can be used there; correct or remove the line.'
        )


def _parse(line: bytes) -> Any:
  # '-sig', because some editors begin a file with a byte-order mark.
  return json.loads(line.decode('utf-8-sig'))


def _not_finite(value: Any) -> float | None:
  """A number in a JSON value that is NaN or infinite; None if it has none."""
  # A loop, because the value may be nested as deeply as Python lets calls be.
  waiting = [value]
  while waiting:
    value = waiting.pop()
    if isinstance(value, dict | list):
      waiting += value.values() if isinstance(value, dict) else value
    elif isinstance(value, float) and not math.isfinite(value):
      return value
  return None
