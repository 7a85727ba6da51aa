"""What is measured of every rollout and loss: closed forms, any split."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import losses
from grpo_jax import models
from grpo_jax.learner import metrics
from grpo_jax.learner import step_metrics
from grpo_jax.models.experts import Statistics
from tests import bigram
from tests.learning import learned
from tests.learning import make_rollout
from tests.learning import make_updater
from tests.learning import spec

SHAPE = (3, 4, 6)
of_terms = jax.jit(step_metrics.metrics_of_terms)


def make_terms():
  """Random terms and their batch, with a lost completion and dropped tokens."""
  rng = np.random.default_rng(0)
  normal = lambda size: rng.normal(0, size, SHAPE).astype(np.float32)
  mask = np.arange(6) < rng.integers(1, 7, SHAPE[:2])[:, :, None]
  mask[1, 2] = False
  judged = np.ones(SHAPE[:2], bool)
  judged[1, 2] = False
  keep = mask & (rng.random(SHAPE) < 0.8) & (np.arange(3) < 2)[:, None, None]
  logp = normal(1)
  batch = losses.make_batch(
    mask,
    np.zeros(SHAPE[:2]),
    keep=keep,
    valid=judged,
    logp_old=np.where(mask, logp + normal(0.4), 0),
    logp_ref=np.where(mask, logp + normal(0.4), 0),
    logp_sampler=np.where(mask, logp + normal(0.1) + 0.2, 0),
    extras={'log_kept': np.full(SHAPE, -0.2, np.float32)},
  )
  terms = losses.SurrogateTerms(
    np.where(mask, logp, 0),
    3 * normal(0.3),
    None,
    None,
    None,
    {'own': normal(1)},
  )
  return terms, batch


def expected_terms(terms, batch):
  """The same in float64, completion by completion."""
  logp, old, ref, sampler = (
    np.asarray(x, np.float64)
    for x in (terms.logp, batch.logp_old, batch.logp_ref, batch.logp_sampler)
  )
  kept = np.asarray(batch.keep)
  share = lambda w: np.sum(w) ** 2 / np.sum(np.square(w)) / np.size(w)
  whole = [
    np.exp(np.sum((logp - sampler)[place][np.asarray(batch.mask)[place]]))
    for place in np.ndindex(SHAPE[:2])
    if kept[place].any()
  ]
  ratio = np.exp(np.asarray(terms.log_ratio, np.float64))[kept]
  gap = np.abs(logp - (sampler - 0.2))[kept]
  to_old, to_ref = (logp - old)[kept], (ref - logp)[kept]
  return {
    'own': terms.metrics['own'][kept].mean(),
    'kl_old_k1': -to_old.mean(),
    'kl_old_k3': np.mean(np.expm1(to_old) - to_old),
    'kl_ref_k1': -to_ref.mean(),
    'kl_ref_k3': np.mean(np.expm1(to_ref) - to_ref),
    'ratio_max': ratio.max(),
    'ratio_min': ratio.min(),
    'ess_token': share(np.exp(logp - sampler)[kept]),
    'ess_sequence': share(whole),
    'sampler_gap': gap.mean(),
    'sampler_gap_max': gap.max(),
    'sampler_gap_exp': np.exp(gap).mean(),
  }


def test_closed_forms_of_terms():
  terms, batch = make_terms()
  scalars = metrics.to_scalars(of_terms(terms, batch))
  expected = expected_terms(terms, batch)
  quantiles = {f'ratio_{label}' for label in ('p01', 'p50', 'p99')}
  assert scalars.keys() == expected.keys() | quantiles
  for name, value in expected.items():
    np.testing.assert_allclose(scalars[name], value, rtol=1e-5, err_msg=name)
  ratio = np.exp(terms.log_ratio[batch.keep])
  np.testing.assert_allclose(scalars['ratio_p50'], np.median(ratio), rtol=0.05)


def test_what_was_not_given_is_not_measured():
  """No old policy: ratio 1. No sampler: the old policy drew the tokens."""
  terms, batch = make_terms()
  bare = batch._replace(logp_sampler=None, logp_ref=None)
  scalars = metrics.to_scalars(of_terms(terms, bare))
  assert not any(name.startswith(('sampler', 'kl_ref')) for name in scalars)
  gained = np.where(batch.keep, terms.logp - batch.logp_old, 0)[batch.keep]
  weight = np.exp(np.asarray(gained, np.float64))
  np.testing.assert_allclose(
    scalars['ess_token'],
    weight.sum() ** 2 / np.square(weight).sum() / len(weight),
    rtol=1e-5,
  )
  on_policy = terms._replace(log_ratio=np.zeros(SHAPE, np.float32), metrics={})
  scalars = metrics.to_scalars(
    of_terms(on_policy, bare._replace(logp_old=None))
  )
  assert scalars.pop('kl_old_k1') == scalars.pop('kl_old_k3') == 0
  assert len(scalars) == 7 and set(scalars.values()) == {1.0}


def test_far_policies_give_finite_numbers():
  terms, batch = make_terms()
  far = terms._replace(
    logp=np.where(batch.mask, 200.0, 0), log_ratio=np.full(SHAPE, 200.0)
  )
  for sign in (1, -1):
    moved = far._replace(logp=sign * far.logp, log_ratio=sign * far.log_ratio)
    scalars = metrics.to_scalars(of_terms(moved, batch))
    assert np.isfinite(list(scalars.values())).all(), scalars


@pytest.mark.parametrize('kind', ['k1', 'k3'])
def test_the_estimators_estimate_their_divergence(kind):
  """Their means over the tokens drawn, by enumeration of three outcomes."""
  drawn_from, other = np.log([0.6, 0.3, 0.1]), np.log([0.2, 0.3, 0.5])
  divergence = np.sum(np.exp(drawn_from) * (drawn_from - other))

  def mean(name, logp, **given):
    total = 0.0
    for outcome in range(3):
      one = losses.make_batch(
        np.ones((1, 3, 1), bool),
        np.zeros((1, 3)),
        keep=np.arange(3)[None, :, None] == outcome,
        **{field: value[None, :, None] for field, value in given.items()},
      )
      logps = logp[None, :, None]
      terms = losses.SurrogateTerms(logps, 0 * logps, None, None, None, {})
      scalars = metrics.to_scalars(of_terms(terms, one))
      total += np.exp(drawn_from[outcome]) * scalars[f'{name}_{kind}']
    return total

  # Drawn from the old policy: KL(old || policy). From it: KL(policy || ref).
  old = mean('kl_old', other, logp_old=drawn_from)
  ref = mean('kl_ref', drawn_from, logp_ref=other)
  np.testing.assert_allclose([old, ref], divergence, rtol=1e-5)


def test_any_split_into_completions_gives_the_same():
  terms, batch = make_terms()
  whole = of_terms(terms, batch)
  order = np.random.default_rng(1).permutation(12)
  rows = jax.tree.map(
    lambda x: x.reshape(12, 1, *x.shape[2:])[order], (terms, batch)
  )
  nothing = jax.tree.map(np.zeros_like, (terms, batch))
  merged = metrics.empty(whole)
  for cut in (slice(0, 4), slice(4, 8), slice(8, 12)):
    part = jax.tree.map(lambda x, c=cut: x[c], rows)
    merged = metrics.merge(merged, of_terms(*part))
  merged = metrics.merge(merged, of_terms(*nothing))  # an unused micro-batch
  np.testing.assert_array_equal(
    merged['log_ratio'].counts, whole['log_ratio'].counts
  )
  scalars, expected = metrics.to_scalars(merged), metrics.to_scalars(whole)
  assert scalars.keys() == expected.keys()
  for name, value in expected.items():
    np.testing.assert_allclose(scalars[name], value, rtol=1e-6, err_msg=name)


def test_closed_forms_of_credit():
  reward = np.array([[1, 1, 1, 1], [0, 9, 1, 0], [0, 2, 2, 2], [1, 1, 0, 0]])
  rollout = make_rollout(1, reward=reward)  # equal ones, one not judged
  judged = rollout.batch.valid & (np.arange(4) != 3)[:, None]
  entropy = np.random.default_rng(0).random(rollout.batch.mask.shape)
  given = losses.check_batch(
    rollout.batch._replace(valid=judged, extras={'entropy_sampler': entropy})
  )
  method = losses.methods.dapo()
  batch, _ = losses.credit(method, given, method.init())
  uniform = losses.uniform_groups(given)
  of_credit = jax.jit(step_metrics.metrics_of_credit)
  scalars = metrics.to_scalars(of_credit(given, batch, uniform))
  valid, mask, kept = (
    np.asarray(x, bool) for x in (given.valid, given.mask, batch.keep)
  )
  advantage = np.asarray(batch.advantage)[kept]
  groups = [np.asarray(r)[v] for r, v in zip(given.reward, valid)]
  expected = {
    'reward': np.asarray(given.reward)[valid].mean(),
    'uniform_groups': np.mean(
      [len(set(group)) < 2 for group in groups if len(group)]
    ),
    'length_tokens': mask.sum(-1)[valid].mean(),
    'truncated': np.asarray(given.truncated)[valid].mean(),
    'kept_tokens': kept.sum() / mask.sum(),
    'advantage_abs': np.abs(advantage).mean(),
    'advantage_mean': advantage.mean(),
    'advantage_std': advantage.std(),
    'advantage_max': advantage.max(),
    'advantage_min': advantage.min(),
    'entropy': entropy[mask].mean(),
  }
  assert 0 < expected['uniform_groups'] < 1 and 0 < expected['kept_tokens'] < 1
  assert scalars.keys() == expected.keys()
  for name, value in expected.items():
    np.testing.assert_allclose(scalars[name], value, rtol=1e-5, err_msg=name)


def test_routers_are_compared_on_fresh_trained_tokens():
  """A policy of an earlier version chose its experts by other routers."""
  batch = make_rollout(1).batch
  rng = np.random.default_rng(0)
  keep, fresh = rng.random((2, *batch.mask.shape)) < 0.5
  share = rng.random(batch.mask.shape).astype(np.float32)
  load = jnp.array([[3.0, 1.0], [2.0, 2.0]])  # of two layers, two experts
  routed = models.Routed(Statistics(load, load), share)
  for extras, counted in (({'fresh': fresh}, keep & fresh), ({}, keep)):
    found = metrics.to_scalars(
      step_metrics.metrics_of_routers(
        routed, batch._replace(keep=keep, extras=extras)
      )
    )
    assert found == pytest.approx(
      {
        'expert_balance': (2 * (9 + 1) / 16 + 1) / 2,
        'expert_load_max': 1.5,
        'router_disagreement': share[counted].mean(),
      }
    )


# A "model" whose parameters are the log-probabilities: bitwise equal in every
# layout, so that what differs is the metrics alone, and quick to compile.
def table_learner(method, mesh=(1, 1, 1), **options):
  def score(params, rows, wanted):
    take = functools.partial(jnp.take, mode='fill', fill_value=0, axis=0)
    logp = take(params['logp'], rows.completion)
    return models.Scores(logp, jnp.exp(logp) if wanted.entropy else None)

  return bigram.changed(
    bigram.make_learner(method, mesh),
    score=score,
    logical_axes=lambda path, rank: (None,) * rank,
    **options,
  )


def table(rollout):
  """Near the old policy; the sampler's is nearer."""
  logp = rollout.batch.logp_old.reshape(16, -1)
  noise = np.random.default_rng(2).normal(0, 0.1, logp.shape)
  return {'logp': jnp.asarray(logp + noise, jnp.float32)}


