"""The attention core: against the textbook, merged, and over nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.mesh import sharding
from grpo_jax.models import attention
from grpo_jax.models import layout
from grpo_jax.models import softmax
from tests import tiny

pytestmark = pytest.mark.quick


def case(seed=0, batch=2, queries=3, keys=5, heads=4, kv_heads=2, size=8):
  k = jax.random.split(jax.random.key(seed), 4)
  query = jax.random.normal(k[0], (batch, queries, heads, size))
  key = jax.random.normal(k[1], (batch, keys, kv_heads, size))
  value = jax.random.normal(k[2], (batch, keys, kv_heads, size))
  visible = jax.random.bernoulli(k[3], 0.7, (batch, queries, keys))
  return query, key, value, visible.at[:, :, 0].set(True)


def test_attend_is_softmax_attention():
  query, key, value, visible = case()
  expected = jax.nn.dot_product_attention(
    query, key, value, mask=visible[:, None]
  )
  partial = softmax.attend(query, key, value, visible)
  np.testing.assert_allclose(partial.output, expected, atol=1e-6)


@pytest.mark.parametrize('platform', ['cpu', 'tpu'])
def test_gradients_are_those_of_softmax_attention(monkeypatch, platform):
  """Products are written in other orders for each kind of device."""
  monkeypatch.setattr(sharding, 'platform', lambda: platform)
  query, key, value, visible = case()
  weight = jax.random.normal(jax.random.key(9), query.shape)

  def found(*arrays):
    return jnp.sum(weight * softmax.attend(*arrays, visible).output)

  def expected(*arrays):
    whole = jax.nn.dot_product_attention(*arrays, mask=visible[:, None])
    return jnp.sum(weight * whole)

  gradients = (
    jax.grad(loss, (0, 1, 2))(query, key, value) for loss in (found, expected)
  )
  for one, other in zip(*gradients, strict=True):
    np.testing.assert_allclose(one, other, atol=1e-5)


def test_merging_two_halves_is_the_whole():
  query, key, value, visible = case()
  whole = softmax.attend(query, key, value, visible).output
  halves = [
    softmax.attend(query, key[:, s], value[:, s], visible[:, :, s])
    for s in (slice(0, 2), slice(2, 5))
  ]
  np.testing.assert_allclose(softmax.merge(*halves).output, whole, atol=1e-6)


def test_a_query_that_sees_nothing_adds_nothing():
  query, key, value, visible = case()
  nothing = softmax.attend(query, key, value, jnp.zeros_like(visible))
  assert not np.any(nothing.output)
  some = softmax.attend(query, key, value, visible)
  np.testing.assert_array_equal(
    softmax.merge(some, nothing).output, some.output
  )
  np.testing.assert_array_equal(softmax.merge(nothing, nothing).output, 0)


def test_a_sink_is_a_key_with_a_score_and_without_a_value():
  query, key, value, visible = case()
  sinks = jnp.array([0.4, -1.0, 2.0, 0.0])[: query.shape[2]]
  partial = softmax.attend(query, key, value, visible)
  found = softmax.drained(partial, sinks)
  mass, sink = np.exp(partial.log_mass), np.exp(sinks)
  expected = partial.output * (mass / (mass + sink[None, None]))[..., None]
  np.testing.assert_allclose(found, expected, atol=1e-6)
  assert softmax.drained(partial, None) is partial.output
  nothing = softmax.attend(query, key, value, jnp.zeros_like(visible))
  np.testing.assert_array_equal(softmax.drained(nothing, sinks), 0)


def test_gradients_stay_finite_where_nothing_is_visible():
  query, key, value, visible = case()
  visible = visible.at[0].set(False)

  def loss(query, key, value):
    some = softmax.attend(query, key, value, visible)
    return jnp.sum(softmax.merge(some, some).output)

  for gradient in jax.grad(loss, (0, 1, 2))(query, key, value):
    assert np.all(np.isfinite(gradient))
    assert not np.any(gradient[0])
    assert np.any(gradient[1]) or gradient is query


def test_a_prompt_and_its_blocks_take_two_attentions(monkeypatch):
  """To the prompt for all tokens of the row, and of each block to itself."""
  shared = layout.shared_prompt(*tiny.ragged(group=3), 8)
  rows, columns = shared.tokens.shape
  asked = []

  def attend(query, key, *rest):
    asked.append((query.shape[:2], key.shape[:2]))
    return whole(query, key, *rest)

  whole = softmax.attend
  monkeypatch.setattr(softmax, 'attend', attend)
  given = jnp.ones((rows, columns, 2, 8))
  attention.over_layout(shared)(given, given, given, None, None)
  assert shared.blocks is not None
  blocks = shared.blocks
  edge, alone = (
    blocks.prompt_tokens,
    (rows * blocks.completions, blocks.completion_tokens),
  )
  assert asked == [((rows, columns), (rows, edge)), (alone, alone)]
