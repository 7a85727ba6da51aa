"""Runs that are asked to end, share a workdir, or find the disk full."""

import resource
import signal
import time

import pytest

from tests import runs
from tests.commands import JUDGE
from tests.commands import SMALL
from tests.commands import assert_refused
from tests.commands import command
from tests.commands import popen
from tests.commands import wait_for

LONG = (SMALL, JUDGE, '--config.steps=100000', '--config.data.heldout=')


@pytest.mark.parametrize(
  'number, code', [(signal.SIGTERM, 143), (signal.SIGINT, 130)]
)
def test_a_signal_saves_and_the_next_start_goes_on(number, code, tmp_path):
  process = popen('train', *LONG, f'--workdir={tmp_path}')
  wait_for(tmp_path, 3, process)
  process.send_signal(number)
  asked = time.monotonic()
  _, err = process.communicate(timeout=60)
  assert process.returncode == code and 'Traceback' not in err
  assert time.monotonic() - asked < 10
  done = len(runs.records(tmp_path)) - 1
  assert runs.saved(tmp_path)[0] == done
  again = popen('train', *LONG, f'--workdir={tmp_path}')
  wait_for(tmp_path, done + 1, again)
  again.kill()
  _, err = again.communicate()
  assert f'goes on from the checkpoint of rollout {done}' in err


def test_two_ctrl_c_end_at_once(tmp_path):
  process = popen(
    'train', *LONG, '--config.rewards=({"name":"tests.judges:slow"},)',
    f'--workdir={tmp_path}',
  )  # fmt: skip
  while not (tmp_path / 'checkpoints' / '0').exists():
    time.sleep(0.05)
    assert process.poll() is None, process.stderr.read()
  time.sleep(1)
  process.send_signal(signal.SIGINT)
  time.sleep(1)
  assert process.poll() is None  # it waits for the reward
  process.send_signal(signal.SIGINT)
  _, err = process.communicate(timeout=30)
  assert process.returncode == 130 and 'Traceback' not in err


def test_two_processes_do_not_share_a_workdir(tmp_path):
  process = popen('train', *LONG, f'--workdir={tmp_path}')
  wait_for(tmp_path, 1, process)
  done = command('train', *LONG, f'--workdir={tmp_path}')
  process.kill()
  process.communicate()
  assert_refused(done, 'Another process is running')


def test_a_run_survives_a_full_disk(tmp_path):
  """Files may not grow beyond 16 KiB, for a while."""

  def small_disk():
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, limits[1]))

  process = popen(
    'train', *LONG, f'--workdir={tmp_path}', preexec_fn=small_disk
  )
  wait_for(tmp_path, 5, process)
  assert not list((tmp_path / 'checkpoints').glob('[0-9]*'))
  _, hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
  resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (hard, hard))
  while not list((tmp_path / 'checkpoints').glob('[0-9]*')):
    time.sleep(0.05)
    assert process.poll() is None, process.stderr.read()
  process.send_signal(signal.SIGTERM)
  _, err = process.communicate(timeout=60)
  assert process.returncode == 143 and 'tries again' in err
  assert 'Traceback' not in err
  written = runs.records(tmp_path)
  assert [r['step'] for r in written] == list(range(len(written)))
  assert written[-1]['saves_failed'] >= 1
