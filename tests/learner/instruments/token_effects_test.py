"""What updates did to tokens, against what a few lines compute of it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from grpo_jax import losses
from grpo_jax.learner import updates
from grpo_jax.learner.instruments import hook
from grpo_jax.learner.instruments.token_effects import TokenEffects
from tests import bigram
from tests.learning import bigram_learner
from tests.learning import bigram_rollout
from tests.learning import credited
from tests.learning import make_updater
from tests.learning import score
from tests.learning import spec


@functools.cache
def updater(batches, epochs):
  method = losses.methods.dr_grpo(max_tokens=6)
  learner = bigram_learner(method, optax.sgd(0.5))
  rows = spec('shared', 2)
  return make_updater(learner, bigram.params(), rows, 0, batches, epochs)


def measured(batches=1, epochs=1, scored=True):
  """The effects of a rollout, and the policy before and after it."""
  rollout = bigram_rollout(reward=np.eye(4))
  if not scored:
    rollout = rollout._replace(batch=rollout.batch._replace(logp_old=None))
  made = updater(batches, epochs)
  effects = TokenEffects(made, 1)
  state = made.compiled.init(jax.tree.map(jnp.copy, bigram.params()))
  ready = credited(made, state, rollout)
  watch = hook.watch([effects], state, ready)
  old = np.asarray(score(made, state.params, rollout).logp)
  state, _ = updates.take_updates(made, state, ready)
  new = np.asarray(score(made, state.params, rollout).logp)
  return rollout, watch.findings(state).tokens, old, new


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
  made = make_updater(learner, params, spec('shared', 2), 0, 2, 2)
  ends = []
  for instruments in [], [TokenEffects(made, 1)]:
    state = made.compiled.init(jax.tree.map(jnp.copy, params))
    ready = credited(made, state, rollout)
    watch = hook.watch(instruments, state, ready)
    state, _ = updates.take_updates(made, state, ready)
    assert bool(watch.findings(state).tokens) == bool(instruments)
    ends.append(state)
  jax.tree.map(np.testing.assert_array_equal, *ends)


def test_it_is_due_after_every_so_many_rollouts():
  def due(every):
    measure = TokenEffects(updater(1, 1), every)
    return [step for step in range(7) if measure.is_due(step)]

  assert due(0) == [] and due(1) == [*range(7)] and due(3) == [2, 5]
