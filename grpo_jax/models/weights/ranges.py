"""Tensors of safetensors files that lie elsewhere, read by ranges of bytes."""

from collections.abc import Iterator
from collections.abc import Sequence
import json
import math
from typing import Any

import numpy as np

from grpo_jax.models.weights.safetensors import DTYPES
from grpo_jax.models.weights.safetensors import PIECE_BYTES
from grpo_jax.models.weights.safetensors import READ
from grpo_jax.models.weights.safetensors import Stored

_MOST_HEADER = 100_000_000  # bytes, as the safetensors library has it


class Ranges:
  """A `Reader` of files in a bucket.

  Attributes:
    tensors: Every tensor, by its name.
  """

  def __init__(self, addresses: Sequence[str]):
    """Reads the headers of all files.

    Args:
      addresses: As `etils` reads them.

    Raises:
      ValueError: A file is truncated, or not of this format.
    """
    from etils import epath

    self.tensors = {
      one.name: one
      for path in map(epath.Path, addresses)
      for one in _header(path)
    }

  def read(self, stored: Stored, index: tuple[slice, ...]) -> np.ndarray:
    """See `Reader`. Of its rows, all columns are transferred."""
    path, begin = stored.where
    if not stored.shape or 0 in stored.shape:
      size = math.prod(stored.shape) * stored.dtype.itemsize
      with path.open('rb') as file:
        data = _bytes(file, path, begin, size)
      return np.frombuffer(data, stored.dtype).reshape(stored.shape)[index]
    rows, *columns = index
    first, end, _ = rows.indices(stored.shape[0])
    row = math.prod(stored.shape[1:]) * stored.dtype.itemsize
    step = max(1, PIECE_BYTES // row)
    pieces = []
    with path.open('rb') as file:
      for start in range(first, end, step) or (first,):
        number = min(step, end - start)
        data = _bytes(file, path, begin + start * row, number * row)
        piece = np.frombuffer(data, stored.dtype)
        piece = piece.reshape(number, *stored.shape[1:])
        pieces.append(piece[(slice(None), *columns)])
    return np.concatenate(pieces)


def _header(path: Any) -> Iterator[Stored]:
  """The tensors of a file."""
  with path.open('rb') as file:
    size = int.from_bytes(_bytes(file, path, 0, 8), 'little')
    if size > _MOST_HEADER:
      raise _broken(path, f'a header of {size:,} bytes')
    text = _bytes(file, path, 8, size)
  try:
    tensors = json.loads(text)
    tensors.pop('__metadata__', None)
    for name, one in tensors.items():
      if one['dtype'] not in READ:
        raise ValueError(
          f'{name} in {path} has the dtype {one["dtype"]}; give weights in one '
          f'of {", ".join(DTYPES)}.'
        )
      dtype, shape = READ[one['dtype']], tuple(one['shape'])
      begin, end = one['data_offsets']
      if end - begin != math.prod(shape) * dtype.itemsize:
        raise _broken(path, f'{name} has {end - begin} bytes')
      yield Stored(name, shape, dtype, (path, 8 + size + begin))
  except (
    json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError,
    AttributeError,
  ) as error:  # fmt: skip
    raise _broken(path, error) from error


def _bytes(file: Any, path: Any, start: int, number: int) -> bytes:
  """A range of a file."""
  file.seek(start)
  data = file.read(number)
  if len(data) < number:
    raise _broken(path, f'it ends after {start + len(data):,} bytes')
  return data


def _broken(path: Any, why: Any) -> ValueError:
  return ValueError(
    f'{path} is truncated, or no safetensors file ({why}); copy it there again.'
  )
