"""There are oracles of everything; `properties_test` compares with them."""

import numpy as np
import pytest

from grpo_jax.losses import methods
from tests import oracles
from tests.losses import cases


def test_every_method_has_an_oracle():
  assert set(methods.__all__) == set(oracles.METHODS)
  assert {entry.name.split('-')[0] for entry in cases.METHODS} == set(
    methods.__all__
  )
  assert {entry.name for entry in cases.PARTS} == set(oracles.PARTS)


@pytest.mark.quick
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
