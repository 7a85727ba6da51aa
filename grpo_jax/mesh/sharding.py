"""The mesh, which array axis lies on which mesh axis, and how to compile.

The mesh has five axes. Over `data` the parameters are replicated, over `fsdp`
they are sharded, and over `expert` the experts of a mixture lie, while all
other parameters are replicated; these three axes split the rows of a batch.
`context` splits the columns of each row in an update, and `tensor` heads,
hidden units and the vocabulary. An axis that is not used has size 1, so one
device is a mesh too. All axes are `Auto`: the compiler places the collectives,
and the functions here tell it where arrays lie. Where an update is computed,
the first four are taken by hand instead; see `shards.py`.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
from importlib import metadata
import math
from typing import Any
from typing import TypeVar

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import AbstractMesh
from jax.sharding import AxisType
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np

MeshT = TypeVar('MeshT', Mesh, AbstractMesh)

ROW_AXES = ('data', 'fsdp', 'expert')
ALL_AXES = (*ROW_AXES, 'context', 'tensor')

COMPILER_OPTIONS = {'xla_allow_excess_precision': False}
"""For every program that scores or samples.

By default XLA may keep float32 between two bfloat16 operations, and does so
differently in different programs: log-probabilities of the same parameters then
differ by 1e-2, and GSPO clips half of its tokens before anything has moved.
"""

_QUICK = {'xla_backend_optimization_level': 1}
_OLDER_LOOPS = {'xla_cpu_use_fusion_emitters': False}

RULES = {
  'vocab': 'tensor',
  'width': 'fsdp',
  'inputs': 'fsdp',
  'heads': 'tensor',
  'kv_heads': 'tensor',
  'mlp': 'tensor',
  'experts': 'expert',
}
"""Logical parameter axis -> mesh axis; axes not named here are replicated."""

DECODING_RULES = {k: v for k, v in RULES.items() if v != 'fsdp'}
"""`RULES` without `fsdp`: decoding reads every parameter for every token, and
would have to gather it each time."""


def make_mesh(
  data: int = 1,
  fsdp: int = 1,
  tensor: int = 1,
  expert: int = 1,
  slices: int = 1,
  devices: Sequence[Any] | None = None,
  context: int = 1,
) -> Mesh:
  """A mesh over the first of some devices: as many as the sizes multiply to.

  Args:
    data: Copies of the parameters in a slice, each with its share of the rows.
      -1 takes all devices that the other axes leave.
    fsdp: Shards of the parameters, each with its share of the rows.
    tensor: Shards of heads, hidden units and vocabulary.
    expert: Shards of the experts of a mixture, each with its share of the rows.
    slices: Groups of devices, each with copies of its own. Networks between
      slices of a pod, or between groups of machines, are slow, and only sums of
      gradients cross them. In the mesh they are the outer part of `data`.
    devices: Such as those of a topology that is not there, to compile for it;
      None: those of this run.
    context: Parts into which the columns of each row fall in an update, so that
      a device computes only some tokens of a long completion.

  Returns:
    A `Mesh` with Auto axes.

  Raises:
    ValueError: A size is less than 1 (and not `data=-1`), or the product is
      more than the number of devices; or, with `data=-1` or several processes,
      less: with -1 all devices are meant, and a process without devices in the
      mesh would have no part in the run. Or the devices lie in another number
      of slices.
  """
  if devices is None:
    devices, processes = jax.devices(), jax.process_count()
  else:
    processes = len({device.process_index for device in devices})
  shape = mesh_shape(
    len(devices), data, fsdp, tensor, expert, slices, processes, context
  )
  used = devices[: math.prod(shape.values())]
  in_slice = shape['data'] // slices, *list(shape.values())[1:]
  parts = [_placed(in_slice, part) for part in _slices(used, slices)]
  # Auto must be asked for: JAX's default, Explicit, refuses some operations
  # over sharded axes, such as quantiles.
  types = (AxisType.Auto,) * len(shape)
  return Mesh(np.concatenate(parts), tuple(shape), axis_types=types)


def sampling_mesh(mesh: MeshT, tensor: int, slices: int = 1) -> MeshT:
  """The mesh of the sampler: the same devices in the same order.

  Decoding reads every weight for every token. So weights are split over more of
  `tensor` than in an update, which takes over from `fsdp`, and then from
  `data`. Along the rows a device has the same place as in the learner's mesh.
  Rows are not cut into parts, so `context` gives its devices to them.

  Args:
    mesh: The learner's.
    tensor: Shards of heads, hidden units and vocabulary; 0: as in `mesh`.
    slices: See `make_mesh`.

  Raises:
    ValueError: `tensor` does not divide the devices.

  >>> mesh = make_mesh()
  >>> sampling_mesh(mesh, tensor=1) is mesh
  True
  """
  shape = dict(mesh.shape)
  tensor = tensor or shape['tensor']
  if tensor == shape['tensor'] and shape['context'] == 1:
    return mesh
  in_slice = mesh.size // slices // shape['expert']
  if in_slice % tensor:
    raise ValueError(
      f'config.sampler.tensor={tensor} does not divide the {in_slice} devices '
      'over which config.mesh can split heads, hidden units and vocabulary; '
      f'give 0, for config.mesh.tensor, or a divisor of {in_slice}.'
    )
  rest = in_slice * slices // tensor
  data = math.gcd(shape['data'], rest)
  shape |= {'data': data, 'fsdp': rest // data, 'context': 1, 'tensor': tensor}
  sizes, names = tuple(shape.values()), tuple(shape)
  types = (AxisType.Auto,) * len(shape)
  if isinstance(mesh, AbstractMesh):
    device = mesh.abstract_device
    return AbstractMesh(sizes, names, axis_types=types, abstract_device=device)
  return Mesh(mesh.devices.reshape(sizes), names, axis_types=types)


def generating_mesh(
  mesh: Mesh | AbstractMesh,
  number: int,
  tensor: int,
  devices: Sequence[Any] | None = None,
) -> Any:
  """The mesh of a sampler that has devices of its own.

  Args:
    mesh: The learner's.
    number: Of the sampler's devices.
    tensor: Shards of heads, hidden units and vocabulary; 0: as in `mesh`.
    devices: Those devices; None, if `mesh` is abstract.

  Returns:
    A mesh whose experts lie as in `mesh` as far as they can.

  Raises:
    ValueError: `tensor` does not divide the devices.
  """
  tensor = tensor or mesh.shape['tensor']
  if number % tensor:
    raise ValueError(
      f'config.generator.devices={number} with {tensor} shards of heads, '
      'hidden units and vocabulary, which do not divide it; give '
      'config.sampler.tensor=1, or another divisor.'
    )
  expert = math.gcd(mesh.shape['expert'], number // tensor)
  rows = number // tensor // expert
  shape = {'data': rows, 'fsdp': 1, 'expert': expert, 'context': 1}
  sizes, names = (*shape.values(), tensor), (*shape, 'tensor')
  types = (AxisType.Auto,) * len(sizes)
  if isinstance(mesh, AbstractMesh):
    device = mesh.abstract_device
    return AbstractMesh(sizes, names, axis_types=types, abstract_device=device)
  return Mesh(_placed(sizes, list(devices or ())), names, axis_types=types)


def mesh_shape(
  number: int,
  data: int = 1,
  fsdp: int = 1,
  tensor: int = 1,
  expert: int = 1,
  slices: int = 1,
  processes: int = 1,
  context: int = 1,
) -> dict[str, int]:
  """The axes of a mesh and their sizes; see `make_mesh`.

  Args:
    number: Of devices.
    data: See `make_mesh`.
    fsdp: See `make_mesh`.
    tensor: See `make_mesh`.
    expert: See `make_mesh`.
    slices: See `make_mesh`.
    processes: How many processes have the devices.
    context: See `make_mesh`.

  Raises:
    ValueError: See `make_mesh`.

  >>> mesh_shape(16, data=-1, fsdp=4)
  {'data': 4, 'fsdp': 4, 'expert': 1, 'context': 1, 'tensor': 1}
  """
  sizes = f'data={data} x fsdp={fsdp} x tensor={tensor} x expert={expert}'
  sizes = f'slices={slices} x {sizes}' if slices != 1 else sizes
  sizes = f'{sizes} x context={context}' if context != 1 else sizes
  if min(fsdp, tensor, expert, slices, context) < 1 or data < 1 and data != -1:
    raise ValueError(
      f'A mesh cannot have {sizes}; give 1 or more for each (only data may be '
      '-1, for all devices that are left).'
    )
  data_given = data
  if data == -1:  # at least one copy of the parameters
    data = max(1, number // (fsdp * tensor * expert * slices * context))
  wanted = slices * data * fsdp * tensor * expert * context
  if wanted > number:
    raise ValueError(
      f'A mesh of {sizes} needs {wanted} devices, but {number} are present; '
      'change config.mesh.'
    )
  if wanted < number and data_given == -1:
    rest = fsdp * tensor * expert * slices * context
    raise ValueError(
      f'A mesh of {sizes} takes all devices, but the other sizes multiply to '
      f'{rest}, which does not divide the {number} devices; change '
      'config.mesh, or give the number of copies instead of data=-1.'
    )
  if wanted < number and processes > 1:
    raise ValueError(
      f'A mesh of {sizes} leaves {number - wanted} of the {number} devices of '
      f'{processes} processes without work; give config.mesh.data=-1, or '
      'change config.mesh.'
    )
  return {
    'data': slices * data,
    'fsdp': fsdp,
    'expert': expert,
    'context': context,
    'tensor': tensor,
  }


def _placed(shape: tuple[int, ...], devices: list[Any]) -> np.ndarray:
  """The devices of a slice as an array, neighbours beside each other."""
  if devices[0].platform == 'tpu':  # only there the order is not that of JAX
    from jax.experimental import mesh_utils

    # Split, because an axis of 64 needs more than one of 16 x 16 chips. Some
    # of a machine's chips may be no cuboid.
    with contextlib.suppress(AssertionError):
      return mesh_utils.create_device_mesh(
        shape, devices, allow_split_physical_axes=True
      )
  return np.array(devices).reshape(shape)


def _slices(devices: Sequence[Any], slices: int) -> list[list[Any]]:
  """The devices of each slice; where no slices are, groups of processes."""
  of_slice: dict[Any, list[Any]] = {}
  for device in devices:
    # Every machine with GPUs has an index too, though a mesh may span several.
    is_tpu = device.platform == 'tpu'
    index = getattr(device, 'slice_index', None) if is_tpu else None
    of_slice.setdefault(index, []).append(device)
  if len(of_slice) == 1:  # equal parts of one slice, or of what has none
    devices = sorted(devices, key=lambda device: device.process_index)
    size = len(devices) // slices
    return [
      devices[first : first + size] for first in range(0, len(devices), size)
    ]
  if len(of_slice) != slices:
    raise ValueError(
      f'The devices lie in {len(of_slice)} slices, and the mesh has {slices}; '
      f'give config.mesh.slices={len(of_slice)}.'
    )
  return [of_slice[index] for index in sorted(of_slice)]


def platform(mesh: Mesh | AbstractMesh | None = None) -> str:
  """The kind of device that programs are compiled for: cpu, gpu or tpu.

  Not always `jax.default_backend()`: a program for a pod can be compiled on a
  machine that has none.

  Args:
    mesh: A mesh; None: the one in `use`.
  """
  if isinstance(mesh, Mesh):
    return mesh.devices.flat[0].platform
  mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
  device = mesh.abstract_device  # None without a mesh
  return device.platform if device else jax.default_backend()


def quickly(mesh: Mesh | AbstractMesh | None = None) -> dict[str, Any]:
  """Compiler options for a program that has little to compute, or runs once.

  On a CPU the compiler takes 5 to 20 ms for each kernel, and for most kernels
  that is longer than a run computes in them. With less optimization it takes
  two thirds of that. (Level 0 would take a third, but kernels ten times as
  long.) Its loops are the older ones; see `leanly`. Programs for other devices
  are compiled as ever.

  Args:
    mesh: See `platform`.
  """
  return leanly(mesh) | (_QUICK if platform(mesh) == 'cpu' else {})


def leanly(mesh: Mesh | AbstractMesh | None = None) -> dict[str, Any]:
  """Compiler options for a program of hundreds of kernels.

  XLA makes fused loops of a CPU in one of two ways. The newer one has a module
  of LLVM for each, which takes one or two MiB and 10 to 20 ms until the program
  is compiled; the older one needs a third less time and hardly any memory, and
  some of its loops are slower. jaxlib from 0.11 on has the newer one alone, and
  knows no such option.

  Args:
    mesh: See `platform`.
  """
  version = tuple(map(int, metadata.version('jaxlib').split('.')[:2]))
  older = platform(mesh) == 'cpu' and version < (0, 11)
  return COMPILER_OPTIONS | (_OLDER_LOOPS if older else {})


def lower(mesh: Mesh | AbstractMesh, program: Any, *args: Any) -> Any:
  """A jitted function, lowered for the devices of a mesh.

  Args:
    mesh: Without devices, the program is lowered for the platform that the mesh
      names, and cannot be compiled.
    program: What `jax.jit` has returned.
    *args: Of the program, or their shapes.

  Returns:
    A `jax.stages.Lowered`.
  """
  if isinstance(mesh, Mesh):
    return program.lower(*args)
  name = platform(mesh)
  name = {'gpu': 'cuda'}.get(name, name)  # the one name is of two vendors
  return program.trace(*args).lower(lowering_platforms=(name,))


def row_shards(mesh: Mesh | AbstractMesh) -> int:
  """The number of data shards: into how many parts rows are split."""
  return math.prod(mesh.shape[axis] for axis in ROW_AXES)


def on_shard() -> bool:
  """Whether what is traced here runs on each data shard, with its own rows.

  See `learner/row_shards.py`. Arrays then have the shapes that one shard has.
  """
  mesh = jax.sharding.get_abstract_mesh()
  return not mesh.empty and set(ROW_AXES) <= set(mesh.manual_axes)


def replicated(mesh: Mesh) -> NamedSharding:
  """The same array on every device."""
  return NamedSharding(mesh, PartitionSpec())


def rows(mesh: Mesh, axis: int = 0) -> NamedSharding:
  """Rows along `axis` split over the data shards."""
  return NamedSharding(mesh, PartitionSpec(*(None,) * axis, ROW_AXES))


@contextlib.contextmanager
def use(mesh: Mesh | None) -> Iterator[None]:
  """What is traced inside is constrained to this mesh; None: not at all."""
  if mesh is None:
    yield
  else:
    # Not `jax.set_mesh`, which JAX refuses while it traces.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
      yield


def constrain_rows(x: jax.Array, everywhere: bool = False) -> jax.Array:
  """Keeps the first axis split over the data shards.

  Left to itself, the compiler may split activations over the axis that shards
  the parameters, and then moves activations instead of weights. No effect
  without a mesh or `on_shard`, where nothing is left to the compiler.

  Args:
    x: [R,...].
    everywhere: Whether the rows of a data shard are split over `tensor` too.
  """
  if jax.sharding.get_abstract_mesh().empty or on_shard():
    return x
  axes = ALL_AXES if everywhere else ROW_AXES
  return jax.lax.with_sharding_constraint(x, PartitionSpec(axes))


def take_rows(
  parts: Sequence[jax.Array],
  index: jax.Array,
  pieces: int = 1,
  everywhere: bool = False,
) -> jax.Array:
  """Rows of several arrays, on each data shard by itself.

  So nothing is sent between devices, which a compiler could not know.

  Args:
    parts: Arrays [R,...], split over the data shards.
    index: i32[N], split in the same way: which rows of the parts, numbered
      through all of them in this piece of the data shard.
    pieces: Into how many equal pieces the rows of a data shard fall. No row
      moves into another piece.
    everywhere: Whether each device of `tensor` has a piece of its own; then
      `pieces` is 1, because no device has several.

  Returns:
    The rows [N,...].
  """
  mesh = jax.sharding.get_abstract_mesh()

  def take(index, *parts):
    if pieces == 1:
      return jnp.concatenate(parts)[index]
    parts = [x.reshape(pieces, -1, *x.shape[1:]) for x in parts]
    whole, index = jnp.concatenate(parts, axis=1), index.reshape(pieces, -1)
    taken = jax.vmap(lambda x, index: x[index])(whole, index)
    return taken.reshape(-1, *taken.shape[2:])

  if mesh.empty:
    return take(index, *parts)
  rows = PartitionSpec(ALL_AXES if everywhere else ROW_AXES)
  # Left alone with `tensor`, the compiler would split pieces over it.
  alone = ALL_AXES if everywhere or pieces > 1 else ROW_AXES
  return jax.shard_map(
    take, in_specs=rows, out_specs=rows, axis_names=set(alone)
  )(index, *parts)


def put_rows(
  buffer: jax.Array,
  new: jax.Array,
  place: jax.Array,
  axis: int,
  rows: jax.Array | None = None,
) -> jax.Array:
  """Writes into rows of an array, on each data shard by itself.

  Args:
    buffer: [B,...], split over the data shards.
    new: [E,Q,...], split in the same way; what is written, without the axes of
      rows and places.
    place: i32[E,Q], where along `axis`; places behind its end are left out.
    axis: Of the places in `buffer`.
    rows: i32[E], into which rows, numbered on each data shard by itself; None:
      all of them, in their order.

  Returns:
    The array with what is new.
  """

  def put(buffer, new, place, rows=None):
    if rows is None:
      rows = jnp.arange(len(buffer))
    where: list[Any] = [slice(None)] * buffer.ndim
    where[0], where[axis] = rows[:, None], place
    return buffer.at[tuple(where)].set(new, mode='drop')

  given = (buffer, new, place) if rows is None else (buffer, new, place, rows)
  if current_row_shards() == 1:
    return put(*given)
  spec = PartitionSpec(ROW_AXES)
  return jax.shard_map(
    put, in_specs=spec, out_specs=spec, axis_names=set(ROW_AXES)
  )(*given)


def pick_row(x: jax.Array, row: jax.Array) -> jax.Array:
  """One row of an array [B,...], on every data shard.

  Args:
    x: Split over the data shards.
    row: i32[], which one.

  Returns:
    The row [1,...].
  """

  def pick(x, row):
    here, local = _own_row(x, row)
    taken = jnp.where(here, lax.dynamic_slice_in_dim(x, local, 1), 0)
    # XLA aborts on a CPU where narrower numbers are summed inside a shard_map.
    whole = lax.psum(taken.astype(jnp.float32), ROW_AXES)
    return whole.astype(x.dtype)

  if current_row_shards() == 1:
    return lax.dynamic_slice_in_dim(x, row, 1)
  return jax.shard_map(
    pick,
    in_specs=(PartitionSpec(ROW_AXES), PartitionSpec()),
    out_specs=PartitionSpec(),
    axis_names=set(ROW_AXES),
  )(x, row)


def place_row(x: jax.Array, one: jax.Array, row: jax.Array) -> jax.Array:
  """An array [B,...] with another row [1,...]; see `pick_row`."""

  def put(x, one, row):
    here, local = _own_row(x, row)
    old = lax.dynamic_slice_in_dim(x, local, 1)
    new = jnp.where(here, one, old)
    return lax.dynamic_update_slice_in_dim(x, new, local, 0)

  if current_row_shards() == 1:
    return lax.dynamic_update_slice_in_dim(x, one, row, 0)
  rows = PartitionSpec(ROW_AXES)
  return jax.shard_map(
    put,
    in_specs=(rows, PartitionSpec(), PartitionSpec()),
    out_specs=rows,
    axis_names=set(ROW_AXES),
  )(x, one, row)


def _own_row(x: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Whether a row is on this data shard, and its number here, or another."""
  local = row - lax.axis_index(ROW_AXES) * len(x)
  here = (local >= 0) & (local < len(x))
  return here, jnp.clip(local, 0, len(x) - 1)


