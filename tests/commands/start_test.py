"""A program that computes on a CPU starts once more, for large pages."""

import gc
import os
import subprocess
import sys

import pytest

from grpo_jax.commands import start
from grpo_jax.planning import accelerators
from tests import cli

NAME, ON = 'GLIBC_TUNABLES', 'glibc.malloc.hugetlb=1'
OTHER = 'glibc.malloc.check=0'
XLA, LEVEL = 'XLA_FLAGS', '--xla_backend_optimization_level'
CPU = {'JAX_PLATFORMS': 'cpu'}


@pytest.fixture
def started(monkeypatch):
  """A call says with what a program goes on that was started with this."""
  monkeypatch.setattr(start, '_can', lambda: True)
  monkeypatch.setattr(accelerators, 'device_files', lambda: ())

  def with_environment(given):
    here, starts = dict(given), []
    monkeypatch.setattr(gc, 'set_threshold', lambda *numbers: None)
    monkeypatch.setattr(os, 'environ', here)
    monkeypatch.setattr(os, 'execve', lambda *args: starts.append(args))
    start.prepare()
    for _, command, environment in starts:
      assert command[0] == sys.executable
      return environment
    return here

  return with_environment


@pytest.mark.parametrize(
  'given, wanted',
  [
    ({'A': 'b'}, ON),
    ({NAME: OTHER}, f'{OTHER}:{ON}'),
    (CPU, ON),
    ({'JAX_PLATFORMS': ''}, ON),
    ({NAME: ON}, ON),
    ({NAME: 'glibc.malloc.hugetlb=0'}, 'glibc.malloc.hugetlb=0'),
  ],
)
def test_large_pages(started, given, wanted):
  assert started(given) == {**given, NAME: wanted, XLA: f'{LEVEL}=2'}


@pytest.mark.parametrize(
  'given, wanted',
  [
    ('', f'{LEVEL}=2'),
    ('--xla_dump_to=a', f'--xla_dump_to=a {LEVEL}=2'),
    (f'{LEVEL}=3', f'{LEVEL}=3'),
  ],
)
def test_the_level_of_optimization(started, monkeypatch, given, wanted):
  assert started({XLA: given, NAME: ON})[XLA] == wanted
  monkeypatch.setattr(start, '_can', lambda: False)  # and so does not start
  assert started({XLA: given}) == {XLA: wanted}


def test_nothing_is_set_beside_an_accelerator(started, monkeypatch):
  assert started(both := {'JAX_PLATFORMS': 'cuda,cpu'}) == both
  monkeypatch.setattr(accelerators, 'device_files', lambda: ('/dev/nvidia0',))
  assert started({}) == {}
  assert started(CPU) == {**CPU, NAME: ON, XLA: f'{LEVEL}=2'}


def test_python_looks_for_cycles_less_often(monkeypatch):
  monkeypatch.setattr(os, 'environ', {'JAX_PLATFORMS': 'cuda'})
  before = gc.get_threshold()
  try:
    start.prepare()
    assert gc.get_threshold() == (100_000, 10, 10)
  finally:
    gc.set_threshold(*before)


@pytest.mark.parametrize(
  'library, kernel, can',
  [
    ('glibc 2.36', 'always [madvise] never', True),
    ('glibc 2.35', 'always [madvise] never', True),
    ('glibc 2.31', 'always [madvise] never', False),
    ('glibc 2.36', '[always] madvise never', False),
    ('glibc 2.36', None, False),
    (None, 'always [madvise] never', False),
  ],
)
def test_what_is_needed_for_it(library, kernel, can, monkeypatch, tmp_path):
  file = tmp_path / 'enabled'
  if kernel:
    file.write_text(f'{kernel}\n')
  monkeypatch.setattr(start, '_KERNEL', str(file))
  monkeypatch.setattr(os, 'confstr', lambda name: library)
  assert start._can() is can


@pytest.mark.parametrize('value', [None, 'glibc.malloc.hugetlb=0'])
def test_the_command_starts_anew_as_the_same_process(value, tmp_path):
  """A config file, which is code, says what it finds."""
  config = tmp_path / 'config.py'
  config.write_text(
    'import os\n'
    f'raise ValueError(f"{{os.getpid()}} {{os.environ.get({NAME!r})}}")\n'
  )
  environment = {**cli.environment(), 'JAX_PLATFORMS': 'cpu'}
  environment.pop(NAME, None)
  if value:
    environment[NAME] = value
  process = subprocess.Popen(
    [sys.executable, '-m', 'grpo_jax', 'train', f'--config={config}']
    + [f'--workdir={tmp_path / "run"}'],
    env=environment,
    stderr=subprocess.PIPE,
    text=True,
  )
  _, said = process.communicate(timeout=60)
  wanted = value or (ON if start._can() else None)
  assert process.returncode == 2
  assert f'{process.pid} {wanted}' in said
