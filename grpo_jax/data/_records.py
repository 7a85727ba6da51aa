"""What all sources have in common: records with a prompt, checked and named.

A format of files needs a function that opens its files and returns their
*rows*: an object with a length, and at each place a dict, or JSON in bytes. A
`FileSource` opens them once in each process, checks them, and adds the prompt
and the answer.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
import dataclasses
import functools
import json
import math
from typing import Any

import numpy as np

from grpo_jax.config import plain_text
from grpo_jax.data import _fields
from grpo_jax.data import _messages
from grpo_jax.data import _views
from grpo_jax.data._chat import half_of_a_pair
from grpo_jax.data._chat import leaves
from grpo_jax.data._chat import prompt_problem
from grpo_jax.data._tokenizer import Tokenizer

# A source with more records checks a sample of 300 when it is made. It checks
# each record when it is read, as the others do.
MOST_CHECKED = 10_000
_SAMPLE = 300


def checked(
  record: Mapping[str, Any],
  where: str,
  prompt_field: str,
  answer_field: str | None,
  last_turn: str = 'answer',
) -> dict[str, Any]:
  """A record with its prompt and its answer, or an error that names it.

  Args:
    record: What the file holds.
    where: How the message names the record, as in "Line 3 of 'a.jsonl'".
    prompt_field: Where the prompt is; see `_fields.prompt_of`.
    answer_field: Where the answer is; None if none is needed.
    last_turn: Whether a last turn by the assistant is the 'answer', or stays as
      a 'prefill' of the completion.

  Returns:
    A new dict: the record, 'prompt', and 'answer' if there is a field for it.
    `without_last_turn` says what becomes of a last turn by the assistant.

  Raises:
    ValueError: A field is missing, or holds what cannot be used there.
  """
  kind = where.partition(' ')[0].lower()  # 'line' or 'record'
  raw = _fields.prompt_of(record, prompt_field)
  prompt, problem = _read_prompt(raw, record)
  if problem:
    fits = lambda value: not _read_prompt(value, record)[1]
    raise ValueError(
      f'{where} needs a text or a list of messages in the field'
      f' {prompt_field!r}, but {problem}, and the columns are'
      f' {_fields.described(record)}; correct the {kind} or name another'
      f' prompt_field{_such_as(record, prompt_field, True, fits)}.'
    )
  own = _fields.value_of(record, answer_field or 'answer')
  fields: Mapping[str, Any] = {'prompt': prompt, 'answer': own}
  if last_turn == 'answer':
    try:
      fields = _views.without_last_turn(fields)
    except ValueError as error:
      raise ValueError(f'{where} cannot be used: {error}') from error
  # A turn is the answer of a record that says nothing else of its answer.
  answer = fields['answer'] if answer_field in (None, 'answer') else own
  if answer_field is not None and answer is None:
    fits = lambda value: value is not None
    raise ValueError(
      f'{where} needs a value in the field {answer_field!r}, but has'
      f' the columns {_fields.described(record)}; correct the {kind}, name'
      f' another answer_field{_such_as(record, answer_field, False, fits)}, or'
      ' pass answer_field=None.'
    )
  if half := half_of_a_pair(answer):
    raise ValueError(
      f'{where} holds half of a surrogate pair ({half!r}) in the field'
      f' {answer_field or "answer"!r}, which is no character; correct or remove'
      f' the {kind}.'
    )
  # A record's own 'answer' is read too, where no other field is its answer.
  for field, value in (
    (prompt_field, raw),
    (answer_field or 'answer', answer),
  ):
    if (unusable := _not_finite(value)) is not None:
      raise ValueError(
        f'{where} has the number {unusable} in the field {field!r}, but only'
        f' finite numbers can be used there; correct or remove the {kind}.'
      )
  found = {**fields, **record, 'prompt': fields['prompt']}
  if answer is None:
    del found['answer']
    return found
  return {**found, 'answer': answer}


def _read_prompt(value: Any, record: Mapping[str, Any]) -> tuple[Any, str]:
  """A value as a prompt, and why it is none; '' if it is one."""
  try:
    prompt = _messages.read_prompt(value, record.get('tools'))
  except ValueError as error:
    return value, str(error)
  return prompt, prompt_problem(prompt)


def _such_as(
  record: Mapping[str, Any],
  field: str,
  is_prompt: bool,
  fits: Callable[[Any], bool],
) -> str:
  """Names of fields that may be meant, for a message; '' if none seems so."""
  found = _fields.likely(record, field, is_prompt, fits)[:3]
  return f', such as {" or ".join(map(repr, found))}' if found else ''


def parsed(text: bytes, where: str, field: str) -> dict[str, Any]:
  """The JSON object in a text.

  Args:
    text: JSON in UTF-8.
    where: How the message names the record.
    field: One that it should have, for the message.

  Raises:
    ValueError: It is no JSON object.
  """
  kind = where.partition(' ')[0].lower()  # 'line' or 'record'
  try:
    # '-sig', because some editors begin a file with a byte-order mark.
    whole = text.decode('utf-8-sig')
    record = json.loads(whole, object_pairs_hook=_object)
  # Bytes that are no UTF-8 raise it too; thousands of lists, one in another,
  # a RecursionError.
  except (ValueError, RecursionError) as error:
    raise ValueError(
      f'{where} is not valid JSON in UTF-8 ({error}); write one JSON object'
      f' {"on" if kind == "line" else "in"} each {kind}.'
    ) from error
  if not isinstance(record, dict):
    raise ValueError(
      f'{where} is {json.dumps(record):.40}, but a JSON object is required;'
      f' write it as {{"{field}": ...}}.'
    )
  return record


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  """A JSON object; Python's json keeps the last of several equal names."""
  found = dict(pairs)
  if len(found) < len(pairs):
    names = [name for name, _ in pairs]
    twice = next(name for name in names if names.count(name) > 1)
    raise ValueError(f'an object has the name {twice!r} more than once')
  return found


