"""Trained parameters on their way from the learner to what samples.

The learner publishes a version, and goes on at once; what samples fetches the
version that it needs. Between the two lies a snapshot: cast to the dtypes in
which decoding reads it, in single layers, and cut over the devices that sample.
With adapters it has these alone. What is not trained goes there once.
"""

from collections.abc import Collection
import functools
import threading
from typing import Any
from typing import NamedTuple
from typing import Protocol

import jax

from grpo_jax import models
from grpo_jax.engines.local import prepare
from grpo_jax.mesh import crossing
from grpo_jax.mesh import sharding
from grpo_jax.models import foreign
from grpo_jax.models import lora


class Weights(Protocol):
  """Snapshots of the trained parameters, by their versions.

  One thread publishes, and another may fetch and drop meanwhile.
  """

  def publish(self, params: Any, version: int) -> None:
    """Takes a snapshot; does not wait for whoever fetches it.

    Args:
      params: Trained parameters. They may be donated once this has returned.
      version: How many rollouts they have learned from.
    """
    ...

  def fetch(self, version: int) -> Any:
    """What `Engine.take` takes, of a version whose snapshot is there."""
    ...

  def drop(self, needed: Collection[int]) -> None:
    """Frees all snapshots but those of some versions."""
    ...

  def snapshot(self, version: int) -> Any:
    """The snapshot of a version, for a checkpoint."""
    ...

  def restore(self, version: int, snapshot: Any) -> None:
    """Takes the snapshot of a version from a checkpoint."""
    ...

  def abstract(self) -> Any:
    """Shapes, dtypes and shardings of a snapshot."""
    ...


class _Route(NamedTuple):
  """How some of the learner's parameters go to what samples.

  Attributes:
    send: Takes them to the devices that sample.
    shapes: Of what arrives.
    landed: Where that lies.
    place: Where decoding reads it.
  """

  send: Any
  shapes: Any
  landed: Any
  place: Any


class Put:
  """`Weights` of a learner and a sampler in one process.

  They share one device, or have none together. A device gets programs from the
  thread that it belongs to: those that cut, in `publish`, run where the learner
  is, and those that put parts together, in `fetch`, where the sampler is.

  Args:
    model: Whose parameters.
    trained: Shapes, dtypes and shardings of the trained ones.
    near: The learner's mesh.
    far: The sampler's.
    frozen: The parameters that no update changes; None: there are none.
  """

  def __init__(
    self,
    model: models.Model,
    trained: Any,
    near: jax.sharding.Mesh,
    far: jax.sharding.Mesh,
    frozen: Any = None,
  ):
    self._model, self._near, self._far = model, near, far
    self._route = self._made(trained)
    self._frozen, self._base = frozen, None
    self._under_way: Any = None
    self._snapshots: dict[int, Any] = {}
    self._lock = threading.Lock()

  def publish(self, params: Any, version: int) -> None:
    """See `Weights`."""
    if self._base is None and self._frozen is not None:
      self._base = self._made(self._frozen).send(self._frozen)
    snapshot = self._route.send(params)
    with self._lock:
      self._snapshots[version] = snapshot

  def fetch(self, version: int) -> Any:
    """See `Weights`."""
    with self._lock:
      snapshot = self._snapshots[version]
    placed = self.placed(snapshot)
    if self._base is None:
      return placed
    if self._frozen is not None:  # once; the learner keeps its own
      place = self._made(self._frozen).place
      self._base, self._frozen = _placed(self._base, place), None
    return lora.join(placed, self._base)

  def placed(self, landed: Any) -> Any:
    """A snapshot where decoding reads it, but for what is not trained."""
    return _placed(landed, self._route.place)

  def drop(self, needed: Collection[int]) -> None:
    """See `Weights`."""
    with self._lock:
      self._snapshots = {
        version: one
        for version, one in self._snapshots.items()
        if version in needed
      }

  def snapshot(self, version: int) -> Any:
    """See `Weights`; on the host, because others use the sampler's devices."""
    with self._lock:
      snapshot = self._snapshots[version]
    return snapshot if self._near == self._far else jax.device_get(snapshot)

  def restore(self, version: int, snapshot: Any) -> None:
    """See `Weights`."""
    with self._lock:
      self._snapshots[version] = snapshot

  def abstract(self) -> Any:
    """See `Weights`."""
    return jax.tree.map(
      lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at),
      self._route.shapes,
      self._route.landed,
    )

  def _made(self, params: Any) -> _Route:
    """The route of some parameters, which may be shapes."""
    sends, model = self._sent, self._model
    if isinstance(model, foreign.Foreign):
      shapes = jax.eval_shape(model.sampler_params, params)
      place = sharding.param_shardings(
        self._far, shapes, model.logical_axes, sharding.DECODING_RULES
      )
      way = crossing.crossing(self._near, self._far, shapes, place)
      cut = jax.jit(model.sampler_params, out_shardings=way.near)
      return _Route(lambda x: sends(cut(x), way.far), shapes, way.far, place)
    assert isinstance(model, models.Transformer)
    shapes = jax.eval_shape(
      functools.partial(prepare.sampler_params, model), params
    )
    place = prepare.decoding_shardings(model, params, self._far)
    way = crossing.crossing(self._near, self._far, shapes, place)
    program = functools.partial(prepare.cut_program, model, sends)
    send = prepare.Layerwise(model, params, program, way.near, way.far)
    return _Route(send, shapes, way.far, place)

  def _sent(self, tree: Any, far: Any) -> Any:
    """Sends a layer, once the one before is there.

    So the devices that learn need room for two layers on their way.
    """
    if self._near == self._far:
      return tree
    jax.block_until_ready(self._under_way)
    self._under_way = sent = crossing.send(tree, far)
    return sent


def _placed(landed: Any, place: Any) -> Any:
  """What has landed, as decoding reads it; entry by entry, layer by layer."""
  found: dict[str, Any] = {}
  for name, x in landed.items():
    if isinstance(x, list):
      found[name] = list(map(_move, x, place[name]))
    else:
      found[name] = _move(x, place[name])
  return found


def _move(tree: Any, place: Any) -> Any:
  """A tree where it is to lie; what lies there already is not copied."""
  if [x.sharding for x in jax.tree.leaves(tree)] == jax.tree.leaves(place):
    return tree
  places, treedef = jax.tree.flatten(place)
  return _mover(treedef, tuple(places))(tree)


@functools.lru_cache(maxsize=256)
def _mover(treedef: Any, places: tuple[Any, ...]) -> Any:
  """The program that moves; layers of one kind share it."""
  return jax.jit(lambda tree: tree, out_shardings=treedef.unflatten(places))
