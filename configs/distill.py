"""grpo-jax train --config=configs/distill.py --workdir=runs/distill

TODO
"""

from ml_collections import ConfigDict
import smollm2


def get_config() -> ConfigDict:
  """That of `smollm2.py`, with a teacher in the place of rewards."""
  config = smollm2.get_config()
  config.steps = 8

  config.teacher.path = './runs/teacher'  # with a dot no name of the Hub
  config.learner.method = 'opd'
  config.learner.method_kwargs = dict(reward_coefficient=0.0)
  config.optim.lr = 4e-5

  config.evaluation.every_steps = 4
  config.checkpoint.every_steps = 4
  return config