def _not_finite(value: Any) -> float | None:
  """A number in a value that is NaN or infinite; None if it has none."""
  floats = (one for one in leaves(value) if isinstance(one, float))
  return next((one for one in floats if not math.isfinite(one)), None)


def some_places(length: int, most: int) -> list[int]:
  """At most `most` places among `length`, in order: all, or a random sample.

  The sample is the same every time, and holds the first and the last place.

  >>> some_places(3, 5), len(some_places(10**9, 100))
  ([0, 1, 2], 100)
  """
  if length <= most:
    return list(range(length))
  drawn = np.random.default_rng(0).choice(
    length - 2, most - 2, replace=False, shuffle=False
  )
  return [0, *sorted((drawn + 1).tolist()), length - 1]


def checked_places(length: int) -> list[int]:
  """Where the records lie that a source checks when it is made."""
  return some_places(length, length if length <= MOST_CHECKED else _SAMPLE)


@dataclasses.dataclass(frozen=True)
class FileSource:
  """Random access to the records of files of one format.

  It can be pickled and read by several threads. The files must not change
  meanwhile. An item is the whole record, with two fields added: 'prompt' and
  'answer', as in a `JsonlSource`. Records that cannot be used are refused: all
  of up to 10,000 records when the source is made, and a sample of more; every
  other record when it is read.

  Args:
    what: How messages name the source, as in "the file 'a.parquet'".
    open_rows: Opens the files; can be pickled.
    prompt_field: The field that holds the prompt.
    answer_field: The field that holds the answer; None if none is needed.
    last_turn: Whether a last turn by the assistant is the 'answer', or stays as
      a 'prefill' of the completion.

  Raises:
    ValueError: There are no records, or one of them cannot be used; the message
      says which, counted from 1.
  """

  what: str
  open_rows: Callable[[], Any] = dataclasses.field(compare=False)
  prompt_field: str = 'prompt'
  answer_field: str | None = 'answer'
  last_turn: str = 'answer'

  def __post_init__(self):
    if not len(self):
      raise ValueError(
        f'There is no record in {self.what}, but a source of prompts needs at'
        ' least one; give one that has some.'
      )
    for place in checked_places(len(self)):
      self[place]

  def __getstate__(self) -> dict[str, Any]:
    # Open files stay in their process; the next one opens them again.
    fields = dataclasses.fields(self)
    return {field.name: getattr(self, field.name) for field in fields}

  @functools.cached_property
  def _rows(self) -> Any:
    return self.open_rows()

  def __len__(self) -> int:
    return len(self._rows)

  def __getitem__(self, index: int) -> dict[str, Any]:
    place = range(len(self))[index]  # raises an IndexError past the end
    where = self.name_of(place)
    try:
      record = self._rows[place]
    except (ValueError, RecursionError, RuntimeError, OSError) as error:
      raise ValueError(
        f'{where} cannot be read ({error}); restore the file or write it again.'
      ) from error
    if isinstance(record, bytes):
      record = parsed(record, where, self.prompt_field)
    return checked(
      record, where, self.prompt_field, self.answer_field, self.last_turn
    )

  def name_of(self, place: int) -> str:
    """How messages call the record at a place, which is counted from 0."""
    return f'Record {place + 1} of {self.what}'

  def __iter__(self) -> Iterator[dict[str, Any]]:
    return (self[place] for place in range(len(self)))


