"""Tensors of safetensors files: read slice by slice, written one by one.

A file begins with the length of its header, u64, and the header, JSON: of each
tensor its dtype, shape, and where its bytes begin and end behind the header.
See https://huggingface.co/docs/safetensors. A model has one such file, or
several and an index that says which tensor is in which.
"""

from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import json
import math
import pathlib
from typing import Any
from typing import Protocol

import jax.numpy as jnp
import numpy as np

ONE = 'model.safetensors'
INDEX = 'model.safetensors.index.json'

DTYPES = {
  'F32': np.dtype(np.float32),
  'F16': np.dtype(np.float16),
  'BF16': np.dtype(jnp.bfloat16),
}
READ = {**DTYPES, 'U8': np.dtype(np.uint8)}
"""What readers show: bytes are parts of quantized weights; see `mxfp4`."""

_CODES = {dtype: code for code, dtype in DTYPES.items()}

PIECE_BYTES = 16 << 20
"""How much of a file is read at once: it is in memory twice meanwhile."""


@dataclasses.dataclass(frozen=True)
class Stored:
  """A tensor that has not been read.

  Attributes:
    name: Its name in the file.
    shape: As it is stored.
    dtype: As it is read: float32 for quantized tensors.
    where: What its reader needs to find it.
  """

  name: str
  shape: tuple[int, ...]
  dtype: np.dtype
  where: Any


class Reader(Protocol):
  """The tensors of a model, wherever they are stored."""

  @property
  def tensors(self) -> Mapping[str, Stored]:
    """Every tensor, by its name."""
    ...

  def read(self, stored: Stored, index: tuple[slice, ...]) -> np.ndarray:
    """A part of a tensor, of the dtype `stored.dtype`.

    Args:
      stored: One of `tensors`.
      index: A slice for each of its axes.
    """
    ...


