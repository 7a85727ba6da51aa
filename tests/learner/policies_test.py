"""What the methods read of policies, and what it costs to know it."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import losses
from grpo_jax import models
from grpo_jax.learner import metrics
from grpo_jax.learner import policies
from grpo_jax.learner import programs
from grpo_jax.learner import step as learner_lib
from grpo_jax.learner.types import Scoring
from grpo_jax.learner.types import Teacher
from grpo_jax.losses import methods
from grpo_jax.models import layout
from tests import bigram
from tests import tiny
from tests.learning import learned
from tests.learning import make_updater
from tests.learning import spec
from tests.learning import with_policies

SHAPE = (bigram.PROMPTS, bigram.GROUP, bigram.TOKENS)


def bare(entropy=False, sampler=True):
  """A rollout as the engine gives it, with the sampler's entropy or without."""
  rollout = bigram.rollout()
  log_kept = np.where(rollout.batch.mask, -0.5, 0).astype(np.float32)
  extras = {'log_kept': log_kept}
  if entropy:
    extras['entropy_sampler'] = rollout.batch.entropy_old
  batch = rollout.batch._replace(
    logp_old=None, logp_ref=None, entropy_old=None, extras=extras
  )
  if not sampler:
    batch = batch._replace(logp_sampler=None)
  return rollout._replace(batch=batch)


@functools.cache
def scored(by):
  """`Scores` [P,G,T] under the policy or the reference, without the learner."""
  rollout, params = bigram.rollout(), bigram.params()
  if by == 'policy':
    params = moved()
  rows = layout.padded_rows(
    rollout.prompts, rollout.batch.tokens, rollout.length, 16
  )
  scores = bigram.score(params, rows, models.Wanted(entropy=True))
  return jax.tree.map(lambda x: tiny.gather(x, rows, rollout.length), scores)


@functools.cache
def moved():
  """The policy after some steps; the reference is where it began."""
  return jax.tree.map(lambda x: 1.2 * x, bigram.params())


def make(method, **options):
  """An updater, and a state whose policy has left its reference."""
  learner = bigram.make_learner(method)
  made = make_updater(learner, bigram.params(), spec('shared', 4), **options)
  state = learner_lib.init(learner, bigram.params())
  return made, state._replace(params=moved())


def controlled():
  return losses.chain(
    losses.normalize_by_group(),
    losses.truncate_sequence_importance(1.0),
    losses.mean_over_tokens(),
    losses.ppo_clip(),
    losses.add_entropy_bonus(losses.entropy_target(0.1)),
    losses.add_kl(losses.adaptive_kl(0.3, 0.1)),
  )


class Case(NamedTuple):
  method: losses.LossTransform
  options: dict  # of the `UpdateSpec`
  known: bool  # whether the sampler gives its entropy
  logp_old: str | None  # whose it is: 'policy' or 'sampler'
  entropy_old: str | None
  scorings: int


forking, plain = methods.forking_tokens(), methods.grpo(kl_coefficient=0)
sampler, twice = dict(anchor='sampler'), dict(epochs=2)
CASES = {
  'nothing': Case(plain, {}, False, None, None, 0),
  'nothing-sampler': Case(plain, sampler, False, 'sampler', None, 0),
  'several-steps': Case(plain, twice, False, 'policy', None, 1),
  'several-batches': Case(plain, dict(batches=5), False, 'policy', None, 1),
  'reference': Case(methods.grpo(), {}, False, None, None, 1),
  'reference-several': Case(methods.grpo(), twice, False, 'policy', None, 2),
  'in-the-reward': Case(methods.reinforce_pp(), {}, True, 'policy', 'any', 2),
  'entropy': Case(forking, {}, False, None, 'policy', 1),
  'entropy-known': Case(forking, {}, True, None, 'sampler', 0),
  'entropy-several': Case(forking, twice, False, 'policy', 'policy', 1),
  # One pass gives both, so both are the learner's.
  'entropy-known-several': Case(forking, twice, True, 'policy', 'policy', 1),
  'entropy-sampler': Case(forking, sampler, False, 'sampler', 'policy', 1),
  'both-sampler': Case(forking, sampler, True, 'sampler', 'sampler', 0),
  'all': Case(controlled(), {}, False, 'policy', 'policy', 2),
  'all-sampler': Case(controlled(), sampler, True, 'sampler', 'sampler', 1),
}


