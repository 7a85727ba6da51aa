"""The parts of a layer, each against its formula in NumPy."""

import math

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import models
from grpo_jax.models import layers

pytestmark = pytest.mark.quick


def silu(x):
  return x / (1 + np.exp(-x))


def gelu_tanh(x):
  """Hendrycks and Gimpel, arXiv 1606.08415, the approximation by tanh."""
  return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize('activation', [silu, gelu_tanh])
def test_the_gate_of_an_mlp_has_its_activation(activation):
  config = models.ModelConfig(
    vocab_size=8, width=1, mlp_width=1, activation=activation.__name__
  )
  mlp = layers.GatedMLP(config, nnx.Rngs(0))
  for name in ('gate', 'up', 'down'):
    getattr(mlp, name)[...] = np.ones((1, 1), np.float32)
  x = np.linspace(-4, 4, 17, dtype=np.float32)
  found = mlp(x[None, :, None])[0, :, 0]
  np.testing.assert_allclose(found, activation(x) * x, atol=2e-6)


def test_the_gate_of_gpt_oss_is_clamped():
  """The gate from above, the other factor on both sides, which has 1 added."""
  gate, up = np.meshgrid(np.float32([-12, -7.5, -1, 2, 7.5, 12]), [-9, -3, 8.5])
  g, u = np.minimum(gate, 7), np.minimum(np.maximum(up, -7), 7)
  expected = g / (1 + np.exp(-1.702 * g)) * (u + 1)
  found = layers.GATES['clamped_swiglu'](jnp.array(gate), jnp.array(up))
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_a_norm_divides_by_the_root_of_the_mean_square_and_scales():
  rng = np.random.default_rng(0)
  x, scale = rng.normal(size=(2, 3, 5)), rng.normal(size=5)
  norm = layers.RMSNorm(5, 0.1)
  norm.scale[...] = np.float32(scale)
  expected = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 0.1) * scale
  np.testing.assert_allclose(norm(np.float32(x)), expected, atol=1e-6)


@pytest.mark.parametrize('keeps_gathered', [False, True])
def test_products_are_kept_and_on_demand_what_was_gathered(keeps_gathered):
  """They are not in the program of the gradients a second time."""
  mesh = jax.make_mesh((1,), ('data',))
  whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

  def layer(x, weight):
    x = jax.lax.with_sharding_constraint(jnp.sin(x), whole)
    return jnp.sin(x @ weight)

  def counts(function):
    loss = lambda x, weight: function(x, weight).sum()
    x = jnp.ones((2, 2))
    text = str(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(x, x))
    names = 'dot_general[', 'sharding_constraint['
    return tuple(text.count(name) for name in names)

  products, gathered = counts(layer)
  kept = layers.keep_products(layer, keeps_gathered)
  assert counts(kept) == (products, gathered + (not keeps_gathered))
