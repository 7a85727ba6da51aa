"""What is typed: fields that are set late, and what cannot be read."""

import io
import subprocess
import sys

from absl import flags
import pytest

from grpo_jax import config as config_lib
from grpo_jax.commands import arguments
from grpo_jax.commands import help_text
from grpo_jax.commands import refusals
from grpo_jax.commands import table
from tests.cli import environment


def typed(*later, method='grpo', **kwargs):
  """The method that results, its arguments, and what is said of it."""
  tree = {'learner': {'method': method, 'method_kwargs': kwargs}}
  said = arguments.set_fields(tree, [f'--config.{one}' for one in later])
  learner = config_lib.dataclass_from_dict(
    config_lib.Config, tree, 'config'
  ).learner
  return learner.method, learner.method_kwargs, said


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
  with pytest.raises(ValueError, match='cannot be set, because low is 0.1'):
    typed('learner.method_kwargs.low.x=3', low=0.1)


def read(*typed, command='train'):
  switches = {'json', 'check', 'verbose'}
  argv = arguments.prepared(['grpo-jax', command, *typed], switches)
  flags_of = table.COMMANDS[command].flags
  arguments.refuse_unread(argv, flags_of, switches)
  return argv


CONFIG = '--config=configs/arithmetic.py'


@pytest.mark.parametrize(
  'given, words',
  [
    ([CONFIG, '--wrkdir=w'], r'--wrkdir, which it does .*mean .--workdir.\?'),
    ([CONFIG, '--num_generations=8'], 'mean --config.sampler.group'),
    ([CONFIG, '--helpme'], 'got --helpme, which it does not read; its flags'),
    ([CONFIG, '--seeds=3', 'x'], 'got --seeds x, which'),
    ([CONFIG, '--noworkdir'], 'got --noworkdir, which'),
    ([CONFIG, '--workdir'], '--workdir has no value; give one'),
    ([CONFIG, '--config.seed', '--check'], '--config.seed has no value'),
    (['--config'], '--config has no value'),
    (['--config='], "There is no config file ''"),
    (['--config=nope.py:mu=8'], "There is no config file 'nope.py'; give"),
    (['--config=tests'], "There is no config file 'tests'"),
  ],
)
def test_what_cannot_be_read_is_said_in_our_words(given, words):
  with pytest.raises(ValueError, match=words):
    read(*given)


def test_a_config_of_the_checkout_is_found_and_none_of_another_package(
  tmp_path, monkeypatch
):
  monkeypatch.setattr(arguments, 'PACKAGE', tmp_path / 'grpo_jax')
  monkeypatch.chdir(tmp_path.parent)
  file = tmp_path / 'configs' / 'own.py'
  file.parent.mkdir()
  file.touch()
  with pytest.raises(ValueError, match="There is no config file 'configs/own"):
    arguments.installed('configs/own.py:mu=8')
  (tmp_path / 'pyproject.toml').touch()
  assert arguments.installed('configs/own.py:mu=8') == f'{file}:mu=8'


def test_what_can_be_read_passes():
  assert read(
    CONFIG, '-workdir', 'w', '--nojson', '--config.model.unroll', '--check'
  )[2:] == [
    CONFIG, '--workdir=w', '--nojson', '--config.model.unroll', '--check',
  ]  # fmt: skip


@pytest.mark.parametrize(
  'error, words',
  [
    ('flag --config.seed=x: bad', "config.seed is 'x'; it must be of type int"),
    (
      'flag --number=x: bad',
      "--number='x' cannot be read; give a whole number",
    ),
    ('flag --dtype=x: bad', 'give one of float32, bfloat16.'),
    (
      AttributeError("module 'config_config' has no attribute 'get_config'"),
      'has no get_config; define this function',
    ),
    (
      ValueError('X Traceback (most recent call last)\\nKeyError: 3'),
      'The config file cannot be used (KeyError: 3)',
    ),
  ],
)
def test_errors_of_absl_become_sentences(error, words):
  if isinstance(error, str):
    error = flags.IllegalFlagValueError(error)
  said = arguments.mistyped(['grpo-jax', 'train'], error)
  assert said is not None and words in said


@pytest.mark.parametrize('name', ['get_config', 'get_config_x'])
def test_an_error_of_a_config_file_is_not_taken_for_another(name):
  lacks = AttributeError(f"module 'base' has no attribute {name!r}")
  for error in (lacks, IndexError('list index out of range')):
    assert arguments.mistyped(['grpo-jax', 'train', CONFIG], error) is None
  place = ['grpo-jax', 'train', CONFIG, '--config.rewards[7].weight=2']
  said = arguments.mistyped(place, IndexError('tuple index out of range'))
  assert said is not None and 'config.rewards has no such place' in said


@pytest.mark.parametrize(
  'name, is_known',
  [
    ('rewards[1]', True),
    ('rewards[12].where', True),
    ('rewards[0].failed_reward', True),
    ('rewards[0].there', False),
    ('workers.number', True),
  ],
)
def test_fields_of_a_reward_are_known(name, is_known):
  said = arguments.unknown_field([f'--config.{name}=1'])
  assert (said is None) == is_known


def test_the_help_has_no_words_of_absl():
  flags.FLAGS(['grpo-jax'])
  for name in table.COMMANDS:
    said = help_text.text(table.COMMANDS, name, 200)
    assert 'repeat this option' not in said and '<float32|' not in said


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


def test_the_config_comes_before_its_fields(tmp_path):
  file = tmp_path / 'my.py'
  file.write_text('')
  field, config = '--config.steps=3', f'--config={file}'
  said = arguments.prepared(['grpo-jax', 'train', field, config], ())
  assert said == ['grpo-jax', 'train', config, field]


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
  command = table.COMMANDS['report']
  argv = arguments.prepared(
    ['grpo-jax', 'report', *typed], {'json'}, command.takes, False
  )
  arguments.refuse_unread(argv, command.flags, {'json'})
  runs = [x for x in argv[2:] if not x.startswith('--out')]
  assert runs == ['--workdir=a', '--run=b', '--run=c'] and '--out=x' in argv


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
  print('a', file=refusals.Output(written), flush=True)
  assert written.getvalue() == 'a\n'
