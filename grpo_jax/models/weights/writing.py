"""A model, or its adapters alone, as a Hugging Face folder."""

from collections.abc import Iterator
from collections.abc import Mapping
import dataclasses
import functools
import json
import os
import pathlib
import shutil
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import NamedSharding
import numpy as np

from grpo_jax.mesh import sharding
from grpo_jax.models import lora
from grpo_jax.models import quantized
from grpo_jax.models.config import LowRank
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.transformer import Transformer
from grpo_jax.models.weights import config_json
from grpo_jax.models.weights import families
from grpo_jax.models.weights import safetensors
from grpo_jax.models.weights import tensors as tensors_lib
from grpo_jax.models.weights.reading import Source

Array = jax.Array

TOKENIZER_FILES = (
  'tokenizer.json',
  'tokenizer_config.json',
  'tokenizer.model',
  'special_tokens_map.json',
  'added_tokens.json',
  'vocab.json',
  'merges.txt',
  'chat_template.jinja',
  'chat_template.json',
  'generation_config.json',
)
"""Files that are copied from one folder to the other, where there are such."""

# Fields that say nothing of the shape, and that are kept.
_KEPT = (
  'bos_token_id',
  'eos_token_id',
  'pad_token_id',
  'max_position_embeddings',
  'initializer_range',
)


def save(
  folder: str | os.PathLike,
  config: ModelConfig,
  params: Mapping[str, Any],
  dtype: str = 'float32',
  source: Source | None = None,
  fields: Mapping[str, Any] | None = None,
  shard_bytes: int = 5_000_000_000,
) -> None:
  """Writes a model as a folder that Hugging Face's libraries read.

  Every process calls this, and the first one writes. Host memory holds one
  tensor at a time, but all experts of a layer together.

  Args:
    folder: Where to; it is made if it does not exist, and may hold no model.
    config: The model.
    params: Its parameters, the tree of `Transformer.init`. If the model has
      adapters, each is added to its weight as that is written. Quantized
      weights are written as the numbers that they stand for.
    dtype: Of the file: `'float32'`, or `'bfloat16'` for half the size. bfloat16
      rounds what was trained: changes below 1/256 of a weight are lost.
    source: Where the model came from. Its architecture, its token ids and the
      files of its tokenizer are taken over.
    fields: More fields of `config.json`, such as `max_position_embeddings`.
    shard_bytes: Tensors in one file; more go into the next.

  Raises:
    ValueError: The folder holds a model already, `params` are not those of
      `config`, or no architecture can express the model.

  Warning:
    Norms that multiply by 1 + w are stored as w = scale - 1 in float32. Read
    back, a scale may differ by 6e-8.
  """
  folder = pathlib.Path(folder)
  if dtype not in ('float32', 'bfloat16'):
    raise ValueError(
      f"dtype={dtype!r} of an export is neither 'float32' nor 'bfloat16'; give "
      'one of them.'
    )
  writes = jax.process_index() == 0
  old = any(folder.glob('*.safetensors*')) or (folder / 'config.json').exists()
  if writes and old:  # others may come here when the first one writes already
    raise ValueError(
      f'{folder} holds a model already; give another folder, or remove it.'
    )
  described = _described(config, source, dtype, fields or {})
  row = families.family(described['architectures'][0])
  wanted, _ = tensors_lib.parameters(config, row.tensors)
  _check(params, jax.eval_shape(Transformer(config).init, jax.random.key(0)))
  leaves, adapters = _parts(config, params)
  written = tensors_lib.written(config, wanted, row.fused)
  tensors = [(name, one.shape(wanted)) for one in written for name in one.names]
  arrays = _arrays(
    written, wanted, leaves, adapters, config.lora, np.dtype(dtype)
  )
  try:
    if writes:
      folder.mkdir(parents=True, exist_ok=True)
      safetensors.write(folder, tensors, arrays, np.dtype(dtype), shard_bytes)
  finally:
    if jax.process_count() > 1:
      for _ in arrays:  # takes part in gathering each of them, also when the
        pass  # disk of the first process is full
  if not writes:
    return
  for name in TOKENIZER_FILES:
    if source and source.folder and (source.folder / name).exists():
      shutil.copyfile(source.folder / name, folder / name)
  # Last, because a folder without it is no model: an export that was cut off
  # is not taken for one.
  text = json.dumps(described, indent=2) + '\n'
  (folder / 'config.json').write_text(text)


