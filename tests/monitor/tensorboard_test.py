"""Event files, read back record by record."""

import struct

import pytest
from tensorboardX.proto import event_pb2

from grpo_jax import monitor
from grpo_jax.monitor import dashboards
from tests import small_files


def events_of(directory):
  """Events of every file, in the order of the files' numbers."""
  events = []
  for path in sorted(directory.iterdir(), key=lambda path: path.suffix):
    data = path.read_bytes()
    while len(data) >= 12:
      (length,) = struct.unpack_from('<Q', data)
      if len(data) < 16 + length:
        break  # a record that broke off
      events.append(event_pb2.Event.FromString(data[12 : 12 + length]))
      data = data[16 + length :]
  return events


def scalars_of(directory):
  return {
    (event.step, value.tag): value.simple_value
    for event in events_of(directory)
    for value in event.summary.value
  }


def purges_of(directory):
  return [
    event.step
    for event in events_of(directory)
    if event.session_log.status == event_pb2.SessionLog.START
  ]


def test_scalars_can_be_read_back_at_once(tmp_path):
  board = dashboards.TensorBoard(tmp_path / 'tb', 0)
  board.write(0, {'reward': 0.25, 'reward/exact_match': 1, 'kl': None})
  board.write(7, {'reward': 0.5, 'loss': float('nan')})
  assert scalars_of(tmp_path / 'tb') == {
    (0, 'reward'): 0.25,
    (0, 'reward/exact_match'): 1.0,
    (7, 'reward'): 0.5,
  }
  first = events_of(tmp_path / 'tb')[0]
  assert first.file_version == 'brain.Event:2'
  board.close()


@pytest.mark.parametrize('first_step', [0, 12])
def test_what_comes_anew_is_hidden_once(tmp_path, first_step):
  board = dashboards.TensorBoard(tmp_path, first_step)
  board.write(12, {'reward': 0.25})
  board.write(13, {'reward': 0.25})
  assert purges_of(tmp_path) == [first_step]


def test_a_resumed_run_hides_what_came_after_its_checkpoint(tmp_path):
  log = monitor.Options(display='none')
  for resumed_step, step in ((None, 1), (1, 2)):
    with monitor.Monitor(log, tmp_path, 9, resumed_step, {}) as shown:
      shown.write(step, {'reward': 0.5})
  assert purges_of(tmp_path / 'tensorboard') == [0, 2]


def test_after_a_failed_write_another_file_is_begun(tmp_path):
  board = dashboards.TensorBoard(tmp_path, 0)
  board.write(1, {'reward': 0.25})
  (path,) = tmp_path.iterdir()
  with small_files.limited(path.stat().st_size + 10):
    for step in (2, 3):
      with pytest.raises(OSError):
        board.write(step, {f'reward/{n}': 0.5 for n in range(20)})
  board.write(4, {'reward': 0.75})
  assert scalars_of(tmp_path) == {(1, 'reward'): 0.25, (4, 'reward'): 0.75}
  board.close()
  board.close()
