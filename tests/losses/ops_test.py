"""Array helpers at their edges: zero, ties, bounds, the saturation limit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import losses
from grpo_jax.losses import _ops
from tests.losses import cases

pytestmark = pytest.mark.quick

LIMIT = 20.0
WEIGHT = losses.mean_over_sequence_sums()
RATIO = losses.chain(WEIGHT, losses.importance_weighted())
KL = losses.chain(WEIGHT, losses.score_function(), losses.add_kl(1.0))


def test_safe_divide_has_no_gradient_where_the_denominator_is_zero():
  total = lambda *pair: jnp.sum(_ops.safe_divide(*pair))
  pair = jnp.array([1.0, 2.0]), jnp.array([0.0, 4.0])
  gradient = jax.grad(total, argnums=(0, 1))(*pair)
  np.testing.assert_array_equal(gradient, [[0, 1 / 4], [0, -2 / 16]])


def test_equal_values_rank_in_their_order():
  """Long enough for an unstable sort to shuffle them."""
  value = np.random.default_rng(0).integers(0, 3, (40, 50)).astype(float)
  order = np.argsort(-value.ravel(), kind='stable')
  expected = np.argsort(order).reshape(value.shape)
  np.testing.assert_array_equal(
    _ops.rank_descending(jnp.asarray(value)), expected
  )


def test_a_zero_advantage_is_on_no_side_of_a_clip():
  outside = jnp.ones(3, bool)
  metrics = _ops.clip_metrics(outside, outside, jnp.zeros(3))
  assert not any(np.any(value) for value in metrics.values())


@pytest.mark.parametrize(
  'links',
  [
    (losses.ppo_clip(0.0, 0.0),),
    (losses.clip_log_ratio(0.0, 0.0), losses.importance_weighted()),
  ],
)
def test_a_ratio_on_the_bound_is_not_clipped(links):
  """At log-ratio 0 with bounds of 0 the gradient is the advantage."""
  method = losses.chain(
    losses.use_reward(), losses.mean_over_sequence_sums(), *links
  )
  logp = jnp.full((1, 2, 1), -0.5)
  reward = jnp.array([[1.0, -1.0]])
  batch = losses.make_batch(logp < 0, reward, logp_old=logp)
  batch, state = cases.prepared(method, batch)
  loss = lambda logp: losses.surrogate_loss(method, logp, batch, state)[0]
  np.testing.assert_array_equal(jax.grad(loss)(logp)[0, :, 0], -reward[0] / 2)


def terms_of(method, log_ratio):
  """The terms of one completion whose old and reference logp are 0."""
  log_ratio = jnp.reshape(jnp.asarray(log_ratio), (1, 1, -1))
  zero = jnp.zeros_like(log_ratio)
  batch = losses.make_batch(
    zero == 0, jnp.ones((1, 1)), logp_old=zero, logp_ref=zero
  )
  method = losses.chain(losses.use_reward(), method)
  batch, state = cases.prepared(method, batch)
  return losses.surrogate_loss(method, log_ratio, batch, state)[1]


@pytest.mark.parametrize(
  'sign, metric, method',
  [
    (1, 'saturated', RATIO),
    (-1, 'saturated_ref', KL),
  ],
)
def test_saturated_means_beyond_the_limit(sign, metric, method):
  gap = np.array([-LIMIT - 1, 0.0, LIMIT - 1, LIMIT, LIMIT + 1])
  saturated = terms_of(method, sign * gap).metrics[metric]
  np.testing.assert_array_equal(saturated[0, 0], [0, 0, 0, 0, 1])


@pytest.mark.parametrize(
  'metric, method',
  [
    ('ratio', RATIO),
    ('kl_ref', KL),
  ],
)
def test_metrics_carry_no_gradient(metric, method):
  total = lambda logp: jnp.sum(terms_of(method, logp).metrics[metric])
  np.testing.assert_array_equal(jax.grad(total)(jnp.array([0.5, -0.5])), 0)


def test_nothing_is_penalized_where_nothing_is_kept():
  nothing = losses.on_keep(lambda keep, batch: jnp.zeros_like(keep))
  method = losses.chain(
    nothing, WEIGHT, losses.importance_weighted(), losses.penalize_covariance()
  )
  terms = terms_of(method, [0.1, 0.2])
  assert not np.any(terms.metrics['penalized'])


def z_scores(*values):
  values = jnp.array(values)
  return _ops.normalized(values, jnp.ones(values.shape, bool), 'population', 0)


def test_values_that_differ_by_rounding_have_no_z_score():
  """At every size; what is small but differs has one."""
  for size in (1e-6, 1.0, 1e6):
    assert not np.any(z_scores(size * (0.1 + 0.2), size * 0.3, size * 0.3))
    assert not np.any(z_scores(size, size * (1 + 4 * np.finfo(float).eps)))
    assert np.all(z_scores(size, size * (1 + 1e-14)))
    assert np.all(z_scores(-size, size * 1e-14))


@pytest.mark.parametrize('values', [(1.2e-38, 2e-38, 3e-38), (3e38, -3e38)])
def test_what_is_tiny_or_huge_is_centered_as_anything_else(values):
  value = jnp.array(values, jnp.float32)
  mask = jnp.ones(value.shape, bool)
  scaled = np.float64(values) / np.max(np.abs(values))
  z_score = (scaled - scaled.mean()) / scaled.std()
  found = _ops.normalized(value, mask, 'population', 0)
  np.testing.assert_allclose(found, z_score, rtol=1e-6)
  assert not _ops.all_equal(value, mask)
  if values[0] > 1:
    np.testing.assert_allclose(_ops.centered(value, mask), values, rtol=1e-6)


@pytest.mark.parametrize('lost', [-9.0, 0.0, 2.0, 9.0, np.nan])
def test_a_reward_that_was_not_judged_makes_no_group_mixed(lost):
  reward = jnp.array([[2.0, lost, 2.0], [2.0, lost, 1.0]])
  valid = jnp.array([[1, 0, 1], [1, 0, 1]], bool)
  equal = _ops.all_equal(reward, valid, axis=1)
  np.testing.assert_array_equal(equal, [[True], [False]])


def test_the_k_th_largest():
  value, mask = jnp.array([5.0, 9.0, 7.0, 8.0]), jnp.array([1, 0, 1, 1], bool)
  found = [float(_ops.kth_largest(value, mask, k)) for k in (1, 2, 3, 4)]
  assert found == [8, 7, 5, 5]
  assert _ops.kth_largest(value, jnp.zeros(4, bool), 1) == np.inf