def table_rollout():
  rollout = make_rollout(1)
  sampler = (table(rollout)['logp'] + 0.01).reshape(rollout.batch.mask.shape)
  tokens = np.array(rollout.batch.tokens)
  tokens[..., 0] = 1  # a prefix that all share
  batch = rollout.batch._replace(
    tokens=tokens,
    logp_sampler=np.asarray(sampler),
    extras={
      'log_kept': np.zeros(sampler.shape, np.float32),
      'turn': np.indices(sampler.shape, np.int32)[2],
    },
  )
  return rollout._replace(batch=batch)


def steps(rollouts, mesh=(1, 1, 1), **options):
  """Scalars of each rollout's step, and the states."""
  learner = table_learner(losses.methods.grpo(), mesh, **options)
  params = table(rollouts[0])
  made = make_updater(learner, params, spec('shared', 4))
  state = made.compiled.init(jax.tree.map(jnp.copy, params))
  scalars, states = [], [jax.device_get(state)]
  for step, rollout in enumerate(rollouts):
    state, measured = learned(made, state, rollout, step)
    scalars.append(metrics.to_scalars(measured))
    states.append(jax.device_get(state))
  return scalars, states


def test_eight_devices_measure_what_one_does():
  (one,), _ = steps([table_rollout()], expects_prefixes=True)
  (eight,), _ = steps([table_rollout()], (2, 2, 2), expects_prefixes=True)
  assert one.keys() == eight.keys()
  # The policy is near the old one, so what it does is near what is meant.
  meant = one['prefix_whole_weight_expected']
  assert one['prefix_whole_weight'] == pytest.approx(meant, rel=0.2)
  assert one['prefix_turn0_contexts'] == 1 and one['prefix_turn1_contexts'] > 0
  for name, value in one.items():
    np.testing.assert_allclose(
      eight[name], value, rtol=2e-6, atol=1e-7, err_msg=name
    )


