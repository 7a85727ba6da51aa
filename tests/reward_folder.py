"""Folders of tiny reward models, as transformers writes them."""

import json
import pathlib
from typing import Any
from typing import NamedTuple

import jax
import numpy as np
from safetensors import numpy as safetensors

from grpo_jax import models
from grpo_jax.models import weights
from tests import hf_folder
from tests.models.weights import golden
from tests.oracles import transformer as oracle

_ARCHITECTURES = {
  'gemma3': 'Gemma3TextForSequenceClassification',
  'gemma2': 'Gemma2ForSequenceClassification',
  'llama': 'LlamaForSequenceClassification',
  'mistral': 'MistralForSequenceClassification',
  'qwen2': 'Qwen2ForSequenceClassification',
  'qwen3': 'Qwen3ForSequenceClassification',
  'qwen3_moe': 'Qwen3MoeForSequenceClassification',
}
FAMILIES = tuple(_ARCHITECTURES)


class Reference(NamedTuple):
  """What a folder holds, for the NumPy transformer.

  Attributes:
    config: Of a language model whose output layer has one row.
    params: Of that, NumPy.
  """

  config: models.ModelConfig
  params: Any

  def score(self, ids: Any) -> float:
    """The score of a text, in float64."""
    logits = oracle.logits(self.config, self.params, ids, range(len(ids)))
    return float(logits[-1, 0])


def write(
  folder: pathlib.Path,
  family: str = 'qwen3',
  labels: int = 1,
  pad: str | None = '<|endoftext|>',
  **tokenizer: Any,
) -> Reference:
  """Writes a folder.

  Args:
    folder: Made if it is not there.
    family: One of `FAMILIES`; the shape is that of the golden folder.
    labels: Rows of the last layer.
    pad: What config.json names as padding; None: nothing.
    **tokenizer: See `hf_folder.write_tokenizer`.
  """
  backend = hf_folder.write_tokenizer(folder, vocab_size=300, **tokenizer)
  told = json.loads((golden.folder(family) / 'config.json').read_text())
  told |= {'vocab_size': backend.get_vocab_size(), 'tie_word_embeddings': True}
  config = weights.config_from_huggingface(told)
  rng = np.random.default_rng(3)
  params = _drawn(config, rng)
  weights.save(folder, config, params, dtype='float32')
  head = rng.normal(size=(labels, config.width)).astype(np.float32)
  file = folder / 'model.safetensors'
  tensors = {**safetensors.load_file(file), 'score.weight': head}
  safetensors.save_file(tensors, file, {'format': 'pt'})
  told |= {
    'architectures': [_ARCHITECTURES[family]],
    'pad_token_id': backend.token_to_id(pad or ''),
    'eos_token_id': backend.token_to_id('<|im_end|>'),
    'bos_token_id': None,
    'max_position_embeddings': 512,
    'id2label': {str(i): f'LABEL_{i}' for i in range(labels)},
    'label2id': {f'LABEL_{i}': i for i in range(labels)},
  }
  (folder / 'config.json').write_text(json.dumps(told))
  shape = {'tied_embeddings': False, 'logit_cap': None}
  config = models.ModelConfig(**{**_fields(config), **shape})
  return Reference(config, {**params, 'head': head.T})


def _fields(config: models.ModelConfig) -> dict[str, Any]:
  return {name: getattr(config, name) for name in config.__dataclass_fields__}


def _drawn(config: models.ModelConfig, rng: np.random.Generator) -> Any:
  """Weights that let every part of the model count."""
  shapes = jax.eval_shape(models.Transformer(config).init, jax.random.key(0))

  def draw(path, leaf):
    x = rng.normal(0, 0.3, leaf.shape)
    return np.float32(x + 1 if 'scale' in str(path[-1]) else x)

  return jax.tree_util.tree_map_with_path(draw, shapes)
