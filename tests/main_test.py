"""The command line: the real command, what it prints and how it ends."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
CONFIG = '--config=configs/arithmetic.py'


def command(*arguments, cwd=ROOT, **environment):
  env = {k: v for k, v in os.environ.items() if k != 'XLA_FLAGS'}
  return subprocess.run(
    [sys.executable, '-m', 'grpo_jax', *arguments],
    capture_output=True,
    text=True,
    cwd=cwd,
    env={**env, 'PYTHONPATH': str(ROOT), **environment},
    timeout=300,
  )


@pytest.mark.parametrize(
  'arguments, words',
  [
    ([], 'the commands are: train'),
    (['dance'], "'dance'"),
    (['train'], 'needs --config and --workdir'),
    (['train', '--config=no/such.py', '--workdir=w'], 'no/such.py'),
    (['train', CONFIG, '--config.sed=1', '--workdir=w'], '"seed"'),
    (['train', CONFIG, '--config.seed=x', '--workdir=w'], 'config.seed'),
    (['train', CONFIG, '--config.mesh.fsdp=3', '--workdir=w'], 'fsdp=3'),
    (['train', CONFIG, '--config.learner.method=gspoo', '--workdir=w'], 'gspo'),
    (
      ['train', CONFIG, '--config.rewards=()', '--workdir=w'],
      'no rewards',
    ),
    (
      ['train', CONFIG, '--config.data.train=missing.jsonl', '--workdir=w'],
      'missing.jsonl',
    ),
    (['train', CONFIG, '--wrkdir=w'], 'workdir'),
  ],
)
def test_bad_input_gets_one_sentence_and_exit_code_2(
  arguments, words, tmp_path
):
  workdir = f'--workdir={tmp_path}/run'
  arguments = [workdir if a == '--workdir=w' else a for a in arguments]
  done = command(*arguments)
  assert done.returncode == 2, done.stderr
  assert words in done.stderr
  assert done.stderr.startswith('grpo-jax: ') and done.stdout == ''
  assert 'Traceback' not in done.stderr
  assert len(done.stderr.strip().splitlines()) == 1
  assert not (tmp_path / 'run').exists()


def test_verbose_shows_the_traceback(tmp_path):
  done = command(
    'train',
    CONFIG,
    '--config.mesh.fsdp=3',
    f'--workdir={tmp_path}',
    '--verbose',
  )
  assert done.returncode != 0 and 'Traceback' in done.stderr
