"""Moments and the reference in the memory of the host: the same numbers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from grpo_jax import losses
from grpo_jax import metrics
from grpo_jax import models
from grpo_jax import optim
from grpo_jax.learner import offload
from grpo_jax.learner import updates
from tests.learning import MODEL
from tests.learning import PARAMS
from tests.learning import make_learner
from tests.learning import make_rollout
from tests.learning import spec

AWAY = {'offload_moments': True, 'offload_reference': True}


def plain():
  return optim.adamw(1e-2, clip_norm=1.0)


def everything():
  """A brake, the scale of rewards, the record, and gathered gradients."""
  gathered = optax.MultiSteps(plain(), 2).gradient_transformation()
  braked = optim.reset_moments(gathered)
  return optim.record_adam_moments(optim.restore_reward_scale(braked, 0.3))


def updater(optimizer, mesh=(1, 1, 1), **offloaded):
  learner = make_learner(
    losses.methods.grpo(kl_coefficient=0.1), mesh, optimizer()
  )

  def score_forward(params, rows, with_entropy):
    return models.score(
      MODEL, params, rows, 1.0, with_entropy, forward_mode=True
    )

  learner = dataclasses.replace(
    learner, score_forward=score_forward, **offloaded
  )
  return updates.Updater(
    learner,
    PARAMS,
    spec('shared', 4),
    batches=2,
    epochs=2,
    refresh_steps=2,
    refresh_weight=0.5,
    watch_steps=2,
  )


def trained(made, rollouts=3):
  state = made.init(jax.tree.map(jnp.copy, PARAMS))
  measured = []
  for step in range(rollouts):
    rollout = make_rollout(step)
    batch = rollout.batch._replace(logp_old=None, logp_ref=None)
    state, found = made(state, rollout._replace(batch=batch), step)
    measured.append(metrics.to_scalars(found))
  return state, measured


def kinds(tree):
  return {x.sharding.memory_kind for x in jax.tree.leaves(tree)}


@pytest.mark.parametrize(
  'optimizer, mesh',
  [
    (plain, (1, 1, 1)),
    pytest.param(everything, (2, 2, 2), marks=pytest.mark.long),
  ],
)
def test_nothing_changes_but_where_arrays_lie(optimizer, mesh):
  """Over several rollouts, updates and refreshes, one of them watched."""
  state, measured = trained(updater(optimizer, mesh))
  away, also = trained(updater(optimizer, mesh, **AWAY))
  jax.tree.map(np.testing.assert_array_equal, state, away)
  assert measured == also
  assert 'pinned_host' not in kinds(state)
  assert kinds(away.params) == kinds(away.loss_state) | {'device'}
  assert kinds(away.reference) == {'pinned_host'}
  # What the optimizer keeps for each parameter; its counters stay.
  for x in jax.tree.leaves(away.opt_state):
    shapes = {leaf.shape for leaf in jax.tree.leaves(away.params)}
    kept = 'pinned_host' if x.shape in shapes else 'device'
    assert x.sharding.memory_kind == kept


def test_a_refused_update_leaves_them_there():
  made = updater(plain, **AWAY)
  state = made.init(jax.tree.map(jnp.copy, PARAMS))
  before = jax.device_get(state.opt_state)
  reward = np.full((4, 4), np.nan)
  rollout = make_rollout(reward=reward)
  batch = rollout.batch._replace(logp_old=None, logp_ref=None)
  state, _ = made(state, rollout._replace(batch=batch), 1)
  jax.tree.map(np.testing.assert_array_equal, before, state.opt_state)
  assert 'pinned_host' in kinds(state.opt_state)


def test_the_programs_ahead_are_those_that_run():
  made = updater(plain, **AWAY)
  rollout = make_rollout()
  batch = rollout.batch._replace(logp_old=None, logp_ref=None)
  rollout = rollout._replace(batch=batch)
  lowered = made.lowering(rollout, 1)
  assert set(lowered) == {
    'train_step', 'credit', 'score_all', 'score_reference',
  }  # fmt: skip
  assert made.scoring_names == ['score_all', 'score_reference']
  for name, program in lowered.items():
    moves = 'pinned_host' in program().as_text()
    assert moves == (name in ('train_step', 'score_reference')), name


def test_without_offload_no_program_moves_anything():
  lowered = updater(plain).lowering(make_rollout(), 1)
  assert set(lowered) == {'train_step', 'credit', 'score_all'}
  for program in lowered.values():
    assert 'pinned_host' not in program().as_text()


@pytest.mark.parametrize(
  'name, field',
  [('moments', 'optim.offload'), ('reference', 'reference.offload')],
)
def test_devices_that_cannot_reach_it_are_refused(name, field, monkeypatch):
  learner = make_learner(losses.methods.grpo())
  monkeypatch.setattr(offload, '_KIND', 'a_memory_of_its_own')
  with pytest.raises(ValueError, match=f'config.{field}=True .* cpu has dev'):
    dataclasses.replace(learner, **{f'offload_{name}': True})
