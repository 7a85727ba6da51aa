"""Advantages: exact zeros, scale, groups of one, shaping, dropping."""

import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import losses
from tests.losses import cases

BASELINES = {
  'normalize': losses.normalize_by_group(),
  'normalize-sample': losses.normalize_by_group('sample'),
  'center': losses.center_by_group(),
  'leave_one_out': losses.leave_one_out(),
}


def advantages(transform, reward, valid=None, tokens=1):
  reward = jnp.asarray(reward, jnp.float32)
  mask = jnp.ones((*reward.shape, tokens), bool)
  valid = jnp.ones(reward.shape, bool) if valid is None else jnp.asarray(valid)
  batch = losses.make_batch(mask, reward, valid=valid)
  return np.asarray(cases.credited(transform, batch).advantage)[:, :, 0]


@pytest.mark.parametrize('name', BASELINES)
def test_equal_rewards_give_exactly_zero(name):
  """In groups of 1 to 63; their first completion is not valid.

  Peers leave up to 0.96 there: the rounding error of a mean, over itself.
  """
  size = 1 + np.arange(64)
  rewards = np.array([0.1, 1 / 3, 1e6 + 0.1], np.float32)
  valid = np.tile(np.arange(64) < size[:, None], (3, 1))
  valid[:, 0] = False
  reward = np.where(valid, np.repeat(rewards, 64)[:, None], 7.0)
  assert not np.any(advantages(BASELINES[name], reward, valid))


@pytest.mark.parametrize(
  'group',
  [2, 3, *(pytest.param(n, marks=pytest.mark.long) for n in (5, 8)), 64],
)
@pytest.mark.parametrize('name', BASELINES)
def test_equal_rewards_give_exactly_zero_in_a_full_group(name, group):
  rewards = np.array([0.1, 1 / 3, 1e6 + 0.1], np.float32)[:, None]
  reward = np.broadcast_to(rewards, (3, group))
  assert not np.any(advantages(BASELINES[name], reward))


@pytest.mark.parametrize('group', [2, 3, 8, 64])
@pytest.mark.parametrize('base', [0.0, 0.1, 1000.0])
def test_one_against_the_rest_is_not_amplified(group, base):
  """A z-score is at most sqrt(G - 1); peers reach 2e4 times that."""
  reward = np.full((1, group), base, np.float32)
  reward[0, -1] += 1.0
  value = advantages(BASELINES['normalize'], reward)
  expected = np.sqrt(group - 1)
  np.testing.assert_allclose(value[0, -1], expected, rtol=1e-6)
  np.testing.assert_allclose(value[0, 0], -1 / expected, rtol=1e-5)


def test_closed_forms():
  reward = [[0.0, 1.0, 1.0, 2.0]]
  root = np.sqrt(0.5)
  expected = {
    'normalize': np.array([-1, 0, 0, 1]) / root,
    'normalize-sample': np.array([-1, 0, 0, 1]) / np.sqrt(2 / 3),
    'center': [-1, 0, 0, 1],
    'leave_one_out': [-4 / 3, 0, 0, 4 / 3],
  }
  for name, transform in BASELINES.items():
    np.testing.assert_allclose(
      advantages(transform, reward)[0], expected[name], rtol=1e-6, atol=1e-7
    )


def test_epsilon_is_added_to_the_deviation():
  value = advantages(losses.normalize_by_group(epsilon=0.5), [[0.0, 1.0]])
  np.testing.assert_allclose(value, [[-0.5, 0.5]], rtol=1e-6)


def test_a_group_of_one_has_no_advantage():
  for transform in BASELINES.values():
    value = advantages(transform, [[5.0, 3.0]], [[True, False]])
    np.testing.assert_array_equal(value, 0)


def test_no_baseline_and_constant():
  reward = [[2.0, -1.0]]
  np.testing.assert_array_equal(advantages(losses.use_reward(), reward), reward)
  np.testing.assert_array_equal(
    advantages(losses.constant_advantage(3.0), reward), [[3.0, 3.0]]
  )


