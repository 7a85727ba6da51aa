"""What a data shard does by itself, with its own rows: gathers, sums, scatters.

`sharding.on_shard` tells whether code runs there. A shard has a part of each
parameter that is split over `fsdp` or `expert`, and works on arrays whose
shapes are those of its part. Over `tensor` arrays are whole for it: how they
are split there is left to the compiler.

If the mesh has an axis `context`, a shard is several groups of devices, each of
which has some columns of the rows: the functions at the end of this file.
"""

from collections.abc import Callable
from collections.abc import Sequence
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh
from jax.sharding import Mesh
from jax.sharding import PartitionSpec
import numpy as np

from grpo_jax.mesh.sharding import ROW_AXES
from grpo_jax.mesh.sharding import RULES
from grpo_jax.mesh.sharding import on_shard
from grpo_jax.mesh.sharding import platform

_NEAR = 4
_STAGED = {'tpu': (64, 16)}
"""From how many devices on an axis is gathered, and summed, in two stages, if
nothing else splits a slice: in groups of `_NEAR` neighbours, and across these.

Over all chips of a slice the compiler for TPUs would sum whole arrays instead,
which sends twice as much: v5p:4x4x4 for both, v5e:4x4 for sums."""

_MANY = 64  # of such an axis large arrays would be summed so in any mesh


