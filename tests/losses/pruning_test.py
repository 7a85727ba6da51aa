"""Which completions of a group are trained, the largest advantages first."""

import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import losses


def kept(reward, *share, valid=None, length=None):
  """Which completions keep their (one or two) tokens."""
  reward = jnp.asarray([reward], float)
  length = np.full(reward.shape, 2) if length is None else np.array([length])
  batch = losses.make_batch(
    np.arange(2) < length[:, :, None],
    reward,
    valid=jnp.ones(reward.shape, bool) if valid is None else jnp.array([valid]),
  )
  method = losses.chain(
    losses.use_reward(), losses.keep_largest_advantages(*share)
  )
  batch, _ = losses.credit(method, batch, method.init())
  np.testing.assert_array_equal(batch.keep, batch.mask & batch.keep[:, :, :1])
  return np.flatnonzero(batch.keep[0, :, 0]).tolist()


@pytest.mark.parametrize(
  'share, expected',
  [
    (0.5, [2, 3]),
    (0.74, [2, 3]),  # floor
    (0.75, [0, 2, 3]),  # of -1 and 1, the earlier
    (0.1, [2]),  # at least one
    (1 - 0.75, [2]),
    (1.0, [0, 1, 2, 3]),
  ],
)
def test_the_largest_advantages_are_kept(share, expected):
  assert kept([-1.0, 1.0, 3.0, -2.0], share) == expected


def test_half_of_the_completions_by_default():
  assert kept([4.0, 3.0, 2.0, 1.0]) == [0, 1]


def test_a_share_of_the_completions_there_are():
  """Of 3 that have tokens, floor(0.7 * 3) = 2; an empty one is none."""
  reward, valid = [9.0, 0.0, 1.0, 2.0, 9.0], [False, True, True, True, True]
  assert kept(reward, 0.7, valid=valid, length=[2, 2, 2, 2, 0]) == [2, 3]


def test_an_empty_completion_is_not_ahead_of_one_without_advantage():
  assert kept([9.0, 0.0, 1.0], 1.0, length=[0, 2, 2]) == [1, 2]


def test_a_share_that_rounding_makes_smaller_loses_none():
  """1 - 0.9 is 0.09999999999999998; of 20 it still keeps 2."""
  assert kept(np.arange(20.0), 1 - 0.9) == [18, 19]


def test_advantages_of_one_size_tie_though_rounding_tells_them_apart():
  """The earlier is kept."""
  assert kept([0.3, 0.1 + 0.2, 0.0], 0.4) == [0]
  assert kept([0.3, 0.301, 0.0], 0.4) == [1]
