"""A rehearsal's run: random weights of SmolLM2-135M's shape, three rollouts.

The tokenizer has as many tokens as SmolLM2's, so that the embedding has its
size too; `rehearsal.py` writes it. Rewards are those of `tests.judges`, because
a random model answers nothing.
"""

import pathlib
import runpy

ROOT = pathlib.Path(__file__).parent.parent.parent
VOCAB_SIZE = 49152


def get_config():
  config = runpy.run_path(str(ROOT / 'configs/smollm2.py'))['get_config']()
  config.steps = 3
  config.model.path = ''
  config.model.num_layers = 30
  config.model.width = 576
  config.model.num_heads = 9
  config.model.num_kv_heads = 3
  config.model.head_dim = 64
  config.model.mlp_width = 1536
  config.model.rope_base = 1e5
  config.model.norm_epsilon = 1e-5
  config.model.tied_embeddings = True
  config.data.heldout = ''
  config.data.prompt_buckets = (160,)
  config.data.completion_prefix = ''
  config.rewards = ({'name': 'tests.judges:even', 'weight': 1.0},)
  config.sampler.prompts = 8
  config.sampler.group = 4
  config.optim.warmup_steps = 0
  config.evaluation.every_steps = 0
  config.checkpoint.every_steps = config.checkpoint.keep_last = 1
  config.checkpoint.best_metric = 'reward'
  config.log.completions_every_steps = 1
  config.log.display = 'plain'
  config.mesh.fsdp = 4
  return config
