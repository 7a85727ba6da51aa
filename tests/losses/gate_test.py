"""Gates and objectives token by token: bounds, signs, slopes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import losses
from tests.losses import cases
from tests.losses import one_token


def gated(gate, now, old, advantage, **kwargs):
  """Which tokens lose their gradient, checked against the metric."""
  links = losses.score_function(), gate
  terms, gradient = one_token.run(links, now, old, advantage, **kwargs)
  (metric,) = (terms.metrics[key] for key in ('gated', 'off_policy')
               if key in terms.metrics)  # fmt: skip
  np.testing.assert_array_equal(metric[0, :, 0], gradient == 0)
  np.testing.assert_array_equal(terms.objective == 0, metric)
  return (gradient == 0).tolist()


def test_the_probability_gate_looks_at_the_side_that_is_pushed():
  """Probabilities move by 0.25 in both directions, under both signs."""
  now = np.log([0.5, 0.25, 0.5, 0.25])
  old = np.log([0.25, 0.5, 0.25, 0.5])
  advantage = [1.0, 1.0, -1.0, -1.0]
  gate = losses.gate_probability_change
  assert gated(gate(0.2, 0.2), now, old, advantage) == [1, 0, 0, 1]
  assert gated(gate(0.2, 0.3), now, old, advantage) == [0, 0, 0, 1]
  assert gated(gate(0.3, 0.2), now, old, advantage) == [1, 0, 0, 0]


def test_a_probability_change_on_the_bound_passes():
  gate = losses.gate_probability_change(0.0, 0.0)
  same = np.log([0.5, 0.5])
  assert gated(gate, same, same, [1.0, -1.0]) == [False, False]


def test_the_binary_kl_gate_has_its_formula():
  rng = np.random.default_rng(0)
  p, q = rng.uniform(0.02, 0.98, (2, 200))
  advantage = rng.choice([-1.0, 1.0], 200)
  kl = q * np.log(q / p) + (1 - q) * np.log((1 - q) / (1 - p))
  bound = np.where(advantage > 0, 0.2, 0.1)  # of a rise, of a fall
  expected = (kl > bound) & (advantage * (p - q) > 0)
  for sign in (-1, 1):
    assert 20 < expected[advantage == sign].sum() < 60
  gate = losses.gate_binary_kl(0.1, 0.2)
  assert gated(gate, np.log(p), np.log(q), advantage) == expected.tolist()


@pytest.mark.parametrize('now, old', [(0.0, -1e-9), (-1e-9, 0.0), (0.0, -60.0)])
def test_the_binary_kl_gate_is_finite_at_certainty(now, old):
  """In float32 a chance of nearly 1 rounds to 1."""
  links = losses.score_function(), losses.gate_binary_kl()
  terms, gradient = one_token.run(
    links, [now] * 2, [old] * 2, [1.0, -1.0], jnp.float32
  )
  assert np.all(np.isfinite(gradient)) and np.all(np.isfinite(terms.objective))
  far = abs(now - old) > 1
  np.testing.assert_array_equal(terms.metrics['gated'][0, :, 0], [far, False])


@pytest.mark.parametrize(
  'gate',
  [
    losses.gate_binary_kl(),
    losses.gate_probability_change(),
    losses.mask_off_policy_negatives(),
  ],
)
def test_a_token_without_advantage_is_not_counted_as_gated(gate):
  links = losses.score_function(), gate
  terms, _ = one_token.run(
    links, np.log([0.1, 0.9]), np.log([0.9, 0.1]), [0.0, 0.0]
  )
  assert not np.any(terms.metrics.get('gated', False))
  assert not np.any(terms.metrics.get('off_policy', False))


def test_off_policy_negatives_are_dropped_as_a_whole():
  """By the mean over the completion; above it, and only where A < 0."""
  old = jnp.array([[[-1.0, -1.0, -1.0], [-1.0, -1.0, 9.0]]] * 2)
  gone = jnp.array([[[0.6, 0.0, 0.0], [0.5, 0.5, 9.0]]])
  mask = jnp.array([[[True] * 3, [True, True, False]]] * 2)
  method = losses.chain(
    losses.use_reward(),
    losses.mean_over_sequence_sums(),
    losses.score_function(),
    losses.mask_off_policy_negatives(0.3),
  )
  batch = losses.make_batch(
    mask, jnp.array([[-1.0, -1.0], [1.0, 1.0]]), logp_old=old
  )
  batch, state = cases.prepared(method, batch)
  _, terms = losses.surrogate_loss(method, old - gone, batch, state)
  np.testing.assert_array_equal(
    terms.metrics['off_policy'] & mask, [[[0] * 3, [1, 1, 0]], [[0] * 3] * 2]
  )


@pytest.mark.parametrize('policy', ['old', 'sampler'])
def test_what_the_off_policy_mask_measures_from(policy):
  gate = losses.mask_off_policy_negatives(0.5, policy)
  assert gate.requires == ({'logp_sampler'} if policy == 'sampler' else set())
  now, moved, same = [-2.0, -2.0], [-1.0, -1.0], [-2.0, -2.0]
  sampler = moved if policy == 'sampler' else same
  dropped = gated(
    gate, now, same if policy == 'sampler' else moved, [-1.0, 1.0],
    logp_sampler=jnp.array(sampler)[None, :, None],
  )  # fmt: skip
  assert dropped == [True, False]
  away = [-1.5, -1.5]  # a mean on the threshold passes
  dropped = gated(
    gate, now, away, [-1.0, -1.0],
    logp_sampler=jnp.array(away)[None, :, None],
  )  # fmt: skip
  assert dropped == [False, False]


def test_an_unknown_policy_is_refused():
  with pytest.raises(ValueError, match="policy='new'; give 'old' or 'sampler'"):
    losses.mask_off_policy_negatives(policy='new')


def detached(
  weight, noise=(0.1, 0.2, 0.3, 0.4, 0.0, 0.5), keep=None, bounds=()
):
  """Tokens with covariances -4, 6, 2, 2, 0, 2: of these 2 lie in (1, 5)."""
  advantage = jnp.array([[-2.0, 2.0, 2.0, 2.0, 0.0, -4.0]])
  logp = jnp.array([2.0, 3.0, 1.0, 1.0, -6.5, -0.5])[None, :, None]
  method = losses.chain(
    losses.use_reward(),
    weight,
    losses.importance_weighted(),
    losses.detach_covariance(0.34, *bounds),
  )
  mask = jnp.ones((1, 6, 1), bool)
  batch = losses.make_batch(
    mask,
    advantage,
    keep=mask if keep is None else jnp.asarray(keep)[None, :, None],
    logp_old=logp,
    extras={'noise': jnp.asarray(noise)[None, :, None]},
  )
  batch, state = cases.prepared(method, batch)

  def loss(logp):
    return losses.surrogate_loss(method, logp, batch, state)

  (_, terms), gradient = jax.value_and_grad(loss, has_aux=True)(logp)
  chosen = np.asarray(terms.metrics['detached'])[0, :, 0]
  np.testing.assert_array_equal(
    np.asarray(gradient)[0, :, 0] == 0,
    chosen | np.array([0, 0, 0, 0, 1, 0], bool),
  )
  np.testing.assert_allclose(terms.objective[0, :, 0], advantage[0])  # stays
  return np.flatnonzero(chosen).tolist()


def test_of_the_tokens_in_the_bounds_those_of_least_noise_are_detached():
  weight = losses.mean_over_tokens()
  assert detached(weight) == [2, 3]  # floor(0.34 * 6) = 2 of 2, 3, 5
  assert detached(weight, noise=(0, 0, 0.9, 0.4, 0, 0.5)) == [3, 5]


def test_a_covariance_on_a_bound_is_not_inside():
  weight = losses.mean_over_tokens()
  assert detached(weight, bounds=(1.9, 6.1)) == [1, 2]
  assert detached(weight, bounds=(2.0, 6.0)) == []


def test_the_bounds_of_the_covariance_do_not_see_the_weight():
  """A peer multiplies A by 1/N first: nothing is ever inside (row 4)."""
  expected = detached(losses.mean_over_tokens())
  assert detached(losses.mean_over_sequence_sums()) == expected
  assert detached(losses.mean_over_sequence_sums(1000)) == expected


@pytest.mark.parametrize(
  'objective',
  [
    losses.ppo_clip(),
    losses.ppo_clip(cap=3.0),
    losses.importance_weighted(),
    losses.capped_score_function(),
    losses.sigmoid_gate(),
    losses.gamma_weighted_score(),
  ],
)
def test_objectives_count_saturated_ratios_and_stay_finite(objective):
  """Log-ratios of +-100 in float32."""
  now = np.array([-100.0, -1.0, -100.0, -1.0, 0.0])
  old = np.array([-1.0, -101.0, -1.0, -101.0, -21.0])
  advantage = [1.0, 1.0, -1.0, -1.0, 0.0]
  terms, gradient = one_token.run(
    (objective,), now, old, advantage, jnp.float32
  )
  assert gradient.dtype == np.float32 and np.all(np.isfinite(gradient))
  assert np.all(np.isfinite(terms.objective))
  np.testing.assert_array_equal(
    terms.metrics['saturated'][0, :, 0], [0, 1, 0, 1, 1]
  )


def test_the_capped_score_function_counts_both_caps():
  ratio = np.array([0.4, 1.0, 1.6])
  objective = losses.capped_score_function(0.5, 0.5)
  terms, gradient = one_token.run(
    (objective,), np.log(ratio), np.zeros(3), [1.0] * 3
  )
  np.testing.assert_allclose(gradient, [-0.5, -1, -1.5], rtol=1e-12)
  for name, expected in {
    'capped_high': [0, 0, 1],
    'capped_low': [1, 0, 0],
    'saturated': [0, 0, 0],
  }.items():
    np.testing.assert_array_equal(terms.metrics[name][0, :, 0], expected)
  exact = losses.capped_score_function(0.0, 0.0)
  terms, _ = one_token.run((exact,), np.zeros(1), np.zeros(1), [1.0])
  assert not terms.metrics['capped_high'] and not terms.metrics['capped_low']


def test_the_cap_of_the_clip_acts_on_wrong_tokens_only_and_is_counted():
  """It keeps no gradient, so it is not among those still pulled back."""
  ratio, advantage = np.array([5.0, 5.0, 2.0, 1.0]), [1.0, -1.0, -1.0, -1.0]
  terms, gradient = one_token.run(
    (losses.ppo_clip(0.2, 0.2, 3.0),), np.log(ratio), np.zeros(4), advantage
  )
  np.testing.assert_allclose(gradient, [0, 0, 2, 1], atol=1e-12)
  np.testing.assert_allclose(terms.objective[0, :, 0], [1.2, -3, -2, -1])
  for name, expected in {
    'clipped_cap': [0, 1, 0, 0],
    'clipped_high': [1, 0, 0, 0],
    'outside_high': [0, 0, 1, 0],
  }.items():
    np.testing.assert_array_equal(terms.metrics[name][0, :, 0], expected)


def test_a_ratio_on_the_cap_keeps_its_gradient():
  """And a token without advantage is not counted as capped."""
  links = (losses.ppo_clip(0.0, lambda rollout: 0.0, 1.0),)
  terms, gradient = one_token.run(links, [0.0, 1.0], [0.0, 0.0], [-1.0, 0.0])
  np.testing.assert_array_equal(gradient, [1, 0])
  assert not np.any(terms.metrics['clipped_cap'])


@pytest.mark.parametrize('cap', [1.0, 1.2])
def test_a_cap_inside_the_clip_range_is_refused(cap):
  with pytest.raises(ValueError, match='give a cap above 1'):
    losses.ppo_clip(0.2, 0.2, cap)


def test_a_scheduled_cap_is_not_compared():
  losses.ppo_clip(0.2, 0.2, lambda rollout: 3.0)
  losses.ppo_clip(0.2, lambda rollout: 9.0, 3.0)


def test_the_soft_gate_has_slope_one_at_ratio_one():
  for tau in (0.5, 4.0):
    links = (losses.sigmoid_gate(tau, tau),)
    _, gradient = one_token.run(links, np.zeros(2), np.zeros(2), [1.0, -2.0])
    np.testing.assert_allclose(gradient, [-1, 2], rtol=1e-12)
