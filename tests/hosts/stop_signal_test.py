"""Runs that are asked to end, share a workdir, or find the disk full."""

import asyncio
import os
import resource
import signal
import time
import types

import pytest

from grpo_jax.commands import main
from grpo_jax.commands import report
from grpo_jax.hosts import processes
from grpo_jax.hosts import stop_signal
from grpo_jax.run import progress as progress_lib
from grpo_jax.run.keep import workdir
from tests import runs
from tests.cli import JUDGE
from tests.cli import SMALL
from tests.cli import assert_refused
from tests.cli import call
from tests.cli import popen
from tests.cli import wait_for
from tests.cli import wait_until

LONG = (SMALL, JUDGE, '--config.steps=100000', '--config.data.heldout=')


@pytest.mark.long
@pytest.mark.parametrize(
  'number, code', [(signal.SIGTERM, 143), (signal.SIGINT, 130)]
)
def test_a_signal_saves_and_the_next_start_goes_on(number, code, tmp_path):
  process = popen('train', *LONG, f'--workdir={tmp_path}')
  wait_for(tmp_path, 3, process)
  process.send_signal(number)
  _, err = process.communicate(timeout=LIMIT_SECS)
  assert process.returncode == code and 'Traceback' not in err
  written = len(runs.records(tmp_path)) - 1
  done = runs.saved(tmp_path)[0]
  assert done - written in (0, 1)  # 1: before its evaluation
  again = popen('train', *LONG, f'--workdir={tmp_path}')
  wait_for(tmp_path, done + 1, again)
  again.kill()
  _, err = again.communicate(timeout=LIMIT_SECS)
  assert f'goes on from the checkpoint of rollout {done}' in err


def slow_judge(name, where):
  """Of five minutes; it says by the file `JUDGING` that it has begun."""
  judge = f'{{"name":"tests.judges:{name}","weight":1.0,"where":"{where}"}}'
  return f'--config.rewards=({judge},)', '--config.workers.time_limit_secs=400'


LIMIT_SECS = 120  # much less than a slow judge takes


def small_disk():
  """Files may not grow beyond 16 KiB."""
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, limits[1]))


def on_small_disk(monkeypatch, *arguments):
  """Trains there."""
  # Python would write a part of a module that it compiles; see `small_files`.
  monkeypatch.setenv('PYTHONDONTWRITEBYTECODE', '1')
  return popen('train', *arguments, preexec_fn=small_disk)


def grow_disk(process):
  _, hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
  resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (hard, hard))


def test_nobody_waits_for_a_slow_reward_and_a_full_disk_is_survived(
  tmp_path, monkeypatch
):
  """Judged in workers; no checkpoint can be written until the signal comes."""
  monkeypatch.setenv('JUDGING', str(tmp_path / 'judging'))
  process = on_small_disk(
    monkeypatch,
    *LONG,
    *slow_judge('slow_late', 'workers'),
    f'--workdir={tmp_path}',
  )
  wait_until((tmp_path / 'judging').exists, process)
  assert not runs.checkpoints(tmp_path)
  grow_disk(process)
  process.send_signal(signal.SIGTERM)
  _, err = process.communicate(timeout=LIMIT_SECS)
  assert process.returncode == 143 and 'tries again' in err
  assert 'Traceback' not in err
  assert runs.saved(tmp_path)[0] == 2
  written = runs.records(tmp_path)
  assert [r['step'] for r in written] == [0, 1, 2]
  assert written[-1]['saves_failed'] >= 1
  assert not runs.processes_with(f'JUDGING={tmp_path / "judging"}')


@pytest.mark.long
def test_a_signal_while_a_reward_is_slow_and_nobody_listens_any_more(
  tmp_path, monkeypatch
):
  """As `train 2>&1 | tee log`, whose tee has died of the same Ctrl-C.

  The reward is called in the process of the run. Meanwhile no other one may use
  the workdir.
  """
  monkeypatch.setenv('JUDGING', str(tmp_path / 'judging'))
  asked = *LONG, *slow_judge('slow', 'here'), f'--workdir={tmp_path}'
  asked += ('--config.learner.layout=packed',)  # compiles no update ahead
  process = popen('train', *asked)
  wait_until((tmp_path / 'judging').exists, process)
  assert_refused(call('train', *asked), 'Another process is running')
  process.stderr.close()
  process.send_signal(signal.SIGINT)
  assert process.wait(timeout=LIMIT_SECS) == 130
  assert runs.saved(tmp_path)[0] == 0
  assert not (tmp_path / 'traceback.txt').exists()
  assert not runs.processes_with(f'JUDGING={tmp_path / "judging"}')


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


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_a_signal_in_a_finalizer_is_sent_again(number, capsys):
  class Garbage:
    def __del__(self):
      signal.raise_signal(number)

  end = time.monotonic() + 30
  with stop_signal.Stop() as stop:
    with pytest.raises(stop_signal.Stopped), stop.at_once():
      garbage = Garbage()
      del garbage
      while time.monotonic() < end:
        time.sleep(0.001)
    assert stop.signal == number
  assert 'Traceback' not in capsys.readouterr().err


