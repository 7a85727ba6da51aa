r"""Frozen matrices of layers in 8 or 4 bits, by the package qwix.

A weight W is kept as codes c and scales s, and used as

.. math:: W \approx v(c) \, s

where an int8 code is its own value v and each output has one scale; and where
v of an nf4 code is one of 16 quantiles of a normal distribution, and each tile
of 64 inputs of an output has one scale. Both are symmetric around 0.

In the parameter tree, `{'codes', 'scales'}` is in the place of the weight.
Scales are float32. Two nf4 codes are in one byte, along the tiled axis, so that
they take 4 bits on every device.

References:
  Dettmers et al., `QLoRA <https://arxiv.org/abs/2305.14314>`_, 2023.
"""

import math
from typing import Any

from flax import nnx
import jax
from jax import lax
import jax.numpy as jnp

from grpo_jax.config import importing
from grpo_jax.mesh import sharding
from grpo_jax.models import axes

Array = jax.Array

PARTS = axes.QUANTIZED
_TILE = 64  # inputs that share a scale of nf4
_LEAST_TILE = 8  # below it the scales take as much as the codes


def quantize(weight: Array, kind: str, inputs: int) -> dict[str, Array]:
  """The codes and scales of one weight.

  Args:
    weight: f32[..., in, out, ...], one layer's.
    kind: `'int8'` or `'nf4'`.
    inputs: How many of its first axes are summed over.

  Returns:
    `codes`, of int8 i8[...] like the weight, of nf4 u8[..., in / 2, out, ...];
    and `scales`, f32 of the same rank.

  Raises:
    ValueError: The inputs cannot be cut into tiles, or qwix is not installed.
  """
  qwix = _qwix()
  outputs = tuple(range(inputs, weight.ndim))
  if kind == 'int8':
    found = qwix.quantize(weight, jnp.int8, channelwise_axes=outputs)
    return {'codes': found.qvalue, 'scales': found.scale}
  last, size = inputs - 1, weight.shape[inputs - 1]
  tile = math.gcd(size, _TILE)
  if tile < _LEAST_TILE:
    raise ValueError(
      f"lora.base_dtype='nf4' keeps tiles of {_LEAST_TILE} to {_TILE} inputs, "
      f'but a matrix of the model has {size} inputs, which no multiple of '
      f"{_LEAST_TILE} makes; give 'int8'."
    )
  found = qwix.quantize(
    weight,
    'nf4',
    channelwise_axes=(*range(last), *outputs),
    tiled_axes={last: tile},
  )
  pairs = found.qvalue.astype(jnp.uint8).reshape(
    *weight.shape[:last], size // 2, 2, *weight.shape[inputs:]
  )
  low, high = (jnp.take(pairs, i, axis=last + 1) for i in (0, 1))
  return {'codes': low | high << 4, 'scales': found.scale}


def dequantize(codes: Array, scales: Array, dtype: Any = jnp.float32) -> Array:
  """The weight that codes and scales stand for, in a dtype.

  Args:
    codes: From `quantize`, perhaps with an axis of layers in front.
    scales: Likewise.
    dtype: Of the result; what is multiplied is float32.
  """
  qwix = _qwix()
  if codes.dtype == jnp.int8:
    array = qwix.QArray(codes, scales, None, jnp.int8)
    return qwix.dequantize(array).astype(dtype)
  both = zip(codes.shape, scales.shape, strict=True)
  (axis,) = (i for i, (of_codes, tiles) in enumerate(both) if of_codes != tiles)
  # Every other input is in the higher bits of a byte.
  pairs = jnp.stack((codes & 15, codes >> 4), axis + 1)
  shape = *codes.shape[:axis], 2 * codes.shape[axis], *codes.shape[axis + 1 :]
  array = qwix.QArray(pairs.reshape(shape), scales, None, 'nf4')
  return qwix.dequantize(array).astype(dtype)


def is_quantized(node: Any) -> bool:
  """Whether a node of a parameter tree stands for one weight."""
  return isinstance(node, dict) and node.keys() == set(PARTS)


def whole(params: Any, dtype: Any = jnp.float32) -> Any:
  """The parameters with every weight dequantized; others are as they were."""

  def one(node):
    return dequantize(**node, dtype=dtype) if is_quantized(node) else node

  return jax.tree.map(one, params, is_leaf=is_quantized)


class Weight(nnx.Module):
  """A frozen weight of a layer.

  Args:
    weight: f32[..., in, out, ...].
    kind: `'int8'` or `'nf4'`.
    inputs: How many of its first axes are summed over.
  """

  def __init__(self, weight: Array, kind: str, inputs: int):
    stored = quantize(weight, kind, inputs)
    self.codes = nnx.Param(stored['codes'])
    self.scales = nnx.Param(stored['scales'])
    # A shard has a part of them.
    self.shapes = stored['codes'].shape, stored['scales'].shape

  def beside(self, x: Array, name: str) -> tuple[Array, Array]:
    """What the weight multiplies, and the weight in its dtype.

    Shards send codes, which are fewer bytes than what they stand for.

    Args:
      x: f[...]; it is returned as it is.
      name: Of the weight, as `axes.names` has it.
    """
    place = axes.names((name,)).index('width')
    codes, scales = (
      axes.gather(part[...], (name,), shape[place], None)
      for part, shape in zip((self.codes, self.scales), self.shapes)
    )
    x, codes = _after(x, codes)
    return x, dequantize(codes, scales, x.dtype)


def _after(x: Array, codes: Array) -> tuple[Array, Array]:
  """The same arrays, of which the codes are not known before x is.

  In front of a loop over tokens, the compiler would else dequantize the weights
  of all layers, and keep them.
  """
  if sharding.platform() != 'cpu':
    return lax.optimization_barrier((x, codes))
  # There the compiler takes barriers away first. No number has 64 bits set.
  entry = lax.stop_gradient(x[(0,) * x.ndim]).astype(jnp.float32)
  bits = lax.bitcast_convert_type(entry, jnp.uint32)
  return x, codes | (lax.population_count(bits) >> 6).astype(codes.dtype)


def _qwix() -> Any:
  return importing.package('qwix', 'qlora')
