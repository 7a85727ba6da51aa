"""Judges in workers: whatever one does, the pool goes on and loses nothing."""

import collections
from concurrent import futures
import functools
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from grpo_jax.rewards import sandbox
from grpo_jax.rewards import workers as workers_lib
from tests import pace
from tests.rewards import bad_judges

LIMIT_SECS = 2.0  # of judges that never end by themselves
HANG_SECS = 120.0  # which only what hangs takes
MODULE = 'tests.rewards.bad_judges:'


@pytest.fixture(scope='module', params=[True, False], ids=['pid_ns', 'plain'])
def pid_namespace(request):
  """Workers in PID namespaces, and as they are where these are not offered."""
  return request.param


def workers_of(pid_namespace, secs, wall_secs=None):
  return workers_lib.Workers(
    number=2,
    time_limit_secs=secs,
    memory_limit_bytes=600 << 20,
    processes=20,
    pid_namespace=pid_namespace,
    wall_limit_secs=wall_secs,
  )


@pytest.fixture(scope='module')
def pool(pid_namespace):
  """Workers with so much time that no judge fails for a slow machine."""
  with workers_of(pid_namespace, 5 * HANG_SECS) as workers:
    yield workers


@pytest.fixture(scope='module')
def hasty(pid_namespace):
  """Workers for judges that end at the time limit."""
  with workers_of(pid_namespace, LIMIT_SECS, LIMIT_SECS) as workers:
    yield workers


# For what the way to end processes is no matter of.
in_a_namespace = pytest.mark.parametrize(
  'pid_namespace',
  [True, pytest.param(False, marks=pytest.mark.long)],
  ids=['pid_ns', 'plain'],
  indirect=True,
  scope='module',
)


def judge(pool, name, *completions, example=None):
  rows = len(completions)
  function = MODULE + name if isinstance(name, str) else name
  example = example or {'index': 0}
  return pool.judge(function, ['p'] * rows, completions, [example] * rows)


def check_goes_on(pool):
  outcomes = judge(pool, 'good', '1', '2', '3')
  assert [x.reward for x in outcomes] == [1, 2, 3], outcomes


@pytest.mark.parametrize(
  'name, failures',
  [
    pytest.param('loop', ['time limit'], marks=pytest.mark.long),
    pytest.param('deaf', ['time limit'], marks=pytest.mark.long),
    pytest.param('prints', ['time limit'], marks=pytest.mark.long),
    ('forks_and_loops', ['time limit']),
    ('forks', ['processes']),
    ('eats', ['memory']),
    pytest.param('children_eat', ['memory'], marks=pytest.mark.long),
    ('segfaults', ['signal SIGSEGV']),
    ('exits', ['exit 0']),
    ('exits_at_once', ['exit 0']),
    ('ends_itself', ['signal SIGTERM']),
    # In a namespace the parent cannot be ended or stopped.
    ('ends_its_parent', ['time limit', 'signal SIGKILL']),
    pytest.param('stops_its_parent', ['time limit'], marks=pytest.mark.long),
    ('closes_all', ['exit 1']),
    ('writes_everywhere', ['wrote to the pipe of answers']),
    ('raises', ["raised KeyError: 'gold'"]),
    ('raises_what_cannot_be_printed', ['raised Unprintable']),
    ('returns_nan', ['returned nan, which is no finite float32']),
    ('returns_text', ["returned '1.0' of type str"]),
    ('not_there', ['raised ValueError']),
  ],
)
def test_a_bad_judge_fails_in_time_and_the_pool_goes_on(
  pool, hasty, name, failures
):
  pool = hasty if 'time limit' in failures else pool
  check_goes_on(pool)
  start = time.monotonic()
  calls = [
    workers_lib.Call(MODULE + one, ('p', '7', {}))
    for one in ('good', name, 'good')
  ]
  (first,), (bad,), (last,) = pool.run(calls)
  assert time.monotonic() - start < HANG_SECS
  assert bad.reward is None
  assert any(bad.failure.startswith(failure) for failure in failures), bad
  assert (first.reward, last.reward) == (7, 7)
  assert not first.failure and not last.failure
  check_goes_on(pool)


def test_a_call_ends_at_its_limit(hasty):
  def call():
    (outcome,) = judge(hasty, 'deaf', '7')
    assert outcome.failure == 'time limit'

  check_goes_on(hasty)
  pace.assert_ends_at(LIMIT_SECS, call)


@pytest.fixture(scope='module')
def counting(pid_namespace):
  """Workers that count processor time; their clock is far away."""
  with workers_of(pid_namespace, 1.0, HANG_SECS) as workers:
    yield workers


