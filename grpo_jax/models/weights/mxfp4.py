"""Weights of experts in MXFP4, as gpt-oss stores them.

A row of a matrix is cut into blocks of 32 numbers. Each has 4 bits, two of them
in a byte, the first in the lower half; and each block has a power of two, an
exponent in one byte. All values are exact in bfloat16.

References:
  Rouhani et al., `Microscaling Data Formats for Deep Learning
  <https://arxiv.org/abs/2310.10537>`_, 2023
"""

from collections.abc import Mapping
from typing import Any
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from grpo_jax.models.weights.safetensors import Reader
from grpo_jax.models.weights.safetensors import Stored

_BLOCK = 32
_BLOCKS, _SCALES = '_blocks', '_scales'
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Of each code of 4 bits; the highest is the sign.
_VALUES = np.array([*_MAGNITUDES, *(-x for x in _MAGNITUDES)], np.float32)
_BIAS = 127  # of the exponents


class _Where(NamedTuple):
  """The two tensors that one is stored as."""

  blocks: Stored  # u8[E,out,in/32,16]
  scales: Stored  # u8[E,out,in/32]


class Mxfp4:
  """A reader that shows matrices f[E,in,out] where a file has MXFP4.

  Attributes:
    tensors: Every tensor, by its name; those in MXFP4 as bfloat16.
  """

  def __init__(self, reader: Reader):
    """Pairs the blocks and scales that a reader has.

    Args:
      reader: Of the files.

    Raises:
      ValueError: Blocks without scales, or of other shapes.
    """
    self.reader = reader
    self.tensors: Mapping[str, Stored] = dict(_paired(reader.tensors))

  def read(self, stored: Stored, index: tuple[slice, ...]) -> np.ndarray:
    """See `Reader`."""
    if not isinstance(stored.where, _Where):
      return self.reader.read(stored, index)
    experts, inputs, outputs = index
    first, end, _ = inputs.indices(stored.shape[1])
    begin, stop = first // _BLOCK, -(-end // _BLOCK)
    of_blocks = experts, outputs, slice(begin, stop)
    blocks, scales = stored.where
    codes = self.reader.read(blocks, (*of_blocks, slice(None)))
    exponents = self.reader.read(scales, of_blocks)
    values = decode(codes, exponents)
    inside = slice(first - begin * _BLOCK, end - begin * _BLOCK)
    return values[..., inside].swapaxes(-1, -2).astype(stored.dtype)


def decode(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
  """The numbers of some blocks.

  Args:
    blocks: u8[...,n,16], two codes in each byte.
    scales: u8[...,n], exponents over 127.

  Returns:
    f32[...,32 n].

  >>> decode(np.array([[0x21] * 16], np.uint8), np.array([128], np.uint8))[:4]
  array([1., 2., 1., 2.], dtype=float32)
  """
  codes = np.stack((blocks & 0xF, blocks >> 4), axis=-1)
  values = _VALUES[codes].reshape(*blocks.shape[:-1], _BLOCK)
  powers = scales.astype(np.int32)[..., None] - _BIAS
  return np.ldexp(values, powers).reshape(*scales.shape[:-1], -1)


def _paired(tensors: Mapping[str, Stored]) -> Any:
  """The tensors, with one in the place of blocks and their scales."""
  for name, stored in tensors.items():
    if name.endswith(_SCALES) and stored.dtype == np.uint8:
      continue
    if not (name.endswith(_BLOCKS) and stored.dtype == np.uint8):
      yield name, stored
      continue
    meant = name.removesuffix(_BLOCKS)
    scales = tensors.get(meant + _SCALES)
    found = None if scales is None else scales.shape
    fits = found == stored.shape[:-1] and stored.shape[-1] * 2 == _BLOCK
    if scales is None or not fits:
      raise ValueError(
        f'{name} has the shape {stored.shape} and {meant + _SCALES} '
        f'{found}, but blocks of 16 bytes with one scale each are needed; copy '
        'the files again.'
      )
    experts, outputs, number, _ = stored.shape
    shape = experts, number * _BLOCK, outputs
    where = _Where(stored, scales)
    yield meant, Stored(meant, shape, np.dtype(jnp.bfloat16), where)
