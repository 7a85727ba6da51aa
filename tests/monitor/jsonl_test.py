"""`metrics.jsonl` through restarts, kills and full disks."""

import errno
import json
import pathlib
import tracemalloc

import numpy as np
import pytest

from grpo_jax.monitor import jsonl
from tests import small_files

HALF = b'{"step": 4, "elapsed_secs": 9.0, "rew'


def lines_of(path):
  text = path.read_text()
  assert text.endswith('\n') or not text
  return [json.loads(line) for line in text.splitlines()]


def steps_of(path):
  return [record['step'] for record in lines_of(path)]


@pytest.fixture
def path(tmp_path):
  return tmp_path / 'new' / 'metrics.jsonl'


@pytest.fixture
def warnings():
  return []


def open_lines(path, warnings, resumed_step=None):
  return jsonl.Lines(path, resumed_step, warnings.append, ('reward',))


def write(path, warnings, steps, resumed_step=None):
  lines = open_lines(path, warnings, resumed_step)
  for step in steps:
    lines.write(step, {'reward': step / 4, 'heldout_accuracy': step / 8})
  return lines


def test_one_object_per_rollout(path, warnings):
  write(path, warnings, range(3)).close()
  records = lines_of(path)
  assert [record['step'] for record in records] == [0, 1, 2]
  assert [record['reward'] for record in records] == [0, 0.25, 0.5]
  secs = [record['elapsed_secs'] for record in records]
  assert secs == sorted(secs) and not warnings


@pytest.mark.parametrize(
  'value, written',
  [
    (float('nan'), None),
    (float('inf'), None),
    (None, None),
    (np.float32(0.5), 0.5),
    (np.int32(3), 3),
    (7, 7),
  ],
)
def test_numbers_become_json(path, warnings, value, written):
  lines = open_lines(path, warnings)
  lines.write(1, {'heldout_accuracy': value})
  assert lines_of(path)[0]['heldout_accuracy'] == written
  assert lines.heldout == ([] if written is None else [(1, written)])


def test_a_fresh_start_keeps_earlier_files(path, warnings):
  for steps in (range(2), range(3), range(4)):
    write(path, warnings, steps)
  assert steps_of(path.with_name('metrics.1.jsonl')) == [0, 1]
  assert steps_of(path.with_name('metrics.2.jsonl')) == [0, 1, 2]
  assert steps_of(path) == [0, 1, 2, 3]


def test_an_empty_file_is_not_kept(path, warnings):
  path.parent.mkdir()
  path.touch()
  write(path, warnings, range(1))
  assert [found.name for found in path.parent.iterdir()] == ['metrics.jsonl']


@pytest.mark.parametrize('end', [b'', HALF, b'\0\0\0', b'\xff', b'7\n'])
@pytest.mark.parametrize('resumed_step, kept', [(2, [0, 1, 2]), (9, range(5))])
def test_a_resumed_run_cuts_back(path, warnings, end, resumed_step, kept):
  write(path, warnings, range(5))
  whole = path.read_bytes()
  path.write_bytes(whole + end)
  lines = open_lines(path, warnings, resumed_step)
  assert steps_of(path) == list(kept) and whole.startswith(path.read_bytes())
  assert lines.take_history() == {'reward': [(n, n / 4) for n in kept]}
  assert lines.heldout == [(step, step / 8) for step in kept]
  lines.write(len(kept), {'heldout_accuracy': 9.0})
  assert steps_of(path) == [*kept, len(kept)]
  assert lines.heldout[-1] == (len(kept), 9.0)
  lost = ['5 of 10 rollouts (5, 6, 7, 8, 9)'] * (resumed_step == 9)
  assert len(warnings) == len(lost)
  assert all(words in warnings[0] for words in lost)
  assert [found.name for found in path.parent.iterdir()] == ['metrics.jsonl']


@pytest.mark.parametrize('lost', ['1', '0, 1, 2'])
def test_a_lost_line_is_said(path, warnings, lost):
  write(path, warnings, range(3))
  if lost == '1':
    first, second, third = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + second.replace(b'"step"', b'"stop"') + third)
  else:
    path.unlink()
  lines = open_lines(path, warnings, 2)
  (sentence,) = warnings
  assert f'of 3 rollouts ({lost})' in sentence and 'lost' in sentence
  lines.write(3, {})
  assert steps_of(path) == ([0, 2, 3] if lost == '1' else [3])
  open_lines(path, warnings, -1)  # the line of rollout 0 is not yet due
  assert len(warnings) == 1