@in_a_namespace
@pytest.mark.parametrize(
  'name',
  [
    'loop',
    pytest.param('children_loop', marks=pytest.mark.long),
    'children_come_and_go',
    pytest.param('batched_loop', marks=pytest.mark.long),
  ],
)
def test_a_judge_that_works_ends_at_its_processor_time(counting, name):
  start = time.monotonic()
  outcome = judge(counting, name, '7')[0]
  assert outcome[:2] == (None, 'time limit')
  assert outcome.secs < time.monotonic() - start < HANG_SECS / 2
  check_goes_on(counting)


@in_a_namespace
def test_a_judge_that_waits_or_imports_takes_no_processor_time(counting):
  (outcome,) = judge(counting, 'waits', '1.7')
  assert (outcome.reward, outcome.failure) == (1, '')
  assert outcome.secs > 1.0  # by the clock, beyond the limit
  for _ in range(2):
    (outcome,) = judge(counting, 'imports_for_long', '7')
    assert (outcome.reward, outcome.failure) == (1, ''), outcome


def test_the_clock_is_far_above_the_processor_time():
  pool = workers_lib.Workers(1, time_limit_secs=3.0)
  assert pool._wall_limit_secs == 30.0


@in_a_namespace
def test_a_verifier_is_imported_before_the_time_counts(counting):
  pytest.importorskip('math_verify')
  call = workers_lib.Call(
    'math_equivalence', ('', '\\boxed{0.5}', {'answer': '\\frac12'})
  )
  for ((outcome,),) in (counting.run([call]), counting.run([call])):
    assert (outcome.reward, outcome.failure) == (1, '')
    assert outcome.secs < 10


@in_a_namespace
def test_what_a_judge_changes_is_set_back(pool):
  umask = os.umask(0)
  os.umask(umask)
  ignores = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
  example = {'folder': os.getcwd(), 'umask': umask, 'ignores': ignores}
  for name in ('moves', 'leaves_a_thread', 'closes_standard', 'limits_itself'):
    for _ in range(2):  # so that both workers of the pool have run it
      outcomes = judge(pool, name, '0', '0', example=example)
      assert [x.reward for x in outcomes] == [1, 1], outcomes
    outcomes = judge(pool, 'state', *'0000', example=example)
    assert [x.reward for x in outcomes] == [1, 1, 1, 1], outcomes


def test_a_fork_does_not_answer_twice(pool):
  outcomes = judge(pool, 'forks_and_returns', *'00000')
  assert [x.reward for x in outcomes] == [1] * 5
  check_goes_on(pool)


@pytest.mark.parametrize('loops', [False, True])
def test_no_daemon_outlives_its_call(pool, hasty, loops, tmp_path):
  pool = hasty if loops else pool
  file = tmp_path / 'written'
  example = {'file': str(file), 'loops': loops}
  (outcome,) = judge(pool, 'leaves_a_daemon', '0', example=example)
  assert outcome.failure == ('time limit' if loops else '')
  size = file.stat().st_size
  time.sleep(0.5)
  assert 0 < file.stat().st_size == size


def test_no_daemon_outlives_a_guard_that_was_ended(hasty, tmp_path):
  file = tmp_path / 'written'
  example = {'file': str(file), 'ends_parent': True, 'env': None}
  (outcome,) = judge(hasty, 'leaves_a_daemon', '0', example=example)
  assert outcome.failure in ('time limit', 'signal SIGKILL')
  size = file.stat().st_size
  time.sleep(0.5)
  assert 0 < file.stat().st_size == size


