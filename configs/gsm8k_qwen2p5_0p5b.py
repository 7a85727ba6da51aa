"""grpo-jax train --config=configs/gsm8k_qwen2p5_0p5b.py --workdir=runs/gsm8k

Qwen2.5-0.5B-Instruct on the word problems of GSM8K, by Dr. GRPO.

Hardware: one GPU of 80 GB, or one TPU host. Not yet run, so no figure can be
promised.

- Weights: `Qwen/Qwen2.5-0.5B-Instruct` on the Hugging Face Hub.
- Problems: `openai/gsm8k`, its splits train and test.

Both are downloaded by the first start; `--config.model.path` and
`--config.data.train` take folders and files too.
"""

from ml_collections import ConfigDict

from grpo_jax.config import default


def get_config() -> ConfigDict:
  """The embedded default, changed for this model and its problems."""
  config = default()
  config.steps = 500

  config.model.path = 'Qwen/Qwen2.5-0.5B-Instruct'
  config.model.compute_dtype = 'bfloat16'
  config.model.remat = 'layer'

  config.data.train = (
    {'name': 'hf:openai/gsm8k', 'kwargs': {'config': 'main'}},
  )
  config.data.heldout = (
    {'name': 'hf:openai/gsm8k', 'kwargs': {'config': 'main', 'split': 'test'}},
  )
  config.data.prompt_field = 'question'
  config.data.answer_field = 'answer'
  config.data.tokenizer = ''
  config.data.chat = True
  config.data.system_prompt = (
    'Reason step by step. End with a line that gives the number alone, as in '
    '"The answer is 42".'
  )
  config.data.prompt_buckets = (128, 256, 512)
  config.data.completion_buckets = (256, 512, 1024)
  config.rewards = ({'name': 'last_number', 'weight': 1.0},)

  config.sampler.prompts = 64
  config.sampler.group = 8
  config.sampler.max_tokens = 1024

  config.learner.method = 'dr_grpo'
  config.optim.lr = 1e-6
  config.optim.warmup_steps = 10
  config.optim.weight_decay = 0.0
  config.optim.b2 = 0.99

  config.evaluation.every_steps = 50
  config.evaluation.examples = 500
  config.checkpoint.every_steps = 50
  config.mesh.data = -1
  return config
