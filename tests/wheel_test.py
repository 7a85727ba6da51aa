"""The wheel: what people get who have no checkout."""

import json
import os
import pathlib
import subprocess
import sys
import venv

import pytest

from tests import cli

ROOT = pathlib.Path(__file__).parent.parent

pytestmark = pytest.mark.long


@pytest.fixture(scope='module')
def installed(tmp_path_factory):
  """The Python of a fresh environment with the wheel, and a place to stand."""
  place = tmp_path_factory.mktemp('wheel')
  pip = [sys.executable, '-m', 'pip', '-q', '--disable-pip-version-check']
  subprocess.run(
    [*pip, 'wheel', '--no-deps', '-w', str(place), str(ROOT)], check=True
  )
  (wheel,) = place.glob('grpo_jax-*.whl')
  venv.create(place / 'venv')
  python = place / 'venv' / 'bin' / 'python'
  # Without compiling all packages to byte code, of which little is imported.
  subprocess.run(
    [*pip, '--python', python, 'install', '--no-compile', wheel], check=True
  )
  return python, place


def run(installed, *arguments):
  python, place = installed
  kept = {
    k: v
    for k, v in os.environ.items()
    if k not in ('PYTHONPATH', 'VIRTUAL_ENV')
  } | {'XLA_FLAGS': ' '.join(cli.QUICK)}
  return subprocess.run(
    [python, *arguments],
    cwd=place,
    env=kept,
    check=True,
    capture_output=True,
    text=True,
  ).stdout


def test_optim_and_losses_import_nothing_heavy(installed):
  """In a process that could import everything."""
  code = """
import sys, importlib
importlib.import_module(sys.argv[1])
heavy = {'flax', 'orbax', 'grain', 'transformers', 'rich', 'pyarrow',
         'ml_collections', 'tokenizers', 'tensorboardX'}
print(sorted(heavy & set(sys.modules)), sys.modules['grpo_jax'].__file__)
"""
  for module in ('grpo_jax.optim', 'grpo_jax.losses'):
    out = run(installed, '-c', code, module)
    assert out.startswith('[] ') and str(ROOT) not in out, out


def test_the_default_runs_outside_the_checkout(installed):
  out = run(
    installed,
    '-m',
    'grpo_jax',
    'train',
    '--config=configs/arithmetic.py',
    '--config.steps=2',
    '--config.warm_up.steps=3',
    '--config.evaluation.examples=50',
    '--workdir=run',
  )
  assert json.loads(out)['steps'] == 2
  help_text = run(installed, '-m', 'grpo_jax', 'train', '--help')
  assert 'Learning rate at the peak' in help_text
