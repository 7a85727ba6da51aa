"""What is typed: fields that are set late, and what cannot be read."""

import io
import subprocess
import sys

import pytest

from grpo_jax import config as config_lib
from grpo_jax.commands import arguments
from grpo_jax.commands import options
from grpo_jax.commands import printing
from grpo_jax.commands import table
from grpo_jax.config import load
from tests.cli import environment


def typed(*later, method='grpo', **kwargs):
  """The method that results, its arguments, and what is said of it."""
  tree = {'learner': {'method': method, 'method_kwargs': kwargs}}
  fields = dict(one.split('=', 1) for one in later)
  tree, said = arguments.with_fields(tree, fields)
  learner = config_lib.dataclass_from_dict(
    config_lib.Config, tree, 'config'
  ).learner
  return learner.method, learner.method_kwargs, said


def test_another_optimizer_goes_without_the_arguments_of_the_first():
  tree = {
    'optim': {'name': 'sgd', 'kwargs': {'momentum': 0.9}},
    'learner': {'method': 'grpo', 'method_kwargs': {'low': 0.1}},
  }
  found, said = arguments.with_fields(tree, {'optim.name': 'muon'})
  assert found['optim'] == {'name': 'muon', 'kwargs': {}}
  assert 'for the optimizer sgd, which are left out (momentum=0.9)' in said
  assert '--config.optim.kwargs.NAME=VALUE' in said
  assert found['learner'] == tree['learner']
  fields = {'optim.name': 'muon', 'optim.kwargs.beta': '0.9'}
  found, _ = arguments.with_fields(tree, fields)
  assert found['optim'] == {'name': 'muon', 'kwargs': {'beta': 0.9}}
  fields = {'optim.name': 'muon', 'learner.method': 'dapo'}
  _, said = arguments.with_fields(tree, fields)
  assert 'method grpo' in said and 'optimizer sgd' in said


def test_another_method_goes_without_the_arguments_of_the_first():
  method, kwargs, said = typed('learner.method=dapo', kl_coefficient=0.0)
  assert (method, kwargs) == ('dapo', {})
  assert 'for the method grpo, which are left out (kl_coefficient=0.0)' in said
  assert typed('learner.method=grpo', low=0.1) == ('grpo', {'low': 0.1}, '')
  assert typed('learner.method=dapo') == ('dapo', {}, '')
  method, kwargs, _ = typed(
    'learner.method_kwargs.high=.3', 'learner.method=dapo', low=0.1
  )
  assert (method, kwargs) == ('dapo', {'high': 0.3})
  whole = 'learner.method_kwargs={"high": .3}'
  assert typed('learner.method=dapo', whole, low=0.1) == (
    ('dapo', {'high': 0.3}, '')
  )


@pytest.mark.parametrize(
  'text, value',
  [
    ('.2', 0.2),
    ('3', 3),
    ('inf', float('inf')),
    ('true', True),
    ('(1, 2)', (1, 2)),
    ('sample', 'sample'),
  ],
)
def test_an_argument_needs_no_default_in_the_config(text, value):
  kwargs = typed(f'learner.method_kwargs.new={text}', low=0.1)[1]
  assert kwargs == {'low': 0.1, 'new': value}
  assert type(kwargs['new']) is type(value)


def test_the_type_of_an_argument_stays():
  kwargs = typed('learner.method_kwargs.low=1', low=0.1)[1]
  assert kwargs == {'low': 1} and type(kwargs['low']) is float
  kwargs = typed('learner.method_kwargs.name=1', name='x')[1]
  assert kwargs == {'name': '1'}


def test_what_is_no_dict_is_refused():
  with pytest.raises(ValueError, match='method_kwargs is 3; it must be of ty'):
    typed('learner.method_kwargs=3')
  with pytest.raises(
    ValueError, match='low.x cannot be set, because 0.1 is no'
  ):
    typed('learner.method_kwargs.low.x=3', low=0.1)


CONFIG = '--config=configs/arithmetic.py'
WORK = '--workdir=w'


def read(*words):
  return arguments.read(['train', *words])


