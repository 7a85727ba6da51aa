"""Penalties: who is penalised, and with which slope."""

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax import losses
from tests.losses import cases
from tests.losses import one_token


def penalized(log_ratio, **kwargs):
  """(metric, gradient of the penalty) with advantages -1, 1 in turn."""
  old = np.array([-3.0, -2.0, -1.0, -0.5])
  links = losses.score_function(), losses.penalize_covariance(**kwargs)
  now, advantage = old + log_ratio, [1.0, -1.0, 1.0, -1.0]
  terms, gradient = one_token.run(links, now, old, advantage)
  return terms.metrics['penalized'][0, :, 0].tolist(), gradient + advantage


def test_the_penalty_on_covariance_has_no_slope_at_ratio_one():
  """jax.grad(jnp.abs)(0.0) is 1: a past bug."""
  chosen, gradient = penalized(0.0, share=1.0)
  assert chosen == [True] * 4
  np.testing.assert_array_equal(gradient, 0)


def test_the_penalty_on_covariance_pulls_from_both_sides():
  for sign in (1, -1):
    chosen, gradient = penalized(0.1 * sign, share=0.5, coefficient=3.0)
    assert chosen == [False, True, True, False]
    np.testing.assert_allclose(gradient, [0, 3 * sign, 3 * sign, 0], atol=1e-12)


def test_at_least_one_token_is_penalized():
  chosen, _ = penalized(0.1)
  assert chosen == [False, False, True, False]


def test_the_quadratic_pull():
  links = losses.score_function(), losses.pull_to_old(0.5)
  terms, gradient = one_token.run(links, [-1.0, -2.0], [-1.0, -5.0], [0.0, 0.0])
  np.testing.assert_allclose(terms.penalty[0, :, 0], [0, 0.25 * 9])
  np.testing.assert_allclose(gradient, [0, 0.5 * 3])


def test_imitation_counts_trained_tokens_of_positive_advantage():
  """Of 4 tokens with A > 0 two are dropped: the other two share c."""
  method = losses.chain(
    losses.use_reward(),
    losses.drop_truncated(),
    losses.mean_over_tokens(),
    losses.score_function(),
    losses.imitate_positives(0.5),
  )
  batch = losses.make_batch(
    jnp.ones((1, 3, 2), bool),
    jnp.array([[1e-9, 1.0, -1e-9]]),
    truncated=jnp.array([[False, True, False]]),
  )
  batch, state = cases.prepared(method, batch)
  gradient = jax.grad(
    lambda x: losses.surrogate_loss(method, x, batch, state)[0]
  )(jnp.zeros((1, 3, 2)))
  np.testing.assert_allclose(
    gradient[0], [[-0.25, -0.25], [0, 0], [0, 0]], atol=1e-8
  )
