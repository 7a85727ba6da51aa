"""The learner on a teacher's likeliest tokens, which have a gradient each."""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from grpo_jax import losses
from grpo_jax import models
from grpo_jax.episodes.types import Rollout
from grpo_jax.learner import gradient
from grpo_jax.learner import metrics
from grpo_jax.learner import micro_batches
from grpo_jax.learner import programs
from grpo_jax.learner import step
from grpo_jax.learner import updates
from grpo_jax.learner.types import Scoring
from grpo_jax.learner.types import Teacher
from grpo_jax.models import experts
from grpo_jax.models import layout
from tests import bigram
from tests import tiny
from tests.learning import MODEL
from tests.learning import PARAMS
from tests.learning import bigram_learner
from tests.learning import bigram_rollout
from tests.learning import credited
from tests.learning import learned
from tests.learning import make_learner
from tests.learning import make_rollout
from tests.learning import make_updater
from tests.learning import spec
from tests.learning import top_method
from tests.learning import with_top

CUTS = {
  'padded': spec('padded', 3),
  'shared': spec('shared', 2, row_completions=2),
  'packed': spec('packed', 2),
}
KL = {
  'reverse': lambda policy, teacher: (jnp.exp(policy) * (policy - teacher)).sum(
    -1
  ),
  'forward': lambda policy, teacher: (
    jnp.exp(teacher) * (teacher - policy)
  ).sum(-1),
}


class Policy(NamedTuple):
  """A model, its rollout, and the parameters of a teacher of its shape."""

  score: Callable
  params: Any
  teacher: Any
  rollout: Rollout
  learner: Callable  # from a method
  vocab: int


@functools.cache
def bigrams():
  other = jax.tree.map(lambda x: -x, bigram.params())
  return Policy(
    bigram.score, bigram.params(), other, bigram_rollout(), bigram_learner,
    bigram.VOCAB,
  )  # fmt: skip


@functools.cache
def transformers():
  def score(params, rows, wanted):
    return models.score(MODEL, params, rows, 1.0, wanted)

  other = tiny.params(MODEL, 5)
  return Policy(
    score, PARAMS, other, make_rollout(), make_learner, MODEL.vocab_size
  )


@functools.cache
def distilled(make, direction):
  """Value and gradient of the KL over the vocabulary, by one function.

  Besides, what a batch has of the teacher's tokens: all.
  """
  policy = make()
  batch, vocab = policy.rollout.batch, policy.vocab
  owned = batch.mask & batch.valid[..., None]
  rows = layout.padded_rows(
    policy.rollout.prompts, batch.tokens, policy.rollout.length, 16
  )
  by_id = np.broadcast_to(np.arange(vocab), (*rows.target.shape, vocab))

  def of_all(params):
    found = policy.score(params, rows, models.Wanted(ids=by_id))
    return found.top_logp.reshape(*owned.shape, vocab)

  teacher = of_all(policy.teacher)

  def loss(params):
    kl = KL[direction](of_all(params), teacher)
    means = jnp.where(owned, kl, 0).sum(-1) / jnp.maximum(owned.sum(-1), 1)
    return means.sum() / owned.any(-1).sum()

  ids = jnp.argsort(-teacher, axis=-1)
  top = jnp.take_along_axis(teacher, ids, axis=-1)
  fields = {'teacher_top_ids': ids, 'teacher_top_logp': top}
  return *jax.jit(jax.value_and_grad(loss))(policy.params), fields


def differentiated(policy, method, fields, cut):
  """The gradient as the learner finds it."""
  learner = policy.learner(method)
  batch = policy.rollout.batch._replace(extras=fields)
  batch, state, _ = step.credit(learner, batch, method.init())
  batch = losses.prepare(method, batch, state)
  rows, used = micro_batches.cut_rollout(policy.rollout, np.arange(4), cut)
  return jax.jit(lambda *args: gradient.differentiate(learner, None, *args))(
    policy.params, state, batch, rows, used
  )


@pytest.mark.parametrize('cut', CUTS)
@pytest.mark.parametrize('direction', KL)
@pytest.mark.parametrize(
  'make',
  [bigrams, pytest.param(transformers, marks=pytest.mark.long)],
)
def test_over_all_tokens_it_is_the_kl_over_the_vocabulary(make, direction, cut):
  value, grads, fields = distilled(make, direction)
  method = losses.methods.gkd(direction, make().vocab)
  found = differentiated(make(), method, fields, CUTS[cut])
  np.testing.assert_allclose(found.loss, value, rtol=1e-5)
  tiny.assert_trees_close(found.grads, grads, 1e-5)
  assert value > 0.1


@pytest.mark.parametrize('direction', KL)
def test_fewer_tokens_are_a_lower_bound(direction):
  value, _, fields = distilled(bigrams, direction)
  found = []
  for number in (1, 3, 6):
    few = {name: x[..., :number] for name, x in fields.items()}
    method = losses.methods.gkd(direction, number)
    found.append(differentiated(bigrams(), method, few, CUTS['padded']).loss)
  assert 0 < found[0] < found[1] < found[2] < value


