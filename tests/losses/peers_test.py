"""Faults found in other libraries, each as a test that it is not here.

The rows are those of the project's list of findings; rows 4, 7, 12 and 13 are
tested where the transforms are (gate_test, correction_test, credit_test,
shaping_test).
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import losses
from tests.losses import cases

CLOSE = dict(rtol=1e-9, atol=1e-12)


def advantages(links, reward, length, valid=None):
  reward, length = jnp.asarray(reward, float), np.asarray(length)
  mask = np.arange(length.max()) < length[:, :, None]
  valid = jnp.ones(reward.shape, bool) if valid is None else jnp.asarray(valid)
  batch = losses.make_batch(mask, reward, valid=valid)
  method = losses.chain(*links)
  return np.asarray(cases.credited(method, batch).advantage)


@pytest.mark.parametrize(
  'weight',
  [
    losses.mean_over_tokens(),
    losses.mean_over_sequences(),
    losses.mean_over_prompts(),
  ],
)
def test_row_1_the_denominator_is_that_of_the_optimizer_batch(weight):
  """Each of two optimizer steps on one rollout weighs 1, of any lengths."""
  mask = np.arange(7) < np.array([[1, 7], [2, 1], [7, 7], [6, 5]])[:, :, None]
  batch = losses.make_batch(mask, jnp.arange(8.0).reshape(4, 2))
  method = losses.chain(losses.center_by_group(), weight)
  batch, state = losses.credit(method, batch, method.init())
  for half in (slice(0, 2), slice(2, 4)):
    part = jax.tree.map(lambda x: x[half], batch)  # noqa: B023
    part = losses.prepare(method, part, state)
    np.testing.assert_allclose(jnp.sum(part.weight), 1, rtol=1e-12)


@pytest.mark.parametrize('name', ['luspo', 'grpo', 'gspo', 'reinforce_pp'])
def test_row_2_padding_is_not_averaged_over(name):
  """With KL and a correction; five more columns, full of garbage."""
  method = losses.chain(
    getattr(losses.methods, name)(),
    losses.truncate_token_importance(1.2, self_normalized=True),
    losses.add_kl(0.3),
  )
  case = cases.make_case(4)
  pad = lambda x, value: np.pad(
    x,
    ((0, 0), (0, 0), (0, 5), (0, 0))[: x.ndim],
    constant_values=value,
  )
  per_token = {
    field: pad(value, False if value.dtype == bool else 3)
    for field, value in case._asdict().items()
    if value.shape[:3] == case.mask.shape
  }
  loss, gradient = cases.loss_and_gradient(method, case)
  wide_loss, wide = cases.loss_and_gradient(method, case._replace(**per_token))
  np.testing.assert_allclose(wide_loss, loss, **CLOSE)
  np.testing.assert_allclose(wide[..., :6], gradient, **CLOSE)
  assert not np.any(wide[..., 6:])


def test_row_3_a_whitened_advantage_has_mean_0_over_the_trained_tokens():
  links = losses.use_reward(), losses.normalize_over_tokens()
  length = np.array([[1, 5, 2], [3, 3, 4]])
  value = advantages(links, [[3.0, 1.0, 4.0], [1.0, 5.0, 9.0]], length)
  trained = value[np.arange(5) < length[:, :, None]]
  np.testing.assert_allclose(trained.mean(), 0, atol=1e-12)
  np.testing.assert_allclose(trained.std(), 1, rtol=1e-12)


def test_row_8_informative_means_groups_that_differ_not_rewards_above_0():
  """One of three groups teaches; five of six rewards are not 0."""
  batch = losses.make_batch(
    np.ones((3, 2, 1), bool), jnp.array([[1.0, 1.0], [0.0, 1.0], [1.0, 1.0]])
  )
  batch, _ = cases.prepared(losses.methods.gpg(), batch)
  np.testing.assert_allclose(batch.weight, np.full((3, 2, 1), 3 / 6))


def test_row_9_unequal_groups_stay_groups():
  value = advantages(
    (losses.center_by_group(),),
    [[0.0, 2.0, 0.0], [10.0, 11.0, 15.0]],
    np.ones((2, 3), int),
    valid=[[True, True, False], [True, True, True]],
  )
  np.testing.assert_allclose(value[..., 0], [[-1, 1, 0], [-2, -1, 3]])


def test_row_10_a_reward_is_clipped_before_it_is_normalised_or_not_at_all():
  clip = losses.on_reward(lambda reward, batch: jnp.clip(reward, -1, 1))
  value = advantages(
    (clip, losses.center_by_group()), [[50.0, -1.0]], np.ones((1, 2), int)
  )
  np.testing.assert_array_equal(value[0, :, 0], [1, -1])
  with pytest.raises(ValueError, match="already set 'advantage'"):
    advantages(
      (losses.center_by_group(), clip), [[50.0, -1.0]], np.ones((1, 2), int)
    )


@pytest.mark.parametrize(
  'baseline',
  [
    losses.normalize_by_group(),
    losses.center_by_group(),
    losses.leave_one_out(),
    losses.divide_by_group_mean(),
    losses.best_minus_second(),
    losses.credit_pass_at_k(2),
  ],
)
def test_row_11_a_long_completion_does_not_move_the_groups_baseline(baseline):
  reward = [[0.0, 0.0, 1.0, 3.0]]
  short = advantages((baseline,), reward, [[1, 1, 1, 1]])
  long = advantages((baseline,), reward, [[1, 1, 1, 9]])
  np.testing.assert_array_equal(short[..., 0], long[..., 0])
  assert np.any(short)


def test_row_14_a_negative_mean_does_not_turn_the_sign_around():
  value = advantages(
    (losses.divide_by_group_mean(),),
    [[-3.0, 1.0], [-1.0, 3.0], [-1.0, 1.0]],
    np.ones((3, 2), int),
  )
  np.testing.assert_allclose(value[..., 0], [[0, 0], [-2, 2], [0, 0]])


@pytest.mark.parametrize('name', ['clip_cov', 'kl_cov'])
def test_row_15_what_couples_rows_says_so(name):
  """And its statistics are those of the batch: a part of it has others."""
  method = getattr(losses.methods, name)(share=0.2)
  assert method.scope == 'batch'
  assert losses.chain(losses.chain(method)).scope == 'batch'


@pytest.mark.parametrize('name', ['gspo', 'gmpo', 'luspo', 'gcpo', 'grpo_s'])
def test_row_15_a_pooled_ratio_does_not_depend_on_the_micro_batch(name):
  assert getattr(losses.methods, name)().scope == 'row'


@pytest.mark.parametrize('name', ['grpo', 'gspo', 'importance_sampling'])
def test_row_16_the_pull_back_is_not_lost_where_the_policy_is_far_away(name):
  """A wrong completion whose every log-ratio is 25, beyond saturation."""
  method = getattr(losses.methods, name)()
  logp = jnp.full((1, 2, 3), -0.5)
  batch = losses.make_batch(
    logp < 0, jnp.array([[1.0, 0.0]]), logp_old=logp - 25, logp_ref=logp
  )
  batch, state = cases.prepared(method, batch)
  gradient = jax.grad(
    lambda x: losses.surrogate_loss(method, x, batch, state)[0]
  )(logp)
  assert np.all(gradient[0, 1] > 1e6)  # e^20 times the weight