@pytest.mark.long
def test_a_run_survives_a_full_disk(tmp_path, monkeypatch):
  """For a while; the run goes on, and tries again."""
  process = on_small_disk(monkeypatch, *LONG, f'--workdir={tmp_path}')
  wait_for(tmp_path, 5, process)
  assert not runs.checkpoints(tmp_path)
  grow_disk(process)
  wait_until(lambda: runs.checkpoints(tmp_path), process)
  process.send_signal(signal.SIGTERM)
  _, err = process.communicate(timeout=LIMIT_SECS)
  assert process.returncode == 143 and 'tries again' in err
  assert 'Traceback' not in err
  written = runs.records(tmp_path)
  assert [r['step'] for r in written] == list(range(len(written)))
  assert written[-1]['saves_failed'] >= 1


ENDINGS = [SystemExit(0), SystemExit(3), GeneratorExit()]
ENDINGS += [asyncio.CancelledError()]


@pytest.mark.parametrize('error', ENDINGS, ids=repr)
def test_an_exit_before_the_end_is_an_error_with_a_place(error):
  with pytest.raises(ValueError, match=r'stop_signal_test.py raised ') as found:
    with stop_signal.no_exit():
      raise error
  assert f'{type(error).__name__}({error})' in str(found.value)
  assert found.value.__cause__ is error


@pytest.mark.parametrize(
  'error', [OSError('x'), KeyboardInterrupt(), stop_signal.Stopped()], ids=repr
)
def test_errors_and_interrupts_pass(error):
  with pytest.raises(type(error)) as found:
    with stop_signal.no_exit():
      raise error
  assert found.value is error


@pytest.mark.parametrize('does', ENDINGS + [None, 143], ids=repr)
def test_a_command_ends_with_0_only_when_it_is_done(does, monkeypatch, capsys):
  def run(arguments):
    if isinstance(does, BaseException):
      raise does
    return does

  monkeypatch.setattr(report, 'run', run)
  code = main.main(['report', 'runs/x'])
  refused = does in ENDINGS
  assert code == (2 if refused else does or 0)
  assert ('would end the process' in capsys.readouterr().err) == refused


@pytest.mark.parametrize(
  'error, signals, saved',
  [
    *((error, 0, True) for error in [*ENDINGS, ValueError('no judge')]),
    (stop_signal.Stopped(), 1, True),
    (KeyboardInterrupt(), 0, True),  # raised by the reward itself
    (KeyboardInterrupt(), 1, False),  # the second Ctrl-C
  ],
  ids=repr,
)
def test_what_is_no_second_interrupt_is_saved(
  error, signals, saved, monkeypatch, tmp_path
):
  happened, stop = [], stop_signal.Stop()
  stop.signal = signal.SIGINT if signals else None
  saves = types.SimpleNamespace(wait=lambda: happened.append('wait'))
  open_one = types.SimpleNamespace(
    stop=stop,
    saves=saves,
    peers=processes.ALONE,
  )
  monkeypatch.setattr(progress_lib, 'save', lambda *_: happened.append('save'))
  config = runs.small()
  with pytest.raises(type(error)):
    with workdir.claimed(tmp_path, config):
      with progress_lib.saved_if_it_fails(open_one, None):
        raise error
  assert happened == (['save', 'wait'] if saved else [])
  left = (tmp_path / 'traceback.txt').exists()
  assert left == (not isinstance(error, KeyboardInterrupt))


def test_a_signal_on_the_way_in_leaves_the_save_behind_it_alone():
  class Early(stop_signal.Stop):
    def __setattr__(self, name, value):
      super().__setattr__(name, value)
      if name == '_raises' and value:
        signal.raise_signal(signal.SIGTERM)

  with Early() as stop:
    with pytest.raises(stop_signal.Stopped):
      with stop.at_once():
        raise AssertionError('the signal has come before')
    try:
      signal.raise_signal(signal.SIGTERM)  # in the save, which goes on
    except stop_signal.Stopped:
      pytest.fail('it ends the save')


@pytest.mark.parametrize('how', ['take', 'deliver'])
def test_a_signal_of_all_processes_is_not_a_second_one(how):
  """A launcher may send Ctrl-C to every process, and each passes it on."""
  with stop_signal.Stop() as stop:
    getattr(stop, how)(signal.SIGINT)
    assert stop() and stop.signal == signal.SIGINT
    os.kill(os.getpid(), signal.SIGINT)  # the same one, which was sent here too
    with pytest.raises(KeyboardInterrupt):
      os.kill(os.getpid(), signal.SIGINT)
      time.sleep(1)
  with pytest.raises(stop_signal.Stopped), stop_signal.Stop() as stop:
    with stop.at_once():
      stop.deliver(signal.SIGTERM)
      time.sleep(1)


def test_without_handlers_a_signal_of_another_process_ends_nothing():
  stop = stop_signal.Stop()  # as in a thread of a user's program
  stop.deliver(signal.SIGTERM)
  assert stop() and stop.signal == signal.SIGTERM