@in_a_namespace
def test_a_hundred_mixed_calls_lose_none(pool):
  bad = ['segfaults', 'exits_at_once', 'raises', 'closes_all', 'eats']
  names = [bad[i // 10 % 5] if i % 10 == 3 else 'good' for i in range(100)]
  calls = [
    workers_lib.Call(MODULE + name, ('p', str(i), {}))
    for i, name in enumerate(names)
  ]
  for i, (outcome,) in enumerate(pool.run(calls)):
    good = names[i] == 'good'
    assert outcome.reward == (i if good else None), (i, outcome)
    assert bool(outcome.failure) == (not good), (i, outcome)


@in_a_namespace
def test_all_kinds_of_judges(pool, hasty):
  assert [x.reward for x in judge(pool, 'none', '1')] == [None]
  assert [x.failure for x in judge(pool, 'none', '1')] == ['']
  assert [x.reward for x in judge(pool, 'async_good', '1', '2')] == [1, 2]
  assert [x.reward for x in judge(pool, 'batched_good', '1', '2')] == [1, 2]
  assert judge(pool, 'batched_good') == []
  outcomes = judge(hasty, 'batched_loop', '1', '2')
  assert [x[:2] for x in outcomes] == [(None, 'time limit')] * 2
  check_goes_on(hasty)


def test_functions_that_are_objects(pool):
  pytest.importorskip('cloudpickle')
  factor = 3.0
  functions = [
    lambda prompt, completion, example: factor * float(completion),
    functools.partial(bad_judges.good, 'p'),
    bad_judges.batched_good,
  ]
  rewards = [6.0, None, 2.0]
  for function, reward in zip(functions, rewards, strict=True):
    (outcome,) = judge(pool, function, '2')
    assert outcome.reward == reward
  with pytest.raises(ValueError, match='cannot be sent to a worker'):
    (lock,) = [sys._getframe()]
    judge(pool, lambda *_: lock, '2')
  with pytest.raises(ValueError, match='An example cannot be sent'):
    judge(pool, 'good', '2', example={'frame': sys._getframe()})


def test_long_texts_go_through(pool):
  text = '1' + ' ' * (5 << 20)
  assert [x.reward for x in judge(pool, 'good', text, text)] == [1, 1]


def test_workers_do_not_import_jax(pool):
  example = {'modules': ['jax', 'jaxlib']}
  (outcome,) = judge(pool, 'imported', '0', example=example)
  assert outcome.reward == 0
  (outcome,) = judge(pool, 'imported', '0', example={'modules': ['numpy']})
  assert outcome.reward == 1  # so the test could fail


@in_a_namespace
def test_an_interrupt_ends_what_judges(pool):
  previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
  signal.setitimer(signal.ITIMER_REAL, 0.5)
  try:
    with pytest.raises(KeyboardInterrupt):
      judge(pool, 'loop', '0', '0')
  finally:
    signal.signal(signal.SIGALRM, previous)
  check_goes_on(pool)


def test_an_idle_worker_that_was_ended_costs_no_outcome(pool):
  check_goes_on(pool)
  for worker in pool._idle:
    worker._guarded._process.kill()
    worker._guarded._process.wait()
  check_goes_on(pool)


def test_workers_start_before_they_are_needed(tmp_path, monkeypatch):
  """And import what they will call, while nobody waits for them."""
  folder = tmp_path / 'package'
  folder.mkdir()
  (folder / 'slow_to_import.py').write_text(
    'import pathlib, time\n'
    f'pathlib.Path({str(tmp_path)!r}, "imported").touch()\n'
    'def judge(prompt, completion, example): return 1.0\n'
  )
  monkeypatch.syspath_prepend(str(folder))
  # What cannot be imported is told by the first call.
  names = ['slow_to_import:judge', 'no_such_module:judge']
  with workers_lib.Workers(1) as workers:
    workers.start(names)
    (worker,) = workers._idle
    wait_for(tmp_path / 'imported')
    workers.start(names)  # once is enough
    assert workers._idle == [worker]
    calls = [workers_lib.Call(name, ('p', 'c', {})) for name in names]
    (good,), (bad,) = workers.run(calls)
    assert (good.reward, good.failure) == (1, '')
    assert bad.failure.startswith('raised ValueError')
    assert workers._idle == [worker]
  assert workers._idle == []


def wait_for(path):
  until = time.monotonic() + HANG_SECS
  while not path.exists():
    assert time.monotonic() < until
    time.sleep(0.02)


def test_a_function_may_have_arguments(pool):
  example = {'index': 0, 'completion_ids': [2]}
  name = 'tests.judges:unruly'
  calls = [
    workers_lib.Call('tests.judges:even', ('p', 'c', example)),
    workers_lib.Call(name, ('p', 'c', {'completion_ids': [8]}), False, {}),
    workers_lib.Call(
      name, ('p', 'c', {'completion_ids': [8]}), kwargs={'worth': 0.5}
    ),
    workers_lib.Call(name, ('p', 'c', example), kwargs={'no': 0.5}),
  ]
  outcomes = [outcome for (outcome,) in pool.run(calls)]
  assert [x.reward for x in outcomes] == [1, 1, 0.5, None], outcomes
  assert 'unexpected keyword argument' in outcomes[-1].failure


def test_calls_go_on_while_another_thing_is_done(pool, tmp_path):
  file = tmp_path / 'touched'
  calls = [
    workers_lib.Call('tests.rewards.bad_judges:touches', ('p', '1', str(file)))
  ]
  with pool.stream() as stream:
    assert [stream.add(call) for call in calls] == [0]
    wait_for(file)  # before the calls end: more may come
    stream.add(calls[0])
    assert [x.reward for (x,) in stream.wait()] == [1, 1]
  check_goes_on(pool)


def test_an_error_meanwhile_ends_the_calls(pool):
  calls = [workers_lib.Call(MODULE + 'loop', ('p', '0', {}))] * 3
  begun = time.monotonic()
  with pytest.raises(KeyError), pool.stream() as stream:
    for call in calls:
      stream.add(call)
    raise KeyError
  assert time.monotonic() - begun < HANG_SECS  # and not at their limit
  check_goes_on(pool)


@in_a_namespace
def test_what_a_check_raises_ends_the_calls(pool):
  def check():
    if time.monotonic() > begun + 0.5:
      raise KeyError

  begun = time.monotonic()
  with pytest.raises(KeyError), pool.stream() as stream:
    stream.add(workers_lib.Call(MODULE + 'loop', ('p', '0', {})))
    stream.wait(check)
  assert time.monotonic() - begun < HANG_SECS
  check_goes_on(pool)


def test_a_signal_while_the_thread_starts_ends_it(pool, monkeypatch):
  submit = futures.ThreadPoolExecutor.submit

  def interrupted(*given):
    submit(*given)
    raise KeyboardInterrupt  # as a handler of signals does

  with monkeypatch.context() as patch:
    patch.setattr(futures.ThreadPoolExecutor, 'submit', interrupted)
    with pytest.raises(KeyboardInterrupt), pool.stream():
      pass
  assert not [x for x in threading.enumerate() if 'judging' in x.name]
  check_goes_on(pool)


def test_a_last_call_that_comes_between_two_looks_is_made(pool):
  class Waiting(collections.deque):
    def __bool__(self):
      was = len(self) > 0
      if not was and threading.current_thread().name.startswith('judging'):
        for action in actions:
          action()
        actions.clear()
      return was

  call = workers_lib.Call(MODULE + 'good', ('p', '2', {}))
  actions = []
  with pool.stream() as stream:
    stream.waiting = Waiting(stream.waiting)
    actions += [lambda: stream.add(call), stream.end]
    stream._tell()
    until = time.monotonic() + HANG_SECS
    while actions and time.monotonic() < until:
      time.sleep(0.02)
    assert [x.reward for (x,) in stream.wait()] == [2]


def test_workers_that_cannot_start_are_an_error(monkeypatch, tmp_path):
  package = tmp_path / 'grpo_jax'
  package.mkdir()
  (package / '__init__.py').write_text('raise SystemExit(9)')
  monkeypatch.syspath_prepend(str(tmp_path))
  with workers_lib.Workers(1) as workers:
    with pytest.raises(ValueError, match='not started .exit 9.; see'):
      workers.judge(bad_judges.good, ['p'], ['1'], [{}])


def test_generated_code_is_judged_in_workers(pool):
  if not sandbox.available().means:
    pytest.skip(f'no sandbox: {sandbox.available()}')
  name = 'grpo_jax.rewards.generated_code:python_tests'
  tests = [{'stdin': '2', 'stdout': '4'}, {'stdin': '3', 'stdout': '9'}]
  codes = ['print(int(input())**2)', 'print(4)', 'print(', 'exit(1)']
  outcomes = pool.judge(
    name,
    [''] * 4,
    [f'```\n{code}\n```' for code in codes],
    [{'tests': tests}] * 4,
  )
  assert [x.reward for x in outcomes] == [1, 0.5, 0, 0], outcomes


@pytest.mark.parametrize('pid_namespace', [True, False])
def test_the_end_of_the_trainer_ends_its_workers(pid_namespace, tmp_path):
  file = tmp_path / 'written'
  program = (
    'from grpo_jax.rewards import workers\n'
    f'pool = workers.Workers(1, 60, pid_namespace={pid_namespace})\n'
    f"pool.judge('{MODULE}leaves_a_daemon', ['p'], ['c'],"
    f" [{{'file': {str(file)!r}, 'loops': True}}])\n"
  )
  trainer = subprocess.Popen([sys.executable, '-c', program])
  until = time.monotonic() + HANG_SECS
  while not file.exists() and time.monotonic() < until:
    time.sleep(0.05)
  trainer.kill()
  trainer.wait()
  until, size = time.monotonic() + HANG_SECS, 0
  while size < file.stat().st_size:  # until it has been still for a while
    assert time.monotonic() < until
    size = file.stat().st_size
    time.sleep(0.5)
  assert size > 0


@pytest.mark.parametrize(
  'name',
  [
    'number', 'time_limit_secs', 'memory_limit_bytes', 'start_limit_secs',
    'processes', 'wall_limit_secs',
  ],
)  # fmt: skip
@pytest.mark.parametrize('value', [0, -1, float('nan')])
def test_limits_must_be_positive(name, value):
  with pytest.raises(ValueError, match=f'{name} of the workers is'):
    workers_lib.Workers(**{name: value})
