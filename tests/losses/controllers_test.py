"""Hyper-parameters that move: by what rule, and from which rollout on."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from grpo_jax import losses
from tests import oracles
from tests.losses import cases


def rollout(kl=0.0, entropy=0.0):
  """Two trained tokens with these means, and tokens that must not count.

  The third token is dropped, the fourth is padding.
  """
  spread = jnp.array([-0.01, 0.01, 50.0, -70.0])[None, None]
  mask = jnp.array([[[True, True, True, False]]])
  return losses.make_batch(
    mask,
    jnp.ones((1, 1)),
    keep=mask & (spread < 1),
    logp_old=kl + spread - 1,
    logp_ref=jnp.full((1, 1, 4), -1.0),
    entropy_old=entropy + spread,
  )


def values(controller, rollouts):
  """The number that each rollout sees."""
  state, seen = controller.init(), []
  for batch in rollouts:
    state = controller.update(state, batch)
    seen.append(float(controller.value(state)))
  return seen


def test_adaptive_kl_follows_its_recurrence_one_rollout_later():
  measured = [0.5, 0.11, 0.0, 0.09, 0.1, -3.0, 0.2]
  coefficient, expected = 0.3, []
  for kl in measured:
    expected.append(coefficient)  # what is measured acts on the next one
    coefficient *= 1 + 0.4 * np.clip((kl - 0.1) / 0.1, -0.25, 0.25)
  controller = losses.adaptive_kl(0.3, 0.1, gain=0.4, limit=0.25)
  seen = values(controller, [rollout(kl=kl) for kl in measured])
  np.testing.assert_allclose(seen, expected, rtol=1e-5)
  assert seen[0] == np.float32(0.3) and seen[1] > seen[0]
  assert controller.requires == {'logp_old', 'logp_ref'}


def test_adaptive_kl_has_the_papers_defaults():
  """Ziegler et al.: gain 0.1, error clipped to 0.2."""
  high, low = rollout(kl=9.0), rollout(kl=-9.0)
  seen = values(losses.adaptive_kl(1.0, 0.1), [high, high, low, low])
  np.testing.assert_allclose(
    seen, [1, 1.02, 1.02**2, 1.02**2 * 0.98], rtol=1e-6
  )


@pytest.mark.parametrize('target', [0.0, -0.1])
def test_adaptive_kl_refuses_a_target_that_is_not_positive(target):
  with pytest.raises(ValueError, match=f'got target={target}; give a positive'):
    losses.adaptive_kl(0.1, target)


def test_entropy_target_follows_its_recurrence():
  """Below the target up, else down, never under 0; idle above the target."""
  measured = [0.5, 0.25, 1.0, 1.5, 1.5, 1.5, 1.5, 0.5, 0.5]
  coefficient, expected = 0.1, []
  for entropy in measured:
    expected.append(coefficient if entropy <= 1.0 else 0.0)
    step = 0.06 if entropy < 1.0 else -0.06
    coefficient = max(0.0, coefficient + step)
  controller = losses.entropy_target(1.0, step=0.06, initial=0.1)
  seen = values(controller, [rollout(entropy=entropy) for entropy in measured])
  np.testing.assert_allclose(seen, expected, atol=1e-6)
  assert expected[2] > 0 and expected[3] == 0 and expected[-1] > 0
  assert controller.requires == {'entropy_old'}


def test_entropy_target_starts_at_zero_and_steps_by_the_papers_delta():
  seen = values(losses.entropy_target(1.0), [rollout(entropy=0.5)] * 3)
  np.testing.assert_allclose(seen, [0, 0.005, 0.01], rtol=1e-6)


def test_the_first_entropy_is_frozen():
  controller = losses.first_entropy()
  assert controller.value(controller.init()) == 0
  rollouts = [rollout(entropy=entropy) for entropy in (0.7, 0.1, 9.0)]
  np.testing.assert_allclose(values(controller, rollouts), 0.7, rtol=1e-6)
  assert controller.requires == {'entropy_old'}


def test_a_schedule_starts_at_its_zero():
  controller = losses.scheduled(lambda rollout: 10.0 + rollout)
  assert controller.value(controller.init()) == 10  # before any rollout
  assert values(controller, [rollout()] * 3) == [10, 11, 12]


def test_an_optax_schedule_moves_a_clip():
  """The ratio 1.25 lies inside 1 + 0.3, on the way, then outside 1 + 0.1."""
  method = losses.chain(
    losses.use_reward(),
    losses.mean_over_sequence_sums(),
    losses.ppo_clip(0.2, optax.linear_schedule(0.3, 0.1, 2)),
  )
  batch = rollout()._replace(logp_old=jnp.zeros((1, 1, 4)))
  logp, state, clipped = jnp.full((1, 1, 4), np.log(1.25)), method.init(), []
  for _ in range(3):
    given, state = losses.credit(method, batch, state)
    given = losses.prepare(method, given, state)
    _, terms = losses.surrogate_loss(method, logp, given, state)
    clipped.append(bool(terms.metrics['clipped_high'][0, 0, 0]))
  assert clipped == [False, True, True]


def test_a_schedule_moves_the_weight_of_vespo():
  """Each of its numbers is that of the rollout, as a constant would be."""
  given = dict(positive=(2.0, 3.0), negative=(3.0, 2.0))
  rises = lambda number: lambda rollout: number + rollout
  method = losses.methods.vespo(
    **{k: tuple(map(rises, pair)) for k, pair in given.items()}
  )
  case, state = cases.make_case(), method.init()
  for step in range(2):
    batch, state = losses.credit(method, cases.to_batch(case), state)
    batch = losses.prepare(method, batch, state)
    loss, _ = losses.surrogate_loss(method, case.logp, batch, state)
    now = {k: (a + step, b + step) for k, (a, b) in given.items()}
    expected, _ = oracles.METHODS['vespo'](case, **now)
    np.testing.assert_allclose(loss, expected, rtol=1e-9)


@pytest.mark.parametrize('pair', [(2.0,), 2.0, lambda rollout: 2.0])
def test_vespo_refuses_what_is_no_pair(pair):
  with pytest.raises(ValueError, match=r'got negative=.*give a pair \(k, '):
    losses.methods.vespo(negative=pair)


def everything_that_moves():
  """A method with every controller, a schedule, and constants beside them."""
  return losses.chain(
    losses.on_reward(
      lambda reward, batch, scale, shift: scale * reward + shift,
      scale=losses.adaptive_kl(2.0, 0.1),
      shift=5.0,
    ),
    losses.use_reward(),
    losses.silence_uncertain(),
    losses.mean_over_sequence_sums(),
    losses.ppo_clip(0.2, lambda rollout: 0.2 + rollout),
    losses.add_kl(losses.adaptive_kl(0.3, 0.1)),
    losses.add_entropy_bonus(losses.entropy_target(1.0, initial=0.1)),
  )


def test_a_controller_stands_beside_a_constant():
  method = everything_that_moves()
  batch, state = rollout(kl=9.0), method.init()
  first, state = losses.credit(method, batch, state)
  second, _ = losses.credit(method, batch, state)
  np.testing.assert_allclose(
    [first.reward.item(), second.reward.item()], [7, 7.04], rtol=1e-6
  )


def test_the_joined_requirements_name_what_the_controllers_measure():
  assert everything_that_moves().requires == {
    'entropy',
    'entropy_old',
    'logp_old',
    'logp_ref',
  }


def test_the_state_keeps_its_form_and_survives_jit_and_storage():
  """One trace for all rollouts, and the numbers of an eager run."""
  method, traces = everything_that_moves(), []

  @jax.jit
  def credit(batch, state):
    traces.append(None)
    return losses.credit(method, batch, state)[1]

  eager = stored = method.init()
  for step in range(3):
    batch = rollout(kl=0.3 * step, entropy=0.5 * step)
    eager = losses.credit(method, batch, eager)[1]
    leaves, form = jax.tree.flatten(stored)
    leaves = [np.array(leaf) for leaf in leaves]  # as in a checkpoint
    stored = credit(batch, jax.tree.unflatten(form, leaves))
  assert len(traces) == 1
  assert jax.tree.structure(stored) == jax.tree.structure(method.init())
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), stored, eager
  )
