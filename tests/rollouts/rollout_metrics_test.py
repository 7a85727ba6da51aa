"""What NumPy says of a rollout: answers, lengths, staleness, speed."""

import numpy as np
import pytest

from grpo_jax import losses
from grpo_jax import models
from grpo_jax.rollouts import rollout_metrics
from grpo_jax.rollouts.types import Rollout
from grpo_jax.training import speed

MODEL = models.ModelConfig(
  vocab_size=10, num_layers=1, width=2, num_heads=1, num_kv_heads=1,
  head_dim=2, mlp_width=3,
)  # fmt: skip


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
  got = rollout_metrics.of_rollout(rollout, step=5, right_reward=0.9)
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
      'rewards_failed': 5,
    }
  )
  assert all(type(value) is float for value in got.values())


def test_what_there_is_none_of_is_left_out():
  solved = rollout_metrics.of_rollout(make_rollout([[1, 1]], [[2, 4]]), 3, 1.0)
  assert solved['accuracy'] == 1 and solved['staleness_steps'] == 0
  assert 'length_tokens_wrong' not in solved
  lost = make_rollout([[1, 1]], [[2, 4]], valid=[[0, 0]])
  got = rollout_metrics.of_rollout(lost, 3, 1.0)
  assert got.keys() == {
    'judged', 'length_tokens_max', 'rewards_failed', 'staleness_steps',
    'staleness_steps_max',
  }  # fmt: skip
  empty = rollout_metrics.of_rollout(make_rollout([[1]], [[0]]), 3, 1.0)
  assert 'staleness_steps' not in empty and empty['length_tokens_right'] == 0


def test_a_threshold_is_met_in_float32():
  got = rollout_metrics.of_rollout(make_rollout([[0.1, 0.7]], [[1, 1]]), 3, 0.7)
  assert got['accuracy'] == 0.5


def test_flops_by_hand():
  """Prompts of 2 and 3 tokens once, completions of 1, 2 and 4, 0."""
  rollout = make_rollout([[0, 0], [0, 0]], [[1, 2], [4, 0]])
  matrices = 2 * (2 * 2 * 4 + 2 * 3 * 3)  # four of 2 x 2, three of 2 x 3
  head, attention = 2 * 2 * 10, 4 * 2
  context = (1 + 2) + (1 + 2 + 3) + 3 + (3 + 4) + (4 + 5 + 6 + 7)
  expected = 12 * matrices + 7 * head + context * attention
  assert speed.forward_flops(rollout, MODEL) == expected
  got = speed.of_speed(rollout, 2.0, 4.0, MODEL, 1e3, learn_passes=7)
  assert got == pytest.approx(
    {
      'sample_secs': 2,
      'learn_secs': 4,
      'step_secs': 6,
      'sample_tokens_per_sec': 3.5,
      'learn_tokens_per_sec': 1.75,
      'mfu_sample': expected / 2e3,
      'mfu_learn': 7 * expected / 4e3,
    }
  )
  # Dynamic sampling has drawn three times as many tokens as are learned from.
  more = speed.of_speed(
    rollout, 2.0, 4.0, MODEL, 1e3, learn_passes=7, tokens_drawn=21.0
  )
  sampled = ('sample_tokens_per_sec', 'mfu_sample')
  assert more == pytest.approx(
    {k: 3 * v if k in sampled else v for k, v in got.items()}
  )
  unknown = speed.of_speed(rollout, 2.0, 4.0, MODEL)
  assert unknown.keys() == got.keys() - {'mfu_sample', 'mfu_learn'}


@pytest.mark.parametrize(
  'kind, teraflops',
  [
    ('TPU v4', 275),
    ('TPU v5 lite', 197),
    ('TPU v5', 459),
    ('TPU v6 lite', 918),
    ('TPU7x', 1153.5),
    ('NVIDIA A100-SXM4-80GB', 312),
    ('NVIDIA A100 80GB PCIe', 312),
    ('NVIDIA H100 80GB HBM3', 989.5),
    ('NVIDIA H100 PCIe', 756.5),
    ('NVIDIA H100 NVL', 835.5),
    ('NVIDIA H200', 989.5),
    ('NVIDIA GB200', 2500),
    ('NVIDIA B200', 2250),
    ('NVIDIA L4', 121),
    ('NVIDIA L40S', 362),
    ('Tesla T4', 65),
    ('NVIDIA L40', None),
    ('NVIDIA H100 80GB HBM3 MIG 1g.10gb', None),
    ('TPU v9', None),
    ('cpu', None),
  ],
)
def test_peaks_of_known_devices(kind, teraflops):
  peak = speed.peak_flops(kind)
  assert peak == (teraflops and teraflops * 1e12)
