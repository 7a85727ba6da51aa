"""Metrics add up under any split, and mean what they say."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.learner import metrics

pytestmark = pytest.mark.quick

KINDS = {
  'mean': metrics.masked_mean,
  'max': metrics.masked_max,
  'min': metrics.masked_min,
  'value': metrics.masked_moments,
  'share': metrics.effective_share,
  'log_quantile': metrics.masked_histogram,
}
NAMES = {
  'mean', 'max', 'min', 'value_mean', 'value_std', 'share',
  'quantile_p01', 'quantile_p50', 'quantile_p99',
}  # fmt: skip


@jax.jit
def measure(value, mask):
  return {name: kind(value, mask) for name, kind in KINDS.items()}


def sample(shift=0.0):
  """Values of many sizes, and a mask whose last part is empty."""
  rng = np.random.default_rng(0)
  value = shift + rng.standard_normal(60) * np.exp(rng.normal(0, 2, 60))
  mask = (rng.random(60) < 0.7) & (np.arange(60) < 50)
  mask[0] = True
  return value.astype(np.float32).reshape(4, 15), mask.reshape(4, 15)


@pytest.mark.parametrize('shift', [0.0, -300.0, 300.0])
def test_merged_parts_equal_the_whole(shift):
  value, mask = sample(shift)
  whole = measure(value, mask)
  # Parts of one value and of nothing among them.
  part = np.repeat([0, 1, 2, 3], [1, 30, 19, 10]).reshape(4, 15)
  for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
    parts = metrics.empty(whole)
    for k in order:
      parts = metrics.merge(parts, measure(value, mask & (part == k)))
    scalars = metrics.to_scalars(parts)
    assert scalars.keys() == NAMES
    for name, expected in metrics.to_scalars(whole).items():
      np.testing.assert_allclose(scalars[name], expected, rtol=1e-6)
    np.testing.assert_array_equal(
      parts['log_quantile'].counts, whole['log_quantile'].counts
    )


@pytest.mark.parametrize('shift', [0.0, -300.0])
def test_closed_forms(shift):
  value, mask = sample(shift)
  scalars = metrics.to_scalars(measure(value, mask))
  kept = value[mask].astype(np.float64)
  weight = np.exp(kept)
  expected = {
    'mean': kept.mean(),
    'max': kept.max(),
    'min': kept.min(),
    'value_mean': kept.mean(),
    'value_std': kept.std(),
    'share': weight.sum() ** 2 / np.square(weight).sum() / len(kept),
  }
  for name, want in expected.items():
    np.testing.assert_allclose(scalars[name], want, rtol=1e-5)


def test_a_deviation_survives_a_mean_ten_thousand_times_it():
  value = (1000 + 0.1 * np.random.default_rng(0).standard_normal(500)).astype(
    np.float32
  )
  mask = np.ones(100, bool)
  parts = [metrics.masked_moments(part, mask) for part in np.split(value, 5)]
  joined = {'value': parts[0]}
  for part in parts[1:]:
    joined = metrics.merge(joined, {'value': part})
  np.testing.assert_allclose(
    metrics.to_scalars(joined)['value_std'], value.std(dtype=float), rtol=1e-3
  )


@pytest.mark.parametrize(
  'log_weight, share',
  [([0, 0, 0, 0], 1), ([-900] * 4, 1), ([900, 0, 0, 0], 0.25), ([3], 1)],
)
def test_effective_shares_of_extreme_weights(log_weight, share):
  weight = metrics.effective_share(
    np.array(log_weight, np.float32), np.ones(len(log_weight), bool)
  )
  assert metrics.to_scalars({'share': weight}) == {'share': share}


def test_effective_shares_merge_relative_to_the_larger_weight():
  """Weights 1 and 2: (1 + 2)^2 / (2 (1 + 4)), in either order."""
  one, two = (
    {'share': metrics.effective_share(np.log([w]), np.ones(1, bool))}
    for w in (1.0, 2.0)
  )
  for merged in (metrics.merge(one, two), metrics.merge(two, one)):
    np.testing.assert_allclose(metrics.to_scalars(merged)['share'], 0.9)


def quantiles(value, mask=None):
  value = np.asarray(value, np.float32)
  mask = np.ones(value.shape, bool) if mask is None else mask
  histogram = metrics.masked_histogram(value, mask)
  return metrics.to_scalars({'log_ratio': histogram})


@pytest.mark.parametrize('scale', [1e-5, 1e-3, 0.3, 8.0])
@pytest.mark.parametrize('zeros', [0.0, 0.3])
def test_quantiles_are_as_fine_as_their_bins(scale, zeros):
  rng = np.random.default_rng(0)
  value = rng.laplace(0, scale, (50, 100)) * (rng.random((50, 100)) >= zeros)
  value = np.clip(value, -20, 20)
  mask = rng.random(value.shape) < 0.8
  for label, share in (('p01', 0.01), ('p50', 0.5), ('p99', 0.99)):
    exact = np.quantile(value[mask], share)
    got = np.log(quantiles(value, mask)[f'ratio_{label}'])
    # Between two values that straddle a rank, any is a quantile.
    assert abs(got - exact) <= 1e-4 + 0.13 * abs(exact), (label, got, exact)


@pytest.mark.parametrize('end', [0.25, 0.3, 0.35, 0.4])
def test_quantiles_are_linear_inside_their_bins(end):
  """Medians of evenly spread values, far nearer than the edges of bins."""
  got = quantiles(np.linspace(0.1, end, 2001))['ratio_p50']
  np.testing.assert_allclose(np.log(got), (0.1 + end) / 2, rtol=2e-3)


def test_quantiles_of_zeros_are_exactly_one_and_far_values_saturate():
  assert set(quantiles(np.zeros(9)).values()) == {1.0}
  mostly = quantiles(np.r_[-30, np.zeros(97), 30, np.inf])
  assert mostly['ratio_p50'] == 1
  np.testing.assert_allclose(np.log(mostly['ratio_p01']), -20, rtol=1e-6)
  np.testing.assert_allclose(np.log(mostly['ratio_p99']), 20, rtol=1e-6)
  smallest = quantiles([1e-7])  # apart from 0, whatever its size
  assert 1 < smallest['ratio_p50'] <= np.exp(1e-4)


def test_metrics_of_nothing_are_left_out():
  value, nothing = np.full(3, np.nan, np.float32), np.zeros(3, bool)
  measured = measure(value, nothing)
  assert metrics.to_scalars(measured) == {}
  assert metrics.to_scalars(metrics.merge(measured, measured)) == {}
  assert metrics.to_scalars(metrics.empty(measure(*sample()))) == {}


def test_what_is_not_a_number_is_reported():
  scalars = metrics.to_scalars(measure(jnp.full(3, jnp.nan), jnp.ones(3, bool)))
  assert np.isnan([scalars[name] for name in ('mean', 'max', 'share')]).all()


@pytest.mark.parametrize('merge', [metrics.merge, metrics.merge_outside])
def test_merge_keeps_names_of_either_side(merge):
  one = metrics.Mean(jnp.array(1.0), jnp.array(2.0))
  merged = merge({'a': one, 'b': one}, {'b': one, 'c': one})
  assert merged.keys() == {'a', 'b', 'c'} and merged['b'].count == 4
  assert merged['a'].count == merged['c'].count == 2
  assert merge({'a': one}, {'b': one}) == {'a': one, 'b': one}
  assert merge({}, {'b': one}) == {'b': one}


def test_a_metric_may_count_under_a_condition_only():
  measured = measure(*sample())
  for condition in (True, False):
    kept = {
      name: metrics.only_if(jnp.array(condition), metric)
      for name, metric in measured.items()
    }
    expected = metrics.to_scalars(measured) if condition else {}
    assert metrics.to_scalars(kept) == expected


def test_metrics_of_one_shape_are_measured_in_one_loop():
  value, mask = sample()
  kinds = {
    'mean': metrics.Mean, 'max': metrics.Max, 'min': metrics.Min,
  }  # fmt: skip

  def all_of(number):
    wanted = {
      f'{name}_{k}': (kind, value * k, mask)
      for k in range(number)
      for name, kind in kinds.items()
    }
    return metrics.together(wanted)

  found = all_of(3)
  for k in range(3):
    for name in kinds:
      alone = KINDS[name](value * k, mask)
      np.testing.assert_allclose(found[f'{name}_{k}'], alone, rtol=1e-6)
  # The last axis, then the others: however many metrics there are.
  for number in (1, 7):
    assert (
      str(jax.make_jaxpr(lambda n=number: all_of(n))()).count('= reduce') == 2
    )


def test_metrics_of_several_shapes_and_numbers_come_together():
  value, mask = sample()
  found = metrics.together(
    {
      'all': (metrics.Mean, value, mask),
      'rows': (metrics.Max, value[:, 0], mask[:, 0]),
      'one': (metrics.Mean, 3.0, True),
      'none': (metrics.Min, value, mask & False),
    }
  )
  np.testing.assert_allclose(
    found['all'], (value[mask].sum(), mask.sum()), rtol=1e-6
  )
  assert found['rows'].value == value[:, 0].max(where=mask[:, 0], initial=-9e9)
  assert found['one'] == (3.0, 1.0) and found['none'].value == np.inf
