"""The real command on two processes: its exit codes and its last sentence."""

import os
import signal
import socket
import time

import pytest

from tests import cli
from tests import runs

pytestmark = pytest.mark.long

OPTIONS = (
  cli.SMALL,
  '--config.steps=1000',  # which it never comes to
  '--config.mesh.data=-1',
  '--config.sampler.prompts=4',
  '--config.evaluation.every_steps=0',
  '--config.checkpoint.every_steps=100',
  cli.JUDGE.replace('even', 'refuses'),
)
MOST_SECS = 60.0  # in which both must have ended


def start(workdir, of_second=(), environment=()):
  """Both processes; the second may be given something else."""
  with socket.socket() as free:
    free.bind(('localhost', 0))
    address = f'localhost:{free.getsockname()[1]}'
  more = ((), ()), (of_second, environment)
  both = []
  with pytest.MonkeyPatch.context() as patched:
    patched.setenv('JAX_PLATFORMS', 'cpu')
    for rank, (options, variables) in enumerate(more):
      for name, value in variables:
        patched.setenv(name, str(value))
      both.append(
        cli.popen(
          'train',
          *OPTIONS,
          *options,
          f'--workdir={workdir}',
          f'--coordinator={address}',
          '--num_processes=2',
          f'--process_id={rank}',
        )
      )
  return both


def ended(both, began):
  """The exit codes, and what each has said in sentences of its own."""
  said = []
  for one in both:
    _, err = one.communicate(timeout=MOST_SECS - (time.monotonic() - began))
    said.append([x for x in err.splitlines() if x.startswith('grpo-jax: ')])
  return [one.returncode for one in both], said


def test_a_reward_that_raises_in_one_ends_both_with_its_sentence(tmp_path):
  note = tmp_path / 'refused'
  both = start(tmp_path / 'run', environment=[('REFUSED', note)])
  cli.wait_until(note.exists, both[0])
  codes, (first, second) = ended(both, time.monotonic())
  assert codes == [2, 2]
  assert len(first) == len(second) == 1
  assert "KeyError: 'no such answer'" in second[0]
  error = second[0].removeprefix('grpo-jax: ')
  assert first[0] == f'grpo-jax: Process 1: RewardError: {error}'
  assert runs.checkpoints(tmp_path / 'run') == [0]


def test_a_signal_to_one_ends_both_saved_with_its_code(tmp_path):
  both = start(tmp_path)
  cli.wait_for(tmp_path, 1, both[0])
  began = time.monotonic()
  os.kill(both[0].pid, signal.SIGTERM)
  codes, said = ended(both, began)
  assert codes == [143, 143], said
  done = runs.records(tmp_path)[-1]['step']
  assert runs.checkpoints(tmp_path)[-1] == done > 0


def test_another_config_in_one_ends_both_with_its_name(tmp_path):
  both = start(tmp_path / 'run', of_second=['--config.seed=7'])
  codes, said = ended(both, time.monotonic())
  assert codes == [2, 2]
  for sentences in said:
    (sentence,) = sentences
    assert 'Process 1 has config.seed=7, and the others have 0' in sentence
  assert not (tmp_path / 'run').exists()
