"""Random keys: functions of (seed, step, purpose) and of nothing else."""

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
  base = jax.random.fold_in(jax.random.key(seed), zlib.crc32(purpose.encode()))
  return jax.random.fold_in(base, step)


def generator(seed: int, purpose: str, step: int) -> np.random.Generator:
  """The same for NumPy, on the host."""
  data = jax.random.key_data(key(seed, purpose, step))
  return np.random.default_rng(np.asarray(data))