def test_norms_and_the_steps_not_taken():
  rollout = table_rollout()
  reward = lambda value: rollout._replace(
    batch=rollout.batch._replace(
      reward=np.full((4, 4), value, np.float32),
      logp_ref=None if value is None else rollout.batch.logp_ref,
    )
  )
  idle, broken = (
    reward(0.5),
    rollout._replace(
      batch=rollout.batch._replace(
        logp_old=np.full_like(rollout.batch.logp_old, np.nan)
      )
    ),
  )
  # Nothing was learned from, and the loss is not finite: it is refused.
  both = broken._replace(
    batch=idle.batch._replace(logp_old=broken.batch.logp_old)
  )
  scalars, states = steps([rollout, idle, broken, idle, both, rollout])
  for measured, old, new in zip(scalars, states, states[1:]):
    moved = new.params['logp'] - old.params['logp']
    norm = lambda x: np.sqrt(np.sum(np.square(x, dtype=np.float64)))
    np.testing.assert_allclose(
      measured['param_norm'], norm(new.params['logp']), rtol=1e-6
    )
    np.testing.assert_allclose(
      measured['update_norm'], norm(moved), rtol=1e-4, atol=1e-7
    )
  assert scalars[0]['update_norm'] > 1e-4
  np.testing.assert_allclose(
    scalars[0]['update_norm'], 0.1 * scalars[0]['grad_norm'], rtol=1e-5
  )
  assert 'grad_norm' not in scalars[2]  # it was not finite
  # These take a second evaluation of the loss, and nobody has asked for them.
  assert not any(name.endswith('_expected') for name in scalars[0])
  assert [s['idle_steps'] for s in scalars] == [0, 1, 1, 2, 2, 2]
  assert [s['nonfinite_steps'] for s in scalars] == [0, 0, 1, 1, 2, 2]


