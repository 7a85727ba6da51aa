"""Numbers that tell whether arrays are those that were saved, on any mesh."""

import functools
import math
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from grpo_jax import sharding
from grpo_jax.learner import offload

Array = jax.Array


def _fingerprints(tree: Any) -> list[Array]:
  """u32[] per leaf: the sum of (2 * place + 1) * bits over its elements.

  The bits of an element are read as an integer; its place is that in the
  flattened array.
  """

  def of_leaf(x: Array) -> Array:
    size = jnp.dtype(x.dtype).itemsize
    x = words = offload.to_device(x)
    # XLA has no bitcast of bool; `astype` below makes 0 and 1 of it.
    if x.dtype != bool:
      words = lax.bitcast_convert_type(x, f'uint{8 * size}')
    place = jnp.zeros(x.shape, jnp.uint32)
    # Places are computed axis by axis, because flattening a sharded array would
    # move it between devices.
    for axis in range(x.ndim):
      stride = math.prod(x.shape[axis + 1 :]) % 2**32
      index = lax.broadcasted_iota(jnp.uint32, x.shape, axis)
      place += index * jnp.uint32(stride)
    # An odd factor has an inverse modulo 2**32, so no change of one element is
    # lost. It depends on the place, so that swapped elements show too.
    return jnp.sum(words.astype(jnp.uint32) * (2 * place + 1), dtype=jnp.uint32)

  return [of_leaf(leaf) for leaf in jax.tree.leaves(tree)]


@functools.cache
def _program() -> Any:
  # Not when this module is imported, because it asks for the devices.
  return jax.jit(_fingerprints, compiler_options=sharding.quickly())


def of(tree: Any) -> list[int]:
  """One number per array; equal trees have equal ones on any mesh.

  The sums are of integers modulo 2**32, so the order of summation does not
  matter. A change of any single bit changes the number.

  Args:
    tree: Arrays of at most 32 bits per element.

  Returns:
    One integer per leaf, in the order of `jax.tree.leaves`.
  """
  return [int(value) for value in jax.device_get(_program()(tree))]
