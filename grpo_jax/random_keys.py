"""Random keys: functions of (seed, purpose, step) and of nothing else.

So a run that is resumed draws the numbers that it would have drawn.
"""

from typing import Any
import zlib

import jax
import numpy as np

_MASK = 2**32 - 1
_PARITY = 0x1BD11BDA
_ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)


def key(seed: int, purpose: str, step: int = 0) -> jax.Array:
  """A key that no other purpose or step shares.

  JAX would fold purpose and step into `jax.random.key(seed)` by programs of the
  device: more to compile, and to call in each rollout. This is the same key,
  computed on the host; its implementation is threefry2x32, whatever
  `jax_default_prng_impl` says.

  Args:
    seed: The run's seed, in [0, 2**32).
    purpose: What it is for, such as `'sample'`.
    step: The rollout or step.

  Returns:
    A jax.random key.
  """
  # Not of `jnp.asarray`, which would compile and run a program.
  data: Any = np.array(_words(seed, purpose, step), np.uint32)
  return jax.random.wrap_key_data(data, impl='threefry2x32')


def generator(seed: int, purpose: str, step: int) -> np.random.Generator:
  """A NumPy generator for the same arguments as `key`."""
  data = np.array(_words(seed, purpose, step), np.uint32)
  return np.random.default_rng(data)


def _words(seed: int, purpose: str, step: int) -> tuple[int, int]:
  """The two words of a key."""
  # crc32, because Python's hash of a string differs from process to process.
  number = zlib.crc32(purpose.encode())
  return _fold_in(_fold_in((0, int(seed) & _MASK), number), int(step) & _MASK)


def _fold_in(words: tuple[int, int], number: int) -> tuple[int, int]:
  """`jax.random.fold_in`: threefry2x32 of (0, number), of Salmon et al., 2011.

  "Parallel random numbers: as easy as 1, 2, 3", SC11, with 20 rounds.
  """
  a, b = words
  schedule = a, b, a ^ b ^ _PARITY
  x, y = a, (b + number) & _MASK
  for i in range(5):
    for turn in _ROTATIONS[i % 2]:
      x = (x + y) & _MASK
      y = x ^ ((y << turn | y >> (32 - turn)) & _MASK)
    x = (x + schedule[(i + 1) % 3]) & _MASK
    y = (y + schedule[(i + 2) % 3] + i + 1) & _MASK
  return x, y
