"""The length of a completion, in tokens or characters."""

import functools
from typing import Any

from grpo_jax.rewards import _marks


def _check(
  limit: int | None = None,
  target: int | None = None,
  margin: int = 0,
  unit: str = 'tokens',
) -> None:
  _checked(limit, target, margin, unit)


@_marks.bounded
@_marks.checked(_check)
def completion_length(
  prompt: str,
  completion: str,
  example: dict[str, Any],
  *,
  limit: int | None = None,
  target: int | None = None,
  margin: int = 0,
  unit: str = 'tokens',
) -> float:
  r"""1 for a length up to a limit, or at a target, falling to 0 over a margin.

  .. math:: \max(0, 1 - d / \text{margin})

  where d is by how much the length exceeds `limit`, or how far the length is
  from `target` to either side. With a margin of 0 the reward is 1 where d is 0,
  and else 0. The time does not depend on the text.

  >>> example = {'completion_ids': [7] * 15}
  >>> completion_length('', '', example, limit=10, margin=20)
  0.75

  Args:
    prompt: is not used.
    completion: the text that was sampled.
    example: the record of the data source; 'completion_ids' are the sampled
      tokens, end token included.
    limit: the longest completion with the full reward, in `unit`.
    target: the only length with the full reward, in `unit`. Give this or
      `limit`.
    margin: the distance at which the reward reaches 0, in `unit`.
    unit: 'tokens' or 'characters'.

  Returns:
    A number from 0.0 to 1.0.

  Raises:
    ValueError: not exactly one of `limit` and `target` is given, a length is
      negative, the unit is another, or the record has no 'completion_ids' where
      tokens are counted.
  """
  del prompt
  given = _checked(limit, target, margin, unit)
  if unit == 'tokens' and 'completion_ids' not in example:
    raise ValueError(
      "completion_length requires the field 'completion_ids', but the example"
      f" has the fields {sorted(example)}; give unit='characters', or add it."
    )
  length = len(example['completion_ids'] if unit == 'tokens' else completion)
  distance = length - given
  distance = max(0, distance) if target is None else abs(distance)
  if not margin:
    return float(not distance)
  return max(0.0, 1.0 - distance / margin)


# A few config values, checked for every completion otherwise.
@functools.lru_cache(maxsize=64)
def _checked(
  limit: int | None, target: int | None, margin: int, unit: str
) -> int:
  """The limit or the target, whichever is given."""
  given = limit if target is None else target
  if given is None or (limit is not None and target is not None):
    raise ValueError(
      f'completion_length has limit={limit} and target={target}, but exactly'
      ' one of the two is required; give one.'
    )
  if not (given >= 0 and margin >= 0):  # NaN is neither
    raise ValueError(
      f'completion_length has a length of {given} and margin={margin}, but'
      ' neither may be negative.'
    )
  if unit not in ('tokens', 'characters'):
    raise ValueError(
      f"unit of the reward completion_length is {unit!r}, but 'tokens' or"
      " 'characters' is required."
    )
  return given