@pytest.mark.parametrize(
  'given, words',
  [
    ([CONFIG, '--wrkdir=w'], r'--wrkdir, which it does .*mean .--workdir.\?'),
    ([CONFIG, '--num_generations=8'], 'mean --config.sampler.group'),
    ([CONFIG, '--helpme'], 'got --helpme, which it does not read; its flags'),
    ([CONFIG, '--seeds=3', 'x'], 'got --seeds x, which'),
    ([CONFIG, '--noworkdir'], 'got --noworkdir, which'),
    ([CONFIG, '--nonumber'], 'got --nonumber, which'),
    ([CONFIG, '--noconfig.seed', WORK], 'got --noconfig.seed, which'),
    ([CONFIG, '--workdir'], '--workdir has no value; give one'),
    ([CONFIG, '--config.seed', '--check'], '--config.seed has no value'),
    (['--config'], '--config has no value'),
    (['--config=', WORK], "There is no config file ''"),
    (
      ['--config=nope.py:mu=8', WORK],
      "There is no config file 'nope.py'; give",
    ),
    (['--config=tests', WORK], "There is no config file 'tests'"),
    ([CONFIG, WORK, '-config.seed', '-3'], 'seed=-3; give 0 or more'),
    ([CONFIG, WORK, '--config.seed=x'], "seed is 'x'; it must be of type int"),
    ([CONFIG, WORK, '--config.optim.lr=x'], 'it must be of type float'),
    ([CONFIG, WORK, '--config.data.chat=2'], "'2'; it must be of type bool"),
    (
      [CONFIG, WORK, '--config.seed=3.0'],
      'seed is 3.0; it must be of type int',
    ),
    (
      [CONFIG, WORK, '--config.data.prompt_buckets=8 16'],
      r"prompt_buckets\[0\] is '8 16'; it must be of type int",
    ),
    (
      [CONFIG, WORK, '--config.data.prompt_buckets=(8, 16'],
      r"prompt_buckets is '\(8, 16'; it must be of type tuple\[int, ...\]",
    ),
    (
      [CONFIG, WORK, '--config.rewards[7].weight=2'],
      'config.rewards has no such place; give all of them at once, as in',
    ),
    ([CONFIG, WORK, '--config.data.train[0].weight=2'], 'cannot be set, becau'),
    ([CONFIG, WORK, '--profile_steps=1,x'], r"_steps\[1\] is 'x'; it must be"),
    (
      [CONFIG, WORK, '--process_id=x'],
      "--process_id is 'x'; it must be of type",
    ),
    ([CONFIG, WORK, '--check=x'], "--check is 'x'; it must be of type bool"),
  ],
)
def test_what_cannot_be_read_is_said_in_our_words(given, words):
  with pytest.raises(ValueError, match=words):
    read(*given)


def test_a_config_of_the_checkout_is_found_and_none_of_another_package(
  tmp_path, monkeypatch
):
  monkeypatch.setattr(load, 'PACKAGE', tmp_path / 'grpo_jax')
  monkeypatch.chdir(tmp_path.parent)
  file = tmp_path / 'configs' / 'own.py'
  file.parent.mkdir()
  file.touch()
  with pytest.raises(ValueError, match="There is no config file 'configs/own"):
    load.installed('configs/own.py:mu=8')
  (tmp_path / 'pyproject.toml').touch()
  assert load.installed('configs/own.py:mu=8') == f'{file}:mu=8'


def test_every_way_to_type_a_value_is_read():
  found = read(
    CONFIG, '-workdir', 'w', '--nojson', '--config.model.unroll', '--check',
    '--config.seed', '3', '--config.optim.lr=1e-4', '--noconfig.data.chat',
    '--config.data.prompt_buckets=8', '--config.sampler.stop_strings=("a",)',
    '--config.model.remat=True', '--config.rewards[0].weight=2',
    '--config.data.train=({"name": "a.jsonl"},)', '--config.data.heldout=',
    '--profile_steps=1,2',
  )  # fmt: skip
  assert (found.command, found.workdir) == ('train', 'w')
  assert (found.json, found.check, found.verbose) == (False, True, False)
  assert found.profile_steps == (1, 2) and found.replay is None
  config = found.config
  assert config.model.unroll is True and config.data.chat is False
  assert (config.seed, config.optim.lr) == (3, 1e-4)
  assert config.data.prompt_buckets == (8,)
  assert config.sampler.stop_strings == ('a',)
  assert config.model.remat == 'layer' and config.data.heldout == ''
  assert config.rewards[0].weight == 2.0
  assert config.data.train == (config_lib.Source('a.jsonl'),)


def test_an_experiment_takes_workdirs_of_studies():
  found = arguments.read(['study', 'all', '--out=x', '--run=a', '--run', 'b'])
  assert found.run == ['a', 'b']
  assert list(arguments.read(['study', 'all', '--out=x']).run) == []


def test_the_last_value_of_a_flag_counts():
  found = read(
    CONFIG, WORK, '--config.seed=1', '--workdir=v', '--config.seed=2'
  )
  assert (found.workdir, found.config.seed) == ('v', 2)


