"""Credit by entropy: floors, sides, and what the first rollout decides."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import losses
from grpo_jax.losses import methods
from tests import oracles
from tests.losses import cases


def one_each(entropy, keep=None):
  """Completions of one token, all with reward 2."""
  entropy = jnp.asarray(entropy, float)[None, :, None]
  mask = jnp.ones(entropy.shape, bool)
  return losses.make_batch(
    mask,
    jnp.full(entropy.shape[:2], 2.0),
    entropy_old=entropy,
    keep=mask if keep is None else jnp.asarray(keep)[None, :, None],
  )


def advantages(method, *batches):
  """Of each rollout in turn."""
  state, seen = method.init(), []
  for batch in batches:
    batch, state = losses.credit(method, batch, state)
    seen.append(np.asarray(batch.advantage)[0, :, 0].tolist())
  return seen


def test_the_first_rollout_decides_whether_uncertainty_is_silenced():
  method = losses.chain(losses.use_reward(), losses.silence_uncertain())
  certain, uncertain = one_each([0.1, 0.75]), one_each([0.1, 1.9])
  assert advantages(method, certain, uncertain) == [[2, 0], [2, 0]]
  assert advantages(method, uncertain, certain) == [[2, 2], [2, 2]]


def test_the_limits_of_silence():
  """Both are log 2 and strict; only trained tokens count in the first mean."""
  method = losses.chain(losses.use_reward(), losses.silence_uncertain())
  half = np.log(2)
  assert advantages(method, one_each([half, half + 1e-9, 0.0])) == [[2, 0, 2]]
  assert advantages(method, one_each([half, half])) == [[2, 2]]
  above = losses.silence_uncertain(0.3)
  method = losses.chain(losses.use_reward(), above)
  assert advantages(method, one_each([half, half])) == [[2, 2]]
  only_first = one_each([0.1, 9.0], keep=[True, False])
  assert advantages(method, only_first) == [[2, 0]]


def test_entropy_is_charged_per_nat_of_a_completions_mean():
  batch = losses.make_batch(
    jnp.array([[[True, True, False], [True, False, False]]]),
    jnp.array([[1.0, 5.0]]),
    entropy_old=jnp.array([[[1.0, 3.0, 77.0], [4.0, 77.0, 77.0]]]),
  )
  method = losses.chain(losses.use_reward(), losses.subtract_entropy(0.5))
  batch, _ = losses.credit(method, batch, method.init())
  np.testing.assert_allclose(batch.advantage[0], [[0, 0, 0], [3, 0, 0]])


def test_the_bonus_is_the_mean_entropy_with_a_slope():
  method = losses.chain(
    losses.constant_advantage(0.0),
    losses.mean_over_tokens(),
    losses.score_function(),
    losses.add_entropy_bonus(0.5),
  )
  batch, state = cases.prepared(method, one_each([9.0, 9.0]))
  entropy = jnp.array([[[3.0], [5.0]]])

  def loss(entropy):
    logp = jnp.zeros((1, 2, 1))
    return losses.surrogate_loss(method, logp, batch, state, entropy)[0]

  value, gradient = jax.value_and_grad(loss)(entropy)
  assert value == -2 and gradient.ravel().tolist() == [-0.25, -0.25]


@pytest.mark.parametrize(
  'share, kept', [(0.5, [1, 0, 1, 0, 0]), (0.1, [1, 0, 0, 0, 0])]
)
def test_of_the_trained_tokens_those_of_high_entropy_keep_their_advantage(
  share, kept
):
  """floor(0.5 * 4) = 2, at least 1; the last is not trained."""
  method = losses.chain(losses.use_reward(), losses.mask_low_entropy(share))
  batch = one_each([0.9, 0.1, 0.5, 0.3, 0.2], keep=[True] * 4 + [False])
  assert advantages(method, batch) == [[2 * x for x in kept]]


@pytest.mark.parametrize('name', ['gtpo_entropy', 'grpo_s'])
def test_vanishing_entropies_are_kept_off_zero(name):
  """By 1e-6 nats: with 2e-6 and 1 beside it, the floor shows."""
  case = cases.make_case(1)
  small = np.random.default_rng(0).choice([0.0, 2e-6, 5e-6], case.mask.shape)
  case = case._replace(entropy_old=small)
  loss, gradient = cases.loss_and_gradient(getattr(methods, name)(), case)
  expected_loss, expected = oracles.METHODS[name](case)
  np.testing.assert_allclose(loss, expected_loss, rtol=1e-9, atol=1e-12)
  np.testing.assert_allclose(gradient, expected, rtol=1e-9, atol=1e-12)
