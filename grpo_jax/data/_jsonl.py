"""Prompts in a JSONL file: one JSON object per line."""

import dataclasses
import json
import os
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class JsonlSource:
  """Random access to the records of a JSONL file.

  The file is read once at construction: every line is checked, and only its
  byte offset is kept (8 bytes per record). A read opens the file anew, so a
  source can be pickled and read by several threads; the file must not change
  meanwhile. Blank lines are skipped.

  An item is the whole record, with 'prompt' and 'answer' set from the named
  fields: a record {'question': '1+1=', 'solution': 2, 'level': 'easy'} read
  with ('question', 'solution') has these three fields and both of ours.

  Args:
    path: the file, UTF-8.
    prompt_field: the field that holds the prompt, a string.
    answer_field: the field that holds the reference answer, any JSON value
      but null; None if rewards need no answer.

  Raises:
    ValueError: a file without records; or a line that is not a JSON object
      lacks a field, or has one called index; by file and line (from 1).
  """

  path: str | os.PathLike[str]
  prompt_field: str = 'prompt'
  answer_field: str | None = 'answer'
  _offsets: np.ndarray = dataclasses.field(
    init=False, repr=False, compare=False
  )

  def __post_init__(self):
    offsets, offset = [], 0
    with open(self.path, 'rb') as file:
      for number, line in enumerate(file, start=1):
        if line.strip():
          self._check(number, line)
          offsets.append(offset)
        offset += len(line)
    if not offsets:
      raise ValueError(
        f'The file {str(self.path)!r} holds no record, but a prompt source'
        ' needs at least one; write one JSON object per line.'
      )
    object.__setattr__(self, '_offsets', np.asarray(offsets, np.int64))

  def __len__(self) -> int:
    return len(self._offsets)

  def __getitem__(self, index: int) -> dict[str, Any]:
    with open(self.path, 'rb') as file:
      file.seek(self._offsets[index])
      record = _parse(file.readline())
    fields = {'prompt': record[self.prompt_field]}
    if self.answer_field is not None:
      fields['answer'] = record[self.answer_field]
    return record | fields

  def _check(self, number: int, line: bytes):
    """Raises a ValueError that names the line if it cannot be used."""
    where = f'Line {number} of {str(self.path)!r}'
    try:
      record = _parse(line)
    except ValueError as error:  # also what undecodable bytes raise
      raise ValueError(
        f'{where} is not valid JSON in UTF-8 ({error}); write one JSON object'
        ' per line.'
      ) from error
    if not isinstance(record, dict):
      raise ValueError(
        f'{where} is a JSON {type(record).__name__}, but an object is'
        f' required; write it as {{"{self.prompt_field}": ...}}.'
      )
    if 'index' in record:
      raise ValueError(
        f"{where} has a field 'index', which is the name of the global prompt"
        ' counter; rename it.'
      )
    prompt = record.get(self.prompt_field)
    if not isinstance(prompt, str) or not prompt:
      raise ValueError(
        f'{where} needs a text in the field {self.prompt_field!r}, but has'
        f' {record.get(self.prompt_field)!r:.80} and the fields'
        f' {sorted(record)}; correct the line or name another prompt_field.'
      )
    if self.answer_field is not None and record.get(self.answer_field) is None:
      raise ValueError(
        f'{where} needs a value in the field {self.answer_field!r}, but has'
        f' the fields {sorted(record)}; correct the line, name another'
        ' answer_field, or pass answer_field=None.'
      )


def _parse(line: bytes) -> Any:
  return json.loads(line.decode('utf-8-sig'))  # a first line may have a mark
