"""From the files of a model onto the devices, one tensor at a time.

A parameter whose layers are stacked is made on the devices, empty, and each
layer is written into it there. A tensor crosses as it is stored, each device's
part of it, and is made ours behind that: so the host never holds more than one
tensor (of experts: one kernel of all experts of a layer), and the work is done
where it is fast.
"""

from collections.abc import Callable
import dataclasses
import functools
import gc
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np

from grpo_jax.models.config import ModelConfig
from grpo_jax.models.weights.families import Layout
from grpo_jax.models.weights.families import Parameter
from grpo_jax.models.weights.families import parameters
from grpo_jax.models.weights.source import Source

Array = jax.Array


def load(
  source: Source,
  config: ModelConfig,
  place: Any = None,
  dtype: str = 'float32',
  rounded: bool = False,
) -> dict[str, Any]:
  """The parameters of a pretrained model.

  Args:
    source: See `source`.
    config: Its `config`, or one that differs in how the model is computed.
    place: A tree of `NamedSharding`, as `sharding.param_shardings` makes it.
      None puts everything on the first device.
    dtype: Of matrices: `'float32'`, or `'bfloat16'` for weights that are not
      trained. Scales and biases are float32.
    rounded: Whether `dtype` may have fewer bits than what is stored.

  Returns:
    The tree of `Transformer.init`, without adapters.

  Raises:
    ValueError: A tensor is missing, is one too many, or has another shape than
      the model says; or `dtype` would lose bits of the weights.
  """
  wanted, tree = parameters(config, source.tensors)
  _check_names(source, config, wanted)
  _check_each(source, wanted, dtype, rounded)
  structure = jax.tree.structure(tree)
  places = [None] * len(wanted)
  if place is not None:
    places = structure.flatten_up_to(place)
  return structure.unflatten(
    _load(source, parameter, np.dtype(dtype), where)
    for parameter, where in zip(wanted, places, strict=True)
  )


def _load(
  source: Source,
  parameter: Parameter,
  dtype: np.dtype,
  place: NamedSharding | None,
) -> Array:
  """One parameter, all its layers."""
  if not parameter.is_matrix:
    dtype = np.dtype(np.float32)
  layout = _crossing(parameter.layout)
  write = _compiled(layout, parameter.shape, dtype, place)

  def written(stack: Array | None, i: int) -> Array:
    stored = _read(source, parameter, parameter.names[i], layout, place)
    # JAX lets go of an array of NumPy at the next collection of garbage. This
    # one goes before memory is taken for what is made of it, or, where the
    # device uses the same memory, before the next one is read.
    jax.block_until_ready(stored)
    gc.collect(0)
    result = jax.block_until_ready(write(stack, stored, i))
    del stored
    gc.collect(0)
    return result

  if parameter.layers is None:
    return written(None, 0)
  shape = (len(parameter.layers), *parameter.shape)
  empty = jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=place)
  stack = empty()
  for i in range(len(parameter.layers)):
    stack = written(stack, i)
  return stack


def _crossing(layout: Layout) -> Layout:
  """The layout in which a tensor is put onto the devices.

  As it is stored; but on a CPU, XLA's transposition takes four times as long as
  that which JAX does on the way of an array of NumPy.
  """
  if jax.default_backend() != 'cpu' or layout.interleaved:
    return layout
  return dataclasses.replace(layout, transposed=False)