def test_metrics_by_age_in_closed_form():
  terms, batch = make_terms()
  kept = np.asarray(batch.keep)
  # From 0 to 4 in turns, and anything where nothing was drawn.
  age = np.where(batch.mask, np.cumsum(kept).reshape(SHAPE) % 5, np.nan)
  batch = batch._replace(extras={'age': age.astype(np.float32)})
  at = np.cumsum(kept).reshape(SHAPE) % 4
  marks = {'clipped_high': at == 1, 'clipped_cap': at == 2, 'ratio': at}
  terms = terms._replace(metrics=marks)
  measure = jax.jit(step_metrics.metrics_of_ages, static_argnums=2)
  scalars = metrics.to_scalars(measure(terms, batch, 3))
  gained = np.asarray(terms.logp - batch.logp_sampler, np.float64)
  clipped = (at == 1) | (at == 2)
  for n in range(4):
    some = kept & (age == n)
    assert some.sum() > 2
    weight = np.exp(gained[some])
    for name, value in {
      'log_ratio': np.abs(gained[some]).mean(),
      'kl': np.mean(np.expm1(gained[some]) - gained[some]),
      'clipped': clipped[some].mean(),
      'ess': weight.sum() ** 2 / np.square(weight).sum() / len(weight),
    }.items():
      np.testing.assert_allclose(
        scalars.pop(f'age_{n}_{name}'), value, rtol=1e-5, err_msg=name
      )
  assert not scalars  # what is older than the oldest is in none


