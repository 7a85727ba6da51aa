"""Arrays on their way from the devices of one mesh to those of another.

An array is cut into as many parts as both meshes can have equally many devices
for. The mesh that sends cuts it by a program of its own, each part is sent
once, and devices of the other mesh that hold the same part copy it from each
other. No program spans both meshes.
"""

from collections.abc import Sequence
import math
from typing import Any
from typing import NamedTuple

import jax
from jax.sharding import AxisType
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

_AXES = 'part', 'copy'


class Crossing(NamedTuple):
  """Where arrays lie before and after they are sent; trees of `NamedSharding`.

  Attributes:
    near: On the mesh that sends.
    far: On the other; the parts are the same.
  """

  near: Any
  far: Any


def crossing(near: Mesh, far: Mesh, shapes: Any, place: Any) -> Crossing:
  """How arrays go from one mesh to another.

  Args:
    near: The mesh that sends.
    far: The one that receives. It is `near`, or has none of its devices.
    shapes: Of the arrays, a tree.
    place: Where they are to lie in the end, shardings on `far`. On one device
      they lie there at once.
  """
  if near.size == far.size == 1 and (near.devices == far.devices).all():
    return Crossing(place, place)
  parts = math.gcd(near.size, far.size)

  def places(mesh):
    mesh = in_parts(mesh, parts)
    return jax.tree.map(
      lambda x: NamedSharding(mesh, cut(x.shape, parts)), shapes
    )

  return Crossing(places(near), place if far.size == 1 else places(far))


def cut(shape: Sequence[int], parts: int) -> PartitionSpec:
  """The longest axis that so many parts divide is cut; or none.

  >>> tuple(cut((3, 8, 4), 4))
  (None, 'part')
  """
  axes = [axis for axis, size in enumerate(shape) if size % parts == 0]
  longest = max(axes, key=lambda axis: shape[axis], default=None)
  if longest is None or not shape[longest]:
    return PartitionSpec()
  return PartitionSpec(*[None] * longest, _AXES[0])


def in_parts(mesh: Mesh, parts: int) -> Mesh:
  """The devices of a mesh, as many for each part: the first axis."""
  devices = mesh.devices.reshape(parts, mesh.size // parts)
  return Mesh(devices, _AXES, axis_types=(AxisType.Auto,) * 2)


def send(tree: Any, far: Any) -> Any:
  """Copies arrays to another mesh; returns before they are there.

  Args:
    tree: Arrays that lie as `Crossing.near` says.
    far: `Crossing.far`. Arrays that lie there are returned as they are.
  """
  leaves, treedef = jax.tree.flatten(tree)
  places = treedef.flatten_up_to(far)
  sent: list[Any] = [
    x if x.sharding == at else None
    for x, at in zip(leaves, places, strict=True)
  ]
  going = [n for n, x in enumerate(sent) if x is None]
  parts = [_parts(leaves[n]) for n in going]
  goals = [_goals(leaves[n].shape, places[n]) for n in going]
  # What is sent first goes to the first device of each part, once.
  first = iter(
    jax.device_put(
      [of[part] for of, to in zip(parts, goals, strict=True) for part in to],
      [devices[0] for to in goals for devices in to.values()],
    )
  )
  here = [{part: next(first) for part in to} for to in goals]
  rest = iter(
    jax.device_put(
      [
        of[part]
        for of, to in zip(here, goals, strict=True)
        for part, devices in to.items()
        for _ in devices[1:]
      ],
      [device for to in goals for ds in to.values() for device in ds[1:]],
    )
  )
  for n, of, to in zip(going, here, goals, strict=True):
    arrays = [
      x
      for part, devices in to.items()
      for x in (of[part], *(next(rest) for _ in devices[1:]))
    ]
    sent[n] = jax.make_array_from_single_device_arrays(
      leaves[n].shape, places[n], arrays
    )
  return treedef.unflatten(sent)


_Part = tuple[tuple[int, int], ...]  # from where to where on each axis


def _part(shape: Sequence[int], index: Sequence[slice]) -> _Part:
  return tuple(
    at.indices(size)[:2] for at, size in zip(index, shape, strict=True)
  )


def _parts(x: jax.Array) -> dict[_Part, jax.Array]:
  """Each part of an array, from one of the devices that hold it."""
  return {
    _part(x.shape, shard.index): shard.data for shard in x.addressable_shards
  }


def _goals(shape: Sequence[int], far: NamedSharding) -> dict[_Part, list[Any]]:
  """The devices on which each part of an array is to lie."""
  found: dict[_Part, list[Any]] = {}
  places = far.addressable_devices_indices_map(tuple(shape))
  for device, index in places.items():
    assert index is not None
    found.setdefault(_part(shape, index), []).append(device)
  return found
