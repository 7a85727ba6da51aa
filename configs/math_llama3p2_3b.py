"""grpo-jax train --config=configs/math_llama3p2_3b.py --workdir=runs/math

Llama-3.2-3B-Instruct on the problems of MATH, by GSPO.

Hardware: a TPU slice of 16 chips of 32 GB, or 8 GPUs of 80 GB. Not yet run, so
no figure can be promised.

- Weights: `meta-llama/Llama-3.2-3B-Instruct` on the Hugging Face Hub (gated:
  accept its terms there, and set HF_TOKEN).
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

  config.model.path = 'meta-llama/Llama-3.2-3B-Instruct'
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
  # The template would write today's date, and prompts would change.
  config.data.chat_kwargs = {'date_string': '26 Jul 2024'}
  config.data.prompt_buckets = (128, 256, 512)
  config.data.completion_buckets = (512, 1024, 2048)
  config.rewards = ({'name': 'boxed_text', 'weight': 1.0},)

  config.sampler.prompts = 64
  config.sampler.group = 8
  config.sampler.max_tokens = 2048

  config.learner.method = 'gspo'
  config.learner.method_kwargs = {}
  config.optim.lr = 1e-6
  config.optim.warmup_steps = 10
  config.optim.weight_decay = 0.0
  config.optim.b2 = 0.99

  config.evaluation.every_steps = 50
  config.evaluation.examples = 500
  config.checkpoint.every_steps = 50
  config.mesh.data, config.mesh.fsdp = -1, 8
  return config
