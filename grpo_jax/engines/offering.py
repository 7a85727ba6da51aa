"""Snapshots of trained parameters, offered to jobs on other machines.

A snapshot is cut into as many parts as the learner has devices; see
`mesh.crossing`. A job asks for pieces, some parts of some arrays, and gets them
from device to device through `jax.experimental.transfer`, or from a file. So
each piece goes once to each process that asks for it, and no program spans both
sides. The learner never waits: what it offers is a copy that no update changes,
and an offer that nobody takes is forgotten after a while. Then the memory is
free, once no rollout needs the version.
"""

from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import datetime
import math
import os
import pathlib
import secrets
import threading
from typing import Any
from typing import NamedTuple
from typing import Protocol

import jax
from jax.sharding import Mesh
import numpy as np

from grpo_jax.engines import handover
from grpo_jax.mesh import crossing

OFFER_SECS = 120.0
"""After which an offer is forgotten that nobody has taken."""
_CHUNK_BYTES = 64 << 20  # of a piece of arrays that go together, at most
_SUFFIX = '.weights.npz'


class Dropped(LookupError):
  """There is no snapshot of that version, or none any more."""


class Leaf(NamedTuple):
  """An array of a snapshot, and how it is cut.

  Attributes:
    shape: Of all of it.
    dtype: Its name.
    axis: That is cut; None: it is whole on each device.
    parts: Into how many it is cut.
  """

  shape: tuple[int, ...]
  dtype: str
  axis: int | None
  parts: int

  @property
  def piece(self) -> tuple[int, ...]:
    """The shape of a part."""
    return tuple(
      size // self.parts if axis == self.axis else size
      for axis, size in enumerate(self.shape)
    )


def leaves(shapes: Any, parts: int) -> list[Leaf]:
  """How the arrays of a snapshot are cut, in the order of its leaves.

  Args:
    shapes: Of a snapshot.
    parts: Into how many devices of the learner it is cut.
  """
  found = []
  for x in jax.tree.leaves(shapes):
    spec = crossing.cut(x.shape, parts) if parts > 1 else ()
    axis = len(spec) - 1 if spec else None
    name, shape = jax.numpy.dtype(x.dtype).name, tuple(x.shape)
    found.append(Leaf(shape, name, axis, 1 if axis is None else parts))
  return found


def chunks(every: Sequence[Leaf]) -> list[list[int]]:
  """The numbers of the leaves that go together, one chunk after another."""
  found: list[list[int]] = []
  size = 0
  for number, leaf in enumerate(every):
    own = math.prod(leaf.piece) * jax.numpy.dtype(leaf.dtype).itemsize
    if not found or size + own > _CHUNK_BYTES:
      found.append([])
      size = 0
    found[-1].append(number)
    size += own
  return found


Pieces = Sequence[Callable[[], jax.Array]]
"""Functions that return arrays of one device each."""


class Way(Protocol):
  """How pieces go to who has asked for them."""

  name: str

  def offer(self, version: int, pieces: Pieces) -> dict[str, Any]:
    """Offers pieces; what is told to who has asked, for JSON."""
    ...

  def drop(self, needed: Collection[int]) -> None:
    """Frees all versions but some."""
    ...

  def close(self) -> None:
    """Frees all."""
    ...


class Transfer:
  """From device to device, by `jax.experimental.transfer`.

  Args:
    host: A name or address of this machine, at which others reach it.

  Raises:
    Exception: JAX cannot do it with these devices.
  """

  name = 'transfer'

  def __init__(self, host: str):
    self._server = serve_transfers(host)
    self.address = self._server.address()

  def offer(self, version: int, pieces: Pieces) -> dict[str, Any]:
    """See `Way`."""
    del version
    uuid = secrets.randbits(62)
    until = datetime.datetime.now() + datetime.timedelta(seconds=OFFER_SECS)
    self._server.await_pull(uuid, [piece() for piece in pieces], until)
    return {'address': self.address, 'uuid': uuid}

  def drop(self, needed: Collection[int]) -> None:
    """See `Way`; offers are forgotten by themselves."""

  def close(self) -> None:
    """See `Way`."""


def serve_transfers(host: str) -> Any:
  """A server of `jax.experimental.transfer`, which who pulls needs too."""
  from jax.experimental import transfer

  client: Any = jax.local_devices()[0].client
  shown = f'[{host}]' if ':' in host else host
  return transfer.start_transfer_server(client, f'{shown}:0', [f'{shown}:0'])


