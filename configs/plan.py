"""grpo-jax plan --config=configs/plan.py:Qwen3-8B --topology=v5p:4x4x4

A rollout to plan for, of a model of which only the shape is here. The argument
after the colon names a folder of configs/shapes, or another one that holds the
config.json of a model.
"""

import pathlib

from ml_collections import ConfigDict

from grpo_jax.config import default

SHAPES = pathlib.Path(__file__).parent / 'shapes'


def get_config(shape: str = 'Qwen3-8B') -> ConfigDict:
  """64 prompts of 1,024 tokens, 8 completions of 4,096 tokens each."""
  config = default()
  known = SHAPES / shape
  config.model.path = str(known if known.is_dir() else shape)
  config.model.compute_dtype = 'bfloat16'
  config.model.remat = 'layer'
  config.data.tokenizer = ''
  config.data.prompt_buckets = (1024,)
  config.data.completion_buckets = (4096,)
  config.sampler.prompts = 64
  config.sampler.group = 8
  config.sampler.max_tokens = 4096
  config.learner.method = 'grpo'
  config.learner.method_kwargs = {'kl_coefficient': 0.0}
  config.learner.layout = 'shared'
  config.warm_up.steps = 0
  return config
