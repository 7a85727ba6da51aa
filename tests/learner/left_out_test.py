"""Updates leave out completions without an advantage, and nothing changes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from grpo_jax import losses
from grpo_jax.learner import gradient
from grpo_jax.learner import metrics
from grpo_jax.learner import micro_batches
from grpo_jax.learner import step
from grpo_jax.mesh import sharding
from tests import bigram
from tests import tiny
from tests.learning import bigram_learner
from tests.learning import bigram_rollout
from tests.learning import learned
from tests.learning import make_updater
from tests.learning import spec

METHODS = {
  'dapo': losses.methods.dapo,
  'gspo': losses.methods.gspo,  # pools ratios over a completion
  'recentered': lambda: losses.chain(  # edits the advantage by the weight
    losses.normalize_by_group(),
    losses.mean_over_sequences(),
    losses.recenter_branches(),
    losses.ppo_clip(),
  ),
  'grpo': losses.methods.grpo,  # its penalty reads all
  'kl_cov': functools.partial(losses.methods.kl_cov, share=0.3),
}
CUTS = {
  'padded': spec('padded', 2),
  'shared': spec('shared', 1),
  'parts': spec('shared', 2, row_completions=2),
  'packed': spec('packed', 1),
}
CASES = [
  pytest.param(method, cut, marks=() if cut in some else pytest.mark.long)
  for method, some in (
    ('dapo', ('padded', 'packed')),
    ('gspo', ('shared',)),
    ('recentered', ('parts',)),
  )
  for cut in CUTS
]


@functools.cache
def learners(method, *mesh):
  """One that computes everything, and one that leaves out."""
  made = bigram.make_learner(METHODS[method](), *mesh)
  return made, dataclasses.replace(made, compute_all=False)


def found(learner, rows, used, reward=None):
  """The gradient of the rollout, with other rewards if these are given."""
  batch = bigram.rollout().batch
  if reward is not None:
    batch = batch._replace(reward=reward)
  return program(learner)(bigram.params(), batch, rows, used)


@functools.cache
def program(learner):
  @jax.jit
  def run(params, batch, rows, used):
    with sharding.use(learner.mesh):
      batch, state, _ = step.credit(learner, batch, learner.method.init())
      batch = losses.prepare(learner.method, batch, state)
      got = gradient.differentiate(
        learner, None, params, state, batch, rows, used
      )
      return batch, got

  return run


def laid_out(cut):
  every = np.arange(bigram.PROMPTS)
  return micro_batches.cut_rollout(bigram.rollout(), every, cut)


def with_advantage(batch):
  """bool[P * G + 1]: of each completion, and of an empty slot."""
  trained = np.any(batch.keep & (np.asarray(batch.advantage) != 0), axis=-1)
  return np.append(trained, False)


@functools.cache
def of_everything(method):
  """The batch and its whole gradient, which is the same in any rows."""
  rows, used = laid_out(CUTS['padded'])
  batch, wanted = found(learners(method)[0], rows, used)
  assert wanted.computed == used
  return batch, wanted


@pytest.mark.parametrize('method, cut', CASES)
def test_the_gradient_is_that_of_everything(method, cut):
  rows, used = laid_out(CUTS[cut])
  batch, wanted = of_everything(method)
  got = found(learners(method)[1], rows, used)[1]
  # It is computed again from rows in another order.
  tiny.assert_trees_close(got.grads, wanted.grads, 1e-6)
  np.testing.assert_allclose(got.loss, wanted.loss, rtol=1e-5, atol=1e-7)
  needed = with_advantage(batch)[rows.completion].any(axis=-1)
  micro_rows = rows.completion.shape[1]
  assert got.computed == -(-needed.sum() // micro_rows) < used


@pytest.mark.parametrize('method', ['grpo', 'kl_cov'])
def test_a_method_that_reads_them_gets_all(method):
  rows, used = laid_out(CUTS['padded'])
  got = found(learners(method)[1], rows, used)[1]
  assert got.computed == used


def test_shards_leave_out_their_own_rows():
  """As many micro-batches as the shard needs that needs the most."""
  rows, used = laid_out(spec('padded', 4))
  wanted = of_everything('dapo')[1]
  learner = learners('dapo', (2, 2, 2))[1]
  split = jax.device_put(rows, sharding.rows(learner.mesh, axis=1))
  batch, got = found(learner, split, used)
  tiny.assert_trees_close(got.grads, wanted.grads, 1e-6)
  # Each of the four shards has one row of a micro-batch.
  needed = with_advantage(batch)[rows.completion].any(axis=-1)
  assert got.computed == needed.sum(axis=0).max() < used


@pytest.mark.parametrize('micro_rows', [2, 20])
def test_without_any_advantage_nothing_is_computed(micro_rows):
  """Whether there are several micro-batches or one."""
  rows, used = laid_out(spec('padded', micro_rows))
  assert rows.tokens.shape[0] == 20 // micro_rows
  batch = bigram.rollout().batch
  uniform = np.ones_like(batch.reward)
  got = found(learners('dapo')[1], rows, used, uniform)[1]
  assert got.computed == 0
  assert not any(x.any() for x in jax.tree.leaves(got.grads))
  # Every ratio is 1, as before the update.
  kept = batch.keep & batch.valid[..., None]
  np.testing.assert_array_equal(got.terms.log_ratio[kept], 0)
  one = uniform.copy()
  one[0, 1] = 0
  assert found(learners('dapo')[1], rows, used, one)[1].computed > 0


def test_overshoot_is_of_everything():
  learner = learners('dapo')[1]
  batch, _ = found(learner, *laid_out(CUTS['padded']))
  rows, used = laid_out(CUTS['padded'])
  got = gradient.differentiate(
    learner,
    None,
    bigram.params(),
    learner.method.init(),
    batch,
    rows,
    used,
    True,
  )
  assert got.computed == used


def updated(compute_all, rewards):
  """Parameters and metrics of some rollouts, and how many programs it took."""
  made = bigram_learner(
    METHODS['gspo'](), optax.sgd(0.1), compute_all=compute_all
  )
  params = bigram.params()
  updater = make_updater(made, params, spec('shared', 1), batches=2)
  state = updater.compiled.init(jax.tree.map(jnp.copy, params))
  measured = []
  for number, reward in enumerate(rewards):
    state, more = learned(updater, state, bigram_rollout(reward=reward), number)
    measured.append(metrics.to_scalars(more))
  return state.params, measured, updater.compiled.step._cache_size()


def test_updates_are_the_same_and_compiled_once():
  mixed = np.tile([0, 0, 1, 1], (4, 1))
  half, one = mixed.copy(), np.ones_like(mixed)
  half[1], half[2] = 1, 0
  one[3, 0] = 0
  rewards = mixed, half, one, np.ones_like(mixed)
  wanted, all_of, _ = updated(True, rewards)
  got, some_of, programs = updated(False, rewards)
  tiny.assert_trees_close(got, wanted, 1e-6)
  assert programs == 1
  assert [one['left_out'] for one in all_of] == [0, 0, 0, 0]
  assert [one['left_out'] for one in some_of] == [0, 0.5, 0.75, 1]
  names = 'loss', 'grad_norm', 'kept_tokens', 'advantage_abs'
  for everything, some in zip(all_of, some_of, strict=True):
    for name in names:
      np.testing.assert_allclose(
        some[name], everything[name], rtol=1e-4, atol=1e-6
      )
  # Means are over what was computed.
  assert 'kl_old_k3' not in some_of[-1]
  assert some_of[1]['kl_old_k3'] != all_of[1]['kl_old_k3']
  assert some_of[0]['kl_old_k3'] == pytest.approx(all_of[0]['kl_old_k3'])
