"""Metrics of a rollout: rewards, lengths, staleness; NumPy, on the host."""

from collections.abc import Sequence

import numpy as np

from grpo_jax.episodes.types import ENDS
from grpo_jax.episodes.types import Rollout


def metrics_of_rollout(
  rollout: Rollout, step: int, right_reward: float
) -> dict[str, float]:
  """The metrics of one rollout.

  Args:
    rollout: See `Rollout`.
    step: The policy version that is about to learn from it.
    right_reward: A completion is right if its first reward is at least this.

  Returns:
    Numbers by name. A mean over nothing is left out.

    - Over judged completions, `reward/<name>` and `reward/<name>_std`, mean and
      standard deviation of each reward function, where it has judged.
    - Over judged completions that the first reward has judged: `accuracy`, the
      share that is right; `length_tokens_right` and `length_tokens_wrong`, how
      many tokens the policy chose, a mean. Over groups with one of them:
      `groups_solved`, the share in which all are right, and `groups_failed`,
      the share in which none is.
    - Over all completions: `length_tokens_max`; `judged`, the share that was
      judged, and `reward/<name>_judged`, by each reward function;
      `rewards_failed`, the number that was not; `staleness_steps` and
      `staleness_steps_max`, how many versions older than `step` the policy was
      that drew a token, as mean and maximum over tokens; of each reward
      function `reward/<name>_failed`, the share on which it failed in a worker
      process, and `reward/<name>_secs_p50` and `reward/<name>_secs_max`, median
      and maximum of how long its calls took.
    - Those of `metrics_of_episodes`, if an environment has played them.
  """
  batch, valid = rollout.batch, np.asarray(rollout.batch.valid)
  parts = np.asarray(batch.reward_parts)
  by_each = ~np.isnan(parts)
  judged, right = rollout.judged, rollout.right(right_reward)
  # Per token, because one completion may be drawn by several versions.
  staleness = step - np.asarray(batch.version)[np.asarray(batch.mask)]
  groups = judged.any(axis=1)
  over = {
    'accuracy': right[judged],
    'groups_solved': (right == judged).all(axis=1)[groups],
    'groups_failed': np.logical_not(right.any(axis=1))[groups],
    'length_tokens_right': rollout.drawn[right],
    'length_tokens_wrong': rollout.drawn[judged & ~right],
    'staleness_steps': staleness,
  }
  measured = {
    name: np.mean(values) for name, values in over.items() if len(values)
  }
  for k, name in enumerate(rollout.reward_names):
    values = parts[..., k][valid & by_each[..., k]]
    if len(values):
      measured[f'reward/{name}'] = np.mean(values, dtype=np.float64)
      measured[f'reward/{name}_std'] = np.std(values, dtype=np.float64)
    measured[f'reward/{name}_judged'] = np.mean(by_each[..., k])
  if len(staleness):
    measured['staleness_steps_max'] = staleness.max()
  measured['length_tokens_max'] = rollout.drawn.max()
  measured['judged'] = np.mean(valid)
  measured['rewards_failed'] = np.sum(~valid)
  measured |= failed_shares([rollout])
  measured |= _latencies(rollout) | metrics_of_episodes(rollout)
  return {name: float(value) for name, value in measured.items()}


def metrics_of_episodes(rollout: Rollout) -> dict[str, float]:
  """The metrics of episodes that an environment has played.

  Args:
    rollout: See `Rollout`.

  Returns:
    Numbers by name; nothing if none was played.

    - Over all episodes: `env_failed`, the share that has failed, and
      `ended/<reason>`, the share that has ended for each of the other reasons
      in `ENDS`; all of them together are 1.
    - Over those that have not failed: `turns_mean` and `turns_max`; `branches`,
      how often tokens follow another place than the one before, a mean;
      `episode_tokens`, how many tokens the policy wrote, a mean;
      `context_share`, the share of their tokens, those of their prompts
      included, that it did not write; `tool_calls`, `tool_errors` and
      `parse_errors`, means; `env_secs_p50` and `env_secs_max`, how long their
      environments took themselves, where that is known; `counted/<name>`, what
      environments have counted, means.
  """
  every = [one for group in rollout.accounts for one in group]
  if not every:
    return {}
  ended = np.array([one.ended for one in every])
  found = {
    f'ended/{reason}': np.mean(ended == reason)
    for reason in ENDS
    if reason != 'failed'
  }
  whole = ended != 'failed'
  found['env_failed'] = np.mean(~whole)
  if not whole.any():
    return {name: float(value) for name, value in found.items()}
  some = [one for one in every if one.ended != 'failed']
  turns = [one.turns for one in some]
  drawn = rollout.drawn.reshape(-1)[whole]
  prompts = np.array([[len(ids)] for ids in rollout.prompts])
  size = (prompts + rollout.length).reshape(-1)[whole].sum()
  found |= {
    'turns_mean': np.mean(turns),
    'turns_max': np.max(turns),
    'branches': np.mean(_branches(rollout).reshape(-1)[whole]),
    'episode_tokens': np.mean(drawn),
    'context_share': 1 - drawn.sum() / size,
  }
  for name in ('tool_calls', 'tool_errors', 'parse_errors'):
    found[name] = np.mean([getattr(one, name) for one in some])
  for name in sorted({name for one in some for name in one.counts}):
    counts = [one.counts.get(name, 0) for one in some]
    found[f'counted/{name}'] = np.mean(counts)
  secs = np.array([one.secs for one in some])
  if len(secs := secs[np.isfinite(secs)]):
    found |= {'env_secs_p50': np.median(secs), 'env_secs_max': secs.max()}
  return {name: float(value) for name, value in found.items()}


def _branches(rollout: Rollout) -> np.ndarray:
  """i64[P,G], in how many places tokens do not follow the one before."""
  if rollout.previous is None:
    return np.zeros(rollout.length.shape, np.int64)
  place = np.arange(rollout.previous.shape[-1])
  inside = place < rollout.length[..., None]
  return (inside & (rollout.previous != place - 1)).sum(-1)


def failed_shares(rollouts: Sequence[Rollout]) -> dict[str, float]:
  """`reward/<name>_failed`, over all completions of some rollouts.

  Nothing if nobody was asked, as in the files of earlier versions.
  """
  judged = [rollout for rollout in rollouts if rollout.failures is not None]
  if not judged:
    return {}
  failed = np.concatenate([rollout.failed for rollout in judged])
  shares = failed.mean(axis=(0, 1), dtype=np.float64)
  return {
    f'reward/{name}_failed': float(share)
    for name, share in zip(judged[0].reward_names, shares, strict=True)
  }


def _latencies(rollout: Rollout) -> dict[str, float]:
  """How long the calls of each reward function took, in seconds."""
  found = {}
  if rollout.judge_secs is None:
    return found
  for k, name in enumerate(rollout.reward_names):
    secs = rollout.judge_secs[..., k]
    secs = secs[np.isfinite(secs)]
    if len(secs):
      found[f'reward/{name}_secs_p50'] = np.median(secs)
      found[f'reward/{name}_secs_max'] = secs.max()
  return found
