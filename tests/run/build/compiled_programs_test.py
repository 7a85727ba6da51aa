"""Compiled programs are kept from start to start, where the user says."""

import json
import pathlib
import subprocess
import sys

import jax
import pytest

from grpo_jax.run.build import compiled_programs
from tests import cli


def start(tmp_path, *more, **variables):
  """A run of no rollout, in an environment without a cache."""
  environment = cli.environment()
  for name in list(environment):
    if name.startswith(('JAX_COMPILATION_CACHE', 'JAX_PERSISTENT_CACHE')):
      del environment[name]
  environment |= {
    'XDG_CACHE_HOME': str(tmp_path / 'cache'),
    # Keeps every program: on a fast machine, most take little time to compile.
    'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
    **variables,
  }
  done = subprocess.run(
    [sys.executable, '-m', 'grpo_jax', 'train', cli.SMALL]
    + [f'--workdir={tmp_path}/run', '--config.steps=0', *more],
    cwd=cli.ROOT,
    env=environment,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  assert json.loads(done.stdout.splitlines()[-1])['steps'] == 0


def kept(directory) -> int:
  return len(list(pathlib.Path(directory).glob('**/*-cache')))


@pytest.fixture
def settings(monkeypatch, tmp_path):
  """JAX's settings as a user has them who has set nothing; and set back."""
  before = {name: getattr(jax.config, name) for name in NAMES}
  jax.config.update(NAMES[0], None)
  jax.config.update(NAMES[1], 1.0)
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  reset = []
  monkeypatch.setattr(
    compiled_programs.compilation_cache, 'reset_cache', lambda: reset.append(1)
  )
  yield lambda: [*(getattr(jax.config, name) for name in NAMES), len(reset)]
  for name, value in before.items():
    jax.config.update(name, value)


NAMES = (
  'jax_compilation_cache_dir',
  'jax_persistent_cache_min_compile_time_secs',
)


@pytest.mark.long
def test_by_default_in_the_users_cache_directory(tmp_path):
  place = compiled_programs.default_directory()
  start(tmp_path, '--config.data.heldout=')
  assert kept(tmp_path / 'cache' / 'grpo_jax' / place.name) > 3


def test_jax_is_told_where_and_what_is_worth_it(settings, tmp_path):
  """And decides anew whether there is a cache."""
  compiled_programs.keep('auto')
  place = compiled_programs.default_directory()
  assert place.parent == tmp_path / 'cache' / 'grpo_jax'
  assert settings() == [str(place), 0.1, 1]
  jax.config.update(NAMES[0], None)
  compiled_programs.keep(str(tmp_path / 'field'))
  assert settings() == [str(tmp_path / 'field'), 0.1, 2]


def test_what_jax_was_given_stays(settings):
  jax.config.update(NAMES[0], 'anywhere')
  compiled_programs.keep('auto')
  assert settings() == ['anywhere', 0.1, 0]
  jax.config.update(NAMES[1], 7.0)
  compiled_programs.keep('')
  assert settings() == ['anywhere', 7.0, 0]


def test_none_where_the_user_wants_none(settings):
  compiled_programs.keep('')
  assert settings() == [None, 1.0, 0]


@pytest.mark.long
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


@pytest.mark.long
@pytest.mark.parametrize('given', [None, 7.0])
def test_programs_of_a_tenth_of_a_second_are_kept_unless_told_otherwise(given):
  """Asked in a process of its own, because the answer is global."""
  environment = cli.environment()
  environment.pop('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', None)
  environment['JAX_COMPILATION_CACHE_DIR'] = 'anywhere'
  if given:
    environment['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = str(given)
  told = subprocess.run(
    [sys.executable, '-c', LEAST_SECS],
    env=environment,
    capture_output=True,
    text=True,
    check=True,
  )
  assert told.stdout.split() == [str(given or 0.1), 'anywhere']


LEAST_SECS = """
import jax
from grpo_jax.run.build import compiled_programs

compiled_programs.keep('auto')
print(jax.config.jax_persistent_cache_min_compile_time_secs)
print(jax.config.jax_compilation_cache_dir)
"""


@pytest.mark.long
def test_a_run_keeps_none_where_the_user_wants_none(tmp_path):
  start(tmp_path, '--config.compilation_cache=')
  assert not (tmp_path / 'cache').exists()
