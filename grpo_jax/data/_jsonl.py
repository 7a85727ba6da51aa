"""Prompts in a JSONL file, which has one JSON object on each line.

Python's json reads the lines, and not pyarrow.json, which makes columns of one
type. That changes records without a word: a text such as '2024-01-01' becomes a
date, a long integer becomes a float, and a field that one record lacks becomes
None in it. And its errors do not name the line.
"""

import codecs
from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses
import os
from typing import Any
from typing import BinaryIO

import numpy as np

from grpo_jax.data import _files
from grpo_jax.data import _records
from grpo_jax.data import _views

# Some lines of a larger file are checked when the source is made: checking all
# of a million takes ten seconds, and finding where they begin half a second.
_CHECKED_BYTES = 2**24
_CHUNK_BYTES = 2**22  # read at once, which bounds the memory
_OTHERS = {  # how files of other kinds begin
  b'\x1f\x8b': 'is compressed with gzip; unpack it first, with gunzip',
  b'BZh': 'is compressed with bzip2; unpack it first, with bunzip2',
  b'\x28\xb5\x2f\xfd': 'is compressed with zstd; unpack it first, with unzstd',
  b'\xfd7zXZ\x00': 'is compressed with xz; unpack it first, with unxz',
  b'PK\x03\x04': 'is a zip archive; unpack it first, with unzip',
  b'PAR1': "is a Parquet file; give it a name that ends with '.parquet'",
}
_BLANK = np.frombuffer(b' \t\n\r\x0b\x0c', np.uint8)


class NoRecord(ValueError):
  """A file holds no record."""


def jsonl_source(
  paths: Sequence[str | os.PathLike[str]],
  prompt_field: str = 'prompt',
  answer_field: str | None = 'answer',
  last_turn: str = 'answer',
) -> Any:
  """The records of JSONL files, one file after the other.

  A file without records among others that have some is passed over.

  Args:
    paths: One file or several.
    prompt_field: The field that holds the prompt.
    answer_field: The field that holds the answer; None if none is needed.
    last_turn: Whether a last turn by the assistant is the 'answer', or stays as
      a 'prefill' of the completion.

  Returns:
    A `JsonlSource`, or several that are joined.

  Raises:
    OSError: A file is not there.
    ValueError: There is no record in any file, or one cannot be used.
  """
  found, empty = [], None
  for path in paths:
    try:
      found.append(JsonlSource(path, prompt_field, answer_field, last_turn))
    except NoRecord as error:
      empty = error
  if not found and empty:
    raise empty
  return found[0] if len(found) == 1 else _views.Joined(found)


