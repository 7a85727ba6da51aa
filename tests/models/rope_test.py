"""Rotation of queries and keys: complex numbers that turn with the position."""

import jax
import numpy as np
import pytest

from grpo_jax.models import rope

pytestmark = pytest.mark.quick


def test_a_pair_of_entries_is_a_complex_number_that_is_turned():
  rng = np.random.default_rng(0)
  x = rng.normal(size=(2, 5, 3, 8)).astype(np.float32)
  position = rng.integers(0, 300, (2, 5)).astype(np.int32)
  frequency = np.float32([1.0, 0.3, 0.1, 0.02])
  pair = x[..., :4] + 1j * x[..., 4:]
  angle = position[:, :, None, None] * frequency[None, None, None]
  turned = 1.5 * pair * np.exp(1j * angle)
  found = rope.rotate(jax.numpy.asarray(x), position, frequency, 1.5)
  expected = np.concatenate([turned.real, turned.imag], axis=-1)
  np.testing.assert_allclose(found, expected, atol=1e-4)
