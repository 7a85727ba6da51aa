"""Everything together: what `loop.py` talks to."""

import errno
import io
import json
import sys

import pytest

from grpo_jax import monitor
from grpo_jax.monitor import jsonl

LOG = monitor.Options(display='plain', samples=2, limits=monitor.Limits(kl=0.5))


def make(tmp_path, resumed_step=None, **changes):
  return monitor.Monitor(LOG._replace(**changes), tmp_path, 9, resumed_step, {})


def test_a_run_that_goes_on(tmp_path, capsys):
  with make(tmp_path / 'run') as shown:
    for step in range(6):
      shown.write(step, {'heldout_accuracy': step / 4, 'loss': None})
  with make(tmp_path / 'run', resumed_step=3) as shown:
    assert shown.heldout() == [(n, n / 4) for n in range(4)]
    shown.write(4, {'heldout_accuracy': 9.0})
    assert shown.heldout()[-1] == (4, 9.0)
  lines = (tmp_path / 'run' / 'metrics.jsonl').read_text().splitlines()
  assert [json.loads(line)['step'] for line in lines] == [0, 1, 2, 3, 4]
  assert len(list((tmp_path / 'run' / 'tensorboard').iterdir())) == 2
  assert 'warning' not in capsys.readouterr().err


def test_an_alarm_follows_the_line_it_is_about(tmp_path, capsys):
  with make(tmp_path) as shown:
    shown.write(1, {'kl_old_k3': 0.1})
    shown.write(2, {'kl_old_k3': 0.75})
    shown.write(3, {'kl_old_k3': 0.75})
  lines = capsys.readouterr().err.splitlines()
  assert [line.split()[0] for line in lines] == [
    'rollout', 'policy:', 'rollout', 'warning:', 'rollout',
  ]  # fmt: skip
  assert lines[3].startswith(
    'warning: rollout 2: KL from the sampling policy is 0.75 '
  )


def test_so_many_samples_and_no_more(tmp_path, capsys):
  samples = [monitor.Sample('p', f'completion {n}', 1.0) for n in range(5)]
  with make(tmp_path) as shown:
    shown.write(1, {'heldout_accuracy': 0.5}, samples)
  assert capsys.readouterr().err.count('completion') == 2


def test_lines_and_progress(tmp_path, capsys):
  with make(tmp_path) as shown:
    shown.progress('warm-up', 1, 1, {'loss': 0.5})
    shown.line('any\ntext\x1b[2J')
    shown.warn('any\n  warning\x1b[2J')
  assert capsys.readouterr().err.splitlines() == [
    'warm-up 1/1  loss, nats per token 0.500',
    'any',
    r'text\x1b[2J',
    r'warning: any warning\x1b[2J',
  ]
  assert (tmp_path / 'metrics.jsonl').exists() is False


def test_a_failed_write_is_counted_in_the_next_lines(
  tmp_path, monkeypatch, capsys
):
  with make(tmp_path) as shown:
    shown.write(1, {})
    path = tmp_path / 'metrics.jsonl'
    good = path.read_bytes()
    path.unlink()
    path.mkdir()  # opening it raises an OSError
    shown.write(2, {})
    shown.write(3, {})
    path.rmdir()
    path.write_bytes(good)
    shown.write(4, {})
    shown.write(5, {})
  records = [json.loads(line) for line in path.read_text().splitlines()]
  assert [record['step'] for record in records] == [1, 2, 3, 4, 5]
  counts = [record.get('failed_writes') for record in records]
  assert counts == [None, None, 1, 2, None]
  assert capsys.readouterr().err.count('warning') == 1


def test_tensorboard_may_fail(tmp_path, capsys):
  (tmp_path / 'tensorboard').touch()  # no directory can be made there
  with make(tmp_path) as shown:
    for step in range(1, 4):
      shown.write(step, {'reward': 0.5})
  error = capsys.readouterr().err
  assert error.count('warning: rollout 1: TensorBoard does not work') == 1
  assert error.count('warning') == 1
  assert len((tmp_path / 'metrics.jsonl').read_text().splitlines()) == 3


@pytest.mark.parametrize('on', [True, False])
def test_tensorboard_is_a_choice(tmp_path, on):
  with make(tmp_path, tensorboard=on) as shown:
    shown.write(1, {'reward': 0.5})
  assert (tmp_path / 'tensorboard').exists() == on


class Broken(io.StringIO):
  def write(self, text):
    raise BrokenPipeError(errno.EPIPE, 'Broken pipe')


@pytest.mark.parametrize('display', ['plain', 'rich'])
def test_a_terminal_that_breaks_does_not_stop_a_run(
  tmp_path, monkeypatch, display
):
  broken = Broken()
  monkeypatch.setattr(sys, 'stderr', broken)
  with make(tmp_path, display=display) as shown:
    shown.line('a')
    shown.progress('warm-up', 1, 1, {})
    shown.write(1, {'reward': 0.5, 'kl_old_k3': 9.0})
    shown.warn('b')
  assert sys.stderr is broken
  assert len((tmp_path / 'metrics.jsonl').read_text().splitlines()) == 1


def test_closing_twice_is_closing_once(tmp_path, monkeypatch):
  closed = []
  shown = make(tmp_path)
  monkeypatch.setattr(jsonl.Lines, 'close', lambda self: closed.append(self))
  shown.close()
  shown.close()
  assert len(closed) == 1
