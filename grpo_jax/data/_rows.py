"""Whether a row can be read as a prompt, and how messages name it."""

from collections.abc import Mapping
from typing import Any

from grpo_jax.config import plain_text
from grpo_jax.data._chat import half_of_a_pair
from grpo_jax.data._chat import prompt_problem
from grpo_jax.data._jsonl import JsonlSource
from grpo_jax.data._records import FileSource
from grpo_jax.data._tokenizer import Tokenizer
from grpo_jax.data._views import Joined
from grpo_jax.data._views import Stage
from grpo_jax.data._views import WithoutLastTurns


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
    tokenizer: Of the run, with its prompt format.
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
    name: Of a source that is in no file.
  """
  while isinstance(source, WithoutLastTurns | Stage | Joined):
    if isinstance(source, Joined):
      source, place = source.part(place)
    else:
      source = source.source
  if isinstance(source, JsonlSource | FileSource):
    return source.name_of(place)
  return f'Item {place} of {name}'


def _named(error: Exception) -> str:
  return plain_text.named(error)[:200]
