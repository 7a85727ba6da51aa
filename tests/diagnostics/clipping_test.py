"""Where the gradient stops: ends of the zeros, and what is no clip."""

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import losses
from grpo_jax.diagnostics import _clipping
from tests.diagnostics import named

INF = np.inf

ZEROS = {
  'dapo': [(1, 1.28, INF), (-1, 0, 0.8)],
  'dr_grpo': [(1, 1.2, INF), (-1, 0, 0.8)],
  'gmpo': [(1, np.exp(0.4), INF), (-1, 0, np.exp(-0.4))],
  'grpo': [(1, 1.2, INF), (-1, 0, 0.8)],
  'gspo': [(1, 1 + 4e-4, INF), (-1, 0, 1 - 3e-4)],
  'kl_cov': [],
  'reinforce': [],
  'rloo': [],
  'supervised': [],
}


@pytest.mark.parametrize('name', ZEROS)
def test_the_zeros_of_a_published_method(name):
  found = _clipping.clipping(named.method(name))
  np.testing.assert_allclose(found.zeros, ZEROS[name], rtol=1e-7)
  assert found.coasts == bool(ZEROS[name])
  assert found.faded == () and found.conditions == ()
  assert not found.depends_on_length and not found.depends_on_probability


def measure(objective, *links):
  return _clipping.clipping(
    losses.chain(
      losses.center_by_group(),
      losses.mean_over_tokens(),
      *links,
      losses.set_objective(objective),
    )
  )


def ratio_of(terms):
  return jnp.exp(terms.log_ratio)


def test_the_curves_are_those_of_the_formula():
  found = _clipping.clipping(named.method('grpo'))
  r = found.ratio
  np.testing.assert_allclose(found.positive, np.where(r > 1.2, 0, r))
  np.testing.assert_allclose(found.negative, np.where(r < 0.8, 0, -r))
  assert r.min() == pytest.approx(np.exp(-6)) and np.all(np.diff(r) > 0)
  assert found.text == 'zero above 1.2 for A > 0 and below 0.8 for A < 0'


def test_the_text_keeps_the_digits_that_a_narrow_clip_has():
  found = _clipping.clipping(named.method('gspo'))
  assert found.text == 'zero above 1.0004 for A > 0 and below 0.9997 for A < 0'


def test_a_cap_for_wrong_completions_gives_two_intervals():
  def dual(terms, batch):
    ratio, advantage = ratio_of(terms), batch.advantage
    clipped = jnp.clip(ratio, 0.8, 1.2)
    value = jnp.minimum(ratio * advantage, clipped * advantage)
    return jnp.where(advantage < 0, jnp.maximum(value, 3 * advantage), value)

  found = measure(dual)
  assert (
    found.text == 'zero above 1.2 for A > 0, below 0.8 and above 3 for A < 0'
  )
  assert len(found.zeros) == 3


def test_a_gate_in_between_and_for_either_sign():
  def gate(terms, batch):
    ratio = ratio_of(terms)
    shut = (ratio > 2) & (ratio < 3)
    return jnp.where(shut, 0, ratio * batch.advantage)

  assert measure(gate).text == 'zero from 2 to 3 for either sign of A'


def test_a_soft_gate_is_never_zero_and_what_rounds_to_zero_is_no_clip():
  def sigmoid(terms, batch):
    return jax.nn.sigmoid(ratio_of(terms) - 1) * batch.advantage

  found = measure(sigmoid)
  assert found.positive[-1] == 0  # 1 - sigmoid rounds to 0
  assert not found.coasts and found.zeros == ()
  assert [sign for sign, _, _ in found.faded] == [1, -1]
  assert found.text.startswith('never cut off; fades')


def test_what_underflows_is_no_clip():
  def bell(terms, batch):
    gate = jnp.exp(-jnp.square(terms.log_ratio) / 2e-3)
    return lax.stop_gradient(gate) * batch.advantage * terms.logp

  found = measure(bell)
  assert (found.positive == 0).any() and (found.negative == 0).any()
  assert found.zeros == () and len(found.faded) == 4


def test_a_ramp_that_ends_at_zero_is_a_clip():
  def ramp(terms, batch):
    gate = jnp.clip(2 - ratio_of(terms), 0, 1)
    return lax.stop_gradient(gate) * batch.advantage * terms.logp

  found = measure(ramp)
  np.testing.assert_allclose(found.zeros, [(1, 2, INF), (-1, 2, INF)], 1e-7)


def test_a_ratio_of_the_whole_sequence_names_its_length():
  def product(terms, batch):
    log_ratio = jnp.sum(
      terms.log_ratio, axis=-1, keepdims=True, where=batch.mask
    )
    ratio = jnp.broadcast_to(jnp.exp(log_ratio), batch.mask.shape)
    clipped = jnp.clip(ratio, 0.8, 1.2) * batch.advantage
    return jnp.minimum(ratio * batch.advantage, clipped)

  found = measure(product)
  assert found.depends_on_length and not found.depends_on_probability
  ends = np.array([1.2, 0.8]) ** (1 / found.tokens)
  np.testing.assert_allclose(
    [found.zeros[0][1], found.zeros[1][2]], ends, rtol=1e-7
  )
  assert found.conditions == ('for a completion of 4 tokens',)
  assert found.text.endswith('(for a completion of 4 tokens)')


