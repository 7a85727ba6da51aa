"""Sums, with a reward and a loss that lie beside this file.

  grpo-jax train --config=launch/own_code/config.py --workdir=runs/own

Modules in the folder of a config can be imported, in every process of a run. So
'my_rewards:digits' is the function `digits` in my_rewards.py.
"""

from grpo_jax.config.load import load_config


def get_config():
  """configs/arithmetic.py with a reward and a loss of one's own."""
  config = load_config('configs/arithmetic.py')
  config.rewards = (
    {'name': 'my_rewards:digits', 'weight': 1.0},
    {'name': 'exact_match', 'weight': 1.0},
  )
  config.learner.method = 'my_losses:patient_grpo'
  config.learner.method_kwargs = {'patience': 0.5}
  return config
