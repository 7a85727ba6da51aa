"""The mesh, and which array axis lies on which mesh axis.

The mesh has three axes, of size 1 where they are not used (one device is a mesh
too): `data` replicates parameters, `fsdp` shards them, both split the rows of a
batch; `tensor` splits heads, hidden units and the vocabulary. All axes are
`Auto`: the compiler places the collectives. This is the one place for that.
"""

from collections.abc import Callable
import math
from typing import Any

import jax
from jax.sharding import AxisType
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

ROW_AXES = ('data', 'fsdp')

RULES = {
  'vocab': 'tensor',
  'width': 'fsdp',
  'heads': 'tensor',
  'kv_heads': 'tensor',
  'mlp': 'tensor',
}
"""Logical parameter axis -> mesh axis; what is not named is replicated."""


def make_mesh(data: int = 1, fsdp: int = 1, tensor: int = 1) -> Mesh:
  """A mesh over the first `data * fsdp * tensor` devices.

  Args:
    data: Copies of the parameters, each with its share of the rows. -1 takes
      all devices that the other two axes leave.
    fsdp: Shards of the parameters, each with its share of the rows.
    tensor: Shards of heads, hidden units and vocabulary.

  Returns:
    A `Mesh` with Auto axes.

  Raises:
    ValueError: The product does not fit the number of devices.
  """
  devices = jax.devices()
  if data == -1:
    data = len(devices) // (fsdp * tensor)
  wanted = data * fsdp * tensor
  if not 0 < wanted <= len(devices):
    raise ValueError(
      f'A mesh of data={data} x fsdp={fsdp} x tensor={tensor} needs {wanted} '
      f'devices, but {len(devices)} are present; change config.mesh.'
    )
  return jax.make_mesh(
    (data, fsdp, tensor),
    ('data', 'fsdp', 'tensor'),
    axis_types=(AxisType.Auto,) * 3,
    devices=devices[:wanted],
  )


def row_shards(mesh: Mesh) -> int:
  """Into how many parts the rows of a batch are split."""
  return math.prod(mesh.shape[axis] for axis in ROW_AXES)


def replicated(mesh: Mesh) -> NamedSharding:
  """The same array on every device."""
  return NamedSharding(mesh, PartitionSpec())


def rows(mesh: Mesh, axis: int = 0) -> NamedSharding:
  """Rows along `axis` split over the data shards."""
  return NamedSharding(mesh, PartitionSpec(*(None,) * axis, ROW_AXES))


def place_rows(mesh: Mesh) -> Callable[[Any], Any]:
  """A function that puts a pytree of [rows, ...] host arrays on the mesh."""
  return lambda tree: jax.device_put(tree, rows(mesh))


def of_params(
  mesh: Mesh,
  params: Any,
  logical_axes: Callable[[tuple[str, ...], int], tuple[str | None, ...]],
) -> Any:
  """The sharding of each parameter.

  Args:
    mesh: From `make_mesh`.
    params: The parameters, or their shapes.
    logical_axes: From a parameter's path and rank to the names of its axes.

  Returns:
    A tree of `NamedSharding`. An axis whose size its mesh axis does not divide
    is replicated (two key-value heads on four tensor shards, say).
  """

  def one(path, leaf):
    names = tuple(str(getattr(k, 'key', getattr(k, 'idx', k))) for k in path)
    spec = []
    for size, logical in zip(
      leaf.shape, logical_axes(names, leaf.ndim), strict=True
    ):
      axis = RULES.get(logical) if logical else None
      fits = axis is not None and size % mesh.shape[axis] == 0
      spec.append(axis if fits else None)
    return NamedSharding(mesh, PartitionSpec(*spec))

  return jax.tree_util.tree_map_with_path(one, params)
