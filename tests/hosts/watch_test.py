"""The watch in threads: what it tells, and when it ends a process."""

import time

import pytest

from grpo_jax.hosts import processes
from grpo_jax.hosts import watch
from grpo_jax.hosts.store import Store
from tests.hosts import processes_test

pytestmark = pytest.mark.quick


class Left(list):
  """What a watch would have ended its process with, and when."""

  def first(self, secs=10.0):
    end = time.monotonic() + secs
    while not self and time.monotonic() < end:
      time.sleep(0.01)
    return self[0] if self else None


@pytest.fixture
def left(monkeypatch):
  """Processes that are not ended; a second lasts a hundredth."""
  left = Left()
  for name, secs in (
    ('SILENT', 1.0),
    ('FIRST', 3.0),
    ('FAIL', 0.3),
    ('PATIENT', 1.2),
    ('GRACE', 0.1),
    ('BEAT', 0.02),
  ):
    monkeypatch.setattr(watch, f'{name}_SECS', secs, raising=False)

  def leave(self, why, code):
    left.append((self._rank, why, code, time.monotonic()))
    self._over.set()

  monkeypatch.setattr(watch.Watch, '_leave', leave)
  return left


def store():
  return Store(processes_test.Client(), 'run')


def begun(store, rank):
  return watch.Watch(store, 2, rank, lambda: 0)


def test_one_that_never_comes_is_not_waited_for(left):
  began = time.monotonic()
  begun(store(), 0)
  rank, why, code, ended = left.first()
  assert (rank, code) == (0, watch.START_AGAIN)
  assert why == 'Process 1 has not come to the run within 3 s'
  assert ended - began > 2.5


def test_one_that_comes_late_is_waited_for(left):
  shared = store()
  first = begun(shared, 0)
  time.sleep(1.3)  # longer than silence may last
  second = begun(shared, 1)
  time.sleep(0.5)
  assert not left
  for one in first, second:
    one._over.set()


def test_a_judge_that_never_returns_ends_some_time(left):
  """While another process has failed, and waits for it."""
  shared = store()
  first, second = begun(shared, 0), begun(shared, 1)
  peers = processes.Processes(shared, 2, 0)
  began = time.monotonic()
  with peers.patient(), second.failing('ValueError: it refuses'):
    rank, why, code, ended = left.first()
  assert (why, code) == ('Process 1 has failed: ValueError: it refuses', 2)
  assert 1.1 < ended - began < 5
  for one in first, second:
    one._over.set()


def test_where_an_error_came_from_is_in_the_log_of_the_first(left, capsys):
  """Also of one that no exchange has told."""
  shared = store()
  begun(shared, 0)
  second = begun(shared, 1)
  second.end('KeyError: 7', 'Traceback of it:\n  line 12\n')
  assert left.first()[:3] == (0, 'Process 1 has failed: KeyError: 7', 2)
  said = 'The traceback of process 1:\nTraceback of it:\n  line 12\n'
  assert said in capsys.readouterr().err


@pytest.mark.parametrize(
  'code, advice',
  [(watch.START_AGAIN, 'give the same command again'), (2, 'see there')],
)
def test_the_last_sentence_says_what_to_do(code, advice, monkeypatch, capsys):
  codes = []
  monkeypatch.setattr(watch.os, '_exit', codes.append)
  monkeypatch.setattr(watch, 'BEAT_SECS', 0.01)
  one = begun(store(), 0)
  one._over.set()
  one._leave('Process 1 has died', code)
  assert codes == [code]
  assert capsys.readouterr().err == (
    'grpo-jax: Process 1 has died; this process, 0, ends too: ' + advice + '.\n'
  )
