"""Machines by their names, such as `v5p:4x4x4`, and a mesh over them.

The devices of a TPU's topology come from libtpu, which knows all topologies
without having any. GPUs have no such library: their mesh has shapes alone.
"""

from collections.abc import Sequence
import dataclasses
import importlib.util
import math
import os
from typing import Any

import jax
from jax.experimental import topologies as jax_topologies
from jax.sharding import AbstractDevice
from jax.sharding import AbstractMesh
from jax.sharding import Mesh

from grpo_jax.config import Mesh as MeshConfig
from grpo_jax.config import plain_text
from grpo_jax.mesh import chips
from grpo_jax.mesh import sharding
from grpo_jax.mesh.chips import Chip
from grpo_jax.planning import cloud

# How many sizes a shape has, what libtpu calls the chip, and what else it has
# to be told: the two cores of a v4 are one device only if asked for.
_TPUS: dict[str, tuple[int, str, dict[str, Any]]] = {
  'v4': (3, 'v4', {'chip_config_name': 'megacore'}),
  'v5e': (2, 'v5e', {}),
  'v5p': (3, 'v5p', {}),
  'v6e': (2, 'v6e', {}),
  'v7x': (3, 'tpu7x', {}),
}
# The share of a GPU's memory that JAX takes unless it is told another.
_GPU_SHARE = 'XLA_PYTHON_CLIENT_MEM_FRACTION', 0.75
GIB = 2**30
# What libtpu finds out from a TPU's machine, where there is none.
NO_TPU_HERE = {
  'TPU_SKIP_MDS_QUERY': '1',
  'TPU_WORKER_HOSTNAMES': 'localhost',
  'TPU_ACCELERATOR_TYPE': 'v5litepod-16',
  'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',  # by other processes at the same time
}


@dataclasses.dataclass(frozen=True)
class Topology:
  """Machines to plan for.

  Attributes:
    name: As `named` takes it, with its shape.
    chip: Of which kind they are.
    shape: Chips along each direction; of GPUs, nodes and the GPUs of each.
    slices: How many such groups there are, with a slower network between them.
  """

  name: str
  chip: Chip
  shape: tuple[int, ...]
  slices: int = 1

  @property
  def number(self) -> int:
    """How many devices there are for JAX, of all slices."""
    chips = math.prod(self.shape) * self.slices
    return chips * self.chip.devices_per_chip

  @property
  def chips(self) -> float:
    """How many chips there are, as they are paid for."""
    return self.number / self.chip.devices_per_chip

  @property
  def joined(self) -> int:
    """How many devices are joined by fast links: of a slice, or of a node."""
    if self.is_tpu:
      return self.number // self.slices
    return min(self.shape[-1], self.chip.chips_per_host or self.shape[-1])

  @property
  def memory_bytes(self) -> float:
    """What programs may use of the memory of one device.

    Raises:
      ValueError: XLA_PYTHON_CLIENT_MEM_FRACTION is no share.
    """
    chip = self.chip
    if self.is_tpu:
      return (chip.usable_gib or chip.device_memory_gib) * GIB
    return gpu_share() * chip.device_memory_gib * GIB

  @property
  def hosts(self) -> int:
    """How many machines have the devices; one, if it is not known."""
    if not self.is_tpu and len(self.shape) == 2:
      return self.shape[0] * self.slices
    host = self.chip.chips_per_host or math.prod(self.shape)
    return math.ceil(math.prod(self.shape) / host) * self.slices

  @property
  def groups(self) -> int:
    """How many parts of it may be machines of a job: slices, or nodes."""
    if self.slices > 1 or self.is_tpu or len(self.shape) == 1:
      return self.slices
    return self.shape[0]

  def some(self, number: int) -> 'Topology':
    """So many of its `groups`."""
    if self.slices > 1 or self.groups == 1:
      return dataclasses.replace(self, slices=number)
    kind, (_, each) = self.name.partition(':')[0], self.shape
    return dataclasses.replace(
      self, name=f'{kind}:{number}x{each}', shape=(number, each)
    )

  @property
  def is_tpu(self) -> bool:
    """Whether the compiler for it is to be had."""
    return self.chip.link == 'ICI'

  @property
  def platform(self) -> str:
    """As `sharding.platform` calls it."""
    return 'tpu' if self.is_tpu else 'gpu'


def gpu_share() -> float:
  """The share of a GPU's memory that JAX takes for its programs.

  Raises:
    ValueError: The environment variable that says it holds no share.
  """
  name, usual = _GPU_SHARE
  given = os.environ.get(name)
  try:
    share = float(given) if given else usual
  except ValueError:
    share = 0.0
  if not 0 < share <= 1:
    raise ValueError(
      f'{name}={given} is no share of the memory; give a number up to 1, such '
      f'as {usual}, or unset it.'
    )
  return share