@pytest.mark.parametrize('case', CASES.values(), ids=CASES)
def test_each_requirement_is_supplied(case):
  made, state = make(case.method, **case.options)
  rollout = bare(case.known)
  batch, scorings = with_policies(made, state, rollout)
  given = rollout.batch
  sources = {
    ('logp_old', 'policy'): scored('policy').logp,
    ('logp_old', 'sampler'): given.logp_sampler,
    ('entropy_old', 'policy'): scored('policy').entropy,
    ('entropy_old', 'sampler'): given.extras.get('entropy_sampler'),
  }
  inside = given.mask
  for name in ('logp_old', 'entropy_old'):
    found, source = getattr(batch, name), getattr(case, name)
    if source is None:
      assert found is None
    elif source != 'any':
      want = sources[name, source]
      np.testing.assert_allclose(found[inside], want[inside], atol=2e-6)
  assert (batch.logp_ref is None) == (not made.compiled.learner.with_reference)
  if batch.logp_ref is not None:
    want = scored('reference').logp
    np.testing.assert_allclose(batch.logp_ref[inside], want[inside], atol=2e-6)
  assert 'noise' not in batch.extras
  assert scorings == case.scorings
  passes = made.spec.forward_passes(scorings, 0.5)
  assert passes == 1.5 * made.spec.epochs + case.scorings


@pytest.mark.parametrize('anchor', ['learner', 'sampler'])
def test_a_teacher_scores_a_rollout_once(anchor):
  """By its own model and parameters; the old policy is scored besides."""

  def halved(params, rows, wanted):
    params = jax.tree.map(lambda x: x / 2, params)
    return bigram.score(params, rows, wanted)

  learner = bigram.make_learner(methods.opd())
  learner = dataclasses.replace(
    learner,
    teacher=Teacher(Scoring(halved), learner.placement.logical_axes),
    # A policy with experts, which the teacher has not.
    scoring=dataclasses.replace(learner.scoring, score_routed=bigram.score),
    expert_balance=0.1,
  )
  made = make_updater(
    learner, bigram.params(), spec('shared', 4), batches=5, anchor=anchor
  )
  doubled = jax.tree.map(lambda x: 2 * x, bigram.params())
  made = dataclasses.replace(made, teacher=doubled)
  state = learner_lib.init(learner, bigram.params())
  state = state._replace(params=moved())
  batch, scorings = with_policies(made, state, bare())
  assert scorings == (anchor == 'learner')
  inside, wanted = batch.mask, scored('reference').logp
  found = batch.extras['logp_teacher']
  np.testing.assert_allclose(found[inside], wanted[inside], atol=2e-6)
  names = ['score_all'] * scorings + ['score_teacher']
  assert programs.scoring_names(made) == names
  lowered = programs.lowerings(made, made.layout, bare())
  assert {name for name in lowered if name.startswith('score')} == {*names}
  lowered['score_teacher']()


def test_the_sources_differ():
  """So that the test above tells one from another."""
  inside, given = bigram.rollout().batch.mask, bare(True).batch
  sources = (
    [scored('policy').logp, scored('reference').logp, given.logp_sampler],
    [scored('policy').entropy, given.extras['entropy_sampler']],
  )
  for several in sources:
    for i, one in enumerate(several):
      for other in several[:i]:
        assert np.mean(np.abs(one - other)[inside]) > 0.05


@pytest.mark.parametrize('known', [True, False])
@pytest.mark.parametrize('anchor', ['learner', 'sampler'])
def test_of_groups_in_stock_the_sampler_is_the_old_policy(anchor, known):
  made, state = make(forking, anchor=anchor, stale=True)
  rollout = bare(known)
  version = np.zeros(SHAPE, np.int32)
  version[:2] = 3
  rollout = rollout._replace(batch=rollout.batch._replace(version=version))
  batch, scorings = with_policies(made, state, rollout, 3)
  given, inside = rollout.batch, rollout.batch.mask
  np.testing.assert_array_equal(
    batch.extras['fresh'][inside], (version == 3)[inside]
  )
  logp, entropy, *_ = scored('policy')
  if anchor == 'learner':
    whole = given.logp_sampler + given.extras['log_kept']
    logp = jnp.where(version == 3, logp, whole)
    if known:
      drawn = given.extras['entropy_sampler']
      entropy = jnp.where(version == 3, entropy, drawn)
  else:
    logp = given.logp_sampler
    entropy = given.extras.get('entropy_sampler', entropy)
  np.testing.assert_allclose(batch.logp_old[inside], logp[inside], atol=2e-6)
  np.testing.assert_allclose(
    batch.entropy_old[inside], entropy[inside], atol=2e-6
  )
  assert scorings == (anchor == 'learner' or not known)