@dataclasses.dataclass(frozen=True)
class JsonlSource:
  """Random access to the records of a JSONL file.

  At construction the file is read once, and only the position of each record is
  kept, 8 bytes each. Every line of a file of up to 16 MiB is checked then, and
  a sample of the lines of a larger one. Each record is checked again when it is
  read. Reading a record opens the file again, so a source can be pickled and
  read by several threads. Iteration reads the whole file once. The file must
  not change meanwhile. Blank lines are skipped.

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
    last_turn: what becomes of the turn of a chat that ends with the assistant:
      'answer' takes it off the prompt, and it is the answer of a record without
      one, see `without_last_turn`; 'prefill' leaves it, and a completion goes
      on where it ends.

  Raises:
    ValueError: the file has no records; or a line is not a JSON object, or
      lacks one of the fields, or has a number in one of them that is NaN or
      infinite. Other fields may hold such numbers, which Python's json and
      pandas write. The message names the file and the line, counted from 1.
  """

  path: str | os.PathLike[str]
  prompt_field: str = 'prompt'
  answer_field: str | None = 'answer'
  last_turn: str = 'answer'
  _file: str = dataclasses.field(init=False, repr=False, compare=False)
  _offsets: np.ndarray = dataclasses.field(
    init=False, repr=False, compare=False
  )
  # The number of each line, counted from 0; None if no line is blank.
  _lines: np.ndarray | None = dataclasses.field(
    init=False, repr=False, compare=False
  )

  def __post_init__(self):
    # Absolute, because a reward function may change the directory. A frozen
    # dataclass refuses plain assignment, here too.
    object.__setattr__(self, '_file', os.path.abspath(self.path))
    _files.refuse_special(self.path)
    # As bytes: offsets into text are no positions that a file can seek.
    with open(self.path, 'rb') as file:
      _refuse_others(file, str(self.path))
      offsets, lines = _starts(file)
      object.__setattr__(self, '_offsets', offsets)
      object.__setattr__(self, '_lines', lines)
      if not len(offsets):
        raise NoRecord(
          f'The file {str(self.path)!r} holds no record, but a source of'
          ' prompts needs at least one; write one JSON object on each line.'
        )
      places = _records.checked_places(len(offsets))
      if os.fstat(file.fileno()).st_size <= _CHECKED_BYTES:
        places = range(len(offsets))
      for place in places:
        self._read(file, place)

  def __len__(self) -> int:
    return len(self._offsets)

  def __getitem__(self, index: int) -> dict[str, Any]:
    place = range(len(self))[index]  # raises an IndexError past the end
    with open(self._file, 'rb') as file:
      return self._read(file, place)

  def __iter__(self) -> Iterator[dict[str, Any]]:
    with open(self._file, 'rb') as file:
      for place in range(len(self)):
        yield self._read(file, place)

  def name_of(self, place: int) -> str:
    """How messages call the record at a place, counted from 0: its line."""
    number = place if self._lines is None else int(self._lines[place])
    return f'Line {number + 1} of {str(self.path)!r}'

  def _read(self, file: BinaryIO, place: int) -> dict[str, Any]:
    """The record at a place; a ValueError names its line if it is unusable."""
    offset = int(self._offsets[place])
    if file.tell() != offset:  # a seek would drop what has been read ahead
      file.seek(offset)
    where = self.name_of(place)
    record = _records.parsed(file.readline(), where, self.prompt_field)
    return _records.checked(
      record, where, self.prompt_field, self.answer_field, self.last_turn
    )


def _refuse_others(file: BinaryIO, name: str) -> None:
  """Raises a ValueError if a file is of a kind that is often taken for JSONL.

  Args:
    file: At its beginning, and left there.
    name: What the message calls the file.
  """
  first = file.read(64)
  file.seek(0)
  for begins, what in _OTHERS.items():
    if first.startswith(begins):
      raise ValueError(f'The file {name!r} {what}.')
  if first.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b'['):
    raise ValueError(
      f'The file {name!r} is an array; write one record per line, without'
      ' brackets around them and commas between them.'
    )


def _starts(file: BinaryIO) -> tuple[np.ndarray, np.ndarray | None]:
  """Where the lines that are not blank begin, and their numbers from 0.

  The numbers are None if no line is blank.
  """
  parts, first, done, begins = [], [], 0, True
  while chunk := file.read(_CHUNK_BYTES):
    codes = np.frombuffer(chunk, np.uint8)
    here = np.flatnonzero(codes == ord('\n')) + 1
    if begins:  # a line begins with the chunk
      here = np.concatenate([[0], here])
    begins = chunk.endswith(b'\n')
    here = here[here < len(codes)]
    parts.append(here + done)
    first.append(codes[here])
    done += len(codes)
  starts = np.concatenate([np.zeros(0, np.int64), *parts])
  leads = np.concatenate([np.zeros(0, np.uint8), *first])
  blank = np.zeros(len(starts), bool)
  for place in np.flatnonzero(np.isin(leads, _BLANK)):
    file.seek(starts[place])
    blank[place] = not file.readline().strip()
  if not blank.any():
    return starts, None
  return starts[~blank], np.flatnonzero(~blank)
