"""Dynamic sampling: which prompts come next, and which groups are kept.

A group whose completions all got the same reward has no advantage, so it
teaches a group-based method nothing. This module replaces such groups by
drawing further prompts, up to a number of rounds. Groups that were drawn beyond
what a rollout needs are kept for the next one. Prompts that the policy has
solved may be retired.

Every decision is a pure function of what was drawn and of the `PromptState`,
which is part of a checkpoint. A resumed run therefore takes the same decisions.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import hashlib
import json
from typing import Any
from typing import NamedTuple

import numpy as np

from grpo_jax import data
from grpo_jax.episodes.types import Rollout
from grpo_jax.episodes.types import concatenate
from grpo_jax.episodes.types import select
from grpo_jax.rollouts import parquet
from grpo_jax.rollouts import rollout_metrics


class PromptState(NamedTuple):
  """Where the next rollout finds its prompts; a checkpoint holds one.

  Attributes:
    position: The global prompt counter of the next prompt to read.
    retired: The prompts that are not drawn again, by their `_identity`.
    surplus: Groups that were drawn but not trained on; the next rollout begins
      with them. None if there are none.
    prompts_without_signal: How many prompts have been drawn since the last
      group whose rewards differed. Counted with dynamic sampling only.
  """

  position: int = 0
  retired: frozenset[int] = frozenset()
  surplus: Rollout | None = None
  prompts_without_signal: int = 0


# What `draw` returns: the rollout to train on, the state after it, and counts
# for the metrics.
Drawn = tuple[Rollout, PromptState, dict[str, float]]


def to_json(prompt_state: PromptState) -> dict[str, Any]:
  """A `PromptState` as a dict of what JSON can hold, and of bytes."""
  surplus = prompt_state.surplus
  return {
    'position': prompt_state.position,
    'retired': sorted(prompt_state.retired),
    'prompts_without_signal': prompt_state.prompts_without_signal,
    'surplus': surplus and parquet.to_bytes(surplus, 0),
  }


def from_json(values: Mapping[str, Any]) -> PromptState:
  """The `PromptState` that `to_json` was given."""
  surplus = values['surplus']
  return PromptState(
    values['position'],
    frozenset(values['retired']),
    parquet.from_bytes(surplus) if surplus else None,
    values['prompts_without_signal'],
  )


class NothingToLearn(ValueError):
  """No prompt is left that gives completions of different rewards."""


def draw(
  prompt_state: PromptState,
  stream: Any,
  epoch: int,
  number: int,
  collect: Callable[[Sequence[Mapping[str, Any]]], Rollout],
  rounds: int = 0,
  retire: bool = False,
  right_reward: float = 1.0,
  fits: Callable[[Mapping[str, Any]], bool] | None = None,
  whole_records: bool = False,
) -> Drawn:
  """Draws the groups to train on next.

  With `rounds=0` these are the groups of the next `number` prompts. With
  `rounds > 0` this is dynamic sampling (DAPO, arXiv 2503.14476):

  - A group whose rewards are all equal does not count.
  - While fewer than `number` groups count, `number` more prompts are drawn, at
    most `rounds` times.
  - Groups beyond `number` are the surplus; the next call takes them first.
  - After the last round, groups of equal rewards fill what is still missing.

  Args:
    prompt_state: What the last call returned.
    stream: An endless dataset of records.
    epoch: How many rows of the stream hold every record at least once.
    number: Groups of a rollout.
    collect: Samples completions of some records and judges them.
    rounds: How often more prompts may be drawn.
    retire: Whether a prompt is never drawn again once all its completions were
      right.
    right_reward: A completion is right if its first reward is at least this.
    fits: Whether a record is drawn; others are passed over. None: all are.
    whole_records: Whether all of a record tells it from others, and not its
      prompt alone: an environment may ask another thing with the same words.

  Returns:
    The rollout, the new `PromptState`, and counts for the metrics:

    - with `rounds > 0`, `prompts_drawn` and `tokens_drawn` by this call;
      `groups_surplus`, kept for the next call; `groups_short`, filled with
      groups of equal rewards; and, if any prompts were drawn, `accuracy_drawn`,
      the share of their judged completions that is right, `rewards_failed`, the
      number of their completions that were not judged, and
      `reward/<name>_failed`, the share on which a reward function failed;
    - with `retire`, `prompts_retired` in all;
    - with `fits`, `prompts_too_long`, passed over by this call.

  Raises:
    NothingToLearn: With `rounds > 0`, at least `epoch` prompts in a row, over
      any number of calls, gave no group of different rewards; or every prompt
      is retired or does not fit.
  """
  kept = [prompt_state.surplus] if prompt_state.surplus else []
  uniform, drawn, too_long = [], [], 0
  position, retired = prompt_state.position, prompt_state.retired
  while sum(len(part.prompts) for part in kept) < number:
    records, position, dropped = next_records(
      stream, epoch, position, number, retired, fits, whole_records
    )
    too_long += dropped
    fresh = collect(records)
    drawn.append(fresh)
    if retire:
      retired |= {
        _identity(records[p], whole_records)
        for p in np.flatnonzero(_solved(fresh, right_reward))
      }
    # Without dynamic sampling every group counts, whatever its rewards.
    equal = np.zeros(number, bool)
    if rounds:
      equal = _uniform(fresh)
    # Groups of equal rewards are kept too: they may have to fill a rollout.
    kept.append(select(fresh, np.flatnonzero(~equal)))
    uniform.append(select(fresh, np.flatnonzero(equal)))
    if len(drawn) > rounds:  # the first draw is no round
      break
  mixed = sum(len(part.prompts) for part in kept)
  fresh_prompts = sum(len(part.prompts) for part in drawn)
  # A single draw without signal is bad luck. Only when as many prompts as the
  # data set has were all in vain, over any number of calls, is it hopeless.
  prompts_without_signal = 0
  if rounds and not mixed:
    prompts_without_signal = prompt_state.prompts_without_signal + fresh_prompts
  if prompts_without_signal >= epoch:
    raise NothingToLearn(
      _nothing_left(drawn, prompts_without_signal, right_reward)
    )
  # The surplus comes first, being oldest, then what was drawn now. Groups of
  # equal rewards come last: from `mixed` on, where no surplus is taken.
  groups = concatenate(kept + uniform)
  surplus = select(groups, np.arange(number, mixed)) if mixed > number else None
  counts = {}
  if rounds:
    counts = {
      'prompts_drawn': float(fresh_prompts),
      'groups_surplus': float(max(mixed - number, 0)),
      'groups_short': float(max(number - mixed, 0)),
    }
    if drawn:
      right = sum(int(part.right(right_reward).sum()) for part in drawn)
      judged = sum(int(part.judged.sum()) for part in drawn)
      counts['accuracy_drawn'] = right / max(1, judged)
      counts['rewards_failed'] = float(
        sum(int((~np.asarray(part.batch.valid)).sum()) for part in drawn)
      )
      counts |= rollout_metrics.failed_shares(drawn)
    counts['tokens_drawn'] = float(sum(int(p.drawn.sum()) for p in drawn))
  if retire:
    counts['prompts_retired'] = float(len(retired))
  if fits is not None:
    counts['prompts_too_long'] = float(too_long)
  return (
    select(groups, np.arange(number)),
    PromptState(position, retired, surplus, prompts_without_signal),
    counts,
  )


def next_records(
  stream: Any,
  epoch: int,
  position: int,
  number: int,
  retired: frozenset[int] = frozenset(),
  fits: Callable[[Mapping[str, Any]], bool] | None = None,
  whole_records: bool = False,
) -> tuple[list[dict[str, Any]], int, int]:
  """The next records that are neither retired nor too long.

  Args:
    stream: An endless dataset of records.
    epoch: How many rows of it hold every record at least once.
    position: The global prompt counter of the first record to look at.
    number: How many records are needed.
    retired: The prompts to pass over, by their `_identity`.
    fits: Whether a record is drawn. None: all are.
    whole_records: See `draw`.

  Returns:
    The records, the position behind the last one, and how many were passed over
    because they do not fit.

  Raises:
    NothingToLearn: No prompt is left.
  """
  if not retired and fits is None:  # the usual case, in one call
    return data.take(stream, position, number), position + number, 0
  records, dropped, skipped, too_long = [], 0, 0, False
  while len(records) < number:
    (record,) = data.take(stream, position, 1)
    position += 1
    solved = bool(retired) and _identity(record, whole_records) in retired
    if not solved and (fits is None or fits(record)):
      records.append(record)
      skipped, too_long = 0, False
      continue
    skipped += 1
    dropped, too_long = dropped + (not solved), too_long or not solved
    # Twice, because each epoch has its own order: only a stretch of two epochs
    # is sure to hold a whole one, wherever the stretch begins.
    if skipped > 2 * epoch:
      raise NothingToLearn(_none_drawn(len(retired), too_long))
  return records, position, dropped


def _none_drawn(retired: int, too_long: bool) -> str:
  """The sentence of `NothingToLearn` where no prompt can be drawn."""
  if not too_long:
    return (
      f'Nothing is left to learn from: all {retired} prompts are '
      'retired (config.sampler.retire_solved), because all completions of '
      'each were right; give more or harder prompts.'
    )
  others = f', and the other {retired} are retired' if retired else ''
  return (
    'Nothing is left to learn from: prompts are longer than the largest of '
    f"config.data.prompt_buckets, and data.too_long='drop' drops them{others}; "
    'give larger widths, or shorter prompts.'
  )


def _identity(record: Mapping[str, Any], whole: bool) -> int:
  """A 64-bit hash of a prompt, or of all else that its record has too.

  It is short to save, and the same in every run.
  """
  identity: Any = record['prompt']
  if whole:
    identity = {k: x for k, x in sorted(record.items()) if k != 'index'}
  # Of all messages: two chats may differ in the first and share the last.
  elif not isinstance(identity, str):
    identity = [dict(message) for message in identity]
  if not isinstance(identity, str):
    identity = json.dumps(identity, default=str)
  # Python's own hash of a string differs from process to process.
  digest = hashlib.blake2b(identity.encode(), digest_size=8).digest()
  return int.from_bytes(digest, 'big')


def _uniform(rollout: Rollout) -> np.ndarray:
  """`losses.uniform_groups`, bool[P], by NumPy: devices may be learning now."""
  reward = np.asarray(rollout.batch.reward)
  over: dict[str, Any] = dict(axis=1, where=np.asarray(rollout.batch.valid))
  high = np.max(reward, **over, initial=-np.inf)
  low = np.min(reward, **over, initial=np.inf)
  size = np.max(np.abs(reward), **over, initial=0)
  return high - low <= 8 * np.finfo(reward.dtype).eps * size


def _solved(rollout: Rollout, right_reward: float) -> np.ndarray:
  """bool[P]: which prompts have judged completions, all of them right."""
  wrong = rollout.judged & ~rollout.right(right_reward)
  return np.logical_and(rollout.judged.any(axis=1), ~wrong.any(axis=1))


def _nothing_left(
  drawn: Sequence[Rollout], prompts_without_signal: int, right_reward: float
) -> str:
  """The sentence of `NothingToLearn`: what the last prompts had in common."""
  number = sum(len(part.prompts) for part in drawn)
  solved = sum(int(_solved(part, right_reward).sum()) for part in drawn)
  failed = sum(
    int((~part.right(right_reward).any(axis=1)).sum()) for part in drawn
  )
  what, advice = 'had equal rewards', 'give other prompts'
  if solved == number:
    what, advice = 'was solved by all its completions', 'give harder prompts'
  elif failed == number:
    what = 'was failed by all its completions'
    advice = 'give easier prompts, a longer warm-up or a larger group'
  return (
    f'Nothing is left to learn from: for each of the last '
    f'{prompts_without_signal} prompts, as many as the data set has, all '
    f'completions had equal rewards, and each of the last {number} {what} '
    f'({solved} solved, {failed} failed); {advice}.'
  )