def _described(
  config: ModelConfig,
  source: Source | None,
  dtype: str,
  fields: Mapping[str, Any],
) -> dict[str, Any]:
  """The content of `config.json`."""
  architecture, kept = None, {}
  if source is not None:
    row = config_json.family_of(source.config_json)
    architecture = row.architecture
    outer = source.config_json
    inner = outer.get(row.inside) or {} if row.inside else {}
    both = {**inner, **outer}
    kept = {name: both[name] for name in _KEPT if name in both}
  written = config_json.config_to_huggingface(config, architecture)
  return {**kept, **written, 'torch_dtype': dtype, **fields}


def _parts(
  config: ModelConfig, params: Mapping[str, Any]
) -> tuple[list[Any], list[tuple[Array, Array] | None]]:
  """The parameters but for adapters, and the adapter of each that has one."""
  low, base = {}, params
  if config.lora is not None:
    low, base = _adapters(params), lora.split(params, lora.trains)[1]
  # A weight that is quantized is one parameter.
  leaves = jax.tree_util.tree_leaves_with_path(
    base, is_leaf=quantized.is_quantized
  )
  adapters = [low.get(sharding.path_names(path)) for path, _ in leaves]
  return [leaf for _, leaf in leaves], adapters


def _adapters(params: Any) -> dict[tuple[str, ...], tuple[Any, Any]]:
  """A and B of each weight that has an adapter, by the path of the weight."""
  low = {
    sharding.path_names(path): leaf
    for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    if lora.trains(sharding.path_names(path))
  }
  return {
    (*folder, name.removesuffix('_a')): (a, low[*folder, name[:-1] + 'b'])
    for (*folder, name), a in low.items()
    if name.endswith('_a')
  }


def _check(params: Mapping[str, Any], tree: Any) -> None:
  """Whether the parameters are those of the model."""
  given, wanted = (
    {
      jax.tree_util.keystr(path): leaf.shape
      for path, leaf in jax.tree_util.tree_leaves_with_path(one)
    }
    for one in (params, tree)
  )
  wrong = sorted(
    name
    for name in given.keys() | wanted.keys()
    if given.get(name) != wanted.get(name)
  )
  if wrong:
    raise ValueError(
      f'{len(wrong)} parameters differ from those of the config: '
      f'{wrong[0]} has the shape {given.get(wrong[0])}, and the config says '
      f'{wanted.get(wrong[0])}; give the config that they were made with.'
    )


def _arrays(
  written: list[tensors_lib.Written],
  wanted: list[tensors_lib.Parameter],
  leaves: list[Any],
  adapters: list[tuple[Array, Array] | None],
  low_rank: LowRank | None,
  dtype: np.dtype,
) -> Iterator[np.ndarray]:
  """Each stored tensor, in the order of their names."""

  def stored(number: int, layer: int) -> np.ndarray:
    parameter, leaf = wanted[number], leaves[number]
    whole = None  # no sharding: an array of one device, or of the host
    first = jax.tree.leaves(leaf)[0]
    if isinstance(getattr(first, 'sharding', None), NamedSharding):
      whole = NamedSharding(first.sharding.mesh, jax.P())
    chosen, parts = None, (leaf, adapters[number])
    if parameter.layers is not None and isinstance(first, np.ndarray):
      # Only this layer goes to the device.
      parts = jax.tree.map(lambda x: x[layer], parts)
    elif parameter.layers is not None:
      chosen = layer
    options = dict(dtype=dtype, place=whole, low_rank=low_rank)
    taken = _take(*parts, chosen, layout=parameter.layout, **options)
    return np.asarray(taken)

  for one in written:
    arrays = [stored(*part) for part in one.parts]
    layout = wanted[one.parts[0].parameter].layout
    if layout.experts and not layout.packed:
      yield from arrays[0]
    else:
      yield one.joined(arrays)