@pytest.mark.parametrize('measures', [True, False])
@pytest.mark.parametrize('reads', [True, False])
def test_the_age_of_each_token_is_what_has_been_learned_since(measures, reads):
  """It is there if the method reads it, or metrics tell ages apart."""
  stale = losses.chain(forking, losses.mask_stale(9)) if reads else forking
  made, state = make(stale)
  learner = made.compiled.learner
  measuring = dataclasses.replace(learner.measuring, ages=2 * measures)
  learner = dataclasses.replace(learner, measuring=measuring)
  rollout = bare()
  version = np.arange(np.prod(SHAPE), dtype=np.int32).reshape(SHAPE) % 4
  rollout = rollout._replace(batch=rollout.batch._replace(version=version))
  batch, _ = policies.with_policies(
    learner,
    made.spec,
    state,
    rollout,
    5,
    lambda *_: scored('policy'),
    lambda: pytest.fail('the method reads no teacher'),
  )
  assert ('age' in batch.extras) == (reads or measures)
  if reads or measures:
    age = batch.extras['age']
    assert age.dtype == np.float32
    np.testing.assert_array_equal(age, np.where(batch.mask, 5 - version, 0))


@pytest.mark.parametrize('known', [True, False])
def test_a_rollout_of_earlier_policies_alone_is_not_scored_for_nothing(known):
  """But for an entropy that the sampler has not given."""
  made, state = make(forking, stale=True)
  rollout = bare(known)
  old = rollout.batch._replace(version=np.full(SHAPE, 2, np.int32))
  batch, scorings = with_policies(made, state, rollout._replace(batch=old), 3)
  assert scorings == (not known)
  assert isinstance(batch.logp_old, np.ndarray)  # not from a device
  whole = old.logp_sampler + old.extras['log_kept']
  np.testing.assert_array_equal(batch.logp_old, whole)
  entropy = scored('policy').entropy
  if known:
    entropy = old.extras['entropy_sampler']
  inside = old.mask
  np.testing.assert_allclose(
    batch.entropy_old[inside], entropy[inside], atol=2e-6
  )


def test_what_scores_is_lowered_for_a_rollout_with_new_tokens():
  """Though the example is older than the first rollout to come."""
  made, _ = make(plain, stale=True)
  lowered = programs.lowerings(made, made.layout, bare(), step=3)
  assert 'score_all' in lowered


def test_noise_goes_by_seed_and_step():
  def noise(seed, step, **options):
    made, state = make(methods.clip_cov(), seed=seed, **options)
    return with_policies(made, state, bare(), step)[0].extras['noise']

  first = noise(7, 2)
  assert first.shape == SHAPE and first.dtype == np.float32
  assert 0 <= first.min() < 0.1 and 0.9 < first.max() < 1
  np.testing.assert_array_equal(noise(7, 2), first)
  np.testing.assert_array_equal(noise(7, 2, epochs=2, batches=5), first)
  for other in (noise(7, 3), noise(8, 2)):
    assert np.mean(other == first) < 0.05
  made, state = make(methods.clip_cov(), seed=7)
  again = [with_policies(made, state, bare(), 2) for _ in range(2)]
  for batch, _ in again:  # nor does it depend on what was drawn before
    np.testing.assert_array_equal(batch.extras['noise'], first)


@pytest.mark.parametrize(
  'method',
  [
    pytest.param(controlled(), marks=pytest.mark.long),
    pytest.param(methods.clip_cov(), marks=pytest.mark.long),
    methods.deepseek_v3_2(policy='sampler'),
  ],
  ids=['controlled', 'clip_cov', 'deepseek_v3_2'],
)
def test_memory_can_be_asked_before_anything_is_scored(method):
  made, _ = make(method)
  rollout = bare(sampler=False)
  needs = programs.memory_gib(made, made.layout, rollout)
  assert 0 < needs['temporary'] < needs['peak'] < 0.1
  assert rollout.batch.logp_sampler is None  # what was given stays as it was
  assert set(rollout.batch.extras) == {'log_kept'}


def test_a_step_with_everything_that_can_be_required():
  method = losses.chain(controlled(), losses.penalize_covariance(0.2))
  made, _ = make(method, epochs=2)
  state = made.compiled.init(jax.tree.map(jnp.copy, moved()))
  state, measured = learned(made, state, bare(), 0)
  scalars = metrics.to_scalars(measured)
  assert state.step == 2 and np.isfinite(list(scalars.values())).all()
  assert scalars['kl_old_k3'] > 0 and scalars['penalized'] > 0
  assert scalars['importance_truncated'] > 0  # measured by the credit


def test_what_no_one_can_supply_is_named():
  made, state = make(methods.deepseek_v3_2(policy='sampler'))
  with pytest.raises(ValueError, match="'logp_sampler'"):
    learned(made, state, bare(sampler=False), 0)


def test_what_lies_behind_a_completion_is_no_older_token():
  """There the version is 0, as in the rollouts of an engine."""
  made, state = make(forking)
  rollout = bare(True)
  mask = np.asarray(rollout.batch.mask)
  assert (mask.any(-1) & ~mask.all(-1)).any()
  version = np.where(mask, 3, 0).astype(np.int32)
  rollout = rollout._replace(batch=rollout.batch._replace(version=version))
  batch, _ = with_policies(made, state, rollout, 3)
  assert np.asarray(batch.extras['fresh'])[mask].all()
