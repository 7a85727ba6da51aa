"""No two methods are the same: one batch on which their gradients differ."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import losses
from grpo_jax.losses import methods
from tests import oracles
from tests.losses import cases

SAME = {('gspo', 'gspo_token')}  # with one advantage per completion, as here


def batch():
  """Ragged and off-policy, in groups of 8, so that every default acts.

  The first completion of each group is wrong and much likelier than before,
  with ratios beyond 20; two completions have hardly moved, as the narrow clips
  of pooled ratios want; the rewards of right ones differ a little.
  """
  rng = np.random.default_rng(7)
  shape = (3, 8, 6)
  mask = np.arange(6) < rng.integers(1, 7, shape[:2])[:, :, None]
  reward = rng.choice([0.0, 1.0], shape[:2])
  reward[:, :2] = [0.0, 1.0]
  reward *= 1 + 0.01 * rng.random(shape[:2])
  logp_old = -rng.exponential(1.2, shape)
  logp = np.minimum(logp_old + 0.9 * rng.standard_normal(shape), -0.01)
  logp[:, 0] = -0.05  # wrong, and likelier now
  logp_old[:, 0] = -0.05 - rng.uniform(0.1, 4.0, (3, 6))
  near = np.zeros(shape, bool)
  near[:, 3:5] = True  # inside the clip of a pooled ratio
  logp = np.where(near, logp_old + 2e-5 * rng.standard_normal(shape), logp)
  parts = np.stack([reward, rng.random(shape[:2])], axis=-1)
  return oracles.Case(
    logp=logp,
    logp_old=logp_old,
    logp_ref=logp_old + 0.5 * rng.standard_normal(shape),
    mask=mask,
    valid=np.ones(shape[:2], bool),
    reward=reward,
    logp_sampler=logp_old,
    entropy_old=rng.uniform(0.05, 1.2, shape),
    entropy=rng.uniform(0.05, 1.2, shape),
    reward_parts=parts,
    truncated=np.zeros(shape[:2], bool),
    tokens=rng.integers(0, 3, shape),
    noise=rng.random(shape),
    turn=np.minimum(np.cumsum(rng.random(shape) < 0.4, axis=-1), 3),
    turn_reward=rng.choice([0.0, 0.25], (*shape[:2], 4)),
    turn_state=rng.integers(0, 4, (*shape[:2], 4)),
    logp_teacher=logp_old + 0.5 * rng.standard_normal(shape),
    teacher_top=-np.sort(rng.exponential(1.5, (*shape, 16)) + 2.5, axis=-1),
    others=-4 - rng.exponential(1.0, (*shape, 15)),
  )


@pytest.mark.long
def test_every_method_has_a_gradient_of_its_own():
  """With its default arguments, all of them."""
  case, gradients = batch(), {}
  for name in methods.__all__:
    _, gradient = cases.loss_and_gradient(getattr(methods, name)(), case)
    gradients[name] = np.asarray(gradient)
    assert np.abs(gradient).max() > 1e-6, name
  same = set()
  for one, other in itertools.combinations(sorted(gradients), 2):
    size = np.abs(gradients[one]).max()
    if np.abs(gradients[one] - gradients[other]).max() < 1e-3 * size:
      same.add((one, other))
  assert same == SAME
  assert len(gradients) - len(same) >= 40


def gspo(gradient, *shaping):
  return losses.chain(
    losses.normalize_by_group(),
    *shaping,
    losses.mean_over_sequences(),
    losses.pool_log_ratio(gradient),
    losses.ppo_clip(0.05, 0.1),
  )


def test_gspo_token_is_gspo_until_the_advantage_depends_on_the_token():
  case = cases.make_case(3)
  sequence = cases.loss_and_gradient(gspo('sequence'), case)
  token = cases.loss_and_gradient(gspo('token'), case)
  jnp_close = dict(rtol=1e-10, atol=1e-13)
  np.testing.assert_allclose(token[0], sequence[0], **jnp_close)
  np.testing.assert_allclose(token[1], sequence[1], **jnp_close)
  position = losses.on_advantage(
    lambda advantage, batch: advantage * (1 + jnp.arange(6.0)[None, None])
  )
  sequence = cases.loss_and_gradient(gspo('sequence', position), case)
  token = cases.loss_and_gradient(gspo('token', position), case)
  np.testing.assert_allclose(token[0], sequence[0], **jnp_close)  # same value
  assert np.abs(token[1] - sequence[1]).max() > 1e-2
  # Through the mean all tokens of a completion have one slope.
  number = case.mask.sum(axis=-1)[:, :, None]
  mean = sequence[1].sum(axis=-1, keepdims=True) / np.maximum(number, 1)
  owned = case.mask & case.valid[:, :, None]
  spread = np.abs(sequence[1] - mean)[owned].max()
  assert spread < 1e-12 < 1e-2 < np.abs(token[1] - mean)[owned].max()
