"""Tests of reading ahead: the same rows, read before they are asked for."""

import subprocess
import sys
import threading

import pytest

from grpo_jax import data


class Rows:
  """Notes what is read, and in which thread."""

  def __init__(self, length=100):
    self.length, self.read = length, []
    self.seen = threading.Condition()

  def __len__(self):
    return self.length

  def __getitem__(self, index):
    with self.seen:
      here = threading.current_thread() is threading.main_thread()
      self.read.append((index, here))
      self.seen.notify_all()
    if index == 13:
      raise ValueError('row 13')
    return {'prompt': str(index)}

  def wait_for(self, number):
    with self.seen:
      assert self.seen.wait_for(lambda: len(self.read) >= number, 20)


def test_the_next_rows_are_read_in_another_thread():
  rows = Rows()
  ahead = data.ReadAhead(rows, 4)
  assert len(ahead) == 100 and not rows.read
  assert ahead[0] == {'prompt': '0'}
  rows.wait_for(5)  # nobody has asked for the other four
  assert rows.read == [(0, True), *((n, False) for n in (1, 2, 3, 4))]
  assert [ahead[n]['prompt'] for n in (1, 2)] == ['1', '2']
  rows.wait_for(7)
  assert rows.read[5:] == [(5, False), (6, False)]  # none is read twice


def test_any_order_gives_the_same_rows():
  rows = Rows(40)
  ahead = data.ReadAhead(rows, 5)
  order = [0, 1, 2, 20, 21, 3, 0, 39, 38, 38, 5, 7]
  assert [ahead[n]['prompt'] for n in order] == list(map(str, order))
  assert max(n for n, _ in rows.read) == 39  # and none behind the end


def test_an_error_is_raised_when_its_row_is_asked_for():
  ahead = data.ReadAhead(Rows(), 4)
  assert [ahead[n]['prompt'] for n in range(10, 13)] == ['10', '11', '12']
  with pytest.raises(ValueError, match='row 13'):
    ahead[13]
  assert ahead[14] == {'prompt': '14'}


def test_the_next_rows_are_made_when_there_is_time():
  rows = Rows(20)
  ahead = data.MakeAhead(rows, 4)
  assert len(ahead) == 20
  assert [ahead[n]['prompt'] for n in (7, 8)] == ['7', '8']
  assert len(rows.read) == 2
  ahead.fill()
  ahead.fill()  # each is made once
  assert rows.read[2:] == [(n, True) for n in (9, 10, 11, 12)]
  assert [ahead[n]['prompt'] for n in (9, 11, 10, 11)] == [
    '9',
    '11',
    '10',
    '11',
  ]
  assert rows.read[6:] == [(11, True)]
  ahead.fill()
  assert [n for n, _ in rows.read[7:]] == [13, 14, 15]
  with pytest.raises(ValueError, match='row 13'):  # not before
    ahead[13]
  assert ahead[18] == {'prompt': '18'}
  ahead.fill()
  assert rows.read[-1] == (19, True)


def test_an_exit_in_a_row_made_ahead_waits_and_ctrl_c_does_not():
  made = {1: SystemExit('row 1'), 2: KeyboardInterrupt()}

  class Exits(Rows):
    def __getitem__(self, index):
      if index in made:
        raise made[index]
      return index

  ahead = data.MakeAhead(Exits(), 1)
  assert ahead[0] == 0
  ahead.fill()
  with pytest.raises(SystemExit, match='row 1'):
    ahead[1]
  with pytest.raises(KeyboardInterrupt):
    ahead.fill()


ENDS = """
import threading
import time
from grpo_jax import data

class Rows:
  def __len__(self):
    return 1000
  def __getitem__(self, index):
    if index:
      print(index, flush=True)
      time.sleep(0.1)
    return index

ahead = data.ReadAhead(Rows(), 400)
ahead[0]

def late():
  threading.main_thread().join()
  time.sleep(0.5)
  assert [ahead[n] for n in range(1, 5)] == [1, 2, 3, 4]

if LATE:
  threading.Thread(target=late).start()
"""


@pytest.mark.parametrize('late', [False, True])
def test_a_program_that_ends_waits_for_one_row(late):
  """All rows are read that are asked for, even by a thread that outlives it."""
  done = subprocess.run(
    [sys.executable, '-c', ENDS.replace('LATE', str(late))],
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert not done.returncode and not done.stderr, done.stderr
  # All 400 before; a busy machine reads some until the program has ended.
  assert len(done.stdout.split()) < 200