def test_ages_are_data_and_not_compiled():
  """Whoever drew: one program. An age of which there is nothing has none."""
  terms, batch = make_terms()
  traced = []

  @jax.jit
  def measure(terms, batch):
    traced.append(1)
    return step_metrics.metrics_of_ages(terms, batch, 4)

  for age in range(6):
    whole = np.full(SHAPE, age, np.float32)
    found = measure(terms, batch._replace(extras={'age': whole}))
    scalars = metrics.to_scalars(found)
    assert {name[:5] for name in scalars} == ({f'age_{age}'} - {'age_5'})
  assert len(traced) == 1


def test_the_policy_is_compared_with_what_drew():
  """With the old policy where no sampler is known, else with itself."""
  terms, batch = make_terms()
  batch = batch._replace(extras={'age': np.zeros(SHAPE, np.float32)})
  batch = batch._replace(logp_sampler=None)
  kept = np.asarray(batch.keep)
  for old in (batch.logp_old, None):
    gap = terms.logp - (terms.logp if old is None else old)
    scalars = metrics.to_scalars(
      step_metrics.metrics_of_ages(terms, batch._replace(logp_old=old), 1)
    )
    np.testing.assert_allclose(
      scalars['age_0_log_ratio'], np.abs(gap)[kept].mean(), rtol=1e-5
    )
    assert (scalars['age_0_ess'] == 1) == (old is None)
    assert scalars['age_0_clipped'] == 0  # no trust region has marked any


def test_shares_of_ages_are_of_all_trained_tokens():
  """Of completions without an advantage too, of which updates see nothing."""
  rollout = make_rollout(1)
  shape = rollout.batch.mask.shape
  rng = np.random.default_rng(0)
  age = rng.integers(0, 4, shape).astype(np.float32)
  given = losses.check_batch(rollout.batch._replace(extras={'age': age}))
  keep = np.asarray(given.mask) & (rng.random(shape) < 0.7)
  batch = given._replace(advantage=np.zeros(shape, np.float32), keep=keep)
  uniform = losses.uniform_groups(given)
  for oldest, number in ((0, 0), (2, 3), (4, 5)):
    scalars = metrics.to_scalars(
      step_metrics.metrics_of_credit(given, batch, uniform, oldest)
    )
    assert sum(name.startswith('age_') for name in scalars) == number
    for n in range(number):
      share = np.sum(keep & (age == n)) / keep.sum()
      np.testing.assert_allclose(scalars[f'age_{n}_share'], share, 1e-6)
