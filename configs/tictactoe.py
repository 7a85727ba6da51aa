"""grpo-jax train --config=configs/tictactoe.py --workdir=runs/tictactoe

A transformer of 89,000 parameters, from scratch, plays tic-tac-toe of OpenSpiel
against an opponent that moves at random.

  pip install 'grpo_jax[open-spiel]'

A supervised warm-up shows legal moves that are drawn at random; an illegal one
loses the game. grpo_jax/environments has the curve.
"""

import pathlib
import random

from ml_collections import ConfigDict

from grpo_jax.config import default

GAME = {'task': 'play', 'most_illegal': 1}


def won(prompt, completion, example):
  """Whether the policy has won; a game may also end in a draw."""
  return float(example['episode']['reward'] == 1)


def random_moves(number=4096):
  """What is read before a turn of a random game, and a legal move."""
  from grpo_jax.environments.adapters.open_spiel_adapter import OpenSpiel
  from grpo_jax.environments.base import Action

  drawn, found = random.Random(0), []
  game = OpenSpiel('tic_tac_toe', **GAME)
  while len(found) < number:
    chat, said, done = [], game.reset({}, drawn.randrange(1 << 30)), False
    while not done:
      chat = [*chat, {'role': 'user', 'content': said}]
      move = drawn.choice(said.rpartition(': ')[2].split(', '))
      found.append({'prompt': chat, 'answer': move})
      chat = [*chat, {'role': 'assistant', 'content': move}]
      said, _, done, _ = game.step(Action(move))
  return found[:number]


def method():
  """Every move is credited with how the game ends."""
  from grpo_jax import losses

  return losses.chain(
    losses.center_to_go_by_group(),
    losses.mean_over_tokens(),
    losses.ppo_clip(0.2, 0.4),
    losses.add_entropy_bonus(0.005),
  )


def get_config() -> ConfigDict:
  """The embedded default, for a small transformer that talks with a game."""
  config = default()
  config.steps = 60

  config.model.num_layers = 2
  config.model.width = 64
  config.model.num_heads = config.model.num_kv_heads = 2
  config.model.head_dim = 32
  config.model.mlp_width = 128
  config.model.rope_base = 100.0
  config.model.unroll = True

  config.data.train = config.data.heldout = 'episodes'
  config.data.tokenizer = str(pathlib.Path(__file__).resolve().parent / 'board')
  config.data.chat = True
  config.data.prompt_buckets = (16, 64)
  config.data.completion_buckets = (64,)
  config.environment.name = 'open_spiel:tic_tac_toe'
  config.environment.kwargs = GAME
  config.environment.where = 'here'
  config.rewards = (
    {'name': 'tictactoe:won', 'weight': 0.0, 'where': 'here'},
    {'name': 'environment', 'weight': 1.0},
  )
  config.sampler.prompts = 16
  config.sampler.group = 8
  config.sampler.max_tokens = 2

  config.warm_up.steps = 150
  config.warm_up.examples = 128
  config.warm_up.demonstrations = 'tictactoe:random_moves'
  config.learner.method = 'tictactoe:method'
  config.learner.method_kwargs = {}
  config.learner.anchor = 'sampler'
  config.learner.epochs = 3
  config.optim.lr = 1e-3
  config.optim.warmup_steps = 5
  config.optim.decay = 'linear'
  config.optim.weight_decay = 0.0
  config.optim.b2 = 0.99
  config.evaluation.every_steps = 10
  config.evaluation.examples = 256
  config.checkpoint.every_steps = 100
  return config