@functools.partial(
  jax.jit, static_argnames=('layout', 'dtype', 'place', 'low_rank')
)
def _take(
  leaf: Any,
  adapter: tuple[Array, Array] | None,
  layer: int | None,
  *,
  layout: tensors_lib.Layout,
  dtype: np.dtype,
  place: NamedSharding | None,
  low_rank: LowRank | None,
) -> Array:
  """What is stored of a parameter, or of one layer of a stack."""
  if layer is not None:
    leaf, adapter = jax.tree.map(
      lambda x: lax.dynamic_index_in_dim(x, layer, keepdims=False),
      (leaf, adapter),
    )
  leaf = quantized.whole(leaf)
  if adapter is not None:
    assert low_rank is not None
    leaf = lora.add_adapter(leaf, *adapter, low_rank)
  stored = layout.encode(leaf, jnp.dtype(dtype))
  return (
    stored if place is None else lax.with_sharding_constraint(stored, place)
  )


FILE = 'adapter_model.safetensors'


def save_adapter(
  folder: str | os.PathLike,
  config: ModelConfig,
  params: Any,
  base: str,
  dtype: str = 'float32',
  architecture: str | None = None,
  revision: str | None = None,
) -> None:
  """Writes the adapters of a model, without the weights beside them.

  In `peft`, A is [r, in] and B is [out, r], and a weight W of [out, in] becomes
  W + alpha / r * B A: our A and B transposed. Every process calls this, and the
  first one writes.

  Args:
    folder: Where to; it is made if it does not exist.
    config: The model, with its `lora`.
    params: The trained part of its parameters; other parameters may be there
      too, and are not written.
    base: The model without adapters, as `peft` is to find it: its folder, or
      its name on the Hub.
    dtype: The dtype of the file: `'float32'` or `'bfloat16'`.
    architecture: Of the model without adapters, as the `config.json` in `base`
      names it: tensors have the names of the modules of this class. None: the
      first that can express it.
    revision: The commit of `base` on the Hub; None for a folder.

  Raises:
    ValueError: The model has no adapters, no architecture can express it, or
      `peft` would pass over some of the adapters.
  """
  if config.lora is None:
    raise ValueError(
      'The model has no adapters (config.lora.rank=0), and so nothing can be '
      'written as one; write the whole model.'
    )
  _refuse_unread(config)
  plain = dataclasses.replace(config, lora=None)
  written = config_json.config_to_huggingface(plain, architecture)
  row = families.family(architecture or written['architectures'][0])
  low = _adapters(params)
  wanted = tensors_lib.parameters(plain, row.tensors)[0]
  tensors, arrays, ranks = [], [], {}
  for one in tensors_lib.written(plain, wanted, row.fused):
    parts = [(wanted[number], layer) for number, layer in one.parts]
    if not any(parameter.path in low for parameter, _ in parts):
      continue
    module = row.module(one.names[0])
    pair = _pair(one, parts, low)
    ranks[module] = len(pair[0])
    for letter, array in zip('AB', pair, strict=True):
      name = f'base_model.model.{module}.lora_{letter}.weight'
      tensors.append((name, array.shape))
      arrays.append(np.ascontiguousarray(array.astype(dtype)))
  if not tensors:  # nothing would be adapted, and no reader would say so
    raise ValueError(
      f'No weight of the model has an adapter (targets={config.lora.targets}), '
      'and so nothing can be written as one; write the whole model.'
    )
  if jax.process_index():
    return
  folder = pathlib.Path(folder)
  folder.mkdir(parents=True, exist_ok=True)
  safetensors.write_file(folder / FILE, tensors, arrays, dtype)
  targets = _targets(list(ranks), config, row)
  described = _described_adapter(config.lora, targets, ranks)
  named = {'base_model_name_or_path': base, 'revision': revision}
  text = json.dumps({**described, **named}, indent=2) + '\n'
  (folder / 'adapter_config.json').write_text(text)


