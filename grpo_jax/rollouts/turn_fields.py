"""Fields of a batch that say of each turn of an episode what it has earned.

A loss that credits turns requires them (`losses.OF_TURNS`). They are made of
the accounts of episodes, which every process knows, and only for a loss that
requires them.
"""

from collections.abc import Sequence
import json
from typing import NamedTuple

import numpy as np

from grpo_jax.episodes.types import Account
from grpo_jax.episodes.types import Rollout
from grpo_jax.episodes.types import with_extras


class TurnFields(NamedTuple):
  """What a run adds to the batch for its loss.

  Attributes:
    names: Of `turn_reward` and `turn_state`.
    most: The most turns of an episode, N. It fixes the shapes.
    weight: The factor of the reward 'environment', in which the rewards of
      turns are; 0 if they are not trained on.
  """

  names: tuple[str, ...] = ()
  most: int = 1
  weight: float = 0.0


NO_TURNS = TurnFields()


def with_turns(rollout: Rollout, fields: TurnFields) -> Rollout:
  """A rollout with the fields that it lacks.

  Args:
    rollout: Of episodes that were played.
    fields: Which.

  Raises:
    ValueError: An episode has more turns than there is room for.
  """
  lacking = [x for x in fields.names if x not in rollout.batch.extras]
  if not lacking:
    return rollout
  every = (one.turns for group in rollout.accounts for one in group)
  turns = max(every, default=0)
  if turns > fields.most:
    raise ValueError(
      f'An episode has {turns} turns, but config.environment.max_turns='
      f'{fields.most}; give the limit that it was played with.'
    )
  arrays = _zeros(rollout, fields)
  for p, group in enumerate(rollout.accounts):
    states: dict[str, int] = {}
    for g, account in enumerate(group):
      number = account.turns
      rewards = account.turn_rewards or (0.0,) * number
      for at, value in zip(reward_places(account), rewards, strict=True):
        arrays['turn_reward'][p, g, at] += fields.weight * value
      began = [states.setdefault(x, len(states)) for x in _heard(account)]
      arrays['turn_state'][p, g, :number] = began
  return with_extras(rollout, {name: arrays[name] for name in lacking})


def with_zeros(rollout: Rollout, fields: TurnFields) -> Rollout:
  """A rollout in which the fields have a shape, to compile for it."""
  arrays = _zeros(rollout, fields)
  return with_extras(rollout, {name: arrays[name] for name in fields.names})


def _zeros(rollout: Rollout, fields: TurnFields) -> dict[str, np.ndarray]:
  shape = *rollout.batch.mask.shape[:2], fields.most
  return {
    'turn_reward': np.zeros(shape, np.float32),
    'turn_state': np.zeros(shape, np.int32),
  }


def reward_places(account: Account) -> list[int]:
  """Of each turn the place at which its reward counts, by return to go.

  It is the turn itself. But a turn of a branch may be the reason for what other
  branches have earned, wherever these lie in the order of the tree. So there
  the place is the last turn that has not read the one that was rewarded: no
  return then lacks a reward that its turn may have caused.
  """
  paths = _paths(account)
  if not any(paths):
    return [*range(len(paths))]
  # The place of each turn among those of its own context.
  own = [paths[:n].count(path) for n, path in enumerate(paths)]

  def has_read(later: int, turn: int) -> bool:
    mine, path = paths[later], paths[turn]
    if mine == path:
      return own[turn] < own[later]
    # A path says behind how many turns of each context it was forked.
    return mine[: len(path)] == path and own[turn] < mine[len(path)]

  number = len(paths)
  return [
    max(n for n in range(number) if n == turn or not has_read(n, turn))
    for turn in range(number)
  ]


def _paths(account: Account) -> list[tuple[int, ...]]:
  """The context of each turn, in the order of turns."""
  return [
    tuple(one.get('context', ()))
    for one in account.messages
    if one['by'] == 'policy'
  ]


def _heard(account: Account) -> Sequence[str]:
  """What each turn has heard since the turn before it in its context."""
  heard: dict[tuple[int, ...], list[dict]] = {}
  found = []
  for one in account.messages:
    path = tuple(one.get('context', ()))
    if one['by'] == 'policy':
      found.append(json.dumps(heard.pop(path, []), sort_keys=True))
      continue
    said = {k: x for k, x in one.items() if k not in ('by', 'context')}
    heard.setdefault(path, []).append(said)
  return found