class Files:
  """Through a folder that both sides see: a file for a process and a version.

  It is written when it is asked for, in the thread that answers.

  Args:
    folder: The folder; it is made.
  """

  name = 'files'

  def __init__(self, folder: str | os.PathLike):
    self._folder = pathlib.Path(folder).absolute()
    self._own = f'{secrets.token_hex(4)}-{jax.process_index()}'
    self._lock = threading.Lock()
    self._folder.mkdir(parents=True, exist_ok=True)
    for left in self._folder.glob(f'*-{jax.process_index()}-*{_SUFFIX}*'):
      with contextlib.suppress(OSError):  # of a start that was killed
        left.unlink()

  def offer(self, version: int, pieces: Pieces) -> dict[str, Any]:
    """See `Way`.

    Raises:
      OSError: The file cannot be written.
    """
    path = self._folder / f'{self._own}-{version}{_SUFFIX}'
    with self._lock:
      if not path.exists():
        self._write(path, pieces)
    return {'file': str(path)}

  def _write(self, path: pathlib.Path, pieces: Pieces) -> None:
    """Writes all that this process has of a version, all or nothing."""
    beside = path.with_name(path.name + '.tmp')
    try:
      with beside.open('wb') as file:
        # As bytes, because NumPy's files do not know bfloat16.
        arrays: dict[str, Any] = {
          str(number): np.frombuffer(np.asarray(piece()).tobytes(), np.uint8)
          for number, piece in enumerate(pieces)
        }
        np.savez(file, **arrays)
        file.flush()
        os.fsync(file.fileno())
      os.replace(beside, path)
    finally:
      with contextlib.suppress(OSError):
        beside.unlink(missing_ok=True)

  def drop(self, needed: Collection[int]) -> None:
    """See `Way`."""
    for path in self._folder.glob(f'{self._own}-*{_SUFFIX}'):
      version = path.name.removesuffix(_SUFFIX).rpartition('-')[2]
      if int(version) not in needed:
        with contextlib.suppress(OSError):
          path.unlink()

  def close(self) -> None:
    """See `Way`."""
    self.drop(())
    with contextlib.suppress(OSError):
      self._folder.rmdir()


class Offers:
  """Snapshots of a learner whose generators are jobs; see `handover.Weights`.

  The thread of the learner publishes and drops; threads that answer offer.

  Args:
    model: Whose parameters.
    trained: Shapes, dtypes and shardings of the trained ones.
    mesh: The learner's.
  """

  def __init__(self, model: Any, trained: Any, mesh: Mesh):
    self._put = handover.Put(model, trained, mesh, mesh)
    self._devices = list(mesh.devices.flat)
    self.publish, self.snapshot = self._put.publish, self._put.snapshot
    self.restore, self.abstract = self._put.restore, self._put.abstract
    self.leaves = leaves(self.abstract(), mesh.size)
    self.way: Way | None = None  # until the door opens

  def drop(self, needed: Collection[int]) -> None:
    """See `Weights`."""
    self._put.drop(needed)
    if self.way is not None:
      self.way.drop(needed)

  def described(self) -> dict[str, Any]:
    """What a job must know to ask for pieces, for JSON."""
    assert self.way is not None
    return {
      'way': self.way.name,
      'parts': len(self._devices),
      'arrays': [leaf._asdict() for leaf in self.leaves],
      # The process that has each part.
      'holders': [device.process_index for device in self._devices],
    }

  def offer(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Offers what a job asks for; in any thread.

    Args:
      wanted: 'version', and in 'pieces' pairs of the number of an array and of
        a part of it that this process has.

    Raises:
      Dropped: There is no such version now.
      ValueError: There is no such piece here.
      OSError: A file cannot be written.
    """
    assert self.way is not None
    version = wanted['version']
    try:
      arrays = jax.tree.leaves(self.snapshot(version))
    except KeyError:
      raise Dropped(f'There is no version {version} now.') from None
    places = [self._at(*one) for one in wanted['pieces']]

    def piece(number: int, device: Any) -> jax.Array:
      shards = arrays[number].addressable_shards
      return next(shard.data for shard in shards if shard.device == device)

    if self.way.name == 'files':  # all that this process has
      places = self._own()
    return self.way.offer(version, [lambda at=at: piece(*at) for at in places])

  def _at(self, number: Any, part: Any) -> tuple[int, Any]:
    """The number of an array, and the device that has a part of it."""
    if 0 <= number < len(self.leaves):
      if 0 <= part < self.leaves[number].parts:
        device = self._devices[part]
        if device.process_index == jax.process_index():
          return number, device
    raise ValueError('There is no such piece here.')

  def _own(self) -> list[tuple[int, Any]]:
    """All pieces that this process has, in the order of arrays and parts."""
    return [
      (number, device)
      for number, leaf in enumerate(self.leaves)
      for device in self._devices[: leaf.parts]
      if device.process_index == jax.process_index()
    ]

  def close(self) -> None:
    """Frees what was offered."""
    if self.way is not None:
      self.way.close()
