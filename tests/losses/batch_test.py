"""What no completion owns is zero, in the batch and in the terms."""

import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import losses
from tests.losses import cases

VALID = jnp.array([[True, False]])


@pytest.mark.parametrize('parts', [(), (3,), (3, 2)])
def test_an_invalid_completion_holds_zeros(parts):
  batch = losses.make_batch(
    jnp.ones((1, 2, 2), bool),
    jnp.full((1, 2), 7.0),
    valid=VALID,
    truncated=jnp.ones((1, 2), bool),
    reward_parts=jnp.full((1, 2, *parts), 7.0),
    logp_old=jnp.full((1, 2, 2), 7.0),
  )
  batch = losses.check_batch(batch)
  for name in (
    'mask',
    'keep',
    'truncated',
    'reward',
    'reward_parts',
    'logp_old',
  ):
    value = np.asarray(getattr(batch, name))
    assert np.all(value[0, 0]) and not np.any(value[0, 1]), name


def test_a_teacher_is_checked_as_a_reference_is():
  mask = jnp.array([[[True, True, False], [True] * 3]])
  given = jnp.array([[[-jnp.inf, -2.0, jnp.nan], [-3.0] * 3]])
  batch = losses.make_batch(
    mask, jnp.zeros((1, 2)), valid=VALID, extras={'logp_teacher': given}
  )
  found = losses.check_batch(batch)
  np.testing.assert_array_equal(
    found.extras['logp_teacher'], [[[-1000, -2, 0], [0] * 3]]
  )
  assert losses.check_batch(found).extras.keys() == {'logp_teacher'}
  wrong = batch._replace(extras={'logp_teacher': given[..., :2]})
  with pytest.raises(ValueError, match='logp_teacher has shape'):
    losses.check_batch(wrong)


def test_an_edited_reward_stays_zero_where_not_valid():
  method = losses.chain(
    losses.on_reward(lambda reward, batch: reward + 1), losses.use_reward()
  )
  batch = losses.make_batch(
    jnp.ones((1, 2, 2), bool), jnp.ones((1, 2)), valid=VALID
  )
  batch, _ = losses.credit(method, batch, method.init())
  np.testing.assert_array_equal(batch.reward, [[2, 0]])


def test_the_terms_are_zero_outside_the_mask():
  method = losses.methods.rloo()
  mask = jnp.array([[[True, True], [True, False]]])
  batch = losses.make_batch(mask, jnp.array([[0.0, 1.0]]))
  batch, state = cases.prepared(method, batch)
  value = jnp.full(mask.shape, 7.0)
  _, terms = losses.surrogate_loss(method, value, batch, state, value)
  np.testing.assert_array_equal(terms.logp, 7 * mask)
  np.testing.assert_array_equal(terms.entropy, 7 * mask)


@pytest.mark.parametrize('missing', ['advantage', 'weight'])
def test_an_unprepared_batch_is_refused(missing):
  case, method = cases.make_case(), losses.methods.rloo()
  batch, state = cases.prepared(method, cases.to_batch(case))
  batch = batch._replace(**{missing: None})
  with pytest.raises(ValueError, match='without advantage or weight'):
    losses.surrogate_loss(method, case.logp, batch, state)


def test_with_required_fills_what_a_method_reads_and_no_more():
  batch = losses.make_batch(
    jnp.ones((1, 2, 3), bool),
    jnp.ones((1, 2)),
    logp_old=jnp.full((1, 2, 3), 7.0),
    extras={'mine': jnp.full((1, 2, 3), 5.0)},
  )
  method = losses.chain(
    losses.on_advantage(lambda a, b: a, requires=('mine', 'theirs')),
    losses.truncate_sequence_importance(2.0),
    losses.add_entropy_bonus(0.1),
  )
  assert method.requires == {
    'mine', 'theirs', 'logp_old', 'logp_sampler', 'entropy'
  }  # fmt: skip
  filled = losses.with_required(method, batch)
  assert set(filled.extras) == {'mine', 'theirs'}
  for given in (filled.logp_sampler, filled.extras['theirs']):
    np.testing.assert_array_equal(given, np.zeros((1, 2, 3)))
  np.testing.assert_array_equal(filled.logp_old, 7)
  np.testing.assert_array_equal(filled.extras['mine'], 5)
  assert filled.logp_ref is None
  unchanged = losses.with_required(losses.chain(), batch)
  assert unchanged.logp_sampler is None and set(unchanged.extras) == {'mine'}
