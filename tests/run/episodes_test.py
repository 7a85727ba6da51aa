"""Runs whose completions are episodes: started again, and of one turn each."""

import random
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from grpo_jax.environments import sessions
from grpo_jax.rollouts import parquet
from tests import cli
from tests import runs
from tests.run import export_test
from tests.run import played

pytestmark = pytest.mark.usefixtures('shared_programs')


def train_killed(monkeypatch, workdir, at, **changes):
  """A start that ends at the n-th answer to an episode; nothing is saved."""
  real, left = sessions.Player.answer, [at]

  def answer(self, *given):
    left[0] -= 1
    if not left[0]:
      raise export_test.Killed
    return real(self, *given)

  with monkeypatch.context() as patch:
    patch.setattr(sessions.Player, 'answer', answer)
    with pytest.raises(export_test.Killed):
      played.train(workdir, **changes)


@pytest.mark.long
def test_killed_among_episodes_it_goes_on(tmp_path, monkeypatch):
  changes = {'steps': 3, 'data.heldout': ''}
  played.train(tmp_path / 'whole', **changes)
  for at in 9, 30:  # in the first rollout, and after a checkpoint
    train_killed(monkeypatch, tmp_path / 'killed', at, **changes)
  assert runs.checkpoints(tmp_path / 'killed')[-1] == 2
  played.train(tmp_path / 'killed', **changes)
  runs.assert_equal(tmp_path / 'whole', tmp_path / 'killed')


def start(workdir, where, *killed_at):
  """A start in a process of its own: its exit code, and what it has printed."""
  done = subprocess.run(
    [
      sys.executable,
      '-m',
      played.__name__,
      workdir,
      where,
      *map(str, killed_at),
    ],
    cwd=cli.ROOT,
    env=cli.environment() | {'OF_RUN': str(workdir)},
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    timeout=300,
  )
  return done.returncode, done.stdout


def wait_for_workers(workdir):
  """Until none is left that a killed process has started."""
  until = time.monotonic() + 20
  while left := runs.processes_with(f'OF_RUN={workdir}'):
    assert time.monotonic() < until, left
    time.sleep(0.1)


@pytest.mark.long
@pytest.mark.parametrize('where', ['here', 'workers'])
def test_kill_9_among_episodes(where, tmp_path):
  code, said = start(tmp_path / 'whole', where)
  found = re.search(r'asked (\d+) times', said)
  assert code == 0 and found, said
  times, drawn = int(found[1]), random.Random(where)
  # The second time it is killed where it has just gone on.
  for place in drawn.randrange(1, times), 5:
    code, said = start(tmp_path / 'killed', where, place)
    assert code == -signal.SIGKILL, said
    wait_for_workers(tmp_path / 'killed')
  code, said = start(tmp_path / 'killed', where)
  assert code == 0, said
  runs.assert_equal(tmp_path / 'whole', tmp_path / 'killed')
  wait_for_workers(tmp_path / 'killed')


@pytest.mark.long
def test_episodes_of_one_turn_are_the_run_without_an_environment(tmp_path):
  changes = {'data.prompt_buckets': (64,), 'data.completion_buckets': (64,)}
  name = f'{played.__name__}:single'
  own = {'environment.name': name, 'environment.max_turns': 1}
  played.train(tmp_path / 'played', **changes, **own)
  name = f'{played.__name__}:odd'
  changes |= {'environment.name': '', 'rewards': ({'name': name},)}
  played.train(tmp_path / 'sampled', **changes)
  (step, arrays, _), (_, others, _) = (
    runs.saved(tmp_path / each) for each in ('played', 'sampled')
  )
  assert step == 4
  for name, array in arrays.items():
    np.testing.assert_array_equal(array, others[name], err_msg=name)
  for step in range(1, 5):
    one, other = (
      parquet.read(parquet.path_of(tmp_path / each / 'completions', step))
      for each in ('played', 'sampled')
    )
    for name in 'tokens', 'mask', 'reward', 'valid', 'logp_sampler', 'version':
      np.testing.assert_array_equal(
        getattr(one.batch, name), getattr(other.batch, name), err_msg=name
      )
    assert one.texts == other.texts and one.prompts == other.prompts
