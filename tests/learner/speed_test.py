"""Speed by hand."""

import dataclasses

import numpy as np
import pytest

from grpo_jax import models
from grpo_jax.learner import speed
from tests.rollouts.rollout_metrics_test import make_rollout

MODEL = models.Transformer(
  models.ModelConfig(
    vocab_size=10, num_layers=1, width=2, num_heads=1, num_kv_heads=1,
    head_dim=2, mlp_width=3,
  )
)  # fmt: skip


def test_flops_by_hand():
  """Prompts of 2 and 3 tokens once, completions of 1, 2 and 4, 0."""
  rollout = make_rollout([[0, 0], [0, 0]], [[1, 2], [4, 0]])
  matrices = 2 * (2 * 2 * 4 + 2 * 3 * 3)  # four of 2 x 2, three of 2 x 3
  head, attention = 2 * 2 * 10, 4 * 2
  context = (1 + 2) + (1 + 2 + 3) + 3 + (3 + 4) + (4 + 5 + 6 + 7)
  expected = 12 * matrices + 7 * head + context * attention
  assert speed.forward_flops(rollout, MODEL) == expected
  got = speed.metrics_of_speed(rollout, 2.0, 4.0, MODEL, 1e3, learn_passes=7)
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
  # A teacher, of another size, has scored each token once.
  two = dataclasses.replace(MODEL.config, num_layers=2)
  taught = speed.metrics_of_speed(
    rollout, 2.0, 4.0, MODEL, 1e3, 7, teacher=models.Transformer(two)
  )
  once = 2 * expected - 7 * head
  assert taught == pytest.approx(
    {**got, 'mfu_learn': (7 * expected + once) / 4e3}
  )
  # Dynamic sampling has drawn three times as many tokens as are learned from.
  more = speed.metrics_of_speed(
    rollout, 2.0, 4.0, MODEL, 1e3, learn_passes=7, tokens_drawn=21.0
  )
  sampled = ('sample_tokens_per_sec', 'mfu_sample')
  assert more == pytest.approx(
    {k: 3 * v if k in sampled else v for k, v in got.items()}
  )
  failed = make_rollout([[0, 0], [0, 0]], [[0, 0], [0, 0]])
  none = speed.metrics_of_speed(failed, 2.0, 4.0, MODEL, 1e3, learn_passes=7)
  assert none['mfu_sample'] == 0
  unknown = speed.metrics_of_speed(rollout, 2.0, 4.0, MODEL, None, 7)
  assert unknown.keys() == got.keys() - {'mfu_sample', 'mfu_learn'}


def test_a_token_of_a_branch_reads_its_own_path():
  """Of 4 tokens the last two follow the prompt, and the first token."""
  rollout = make_rollout([[0, 0], [0, 0]], [[1, 2], [4, 0]])
  straight = speed.forward_flops(rollout, MODEL)
  previous = np.zeros(rollout.batch.mask.shape, np.int32)
  previous[..., :2] = [-1, 0]
  previous[1, 0, :4] = [-1, 0, -1, 0]
  branched = speed.forward_flops(rollout._replace(previous=previous), MODEL)
  # Behind a prompt of 3 they read 4, 5, 4 and 5, and not 4, 5, 6 and 7.
  assert straight is not None and branched is not None
  assert straight - branched == (4 * 2) * (2 + 2)