def test_a_gate_on_the_probability_names_it():
  def change(terms, batch):
    rise = jnp.exp(terms.logp) - jnp.exp(batch.logp_old)
    shut = rise * jnp.sign(batch.advantage) > 0.15
    return jnp.where(shut, 0, ratio_of(terms) * batch.advantage)

  found = measure(change)
  assert found.depends_on_probability and not found.depends_on_length
  assert found.old_probability == 0.3
  np.testing.assert_allclose(found.zeros, [(1, 1.5, INF), (-1, 0, 0.5)], 1e-7)
  assert found.ratio.max() < 1 / 0.3


def test_one_sign_without_a_gradient():
  def positive(terms, batch):
    return ratio_of(terms) * jnp.maximum(batch.advantage, 0)

  found = measure(positive)
  assert found.text == 'zero at every ratio for A < 0'


def test_a_batch_coupled_gate_on_single_tokens_does_not_break_it():
  def lucky(terms, batch):
    noise = jnp.where(batch.keep, batch.extras['noise'], 2)
    dropped = noise <= jnp.min(noise)
    value = jnp.where(dropped, lax.stop_gradient(terms.log_ratio), 0)
    value = jnp.where(dropped, value, ratio_of(terms))
    return value * batch.advantage

  assert measure(lucky).text == 'never zero'


def test_one_sign_without_a_gradient_is_nothing_to_coast_beyond():
  def positive(terms, batch):
    return ratio_of(terms) * jnp.maximum(batch.advantage, 0)

  found = measure(positive)
  assert found.zeros == ((-1, 0.0, INF),) and not found.coasts


def test_an_objective_without_the_advantage_has_no_clip_by_its_sign():
  def reward(terms, batch):
    return ratio_of(terms) * batch.reward[:, :, None]

  found = measure(reward)
  assert found.text == 'not measured: the gradient does not depend on A'
  assert found.zeros == () and not found.coasts


def test_a_gate_on_the_ratios_of_the_batch_is_found_by_moving_all():
  def gate(terms, batch):
    total = jnp.sum(lax.stop_gradient(terms.log_ratio), where=batch.mask)
    shut = total / jnp.sum(batch.mask) > np.log(1.2)
    return jnp.where(shut, 0, ratio_of(terms) * batch.advantage)

  found = measure(gate)
  assert found.depends_on_others and found.coasts
  np.testing.assert_allclose(found.zeros, [(1, 1.2, INF), (-1, 1.2, INF)], 1e-7)
  assert found.text.endswith('(for all completions at that ratio)')


def test_a_coupled_ratio_that_no_move_cuts_off_is_said_to_be_coupled():
  def mean(terms, batch):
    total = jnp.sum(terms.log_ratio, where=batch.mask) / jnp.sum(batch.mask)
    ratio = jnp.exp(total)
    clipped = jnp.clip(ratio, 0.8, 1.2) * batch.advantage
    return jnp.minimum(ratio * batch.advantage, clipped)

  found = measure(mean)
  assert found.text.startswith('never zero (with the other completions at')
  assert not found.depends_on_others


def test_a_bound_that_depends_on_the_size_of_the_advantage_says_for_which():
  def bound(terms, batch):
    size = jnp.maximum(jnp.abs(batch.advantage), 1e-9)
    shut = (ratio_of(terms) > 1 + 0.2 / size) & (batch.advantage > 0)
    return jnp.where(shut, 0, ratio_of(terms) * batch.advantage)

  found = measure(bound)
  assert found.text == 'zero above 1.2 for A > 0 (for |A| = 1)'
  assert found.depends_on_size
  assert not _clipping.clipping(named.method('grpo')).depends_on_size


@pytest.mark.parametrize('sizes', [(0.3, 0.8), (1.5, 3)])
def test_a_gate_on_small_or_on_large_advantages_alone_is_noticed(sizes):
  def gate(terms, batch):
    size = jnp.abs(batch.advantage)
    shut = (ratio_of(terms) > 2) & (size > sizes[0]) & (size < sizes[1])
    return jnp.where(shut, 0, ratio_of(terms) * batch.advantage)

  assert measure(gate).text == 'never zero (for |A| = 1)'


def test_a_change_of_sign_is_no_interval():
  def wave(terms, batch):  # its slope is 0 at e^6, the last of the grid
    return batch.advantage * terms.log_ratio * (12 - terms.log_ratio)

  assert measure(wave).text == 'never zero'


def test_float32_does_not_blur_what_is_exactly_zero():
  rounded = losses.on_log_ratio(
    lambda terms, batch: terms.log_ratio.astype(jnp.float32)
  )
  found = _clipping.clipping(
    losses.chain(
      losses.center_by_group(),
      losses.mean_over_tokens(),
      rounded,
      losses.ppo_clip(),
    )
  )
  np.testing.assert_allclose(found.zeros, [(1, 1.2, INF), (-1, 0, 0.8)], 1e-6)
