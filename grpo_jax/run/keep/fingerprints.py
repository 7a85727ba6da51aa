"""Numbers that tell whether arrays are those that were saved, on any mesh."""

import functools
import math
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from grpo_jax.learner import offload
from grpo_jax.mesh import sharding

Array = jax.Array


def _fingerprints(tree: Any) -> list[Array]:
  """u32[] per leaf: the sum of (2 * place + 1) * bits over its elements.

  The bits of an element are read as an integer; its place is that in the
  flattened array.
  """

  def words(x: Array) -> Array:
    x = offload.to_device(x)
    # XLA has no bitcast of bool; `astype` below makes 0 and 1 of it.
    if x.dtype != bool:
      size = jnp.dtype(x.dtype).itemsize
      x = lax.bitcast_convert_type(x, f'uint{8 * size}')
    return x.astype(jnp.uint32)

  def places(shape: tuple[int, ...]) -> Array:
    place = jnp.zeros(shape, jnp.uint32)
    # Places are computed axis by axis, because flattening a sharded array would
    # move it between devices.
    for axis in range(len(shape)):
      stride = math.prod(shape[axis + 1 :]) % 2**32
      index = lax.broadcasted_iota(jnp.uint32, shape, axis)
      place += index * jnp.uint32(stride)
    return place

  leaves = jax.tree.leaves(tree)
  found: list[Array] = [jnp.uint32(0)] * len(leaves)
  alike: dict[tuple[int, ...], list[int]] = {}
  for k, leaf in enumerate(leaves):
    alike.setdefault(leaf.shape, []).append(k)
  # Arrays of one shape in one loop, which computes the places once: parameters,
  # moments and the reference take a sixth of the time, and half to compile.
  for shape, chosen in alike.items():
    # An odd factor has an inverse modulo 2**32, so no change of one element is
    # lost. It depends on the place, so that swapped elements show too.
    factor = 2 * places(shape) + 1
    sums = lax.reduce(
      [words(leaves[k]) * factor for k in chosen],
      [jnp.uint32(0)] * len(chosen),
      lambda left, right: list(map(jnp.add, left, right)),
      range(len(shape)),
    )
    for k, total in zip(chosen, sums, strict=True):
      found[k] = total
  return found


@functools.cache
def _program() -> Any:
  # Not when this module is imported, because it asks for the devices.
  return jax.jit(_fingerprints, compiler_options=sharding.quickly())


def compute(tree: Any) -> list[int]:
  """One number per array; equal trees have equal ones on any mesh.

  The sums are of integers modulo 2**32, so the order of summation does not
  matter. A change of any single bit changes the number.

  Args:
    tree: Arrays of at most 32 bits per element, of one mesh or several.

  Returns:
    One integer per leaf, in the order of `jax.tree.leaves`.
  """
  leaves = jax.tree.leaves(tree)
  together: dict[Any, list[int]] = {}  # a program takes arrays of one mesh
  for n, leaf in enumerate(leaves):
    mesh = leaf.sharding.device_set if isinstance(leaf, jax.Array) else ()
    together.setdefault(frozenset(mesh), []).append(n)
  found = [0] * len(leaves)
  for some in together.values():
    values = jax.device_get(_program()([leaves[n] for n in some]))
    for n, value in zip(some, values, strict=True):
      found[n] = int(value)
  return found
