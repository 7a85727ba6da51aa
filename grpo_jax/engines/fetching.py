"""Trained parameters as a job of its own gets them from its learner."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import functools
import math
import time
from typing import Any

import jax
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np

from grpo_jax import models
from grpo_jax.engines import handover
from grpo_jax.engines import offering
from grpo_jax.mesh import crossing
from grpo_jax.models import lora

PULL_SECS = 120.0
"""In which a chunk of pieces must come."""

Ask = Callable[[int, Mapping[str, Any]], Mapping[str, Any]]
"""`(process, wanted)` -> what `Offers.offer` of that process returns."""


class Late(OSError):
  """What was offered has not come."""


class Fetch:
  """Fetches versions, and puts them where decoding reads them.

  All processes of the job fetch the same versions, each its own pieces.

  Args:
    model: Whose parameters.
    trained: Shapes of the trained ones.
    mesh: The devices of this job.
    frozen: The parameters that no update changes, on this mesh; None: there are
      none.
    described: What `Offers.described` of the learner returns.
    ask: Asks a process of the learner.
    host: A name or address of this machine, for transfers.

  Raises:
    ValueError: The learner's parameters are of another model.
  """

  def __init__(
    self,
    model: models.Model,
    trained: Any,
    mesh: Mesh,
    frozen: Any,
    described: Mapping[str, Any],
    ask: Ask,
    host: str,
  ):
    self._ask, self._way, self._host = ask, described['way'], host
    self._put = handover.Put(model, trained, mesh, mesh)
    self._base = None
    if frozen is not None:
      base = handover.Put(model, frozen, mesh, mesh)
      base.publish(frozen, 0)
      self._base = base.fetch(0)
    shapes = self._put.abstract()
    self._treedef = jax.tree.structure(shapes)
    self._leaves = offering.leaves(shapes, described['parts'])
    theirs = [
      offering.Leaf(tuple(one['shape']), *[*one.values()][1:])
      for one in described['arrays']
    ]
    if theirs != self._leaves:
      raise ValueError(
        'The parameters of the learner are not those that the model of its '
        'config has here; give both the same files.'
      )
    self._chunks = offering.chunks(self._leaves)
    self._holders: Sequence[int] = described['holders']
    self._mesh, joint = mesh, math.gcd(described['parts'], mesh.size)
    self._joint = crossing.in_parts(mesh, joint)
    self._server: Any = None
    self._connections: dict[str, Any] = {}

  def land(self, version: int) -> Any:
    """The pieces of a version, joined on the devices of this process.

    Raises:
      Late: They have not come.
      Exception: What `ask` raises.
    """
    landed = []
    for chunk in self._chunks:
      pieces = self._pieces(version, chunk)
      landed += [self._joined(n, pieces) for n in chunk]
    # Now, because who asks next may be told something else.
    return jax.block_until_ready(self._treedef.unflatten(landed))

  def place(self, landed: Any) -> Any:
    """What `Engine.take` takes, of what has landed in all processes."""
    placed = self._put.placed(landed)
    return placed if self._base is None else lora.join(placed, self._base)

  def _mine(self, leaf: offering.Leaf) -> dict[int, list[Any]]:
    """The devices here on which each part of an array is to lie, joined."""
    if leaf.axis is None:
      own = [d for d in self._mesh.devices.flat if _is_here(d)]
      return {0: own} if own else {}
    found = {}
    for part, devices in enumerate(self._joint.devices):
      if own := [device for device in devices if _is_here(device)]:
        found[part] = own
    return found

  def _each(self, leaf: offering.Leaf) -> int:
    """How many parts of an array are joined for a device here."""
    return 1 if leaf.axis is None else leaf.parts // len(self._joint.devices)

  def _pieces(
    self, version: int, numbers: Sequence[int]
  ) -> dict[tuple[int, int], jax.Array]:
    """Pieces of some arrays, by the number of the array and the part."""
    asked: dict[int, dict[tuple[int, int], Any]] = {}
    for n in numbers:
      each = self._each(self._leaves[n])
      for part, devices in self._mine(self._leaves[n]).items():
        for one in range(part * each, (part + 1) * each):
          asked.setdefault(self._holders[one], {})[n, one] = devices[0]
    found: dict[tuple[int, int], jax.Array] = {}
    for holder, wanted in asked.items():
      told = self._ask(holder, {'version': version, 'pieces': [*wanted]})
      reads = self._pulled if self._way == 'transfer' else self._from_file
      arrays = reads(told, wanted)
      found |= dict(zip(wanted, arrays, strict=True))
    return found

  def _pulled(
    self, told: Mapping[str, Any], wanted: Mapping[tuple[int, int], Any]
  ) -> list[jax.Array]:
    """Pieces from the devices of the learner, each for its device here."""
    shapes = [
      jax.ShapeDtypeStruct(
        self._leaves[n].piece,
        self._leaves[n].dtype,
        sharding=jax.sharding.SingleDeviceSharding(device),
      )
      for (n, _), device in wanted.items()
    ]
    if self._server is None:
      self._server = offering.serve_transfers(self._host)
    address = told['address']
    try:
      if address not in self._connections:
        self._connections[address] = self._server.connect(address)
      arrays = self._connections[address].pull(told['uuid'], shapes)
      until = time.monotonic() + PULL_SECS
      # A pull of what is not there any more never ends.
      while not all(x.is_ready() for x in arrays):
        if time.monotonic() > until:
          raise Late(f'No weights have come within {PULL_SECS:.0f} s.')
        time.sleep(0.002)
      jax.block_until_ready(arrays)
    except jax.errors.JaxRuntimeError as error:
      self._connections.pop(address, None)  # the learner has ended
      raise Late(f'No weights have come ({str(error)[:200]}).') from error
    return arrays

  def _from_file(
    self, told: Mapping[str, Any], wanted: Mapping[tuple[int, int], Any]
  ) -> list[jax.Array]:
    """Pieces from a file of one process of the learner."""
    path = told['file']
    try:
      with np.load(path, allow_pickle=False) as file:
        found = []
        for (n, part), device in wanted.items():
          leaf = self._leaves[n]
          number = self._numbers[self._holders[part]][n, part]
          x = file[str(number)].view(jax.numpy.dtype(leaf.dtype))
          found.append(jax.device_put(x.reshape(leaf.piece), device))
    except OSError as error:
      raise Late(
        f'{path} cannot be read here ({error}): weights go through the workdir '
        "(config.generator.weights='files'), which the learner and its "
        'generators must see at the same place.'
      ) from error
    return found

  @functools.cached_property
  def _numbers(self) -> dict[int, dict[tuple[int, int], int]]:
    """The places of pieces in the file of each process of the learner."""
    found: dict[int, dict[tuple[int, int], int]] = {}
    for n, leaf in enumerate(self._leaves):
      for part in range(leaf.parts):
        own = found.setdefault(self._holders[part], {})
        own[n, part] = len(own)
    return found

  def _joined(
    self, n: int, pieces: Mapping[tuple[int, int], jax.Array]
  ) -> jax.Array:
    """An array over the devices of this job, of its pieces."""
    leaf, spec = self._leaves[n], PartitionSpec()
    if leaf.axis is not None:
      spec = PartitionSpec(*[None] * leaf.axis, self._joint.axis_names[0])
    arrays, each = [], self._each(leaf)
    for part, devices in self._mine(leaf).items():
      some = [pieces[n, k] for k in range(part * each, (part + 1) * each)]
      first = some[0] if each == 1 else _joiner(leaf.axis)(some)
      arrays += [first, *(jax.device_put(first, d) for d in devices[1:])]
    place = NamedSharding(self._joint, spec)
    return jax.make_array_from_single_device_arrays(leaf.shape, place, arrays)


def _is_here(device: Any) -> bool:
  return device.process_index == jax.process_index()


@functools.cache
def _joiner(axis: int | None) -> Any:
  return jax.jit(functools.partial(jax.numpy.concatenate, axis=axis))
