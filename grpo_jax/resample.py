"""Dynamic sampling: which prompts come next, and which groups are worth it.

Groups whose completions all got the same reward teach a group-based method
nothing. Here they are replaced, within a bound; what is drawn too much waits
for the next rollout; solved prompts may be retired. The decisions are pure
functions of what was drawn, so a run that is resumed takes the same ones.
"""

import base64
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import hashlib
from typing import Any
from typing import NamedTuple

import numpy as np

from grpo_jax import data
from grpo_jax import transcript
from grpo_jax.rollout import Rollout
from grpo_jax.rollout import concatenate
from grpo_jax.rollout import select


class Supply(NamedTuple):
  """Where the prompts of the next rollout come from; saved with the state."""

  position: int = 0  # the global prompt counter of the next prompt
  retired: frozenset[int] = frozenset()  # solved prompts, by `_identity`
  surplus: Rollout | None = None  # groups drawn and not yet trained on
  barren: int = 0  # prompts in a row, up to now, with equal rewards each


# What one step trains on: the rollout, the supply after it, and counts.
Drawn = tuple[Rollout, Supply, dict[str, float]]


def to_json(supply: Supply) -> dict[str, Any]:
  """A supply as JSON can hold it."""
  surplus = supply.surplus
  return {
    'position': supply.position,
    'retired': sorted(supply.retired),
    'barren': supply.barren,
    'surplus': surplus
    and base64.b64encode(transcript.to_bytes(surplus, 0)).decode(),
  }


def from_json(values: Mapping[str, Any]) -> Supply:
  """The supply that `to_json` was given."""
  surplus = values['surplus']
  return Supply(
    values['position'],
    frozenset(values['retired']),
    surplus and transcript.from_bytes(base64.b64decode(surplus)),
    values['barren'],
  )


class NothingToLearn(ValueError):
  """No prompt is left whose completions differ in their rewards."""


def draw(
  supply: Supply,
  stream: Any,
  epoch: int,
  number: int,
  collect: Callable[[Sequence[Mapping[str, Any]]], Rollout],
  rounds: int = 0,
  retire: bool = False,
  right_reward: float = 1.0,
) -> Drawn:
  """The groups to train on next: dynamic sampling (DAPO, arXiv 2503.14476).

  With `rounds=0` these are the next `number` prompts. Otherwise groups whose
  completions all got equal rewards, which teach nothing, are replaced by
  drawing `number` more prompts, at most `rounds` times; groups beyond `number`
  wait for the next call, oldest first, and what is still missing after the
  last round is filled with the groups of equal rewards.

  Args:
    supply: What the last call returned.
    stream: An endless dataset of records.
    epoch: Rows of it among which every record is met.
    number: Groups of a rollout.
    collect: Samples and judges some records.
    rounds: Most extra draws.
    retire: Do not draw prompts again whose every completion was right.
    right_reward: Least first reward of a right completion.

  Returns:
    The rollout, the new supply, and counts for the metrics.

  Raises:
    NothingToLearn: With `rounds > 0`, the last `epoch` prompts and more, over
      any number of calls, gave no group with different rewards; or every prompt
      is retired.
  """
  kept, uniform, drawn = [supply.surplus] if supply.surplus else [], [], []
  position, retired = supply.position, supply.retired
  while sum(len(part.prompts) for part in kept) < number:
    records, position = _next_records(stream, epoch, position, number, retired)
    fresh = collect(records)
    drawn.append(fresh)
    if retire:
      retired |= {
        _identity(fresh.prompt_texts[p])
        for p in np.flatnonzero(_solved(fresh, right_reward))
      }
    equal = _equal_rewards(fresh) if rounds else np.zeros(number, bool)
    kept.append(select(fresh, np.flatnonzero(~equal)))
    uniform.append(select(fresh, np.flatnonzero(equal)))
    if len(drawn) > rounds:
      break
  mixed = sum(len(part.prompts) for part in kept)
  fresh_prompts = sum(len(part.prompts) for part in drawn)
  barren = 0 if mixed or not rounds else supply.barren + fresh_prompts
  if barren >= epoch:
    raise NothingToLearn(_nothing_left(drawn, barren, right_reward))
  whole = concatenate(kept + uniform)
  surplus = select(whole, np.arange(number, mixed)) if mixed > number else None
  counts = {}
  if rounds:
    counts = {
      'prompts_drawn': float(fresh_prompts),
      'groups_surplus': float(max(mixed - number, 0)),
      'groups_short': float(max(number - mixed, 0)),
    }
    if drawn:
      counts['accuracy_drawn'] = _accuracy(drawn, right_reward)
      counts['rewards_failed'] = float(
        sum(int((~np.asarray(part.batch.valid)).sum()) for part in drawn)
      )
    counts['tokens_drawn'] = float(sum(int(p.length.sum()) for p in drawn))
  if retire:
    counts['prompts_retired'] = float(len(retired))
  return (
    select(whole, np.arange(number)),
    Supply(position, retired, surplus, barren),
    counts,
  )