@pytest.mark.parametrize(
  'words, said',
  [
    (['eval', WORK, CONFIG, '--number=x'], 'got --number, which it does not'),
    (
      ['sample', WORK, CONFIG, '--number=x'],
      "--number is 'x'; it must be of t",
    ),
    (['convert', 'a', 'b', '--shard_gb=x'], "is 'x'; it must be of type float"),
    (['plan', '--config.seed=3'], '--config.seed changes a config, but there'),
    (['study', 'all'], 'study all needs --out, a folder for its tables'),
    (['study', 'all', '--out=x', '--seeds=3'], 'got --seeds, which it does no'),
    (['study', 'brakes', '--full'], 'got --full, which it does not read'),
    (['study', 'brakes', '--run=x'], 'got --run, which it does not read'),
    (['study', 'brakes', '--workdir=gs://b/x'], 'is in a bucket, where study'),
  ],
)
def test_what_a_command_cannot_use_is_said(words, said):
  with pytest.raises(ValueError) as error:
    arguments.read(words)
  assert said in str(error.value)


@pytest.mark.parametrize(
  'body, words',
  [
    ('', 'has no function get_config; write one that'),
    ('def get_config(): raise KeyError(3)', 'cannot be used (KeyError: 3)'),
    ('def get_config(): return 1 + None', 'cannot be used (TypeError: unsupp'),
    ("def get_config(): raise ValueError('Not so.')", 'Not so.'),
    ('def get_config(): return base.get_config()', "NameError: name 'base'"),
    ('def get_config(): return [][7]', 'IndexError: list index out of range'),
  ],
)
def test_an_error_of_a_config_file_becomes_a_sentence(body, words, tmp_path):
  file = tmp_path / 'own.py'
  file.write_text(body)
  with pytest.raises(ValueError) as error:
    read(f'--config={file}', WORK, '--config.rewards[7].weight=2')
  assert words in str(error.value)


@pytest.mark.parametrize(
  'name, is_known',
  [
    ('rewards[1]', True),
    ('rewards[12].where', True),
    ('rewards[0].failed_reward', True),
    ('rewards[0].there', False),
    ('rewards[].name', False),
    ('data.train[1].weight', True),
    ('learner.method_kwargs.low', True),
    ('workers.number', True),
    ('workers.number.x', False),
    ('seed[0]', False),
    ('', False),
  ],
)
def test_fields_are_known(name, is_known):
  tree = config_lib.default().to_dict()
  tree['rewards'] = tree['data']['train'] = ({'name': 'x'},) * 13
  if is_known:
    arguments.with_fields(tree, {name: '1'})
    return
  with pytest.raises(ValueError, match='is no field of the config; '):
    arguments.with_fields(tree, {name: '1'})


def test_the_help_of_a_flag_has_its_form_and_its_default():
  said = options.help_text('convert', 200)
  assert '  --adapter             Write only a run' in said
  assert '  --shard_gb=...        Largest file of weights, in GB' in said
  assert "go into the next. ('5.0')" in said
  assert "none above --samples. ('1,8')" in options.help_text('eval', 200)


def test_every_flag_of_a_command_is_in_the_table():
  used = {flag for one in table.COMMANDS.values() for flag in one.flags}
  assert used == {*table.FLAGS}
  for one in table.COMMANDS.values():
    assert {name.lstrip('*?') for name in one.takes} <= {*one.flags}


def test_an_output_that_is_full_gets_a_sentence():
  with open('/dev/full', 'wb', buffering=0) as full:
    done = subprocess.run(
      [sys.executable, '-m', 'grpo_jax', '--version'],
      stdout=full,
      stderr=subprocess.PIPE,
      text=True,
      env=environment(),
    )
  assert done.returncode == 2
  assert done.stderr.startswith('grpo-jax: Standard output cannot be written (')
  assert done.stderr.count('\n') == 1


@pytest.mark.parametrize(
  'typed',
  [
    ['--workdir=a', 'b', 'c', '--out=x'],
    ['--workdir', 'a', 'b', '--out', 'x', 'c'],
    ['a', 'b', 'c', '--out=x'],
    ['a', '--run=b', '--out=x', '--run=c'],
  ],
)
def test_a_report_takes_any_number_of_runs(typed):
  found = arguments.read(['report', *typed])
  assert (found.workdir, found.run) == ('a', ['b', 'c']) and found.out == 'x'


def test_a_file_of_flags_is_refused_whether_it_is_there_or_not():
  done = subprocess.run(
    [sys.executable, '-m', 'grpo_jax', 'methods', '--flagfile=missing'],
    capture_output=True,
    text=True,
    env=environment(),
  )
  assert done.returncode == 2
  assert done.stderr.startswith('grpo-jax: methods got --flagfile, which it ')
  assert done.stderr.count('\n') == 1


def test_an_output_that_is_not_full_is_written():
  written = io.StringIO()
  print('a', file=printing.Output(written), flush=True)
  assert written.getvalue() == 'a\n'
