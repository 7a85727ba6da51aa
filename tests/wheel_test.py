"""The sdist and the wheel: what people get who have no checkout."""

import email
import json
import os
import pathlib
import re
import subprocess
import sys
import tarfile
import venv
import zipfile

import pytest

import grpo_jax
from tests import cli

ROOT = pathlib.Path(__file__).parent.parent

pytestmark = pytest.mark.long

PIP = (sys.executable, '-m', 'pip', '-q', '--disable-pip-version-check')


@pytest.fixture(scope='module')
def archives(tmp_path_factory):
  """The sdist, and the wheel that is built from it."""
  place = tmp_path_factory.mktemp('dist')
  build = [sys.executable, '-m', 'build', '--outdir', place, ROOT]
  subprocess.run(build, check=True, capture_output=True)
  (sdist,), (wheel,) = place.glob('*.tar.gz'), place.glob('*.whl')
  return sdist, wheel


@pytest.fixture(scope='module')
def installed(archives, tmp_path_factory):
  """The Python of a fresh environment with the wheel, and a place to stand."""
  _, wheel = archives
  place = tmp_path_factory.mktemp('wheel')
  venv.create(place / 'venv')
  python = place / 'venv' / 'bin' / 'python'
  # Without compiling all packages to byte code, of which little is imported.
  subprocess.run(
    [*PIP, '--python', python, 'install', '--no-compile', wheel], check=True
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


def trains(installed, workdir):
  """A short run of the config that comes with the package."""
  out = run(
    installed,
    '-m',
    'grpo_jax',
    'train',
    '--config=configs/arithmetic.py',
    '--config.steps=2',
    '--config.optim.warmup_steps=1',
    '--config.warm_up.steps=3',
    '--config.evaluation.examples=50',
    f'--workdir={workdir}',
  )
  assert json.loads(out)['steps'] == 2


def test_twine_finds_no_fault(archives):
  check = [sys.executable, '-m', 'twine', 'check', '--strict', *archives]
  done = subprocess.run(check, capture_output=True, text=True)
  assert done.returncode == 0, done.stdout + done.stderr


# What tells of tests, and what packages of others are needed for.
OUT = (
  'tests/clients/', 'tests/bench/', 'tests/kills', 'tests/mutants',
  'tests/pictures/', 'tests/soak', 'tests/models/weights/golden/',
)  # fmt: skip


def test_the_sdist_is_the_checkout_without_the_gate(archives):
  with tarfile.open(archives[0]) as opened:
    held = {name.partition('/')[2] for name in opened.getnames()}
  listed = subprocess.run(
    ['git', 'ls-files'], cwd=ROOT, capture_output=True, text=True
  ).stdout.splitlines()
  ours = {name for name in listed if (ROOT / name).exists()}
  assert {'tests/wheel_test.py', 'launch/notebook.ipynb'} <= held
  # What git does not know yet, or does not have here, may be there too.
  left_out = {
    name
    for name in ours
    if name.startswith(OUT)
    or re.match(r'tests/(launch|lab/studies)/\w+_test.py', name)
    or name == 'tests/data/reading_test.py'  # of a benchmark
    or name.endswith(('.svg', '.png'))
  }
  assert ours - held == ({'.ci/run'} & ours) | left_out
  assert not [name for name in held if '__pycache__' in name]
  assert archives[0].stat().st_size < 3e6


def test_the_wheel_holds_the_package_and_the_configs(archives):
  with zipfile.ZipFile(archives[1]) as opened:
    held = set(opened.namelist())
  folders = {name.partition('/')[0] for name in held}
  assert folders == {'grpo_jax', f'grpo_jax-{grpo_jax.__version__}.dist-info'}
  for path in (ROOT / 'configs').glob('*.py'):
    assert f'grpo_jax/configs/{path.name}' in held
  for path in (ROOT / 'grpo_jax').rglob('*.py'):
    assert str(path.relative_to(ROOT)) in held


def test_the_page_on_pypi_needs_no_other_file(archives):
  """Its code is that of the README."""
  with zipfile.ZipFile(archives[1]) as opened:
    (name,) = (n for n in opened.namelist() if n.endswith('/METADATA'))
    told = email.message_from_bytes(opened.read(name))
  assert told['Version'] == grpo_jax.__version__
  assert told['Description-Content-Type'] == 'text/markdown'
  page = told.get_payload(decode=True).decode()
  assert re.findall(r'\]\((?!https://)|<img', page) == []
  readme = (ROOT / 'README.md').read_text()
  code = [re.findall(r'```.*?```', x, re.DOTALL) for x in (page, readme)]
  assert code[0] == code[1] and len(code[0]) > 5
  with tarfile.open(archives[0]) as opened:
    (name,) = (n for n in opened.getnames() if n.endswith('/PKG-INFO'))
    other = email.message_from_bytes(opened.extractfile(name).read())
  assert told.items() == other.items()


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


def test_the_wheel_runs_outside_the_checkout(installed):
  trains(installed, 'run')
  help_text = run(installed, '-m', 'grpo_jax', 'train', '--help')
  assert 'Learning rate at the peak' in help_text


def test_the_sdist_runs_in_the_place_of_the_wheel(archives, installed):
  """The metadata of both are the same, and so is what they depend on."""
  python, place = installed
  install = [*PIP, '--python', python, 'install', '--no-compile', '--no-deps']
  subprocess.run([*install, '--force-reinstall', archives[0]], check=True)
  script = place / 'venv' / 'bin' / 'grpo-jax'
  out = run((script, place), '--version')
  assert out.startswith(f'grpo-jax {grpo_jax.__version__} (jax ')
  trains(installed, 'another')
