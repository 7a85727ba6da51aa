"""Fields of a batch that come from records: what a loss of one's own reads.

A transform may require a field that no part of a run computes. A run takes it
from the records of the prompts: a number of each record, or a number for each
token from a function of the record and the ids of a completion. It becomes a
part of the rollout, as rewards do, so that whatever is done with rollouts
(packing, dynamic sampling, files, replay, checkpoints) is done with it.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import math
import numbers
from typing import Any
from typing import NamedTuple

import numpy as np

from grpo_jax.config import plain_text
from grpo_jax.data import prompt_text
from grpo_jax.episodes.types import Rollout
from grpo_jax.episodes.types import with_extras

PerToken = Callable[[Mapping[str, Any], list[int]], Any]
"""`(record, ids)` -> a number for each id of a completion."""


class BatchField(NamedTuple):
  """A field of `Batch.extras` that is filled from records.

  Attributes:
    name: In the batch; without a function, in the records too.
    function: The numbers of the tokens of a completion, f32[P,G,T]; None: the
      number of the record, f32[P,G], the same for all of a group.
  """

  name: str
  function: PerToken | None = None


def with_fields(
  rollout: Rollout,
  records: Sequence[Mapping[str, Any]],
  fields: Sequence[BatchField],
) -> Rollout:
  """A rollout with fields that come from its records.

  Args:
    rollout: Of P prompts. A process fills the tokens that it knows.
    records: P records, of which the prompts are.
    fields: Which.

  Raises:
    ValueError: A record or a function has not given what is needed.
  """
  arrays = {
    field.name: _by_record(rollout, records, field)
    if field.function is None
    else _by_token(rollout, records, field)
    for field in fields
  }
  return with_extras(rollout, arrays)


def with_ones(rollout: Rollout, fields: Sequence[BatchField]) -> Rollout:
  """A rollout in which the fields have a shape, to compile for it."""
  shape = rollout.batch.mask.shape
  return with_extras(
    rollout,
    {
      field.name: np.ones(shape if field.function else shape[:2], np.float32)
      for field in fields
    },
  )


def number_of(record: Mapping[str, Any], name: str) -> float:
  """The number that a record has for a field.

  Raises:
    ValueError: It has none; the message says what it has instead.
  """
  if name not in record:
    listed = ', '.join(sorted(map(str, record)))
    raise ValueError(f'it has no field {name!r}, but {listed}')
  value = record[name]
  if not isinstance(value, numbers.Real | np.bool_):
    raise ValueError(f'its {name} is {plain_text.shown(value)}, no number')
  try:
    found = float(value)
  except OverflowError:  # an integer of 400 digits
    found = math.inf
  if not abs(found) <= _MOST:
    raise ValueError(
      f'its {name} is {plain_text.shown(value)}, which is no finite number of '
      'float32'
    )
  return found


_MOST = float(np.finfo(np.float32).max)


def _by_record(
  rollout: Rollout, records: Sequence[Mapping[str, Any]], field: BatchField
) -> np.ndarray:
  """f32[P,G], the numbers of the records."""
  found = np.zeros(rollout.batch.mask.shape[:2], np.float32)
  for p, record in enumerate(records):
    try:
      found[p] = number_of(record, field.name)
    except ValueError as error:
      raise ValueError(
        f'The record of the prompt {prompt_text(record["prompt"])!r:.60} '
        f'cannot be used: {error}; correct the record.'
      ) from error
  return found


def _by_token(
  rollout: Rollout, records: Sequence[Mapping[str, Any]], field: BatchField
) -> np.ndarray:
  """f32[P,G,T], what the function says of each token; 0 past the last."""
  tokens = np.asarray(rollout.batch.tokens)
  found = np.zeros(tokens.shape, np.float32)
  for p in rollout.own_groups:
    for g, length in enumerate(rollout.length[p]):
      ids = tokens[p, g, :length].tolist()
      found[p, g, :length] = _numbers_of(field, records[p], ids)
  return found


def _numbers_of(
  field: BatchField, record: Mapping[str, Any], ids: list[int]
) -> np.ndarray:
  """f32[t], what the function of a field says of the ids of a completion."""
  assert field.function is not None
  called = f'The function of the field {field.name!r}'
  prompt = f'the prompt {prompt_text(record["prompt"])!r:.60}'
  try:
    # Of its own, because the function may change what it is given.
    result = field.function(dict(record), list(ids))
    values = np.asarray(result)
  except Exception as error:  # a user's function may raise anything
    raise ValueError(
      f'{called} raised {plain_text.named(error)}, for {prompt}; correct the '
      'function or the record.'
    ) from error
  if values.dtype.kind not in 'biuf':
    problem = f'{plain_text.shown(result)}, which are no real numbers'
  elif values.shape != (len(ids),):
    problem = f'an array of shape {values.shape}'
  elif not np.all(np.abs(values.astype(np.float64)) <= _MOST):
    problem = 'a number that is not finite in float32'
  else:
    return values.astype(np.float32)
  raise ValueError(
    f'{called} returned {problem}, for {prompt} and a completion of '
    f'{len(ids)} ids; return a finite number for each id.'
  )
