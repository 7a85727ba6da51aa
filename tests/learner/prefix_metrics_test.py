"""Shared prefixes and credit, as the learner reports them: closed forms."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import losses
from grpo_jax import models
from grpo_jax.episodes.types import Rollout
from grpo_jax.learner import gradient as gradient_lib
from grpo_jax.learner import metrics
from grpo_jax.learner import micro_batches
from grpo_jax.learner import policies
from grpo_jax.learner import step as learner_lib
from grpo_jax.learner import step_metrics
from grpo_jax.learner.types import UpdateSpec
from tests import bigram
from tests.learning import spec


def table_learner(method):
  """Its parameters are the log-probabilities, one row for each completion."""

  def score(params, rows, wanted):
    del wanted
    nothing = dict(mode='fill', fill_value=0)
    return models.Scores(
      jnp.take(params['logp'], rows.completion, axis=0, **nothing), None
    )

  return bigram.changed(bigram.make_learner(method), score=score)


def shared_rollout():
  """Four completions: 5 is shared by all, 5 7 by two; one of them is right."""
  tokens = np.array([[[5, 7, 1], [5, 7, 2], [5, 8, 3], [5, 9, 4]]], np.int32)
  everything = np.ones(tokens.shape, bool)
  batch = losses.Batch(
    tokens=tokens,
    mask=everything,
    keep=everything,
    valid=everything[..., 0],
    reward=np.array([[1, 0, 0, 0]], np.float32),
    reward_parts=np.array([[[1], [0], [0], [0]]], np.float32),
    truncated=np.zeros((1, 4), bool),
    version=np.zeros(tokens.shape, np.int32),
    logp_old=np.full(tokens.shape, -1.0, np.float32),
  )
  length = np.full((1, 4), 3, np.int32)
  return Rollout(batch, length, [[1]], [''], [], np.arange(1))


@functools.cache
def program(share):
  """What measures the prefixes of the rollout, and its rows."""
  covariance = (losses.penalize_covariance(share, 0.0),) if share else ()
  learner = table_learner(
    losses.chain(
      losses.center_by_group(),
      losses.mean_over_tokens(),
      losses.ppo_clip(),
      *covariance,
    )
  )
  rollout = shared_rollout()
  batch, state, _ = learner_lib.credit(
    learner, rollout.batch, learner.method.init()
  )
  batch = losses.prepare(learner.method, batch, state)
  rows, used = micro_batches.cut_rollout(rollout, np.arange(1), spec('padded'))

  @jax.jit
  def prefixes(params, *given):
    found = gradient_lib.differentiate(
      learner, None, params, state, batch, *given
    )
    intended = gradient_lib.slope_at_ratio_one(learner, found, batch, state)
    return step_metrics.metrics_of_prefixes(batch, -found.slope, -intended)

  return prefixes, rows, used


# Advantages of 3/4 and -1/4 over 12 tokens; `w` is what all pull at 5.
@pytest.mark.parametrize(
  'gained, w, uncancelled',
  [
    (0.0, 0, 0),  # nothing has moved: what all share is left alone
    (0.15, 0, 0),  # inside the clip: one factor for all
    (0.5, -3 / 4 * np.exp(0.5), 1),  # the right one is clipped, none pulls up
    (-0.5, 3 / 4 * np.exp(-0.5), 1),  # the wrong ones are
  ],
)
@pytest.mark.parametrize('share', [0, 0.2], ids=['row', 'batch'])
def test_closed_forms_of_prefixes(gained, w, uncancelled, share):
  logp = np.full((4, 3), -1.0, np.float32)
  logp[:, 0] += gained  # the policy of a shared token is one

  prefixes, rows, used = program(share)
  scalars = metrics.to_scalars(
    prefixes({'logp': jnp.asarray(logp)}, rows, used)
  )
  expected = {
    'whole_tokens': 1,
    'whole_weight': w / 12,
    'whole_uncancelled': uncancelled,
    'whole_weight_expected': 0,
    'whole_uncancelled_expected': 0,
    'part_tokens': 1,  # 5 7, where nothing has moved
    'part_weight': 1 / 24,
    'part_uncancelled': 1 / 2,
    'part_weight_expected': 1 / 24,
    'part_uncancelled_expected': 1 / 2,
  }
  found = {k: v for k, v in scalars.items() if k.startswith('prefix_')}
  assert found.keys() == {f'prefix_{name}' for name in expected}
  for name, value in expected.items():
    np.testing.assert_allclose(
      found[f'prefix_{name}'], value, rtol=1e-6, atol=1e-7, err_msg=name
    )


def episodes(previous=None):
  """Four episodes; 5 is the first turn, 7 is said, and the last one forks.

  Its turn 0 and its turn 1 both begin behind the prompt.
  """
  rollout = shared_rollout()
  batch = rollout.batch._replace(
    tokens=np.array([[[5, 7, 1], [5, 7, 2], [5, 8, 3], [6, 5, 4]]], np.int32),
    mask=np.array([[[1, 0, 1]] * 3 + [[1, 1, 0]]], bool),
    keep=np.array([[[1, 0, 1]] * 3 + [[1, 1, 0]]], bool),
    extras={'turn': np.array([[[0, 0, 1]] * 3 + [[0, 1, 0]]], np.int32)},
  )
  return rollout._replace(batch=batch, previous=previous)


@pytest.mark.parametrize('forks', [False, True])
def test_closed_forms_of_the_contexts_of_turns(forks):
  """The pulls of first tokens: of turn 0 and of turn 1 of each episode."""
  previous = np.broadcast_to(np.arange(-1, 2, dtype=np.int32), (1, 4, 3)).copy()
  previous[0, 3, 1] = -1
  rollout = episodes(previous if forks else None)
  learner = table_learner(losses.chain(losses.center_by_group()))
  unread: Any = None  # nothing is scored

  def with_policies(rollout):
    return policies.with_policies(
      learner, UpdateSpec(), unread, rollout, 0, unread, unread
    )[0]

  given = with_policies(rollout)
  pull = np.zeros((1, 4, 3), np.float32)
  pull[0, :, 0], pull[0, :3, 2], pull[0, 3, 1] = (3, -1, -1, -1), (4, -1, 8), 6
  found = metrics.to_scalars(
    jax.jit(step_metrics.metrics_of_prefixes)(given, pull, 2 * pull)
  )
  # Behind 5 7 are two turns; behind the prompt four, or five with the fork.
  pulls, part = (6, 4 / 5) if forks else (0, 1)
  size = 12 if forks else 6
  one = 1 + forks / 5  # contexts of turn 1: 5 7, and its part of the prompt
  expected = {
    'turn0_contexts': part,
    'turn0_weight': pulls,
    'turn0_uncancelled': pulls / size,
    'turn1_contexts': one,
    'turn1_weight': (3 + forks * pulls / 5) / one,
    'turn1_uncancelled': (3 / 5 + forks * pulls / size / 5) / one,
    'turn2_contexts': 0,
  }
  for name, value in expected.items():
    assert found[f'prefix_{name}'] == pytest.approx(value), name
    more = f'prefix_{name}_expected'
    if name.endswith('weight'):
      assert found[more] == pytest.approx(2 * value)
    assert name.endswith('contexts') != (more in found)
  assert 'prefix_turn2_weight' not in found  # a mean of nothing
  alone = shared_rollout()._replace(previous=previous)
  assert with_policies(alone).extras.keys() == {'fresh'}


def test_at_ratio_one_the_sampler_is_the_policy_too():
  """So no token is dropped for being far from what the sampler reported."""
  rollout = shared_rollout()
  given = rollout.batch._replace(
    logp_sampler=(rollout.batch.logp_old + 0.7).astype(np.float32),
    extras={'log_kept': np.zeros((1, 4, 3), np.float32)},
  )
  rows, used = micro_batches.cut_rollout(rollout, np.arange(1), spec('padded'))

  def slopes(*more):
    method = losses.chain(
      losses.center_by_group(), losses.mean_over_tokens(), losses.ppo_clip()
    )
    learner = table_learner(losses.chain(method, *more))
    batch, state, _ = learner_lib.credit(learner, given, learner.method.init())
    batch = losses.prepare(learner.method, batch, state)

    @jax.jit
    def run(params):
      found = gradient_lib.differentiate(
        learner, None, params, state, batch, rows, used
      )
      unmoved = gradient_lib.slope_at_ratio_one(learner, found, batch, state)
      return found.slope, unmoved

    return run({'logp': jnp.full((4, 3), -1.0)})

  plain, _ = slopes()
  dropping, unmoved = slopes(losses.mask_off_policy_negatives(policy='sampler'))
  wrong = np.asarray(plain) > 0
  assert wrong.any() and not np.asarray(dropping)[wrong].any()
  np.testing.assert_allclose(unmoved, plain, rtol=1e-6)


def test_what_the_credit_measures_is_reported_and_leaves_the_batch():
  """Over trained tokens: the truncated completion is in no mean."""
  rollout = shared_rollout()
  gained = np.array([0.3, 0.1, -0.3, 9.0])[None, :, None]  # of each token
  own = np.arange(12, dtype=np.float32).reshape(1, 4, 3)
  batch = rollout.batch._replace(
    truncated=np.array([[False, False, False, True]]),
    logp_sampler=(rollout.batch.logp_old - gained).astype(np.float32),
    extras={'log_kept': 0 * own, 'own': own},
  )
  method = losses.chain(
    losses.drop_truncated(),
    losses.center_by_group(),
    losses.truncate_sequence_importance(1.5),
    losses.on_advantage(
      lambda advantage, batch: (advantage, {'twice': 2 * batch.extras['own']})
    ),
    losses.mean_over_tokens(),
    losses.ppo_clip(),
  )
  learner = table_learner(method)
  credit = jax.jit(functools.partial(learner_lib.credit, learner))
  credited, _, measured = credit(batch, method.init())
  scalars = metrics.to_scalars(measured)
  np.testing.assert_allclose(scalars['importance_truncated'], 1 / 3, rtol=1e-6)
  assert scalars['importance_truncated_saturated'] == 0  # e^27 was dropped
  np.testing.assert_allclose(scalars['twice'], own[:, :3].mean() * 2, rtol=1e-6)
  np.testing.assert_allclose(scalars['advantage_max'], 3 / 4 * 1.5, rtol=1e-6)
  assert set(credited.extras) == {'log_kept', 'own'}
