"""Transforms together: what one leaves behind for the next, and its limits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import losses
from grpo_jax.losses import methods
from tests.losses import cases

CREDIT, WEIGHT = losses.normalize_by_group(), losses.mean_over_tokens()


def group(reward, length=None, **fields):
  """One group of completions of up to 4 tokens, at ratio 1."""
  length = np.full(len(reward), 4) if length is None else np.array(length)
  mask = np.arange(max(4, length.max())) < length[:, None]
  zeros = jnp.zeros((1, *mask.shape))
  return losses.make_batch(
    mask[None],
    jnp.array([reward], float),
    **{'logp_old': zeros, 'logp_sampler': zeros, **fields},
  )


def credited(method, batch):
  return cases.credited(method, batch)


def gradient(method, batch, logp=None, dtype=jnp.float64):
  logp = jnp.zeros(batch.mask.shape, dtype) if logp is None else logp
  value, _, _, slope = cases.terms_and_gradient(method, batch, logp)
  return value, slope


def test_an_edit_of_the_reward_is_one_more_reward_function():
  batch = group([1.0, 0.0, 1.0, 0.0], [1, 2, 3, 4])
  each = losses.normalize_each_reward()
  shaped = losses.chain(losses.shape_overlong_reward(3, 4), each)
  penalty = -np.clip((np.arange(1, 5) - 1) / 3, 0, 1)
  z = lambda x: (x - np.mean(x)) / np.std(x)
  np.testing.assert_allclose(
    credited(shaped, batch).advantage[0, :, 0],
    z(np.array([1.0, 0, 1, 0])) + z(penalty),
    rtol=1e-6,
  )


def test_pruning_does_not_count_what_is_dropped_already():
  batch = group([1.0, 0, 0, 0], truncated=jnp.array([[True, *[False] * 3]]))
  method = losses.chain(
    CREDIT, losses.drop_truncated(), losses.keep_largest_advantages(0.25)
  )
  kept = np.any(credited(method, batch).keep[0], axis=-1)
  assert kept.tolist() == [False, True, False, False]


def test_dapo_drops_an_all_wrong_group_however_long_its_answers():
  batch = group([0.0] * 4, [8, 1, 4, 1])
  made = credited(methods.dapo(soft_tokens=4, max_tokens=8), batch)
  assert not np.any(made.keep)


@pytest.mark.parametrize('k', [2, 3])
def test_pass_at_k_needs_larger_groups(k):
  with pytest.raises(ValueError, match=f'k={k} and groups of 2'):
    credited(losses.credit_pass_at_k(k), group([1.0, 0.0]))


def test_statistics_are_float32_at_least():
  """1 / 1e-6 is infinite in float16."""
  half = jnp.array(
    [[[0.0] * 4, [0, 0.5, 1, 0.2], [0.3, 0.1, 0, 0.9], [0.1, 0, 2, 1]]],
    jnp.float16,
  )
  batch = group([1.0, 0, 1, 0], entropy_old=half)
  method = methods.gtpo_entropy()
  narrow = credited(method, batch)
  wide = credited(method, batch._replace(entropy_old=half.astype(jnp.float32)))
  assert np.any(narrow.advantage) and narrow.entropy_old.dtype == jnp.float32
  np.testing.assert_array_equal(narrow.advantage, wide.advantage)
  parts = jnp.array([[[1e4, 0], [-1e4, 1], [2e4, 1], [0, 0]]], jnp.float16)
  made = credited(methods.gdpo(), batch._replace(reward_parts=parts))
  assert np.all(np.isfinite(made.advantage))


def test_ids_that_a_tool_wrote_stay():
  mask = jnp.array([[[True, False, True]] * 2])
  ids = jnp.array([[[5, 7, 3], [5, 8, 3]]])
  batch = losses.make_batch(mask, jnp.array([[1.0, 0.0]]), tokens=ids)
  np.testing.assert_array_equal(losses.check_batch(batch).tokens, ids)


def test_vespo_without_decay_stays_finite():
  """exp(2 * 200) is infinite, and times an advantage of 0 a NaN."""
  batch = group([1.0, 1.0, 1.0, 1.0])
  method = methods.vespo(positive=(2.0, 0.0), negative=(2.0, 0.0))
  logp = jnp.full((1, 4, 4), 50.0, jnp.float32)
  loss, slope = gradient(method, batch, logp)
  assert np.isfinite(loss) and np.all(np.isfinite(slope))


@pytest.mark.parametrize('gap', [-3.0, 0.5, 16.0, 18.0, 19.9])
def test_the_slope_of_the_weighted_kl_is_that_of_its_formula(gap):
  method = losses.chain(
    losses.constant_advantage(0.0),
    losses.mean_over_sequence_sums(),
    losses.score_function(),
    losses.add_kl(1.0, 'k3_weighted'),
  )
  batch = group([0.0], logp_ref=jnp.full((1, 1, 4), gap))
  value, slope = gradient(method, batch, dtype=jnp.float32)
  np.testing.assert_allclose(slope, -gap, rtol=1e-6)
  np.testing.assert_allclose(value, 4 * (np.expm1(gap) - gap), rtol=1e-5)


def test_links_that_mark_tokens_by_one_name_both_count():
  batch = group([1.0, 0.0])
  method = losses.chain(
    CREDIT, WEIGHT, losses.clip_log_ratio(), losses.ppo_clip(0.2, 0.9)
  )
  batch, state = cases.prepared(method, batch)
  logp = jnp.full((1, 2, 4), 0.5)
  _, terms = losses.surrogate_loss(method, logp, batch, state)
  assert np.all(terms.metrics['clipped_high'][0, 0])
  corrected = losses.chain(
    CREDIT,
    losses.truncate_token_importance(0.5),
    losses.truncate_sequence_importance(2.0),
  )
  marked = credited(corrected, batch._replace(advantage=None, weight=None))
  assert np.all(marked.extras[losses.CREDIT_METRIC + 'importance_truncated'])


def test_nothing_is_learnt_of_a_rollout_in_which_nothing_is_trained():
  full = group([1.0, 0.0], entropy_old=jnp.full((1, 2, 4), 0.3))
  full = full._replace(logp_ref=full.logp_old)
  empty = full._replace(keep=jnp.zeros_like(full.keep))
  first = losses.first_entropy()
  state = first.update(first.init(), empty)
  assert not state.seen
  np.testing.assert_allclose(first.value(first.update(state, full)), 0.3)
  for moving in (losses.adaptive_kl(1.0, 0.1), losses.entropy_target(0.5)):
    state = moving.update(moving.init(), full)
    still = moving.update(state, empty)
    assert still.following == state.following
    assert moving.update(state, full).following != state.following


def test_normalizing_over_completions_leaves_tokens_their_differences():
  own = np.array([[[1.0, 3.0, 0, 0], [-1.0, -1.0, -1.0, -1.0]]])
  method = losses.chain(
    losses.set_advantage(lambda batch: jnp.asarray(own)),
    losses.normalize_over_completions(),
  )
  made = credited(method, group([1.0, 0.0], [2, 4])).advantage
  # Means 2 and -1: centre 0.5, deviation 1.5.
  mask = np.array([[[1, 1, 0, 0], [1, 1, 1, 1]]], bool)
  expected = np.where(mask, (own - 0.5) / 1.5, 0)
  np.testing.assert_allclose(made, expected, rtol=1e-12)


@pytest.mark.parametrize('place', [2, 3, 4, 5])
def test_imitation_may_stand_anywhere(place):
  links = [
    losses.center_by_group(),
    WEIGHT,
    losses.scale_by_informative_groups(),
    losses.ppo_clip(),
  ]
  batch = losses.make_batch(
    jnp.ones((2, 2, 4), bool), jnp.array([[1.0, 0], [1, 1]])
  )
  plain = gradient(losses.chain(*links), batch)[1]
  links.insert(place, losses.imitate_positives(0.8))
  more = gradient(losses.chain(*links), batch)[1]
  expected = np.zeros((2, 2, 4))
  expected[0, 0] = -0.8 / 4
  np.testing.assert_allclose(more - plain, expected, atol=1e-12)


@pytest.mark.parametrize(
  'method',
  [
    methods.gtpo_conflict(),
    methods.grpo(kl_coefficient=losses.adaptive_kl(1, 1)),
  ],
)
def test_a_state_may_be_donated(method):
  """Its arrays are its own: neither shared inside nor with the next."""
  move = jax.jit(
    lambda state: jax.tree.map(lambda x: x + 0, state), donate_argnums=0
  )
  move(method.init())
  again = method.init()
  assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(again))


def test_what_is_dropped_may_hold_infinities():
  method = losses.chain(
    CREDIT,
    losses.drop_truncated(),
    WEIGHT,
    losses.set_objective(
      lambda terms, batch: terms.logp / ~batch.truncated[:, :, None]
    ),
  )
  batch = group([1.0, 0.0], truncated=jnp.array([[True, False]]))
  loss, _ = gradient(method, batch, jnp.full((1, 2, 4), -1.0))
  assert np.isfinite(loss)


@pytest.mark.parametrize('bound', [dict(low=-5.0), dict(high=-0.3)])
@pytest.mark.parametrize(
  'make',
  [losses.ppo_clip, losses.capped_score_function, losses.clip_log_ratio],
)
def test_a_negative_distance_is_refused(make, bound):
  center = 'ratio 1'
  if make is losses.clip_log_ratio:
    center = 'log-ratio 0'
  with pytest.raises(ValueError, match=f'of the bound from {center}, which'):
    make(**bound)


def test_any_callable_may_make_a_stage():
  import functools

  def scaled(batch, factor):
    return factor * batch.reward

  method = losses.chain(
    losses.set_advantage(functools.partial(scaled, factor=2.0)),
    losses.on_advantage(lambda advantage, batch: 3.0 * advantage),
  )
  made = credited(method, group([1.0, 0.5]))
  np.testing.assert_allclose(made.advantage[0, :, 0], (6.0, 3.0))


def test_a_reward_is_normalised_over_what_it_has_judged():
  """Two kinds of tasks in a group, of which each reward judges its own."""
  nan = np.nan
  parts = np.array([[[1, nan], [0, nan], [nan, 5], [nan, 3]]], np.float32)
  mask = np.ones((1, 4, 2), bool)
  batch = losses.make_batch(
    mask, np.nansum(parts, -1), reward_parts=jnp.asarray(parts)
  )
  made, _ = losses.credit(methods.gdpo(), batch, methods.gdpo().init())
  # By hand: mean and deviation are those of the two that it has judged.
  np.testing.assert_allclose(made.advantage[0, :, 0], [1, -1, 1, -1], rtol=1e-6)
