"""Moments and the reference in the memory of the host: the same numbers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from grpo_jax import losses
from grpo_jax import optim
from grpo_jax.learner import metrics
from grpo_jax.learner import offload
from grpo_jax.learner import programs
from tests import bigram
from tests.learning import bigram_learner
from tests.learning import bigram_rollout
from tests.learning import learned
from tests.learning import make_updater
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
  learner = bigram_learner(
    losses.methods.grpo(kl_coefficient=0.1), optimizer(), mesh, **offloaded
  )
  return make_updater(
    learner,
    bigram.params(),
    spec('shared', 4),
    batches=2,
    epochs=2,
    refresh_steps=2,
    refresh_weight=0.5,
    watch_steps=1,
  )


@functools.cache
def away():
  """What several tests call or lower."""
  return updater(plain, **AWAY)


def begun(made):
  return made.compiled.init(jax.tree.map(jnp.copy, bigram.params()))


def bare(seed=0, **options):
  """A rollout of which nothing has been scored."""
  rollout = bigram_rollout(seed, **options)
  batch = rollout.batch._replace(logp_old=None, logp_ref=None)
  return rollout._replace(batch=batch)


def trained(made, rollouts=3):
  state, measured = begun(made), []
  for step in range(rollouts):
    state, found = learned(made, state, bare(step), step)
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
  """Over several rollouts that are watched, updates and refreshes."""
  state, measured = trained(updater(optimizer, mesh))
  used = away() if optimizer is plain else updater(optimizer, mesh, **AWAY)
  moved, also = trained(used)
  jax.tree.map(np.testing.assert_array_equal, state, moved)
  assert measured == also
  assert 'pinned_host' not in kinds(state)
  assert kinds(moved.params) == kinds(moved.loss_state) | {'device'}
  assert kinds(moved.reference) == {'pinned_host'}
  # What the optimizer keeps for each parameter; its counters stay.
  for x in jax.tree.leaves(moved.opt_state):
    shapes = {leaf.shape for leaf in jax.tree.leaves(moved.params)}
    kept = 'pinned_host' if x.shape in shapes else 'device'
    assert x.sharding.memory_kind == kept


def test_a_refused_update_leaves_them_there():
  made, poisoned = away(), bare(reward=np.full((4, 4), np.nan))
  state = begun(made)
  before = jax.device_get(state.opt_state)
  state, _ = learned(made, state, poisoned, 1)
  jax.tree.map(np.testing.assert_array_equal, before, state.opt_state)
  assert 'pinned_host' in kinds(state.opt_state)


def test_the_programs_ahead_are_those_that_run():
  made = away()
  lowered = programs.lowerings(made, made.layout, bare(), 1)
  assert set(lowered) == {
    'train_step', 'credit', 'score_all', 'score_reference',
  }  # fmt: skip
  assert programs.scoring_names(made) == ['score_all', 'score_reference']
  for name, program in lowered.items():
    moves = 'pinned_host' in program().as_text()
    assert moves == (name in ('train_step', 'score_reference')), name


def test_without_offload_no_program_moves_anything():
  made = updater(plain)
  lowered = programs.lowerings(made, made.layout, bigram_rollout(), 1)
  assert set(lowered) == {'train_step', 'credit', 'score_all'}
  for program in lowered.values():
    assert 'pinned_host' not in program().as_text()


@pytest.mark.parametrize(
  'name, field',
  [('moments', 'optim.offload'), ('reference', 'reference.offload')],
)
def test_devices_that_cannot_reach_it_are_refused(name, field, monkeypatch):
  learner = bigram_learner(losses.methods.grpo())
  monkeypatch.setattr(offload, '_KIND', 'a_memory_of_its_own')
  with pytest.raises(ValueError, match=f'config.{field}=True .* cpu has dev'):
    bigram.changed(learner, **{f'offload_{name}': True})
