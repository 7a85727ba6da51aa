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
      the model, or the model keeps several weights in one tensor.
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
    first, layer = wanted[one.parts[0].parameter], one.parts[0].layer
    *inside, name = first.path
    if (*inside, f'{name}_a') not in arrays:
      continue
    module = row.module(one.names[0])
    if len(one.parts) > 1 or first.layout.experts:
      raise ValueError(
        f'The model keeps several weights in {module}, whose adapters cannot '
        'be read here; give a folder with the whole model.'
      )
    for letter in 'AB':
      key = f'base_model.model.{module}.lora_{letter}.weight'
      if key not in given:
        raise ValueError(
          f'{folder} lacks {key}; give an adapter of this model.'
        )
      _put(arrays, first, layer, letter, given.pop(key))
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
  except (ValueError, KeyError, TypeError) as error:
    raise ValueError(f'{folder} has no adapter of peft.') from error
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


def _put(
  arrays: Mapping[tuple[str, ...], np.ndarray],
  parameter: tensors_lib.Parameter,
  layer: int,
  letter: str,
  stored: np.ndarray,
) -> None:
  """Puts A or B of one layer where it belongs.

  Raises:
    ValueError: It has another shape than there is room for.
  """
  *inside, name = parameter.path
  stack = arrays[*inside, f'{name}_{letter.lower()}']
  room = stack if parameter.layers is None else stack[layer]
  layout = dataclasses.replace(parameter.layout, first=1)
  if letter == 'A':
    layout = dataclasses.replace(parameter.layout, interleaved=0.0)
  if stored.shape != layout.stored_shape(room.shape):
    raise ValueError(
      f'The adapter of {".".join(parameter.path)} has the shape '
      f'{stored.shape}, and {layout.stored_shape(room.shape)} is needed; give '
      'an adapter of this model.'
    )
  room[...] = layout.decode(jnp.asarray(stored), room.shape, room.dtype)