def test_only_what_is_read_back_stays_in_memory(path, warnings):
  scalars = {f'metric_{n}': float(n) for n in range(20)}
  lines = open_lines(path, warnings)
  lines.write(1, scalars)

  def grown(first, last):
    tracemalloc.start()
    for step in range(first, last):
      lines.write(step, scalars)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return size

  grown(2, 100)
  assert grown(100, 1100) < 10_000, 'bytes of a thousand rollouts'
  again = open_lines(path, warnings, 1100)
  write(path, warnings, [1101], 1100)
  assert again.take_history() == {}, 'of metrics that were not asked for'


def test_a_history_is_given_once(path, warnings):
  write(path, warnings, range(3))
  lines = open_lines(path, warnings, 2)
  assert len(lines.take_history()['reward']) == 3
  assert lines.take_history() == {}


# Lines to be dropped at the end are cut off; others need another file.
CUTS = {'truncate': HALF, 'replace': b'7\n{"step": 2, "elapsed_secs": 9.5}\n'}


@pytest.mark.parametrize('call, end', CUTS.items())
def test_a_kill_while_cutting_leaves_the_old_file(
  path, warnings, monkeypatch, call, end
):
  write(path, warnings, range(5))
  path.write_bytes(path.read_bytes() + end)
  whole = path.read_bytes()

  def killed(*_):
    raise KeyboardInterrupt

  with monkeypatch.context() as patch:
    patch.setattr(jsonl.os, call, killed)
    with pytest.raises(KeyboardInterrupt):
      open_lines(path, warnings, 2)
  assert path.read_bytes() == whole
  open_lines(path, warnings, 2)
  assert steps_of(path) == [0, 1, 2, *[2] * (call == 'replace')]


def refuse(*_, **__):
  raise OSError(errno.ENOSPC, 'No space left on device')


@pytest.mark.parametrize('call, end', CUTS.items())
def test_a_start_on_a_full_disk_cuts_back_later(
  path, warnings, monkeypatch, call, end
):
  write(path, warnings, range(5))
  whole = path.read_bytes() + end
  path.write_bytes(whole)
  with monkeypatch.context() as patch:
    patch.setattr(jsonl.os, call, refuse)
    lines = open_lines(path, warnings, 2)
    assert lines.heldout[:3] == [(0, 0), (1, 0.125), (2, 0.25)]
    assert lines.elapsed() < 60
    assert len(lines.take_history()['reward']) == 3
    for step in (3, 4):
      lines.write(step, {'heldout_accuracy': 1.0})
    assert path.read_bytes() == whole
    assert lines.failed_writes == 3
  (warning,) = warnings
  assert 'No space left on device' in warning
  lines.write(5, {})
  again = [2] * (call == 'replace')
  assert steps_of(path) == [0, 1, 2, *again, 3, 4, 5]
  assert lines.heldout[2:] == [(2, 0.25), (3, 1.0), (4, 1.0)]
  assert not lines.failed_writes and len(warnings) == 1
  assert [found.name for found in path.parent.iterdir()] == ['metrics.jsonl']


def test_a_full_disk_has_no_room_for_another_file(path, warnings, monkeypatch):
  """The incomplete copy is removed, for it takes the last of the room."""
  write(path, warnings, range(5))
  path.write_bytes(path.read_bytes() + CUTS['replace'])
  monkeypatch.setattr(jsonl.os, 'fsync', refuse)
  open_lines(path, warnings, 2).close()
  assert [found.name for found in path.parent.iterdir()] == ['metrics.jsonl']
  assert len(warnings) == 1


def test_an_earlier_file_that_cannot_be_renamed(path, warnings, monkeypatch):
  write(path, warnings, range(3))
  with monkeypatch.context() as patch:
    patch.setattr(pathlib.Path, 'rename', refuse)
    lines = write(path, warnings, [0, 1])
    assert steps_of(path) == [0, 1, 2] and len(warnings) == 1
  lines.close()
  assert steps_of(path) == [0, 1]
  assert steps_of(path.with_name('metrics.1.jsonl')) == [0, 1, 2]


def test_a_file_that_cannot_be_read_is_cut_once_it_can(
  path, warnings, monkeypatch
):
  write(path, warnings, range(5))
  with monkeypatch.context() as patch:
    patch.setattr(pathlib.Path, 'read_bytes', refuse)
    lines = write(path, warnings, [3], resumed_step=2)
  lines.write(4, {})
  assert steps_of(path) == [0, 1, 2, 3, 4] and len(warnings) == 1


