"""grpo-jax train --config=configs/gsm8k_qwen3_1p7b.py --workdir=runs/gsm8k

Qwen3-1.7B, without its thinking mode, on the word problems of GSM8K, by DAPO.

Hardware: a TPU host of 4 chips, or 4 GPUs of 80 GB. Not yet run, so no figure
can be promised.

- Weights: `Qwen/Qwen3-1.7B` on the Hugging Face Hub.
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

  config.model.path = 'Qwen/Qwen3-1.7B'
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
  config.data.chat_kwargs = {'enable_thinking': False}
  config.data.prompt_buckets = (128, 256, 512)
  config.data.completion_buckets = (256, 512, 1024)
  config.rewards = ({'name': 'last_number', 'weight': 1.0},)

  config.sampler.prompts = 64
  config.sampler.group = 8
  config.sampler.max_tokens = 1024

  config.learner.method = 'dapo'
  config.learner.method_kwargs = {'soft_tokens': 256}
  config.optim.lr = 1e-6
  config.optim.warmup_steps = 10
  config.optim.weight_decay = 0.0
  config.optim.b2 = 0.99

  config.evaluation.every_steps = 50
  config.evaluation.examples = 500
  config.checkpoint.every_steps = 50
  config.mesh.data, config.mesh.fsdp = -1, 4
  return config
