"""Splits a call over devices that the compiler cannot split."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from grpo_jax.mesh import sharding


def over_devices(
  function: Callable[..., Any],
  arrays: tuple[jax.Array, ...],
  axes: tuple[str, ...],
  output_axes: Any,
  heads: int,
  everywhere: bool = False,
) -> Any:
  """Calls a function of rows and heads on each device's share of them.

  The compiler cannot look into a kernel, and would gather all of its arguments
  on every device. In attention no row and no head depends on another, so each
  device can compute its own rows and heads.

  Args:
    function: A function of the arrays, for any number of rows and of heads.
    arrays: The arguments of the function.
    axes: For each array a string with one letter per axis: `r` for rows, `h`
      for heads (query or key-value), `.` for anything else.
    output_axes: Such a string for each array of the result, as a tree.
    heads: The number of key-value heads. All heads are split as these are.
    everywhere: Whether rows are split over `tensor` too, where it does not
      divide the heads.

  Returns:
    What the function returns. Without a mesh the function is called on the
    whole arrays. Rows or heads whose number the mesh does not divide are not
    split.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or mesh.size == 1:
    return function(*arrays)
  rows = arrays[0].shape[axes[0].index('r')]
  splits_rows = rows % sharding.row_shards(mesh) == 0
  splits_rows &= not sharding.on_shard()  # which has its own rows already
  places: dict[str, Any] = {
    'r': sharding.ROW_AXES if splits_rows else None,
    'h': 'tensor' if heads % mesh.shape['tensor'] == 0 else None,
    '.': None,
  }
  if everywhere and places['h'] is None and rows % mesh.size == 0:
    places['r'] = sharding.ALL_AXES

  def spec(letters):
    return PartitionSpec(*(places[letter] for letter in letters))

  return jax.shard_map(
    function,
    in_specs=tuple(map(spec, axes)),
    out_specs=jax.tree.map(spec, output_axes),
    axis_names=set(mesh.axis_names) - set(mesh.manual_axes),
    check_vma=False,
  )(*arrays)
