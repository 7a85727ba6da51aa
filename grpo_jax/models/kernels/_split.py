"""Calls that the compiler cannot split over devices, split by hand."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from grpo_jax import sharding


def over_devices(
  function: Callable[..., Any],
  arrays: tuple[jax.Array, ...],
  axes: tuple[str, ...],
  output_axes: Any,
  heads: int,
) -> Any:
  """Calls a function of rows and heads on each device's share of them.

  A kernel is one opaque call to the compiler, which would gather its arguments
  on every device. Rows and heads do not touch each other in attention, so each
  device can do its own.

  Args:
    function: Of the arrays; any number of rows, any number of heads.
    arrays: Its arguments.
    axes: For each, one letter per axis: `r` rows, `h` heads (query or
      key-value), `.` anything else.
    output_axes: The same of the result; a tree of strings.
    heads: Key-value heads, the fewest that are split.

  Returns:
    What the function returns. Without a mesh it is called as it is; rows or
    heads that the mesh does not divide are not split.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or mesh.size == 1:
    return function(*arrays)
  rows = arrays[0].shape[axes[0].index('r')]
  places = {
    'r': sharding.ROW_AXES if rows % sharding.row_shards(mesh) == 0 else None,
    'h': 'tensor' if heads % mesh.shape['tensor'] == 0 else None,
    '.': None,
  }

  def spec(letters):
    return PartitionSpec(*(places[letter] for letter in letters))

  return jax.shard_map(
    function,
    in_specs=tuple(map(spec, axes)),
    out_specs=jax.tree.map(spec, output_axes),
    check_vma=False,
  )(*arrays)
