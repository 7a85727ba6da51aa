"""Every method, and every part that none has, against a loop in NumPy."""

import numpy as np
import pytest

from grpo_jax.losses import methods
from tests import oracles
from tests.losses import cases

# With a newer JAX each method is asked once.
QUICK = pytest.mark.quick


def test_every_method_has_an_oracle():
  assert set(methods.__all__) == set(oracles.METHODS)
  assert {entry.name.split('-')[0] for entry in cases.METHODS} == set(
    methods.__all__
  )
  assert {entry.name for entry in cases.PARTS} == set(oracles.PARTS)


@pytest.mark.parametrize('seed', [pytest.param(0, marks=QUICK), 1, 2])
@pytest.mark.parametrize(**cases.by_name(cases.METHODS + cases.PARTS))
def test_value_and_gradient(entry, seed):
  case = cases.make_case(seed)
  loss, gradient = cases.loss_and_gradient(entry.make(), case)
  expected_loss, expected_gradient = entry.oracle(case)
  assert np.abs(expected_gradient).max() > 1e-4  # the oracle is not idle
  np.testing.assert_allclose(loss, expected_loss, rtol=1e-9, atol=1e-12)
  np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
  'value', [60.0, -60.0, pytest.param(np.inf, marks=QUICK)]
)
@pytest.mark.parametrize(**cases.by_name(cases.METHODS))
def test_garbage_where_nobody_owns_the_place(entry, value):
  case = cases.make_case(5)
  _, gradient = cases.loss_and_gradient(
    entry.make(), cases.garbage(case, value)
  )
  expected_gradient = entry.oracle(case)[1]
  np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-9, atol=1e-12)


@QUICK
def test_kl_gradients_against_enumeration():
  """k2's expected gradient is that of KL(pi||ref), k3's of KL(ref||pi)."""
  import jax
  import jax.numpy as jnp

  from grpo_jax import losses

  rng = np.random.default_rng(0)
  logits, ref = rng.standard_normal((2, 5))
  exact = oracles.enumerate_kl(logits, ref)
  for estimator, expected in (('k2', exact.k2), ('k3', exact.k3)):
    method = losses.chain(
      losses.constant_advantage(0.0),
      losses.mean_over_sequence_sums(),
      losses.score_function(),
      losses.add_kl(1.0, estimator),
    )
    probability = jax.nn.softmax(jnp.asarray(logits))

    def loss(logits, method=method, probability=probability):
      # One completion of one token per outcome; B = 1 in each call.
      total = 0.0
      for outcome in range(5):
        batch = losses.make_batch(
          jnp.ones((1, 1, 1), bool),
          jnp.zeros((1, 1)),
          logp_ref=jax.nn.log_softmax(jnp.asarray(ref))[outcome][
            None, None, None
          ],
        )
        batch, state = cases.prepared(method, batch)
        logp = jax.nn.log_softmax(logits)[outcome][None, None, None]
        value, _ = losses.surrogate_loss(method, logp, batch, state)
        total += probability[outcome] * value
      return total

    gradient = jax.grad(loss)(jnp.asarray(logits))
    np.testing.assert_allclose(gradient, expected, rtol=1e-9, atol=1e-12)
  np.testing.assert_allclose(exact.k2, exact.gradient, rtol=1e-9, atol=1e-12)
