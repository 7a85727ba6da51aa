"""Arrays [P,G,T] on the data shards, each of which has some positions t.

Losses and metrics add up over positions, so shards need no more of each other
than sums. The model scores whole completions, those in the rows of a shard: for
them shards exchange positions, `take` and `put`. Where T is not divisible by
all shards, some have the same positions; see `shards.position_axes`.

`Layout.completion` i32[R,C] says which completion lies in each slot of a row:
p * G + g, or P * G for an empty slot.
"""

import math
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import AbstractMesh
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np

from grpo_jax import losses
from grpo_jax.mesh import host_arrays
from grpo_jax.mesh import sharding
from grpo_jax.mesh import shards

Array = jax.Array

_WHOLE = PartitionSpec()


def specs(mesh: Mesh | AbstractMesh, batch: losses.Batch) -> losses.Batch:
  """Where each array of a batch lies; see `shards.positions`."""
  shape = batch.mask.shape
  return shards.specs_of(batch, shape, shards.positions(mesh, shape[2]))


def placed(
  mesh: Mesh, batch: losses.Batch, abstract: bool = False
) -> losses.Batch:
  """A batch on the mesh, if that has several data shards.

  Of one shard, what is not on it is left to the programs that take it.

  Args:
    mesh: The mesh.
    batch: Arrays of NumPy or JAX.
    abstract: Whether shapes, dtypes and shardings will do. Nothing is put on a
      device then.
  """
  one_shard = sharding.row_shards(mesh) == 1
  if one_shard and not abstract:
    return batch

  def place(x, spec):
    at = NamedSharding(mesh, spec)
    if not abstract:
      return host_arrays.from_local(x, at)
    if one_shard and isinstance(x, np.ndarray | np.generic):
      return x
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at)

  return jax.tree.map(place, batch, specs(mesh, batch))


def constrain(batch: losses.Batch) -> losses.Batch:
  """Keeps arrays of a batch where `specs` says; no effect without a mesh."""
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or sharding.row_shards(mesh) == 1:
    return batch
  return lax.with_sharding_constraint(batch, specs(mesh, batch))


def local_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
  """What a shard has of an array [P,G,T]; its shape if not `on_shard`."""
  if not sharding.on_shard():
    return shape
  mesh = jax.sharding.get_abstract_mesh()
  parts = math.prod(mesh.shape[axis] for axis in _axes(shape[2]))
  return *shape[:2], shape[2] // parts, *shape[3:]


def missing(width: int) -> tuple[str, ...]:
  """Over which axes what shards have `put` together is still to be summed."""
  # In the order of the mesh: every process must have the same program.
  axes = _axes(width)
  return tuple(axis for axis in sharding.ROW_AXES if axis not in axes)


def _axes(width: int) -> tuple[str, ...]:
  """The axes of the mesh that split T positions, `on_shard`."""
  return shards.position_axes(jax.sharding.get_abstract_mesh(), width)


def take(
  tree: Any, specs: Any, completion: Array, inside: Array | None = None
) -> Any:
  """[P,G,...] -> [R,C,...]: the completions of some rows, 0 in empty slots.

  Args:
    tree: Arrays; on a data shard what it has of them.
    specs: A tree of the same structure, or a prefix of it: what `specs` returns
      for them.
    completion: i32[R,C], of the rows at hand.
    inside: bool[R,C,T], see `Layout.inside`; arrays are 0 elsewhere. None: with
      all tokens of the completions.
  """

  # An empty slot has the number P * G and not -1: a negative index counts from
  # the end in every mode, so neither 'fill' here nor 'drop' below would see it.
  def taken(x, completion):
    return jnp.take(
      x.reshape(-1, *x.shape[2:]), completion, axis=0, mode='fill', fill_value=0
    )

  def one(spec, x):
    if spec == _WHOLE or not sharding.on_shard():
      return within(taken(x, completion))
    # Its own positions of other shards' completions, for the other positions of
    # its own completions.
    parts = taken(x, _together(completion, spec[2]).reshape(-1))
    found = lax.all_to_all(parts, spec[2], 0, 1, tiled=True)
    return within(found.reshape(*completion.shape, *found.shape[1:]))

  def within(x):
    return x if inside is None else _only(inside, x)

  return jax.tree.map(
    lambda spec, part: jax.tree.map(lambda x: one(spec, x), part), specs, tree
  )


def put(
  whole: Array, part: Array, completion: Array, inside: Array | None = None
) -> Array:
  """Writes the values [R,C,T,...] of some rows into [P,G,T,...].

  Args:
    whole: On a data shard what it has, `local_shape`.
    part: Of the rows at hand.
    completion: i32[R,C], of these.
    inside: bool[R,C,T], see `Layout.inside`. Then `whole` must be 0 where
      nothing has been put yet. None: all tokens of a completion are in a slot.

  Returns:
    The array with the values of the rows of all shards that have each other's
    positions; see `missing`.
  """
  if inside is not None:  # other slots have the other tokens
    part = _only(inside, part)
  part = part.reshape(-1, *part.shape[2:]).astype(whole.dtype)
  if part.shape[1] != whole.shape[2]:
    axes = _axes(part.shape[1])
    part = lax.all_to_all(part, axes, 1, 0, tiled=True)
    completion = _together(completion, axes)
  flat = whole.reshape(-1, *whole.shape[2:])
  places = flat.at[completion.reshape(-1)]
  write = places.set if inside is None else places.add
  return write(part, mode='drop').reshape(whole.shape)


def _only(inside: Array, x: Array) -> Array:
  """[R,C,T,...], 0 where not `inside` bool[R,C,T]."""
  inside = inside.reshape(*inside.shape, *(1,) * (x.ndim - 3))
  return jnp.where(inside, x, jnp.zeros_like(x))


def _together(completion: Array, axes: tuple[str, ...]) -> Array:
  """The numbers in the slots of all shards along some axes, i32[S*R,C]."""
  return lax.all_gather(completion, axes, tiled=True)
