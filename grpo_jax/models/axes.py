"""The names of the axes of each parameter, by its name.

`sharding.RULES` says which axis of the mesh splits which of them.
"""

from typing import Any

import jax

from grpo_jax.mesh import shards
from grpo_jax.models import lora

# Scales of norms are not here: every device has them.
_LAYER_AXES = {
  'embedding': ('vocab', 'width'),
  'head': ('width', 'vocab'),
  'query': ('width', 'heads', None),
  'key': ('width', 'kv_heads', None),
  'value': ('width', 'kv_heads', None),
  'output': ('heads', None, 'width'),
  'query_bias': ('heads', None),
  'key_bias': ('kv_heads', None),
  'value_bias': ('kv_heads', None),
  'gate': ('width', 'mlp'),
  'up': ('width', 'mlp'),
  'down': ('mlp', 'width'),
}
_EXPERT_AXES = {
  'router': ('width', None),
  'gate': ('experts', 'width', 'mlp'),
  'up': ('experts', 'width', 'mlp'),
  'down': ('experts', 'mlp', 'width'),
}


def names(path: tuple[str, ...]) -> tuple[str | None, ...]:
  """The logical axes of a parameter, but for the one that stacks layers.

  Args:
    path: Where the parameter is in the tree of `Transformer.init`, or the last
      part of that: the experts of a layer need `'experts'` before their name.
  """
  name = path[-1]
  if 'experts' in path[:-1]:
    return _EXPERT_AXES[name]
  if not lora.trains((name,)):
    return _LAYER_AXES.get(name, ())
  weight = _LAYER_AXES[name[:-2]]
  inputs = 2 if name.startswith('output') else 1
  # The rank of an adapter is small, and never split.
  if name.endswith('_a'):
    return (*weight[:inputs], None)
  return (None, *weight[inputs:])


def gather(
  x: jax.Array, path: tuple[str, ...], width: int, dtype: Any
) -> jax.Array:
  """A parameter of one layer, or of none, whole over `fsdp`.

  Args:
    x: The parameter. `sharding.on_shard`, its axis of the model's width may be
      the part of one shard.
    path: Its place in the tree, as in `names`.
    width: The width of the model.
    dtype: In which parts of matrices are sent. Routers are sent as they are:
      they compute in float32.

  Returns:
    The parameter in its own dtype, and `x` itself if nothing is missing.
  """
  axes = names(path)
  if 'width' not in axes or x.shape[axes.index('width')] == width:
    return x
  spec = shards.spec_of(x.shape, axes)
  return shards.gather(x, spec, None if path[-1] == 'router' else dtype)