def of_teacher(method, anchor='learner', **options):
  """An updater whose teacher is another bigram model, and its parameters."""
  learner = bigram_learner(method, optax.sgd(0.1))
  learner = dataclasses.replace(
    learner,
    teacher=Teacher(Scoring(bigram.score), learner.placement.logical_axes),
  )
  made = make_updater(
    learner, bigram.params(), spec('shared', 4), anchor=anchor, **options
  )
  other = jax.tree.map(lambda x: -x, bigram.params())
  return dataclasses.replace(made, teacher=other), other


def state_of(made):
  return made.compiled.init(jax.tree.map(jnp.copy, bigram.params()))


def test_the_teacher_says_its_likeliest_tokens():
  made, other = of_teacher(losses.methods.gkd('reverse', 3), batches=2)
  rollout = bigram_rollout()
  extras = credited(made, state_of(made), rollout).batch.extras
  ids, top = extras['teacher_top_ids'], extras['teacher_top_logp']
  assert ids.shape == top.shape == (*rollout.batch.mask.shape, 3)
  rows = layout.padded_rows(
    rollout.prompts, rollout.batch.tokens, rollout.length, 16
  )
  wanted = bigram.score(other, rows, models.Wanted(likeliest=3))
  shape = *rollout.batch.mask.shape, 3
  owned = rollout.batch.mask & rollout.batch.valid[..., None]
  np.testing.assert_array_equal(
    ids[owned], wanted.top_ids.reshape(shape)[owned]
  )
  np.testing.assert_allclose(
    top[owned], wanted.top_logp.reshape(shape)[owned], atol=1e-6
  )
  assert np.all(np.diff(top[owned]) <= 0) and not top[~owned].any()
  np.testing.assert_allclose(
    extras['logp_teacher'][owned],
    wanted.logp.reshape(shape[:3])[owned],
    atol=1e-6,
  )


def test_what_is_lowered_is_what_is_called():
  made, _ = of_teacher(losses.methods.gkd('reverse', 3))
  names = programs.scoring_names(made)
  assert names == ['score_teacher']
  lowered = programs.lowerings(made, made.layout, bigram_rollout())
  state = state_of(made)
  for step_number in range(3):
    ready = credited(made, state, bigram_rollout(step_number), step_number)
    state, measured = updates.take_updates(made, state, ready)
  assert made.compiled.score_teacher._cache_size() == 1
  assert made.compiled.step._cache_size() == 1
  text = lowered['train_step']().as_text()
  assert '4x4x6x3xi32' in text and '4x4x6x3xf32' in text
  assert measured.keys() >= {'kl_teacher_top', 'teacher_top_mass'}


def test_it_comes_near_its_teacher_without_rewards():
  """Whose advantages are all equal; the KL falls at every update."""
  made, _ = of_teacher(losses.methods.gkd('forward', 4), epochs=4)
  rollout = bigram_rollout(reward=np.zeros((4, 4)))
  found, state = [], state_of(made)
  for number in range(4):
    state, measured = learned(made, state, rollout, number)
    found.append(metrics.to_scalars(measured)['kl_teacher_top'])
  assert found == sorted(found, reverse=True) and found[-1] < 0.97 * found[0]
  assert int(state.idle) == 0


@pytest.mark.parametrize('direction', KL)
def test_overshoot_and_the_end_of_a_rollout_read_them_too(direction):
  method = top_method(direction)
  made = make_updater(
    bigram_learner(method), bigram.params(), spec('packed', 2),
    batches=2, watch_steps=1,
  )  # fmt: skip
  rollout = with_top(bigram_rollout(), bigram.VOCAB)
  _, measured = learned(made, state_of(made), rollout)
  scalars = metrics.to_scalars(measured)
  assert scalars.keys() >= {'rollout_outside', 'ends_outside'}
  assert scalars['kl_teacher_top'] > 0
  assert 0 < scalars['teacher_top_mass'] < 1


def test_files_may_have_more_tokens_than_a_method_reads():
  fields = with_top(bigram_rollout(), bigram.VOCAB).batch.extras
  few, many, none = (
    differentiated(bigrams(), method, fields, CUTS['shared']).scores.top_logp
    for method in (
      top_method(number=2), top_method(number=5), losses.methods.dapo()
    )
  )  # fmt: skip
  assert few.shape[-1] == 2 and none is None
  np.testing.assert_allclose(few, many[..., :2], atol=1e-6)


def test_a_model_with_experts_is_asked_for_them_too():
  def score_routed(params, rows, wanted, counted, sampled):
    del counted, sampled
    routed = models.Routed(
      experts.Statistics(jnp.ones((1, 2)), jnp.ones((1, 2))), None
    )
    return bigram.score(params, rows, wanted), routed

  fields = with_top(bigram_rollout(), bigram.VOCAB).batch.extras
  plain, routed = (
    differentiated(policy, top_method(), fields, CUTS['packed']).grads
    for policy in (
      bigrams(),
      bigrams()._replace(
        learner=lambda method: bigram_learner(method, score_routed=score_routed)
      ),
    )
  )
  jax.tree.map(np.testing.assert_array_equal, plain, routed)
