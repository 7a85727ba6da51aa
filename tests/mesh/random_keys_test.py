"""Keys are those of JAX's own functions, and need no program."""

import zlib

import jax
import numpy as np
import pytest

from grpo_jax.mesh import random_keys
from tests.compilations import compiled_programs


@pytest.mark.parametrize('seed', [0, 7, 2**31 - 1, np.int32(5), 2**32 - 1])
@pytest.mark.parametrize('step', [0, np.int64(1), 2**31 - 1])
@pytest.mark.parametrize('purpose', ['init', 'sample'])
def test_a_key_is_folded_as_jax_does(seed, purpose, step):
  number = np.uint32(zlib.crc32(purpose.encode()))
  key = jax.random.fold_in(
    jax.random.fold_in(jax.random.key(seed), number), step
  )
  found = random_keys.key(seed, purpose, step)
  assert found.dtype == key.dtype
  np.testing.assert_array_equal(
    jax.random.key_data(found), jax.random.key_data(key)
  )
  rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))
  own = random_keys.generator(seed, purpose, step)
  np.testing.assert_array_equal(
    own.integers(2**62, size=4), rng.integers(2**62, size=4)
  )


def test_a_key_is_the_same_in_a_program_and_with_64_bits():
  data = lambda: jax.random.key_data(random_keys.key(2**32 - 1, 'init', 3))
  want = data()
  np.testing.assert_array_equal(jax.jit(data)(), want)
  with jax.enable_x64(True):
    np.testing.assert_array_equal(data(), want)
    np.testing.assert_array_equal(jax.jit(data)(), want)


def test_nothing_is_compiled_for_a_key():
  jax.clear_caches()  # or what another test has compiled would go unseen
  with compiled_programs() as names:
    random_keys.generator(0, 'noise', 1)
    jax.random.key_data(random_keys.key(0, 'sample', 1)).block_until_ready()
  assert names == []
