"""The guard of a worker, where a system allows less than others."""

import os
import pathlib
import signal
import subprocess
import sys

import pytest

from grpo_jax.rewards import _guard

pytestmark = pytest.mark.skipif(
  sys.platform != 'linux', reason='namespaces are a part of Linux'
)
FOLDER = str(pathlib.Path(_guard.__file__).parent)

# In a process of its own, as the guard is: the test has threads.
UNMAPPED = f"""
import sys
sys.path.insert(0, {FOLDER!r})
import _guard

flags = []

def unshare(flag):
  flags.append(flag)
  if flag == _guard._CLONE_NEWPID:
    raise PermissionError

def refuse(*_):
  raise PermissionError

_guard.unshare, _guard.open = unshare, refuse
made = _guard._new_pid_namespace({{'pid_namespace': True}})
print(made, flags == [_guard._CLONE_NEWPID])
"""

# Root without CAP_SYS_ADMIN (21), and none can write below /proc.
NARROW = f"""
import os, sys
sys.path.insert(0, {FOLDER!r})
import _guard

bind, read_only, remount = 1 << 12, 1, 32
try:
  _guard.unshare(_guard._CLONE_NEWNS)
  _guard.mount('none', '/', '', _guard._MS_REC | _guard._MS_PRIVATE)
  _guard.mount('/proc', '/proc', '', bind | _guard._MS_REC)
  _guard.mount('none', '/proc', '', remount | bind | read_only)
  _guard.prctl(24, 21)
except OSError as error:
  sys.exit('cannot be tried: ' + str(error))
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
SPINS = f"""
import resource, sys
sys.path.insert(0, {FOLDER!r})
import _guard

_guard.lower(resource.RLIMIT_CPU, 1)
while True: pass
"""
JUDGES = """
from grpo_jax.rewards import sandbox
from grpo_jax.rewards import workers
with workers.Workers(1) as pool:
  (outcome,) = pool.judge('exact_match', ['p'], ['2'], [{'answer': '2'}])
print(outcome.reward, 'Read-only' in sandbox.refusal('landlock'))
"""


def run(*arguments):
  return subprocess.run(
    [sys.executable, *arguments],
    capture_output=True,
    text=True,
    timeout=120,
    env={**os.environ, 'PYTHONPATH': os.pathsep.join(sys.path)},
  )


def test_the_kernel_says_that_the_processor_time_is_over():
  """SIGXCPU; a hard limit, of which both are one, ends by SIGKILL alone."""
  ended = subprocess.run([sys.executable, '-c', SPINS], timeout=60)
  assert ended.returncode == -signal.SIGXCPU


def test_a_user_namespace_without_a_map_is_left_alone():
  """And the guard itself never enters one: only its child has tried."""
  ran = run('-c', UNMAPPED)
  assert ran.stdout == 'False True\n', ran


def test_workers_start_where_no_namespace_can_be_mapped():
  ran = run('-c', NARROW, '-c', JUDGES)
  if ran.stderr.startswith('cannot be tried'):
    pytest.skip(ran.stderr.strip())
  assert ran.stdout == '1.0 False\n', ran