def named(name: str, slices: int = 1) -> Topology:
  """The topology of a name.

  Args:
    name: A chip of `chips.CHIPS`, a colon, and how many along each direction:
      `v5p:4x4x4`, `v5e:16x16`; of GPUs nodes and the GPUs of each,
      `h100-sxm:2x8`, or the number alone, `h100-sxm:8`. Or a name of `cloud`.
    slices: How many of them.

  Raises:
    ValueError: There is no such kind, or the shape is none.

  >>> named('v5e:4x4').number, named('v5litepod-16').name
  (16, 'v5e:4x4')
  """
  name = cloud.topology(name) or name
  kind, _, given = name.partition(':')
  try:
    chip = chips.named(kind)
  except ValueError as error:
    raise ValueError(
      f'--topology={name}: {error} As in v5p:4x4x4, v5e:16x16 or h100-sxm:2x8, '
      'or as a cloud says it: v5p-64, v5litepod-16, v6e-8, a3-highgpu-8g:2.'
    ) from error
  is_tpu = chip.link == 'ICI'
  if is_tpu and chip.name not in _TPUS:
    raise ValueError(
      f'--topology={name} is of a chip that libtpu no longer compiles for; '
      f'give one of {", ".join(_TPUS)}.'
    )
  sizes = given.split('x')
  number = _TPUS[chip.name][0] if is_tpu else len(sizes)
  if (
    not all(size.isdecimal() and int(size) for size in sizes)
    or len(sizes) != number
    or (not is_tpu and number > 2)
  ):
    shape = 'x'.join(['4'] * number) if is_tpu else '2x8'
    raise ValueError(
      f'--topology={name} has no shape that fits; give one such as '
      f'{kind}:{shape}.'
    )
  if slices < 1:
    raise ValueError(f'--num_slices={slices} is less than 1; give 1 or more.')
  return Topology(name, chip, tuple(map(int, sizes)), slices)


def mesh(
  topology: Topology, wanted: MeshConfig, apart: int = 0
) -> tuple[Mesh | AbstractMesh, Sequence[Any] | None]:
  """The learner's mesh of a config over a topology.

  Args:
    topology: With a compiler, the mesh has its devices; else shapes alone.
    wanted: The sizes.
    apart: How many devices, the last, sample alone.

  Returns:
    The mesh, and the devices that sample alone; None without a compiler, or if
    there are none.

  Raises:
    ValueError: The sizes do not fit the topology, or libtpu is not there.
  """
  sizes = dataclasses.asdict(wanted)
  if not topology.is_tpu:
    return abstract_mesh(topology, wanted, apart), None
  found = devices(topology)
  if not apart:
    return sharding.make_mesh(**sizes, devices=found), None
  learning, sampling = found[:-apart], found[-apart:]
  return sharding.make_mesh(**sizes, devices=learning), sampling


def abstract_mesh(
  topology: Topology, wanted: MeshConfig, apart: int = 0
) -> AbstractMesh:
  """The mesh of a config with shapes alone, for which nothing is compiled.

  Raises:
    ValueError: The sizes do not fit the topology.
  """
  if apart >= topology.number:
    raise ValueError(
      f'config.generator.devices={apart}, but {topology.name} has '
      f'{topology.number} devices, and one at least learns; give at most '
      f'{topology.number - 1}.'
    )
  if apart and topology.hosts > 1:
    raise ValueError(
      f'config.generator.devices={apart} divides the devices of one process, '
      f'but {topology.name} has {topology.hosts} hosts, each with a process of '
      'its own; give 0, and --generators for jobs that sample.'
    )
  shape = sharding.mesh_shape(
    topology.number - apart,
    **dataclasses.asdict(wanted),
    processes=topology.hosts,
  )
  maker = '' if topology.is_tpu else 'NVIDIA '
  return mesh_of_shapes(
    shape,
    maker + topology.chip.kinds[0],
    topology.platform,
    1 if topology.is_tpu else None,
  )


def mesh_of_shapes(
  shape: dict[str, int],
  device_kind: str,
  platform: str,
  num_cores: int | None = None,
) -> AbstractMesh:
  """A mesh of devices that need not be here, for which nothing is compiled.

  Args:
    shape: The axes and their sizes.
    device_kind: As JAX calls the devices.
    platform: See `sharding.platform`.
    num_cores: Of a device, if it is a TPU.
  """
  return AbstractMesh(
    tuple(shape.values()),
    tuple(shape),
    axis_types=(jax.sharding.AxisType.Auto,) * len(shape),
    abstract_device=AbstractDevice(
      device_kind=device_kind, num_cores=num_cores, platform=platform
    ),
  )


def devices(topology: Topology) -> Sequence[Any]:
  """The devices of a TPU's topology, which are only good to compile for.

  Raises:
    ValueError: libtpu is not installed, or knows no such topology.
  """
  if importlib.util.find_spec('libtpu') is None:
    raise ValueError(
      'Compiling for a TPU needs libtpu, which is not installed; pip install '
      "'grpo_jax[tpu]' (no TPU is needed), or give --estimate for arithmetic "
      'alone.'
    )
  for name, value in NO_TPU_HERE.items():
    os.environ.setdefault(name, value)
  _, known_as, more = _TPUS[topology.chip.name]
  if topology.slices > 1:
    more = {**more, 'num_slices': topology.slices}
  shape = 'x'.join(map(str, topology.shape))
  try:
    found = jax_topologies.get_topology_desc(
      f'{known_as}:{shape}', platform='tpu', **more
    )
  except Exception as error:  # of several types
    said = plain_text.first_line(error)
    raise ValueError(
      f'libtpu knows no {topology.slices} x {topology.name} ({said}); give a '
      'topology that exists.'
    ) from error
  return found.devices
