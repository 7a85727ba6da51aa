"""Arrays of the state that lie in the memory of the host between updates.

Which they are is said once, by `step.state_sharding`. A compiled program tells
them by the type of its arguments, brings them to the device where they are
needed, and its results lie again where the state lies. Nothing else in the
learner has to know of them.
"""

from typing import Any

import jax

_KIND = 'pinned_host'  # the memory from which a device can copy by itself


def check(mesh: jax.sharding.Mesh, field: str) -> None:
  """Refuses a mesh whose devices cannot reach the memory of their host.

  Args:
    mesh: If it is abstract, nothing is known of its devices, and it passes.
    field: Of the config that asks for it, for the message.

  Raises:
    ValueError: They cannot.
  """
  if isinstance(mesh, jax.sharding.AbstractMesh):
    return
  device = mesh.devices.flat[0]
  kinds = [memory.kind for memory in device.addressable_memories()]
  if _KIND not in kinds:
    raise ValueError(
      f'config.{field}=True needs devices that reach the memory of their host '
      f'({_KIND}), but {device.device_kind} has {", ".join(kinds)} alone; set '
      f'config.{field}=False.'
    )


def on_host(places: Any) -> Any:
  """Shardings as they were given, but in the memory of the host."""
  return jax.tree.map(lambda place: place.with_memory_kind(_KIND), places)


def lies_on_host(x: Any) -> bool:
  """Whether an array lies in the memory of the host.

  Args:
    x: An array, one that is traced, or a `jax.ShapeDtypeStruct`.
  """
  if isinstance(x, jax.ShapeDtypeStruct):
    return getattr(x.sharding, 'memory_kind', None) == _KIND
  return jax.typeof(x).memory_space == jax.memory.Space.Host


def to_device(tree: Any) -> Any:
  """Traced arrays on the device; those that are there stay what they are."""
  return jax.tree.map(
    lambda x: (
      jax.device_put(x, jax.memory.Space.Device) if lies_on_host(x) else x
    ),
    tree,
  )


def back(tree: Any, before: Any) -> Any:
  """Traced arrays on the device, to where those before them lie."""
  return jax.tree.map(
    lambda x, old: (
      jax.device_put(x, jax.memory.Space.Host) if lies_on_host(old) else x
    ),
    tree,
    before,
  )
