"""What of the machines a run does not use: copies, and devices without work."""

from collections.abc import Iterable
from collections.abc import Iterator
import math
from typing import Any
from typing import NamedTuple

import jax

from grpo_jax.mesh import sharding
from grpo_jax.planning.arithmetic import Arithmetic
from grpo_jax.planning.topologies import GIB

# What a logical axis of the parameters counts.
_COUNTED = {
  'heads': 'heads',
  'kv_heads': 'heads of keys and values',
  'mlp': 'hidden units',
  'vocab': 'rows of the vocabulary',
  'width': 'numbers of the residual stream',
  'experts': 'experts',
}
_WORTH = 1.01  # smaller copies are worth no word
_USED = 0.9  # nor is a larger share of devices with work


class _Whole(NamedTuple):
  """An axis of parameters that its axis of the mesh does not divide."""

  axis: str  # of the mesh
  size: int
  counted: str


def sentences(
  counted: Arithmetic, devices: int, drawing: Arithmetic | None = None
) -> list[str]:
  """What is held more often than needed, and what has nothing to do.

  Args:
    counted: The run; what learns, if jobs sample.
    devices: How many there are for it.
    drawing: What a job draws with; None: the run samples itself.
  """
  drawing = drawing or counted
  axes = drawing.parts.engine.model.logical_axes
  read = drawing.parts.engine.decoding_params(_params(drawing))
  mesh, sampling = counted.mesh, drawing.sampling_mesh
  learning = [
    *_copies('The learner', _params(counted), axes, mesh, sharding.RULES),
    *_idle(counted, devices),
  ]
  if counted.served:
    return learning
  return [
    *learning,
    *_copies('Sampling', read, axes, sampling, sharding.DECODING_RULES),
    *_cache(drawing),
    *_drawing_nothing(drawing),
  ]


def _params(counted: Arithmetic) -> Any:
  """All parameters of the learner, as shapes."""
  updater = counted.parts.updater
  return updater.joined(updater.compiled.abstract.params)


def _copies(
  who: str, params: Any, logical_axes: Any, mesh: Any, rules: Any
) -> Iterator[str]:
  """Parameters that the mesh would split if its sizes divided theirs."""
  held = split = 0.0
  whole: set[_Whole] = set()
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    shape = leaf.sharding.shard_shape(leaf.shape)
    here = could = float(math.prod(shape) * leaf.dtype.itemsize)
    names = logical_axes(sharding.path_names(path), len(leaf.shape))
    for name, size in zip(names, leaf.shape, strict=True):
      axis = rules.get(name)
      if axis and size % mesh.shape[axis]:
        whole.add(_Whole(axis, size, _COUNTED[name]))
        could /= mesh.shape[axis]
    held, split = held + here, split + could
  if held < _WORTH * split:
    return
  reasons = ' and '.join(
    f'{axis}={mesh.shape[axis]} {_not_divided(sizes)}'
    for axis in sorted({one.axis for one in whole})
    if (sizes := [one for one in whole if one.axis == axis])
  )
  yield (
    f'{who}: {reasons}, so these weights are replicated: each device holds '
    f'{held / GIB:.2f} GiB of weights, and not {split / GIB:.2f}.'
  )


def _not_divided(several: Iterable[_Whole]) -> str:
  """'divides neither 28 heads nor 4 heads of keys and values'."""
  sizes = [
    f'{one.size:,} {one.counted}' for one in sorted(several, reverse=True)
  ]
  if len(sizes) == 1:
    return f'does not divide {sizes[0]}'
  return f'divides neither {" nor ".join(sizes)}'


def _cache(counted: Arithmetic) -> Iterator[str]:
  """The cache of a sampler, if each of several devices holds all of it."""
  heads = counted.model.shared_kv_heads
  mesh = counted.sampling_mesh
  tensor = mesh.shape['tensor']
  # Where there are enough rows, each device has the caches of some of them.
  by_rows = not counted.pools and counted.schedule.shards > sharding.row_shards(
    mesh
  )
  if heads % tensor and not by_rows:
    yield (
      f'Sampling: tensor={tensor} does not divide {heads} heads of keys and '
      'values, so their cache is replicated: each device holds '
      f'{counted.cache / GIB:.2f} GiB of it, and not '
      f'{counted.cache / tensor / GIB:.2f}.'
    )


def _idle(counted: Arithmetic, devices: int) -> Iterator[str]:
  """Devices that have nothing to do."""
  used = counted.mesh.size + counted.config.generator.devices
  if rest := devices - used:
    yield (
      f'Idle: {rest} of {devices} devices are not in the mesh; give data=-1 '
      'for all.'
    )


def _drawing_nothing(counted: Arithmetic) -> Iterator[str]:
  """Devices that sample, and have no row to draw."""
  places = counted.drawn * counted.starts
  if counted.prompts < _USED * places:
    yield (
      f'Idle: {counted.prompts} prompts lie on {counted.schedule.shards} data '
      f'shards, so that {1 - counted.prompts / places:.0%} of the devices draw '
      'nothing; sample more prompts, or raise config.sampler.tensor.'
    )
