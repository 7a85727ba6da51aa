"""launch/own_code: a folder with a config, and what its config names."""

import importlib
import json
import pathlib
import re
import subprocess
import sys

import pytest

from grpo_jax import config as config_lib
from grpo_jax import rewards
from grpo_jax.config import importing
from grpo_jax.config import load
from grpo_jax.planning import compiling
from grpo_jax.run.build import method as build_method
from grpo_jax.run.build import names
from tests import cli
from tests.launch import scripts

FOLDER = scripts.LAUNCH / 'own_code'


@pytest.fixture
def path(monkeypatch):
  """`sys.path`, and no module of the folder, as in a new process."""
  added = {str(FOLDER), str(scripts.ROOT / 'configs')}
  monkeypatch.setattr(sys, 'path', [x for x in sys.path if x not in added])
  yield sys.path
  for name in 'my_rewards', 'my_losses':
    sys.modules.pop(name, None)


def test_a_config_names_what_lies_beside_it(path):
  config = config_lib.resolve(load.load_config(FOLDER / 'config.py'))
  # Behind all others, so that it hides no module.
  assert path[-2:] == [str(FOLDER), str(scripts.ROOT / 'configs')]
  names.check(config)
  assert 'my_losses' not in sys.modules  # which would have imported JAX
  assert build_method.method_of(config).apply
  assert config.learner.method_kwargs == {'patience': 0.5}
  load.load_config(FOLDER / 'config.py')
  assert path.count(str(FOLDER)) == 1


def test_a_confined_worker_imports_what_lies_beside_the_config(tmp_path, path):
  """It gets no variables of ours, so the folder comes another way."""
  (tmp_path / 'my_rewards.py').write_text(
    'import my_table\n'
    'from grpo_jax import rewards\n'
    '@rewards.confined(prepare=lambda example: None)\n'
    'def looked_up(prompt, completion, example):\n'
    '  return my_table.VALUES[completion]\n'
  )
  (tmp_path / 'my_table.py').write_text("VALUES = {'a': 0.25}\n")
  importing.add_folder(tmp_path)
  importlib.invalidate_caches()
  function = rewards.resolve('my_rewards:looked_up')
  one = rewards.WeightedReward(
    'own', function, where='workers', imported_as='my_rewards:looked_up'
  )
  with rewards.Workers(
    number=1, time_limit_secs=60.0, memory_limit_bytes=1 << 30
  ) as pool:
    found = rewards.score([one], ['p'], ['a'], [{'answer': ''}], workers=pool)
  sys.modules.pop('my_table', None)
  assert found.reward.tolist() == [0.25], found


def test_programs_are_compiled_in_processes_that_find_it(monkeypatch, path):
  """With the same folders, the last of them last."""
  importing.add_folder(FOLDER)
  started = []

  class Popen:
    returncode = 0

    def __init__(self, command, **_):
      started.append(command)

    def communicate(self, _):
      return json.dumps({'collectives': []}), ''

    def kill(self):
      pass

  monkeypatch.setattr(subprocess, 'Popen', Popen)
  request = compiling.Request({}, 'v5e:4x4', 1, 'train_step')
  compiling.compile_all([request], at_once=1)
  assert started[0][-1] == str(FOLDER)


WRONG = [
  ('rewards=({"name":"exact_mach","weight":1.0},)', "mean 'exact_match'?"),
  (
    'rewards=({"name":"my_rewards:digit","weight":1.0},)',
    "no function 'digit' (did you mean 'digits'?)",
  ),
  ('learner.method=grop', 'is no method; did you mean grpo?'),
  ('learner.method=my_losses:patient', "(did you mean 'patient_grpo'?)"),
  ('learner.method=my_loses:patient_grpo', "No module named 'my_loses'"),
  ('optim.name=my_losses:patient', "(did you mean 'patient_grpo'?)"),
  ('model.path=my_lab.models:tiny', "No module named 'my_lab'"),
  ('data.train=aritmetic', "(did you mean 'arithmetic'?)"),
  ('data.heldout=my_data:sums', "No module named 'my_data'"),
  ('evaluation.answer=my_rewards:digitz', "(did you mean 'digits'?)"),
]
PROGRAM = """
import sys
from grpo_jax.commands import main
for words in {commands!r}:
  print('==', main.main(words), 'jax' in sys.modules, file=sys.stderr)
"""


def test_names_are_looked_up_before_jax_is_imported(tmp_path):
  """And `data` needs no JAX. The folder and the module are found anywhere."""
  config = f'--config={FOLDER / "config.py"}'
  commands = [
    *(
      ['train', config, f'--workdir={tmp_path}/run', f'--config.{field}']
      for field, _ in WRONG
    ),
    ['data', config, '--show=1'],
  ]
  done = subprocess.run(
    [sys.executable, '-P', '-c', PROGRAM.format(commands=commands)],
    cwd=tmp_path,
    env=cli.environment(),
    capture_output=True,
    text=True,
  )
  *refused, last = re.findall(r'(.*?)^== (\d+ \w+)$', done.stderr, re.M | re.S)
  assert len(refused) == len(WRONG), done.stderr
  for (field, said), found in zip(WRONG, refused):
    assert said in found[0] and found[1] == '2 False', (field, found)
  assert last[1] == '0 False' and 'width 6: 100% fit' in done.stdout
  assert not (tmp_path / 'run').exists()


def test_a_console_script_finds_modules_in_the_current_directory(tmp_path):
  """As `python -m grpo_jax` does, whose path begins with it."""
  (tmp_path / 'here.py').write_text('def score(*_):\n  return 1.0\n')
  config = tmp_path / 'elsewhere' / 'mine.py'
  config.parent.mkdir()
  config.write_text(
    'from grpo_jax.config import default\n'
    'def get_config():\n'
    '  found = default()\n'
    "  found.rewards = ({'name': 'here:scor', 'weight': 1.0},)\n"
    '  return found\n'
  )
  done = cli.call('train', f'--config={config}', '--workdir=run', cwd=tmp_path)
  assert done.returncode == 2
  assert "no function 'scor' (did you mean 'score'?)" in done.stderr


@pytest.mark.long
def test_two_processes_train_with_it(tmp_path):
  """As on a pod: a reward and a loss that lie beside the config alone."""
  own = tmp_path / 'my_lab'
  own.mkdir()
  for file in FOLDER.glob('*.py'):
    (own / file.name).write_text(file.read_text())
  done = scripts.run(
    sys.executable, scripts.LAUNCH / 'local.py', '--num_processes=2',
    '--max_restarts=0', '--', 'train', f'--config={own / "config.py"}',
    f'--workdir={tmp_path / "run"}', '--config.steps=2',
    '--config.mesh.data=2', '--config.warm_up.steps=2',
    '--config.optim.warmup_steps=0',
    '--config.evaluation.examples=8', PYTHONPATH=scripts.ROOT,
    timeout=600,
  )  # fmt: skip
  assert done.returncode == 0, done.stderr[-2000:]
  lines = (tmp_path / 'run' / 'metrics.jsonl').read_text().splitlines()
  assert 'reward/my_rewards:digits' in json.loads(lines[-1])
  assert pathlib.Path(tmp_path / 'run' / 'config.json').exists()