def call(
  function: Callable[..., Any], in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
  """Calls a function on each data shard; see `on_shard`.

  The axis `tensor` is left to the compiler.

  Args:
    function: What to call.
    in_specs: A `PartitionSpec` of row axes and `context` for each array.
    out_specs: Such a spec for each array of the result.
  """
  # JAX would check which arrays are equal on all shards, and sum gradients as
  # soon as one is: in every micro-batch, and of every layer.
  return jax.shard_map(
    function,
    in_specs=in_specs,
    out_specs=out_specs,
    axis_names={*ROW_AXES, 'context'},
    check_vma=False,
  )


def sum_over(tree: Any) -> Any:
  """Sums arrays over the data shards; no effect if not `on_shard`."""
  return jax.lax.psum(tree, ROW_AXES) if on_shard() else tree


def gather(x: jax.Array, spec: Sequence[Any], dtype: Any = None) -> jax.Array:
  """A parameter as a whole, `on_shard`, from the parts of the data shards.

  Its gradient is summed over the shards in the dtype of `x`, and each shard
  gets its own part of the sum.

  Args:
    x: The part of this shard.
    spec: For each axis of `x` the axis of the mesh that splits it, or None.
      What `tensor` splits stays split.
    dtype: In which the parts are sent. None: that of `x`.

  Returns:
    The parameter in the dtype of `x`, with the values that `dtype` left.
  """
  split = [(axis, name) for axis, name in enumerate(spec) if name in ROW_AXES]
  sent = jnp.dtype(dtype or x.dtype)

  # The compiler would gather over `tensor` too before it lets shards exchange
  # anything, so both exchange what each device has.
  def by_device(function):
    place = PartitionSpec(
      *(name if name == 'tensor' else None for name in spec)
    )
    return jax.shard_map(
      function,
      in_specs=place,
      out_specs=place,
      axis_names={'tensor'},
      check_vma=False,
    )

  @by_device
  def send(x):
    wide, x = x.dtype, x.astype(sent)
    for axis, name in split:
      for groups in reversed(_stages(name, 0)):
        x = jax.lax.all_gather(
          x, name, axis=axis, axis_index_groups=groups, tiled=True
        )
    return x.astype(wide)

  @by_device
  def scatter(slope):
    for axis, name in reversed(split):
      for groups in _stages(name, 1):
        # The axis comes first: the compiler for TPUs sums whole arrays where
        # the last one would be cut into parts that fill no whole lanes.
        number = len(groups[0]) if groups else jax.lax.axis_size(name)
        shape = slope.shape
        slope = slope.reshape(
          *shape[:axis], number, shape[axis] // number, *shape[axis + 1 :]
        )
        slope = sum_scattered(jnp.moveaxis(slope, axis, 0), name, 0, groups)
        slope = jnp.squeeze(slope, 0)
    return slope

  # What JAX derives would sum in the dtype in which weights are sent.
  return jax.custom_derivatives.linear_call(
    lambda _, x: send(x), lambda _, slope: scatter(slope), (), x
  )


def sum_scattered(
  x: jax.Array,
  name: str,
  axis: int,
  groups: list[list[int]] | None = None,
) -> jax.Array:
  """Sums over an axis of the mesh; each device gets its part of the result.

  Args:
    x: Of the same shape on all devices.
    name: Of the axis of the mesh.
    axis: The axis of x that is cut into parts, one for each device.
    groups: Of devices on that axis, each of which sums by itself; None: one.
  """
  if groups or not _sums_whole():
    return jax.lax.psum_scatter(
      x, name, scatter_dimension=axis, axis_index_groups=groups, tiled=True
    )
  size = x.shape[axis] // jax.lax.axis_size(name)
  first = jax.lax.axis_index(name) * size
  return jax.lax.dynamic_slice_in_dim(jax.lax.psum(x, name), first, size, axis)


def gathered(x: jax.Array, name: str) -> jax.Array:
  """What all devices on an axis of the mesh have, along the first axis of x.

  In the gradient each device gets its part of a sum, as by `sum_scattered`.
  """
  if not _sums_whole():
    return jax.lax.all_gather(x, name, axis=0, tiled=True)
  size = len(x)
  alone = jnp.zeros((size * jax.lax.axis_size(name), *x.shape[1:]), x.dtype)
  first = jax.lax.axis_index(name) * size
  alone = jax.lax.dynamic_update_slice_in_dim(alone, x, first, 0)
  return jax.lax.psum(alone, name)


def _sums_whole() -> bool:
  """Whether devices sum whole arrays, and each then takes its part.

  Between processes on CPUs XLA leaves `psum_scatter` to Gloo. There it hung
  until Gloo's limit of 30 s, with no process late, and jax-ml/jax#40830 reports
  wrong numbers.
  """
  return platform() == 'cpu' and jax.process_count() > 1


def _stages(name: str, which: int) -> list[list[list[int]] | None]:
  """The groups of an axis of the mesh that sum one after another.

  Args:
    name: Of the axis.
    which: Of the numbers in `_STAGED`.

  Returns:
    Groups across neighbours, then groups of neighbours; or None for one group
    of all.
  """
  mesh = jax.sharding.get_abstract_mesh()
  size, least = mesh.shape[name], _STAGED.get(platform())
  if least is None or size % _NEAR:
    return [None]
  is_slice = mesh.size == size * mesh.shape['data'] and size >= least[which]
  if not is_slice and not (which and size >= _MANY):
    return [None]
  number = np.arange(size).reshape(-1, _NEAR)
  return [number.T.tolist(), number.tolist()]


def spec_of(
  shape: Sequence[int], names: Sequence[str | None]
) -> list[str | None]:
  """Which axis of the mesh splits each axis of a parameter, `on_shard`.

  Args:
    shape: Of the part of a shard; it is whole over `tensor`.
    names: The logical axes; `'width'` is taken to be split. Experts count as
      parameters of their own, of which a shard needs no others.
  """
  tensor = jax.sharding.get_abstract_mesh().shape['tensor']

  def one(size, name):
    axis = RULES.get(name) if name else None
    keeps = axis == 'fsdp' or axis == 'tensor' and size % tensor == 0
    return axis if keeps else None

  return [one(size, name) for size, name in zip(shape, names, strict=True)]


def specs(place: Any) -> Any:
  """What `call` is told of arrays: their specs without `tensor`.

  Args:
    place: A tree of `NamedSharding`, as `param_shardings` makes it.
  """

  def one(sharding):
    axes = (axis if axis in ROW_AXES else None for axis in sharding.spec)
    return PartitionSpec(*axes)

  return jax.tree.map(one, place)


def position_axes(mesh: Mesh | AbstractMesh, width: int) -> tuple[str, ...]:
  """The axes that split the positions of arrays [P,G,T] over data shards.

  Args:
    mesh: The mesh.
    width: `T`.

  Returns:
    Those of `ROW_AXES` that make the most parts of those that divide T.

  >>> mesh = AbstractMesh((6, 4, 1), ROW_AXES)
  >>> [position_axes(mesh, width) for width in (48, 32, 5)]
  [('data', 'fsdp'), ('fsdp',), ()]
  """
  used = [axis for axis in ROW_AXES if mesh.shape[axis] > 1]
  every = itertools.chain.from_iterable(
    itertools.combinations(used, number) for number in range(len(used) + 1)
  )
  parts = {axes: math.prod(mesh.shape[axis] for axis in axes) for axes in every}
  fitting = [axes for axes, number in parts.items() if width % number == 0]
  return max(fitting, key=lambda axes: parts[axes])


def positions(mesh: Mesh | AbstractMesh, width: int) -> PartitionSpec:
  """Where an array [P,G,T] lies; see `position_axes`."""
  axes = position_axes(mesh, width)
  return PartitionSpec(None, None, axes) if axes else PartitionSpec()


def specs_of(
  tree: Any, shape: tuple[int, ...], of_positions: PartitionSpec
) -> Any:
  """Where the arrays of a tree lie: those of shape [P,G,T,...] as given.

  Args:
    tree: Arrays.
    shape: (P, G, T).
    of_positions: Where they lie. All others lie everywhere.
  """

  def one(x):
    return of_positions if x.shape[:3] == shape else PartitionSpec()

  return jax.tree.map(one, tree)


def parts() -> int:
  """Into how many parts the rows at hand are cut; 1: they are whole."""
  return jax.sharding.get_abstract_mesh().shape['context'] if on_shard() else 1


def part() -> jax.Array:
  """The number of the part that is here, i32[]."""
  return jax.lax.axis_index('context')


def first_column(size: int) -> jax.Array:
  """The number of the first of the `size` columns that are here, i32[]."""
  return part() * size


def gather_columns(x: jax.Array) -> jax.Array:
  """All columns of some rows, f[R,S/parts,...] -> f[R,S,...].

  Its gradient is summed in float32.
  """
  if parts() == 1:
    return x

  def gather(_, x):
    return jax.lax.all_gather(x, 'context', axis=1, tiled=True)

  def scatter(_, slope):
    wide = slope.astype(jnp.promote_types(slope.dtype, jnp.float32))
    return sum_scattered(wide, 'context', 1).astype(slope.dtype)

  if not jnp.issubdtype(x.dtype, jnp.inexact):
    return gather(None, x)
  return jax.custom_derivatives.linear_call(gather, scatter, (), x)


def sum_columns(tree: Any) -> Any:
  """Sums what the parts have found, for all of them.

  All parts then compute the same with it, so each has the whole gradient of
  the sum, and passes it on.
  """
  if parts() == 1:
    return tree

  def one(x):
    if not jnp.issubdtype(x.dtype, jnp.inexact):
      return jax.lax.psum(x, 'context')
    return jax.custom_derivatives.linear_call(
      lambda _, x: jax.lax.psum(x, 'context'), lambda _, slope: slope, (), x
    )

  return jax.tree.map(one, tree)


def spread(x: jax.Array) -> jax.Array:
  """Splits the columns of f[R,S,W] over `tensor`, `on_shard`.

  So the residual stream is kept once, and not on every device of `tensor`, and
  what is computed of each of its tokens is computed once. No effect where
  `tensor` does not divide the columns.
  """
  return _over_tensor(x, PartitionSpec(None, 'tensor'))


def whole(x: jax.Array) -> jax.Array:
  """All columns of what `spread` has split, for all devices of `tensor`."""
  return _over_tensor(x, PartitionSpec())


def summed(x: jax.Array) -> jax.Array:
  """Sums that devices of `tensor` have parts of, `spread` like the stream.

  Said in two steps: of one, the compiler for TPUs would make a loop over parts,
  which sends what products have in common once for each of them.
  """
  return spread(whole(x))


def vocabulary_parts(size: int) -> int:
  """Into how many parts `tensor` splits a vocabulary, `on_shard`; else 1."""
  if not on_shard():
    return 1
  parts = jax.sharding.get_abstract_mesh().shape['tensor']
  return parts if size % parts == 0 else 1


def on_vocabulary_parts(function: Callable[..., Any], x: jax.Array) -> Any:
  """Calls a function on each of `vocabulary_parts` by itself.

  Args:
    function: `(part, number) -> arrays [R,N,K]`: of a part f[R,N,V/parts], and
      its number i32[].
    x: f[R,N,V].

  Returns:
    The arrays of all parts, one behind the other: [R,N,parts*K].
  """
  spec = PartitionSpec(None, None, 'tensor')
  return jax.shard_map(
    lambda x: function(x, jax.lax.axis_index('tensor')),
    in_specs=spec,
    out_specs=spec,
    axis_names={'tensor'},
    check_vma=False,
  )(x)


def _over_tensor(x, spec):
  mesh = jax.sharding.get_abstract_mesh()
  if not on_shard() or mesh.shape['tensor'] == 1:
    return x
  if x.shape[1] % mesh.shape['tensor']:
    return x
  return jax.lax.with_sharding_constraint(x, spec)
