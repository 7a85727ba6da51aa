"""Memory that a process keeps for the next update."""

import pathlib
import subprocess
import sys

import jax
import pytest

from grpo_jax.training import host_memory

# Faults of pages while a program runs again. It is one process, because nothing
# takes `keep` back, and it acts on later threads.
FAULTS = """
import resource, sys
from grpo_jax.training import host_memory
kept = sys.argv[1] == 'keep' and host_memory.keep()
import jax, jax.numpy as jnp
program = jax.jit(lambda x: (x @ x) @ (x + 1))
x = jnp.ones((3072, 3072), jnp.float32)
for _ in range(3):
  program(x).block_until_ready()
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
before = faults()
program(x).block_until_ready()
print(kept, faults() - before)
"""


@pytest.mark.skipif(sys.platform != 'linux', reason='glibc is of Linux')
def test_an_update_finds_the_memory_of_the_last_one():
  told = {}
  for word in ('keep', 'not'):
    done = subprocess.run(
      [sys.executable, '-c', FAULTS, word],
      cwd=pathlib.Path(__file__).parents[2],
      env={'JAX_PLATFORMS': 'cpu', 'PATH': '/usr/bin:/bin'},
      capture_output=True,
      text=True,
      check=True,
      timeout=300,
    )
    kept, faults = done.stdout.split()
    told[word] = kept, int(faults)
  assert told['not'][0] == 'False' and told['not'][1] > 5000
  assert told['keep'][0] == 'True' and told['keep'][1] < 1000


@pytest.fixture
def options(monkeypatch):
  """What `mallopt` is given; it is not called."""
  given = []

  def set_option(name, value):
    given.append((name, value))
    return 1

  for name in ('MALLOC_ARENA_MAX', 'MALLOC_MMAP_MAX_', 'GLIBC_TUNABLES'):
    monkeypatch.delenv(name, raising=False)
  monkeypatch.setattr(host_memory, '_of_glibc', lambda name: set_option)
  return given


@pytest.mark.parametrize(
  'platforms, devices, kept',
  [
    ('cpu', ['/dev/nvidia0'], True),
    ('cuda,cpu', [], False),
    (None, [], True),
    (None, ['/dev/nvidia0'], False),
    (None, ['/dev/vfio/0'], False),
  ],
)
def test_only_where_xla_computes_on_the_cpu(
  options, monkeypatch, platforms, devices, kept
):
  class Config:
    jax_platforms = platforms

  monkeypatch.setattr(jax, 'config', Config)
  found = [one[: len('/dev/vfio')] for one in devices]
  monkeypatch.setattr(
    host_memory.glob,
    'glob',
    lambda pattern: [one for one in found if pattern.startswith(one[:9])],
  )
  assert host_memory.keep() == kept == bool(options)


@pytest.mark.parametrize(
  'name, value, kept',
  [
    ('MALLOC_ARENA_MAX', '2', False),
    ('GLIBC_TUNABLES', 'glibc.malloc.hugetlb=1', False),
    ('GLIBC_TUNABLES', 'glibc.pthread.rseq=0', True),
  ],
)
def test_what_the_user_has_set_stays(options, monkeypatch, name, value, kept):
  monkeypatch.setenv(name, value)
  monkeypatch.setattr(host_memory.glob, 'glob', lambda pattern: [])
  assert host_memory.keep() == kept == bool(options)
