"""What NumPy says of a rollout: answers, lengths, staleness."""

import numpy as np
import pytest

from grpo_jax import losses
from grpo_jax.episodes.types import Rollout
from grpo_jax.rollouts.rollout_metrics import failed_shares
from grpo_jax.rollouts.rollout_metrics import metrics_of_rollout


def make_rollout(
  right, length, valid=None, version=3, names=('exact', 'style')
):
  """Rewards `right` and twice that; the first prompt has 2 tokens."""
  right, length = np.array(right, np.float32), np.array(length, np.int32)
  mask = np.arange(8) < length[:, :, None]
  valid = np.ones(right.shape, bool) if valid is None else np.array(valid, bool)
  version = np.where(mask, version, -100)  # padding says nothing
  batch = losses.Batch(
    tokens=np.zeros(mask.shape, np.int32),
    mask=mask,
    keep=mask,
    valid=valid,
    reward=right,
    reward_parts=np.stack([right, 2 * right], axis=-1),
    truncated=np.zeros(right.shape, bool),
    version=version,
  )
  prompts = [[1] * (2 + p) for p in range(len(right))]
  return Rollout(batch, length, prompts, [], [], np.arange(len(right)), names)


def test_answers_lengths_and_staleness():
  rollout = make_rollout(
    [[1, 0.5, 0], [1, 1, 0], [0, 0, 0], [1, 1, 1]],
    [[1, 2, 3], [4, 6, 8], [1, 1, 5], [7, 7, 7]],
    valid=[[1, 1, 1], [1, 1, 0], [0, 1, 1], [0, 0, 0]],
    version=[[[3]], [[4]], [[5]], [[5]]],
  )
  got = metrics_of_rollout(rollout, step=5, right_reward=0.9)
  parts = np.array([1, 0.5, 0, 1, 1, 0, 0])  # of what was judged
  assert got == pytest.approx(
    {
      'reward/exact': parts.mean(),
      'reward/exact_std': parts.std(),
      'reward/style': 2 * parts.mean(),
      'reward/style_std': 2 * parts.std(),
      'accuracy': 3 / 7,
      'groups_solved': 1 / 3,  # the second: its wrong one was not judged
      'groups_failed': 1 / 3,
      'length_tokens_right': (1 + 4 + 6) / 3,
      'length_tokens_wrong': (2 + 3 + 1 + 5) / 4,
      'length_tokens_max': 8,
      'staleness_steps': (6 * 2 + 18 * 1) / (6 + 18 + 7 + 21),
      'staleness_steps_max': 2,
      'judged': 7 / 12,
      'reward/exact_judged': 1,
      'reward/style_judged': 1,
      'rewards_failed': 5,
    }
  )
  assert all(type(value) is float for value in got.values())


def test_what_there_is_none_of_is_left_out():
  solved = metrics_of_rollout(make_rollout([[1, 1]], [[2, 4]]), 3, 1.0)
  assert solved['accuracy'] == 1 and solved['staleness_steps'] == 0
  assert 'length_tokens_wrong' not in solved
  lost = make_rollout([[1, 1]], [[2, 4]], valid=[[0, 0]])
  got = metrics_of_rollout(lost, 3, 1.0)
  assert got.keys() == {
    'judged', 'length_tokens_max', 'rewards_failed', 'staleness_steps',
    'staleness_steps_max', 'reward/exact_judged', 'reward/style_judged',
  }  # fmt: skip
  empty = metrics_of_rollout(make_rollout([[1]], [[0]]), 3, 1.0)
  assert 'staleness_steps' not in empty and empty['length_tokens_right'] == 0


def test_each_reward_counts_where_it_has_judged():
  rollout = make_rollout([[1, 0], [1, 1]], [[1, 2], [3, 4]])
  nan = np.nan
  exact, style = [[1, 0], [nan, nan]], [[nan, 4], [2, nan]]
  parts = np.stack([exact, style], axis=-1).astype(np.float32)
  rollout = rollout._replace(batch=rollout.batch._replace(reward_parts=parts))
  got = metrics_of_rollout(rollout, 3, 1.0)
  assert (got['reward/exact'], got['reward/style']) == (0.5, 3)
  assert (got['reward/exact_std'], got['reward/style_std']) == (0.5, 1)
  assert got['reward/exact_judged'] == got['reward/style_judged'] == 0.5
  assert got['judged'] == 1 and got['rewards_failed'] == 0
  # By the first reward, which has judged the first group.
  assert got['accuracy'] == 0.5 and got['groups_solved'] == 0
  assert (got['length_tokens_right'], got['length_tokens_wrong']) == (1, 2)


def test_a_threshold_is_met_in_float32():
  got = metrics_of_rollout(make_rollout([[0.1, 0.7]], [[1, 1]]), 3, 0.7)
  assert got['accuracy'] == 0.5


def test_failures_and_latencies_of_each_reward():
  rollout = make_rollout([[1, 0], [0, 0]], [[1, 1], [1, 1]])
  failures = np.full((2, 2, 2), '', object)
  failures[0, 1, 0] = failures[1, 1, 0] = 'time limit'
  failures[1, 1, 1] = 'exit 1'
  secs = np.zeros((2, 2, 2), np.float32)
  secs[..., 0] = [[1, 3], [2, np.nan]]
  secs[..., 1] = np.nan
  measured = metrics_of_rollout(
    rollout._replace(failures=failures, judge_secs=secs), 3, 1.0
  )
  assert measured['reward/exact_failed'] == 0.5
  assert measured['reward/style_failed'] == 0.25
  assert measured['reward/exact_secs_p50'] == 2
  assert measured['reward/exact_secs_max'] == 3
  assert 'reward/style_secs_max' not in measured
  # Of those that were drawn, those without a record do not count.
  asked = rollout._replace(failures=failures)
  fine = rollout._replace(failures=np.full((2, 2, 2), '', object))
  shares = failed_shares([asked, fine, rollout])
  assert shares == {'reward/exact_failed': 0.25, 'reward/style_failed': 0.125}
