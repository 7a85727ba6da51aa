"""Runs that are asked to end, share a workdir, or find the disk full."""

import resource
import signal
import time

import pytest

from grpo_jax.training import stop_signal
from tests import runs
from tests.cli import JUDGE
from tests.cli import SMALL
from tests.cli import assert_refused
from tests.cli import command
from tests.cli import popen
from tests.cli import wait_for
from tests.cli import wait_until

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
  written = len(runs.records(tmp_path)) - 1
  done = runs.saved(tmp_path)[0]
  assert done - written in (0, 1)  # 1: before its evaluation
  again = popen('train', *LONG, f'--workdir={tmp_path}')
  wait_for(tmp_path, done + 1, again)
  again.kill()
  _, err = again.communicate(timeout=60)
  assert f'goes on from the checkpoint of rollout {done}' in err


@pytest.mark.parametrize(
  'number, code', [(signal.SIGTERM, 143), (signal.SIGINT, 130)]
)
def test_nobody_waits_for_a_slow_reward(number, code, tmp_path, monkeypatch):
  """The judge takes five minutes; it says by a file that it has begun."""
  monkeypatch.setenv('JUDGING', str(tmp_path / 'judging'))
  judge = '--config.rewards=({"name":"tests.judges:slow","weight":1.0},)'
  process = popen('train', *LONG, judge, f'--workdir={tmp_path}')
  wait_until((tmp_path / 'judging').exists, process)
  process.send_signal(number)
  asked = time.monotonic()
  _, err = process.communicate(timeout=60)
  assert process.returncode == code and 'Traceback' not in err
  assert time.monotonic() - asked < 10
  assert runs.saved(tmp_path)[0] == 0


def test_two_ctrl_c_end_at_once(tmp_path, monkeypatch):
  """While one would be saving, which takes its time on a full disk, say."""
  before = signal.getsignal(signal.SIGINT)  # a shell's background ignores it
  stop = stop_signal.Stop()
  with stop:
    signal.raise_signal(signal.SIGINT)
    assert stop() and stop.signal == signal.SIGINT
    with pytest.raises(KeyboardInterrupt) as caught:
      signal.raise_signal(signal.SIGINT)
    assert caught.type is KeyboardInterrupt  # and not Stopped, which saves
  stop = stop_signal.Stop()
  with stop:
    with pytest.raises(stop_signal.Stopped), stop.at_once():
      signal.raise_signal(signal.SIGTERM)
    with pytest.raises(stop_signal.Stopped), stop.at_once():
      raise AssertionError('an earlier signal is as good')
  assert signal.getsignal(signal.SIGINT) is before


def test_a_signal_is_received_when_nobody_listens_any_more(tmp_path):
  """As `train 2>&1 | tee log`, whose tee has died of the same Ctrl-C."""
  process = popen('train', *LONG, f'--workdir={tmp_path}')
  wait_for(tmp_path, 2, process)
  process.stderr.close()
  process.send_signal(signal.SIGINT)
  assert process.wait(timeout=60) == 130
  assert runs.saved(tmp_path)[0] >= 2


def test_two_processes_do_not_share_a_workdir(tmp_path):
  process = popen('train', *LONG, f'--workdir={tmp_path}')
  wait_for(tmp_path, 1, process)
  done = command('train', *LONG, f'--workdir={tmp_path}')
  process.kill()
  process.communicate(timeout=60)
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
  assert not runs.checkpoints(tmp_path)
  _, hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
  resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (hard, hard))
  wait_until(lambda: runs.checkpoints(tmp_path), process)
  process.send_signal(signal.SIGTERM)
  _, err = process.communicate(timeout=60)
  assert process.returncode == 143 and 'tries again' in err
  assert 'Traceback' not in err
  written = runs.records(tmp_path)
  assert [r['step'] for r in written] == list(range(len(written)))
  assert written[-1]['saves_failed'] >= 1
