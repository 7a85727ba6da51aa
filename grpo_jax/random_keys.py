"""Random keys: functions of (seed, purpose, step) and of nothing else.

So a run that is resumed draws the numbers that it would have drawn.
"""

import functools
from typing import Any
import zlib

import jax
import numpy as np


def key(seed: int, purpose: str, step=0) -> jax.Array:
  """A key that no other purpose or step shares.

  Args:
    seed: The run's seed.
    purpose: What it is for, such as `'sample'`.
    step: i32[], the rollout or step; may be traced.

  Returns:
    A jax.random key.
  """
  # crc32, because Python's hash of a string differs from process to process.
  number = np.uint32(zlib.crc32(purpose.encode()))
  return _of_seed(seed, number, step)


# One program for all purposes, where each operation would be one of its own.
@functools.partial(jax.jit, static_argnums=0)
def _of_seed(seed: int, purpose: np.uint32, step: Any) -> jax.Array:
  key = jax.random.key(seed)
  return jax.random.fold_in(jax.random.fold_in(key, purpose), step)


def generator(seed: int, purpose: str, step: int) -> np.random.Generator:
  """A NumPy generator for the same arguments as `key`, on the host."""
  data = jax.random.key_data(key(seed, purpose, step))
  return np.random.default_rng(np.asarray(data))
