"""A run of seconds on prepared GSM8K: `tests/run/gsm8k_config.py:FOLDER`.

With ENDS_ONCE='13,KILL,FILE' in its environment a process gets SIGKILL while
prompt 13 is judged, unless the file is there, which is written before.
"""

import os
import pathlib
import signal

from grpo_jax import rewards
from tests import judges
from tests import small_config


@rewards.bounded
def even_unless_it_ends(prompt, completion, example):
  """`even`, and perhaps the end of the process."""
  number, name, file = os.environ.get('ENDS_ONCE', ',,').split(',')
  if str(example['index']) == number and not os.path.exists(file):
    pathlib.Path(file).touch()
    os.kill(os.getpid(), getattr(signal, f'SIG{name}'))
  return judges.even(prompt, completion, example)


def get_config(folder):
  config = small_config.get_config()
  kwargs = {'data_dir': folder}
  config.data.train = ({'name': 'tfds:gsm8k', 'kwargs': kwargs},)
  config.data.heldout = ''
  config.data.prompt_field = 'question'
  config.steps = 5
  config.rewards = (
    {'name': 'gsm8k', 'weight': 1.0},
    {'name': f'{__name__}:even_unless_it_ends', 'weight': 1.0},
  )
  return config