class Safetensors:
  """The tensors of a folder.

  Attributes:
    tensors: Every tensor, by its name.
  """

  def __init__(self, folder: pathlib.Path):
    """Reads the headers of all files.

    Args:
      folder: Holds `model.safetensors`, or several files and their index.

    Raises:
      ValueError: A file is missing, truncated, or not of this format.
    """
    self.tensors: dict[str, Stored] = {}
    for path in _files(folder):
      with opened(path) as file:
        for name in file.keys():
          part = file.get_slice(name)
          if part.get_dtype() not in READ:
            raise ValueError(
              f'{name} in {path} has the dtype {part.get_dtype()}; give '
              f'weights in one of {", ".join(DTYPES)}.'
            )
          shape, dtype = tuple(part.get_shape()), READ[part.get_dtype()]
          self.tensors[name] = Stored(name, shape, dtype, path)

  def read(self, stored: Stored, index: tuple[slice, ...]) -> np.ndarray:
    """See `Reader`."""
    rows, *columns = index
    first, end, _ = rows.indices(stored.shape[0])
    row_bytes = math.prod(stored.shape[1:]) * stored.dtype.itemsize
    step = max(1, PIECE_BYTES // row_bytes)

    # The file is mapped into memory, and what was read of it stays there until
    # it is closed: so it is opened anew for every piece.
    def piece(start: int) -> np.ndarray:
      part = (slice(start, min(start + step, end)), *columns)
      with opened(stored.where) as file:
        return file.get_slice(stored.name)[part]

    if end - first <= step:
      return piece(first)
    widths = [
      len(range(*axis.indices(size)))
      for axis, size in zip(columns, stored.shape[1:], strict=True)
    ]
    result = np.empty((end - first, *widths), stored.dtype)
    for start in range(first, end, step):
      result[start - first : start - first + step] = piece(start)
    return result


def _files(folder: pathlib.Path) -> list[pathlib.Path]:
  """The files that hold a model's tensors."""
  index = folder / INDEX
  if index.exists():
    try:
      where = json.loads(index.read_text())['weight_map']
      names = sorted(set(where.values()))
      files = [folder / name for name in names]
    except (
      ValueError, RecursionError, KeyError, TypeError, AttributeError
    ) as error:  # fmt: skip
      raise ValueError(
        f'{index} is no index of safetensors ({error}); copy it again.'
      ) from error
    missing = [n for n, file in zip(names, files) if not file.exists()]
    if missing:
      raise ValueError(
        f'{folder} lacks {len(missing)} of the {len(names)} files that its '
        f'{INDEX} names: {", ".join(missing[:3])}; copy them there too.'
      )
    return files
  if (folder / ONE).exists():
    return [folder / ONE]
  files = [path.name for path in sorted(folder.iterdir())]
  for name in files:
    refuse_pickle(folder / name)
  raise ValueError(
    f'{folder} has neither {ONE} nor {INDEX}; give a folder with one of them '
    f'(there is {", ".join(files[:5]) or "nothing"}).'
  )


def refuse_pickle(path: pathlib.Path) -> None:
  """Raises a ValueError for a file of torch.save, by its name."""
  if path.suffix in ('.bin', '.pt', '.pth', '.ckpt'):
    raise ValueError(
      f'{path} is a pickle, which may run any code when it is opened, so it is '
      'not read here; give the weights as safetensors.'
    )


def opened(path: pathlib.Path) -> Any:
  """Opens a file, with a sentence where that fails."""
  import safetensors

  try:
    return safetensors.safe_open(path, 'numpy')
  except safetensors.SafetensorError as error:
    size = path.stat().st_size
    raise ValueError(
      f'{path} ({size:,} bytes) is truncated, or no safetensors file '
      f'({error}); copy it again.'
    ) from error


def write(
  folder: pathlib.Path,
  tensors: Sequence[tuple[str, tuple[int, ...]]],
  arrays: Iterable[np.ndarray],
  dtype: Any,
  shard_bytes: int,
) -> None:
  """Writes a model's tensors, holding one array at a time.

  Args:
    folder: Where to.
    tensors: The name and shape of each, in the order of writing.
    arrays: Their values, of `dtype`, in the same order; read one by one.
    dtype: The dtype of all tensors.
    shard_bytes: No file has more bytes of tensors, but for one with a single
      tensor that has more itself.
  """
  # safetensors writes a file from all of its tensors at once, and files of 5 GB
  # are usual; so the few lines of its format are here.
  dtype = np.dtype(dtype)
  shards = _shards(tensors, dtype, shard_bytes)
  names = [ONE]
  if len(shards) > 1:
    total = len(shards)
    names = [
      f'model-{i:05}-of-{total:05}.safetensors' for i in range(1, total + 1)
    ]
  values = iter(arrays)
  for file_name, shard in zip(names, shards, strict=True):
    write_file(folder / file_name, shard, values, dtype)
  if len(shards) > 1:
    where = {n: f for f, shard in zip(names, shards) for n, _ in shard}
    size = sum(_nbytes(shape, dtype) for _, shape in tensors)
    index = dict(metadata=dict(total_size=size), weight_map=where)
    (folder / INDEX).write_text(json.dumps(index, indent=2) + '\n')


def write_file(
  path: pathlib.Path,
  tensors: Sequence[tuple[str, tuple[int, ...]]],
  arrays: Iterable[np.ndarray],
  dtype: Any,
) -> None:
  """Writes one file.

  Args:
    path: The file.
    tensors: The name and shape of each.
    arrays: Their values, of `dtype`; no more are taken than there are tensors.
    dtype: The dtype of all tensors.
  """
  dtype, values = np.dtype(dtype), iter(arrays)
  with open(path, 'wb') as file:
    file.write(_header(tensors, dtype))
    for name, shape in tensors:
      value = next(values)
      assert (value.shape, value.dtype) == (shape, dtype), name
      file.write(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)


def _nbytes(shape: tuple[int, ...], dtype: np.dtype) -> int:
  return math.prod(shape) * dtype.itemsize


def _shards(tensors, dtype: np.dtype, shard_bytes: int) -> list[list]:
  """The tensors of each file."""
  shards, room = [], 0
  for name, shape in tensors:
    size = _nbytes(shape, dtype)
    if not shards or size > room:
      shards.append([])
      room = shard_bytes
    shards[-1].append((name, shape))
    room -= size
  return shards


def _header(tensors, dtype: np.dtype) -> bytes:
  """The bytes before the first tensor."""
  # transformers refuses a file without this word on who wrote it.
  header: dict[str, Any] = {'__metadata__': {'format': 'pt'}}
  start = 0
  for name, shape in tensors:
    end = start + _nbytes(shape, dtype)
    header[name] = dict(
      dtype=_CODES[dtype], shape=list(shape), data_offsets=[start, end]
    )
    start = end
  text = json.dumps(header, separators=(',', ':')).encode()
  text += b' ' * (-len(text) % 8)  # so that tensors begin at whole words
  return len(text).to_bytes(8, 'little') + text