def constrain_cache(
  x: jax.Array, heads: int, everywhere: bool = False
) -> jax.Array:
  """Keeps a cache f[B,...] split over rows, and over heads if they divide.

  Args:
    x: The cache.
    heads: Its axis of heads.
    everywhere: Whether it is split by rows over all axes instead.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty:
    return x
  spec = cache_spec(mesh, x.shape, heads, everywhere)
  return jax.lax.with_sharding_constraint(x, spec)


def cache_spec(
  mesh: Mesh | AbstractMesh,
  shape: Sequence[int],
  heads: int,
  everywhere: bool = False,
) -> PartitionSpec:
  """Where a cache lies; see `constrain_cache`."""
  if everywhere:
    return PartitionSpec(ALL_AXES)
  axes: list[Any] = [None] * len(shape)
  axes[0] = ROW_AXES
  if shape[heads] % mesh.shape['tensor'] == 0:
    axes[heads] = 'tensor'
  return PartitionSpec(*axes)


def gathered_spec(
  mesh: Mesh | AbstractMesh,
  shape: Sequence[int],
  names: Sequence[str | None],
) -> PartitionSpec:
  """Where a parameter lies once it is gathered over `fsdp`.

  Args:
    mesh: The mesh.
    shape: Of the parameter.
    names: Its logical axes.
  """
  return _spec(mesh, shape, names, DECODING_RULES)


def _spec(mesh, shape, names, rules) -> PartitionSpec:
  """The mesh axis of each array axis; None if it does not divide the size."""
  axes = [rules.get(name) if name else None for name in names]
  return PartitionSpec(
    *(
      axis if axis is not None and size % mesh.shape[axis] == 0 else None
      for size, axis in zip(shape, axes, strict=True)
    )
  )


def current_row_shards() -> int:
  """Over how many data shards the rows at hand are split.

  `row_shards` of the mesh in `use`; 1 without one, and `on_shard`.
  """
  mesh = jax.sharding.get_abstract_mesh()
  return 1 if mesh.empty or on_shard() else row_shards(mesh)


def path_names(path: Any) -> tuple[str, ...]:
  """A `jax.tree_util` key path as plain names."""
  # The key of a dict is in `key`, the place in a list in `idx`.
  return tuple(str(getattr(k, 'key', getattr(k, 'idx', k))) for k in path)


def param_shardings(
  mesh: Mesh,
  params: Any,
  logical_axes: Callable[[tuple[str, ...], int], tuple[str | None, ...]],
  rules: Mapping[str, str] = RULES,
) -> Any:
  """The sharding of each parameter.

  Args:
    mesh: From `make_mesh`.
    params: The parameters, or their shapes.
    logical_axes: From a parameter's path and rank to the names of its axes.
    rules: From these names to mesh axes.

  Returns:
    A tree of `NamedSharding`. An axis whose size its mesh axis does not divide
    is replicated (two key-value heads on four tensor shards, say).
  """

  def one(path, leaf):
    names = logical_axes(path_names(path), leaf.ndim)
    return NamedSharding(mesh, _spec(mesh, leaf.shape, names, rules))

  return jax.tree_util.tree_map_with_path(one, params)


def beside(
  mesh: Mesh, shape: Sequence[int], names: Sequence[str | None]
) -> NamedSharding:
  """Where an array lies that an optimizer keeps for a parameter.

  Args:
    mesh: The mesh.
    shape: Of the array. If it has the rank of the parameter, each axis lies
      where that of the parameter does, unless its size (1, say) does not
      divide. Of another rank, the longest axis is split over `fsdp`.
    names: The logical axes of the parameter.
  """
  if len(shape) != len(names):
    longest = max(range(len(shape)), key=lambda axis: shape[axis], default=None)
    names = ['width' if i == longest else None for i in range(len(shape))]
  return NamedSharding(mesh, _spec(mesh, shape, names, RULES))
