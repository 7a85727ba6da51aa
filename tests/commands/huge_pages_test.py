"""A program that computes on a CPU starts once more, for large pages."""

import os
import subprocess
import sys

import pytest

from grpo_jax.commands import huge_pages
from grpo_jax.planning import accelerators
from tests import cli

NAME, ON = 'GLIBC_TUNABLES', 'glibc.malloc.hugetlb=1'
OTHER = 'glibc.malloc.check=0'


@pytest.fixture
def able(monkeypatch):
  monkeypatch.setattr(huge_pages, '_can', lambda: True)
  monkeypatch.setattr(accelerators, 'device_files', lambda: ())


@pytest.mark.parametrize(
  'given, wanted',
  [
    ({'A': 'b'}, ON),
    ({NAME: OTHER}, f'{OTHER}:{ON}'),
    ({'JAX_PLATFORMS': 'cpu'}, ON),
    ({'JAX_PLATFORMS': ''}, ON),
    ({'JAX_PLATFORMS': 'cuda,cpu'}, None),
    ({NAME: ON}, None),
    ({NAME: 'glibc.malloc.hugetlb=0'}, None),
  ],
)
def test_the_environment_that_is_asked_for(able, given, wanted):
  asked = huge_pages.asking(given)
  assert asked == (wanted and {**given, NAME: wanted})


def test_nothing_is_asked_beside_an_accelerator(able, monkeypatch):
  found = ('/dev/nvidia0',)
  monkeypatch.setattr(accelerators, 'device_files', lambda: found)
  assert huge_pages.asking({}) is None
  assert huge_pages.asking({'JAX_PLATFORMS': 'cpu'}) == {
    'JAX_PLATFORMS': 'cpu',
    NAME: ON,
  }


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
  monkeypatch.setattr(huge_pages, '_KERNEL', str(file))
  monkeypatch.setattr(os, 'confstr', lambda name: library)
  assert huge_pages._can() is can


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
  wanted = value or (ON if huge_pages._can() else None)
  assert process.returncode == 2
  assert f'{process.pid} {wanted}' in said
