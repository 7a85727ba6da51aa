"""Adapters alone, from a folder as `peft` writes it: the way of `save_adapter`
back."""

from collections.abc import Mapping
import dataclasses
import json
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.mesh import sharding
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.weights import config_json
from grpo_jax.models.weights import families
from grpo_jax.models.weights import safetensors
from grpo_jax.models.weights import tensors as tensors_lib
from grpo_jax.models.weights.writing import FILE


def load_adapter(
  folder: str | os.PathLike,
  config: ModelConfig,
  like: Any,
  architecture: str | None = None,
) -> Any:
  """The trained parameters of a model with adapters.

  Args:
    folder: Holds `adapter_model.safetensors` and `adapter_config.json`.
    config: The model, with its `lora`.
    like: Shapes, dtypes and shardings of the adapters, as the tree of the
      model's trained parameters.
    architecture: See `save_adapter`.

  Raises:
    ValueError: The folder has adapters of another rank or of other weights than
      the model, or such as the model cannot have.
    OSError: The folder cannot be read.
  """
  assert config.lora is not None
  folder = pathlib.Path(folder)
  _check_scale(folder, config)
  plain = dataclasses.replace(config, lora=None)
  described = config_json.config_to_huggingface(plain, architecture)
  row = families.family(architecture or described['architectures'][0])
  wanted = tensors_lib.parameters(plain, row.tensors)[0]
  given = _tensors(folder / FILE)
  leaves = jax.tree_util.tree_leaves_with_path(like)
  arrays = {
    sharding.path_names(path): np.zeros(leaf.shape, leaf.dtype)
    for path, leaf in leaves
  }
  for one in tensors_lib.written(plain, wanted, row.fused):
    parts = [(wanted[number], layer) for number, layer in one.parts]
    if not any(_has(arrays, parameter) for parameter, _ in parts):
      continue
    name = f'base_model.model.{row.module(one.names[0])}'
    pair = []
    for key in (f'{name}.lora_A.weight', f'{name}.lora_B.weight'):
      if key not in given:
        raise ValueError(
          f'{folder} lacks {key}; give an adapter of this model.'
        )
      pair.append(given.pop(key))
    _put_all(arrays, one, parts, pair, config.lora.rank)
  if given:
    raise ValueError(
      f'{folder} has {len(given)} tensors for which the model has no adapters '
      f'({min(given)}); give an adapter of this model.'
    )
  found = [
    jax.device_put(arrays[sharding.path_names(path)], _place(leaf))
    for path, leaf in leaves
  ]
  return jax.tree.structure(like).unflatten(found)


def _place(leaf: Any) -> Any:
  return getattr(leaf, 'sharding', None)


def _check_scale(folder: pathlib.Path, config: ModelConfig) -> None:
  """Raises a ValueError unless adapters count as much as in the model."""
  assert config.lora is not None
  try:
    given = json.loads((folder / 'adapter_config.json').read_text())
    found = given['r'], given['lora_alpha']
    others = [x for x in ('use_rslora', 'use_dora') if given.get(x)]
  except (ValueError, KeyError, TypeError, AttributeError) as error:
    raise ValueError(
      f'{folder} has no adapter of peft; give the folder of one.'
    ) from error
  if others:
    raise ValueError(
      f'The adapter in {folder} is one of {others[0]}, which counts otherwise '
      'than those of the model; give one without.'
    )
  needed = config.lora.rank, config.lora.alpha
  if found != needed:
    raise ValueError(
      f'The adapter in {folder} has rank and alpha {found}, and the model has '
      f'{needed}; give the same.'
    )


def _tensors(path: pathlib.Path) -> dict[str, np.ndarray]:
  """All tensors of a file."""
  with safetensors.opened(path) as file:
    return {name: file.get_tensor(name) for name in file.keys()}


def _has(arrays: Mapping[Any, Any], parameter: tensors_lib.Parameter) -> bool:
  """Whether a weight has an adapter."""
  *inside, name = parameter.path
  return (*inside, f'{name}_a') in arrays


def _put_all(
  arrays: Mapping[tuple[str, ...], np.ndarray],
  one: tensors_lib.Written,
  parts: list[tuple[tensors_lib.Parameter, int]],
  pair: list[np.ndarray],
  rank: int,
) -> None:
  """Puts A and B of a module where they belong: the inverse of `_pair`.

  Args:
    arrays: The adapters of all layers, by their paths.
    one: The weight of the module.
    parts: What it holds: a parameter, and which of its layers.
    pair: A [n*r,in] and B [out,n*r], of n weights with adapters in the module.
    rank: `r`, of each.

  Raises:
    ValueError: They have other shapes, or weights in one module share columns.
  """
  down, up = pair
  adapted = [_has(arrays, parameter) for parameter, _ in parts]
  rows = [parameter.name_shape[0] for parameter, _ in parts]
  number = rank * sum(adapted)
  needed = (number, parts[0][0].name_shape[1]), (sum(rows), number)
  if (down.shape, up.shape) != needed:
    raise ValueError(
      f'The adapter of {one.names[0]} has the shapes {down.shape} and '
      f'{up.shape}, and {needed[0]} and {needed[1]} are needed; give an '
      'adapter of this model.'
    )
  turns, found, begin = one.turns, [], 0
  ends = np.cumsum(rows) // turns
  blocks = np.split(up.reshape(turns, -1, number), ends[:-1], axis=1)
  for (parameter, layer), has, block in zip(
    parts, adapted, blocks, strict=True
  ):
    block = block.reshape(-1, number)
    own = slice(begin, begin + rank * has)
    if np.count_nonzero(block) != np.count_nonzero(block[:, own]):
      raise ValueError(
        f'The adapter of {one.names[0]} adds one product to several weights '
        'of the model, which has an adapter for each; give a folder with the '
        'whole model.'
      )
    if has:
      found.append((parameter, layer, down[own], block[:, own]))
    begin = own.stop
  for parameter, layer, a, b in found:
    _put(arrays, parameter, layer, 'a', a)
    _put(arrays, parameter, layer, 'b', b)


def _put(
  arrays: Mapping[tuple[str, ...], np.ndarray],
  parameter: tensors_lib.Parameter,
  layer: int,
  letter: str,
  stored: np.ndarray,
) -> None:
  """Puts A or B of one layer where it belongs."""
  *inside, name = parameter.path
  stack = arrays[*inside, f'{name}_{letter}']
  room = stack if parameter.layers is None else stack[layer]
  layout = parameter.layout
  if letter == 'a':  # which has no heads on the side that is turned
    layout = dataclasses.replace(layout, interleaved=0.0)
  room[...] = layout.decode(jnp.asarray(stored), room.shape, room.dtype)
