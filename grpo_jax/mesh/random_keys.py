"""Random keys: functions of (seed, purpose, step) and of nothing else.

So a run that is resumed draws the numbers that it would have drawn.
"""

from collections.abc import Sequence
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


def folded(
  seed: int,
  purpose: str,
  step: int,
  rows: Sequence[int],
  columns: Sequence[int],
) -> np.ndarray:
  """The words of `fold_in(fold_in(key(...), row), column)`, on the host.

  Args:
    seed: See `key`.
    purpose: See `key`.
    step: See `key`.
    rows: P numbers.
    columns: G numbers.

  Returns:
    u32[P,G,2].
  """
  # 64 bits, because the rotations shift bits out of 32.
  row, column = (np.array(x, np.uint64) & _MASK for x in (rows, columns))
  words = _fold_in(_words(seed, purpose, step), row[:, None])
  return np.stack(_fold_in(words, column), axis=-1).astype(np.uint32)


def fold(words: np.ndarray, number: int) -> np.ndarray:
  """The words of `fold_in(key, number)`, u32[2], from those of the key."""
  first, second = (int(word) for word in words)
  return np.array(_fold_in((first, second), int(number) & _MASK), np.uint32)


def generator(seed: int, purpose: str, step: int) -> np.random.Generator:
  """A NumPy generator for the same arguments as `key`."""
  data = np.array(_words(seed, purpose, step), np.uint32)
  return np.random.default_rng(data)


def _words(seed: int, purpose: str, step: int) -> tuple[int, int]:
  """The two words of a key."""
  # crc32, because Python's hash of a string differs from process to process.
  number = zlib.crc32(purpose.encode())
  return _fold_in(_fold_in((0, int(seed) & _MASK), number), int(step) & _MASK)


def _fold_in(words: tuple[Any, Any], number: Any) -> tuple[Any, Any]:
  """`jax.random.fold_in`: threefry2x32 of (0, number), of Salmon et al., 2011.

  The numbers are Python's, or arrays u64.

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
