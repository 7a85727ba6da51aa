"""One worker: what is left of it, and what counts as its judge's failure."""

import fcntl
import os
import pickle
import resource
import select
import selectors
import sys
import time

import pytest

from grpo_jax.rewards import _launch
from grpo_jax.rewards import workers as workers_lib

MODULE = 'tests.rewards.bad_judges:'
needs_proc = pytest.mark.skipif(
  sys.platform != 'linux', reason='it counts descriptors in /proc'
)


def judge(pool, name='good', completion='7'):
  (outcome,) = pool.judge(MODULE + name, ['p'], [completion], [{}])
  return outcome


def end_guard(worker):
  worker._guarded._process.kill()
  worker._guarded._process.wait()


def request(name):
  arguments = pickle.dumps((('p', '7', {}), {}))
  return pickle.dumps((MODULE + name, arguments, False))


def wait_for_words(worker):
  heard = select.poll()
  heard.register(worker._answers, select.POLLIN)
  assert heard.poll(60_000)


@pytest.mark.parametrize('pid_namespace', [True, False])
def test_a_worker_without_its_guard_is_given_no_call(pid_namespace):
  """It is ended soon, and may take the request and begin before that."""
  with workers_lib.Workers(1, pid_namespace=pid_namespace) as pool:
    assert judge(pool).reward == 7
    (worker,) = pool._idle
    end_guard(worker)
    with selectors.DefaultSelector() as selector:
      worker.begin(request('good'), selector)
      assert worker.is_finished()
      worker.unregister(selector)
    assert worker.was_lost
    pool._idle.clear()
    assert judge(pool).reward == 7


def test_a_worker_that_was_ended_before_its_first_call_costs_no_outcome():
  with workers_lib.Workers(1, pid_namespace=False) as pool:
    pool.start([MODULE + 'good'])
    (worker,) = pool._idle
    wait_for_words(worker)
    end_guard(worker)
    assert judge(pool)[:2] == (7, '')


def test_a_judge_that_is_called_at_the_last_moment_has_its_time():
  """That it was called may wait to be read when the start limit is over."""
  with workers_lib.Workers(1, time_limit_secs=60) as pool:
    assert judge(pool).reward == 7
    worker = pool._idle.pop()
    with selectors.DefaultSelector() as selector:
      worker.begin(request('loop'), selector)
      worker._write()
      wait_for_words(worker)
      worker.deadline = time.monotonic() - 1
      assert not worker.is_finished()
      assert worker.deadline > time.monotonic() + 30
      worker.end()


def refuse(*_, **__):
  raise PermissionError(1, 'Operation not permitted')


def test_a_worker_starts_where_no_pipe_can_grow(monkeypatch):
  free = fcntl.fcntl

  def of_many_pipes(file, order, *more):
    return (refuse if order == 1031 else free)(file, order, *more)

  monkeypatch.setattr(fcntl, 'fcntl', of_many_pipes)
  with workers_lib.Workers(1) as pool:
    assert judge(pool).reward == 7


@needs_proc
@pytest.mark.parametrize(
  'where, name', [(os, 'set_blocking'), (_launch, 'Guarded')]
)
def test_a_failed_start_leaves_nothing(where, name, monkeypatch):
  monkeypatch.setattr(where, name, refuse)
  path = f'/proc/self/task/{os.getpid()}/children'
  before = os.listdir('/proc/self/fd'), open(path).read()
  for _ in range(2):
    with pytest.raises(PermissionError):
      workers_lib.Process(
        dict(memory_bytes=1 << 30, processes=9, file_bytes=1 << 20), 10, 10
      )
  assert (os.listdir('/proc/self/fd'), open(path).read()) == before


@pytest.mark.skipif(
  resource.getrlimit(resource.RLIMIT_AS)[1] != resource.RLIM_INFINITY,
  reason='a lower limit stays, so none is refused',
)
def test_what_the_system_refuses_is_no_matter_of_imports():
  with workers_lib.Workers(1, memory_limit_bytes=1 << 70) as pool:
    with pytest.raises(ValueError, match='refused: ') as raised:
      judge(pool)
  assert 'import' not in str(raised.value)
