"""Between hosts and devices: which rows a host holds, and how arrays move.

With several processes no array is whole on one host, and these functions are
the only doors through which arrays pass.
"""

import functools
from typing import Any

import jax
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np

from grpo_jax.mesh import sharding


def to_host(tree: Any) -> Any:
  """Arrays of the devices as arrays of NumPy, whole in every process.

  All processes must call it, because an array that is split over the devices of
  several is gathered first.

  Args:
    tree: Arrays, on the devices or not.
  """
  if jax.process_count() == 1:
    return jax.device_get(tree)
  from jax.experimental import multihost_utils

  def is_elsewhere(x):
    return isinstance(x, jax.Array) and not (
      x.is_fully_addressable or x.is_fully_replicated
    )

  leaves, treedef = jax.tree.flatten(tree)
  gathered = iter(
    multihost_utils.process_allgather(
      [x for x in leaves if is_elsewhere(x)], tiled=True
    )
  )
  return jax.device_get(
    treedef.unflatten(
      [next(gathered) if is_elsewhere(x) else x for x in leaves]
    )
  )


def from_local(tree: Any, place: Any) -> Any:
  """Arrays of NumPy on the devices.

  A process puts the parts of its own devices there, and compares nothing with
  the others.

  Args:
    tree: Arrays of NumPy, whole in shape; of several processes each must have
      the parts that are to be on its devices. Arrays that are on the devices
      already are moved if they lie elsewhere.
    place: A `NamedSharding` for all of them.
  """
  if jax.process_count() == 1:
    return jax.device_put(tree, place)

  def one(x):
    if isinstance(x, jax.Array):
      return jax.device_put(x, place)
    x = np.asarray(x)
    return jax.make_array_from_process_local_data(place, x, x.shape)

  return jax.tree.map(one, tree)


def holders(mesh: Mesh) -> np.ndarray:
  """The process that holds each data shard's rows on its host, i64[S].

  Where the axis `tensor` reaches over processes, several have the same rows on
  their devices. They hold shards by turns.
  """
  of_shards = mesh.devices.reshape(sharding.row_shards(mesh), -1)
  having = [
    sorted({device.process_index for device in devices})
    for devices in of_shards
  ]
  return np.array([some[s % len(some)] for s, some in enumerate(having)])


def own_shards(mesh: Mesh) -> np.ndarray:
  """The data shards of which this process's devices have a part, bool[S]."""
  of_shards = mesh.devices.reshape(sharding.row_shards(mesh), -1)
  own = jax.process_index()
  return np.array(
    [any(device.process_index == own for device in some) for some in of_shards]
  )


def rows_to_host(tree: Any) -> Any:
  """The rows that this process's devices have, as arrays of NumPy.

  Args:
    tree: Arrays [R,...] on the devices, split over the data shards.

  Returns:
    Arrays of the same shapes; the rows of other processes are 0.
  """

  def one(x):
    whole, parts = np.zeros(x.shape, x.dtype), {}
    for part in x.addressable_shards:  # some of the same rows
      parts.setdefault(part.index[0].start, part)
    for part in parts.values():
      whole[part.index] = part.data
    return whole

  return jax.tree.map(one, tree)


def gather(tree: Any, holder: np.ndarray, mesh: Mesh, specs: Any) -> Any:
  """Arrays of which each process holds some rows, on the devices.

  All processes must call it.

  Args:
    tree: Arrays of NumPy [R,...], of which the rows held here are read.
    holder: i64[R], the process that holds each row; the same in all.
    mesh: The mesh.
    specs: A tree of `PartitionSpec`, which do not split rows: where the arrays
      are to lie.

  Returns:
    Arrays [R,...] of JAX.
  """
  process = np.array([device.process_index for device in mesh.devices.flat])
  # The rows of a process lie on its devices in parts of one size. It is a power
  # of two, so that few programs are compiled.
  parts = np.bincount(process)
  most = np.max(-(-np.bincount(holder, minlength=len(parts)) // parts))
  size = 1 << int(most - 1).bit_length()
  place = np.zeros(len(holder), np.int32)  # of each row among all parts
  for rank in np.unique(holder):
    devices, rows = (
      np.flatnonzero(process == rank),
      np.flatnonzero(holder == rank),
    )
    number = np.arange(len(rows))
    place[rows] = devices[number // size] * size + number % size

  def one(x):
    def part(index):
      first = index[0].start or 0
      rows = np.flatnonzero((place >= first) & (place < first + size))
      own = np.zeros((size, *x.shape[1:]), x.dtype)
      own[place[rows] - first] = x[rows]
      return own

    shape = len(process) * size, *x.shape[1:]
    over_all = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    return jax.make_array_from_callback(shape, over_all, part)

  leaves, treedef = jax.tree.flatten(tree)
  places = tuple(NamedSharding(mesh, s) for s in treedef.flatten_up_to(specs))
  found = _taken(list(map(one, leaves)), place, places)
  return treedef.unflatten(found)


@functools.partial(jax.jit, static_argnums=2)
def _taken(arrays, place, places):
  """Takes rows of arrays that are split over all devices."""
  # Moved first: rows of what is split along rows would be gathered.
  keep = jax.lax.with_sharding_constraint
  return [
    keep(keep(x, at)[place], at) for x, at in zip(arrays, places, strict=True)
  ]
