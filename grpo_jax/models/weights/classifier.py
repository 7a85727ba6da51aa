"""Reward models: sequence classifiers of Hugging Face with one label.

Such a model is a language model whose output layer has one row, `score.weight`
[1,width]. It is read at the last token of a text.
"""

import dataclasses
import os
import pathlib
from typing import Any
from typing import NamedTuple

import numpy as np

from grpo_jax.models.config import ModelConfig
from grpo_jax.models.weights import families
from grpo_jax.models.weights import source as source_lib

_WEIGHT = 'score.weight'

# The architecture of each family's classifier -> that of its language model.
_ARCHITECTURES = {
  family.architecture.replace(
    'ForCausalLM', 'ForSequenceClassification'
  ): family.architecture
  for family in families.FAMILIES
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

  source: source_lib.Source
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
  config_json = source_lib.described(folder)
  named = (config_json.get('architectures') or [None])[0]
  if named not in _ARCHITECTURES:
    raise ValueError(
      f'{folder} holds the architecture {named!r}, which is no reward model'
      f' that is built here; give one of {", ".join(_ARCHITECTURES)}.'
    )
  meant = {**config_json, 'architectures': [_ARCHITECTURES[named]]}
  source = source_lib.of_folder(folder, meant, needs_weights=True)
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