def row_at(source: Any, place: int) -> Mapping[str, Any]:
  """A record with a prompt.

  Args:
    source: An object with a length and items.
    place: From 0.

  Raises:
    ValueError: There is none; the message says why.
  """
  try:
    record = source[place]
  except ValueError:
    raise
  except Exception as error:  # of a user's own source, or of a damaged file
    raise ValueError(f'The record cannot be read ({_named(error)}).') from error
  if not isinstance(record, Mapping):
    raise ValueError(f'The record is of type {type(record).__name__}, no dict.')
  if 'prompt' not in record:
    raise ValueError(f"The record has no field 'prompt', but {list(record)}.")
  if problem := prompt_problem(record['prompt']):
    raise ValueError(f'The record has no usable prompt: {problem}.')
  if half := half_of_a_pair(record.get('answer')):
    raise ValueError(
      f'The record holds half of a surrogate pair ({half!r}), which is no '
      "character, in 'answer'."
    )
  return record


def prompt_ids(tokenizer: Tokenizer, record: Mapping[str, Any]) -> list[int]:
  """The token ids of a record's prompt, at least one.

  Args:
    tokenizer: The tokenizer of the run, with its prompt format.
    record: With 'prompt'.

  Raises:
    ValueError: The prompt cannot be encoded; the message says why.
  """
  prompt = record['prompt']
  try:
    ids = tokenizer.encode_prompt(prompt)
  except ValueError:  # a sentence
    raise
  except Exception as error:  # half a surrogate pair raises a TypeError
    raise ValueError(
      f'The prompt {prompt!r:.60} cannot be encoded ({_named(error)}).'
    ) from error
  if not ids:
    raise ValueError(f'The prompt {prompt!r:.60} has no tokens.')
  return ids


def row_name(source: Any, place: int, name: str) -> str:
  """How messages call a record, as in "Line 3 of 'a.jsonl'".

  >>> row_name([{'prompt': 'a'}], 0, 'data.train')
  'Item 0 of data.train'

  Args:
    source: An object with a length and items.
    place: From 0.
    name: What a source that is in no file is called.
  """
  while isinstance(
    source, _views.WithoutLastTurns | _views.Stage | _views.Joined
  ):
    if isinstance(source, _views.Joined):
      source, place = source.part(place)
    else:
      source = source.source
  name_of = getattr(source, 'name_of', f'Item {{}} of {name}'.format)
  return name_of(place)


def _named(error: Exception) -> str:
  return plain_text.named(error)[:200]
