"""What depends on the age of the policy that drew a token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import losses
from tests.losses import cases

LOW, HIGH = 0.1, 0.2


def batch_of(ages, dtype=jnp.float64):
  """A case whose tokens have these ages, in turns."""
  case = cases.make_case(1, spread=0.8)
  batch = cases.to_batch(case, dtype)
  age = jnp.asarray(np.resize(ages, case.mask.shape), dtype)
  return batch._replace(extras={**batch.extras, 'age': age})


def advantages(transform, batch):
  method = losses.chain(losses.constant_advantage(2.0), transform)
  return losses.credit(method, batch, method.init())[0]


@pytest.mark.parametrize('versions', [0, 1, 2.5, 4])
@pytest.mark.parametrize('whole', [False, True])
def test_what_is_too_old_has_no_advantage(versions, whole):
  batch = batch_of([0, 1, 2, 3, 1, 0, 0])
  credited = advantages(losses.mask_stale(versions, whole), batch)
  mask, age = np.asarray(batch.mask), np.asarray(batch.extras['age'])
  masked = np.zeros(mask.shape, bool)
  for p, g, t in np.argwhere(mask):
    own = age[p, g, mask[p, g]]
    masked[p, g, t] = (own.max() if whole else age[p, g, t]) > versions
  kept = np.asarray(credited.keep)  # a lost completion has no advantage
  np.testing.assert_array_equal(
    np.asarray(credited.advantage)[kept], np.where(masked, 0, 2.0)[kept]
  )
  name = losses.CREDIT_METRIC + 'stale_masked'
  found = np.asarray(credited.extras[name])
  np.testing.assert_array_equal(found[kept], masked[kept])
  assert masked.any() == (versions < 3)
  # The tokens still count wherever tokens are counted.
  np.testing.assert_array_equal(kept, mask & np.asarray(batch.valid)[..., None])


def slopes(objective, batch, logp):
  method = losses.chain(
    losses.normalize_by_group(), losses.mean_over_tokens(), objective
  )
  batch, state = losses.credit(method, batch, method.init())
  batch = losses.prepare(method, batch, state)

  def loss(logp):
    return losses.surrogate_loss(method, logp, batch, state, -logp)

  found, terms = jax.value_and_grad(loss, has_aux=True)(logp)
  return found, terms, batch


@pytest.mark.parametrize('growth', [0.5, -0.3, -2.0])
def test_the_range_of_each_age_against_a_loop(growth):
  batch = batch_of([0, 1, 2])
  logp = jnp.where(batch.mask, batch.logp_old + 0.15, 0)
  rng = np.random.default_rng(0)
  logp += jnp.where(batch.mask, rng.normal(0, 0.2, logp.shape), 0)
  (_, terms), slope, credited = slopes(
    losses.clip_by_age(LOW, HIGH, growth), batch, logp
  )
  advantage, keep = (np.asarray(x) for x in (credited.advantage, credited.keep))
  sides = {'clipped_high': 0, 'clipped_low': 0}
  for p, g, t in np.argwhere(keep):
    at = p, g, t
    ratio = np.exp(float(logp[at]) - float(batch.logp_old[at]))
    scale = max(0.0, 1 + growth * float(batch.extras['age'][at]))
    high = ratio > 1 + HIGH * scale and advantage[at] > 0
    low = ratio < 1 - LOW * scale and advantage[at] < 0
    sides['clipped_high'] += high
    sides['clipped_low'] += low
    wanted = 0.0
    if not (high or low):
      wanted = -float(credited.weight[at]) * ratio * advantage[at]
    np.testing.assert_allclose(slope[at], wanted, rtol=1e-5, atol=1e-9)
  for name, number in sides.items():
    assert int(terms.metrics[name][keep].sum()) == number > 0


# With the last three the bounds are other float32 numbers if they are added up
# in float32, and not in float64.
RANGES = (0.2, 0.28), (0.0203, 0.0097), (0.0264, 0.0406), (0.0282, 0.0485)


@pytest.mark.parametrize('low, high', RANGES)
@pytest.mark.parametrize('dtype', [jnp.float32, jnp.float64])
@pytest.mark.parametrize('ages, growth', [([0], 0.7), ([0, 1, 3], 0.0)])
def test_at_age_0_and_without_growth_it_is_the_plain_clip(
  low, high, dtype, ages, growth
):
  batch = batch_of(ages, dtype)
  logp = jnp.where(batch.mask, batch.logp_old, 0)
  logp += jnp.resize(jnp.asarray([0.3, -0.3, 0.001], dtype), logp.shape)
  found = [
    jax.tree.leaves(slopes(objective, batch, logp)[:2])
    for objective in (
      losses.clip_by_age(low, high, growth),
      losses.ppo_clip(low, high),
    )
  ]
  assert found[0][0].dtype == dtype
  for one, other in zip(*found, strict=True):
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.float64])
def test_a_range_of_no_width_holds_the_ratio_1(dtype):
  """And nothing else on the side to which the advantage points."""
  batch = batch_of([1, 2, 3], dtype)
  objective = losses.clip_by_age(0.0203, 0.0097, -1.0)
  plain = losses.ppo_clip(0.0203, 0.0097)
  logp = jnp.where(batch.mask, jnp.maximum(batch.logp_old, -1000), 0)
  (_, terms), slope, credited = slopes(objective, batch, logp)
  assert not any(np.any(terms.metrics[x]) for x in terms.metrics if 'cl' in x)
  np.testing.assert_array_equal(slope, slopes(plain, batch, logp)[1])
  (_, terms), slope, _ = slopes(objective, batch, logp + 1e-6)
  rises = np.asarray(credited.keep & (credited.advantage > 0))
  np.testing.assert_array_equal(terms.metrics['clipped_high'], rises)
  assert rises.any() and not np.any(np.asarray(slope)[rises])


def test_the_growth_may_be_a_schedule():
  batch = batch_of([0, 1, 2])
  logp = jnp.where(batch.mask, batch.logp_old + 0.25, 0)
  scheduled = losses.clip_by_age(LOW, HIGH, lambda rollout: 0.5 + rollout)
  one, other = (
    slopes(objective, batch, logp)[1]
    for objective in (scheduled, losses.clip_by_age(LOW, HIGH, 0.5))
  )
  np.testing.assert_array_equal(one, other)
  assert np.any(one != slopes(losses.ppo_clip(LOW, HIGH), batch, logp)[1])


def test_by_default_older_than_one_version_is_stale_and_clips_are_grpos():
  batch = batch_of([0, 1, 2])
  one, other = (
    advantages(transform, batch).advantage
    for transform in (losses.mask_stale(), losses.mask_stale(1, False))
  )
  np.testing.assert_array_equal(one, other)
  logp = jnp.where(batch.mask, batch.logp_old, 0)
  logp += jnp.resize(jnp.asarray([0.21, -0.25]), logp.shape)
  found = [
    jax.tree.leaves(slopes(objective, batch, logp)[:2])
    for objective in (losses.clip_by_age(), losses.ppo_clip())
  ]
  for one, other in zip(*found, strict=True):
    np.testing.assert_array_equal(one, other)


def test_what_means_nothing_is_refused():
  for make, words in (
    (lambda: losses.mask_stale(-1), 'mask_stale got versions=-1'),
    (lambda: losses.mask_stale(1, whole=2), 'mask_stale got whole=2'),
    (lambda: losses.clip_by_age(-0.1), 'clip_by_age got low=-0.1'),
    (lambda: losses.clip_by_age(1.0), 'clip_by_age got low=1.0'),
    (lambda: losses.clip_by_age(0.8, 1.28), 'which look like the bounds'),
    (lambda: losses.clip_by_age(growth=float('nan')), 'clip_by_age got growth'),
  ):
    with pytest.raises(ValueError, match=words):
      make()


def test_a_batch_without_ages_is_refused():
  batch = cases.to_batch(cases.make_case(1))
  del batch.extras['age']
  with pytest.raises(ValueError, match="'age'"):
    advantages(losses.mask_stale(1), batch)