def _next_records(
  stream: Any,
  epoch: int,
  position: int,
  number: int,
  retired: frozenset[int],
):
  """The next records that are not retired, and the position after them."""
  if not retired:
    return data.take(stream, position, number), position + number
  records, skipped = [], 0
  while len(records) < number:
    (record,) = data.take(stream, position, 1)
    position += 1
    if _identity(record['prompt']) not in retired:
      records.append(record)
      skipped = 0
    elif (skipped := skipped + 1) > 2 * epoch:  # epochs have their own orders
      raise NothingToLearn(
        f'Nothing is left to learn from: all {len(retired)} prompts are '
        'retired (config.sampler.retire_solved), because every completion of '
        'theirs was right; give more or harder prompts.'
      )
  return records, position


def _identity(prompt: str) -> int:
  """64 bits that stand for a prompt."""
  digest = hashlib.blake2b(prompt.encode(), digest_size=8).digest()
  return int.from_bytes(digest, 'big')


def _right(rollout: Rollout, right_reward: float) -> np.ndarray:
  """bool[P,G], judged and right."""
  first = np.asarray(rollout.batch.reward_parts)[..., 0]
  return np.asarray(rollout.batch.valid) & (first >= right_reward)


def _solved(rollout: Rollout, right_reward: float) -> np.ndarray:
  """bool[P], every judged completion is right, and there is one."""
  valid = np.asarray(rollout.batch.valid)
  wrong = valid & ~_right(rollout, right_reward)
  return np.logical_and(valid.any(axis=1), ~wrong.any(axis=1))


def _equal_rewards(rollout: Rollout) -> np.ndarray:
  """bool[P], no two judged completions differ in their reward."""
  reward, valid = rollout.batch.reward, np.asarray(rollout.batch.valid)
  most = np.max(reward, axis=1, where=valid, initial=-np.inf)
  least = np.min(reward, axis=1, where=valid, initial=np.inf)
  return np.asarray(least >= most)


def _accuracy(parts: Sequence[Rollout], right_reward: float) -> float:
  right = sum(int(_right(part, right_reward).sum()) for part in parts)
  return right / max(1, sum(int(part.batch.valid.sum()) for part in parts))


def _nothing_left(
  drawn: Sequence[Rollout], barren: int, right_reward: float
) -> str:
  number = sum(len(part.prompts) for part in drawn)
  solved = sum(int(_solved(part, right_reward).sum()) for part in drawn)
  failed = sum(
    int((~_right(part, right_reward).any(axis=1)).sum()) for part in drawn
  )
  what, advice = 'had equal rewards', 'give other prompts'
  if solved == number:
    what, advice = 'was solved by all its completions', 'give harder prompts'
  elif failed == number:
    what = 'was failed by all its completions'
    advice = 'give easier prompts, a longer warm-up or a larger group'
  return (
    f'Nothing is left to learn from: for each of the last {barren} prompts, '
    'as many as the data set has, the completions had equal rewards, and each '
    f'of the last {number} {what} ({solved} solved, {failed} failed); {advice}.'
  )
