"""Runs of large models to plan, and their estimates; several tests share it."""

import pathlib

from grpo_jax import config as config_lib
from grpo_jax.planning import plan as plans
from grpo_jax.planning import topologies

SHAPES = pathlib.Path(__file__).parent.parent.parent / 'configs' / 'shapes'


def config(model='Qwen2.5-7B', **changes):
  found = config_lib.default()
  found.update_from_flattened_dict(
    {
      'model.path': str(SHAPES / model),
      'model.compute_dtype': 'bfloat16',
      'model.remat': 'layer',
      'data.tokenizer': '',
      'data.prompt_buckets': (512,),
      'data.completion_buckets': (1024,),
      'sampler.max_tokens': 1024,
      'sampler.prompts': 64,
      'sampler.group': 8,
      'warm_up.steps': 0,
      'learner.layout': 'shared',
      'learner.method': 'grpo',
      'learner.method_kwargs': {'kl_coefficient': 0.0},
      **changes,
    }
  )
  return config_lib.resolve(found)


def estimate(name='v5p:4x4x4', model='Qwen2.5-7B', slices=1, **changes):
  changes.setdefault('mesh.data', -1)
  changes['mesh.slices'] = slices
  topology = topologies.named(name, slices)
  return plans.plan(config(model, **changes), topology, estimate=True)
