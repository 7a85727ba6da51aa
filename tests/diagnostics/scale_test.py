"""r -> phi r: exponents, Adam's step, and which cause breaks the invariance."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import losses
from grpo_jax.diagnostics import _scale
from tests.diagnostics import named

FACTORS = 1e-2, 0.1, 10.0, 100.0


def method(*links, credit=None):
  return losses.chain(
    credit or losses.center_by_group(),
    losses.mean_over_sequence_sums(100),
    *links,
    losses.score_function(),
  )


def largest(scale, name):
  return max(max(getattr(s, name)) for s in scale.settings)


def test_adam_undoes_a_linear_reward_up_to_its_epsilon():
  scale = _scale.reward_scale(named.method('rloo'))
  assert not scale.deviation
  assert scale.exponent == pytest.approx(1)
  for setting in scale.settings:
    assert setting.gradient == pytest.approx(FACTORS)
    assert setting.exponent == pytest.approx(1)
    # (epsilon / size) |1 - 1 / phi|, up to how sizes are spread.
    law = [1e-8 / setting.size * abs(1 - 1 / phi) for phi in FACTORS]
    assert np.all(np.array(setting.step) / law > 0.5)
    assert np.all(np.array(setting.step) / law < 10)
    np.testing.assert_allclose(setting.epsilon, setting.step, rtol=1e-6)
  assert largest(scale, 'kl') < 1e-10
  assert largest(scale, 'thresholds') < 1e-10
  assert scale.text.startswith('linear, which Adam undoes up to ')


@pytest.mark.parametrize('name', ['grpo', 'gspo', 'dapo'])
def test_a_division_by_the_deviation_leaves_nothing_to_undo(name):
  scale = _scale.reward_scale(named.method(name))
  assert scale.deviation
  assert scale.exponent == pytest.approx(0, abs=1e-12)
  assert largest(scale, 'step') < 1e-10
  assert scale.text == 'scale-free before Adam: the advantage does not change'


def test_a_kl_term_is_not_scaled_with_the_reward():
  scale = _scale.reward_scale(method(losses.add_kl(0.04)))
  assert largest(scale, 'kl') > 0.1
  assert largest(scale, 'thresholds') < 1e-10
  assert largest(scale, 'kl') == pytest.approx(largest(scale, 'step'), rel=1e-3)
  assert scale.exponent == pytest.approx(1)
  assert 'the penalty is not scaled' in scale.text
  # With phi -> inf the penalty is forgotten; with phi -> 0 nothing else is.
  small, _, _, large = scale.settings[0].step
  assert large < 0.2 * small


def test_an_entropy_bonus_counts_as_penalty():
  bonus = losses.add_penalty(
    lambda terms, batch: -0.1 * terms.entropy, requires=('entropy',)
  )
  scale = _scale.reward_scale(method(bonus))
  assert largest(scale, 'kl') > 1e-3
  assert largest(scale, 'thresholds') < 1e-10


@pytest.mark.parametrize(
  'name,link',
  [
    ('reward', losses.on_reward(lambda r, batch: jnp.minimum(r, 1.2))),
    ('advantage', losses.on_advantage(lambda a, batch: jnp.clip(a, -0.5, 0.5))),
    ('advantage', losses.on_advantage(lambda a, batch: a - 0.05)),
  ],
)
def test_a_constant_beside_the_reward_breaks_it(name, link):
  center = losses.center_by_group()
  credit = (link, center) if name == 'reward' else (center, link)
  scale = _scale.reward_scale(method(credit=losses.chain(*credit)))
  assert max(scale.turn) > 1e-3
  assert largest(scale, 'thresholds') > 1e-3
  assert largest(scale, 'kl') < 1e-10
  assert 'the advantage is not proportional to the reward' in scale.text


def test_an_epsilon_beside_the_deviation_breaks_it_a_little():
  scale = _scale.reward_scale(
    losses.methods.grpo(kl_coefficient=0, epsilon=1e-4)
  )
  assert not scale.deviation
  assert 1e-4 < largest(scale, 'thresholds') < 0.1
  # A deviation of 0.4 and 1e-4 beside it: 0.025 at phi = 0.01.
  assert scale.settings[0].gradient[0] == pytest.approx(0.976, abs=5e-3)


def test_a_threshold_in_the_weight_is_seen_on_the_coefficient():
  """The advantage alone is homogeneous here."""
  gate = losses.on_weight(lambda w, batch: w * (jnp.abs(batch.advantage) > 0.3))
  scale = _scale.reward_scale(method(gate))
  assert max(scale.turn) < 1e-10
  for setting in scale.settings:
    assert max(setting.turn) > 0.1
    assert setting.gradient[0] == 0  # no advantage passes at phi = 0.01
    assert setting.step[0] == pytest.approx(1)  # so nothing moves
  assert 'the coefficient is not proportional to the advantage' in scale.text


def test_the_second_setting_is_off_policy_and_the_first_is_not():
  scale = _scale.reward_scale(named.method('gspo'))
  near, far = scale.settings
  assert (near.log_ratio, far.log_ratio) == (1e-5, 0.05)
  assert far.size < 0.9 * near.size  # its clip acts at 3e-4


def test_noise_does_not_change_with_the_factor():
  noisy = method(
    losses.on_weight(
      lambda w, batch: w * (batch.extras['noise'] < 0.5), requires=('noise',)
    )
  )
  assert _scale.reward_scale(noisy).text.startswith('linear')


def test_the_steps_are_those_of_canonical_adam():
  gradients = np.random.default_rng(0).normal(size=(2, 2, 2, 24, 16))
  first, second, total = 0, 0, 0
  for k in range(24):
    gradient = gradients[..., k, :]
    first = 0.9 * first + 0.1 * gradient
    second = 0.999 * second + 0.001 * gradient**2
    deviation = np.sqrt(second / (1 - 0.999 ** (k + 1)))
    total = total + first / (1 - 0.9 ** (k + 1)) / (deviation + 1e-2)
  change = np.max(np.abs(total[:, :, 1:] - total[:, :, :1]), axis=-1)
  want = change / np.max(np.abs(total[:, :, :1]), axis=-1)
  got = _scale._step_change(gradients, 1e-2)
  np.testing.assert_allclose(got, want, rtol=1e-9)


@pytest.mark.long
def test_factors_that_no_power_has_are_told_and_not_fitted():
  """A best slope through them, -0.15 and 0.71 here, would be of no factor."""
  for name, cell, text in (
    (
      'passk',
      'none: x0, x0, x0.571, x0.571',
      'no power law: gradient x 0, x 0, x 0.571, x 0.571 at phi = 0.01, 0.1, '
      '10, 100; the advantage is not proportional to the reward',
    ),
    ('gtpo_conflict', 'none: x0.194, x0.217, x9.8, x98', 'no power law: '),
    (
      'dro',
      'none: x0.0112, x0.0999, x10, x100',
      'on policy gradient ~ phi ** 1; off policy no power law: gradient x 0.01',
    ),
  ):
    scale = _scale.reward_scale(named.method(name))
    assert scale.settings[-1].exponent is None
    assert _scale.cell(scale.settings[-1]) == cell
    assert scale.text.startswith(text)
  # A penalty that outweighs a small reward: between phi ** 0 and phi ** 1.
  change = _scale.reward_scale(method(losses.add_kl(2.0))).settings[-1]
  assert change.exponent is None and change.gradient[0] > 0.02


def test_a_power_law_is_one_for_every_factor_up_to_1_percent():
  phi = np.array([1.0, 0.01, 0.1, 10.0, 100.0])
  assert _scale._exponent(3 * phi**0.5, phi) == pytest.approx(0.5)
  off = lambda size: np.array([1, 1, 1, 1, 1 + size]) * phi
  assert _scale._exponent(off(0.009), phi) == pytest.approx(1, abs=1e-3)
  assert _scale._exponent(off(0.03), phi) is None
  assert _scale._exponent(np.array([1.0, 0, 1, 1, 1]), phi) is None


def test_degenerate_methods_have_a_result_too():
  zero = method(losses.on_advantage(lambda a, batch: 0 * a))
  scale = _scale.reward_scale(zero)
  assert scale.exponent is None
  assert largest(scale, 'step') == 0
  assert scale.text == 'no gradient on these batches'
  right = losses.on_weight(lambda w, batch: w * (batch.reward == 1)[..., None])
  gone = method(right, credit=losses.use_reward())
  scale = _scale.reward_scale(gone, factors=(0.1, 10.0))
  assert scale.settings[0].exponent is None
  assert scale.text.startswith('gradient at phi = 1 only')
  assert json.loads(json.dumps(scale))[0] == [0.1, 10.0]
  with pytest.raises(ValueError, match='positive'):
    _scale.reward_scale(zero, factors=(0.0,))
