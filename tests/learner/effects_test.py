"""What updates did to tokens, against what a few lines compute of it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from grpo_jax import losses
from grpo_jax.learner import updates
from grpo_jax.learner.effects import TokenEffects
from tests import bigram
from tests.learning import bigram_learner
from tests.learning import bigram_rollout
from tests.learning import spec


@functools.cache
def updater(batches, epochs):
  method = losses.methods.dr_grpo(max_tokens=6)
  learner = bigram_learner(method, optax.sgd(0.5))
  rows = spec('shared', 2)
  return updates.Updater(learner, bigram.params(), rows, 0, batches, epochs)


def measured(batches=1, epochs=1, scored=True):
  """The effects of a rollout, and the policy before and after it."""
  rollout = bigram_rollout(reward=np.eye(4))
  if not scored:
    rollout = rollout._replace(batch=rollout.batch._replace(logp_old=None))
  made = updater(batches, epochs)
  effects = TokenEffects(made)
  state = made.init(jax.tree.map(jnp.copy, bigram.params()))
  before = effects.before(state, rollout, 0)
  old = np.asarray(made.score(state.params, rollout).logp)
  state, _ = made(state, rollout, 0)
  new = np.asarray(made.score(state.params, rollout).logp)
  return rollout, effects.after(state, rollout, before), old, new


@pytest.mark.parametrize('batches, epochs', [(1, 1), (2, 2)])
def test_the_log_ratio_is_between_the_old_policy_and_the_last(batches, epochs):
  rollout, found, old, new = measured(batches, epochs, scored=False)
  want = np.where(rollout.batch.mask, new - old, 0)
  np.testing.assert_allclose(found['log_ratio_after'], want, atol=1e-6)
  assert np.abs(want).max() > 1e-3


def test_the_coefficient_is_weight_times_advantage():
  rollout, found, *_ = measured()
  batch = rollout.batch
  valid, reward = np.asarray(batch.valid), np.asarray(batch.reward)
  mean = np.sum(reward * valid, 1, keepdims=True) / valid.sum(1, keepdims=True)
  trained = batch.keep & valid[..., None]
  want = np.where(trained, (reward - mean)[..., None], 0) / (
    6 * trained.any(-1).sum()
  )
  np.testing.assert_allclose(found['coefficient'], want, rtol=1e-5, atol=1e-9)
  assert found['coefficient'].dtype == np.float32
  assert not np.any(found['coefficient'][~np.asarray(rollout.batch.mask)])


def test_each_optimizer_batch_has_weights_of_its_own():
  rollout, whole, *_ = measured()
  _, halves, *_ = measured(batches=2, epochs=2)
  batch = rollout.batch
  some = (batch.keep & np.asarray(batch.valid)[..., None]).any(-1)
  number = np.repeat([some[:2].sum(), some[2:].sum()], 2)[:, None, None]
  np.testing.assert_allclose(
    halves['coefficient'] * number, whole['coefficient'] * some.sum(), rtol=1e-5
  )


def test_updates_are_what_they_are_without_it():
  """Bit for bit, with a reference and several updates."""
  rollout, params = bigram_rollout(), bigram.params()
  learner = bigram_learner(losses.methods.grpo(kl_coefficient=0.1))
  made = updates.Updater(learner, params, spec('shared', 2), 0, 2, 2)
  ends = []
  for effects in None, TokenEffects(made):
    state = made.init(jax.tree.map(jnp.copy, params))
    before = effects and effects.before(state, rollout, 0)
    passes = made.forward_passes()
    state, _ = made(state, rollout, 0)
    if effects and before:
      assert passes == made.forward_passes()
      effects.after(state, rollout, before)
    ends.append(state)
  jax.tree.map(np.testing.assert_array_equal, *ends)