def _described_adapter(
  low_rank: LowRank, targets: list[str], ranks: Mapping[str, int]
) -> dict[str, Any]:
  """The content of `adapter_config.json`, but for what is adapted.

  Args:
    low_rank: The adapters.
    targets: Names of modules, or the ends of their names.
    ranks: Of each module.
  """
  rank, alpha = low_rank.rank, low_rank.alpha
  several = {
    target: number // rank
    for target in targets
    for module, number in ranks.items()
    if module.endswith(target) and number != rank
  }
  return {
    'peft_type': 'LORA',
    'task_type': 'CAUSAL_LM',
    'r': rank,
    'lora_alpha': alpha,
    'rank_pattern': {name: rank * n for name, n in several.items()},
    'alpha_pattern': {name: alpha * n for name, n in several.items()},
    'lora_dropout': 0.0,
    'bias': 'none',
    'fan_in_fan_out': False,
    'inference_mode': True,
    'target_modules': targets,
  }


def _refuse_unread(config: ModelConfig) -> None:
  """Raises a ValueError for a dense MLP with adapters, in a model with experts.

  peft 0.21 takes each target that is named 'gate_proj', 'up_proj' or
  'down_proj' there for the experts, and passes over the dense layers.
  """
  assert config.lora is not None
  dense = any(not kind.experts for kind in config.kinds)
  mlp = [name for name in config.lora.NAMES if name.startswith('mlp/')]
  adapted = [name for name in mlp if config.lora.adapts(name)]
  if config.experts is not None and dense and adapted:
    raise ValueError(
      f'The model has experts, and adapters of {", ".join(adapted)} in the '
      'layers without; peft would pass over these. Write the whole model, or '
      "train with config.lora.targets=('attention/*',)."
    )


def _targets(
  modules: list[str], config: ModelConfig, row: families.Family
) -> list[str]:
  """What `peft` is to adapt.

  A short name such as 'q_proj' means every module with this name. In a model
  with experts these would be among them, in one that sees images those of its
  vision tower, and layers with a state have a module of the same name as those
  with attention; so there each module is named in full.
  """
  if config.experts is not None or config.has_states or row.modules:
    return sorted(modules)
  return sorted({name.rpartition('.')[2] for name in modules})


def _pair(
  written: tensors_lib.Written,
  parts: list[tuple[tensors_lib.Parameter, int]],
  low: Mapping[Any, Any],
) -> tuple[np.ndarray, np.ndarray]:
  """A [r,in] and B [out,r] of one module.

  Of a module that holds several of our weights, A has the rows of all their
  adapters, and B has that of each at its own rows and columns: the rank is the
  sum of theirs, and the product is the same.

  Args:
    written: The weight of the module.
    parts: What it holds: a parameter, and which of its layers.
    low: A and B of all layers, by the path of the weight.
  """
  down, up = [], []
  for one, layer in parts:
    a, b = None, np.zeros((one.name_shape[0], 0), np.float32)
    if one.path in low:
      a, b = (
        jnp.asarray(_gathered(x if one.layers is None else x[layer]))
        for x in low[one.path]
      )
      inward = dataclasses.replace(one.layout, interleaved=0.0)
      outward = dataclasses.replace(one.layout, first=1)
      down.append(np.asarray(inward.encode(a, a.dtype)))
      b = np.asarray(outward.encode(b, b.dtype))
    up.append(b)
  ends = np.cumsum([b.shape[1] for b in up])
  wide = [
    np.pad(b, ((0, 0), (end - b.shape[1], ends[-1] - end)))
    for b, end in zip(up, ends, strict=True)
  ]
  return np.concatenate(down), written.joined(wide)


def _gathered(x: Any) -> Any:
  """An array that this process has all of."""
  if isinstance(getattr(x, 'sharding', None), jax.sharding.NamedSharding):
    return jax.device_put(x, sharding.replicated(x.sharding.mesh))
  return x
