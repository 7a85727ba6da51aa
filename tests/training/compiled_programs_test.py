"""Compiled programs are kept from start to start, where the user says."""

import json
import pathlib
import subprocess
import sys

from grpo_jax.training import compiled_programs
from tests import cli


def start(tmp_path, *more, **variables):
  """A run of one rollout, in an environment without a cache."""
  environment = cli.environment()
  for name in list(environment):
    if name.startswith(('JAX_COMPILATION_CACHE', 'JAX_PERSISTENT_CACHE')):
      del environment[name]
  environment |= {'XDG_CACHE_HOME': str(tmp_path / 'cache'), **variables}
  done = subprocess.run(
    [sys.executable, '-m', 'grpo_jax', 'train', cli.SMALL]
    + [f'--workdir={tmp_path}/run', '--config.steps=1', *more],
    cwd=cli.ROOT,
    env=environment,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  assert json.loads(done.stdout.splitlines()[-1])['steps'] == 1


def kept(directory) -> int:
  return len(list(pathlib.Path(directory).glob('**/*-cache')))


def test_by_default_in_the_users_cache_directory(tmp_path, monkeypatch):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  place = compiled_programs.default_directory()
  assert place.parent == tmp_path / 'cache' / 'grpo_jax'
  start(tmp_path)
  assert kept(place) > 3


def test_the_variable_wins_over_the_field_and_the_field_over_the_default(
  tmp_path,
):
  start(
    tmp_path,
    f'--config.compilation_cache={tmp_path}/field',
    JAX_COMPILATION_CACHE_DIR=str(tmp_path / 'variable'),
  )
  assert kept(tmp_path / 'variable') and not (tmp_path / 'field').exists()
  start(
    tmp_path,
    f'--config.compilation_cache={tmp_path}/field',
    f'--workdir={tmp_path}/again',
  )
  assert kept(tmp_path / 'field') and not (tmp_path / 'cache').exists()


def test_none_where_the_user_wants_none(tmp_path):
  start(tmp_path, '--config.compilation_cache=')
  assert not (tmp_path / 'cache').exists()
