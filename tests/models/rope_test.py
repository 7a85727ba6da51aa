"""Rotation of queries and keys: complex numbers that turn with the position."""

import jax
import numpy as np
import pytest

from grpo_jax import models
from grpo_jax.models import layers

pytestmark = pytest.mark.quick

POSITION = np.array([[0, 63, 64, 200]], np.int32)


def rotate(x, position, frequency, scale=1.0):
  """An array of NumPy that is turned by positions and frequencies."""
  circle = layers._circle(jax.numpy.asarray(position), frequency)
  return layers.rotate(jax.numpy.asarray(x), *circle, scale)


def test_a_pair_of_entries_is_a_complex_number_that_is_turned():
  rng = np.random.default_rng(0)
  x = rng.normal(size=(2, 5, 3, 8)).astype(np.float32)
  position = rng.integers(0, 300, (2, 5)).astype(np.int32)
  frequency = np.float32([1.0, 0.3, 0.1, 0.02])
  pair = x[..., :4] + 1j * x[..., 4:]
  angle = position[:, :, None, None] * frequency[None, None, None]
  turned = 1.5 * pair * np.exp(1j * angle)
  found = rotate(x, position, frequency, 1.5)
  expected = np.concatenate([turned.real, turned.imag], axis=-1)
  np.testing.assert_allclose(found, expected, atol=1e-4)


def test_frequencies_fall_from_one_to_almost_one_over_the_base():
  config = models.ModelConfig(8, head_dim=8, rope_base=10_000.0)
  found = layers.frequencies(config, models.LayerKind())
  np.testing.assert_allclose(found, [1, 0.1, 0.01, 0.001], rtol=1e-6)
  own = layers.frequencies(config, models.LayerKind(rope_base=16.0))
  np.testing.assert_allclose(own, [1, 0.5, 0.25, 0.125], rtol=1e-6)


def test_the_rest_of_a_head_is_not_turned_and_frequencies_are_of_the_share():
  config = models.ModelConfig(8, head_dim=16, rope_base=10_000.0)
  kind = models.LayerKind(rotated=0.5)
  found = layers.frequencies(config, kind)
  np.testing.assert_allclose(found, [1, 0.1, 0.01, 0.001], rtol=1e-6)
  x = np.random.default_rng(0).normal(size=(1, 2, 1, 16)).astype(np.float32)
  position = np.array([[3, 9]], np.int32)
  turned = rotate(x, position, found, 2.0)
  alone = rotate(x[..., :8], position, found, 2.0)
  np.testing.assert_array_equal(turned[..., :8], alone)
  np.testing.assert_array_equal(turned[..., 8:], 2 * x[..., 8:])
  none = layers.frequencies(config, models.LayerKind(rotated=0.0))
  still = rotate(x, position, none)
  np.testing.assert_array_equal(still, x)


def test_proportionally_the_fast_pairs_of_the_whole_head_are_turned():
  config = models.ModelConfig(8, head_dim=16, rope_base=10_000.0)
  kind = models.LayerKind(rotated=0.5, proportional=True)
  found = layers.frequencies(config, kind)
  whole = layers.frequencies(config, models.LayerKind())
  np.testing.assert_array_equal(found, [*whole[:4], 0, 0, 0, 0])


def test_a_layer_has_the_frequencies_and_the_scale_of_its_own_size():
  config = models.ModelConfig(8, head_dim=16, rope_base=10_000.0)
  kind = models.LayerKind(head_dim=8, attention_scale=0.7)
  found = layers.frequencies(config, kind)
  np.testing.assert_allclose(found, [1, 0.1, 0.01, 0.001], rtol=1e-6)
  scale = layers.query_scale(config, kind, POSITION)
  np.testing.assert_allclose(scale, 0.7 * 8**0.5)


def test_queries_grow_with_the_logarithm_of_their_position():
  grown = models.RopeScaling('yarn', 4.0, 64, 1.0, query_growth=0.5)
  config = models.ModelConfig(8, head_dim=16, rope_scaling=grown)
  yarn = layers.query_scale(config, models.LayerKind(), POSITION)
  factor = (0.1 * np.log(4) + 1) ** 2
  expected = factor * (1 + 0.5 * np.log(1 + np.floor(POSITION / 64)))
  np.testing.assert_allclose(yarn, expected, rtol=1e-6)
  unscaled = models.LayerKind(rope_scaled=False)
  assert layers.query_scale(config, unscaled, POSITION) == 1
  # A layer that does not see positions has nothing that YaRN could scale.
  still = layers.query_scale(config, models.LayerKind(rotated=0.0), POSITION)
  np.testing.assert_allclose(still, expected / factor, rtol=1e-6)


def test_queries_are_scaled_by_yarn_and_the_config_alone():
  yarn = models.RopeScaling('yarn', 4.0, 64, attention_factor=3.0)
  for options, expected in (
    ({}, 1),
    (dict(attention_scale=0.5), 2),  # the usual one is 1 / 4
    (dict(rope_scaling=yarn), 9),
    (dict(rope_scaling=yarn, attention_scale=0.5), 18),
  ):
    config = models.ModelConfig(8, head_dim=16, **options)
    assert layers.query_scale(config, models.LayerKind(), POSITION) == expected
