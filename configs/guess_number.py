"""grpo-jax train --config=configs/guess_number.py --workdir=runs/guess

A transformer of 87,000 parameters, from scratch, learns to find a number from 0
to 31 in six turns, in which it is told 'higher' or 'lower'. No download, no
accelerator. What a guess rules out for sure is the reward of its turn, and .5
comes on top if the number is found.

A supervised warm-up shows guesses that are drawn at random, of the numbers that
are left. grpo_jax/environments has the curve.
"""

import pathlib
import random

from ml_collections import ConfigDict

from grpo_jax.config import default

NUMBERS = range(32)


async def guess(policy, example):
  """A number from 0 to 31, in six turns."""
  wanted, left, said = int(example['answer']), NUMBERS, 'guess'
  for _ in range(6):
    text = (await policy.say(said)).text
    if not text.isdecimal():
      return 0.0
    number = int(text)
    below, above = parts(left, number)
    # What a guess rules out, whatever the number is.
    policy.reward(1 - max(len(below), len(above)) / len(left))
    if number == wanted:
      return 0.5
    left, said = (above, 'higher') if number < wanted else (below, 'lower')
  return 0.0


def parts(left, number):
  """Those of the numbers that are left that lie below and above one."""
  below = range(left.start, min(number, left.stop))
  return below, range(max(number + 1, left.start), left.stop)


def method(gamma=0.5, entropy=0.01):
  """A guess is credited with what it earns, and half of what comes next."""
  from grpo_jax import losses

  return losses.chain(
    losses.center_to_go_by_group(gamma),
    losses.mean_over_tokens(),
    losses.ppo_clip(0.2, 0.4),
    losses.add_entropy_bonus(entropy),
  )


def numbers():
  """All of them; the policy is not told which one it is."""
  return [{'prompt': 'guess', 'answer': str(n)} for n in NUMBERS]


def random_guesses(number=4096):
  """What is read before a turn of a game, and a guess that may be right."""
  drawn, found = random.Random(0), []
  while len(found) < number:
    wanted, left, said, chat = drawn.choice(NUMBERS), NUMBERS, 'guess', []
    for _ in range(6):
      chat = [*chat, {'role': 'user', 'content': said}]
      guessed = drawn.choice(left)
      found.append({'prompt': chat, 'answer': str(guessed)})
      if guessed == wanted:
        break
      chat = [*chat, {'role': 'assistant', 'content': str(guessed)}]
      below, above = parts(left, guessed)
      left, said = (above, 'higher') if guessed < wanted else (below, 'lower')
  return found[:number]


def get_config() -> ConfigDict:
  """The embedded default, for a small transformer that talks with a game."""
  config = default()
  config.steps = 100

  config.model.num_layers = 2
  config.model.width = 64
  config.model.num_heads = config.model.num_kv_heads = 2
  config.model.head_dim = 32
  config.model.mlp_width = 128
  config.model.rope_base = 100.0
  config.model.unroll = True

  config.data.train = config.data.heldout = 'guess_number:numbers'
  config.data.tokenizer = str(pathlib.Path(__file__).resolve().parent / 'words')
  config.data.chat = True
  config.data.prompt_buckets = (1, 16)
  config.data.completion_buckets = (18,)
  config.environment.name = 'guess_number:guess'
  config.environment.max_turns = 6
  config.environment.where = 'here'
  config.rewards = (
    {'name': 'exact_match', 'weight': 0.0},
    {'name': 'environment', 'weight': 1.0},
  )
  config.sampler.prompts = 32
  config.sampler.group = 8
  config.sampler.max_tokens = 2

  config.warm_up.steps = 100
  config.warm_up.examples = 128
  config.warm_up.demonstrations = 'guess_number:random_guesses'
  config.learner.method = 'guess_number:method'
  config.learner.method_kwargs = {}
  config.learner.anchor = 'sampler'
  config.learner.epochs = 4
  config.optim.lr = 1.6e-3
  config.optim.warmup_steps = 5
  config.optim.decay = 'linear'
  config.optim.weight_decay = 0.0
  config.optim.b2 = 0.99
  config.evaluation.every_steps = 20
  config.evaluation.examples = 32
  config.checkpoint.every_steps = 100
  return config
