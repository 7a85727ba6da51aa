"""Low-rank adapters as a folder that the package `peft` loads."""

from collections.abc import Iterator
import dataclasses
import json
import os
import pathlib
from typing import Any

import jax
import numpy as np

from grpo_jax.mesh import sharding
from grpo_jax.models import lora
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.weights import config_json
from grpo_jax.models.weights import families
from grpo_jax.models.weights import safetensors
from grpo_jax.models.weights.parameters import Parameter
from grpo_jax.models.weights.parameters import parameters

FILE = 'adapter_model.safetensors'


def save_adapter(
  folder: str | os.PathLike,
  config: ModelConfig,
  params: Any,
  base: str,
  dtype: str = 'float32',
  architecture: str | None = None,
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
    base: The folder of the model without adapters, as `peft` is to find it.
    dtype: Of the file: `'float32'` or `'bfloat16'`.
    architecture: Of the model without adapters, as the `config.json` in `base`
      names it: tensors have the names of the modules of this class. None: the
      first that can express it.

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
  described = config_json.config_to_huggingface(plain, architecture)
  row = families.family(architecture or described['architectures'][0])
  beside, _ = lora.split(params, lora.trains)
  low = {
    sharding.path_names(path): leaf
    for path, leaf in jax.tree_util.tree_leaves_with_path(beside)
  }
  tensors, arrays, modules = [], [], []
  for one in parameters(plain, row.tensors)[0]:
    *inside, name = one.path
    a, b = (low.get((*inside, name + end)) for end in ('_a', '_b'))
    if a is not None:
      found = [row.module(names[0]) for names in one.names]
      modules += found
      for tensor, array in _pairs(one, found, a, b, config.lora.rank, dtype):
        tensors.append(tensor)
        arrays.append(array)
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
  told = {
    'peft_type': 'LORA',
    'task_type': 'CAUSAL_LM',
    'base_model_name_or_path': base,
    'r': config.lora.rank,
    'lora_alpha': config.lora.alpha,
    'lora_dropout': 0.0,
    'bias': 'none',
    'fan_in_fan_out': False,
    'inference_mode': True,
    'target_modules': _targets(modules, config, row),
  }
  text = json.dumps(told, indent=2) + '\n'
  (folder / 'adapter_config.json').write_text(text)


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
  with experts these would be among them, and in one that sees images those of
  its vision tower, so there each module is named in full.
  """
  if config.experts is not None or row.modules:
    return sorted(modules)
  return sorted({name.rpartition('.')[2] for name in modules})


def _pairs(
  one: Parameter, modules: list[str], a: Any, b: Any, rank: int, dtype: str
) -> Iterator[tuple[tuple[str, tuple[int, ...]], np.ndarray]]:
  """A and B of each layer: the name and shape of a tensor, and its values."""
  for i, module in enumerate(modules):
    for letter, whole, shape in (('A', a, (-1, rank)), ('B', b, (rank, -1))):
      layer = whole if one.layers is None else whole[i]
      stored = np.asarray(_gathered(layer)).reshape(shape).T.astype(dtype)
      yield (
        (f'base_model.model.{module}.lora_{letter}.weight', stored.shape),
        (np.ascontiguousarray(stored)),
      )


def _gathered(x: Any) -> Any:
  """An array that this process has all of."""
  if isinstance(getattr(x, 'sharding', None), jax.sharding.NamedSharding):
    return jax.device_put(x, sharding.replicated(x.sharding.mesh))
  return x
