"""A run says what it is doing, from its first second to its last."""

import pytest

from grpo_jax.monitor import Screen
from grpo_jax.run import loop
from tests import runs

pytestmark = pytest.mark.usefixtures('shared_programs')


class Recorder:
  """A display that keeps what it is told."""

  def __init__(self):
    self.told, self.open = [], []

  def begin(self, doing, first):
    assert not self.open, f'{doing} begins inside {self.open}'
    self.open.append(doing)
    self.told.append(doing)

  def end(self, doing, first, secs):
    assert self.open.pop() == doing and secs >= 0

  def line(self, text):
    self.told.append(text.split()[0] if text[:2] == '  ' else text)

  def write(self, step, scalars, samples):
    self.told.append(f'rollout {step}')

  def progress(self, label, step, total, scalars):
    self.told.append(f'{label} {step}')

  def warn(self, step, text):
    pass  # of a policy that has learned nothing

  def remember(self, history):
    self.elapsed = history.elapsed()

  def close(self):
    self.told.append('closed')


def told(workdir, **changes):
  recorder = Recorder()
  config = runs.small(
    **{'steps': 1, 'checkpoint.every_steps': 9, **runs.WARM, **changes}
  )
  loop.train(config, workdir, screen=Screen(recorder))
  assert recorder.told.pop() == 'closed' and 'closed' in recorder.told
  return [word for word in recorder.told if word != 'closed']


def test_every_phase_of_a_run_is_said(tmp_path):
  start = [
    'finding devices',
    'devices',
    'building the model and the data',
    'size',
    'mesh',  # of one device
  ]
  end = ['saving a checkpoint', 'waiting for the checkpoint to be written']
  assert told(tmp_path) == [
    *start,
    'preparing the checkpoints',
    'drawing the initial parameters',
    'compiling the warm-up step',
    'warm-up 4',
    'handing the parameters to the sampler',
    'compiling, then evaluating on held-out problems',
    'rollout 0',
    'saving a checkpoint',
    'compiling, then sampling and judging',
    'compiling, then learning',
    'evaluating',
    'rollout 1',
    *end[:1],
    *end,
  ]
  # Another start: what has been done is not done again.
  assert (
    told(tmp_path, steps=2)
    == [
      *start,
      'restoring the newest checkpoint',
      'changed',  # config.steps
      'goes',  # on from the checkpoint of rollout 1
      'compiling, then sampling and judging',
      'compiling, then learning',
      'compiling, then evaluating on held-out problems',
      'rollout 2',
      *end[:1],
      *end,
    ]
  )
