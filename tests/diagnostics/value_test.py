"""What the loss's value is a statistic of, at ratio 1."""

import jax.numpy as jnp
import pytest

from grpo_jax import losses
from grpo_jax.diagnostics import _value
from tests.diagnostics import named

SILENT = (
  'always 0 at ratio 1: says nothing of progress, and still teaches, since its '
  'gradient is not 0'
)
GAP = '; with a gap to the reference, the value of the regulariser'

TEXTS = {
  'dapo': 'a statistic of the lengths (corr^2 = 1.00), not of the mean reward',
  'dr_grpo': 'a statistic of the lengths (corr^2 = 1.00), not of',
  'gmpo': SILENT,
  'grpo': SILENT + GAP,
  'gspo': SILENT,
  'kl_cov': 'a statistic of the lengths (corr^2 = 1.00), not of',
  'reinforce': 'a statistic of the log-probabilities (corr^2 = 1.00); rises',
  'rloo': 'a statistic of the log-probabilities (corr^2 = 1.00), not of',
  'supervised': 'a statistic of the log-probabilities (corr^2 = 1.00), not of',
}


@pytest.mark.parametrize('name', TEXTS)
def test_the_value_of_a_published_method(name):
  value = _value.loss_value(named.method(name))
  text = TEXTS[name]
  if text.startswith(SILENT):
    assert value.text == text
    assert value.zero and value.constant and value.reward is None
  else:
    assert value.text.startswith(text)
    assert not value.constant
  assert value.teaching == 1
  assert value.of_reference == (name == 'grpo')


def read(advantage, weight, objective=None):
  objective = objective or losses.importance_weighted()
  return _value.loss_value(losses.chain(advantage, weight, objective))


def test_a_loss_that_is_the_mean_reward():
  value = read(losses.use_reward(), losses.mean_over_sequences())
  assert value.reward == pytest.approx(1) and value.rises is False
  assert value.text == (
    'a statistic of the mean reward (corr^2 = 1.00); falls with it'
  )


def test_a_constant_that_is_not_0():
  value = read(losses.constant_advantage(2.0), losses.mean_over_tokens())
  assert value.constant and not value.zero
  assert value.text.startswith('always the same at ratio 1')


def test_a_loss_without_a_gradient():
  value = read(losses.constant_advantage(0.0), losses.mean_over_tokens())
  assert value.zero and value.teaching == 0
  assert value.text.endswith('teaches nothing: its gradient is 0')


def test_gates_of_unequal_height_show_the_size_of_the_advantages():
  def uneven(terms, batch):
    height = jnp.where(batch.advantage > 0, 2.0, 1.0)
    return height * batch.advantage * jnp.exp(terms.log_ratio)

  value = read(
    losses.normalize_by_group(),
    losses.mean_over_sequences(),
    losses.set_objective(uneven),
  )
  assert value.size == pytest.approx(1)
  assert value.text.startswith('a statistic of the size of the advantages')


def test_weights_that_follow_the_advantage_show_in_the_value():
  def large(weight, batch):
    return jnp.where(jnp.abs(batch.advantage) >= 1, weight, 0)

  value = _value.loss_value(
    losses.chain(
      losses.normalize_by_group(),
      losses.mean_over_sequences(),
      losses.on_weight(large),
      losses.importance_weighted(),
    )
  )
  assert value.weights == pytest.approx(1)
  assert value.text.startswith('a statistic of sum w A (corr^2 = 1.00)')
  assert value.rises and value.reward > 0.5  # up as the reward goes up


def test_an_entropy_bonus_shows_the_entropy():
  bonus = losses.add_penalty(
    lambda terms, batch: -0.3 * terms.entropy, requires=('entropy',)
  )
  value = _value.loss_value(losses.chain(named.method('dapo'), bonus))
  assert value.entropy > 0.3 and value.length > 0.1
  assert value.text.startswith('mixed: the ')
  assert _value.verdict(value)[0] == f'the entropy ({value.entropy:.2f})'


@pytest.mark.parametrize('square', [0.8988, 0.9, 0.9012])
def test_a_correlation_printed_as_0_90_has_one_verdict(square):
  """On which side of 0.9 it lies is no difference that a text shows."""
  value = _value.loss_value(named.method('positive_nll'))
  near = value._replace(length=square, weights=square - 1e-3)
  cell, text = _value.verdict(near)
  assert cell == 'the lengths (0.90)'
  assert text.startswith('a statistic of the lengths (corr^2 = 0.90), not of')
  far = value._replace(length=0.89, weights=0.89)
  assert _value.verdict(far)[1].startswith('mixed: the lengths most')


def test_a_value_of_float32_rounding_is_zero():
  cast = losses.on_reward(lambda r, batch: r.astype(jnp.float32))
  value = _value.loss_value(losses.chain(cast, named.method('grpo')))
  assert value.text == SILENT + GAP
