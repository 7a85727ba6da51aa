"""The names of the axes of each parameter, by its name.

`sharding.RULES` says which axis of the mesh splits which of them.
"""

from typing import Any
from typing import NamedTuple

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
  'output_bias': ('width',),
  'sinks': ('heads',),
  'head_gate': ('width', 'heads', None),
  'shared_gate': ('width', None),
  'gate': ('width', 'mlp'),
  'up': ('width', 'mlp'),
  'down': ('mlp', 'width'),
  'input_gate': ('width', None),
  'input_down': (None, 'width'),
  'input_table': ('vocab', 'inputs'),
  'input_projection': ('width', None),
  # Of layers with a state.
  'before': ('width', 'mlp'),
  'behind': ('width', 'mlp'),
  'inward': ('width', 'mlp'),
  'outward': ('mlp', 'width'),
  'taps': (None, 'mlp'),
  'rate': ('width', 'heads'),
  'decay': ('width', 'heads'),
  'query_taps': (None, 'heads', None),
  'key_taps': (None, 'kv_heads', None),
  'value_taps': (None, 'kv_heads', None),
  'log_decay': ('heads',),
  'decay_bias': ('heads',),
}
_EXPERT_AXES = {
  'router': ('width', None),
  'input_scale': (None,),
  'output_scale': (None,),
  'gate': ('experts', 'width', 'mlp'),
  'up': ('experts', 'width', 'mlp'),
  'down': ('experts', 'mlp', 'width'),
  'router_bias': (None,),
  'correction_bias': (None,),
  'gate_bias': ('experts', 'mlp'),
  'up_bias': ('experts', 'mlp'),
  'down_bias': ('experts', 'width'),
}
FROZEN = ('input_table',)
"""What no update changes, with adapters or without."""
QUANTIZED = 'codes', 'scales'
"""Parts of a weight, which have its axes; see `quantized`."""


class MatrixAxes(NamedTuple):
  """The axes of a parameter as a linear map, counted from its last (-1).

  An axis that is not named numbers layers or experts.

  Attributes:
    inputs: Axes that the map sums over; () for a bias or the scale of a norm.
    outputs: Axes of what it gives.
    hidden: Whether both sides are hidden units; False for an embedding and for
      the output layer.
  """

  inputs: tuple[int, ...]
  outputs: tuple[int, ...]
  hidden: bool = True


def names(path: tuple[str, ...]) -> tuple[str | None, ...]:
  """The logical axes of a parameter, but for the one that stacks layers.

  Args:
    path: Where the parameter is in the tree of `Transformer.init`, or the last
      part of that: the experts of a layer need `'experts'` before their name.
  """
  name = path[-2] if path[-1] in QUANTIZED else path[-1]
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


def matrix(path: tuple[str, ...]) -> MatrixAxes:
  """Which axes of a parameter are inputs and outputs; see `names`.

  The heads and the entries of each are one side together. A bias or a scale
  sums over nothing: the axes that it has in one layer are outputs.
  """
  name, found = path[-1], names(path)
  number = len(found) or 1  # scales have no names
  if found and found[0] == 'experts':
    number -= 1
  inputs = 2 if name in ('output', 'output_a') else 1
  if is_vector(name) or not found:
    inputs = 0
  places = tuple(range(-number, 0))
  hidden = name not in ('embedding', 'head', 'input_table')
  return MatrixAxes(places[:inputs], places[inputs:], hidden)


def is_vector(name: str) -> bool:
  """Whether a parameter with axes sums over nothing, as a matrix does."""
  ends = '_bias', '_scale', 'taps'
  return name.endswith(ends) or name in ('sinks', 'log_decay')


def gather(
  x: jax.Array, path: tuple[str, ...], width: int, dtype: Any
) -> jax.Array:
  """A parameter of one layer, or of none, whole over `fsdp`.

  Args:
    x: The parameter. `sharding.on_shard`, its axis of the model's width may be
      the part of one shard.
    path: Its place in the tree, as in `names`.
    width: The width of the model.
    dtype: In which parts of matrices are sent. Routers and biases are sent as
      they are: routers compute in float32.

  Returns:
    The parameter in its own dtype, and `x` itself if nothing is missing.
  """
  axes = names(path)
  if path[-1] in QUANTIZED:  # `quantized.Weight` gathers them
    return x
  if 'width' not in axes or x.shape[axes.index('width')] == width:
    return x
  spec = shards.spec_of(x.shape, axes)
  exact = path[-1] == 'router' or is_vector(path[-1])
  return shards.gather(x, spec, None if exact else dtype)