def _read(
  source: Source,
  parameter: Parameter,
  names: tuple[str, ...],
  layout: Layout,
  place: NamedSharding | None,
) -> Array:
  """The tensors of one layer's parameter, on the devices.

  Args:
    source: See `load`.
    parameter: The parameter.
    names: Of its tensors: one, or one of each expert.
    layout: That of the result, from `_crossing`.
    place: Where the parameter is to be.

  Returns:
    f[...], sharded like the parameter.
  """
  shape = layout.stored_shape(parameter.shape)
  turned = layout.transposed != parameter.layout.transposed

  @functools.cache  # several devices may have the same part
  def part(bounds: tuple[tuple[int, int], ...]) -> np.ndarray:
    index = tuple(slice(*bound) for bound in bounds)
    if turned:
      index = (*index[:-2], *index[:-3:-1])
    if layout.experts:
      chosen = names[index[0]]
      # One by one into their place: a list of all would be a second copy.
      first = source.read(chosen[0], index[1:])
      array = np.empty((len(chosen), *first.shape), first.dtype)
      array[0] = first
      for number, name in enumerate(chosen[1:], 1):
        array[number] = source.read(name, index[1:])
    else:
      array = source.read(names[0], index)
    return array.swapaxes(-1, -2) if turned else array

  def of_device(index: Any) -> np.ndarray:
    return part(
      tuple(axis.indices(size)[:2] for axis, size in zip(index, shape))
    )

  if place is None:
    return jax.device_put(of_device((slice(None),) * len(shape)))
  stacked = parameter.layers is not None
  entries = (*place.spec, *(None,) * len(parameter.shape))[int(stacked) :]
  spec = layout.stored_axes(entries[: len(parameter.shape)], _common_axis)
  where = NamedSharding(place.mesh, PartitionSpec(*spec))
  return jax.make_array_from_callback(shape, where, of_device)


def _common_axis(group: tuple[Any, ...]) -> Any:
  """The mesh axis of several axes made one: that of the first of them.

  Where another of them is split too, every device reads all of it.
  """
  return group[0] if not any(group[1:]) else None


@functools.lru_cache(maxsize=256)  # one for all that are alike
def _compiled(
  layout: Layout,
  shape: tuple[int, ...],
  dtype: np.dtype,
  place: NamedSharding | None,
) -> Callable[[Array | None, Array, int], Array]:
  """Compiles: (stack, stored, i) -> the stack with layer i written into it.

  It is written into the same memory. Without a stack, the result is the layer.
  """

  def write(stack, stored, i):
    one = layout.decode(stored, shape, dtype)
    if stack is None:
      return one
    return lax.dynamic_update_index_in_dim(stack, one, i, 0)

  return jax.jit(write, donate_argnums=0, out_shardings=place)


def _check_names(
  source: Source, config: ModelConfig, wanted: list[Parameter]
) -> None:
  """Whether the source has each tensor that is wanted, and no other."""
  needed = {name for one in wanted for names in one.names for name in names}
  missing = sorted(needed - source.stored.keys())
  if missing:
    raise ValueError(
      f'{source.path} lacks {len(missing)} of the {len(needed)} tensors of the '
      f'model ({_some(missing)}); give all files of the model.'
    )
  surplus = source.stored.keys() - needed
  if config.tied_embeddings:  # some folders hold the embedding twice
    surplus -= {source.tensors['head',].name}
  if surplus:
    raise ValueError(
      f'{source.path} has {len(surplus)} tensors that the model has no place '
      f'for ({_some(sorted(surplus))}); give files of the architecture that '
      'its config.json names.'
    )


def _some(names: list[str]) -> str:
  return ', '.join(names[:3]) + (', ...' if len(names) > 3 else '')


def _check_each(
  source: Source, wanted: list[Parameter], dtype: str, rounded: bool
) -> None:
  """Whether every tensor has its shape, and keeps its bits."""
  if dtype not in ('float32', 'bfloat16'):
    raise ValueError(
      f"dtype={dtype!r} of weights is neither 'float32' nor 'bfloat16'; give "
      'one of them.'
    )
  for one in wanted:
    for name in (name for names in one.names for name in names):
      stored = source.stored[name]
      if stored.shape != one.name_shape:
        raise ValueError(
          f'{name} in {source.path} has the shape {stored.shape}, but the '
          f'model needs {one.name_shape}; give files that belong to the '
          'config.json.'
        )
      if rounded or not one.is_matrix or dtype == 'float32':
        continue
      if stored.dtype != jnp.bfloat16:
        raise ValueError(
          f'{name} in {source.path} is {stored.dtype}, and as bfloat16 it '
          "loses bits; give dtype='float32', or rounded=True for weights that "
          'are not trained.'
        )
