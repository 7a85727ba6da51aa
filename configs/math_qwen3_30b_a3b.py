"""grpo-jax train --config=configs/math_qwen3_30b_a3b.py --workdir=runs/math

Qwen3-30B-A3B, 128 experts of which 8 compute each token, on MATH, by GSPO,
whose ratio of whole completions bears routers that disagree
(`router_disagreement`).

Hardware: a TPU slice of 64 chips of 32 GB, which is several hosts. Not yet run,
so no figure can be promised.

- Weights: `Qwen/Qwen3-30B-A3B` on the Hugging Face Hub.
- Problems: `DigitalLearningGmbH/MATH-lighteval`, its splits train and test.

Both are downloaded by the first start; `--config.model.path` and
`--config.data.train` take folders and files too.
"""

from ml_collections import ConfigDict

from grpo_jax.config import default


def get_config() -> ConfigDict:
  """The embedded default, changed for this model and its problems."""
  config = default()
  config.steps = 500

  config.model.path = 'Qwen/Qwen3-30B-A3B'
  config.model.compute_dtype = 'bfloat16'
  config.model.remat = 'layer'

  config.data.train = 'hf:DigitalLearningGmbH/MATH-lighteval'
  config.data.heldout = (
    {
      'name': 'hf:DigitalLearningGmbH/MATH-lighteval',
      'kwargs': {'split': 'test'},
    },
  )
  config.data.prompt_field = 'problem'
  config.data.answer_field = 'solution'
  config.data.tokenizer = ''
  config.data.chat = True
  config.data.system_prompt = (
    'Reason step by step, and put the final answer within \\boxed{}.'
  )
  config.data.chat_kwargs = {'enable_thinking': False}
  config.data.prompt_buckets = (128, 256, 512)
  config.data.completion_buckets = (1024, 2048, 4096)
  config.rewards = ({'name': 'boxed_text', 'weight': 1.0},)

  config.sampler.prompts = 128
  config.sampler.group = 8
  config.sampler.max_tokens = 4096

  config.learner.method = 'gspo'
  config.learner.method_kwargs = {}
  config.learner.row_completions = 2  # a row of eight does not fit a chip
  config.optim.lr = 1e-6
  config.optim.warmup_steps = 10
  config.optim.weight_decay = 0.0
  config.optim.b2 = 0.99

  config.evaluation.every_steps = 50
  config.evaluation.examples = 500
  config.checkpoint.every_steps = 50
  config.mesh.data, config.mesh.fsdp, config.mesh.expert = -1, 8, 8
  return config
