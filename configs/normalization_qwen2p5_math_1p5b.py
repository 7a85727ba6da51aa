r"""grpo-jax train --config=configs/normalization_qwen2p5_math_1p5b.py \
  --workdir=runs/normalization

The setting of the second paper (arXiv:2601.23135): Qwen2.5-Math-1.5B with LoRA
on GSM8K, advantages divided by the standard deviation of their group, or not:

  --config=configs/normalization_qwen2p5_math_1p5b.py:standard
  --config=configs/normalization_qwen2p5_math_1p5b.py:no_std

The paper gives rank 64, alpha 128, all linear layers and 500 iterations, and
trains on the easy and the hard half of GSM8K apart, this config on all of it.
Group size, learning rate and batch are ours: it does not report them.

Hardware: one GPU of 80 GB, or one TPU host. Not yet run, so no figure can be
promised.

- Weights: `Qwen/Qwen2.5-Math-1.5B` on the Hugging Face Hub.
- Problems: `openai/gsm8k`, its splits train and test.

Both are downloaded by the first start; `--config.model.path` and
`--config.data.train` take folders and files too.
"""

from ml_collections import ConfigDict

from grpo_jax.config import default

_METHODS = {
  'standard': 'grpo',
  'no_std': 'grpo_jax.losses.contrib:grpo_without_std',
}


def get_config(arm: str = 'standard') -> ConfigDict:
  """The embedded default, changed for this model and its problems."""
  if arm not in _METHODS:
    raise ValueError(
      f'configs/normalization_qwen2p5_math_1p5b.py got {arm!r}; give one of '
      f'{", ".join(_METHODS)}.'
    )
  config = default()
  config.steps = 500

  config.model.path = 'Qwen/Qwen2.5-Math-1.5B'
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

  config.learner.method = _METHODS[arm]
  config.learner.method_kwargs = {'kl_coefficient': 0.0}
  config.optim.lr = 1e-5
  config.optim.warmup_steps = 10
  config.optim.weight_decay = 0.0
  config.optim.b2 = 0.99

  config.evaluation.every_steps = 50
  config.evaluation.examples = 500
  config.checkpoint.every_steps = 50
  config.mesh.data = -1

  config.lora.rank = 64
  config.lora.alpha = 128.0
  config.lora.base_dtype = 'bfloat16'
  return config
