"""What a program that computes sets, and that it starts once more on a CPU."""

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
  """A call gives an environment, and says what of it is new.

  To this program, and to the one that it is to become, if it is.
  """
  monkeypatch.setattr(start, '_can_have_large_pages', lambda: True)
  monkeypatch.setattr(accelerators, 'device_files', lambda: ())

  def with_environment(given):
    here, anew = dict(given), []
    monkeypatch.setattr(gc, 'set_threshold', lambda *numbers: None)
    monkeypatch.setattr(os, 'environ', here)
    monkeypatch.setattr(os, 'execve', lambda *args: anew.append(args))
    start.prepare()
    assert all(command[0] == sys.executable for _, command, _ in anew)
    return [
      dict(environment.items() - given.items())
      for environment in (here, *(environment for *_, environment in anew))
    ]

  return with_environment


XLA_NEW = {XLA: f'{LEVEL}=2'}


@pytest.mark.parametrize(
  'given, wanted',
  [
    ({'A': 'b'}, ON),
    ({NAME: OTHER}, f'{OTHER}:{ON}'),
    (CPU, ON),
    ({'JAX_PLATFORMS': ''}, ON),
    ({NAME: ON}, None),
    ({NAME: 'glibc.malloc.hugetlb=0'}, None),
  ],
)
def test_a_program_starts_anew_for_large_pages(started, given, wanted):
  anew = [{**XLA_NEW, NAME: wanted}] if wanted else []
  assert started(given) == [XLA_NEW, *anew]


@pytest.mark.parametrize(
  'given, wanted',
  [
    ('', f'{LEVEL}=2'),
    ('--xla_dump_to=a', f'--xla_dump_to=a {LEVEL}=2'),
    (f'{LEVEL}=3', None),
    ('a file of flags', None),
  ],
)
def test_the_level_of_optimization(started, given, wanted):
  new = {XLA: wanted} if wanted else {}
  assert started({XLA: given, NAME: ON}) == [new]
  assert started({XLA: given}) == [new, {**new, NAME: ON}]


def test_without_large_pages_a_program_goes_on(started, monkeypatch):
  monkeypatch.setattr(start, '_can_have_large_pages', lambda: False)
  assert started(CPU) == [XLA_NEW]


def test_nothing_is_set_beside_an_accelerator(started, monkeypatch):
  assert started({'JAX_PLATFORMS': 'cuda,cpu'}) == [{}]
  monkeypatch.setattr(accelerators, 'device_files', lambda: ('/dev/nvidia0',))
  assert started({}) == [{}]
  assert started(CPU) == [XLA_NEW, {**XLA_NEW, NAME: ON}]


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
  assert start._can_have_large_pages() is can


@pytest.mark.parametrize('value', [None, 'glibc.malloc.hugetlb=0'])
def test_the_command_starts_anew_as_the_same_process(value, tmp_path):
  """A config file, which is code, says what it finds."""
  config = tmp_path / 'config.py'
  config.write_text(
    'import os, pathlib\n'
    # What the kernel was given, whatever Python has changed since.
    'given = pathlib.Path("/proc/self/environ").read_text().split("\\0")\n'
    f'found = [each for each in given if each.startswith({NAME!r})]\n'
    'raise ValueError(f"{os.getpid()} {found}")\n'
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
  _, said = process.communicate(timeout=300)
  wanted = value or (ON if start._can_have_large_pages() else None)
  assert process.returncode == 2
  found = [f'{NAME}={wanted}'] if wanted else []
  assert f'{process.pid} {found}' in said