def test_a_directory_that_cannot_be_made(path, warnings):
  path.parent.parent.joinpath('new').touch()
  lines = write(path, warnings, range(2))
  assert len(warnings) == 1
  path.parent.unlink()
  lines.close()
  assert steps_of(path) == [0, 1]


def test_a_last_line_without_its_newline_is_whole(path, warnings):
  write(path, warnings, range(2))
  path.write_bytes(path.read_bytes()[:-1])
  write(path, warnings, [2], resumed_step=1)
  assert steps_of(path) == [0, 1, 2]


def test_resuming_without_a_file_starts_one(path, warnings):
  write(path, warnings, [4], resumed_step=3)
  assert steps_of(path) == [4]


def test_time_goes_on(path, warnings):
  path.parent.mkdir()
  path.write_text(
    '{"step": 1, "elapsed_secs": 50.5}\n{"step": 2, "elapsed_secs": 99}\n'
  )
  lines = write(path, warnings, [2], resumed_step=1)
  assert 50.5 <= lines_of(path)[-1]['elapsed_secs'] < 99
  assert 50.5 <= lines.elapsed() < 99


class FullDisk:
  """Files opened while this is `on` take half a line, then no more."""

  def __init__(self, monkeypatch):
    self.on, self.opened = False, pathlib.Path.open
    monkeypatch.setattr(
      pathlib.Path, 'open', lambda *args, **kwargs: self.open(*args, **kwargs)
    )

  def open(self, path, mode='r', *args, **kwargs):
    file = self.opened(path, mode, *args, **kwargs)
    return Half(file) if self.on and mode == 'ab' else file


class Half:
  def __init__(self, file):
    self.file = file

  def __enter__(self):
    return self

  def __exit__(self, *_):
    self.file.close()

  def write(self, data):
    self.file.write(data[: len(data) // 2])
    raise OSError(errno.ENOSPC, 'No space left on device')


def test_a_full_disk_loses_nothing(path, warnings, monkeypatch):
  disk = FullDisk(monkeypatch)
  lines = write(path, warnings, range(2))
  disk.on = True
  for step in (2, 3, 4):
    lines.write(step, {'reward': step / 4})
    assert lines.failed_writes == step - 1
    assert steps_of(path) == [0, 1], 'half a line was left'
  assert len(warnings) == 1 and 'No space left on device' in warnings[0]
  disk.on = False
  lines.write(5, {'reward': 1.25})
  assert steps_of(path) == [0, 1, 2, 3, 4, 5] and not lines.failed_writes
  disk.on = True
  lines.write(6, {'reward': 1.5})
  assert len(warnings) == 2, 'a second time is a new one'
  disk.on = False
  lines.close()
  assert steps_of(path) == list(range(7)) and len(warnings) == 2


def test_what_is_lost_is_said(path, warnings, monkeypatch):
  disk = FullDisk(monkeypatch)
  lines = write(path, warnings, range(2))
  disk.on = True
  lines.write(2, {})
  lines.write(3, {})
  lines.close()
  assert warnings[1:] and '2 lines of metrics.jsonl are lost' in warnings[-1]
  assert steps_of(path) == [0, 1]


def test_a_half_line_that_cannot_be_cut_at_once_is_cut_later(
  path, warnings, monkeypatch
):
  disk = FullDisk(monkeypatch)
  lines = write(path, warnings, range(2))
  disk.on = True

  def refuse(*_):
    raise OSError(errno.EIO, 'Input/output error')

  with monkeypatch.context() as patch:
    patch.setattr(jsonl.os, 'truncate', refuse)
    lines.write(2, {'reward': 0.5})
  assert not path.read_bytes().endswith(b'\n')
  disk.on = False
  lines.write(3, {'reward': 0.75})
  assert steps_of(path) == [0, 1, 2, 3]


def test_the_limit_of_a_real_file_system(path, warnings):
  """The kernel writes what fits of a line and refuses the rest."""
  lines = write(path, warnings, range(2))
  with small_files.limited(path.stat().st_size + 10):
    lines.write(2, {'reward': 0.5})
  assert steps_of(path) == [0, 1] and len(warnings) == 1
  lines.write(3, {'reward': 0.75})
  assert steps_of(path) == [0, 1, 2, 3]


def test_a_directory_that_is_gone(path, warnings):
  lines = write(path, warnings, range(2))
  path.unlink()
  path.parent.rmdir()
  lines.write(2, {})
  assert len(warnings) == 1
  path.parent.mkdir()
  lines.write(3, {})
  lines.write(4, {})
  assert steps_of(path) == [2, 3, 4]
