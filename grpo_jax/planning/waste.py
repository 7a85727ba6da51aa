"""What of the machines a run does not use: copies, and devices without work."""

from collections.abc import Iterator
import math
from typing import Any

import jax

from grpo_jax.mesh import sharding
from grpo_jax.planning.arithmetic import Arithmetic
from grpo_jax.planning.topologies import GIB

# What lies along an axis of the parameters, and which parameters have it.
_NAMES = {
  'heads': ('heads', 'the weights of queries and outputs'),
  'kv_heads': ('heads of keys and values', 'their weights'),
  'mlp': ('hidden units of an MLP', 'its weights'),
  'vocab': ('rows of the embedding', 'it'),
  'width': ('numbers of the residual stream', 'the weights'),
  'experts': ('experts', 'they'),
}
_USED = 0.9  # a larger share of devices with work is worth no word


def sentences(counted: Arithmetic, devices: int) -> list[str]:
  """What is held more often than needed, and what has nothing to do.

  Args:
    counted: The run.
    devices: How many there are.
  """
  return [
    *_copies(counted, sampling=False),
    *_copies(counted, sampling=True),
    *_cache(counted),
    *_idle(counted, devices),
  ]


def _copies(counted: Arithmetic, sampling: bool) -> Iterator[str]:
  """Parameters that the mesh does not split, because its size does not divide.

  Args:
    counted: The run.
    sampling: Whether to tell of the sampler's weights, and not the learner's.
  """
  parts = counted.parts
  params = parts.updater.joined(parts.updater.compiled.abstract.params)
  mesh, rules, who = counted.mesh, sharding.RULES, 'The learner'
  if sampling:
    params = parts.engine.decoding_params(params)
    mesh, rules, who = (
      counted.sampling_mesh,
      sharding.DECODING_RULES,
      'Sampling',
    )
  held = split = 0.0
  whole: dict[tuple[str, int, str], None] = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    names = parts.engine.model.logical_axes(
      sharding.path_names(path), len(leaf.shape)
    )
    here = _bytes_here(leaf)
    held, could = held + here, here
    for name, size in zip(names, leaf.shape, strict=True):
      axis = rules.get(name or '')
      if name and axis and size % (number := mesh.shape[axis]):
        whole[name, size, axis] = None
        could /= number
    split += could
  if not whole or held < 1.01 * split:
    return
  reasons = ' and '.join(
    f'{axis}={mesh.shape[axis]} does not divide {size} {_NAMES[name][0]}'
    for name, size, axis in whole
  )
  yield (
    f'{who}: {reasons}, so those weights are replicated: each device holds '
    f'{held / GIB:.2f} GiB of weights, and not {split / GIB:.2f}.'
  )


def _bytes_here(leaf: Any) -> float:
  """Bytes of an array on one device."""
  shape = leaf.sharding.shard_shape(leaf.shape)
  return float(math.prod(shape) * leaf.dtype.itemsize)


def _cache(counted: Arithmetic) -> Iterator[str]:
  heads, tensor = (
    counted.model.num_kv_heads,
    counted.sampling_mesh.shape['tensor'],
  )
  if heads % tensor:
    yield (
      f'Sampling: tensor={tensor} does not divide {heads} heads of keys and '
      f'values, so that their cache is replicated over tensor: '
      f'{counted.cache / GIB:.2f} GiB on each device, and not '
      f'{counted.cache / tensor / GIB:.2f}.'
    )


def _idle(counted: Arithmetic, devices: int) -> Iterator[str]:
  """Who has nothing to do."""
  if rest := devices - counted.mesh.size:
    yield (
      f'Idle: {rest} of {devices} devices are not in the mesh; give '
      '--mesh=data=-1,... for all.'
    )
  shards = counted.schedule.shards
  places = counted.drawn * counted.starts
  if counted.prompts < _USED * places:
    yield (
      f'Idle: {counted.prompts} prompts are drawn on {shards} data shards, so '
      f'that {1 - counted.prompts / places:.0%} of the devices draw nothing; '
      'sample more prompts, or raise config.sampler.tensor.'
    )