def test_overlong_ramp():
  """Budget 10, ramp of 4: 0 up to 6 tokens, then a quarter per token."""
  tokens = np.array([0, 6, 7, 9, 10, 12])
  mask = np.arange(12) < tokens[None, :, None]
  transform = losses.chain(
    losses.shape_overlong_reward(4, 10), losses.use_reward()
  )
  batch = losses.make_batch(mask, jnp.ones((1, 6)))
  batch, _ = losses.credit(transform, batch, transform.init())
  np.testing.assert_allclose(batch.reward[0], [1, 1, 0.75, 0.25, 0, 0])


def test_the_ramp_may_be_the_whole_budget():
  """And the budget one token."""
  transform = losses.chain(
    losses.shape_overlong_reward(1, 1), losses.use_reward()
  )
  batch = losses.make_batch([[[False], [True]]], [[2.0, 2.0]])
  batch, _ = losses.credit(transform, batch, transform.init())
  np.testing.assert_array_equal(batch.reward, [[2, 1]])


def test_dropped_groups_leave_the_denominator():
  mask = np.ones((2, 2, 3), bool)
  batch = losses.make_batch(mask, jnp.array([[0.0, 1.0], [1.0, 1.0]]))
  method = losses.methods.dapo()
  batch, _ = cases.prepared(method, batch)
  np.testing.assert_allclose(batch.weight[0], 1 / 6)
  np.testing.assert_array_equal(batch.weight[1], 0)


@pytest.mark.parametrize('k', [0, -1])
def test_pass_at_k_needs_a_k(k):
  with pytest.raises(ValueError, match=f'k={k}; give a k of at least 1'):
    losses.credit_pass_at_k(k)


def test_pass_at_one_is_the_z_score():
  reward = [[0.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 1.0]]
  np.testing.assert_allclose(
    advantages(losses.credit_pass_at_k(1), reward),
    advantages(BASELINES['normalize'], reward),
    rtol=1e-6,
  )


def test_an_invalid_completion_is_not_right_even_where_0_is():
  """Rewards of -1 and 1, right from 0 on; an invalid one holds a 0."""
  reward, valid = [[-1.0, 1.0, -1.0, 7.0]], [[True, True, True, False]]
  np.testing.assert_array_equal(
    advantages(losses.credit_pass_at_k(1, 0.0), reward, valid)[0, :3],
    advantages(losses.credit_pass_at_k(1, 0.0), [[-1.0, 1.0, -1.0]])[0],
  )


def test_a_group_of_k_is_refused_and_k_valid_ones_teach_nothing():
  """All of them together pass or do not: there is nothing to compare."""
  transform = losses.credit_pass_at_k(2)
  with pytest.raises(
    ValueError, match='k=2 and groups of 2, in which it never'
  ):
    advantages(transform, [[0.0, 1.0]])
  reward, valid = [[0.0, 1.0, 1.0]], [[True, True, False]]
  assert not np.any(advantages(transform, reward, valid))
  assert np.any(advantages(transform, [[0.0, 0.0, 1.0]]))


@pytest.mark.parametrize(
  'make, words',
  [
    (lambda: losses.normalize_by_group('both'), "deviation='both'"),
    (lambda: losses.shape_overlong_reward(0, 10), 'soft_tokens=0'),
    (lambda: losses.shape_overlong_reward(11, 10), 'max_tokens=10'),
    (lambda: losses.mean_over_sequence_sums(0), 'budget_tokens=0'),
    (lambda: losses.add_kl(0.1, 'k1'), 'expected gradient is zero'),
    (lambda: losses.add_kl(0.1, 'k9'), "'k9'"),
  ],
)
def test_bad_arguments_are_refused(make, words):
  with pytest.raises(ValueError, match=words):
    make()
