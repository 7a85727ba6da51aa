"""Judges that run what a model writes: confined, apart, and counted."""

import contextlib
import functools
import os
import pathlib
import socket
import time

import pytest

from grpo_jax import rewards
from grpo_jax.rewards import sandbox
from grpo_jax.rewards import workers as workers_lib
from tests import pace
from tests.rewards import confined_judges

LIMIT_SECS = 1.5  # of answers that never end by themselves
HANG_SECS = 120.0  # which only what hangs takes
MODULE = 'tests.rewards.confined_judges:'

needs_landlock = pytest.mark.skipif(
  bool(sandbox.refusal('landlock')), reason='the system offers no Landlock'
)


@contextlib.contextmanager
def workers_of(secs, wall_secs=None):
  os.environ['SECRET_KEY'] = 'sesame'
  try:
    with workers_lib.Workers(
      1,
      secs,
      memory_limit_bytes=600 << 20,
      processes=20,
      wall_limit_secs=wall_secs,
    ) as workers:
      yield workers
  finally:
    os.environ.pop('SECRET_KEY', None)


@pytest.fixture(scope='module')
def pool():
  """A worker with so much time that nothing fails for a slow machine."""
  with workers_of(5 * HANG_SECS) as workers:
    yield workers


@pytest.fixture(scope='module')
def hasty():
  """A worker for answers that end at the time limit."""
  with workers_of(LIMIT_SECS, LIMIT_SECS) as workers:
    yield workers


def judge(pool, *completions, name='evaluates', example=None):
  rows = len(completions)
  examples = [example or {}] * rows
  return pool.judge(MODULE + name, ['p'] * rows, completions, examples)


@needs_landlock
def test_nothing_can_be_written(pool, tmp_path):
  kept = tmp_path / 'kept'
  kept.write_text('kept')
  folders = [tmp_path, pathlib.Path.home(), pathlib.Path.cwd(), '/tmp', '/dev']
  names = [str(pathlib.Path(folder, 'grpo_evil')) for folder in folders]
  attempts = [
    *(f'open({name!r}, "w").write("x")' for name in [*names, 'grpo_evil']),
    *(f'os.mkdir({name!r}) or 1' for name in names),
    f'os.remove({str(kept)!r}) or 1',
    f'os.truncate({str(kept)!r}, 0) or 1',
    f'os.chmod({str(kept)!r}, 0o777) or 1',
    f'os.symlink("/", {names[0]!r}) or 1',
    'os.write(os.memfd_create("x"), b"x" * 1000)',
  ]
  free = [eval(one, vars(confined_judges)) for one in attempts[:1]]
  assert free == [1] and os.path.exists(names[0])  # so the test could fail
  os.remove(names[0])
  for attempt, outcome in zip(attempts, judge(pool, *attempts), strict=True):
    assert outcome.reward is None and outcome.failure, attempt
  assert not any(map(os.path.exists, [*names, 'grpo_evil']))
  assert kept.read_text() == 'kept'


@needs_landlock
def test_no_secret_can_be_read(pool, tmp_path):
  file = tmp_path / 'secret'
  file.write_text('sesame')
  attempts = [
    f'len(open({str(file)!r}).read())',
    f'len(os.listdir({str(tmp_path)!r}))',
    'len(open("/etc/passwd").read())',
    'len(open("/proc/self/environ").read())',
    'len(open(f"/proc/{os.getppid()}/environ").read())',
  ]
  for attempt, outcome in zip(attempts, judge(pool, *attempts), strict=True):
    assert outcome.failure.startswith('raised PermissionError'), attempt
  in_environment = '"sesame" in str(os.environ)', '"PATH" in os.environ'
  assert [one.reward for one in judge(pool, *in_environment)] == [0, 1]
  assert judge(pool, '', name='unmarked')[0].reward == 1  # of an open worker


@needs_landlock
def test_no_network_can_be_reached(pool):
  with socket.create_server(('127.0.0.1', 0)) as server:
    attempts = [
      f'socket.create_connection(("127.0.0.1", {server.getsockname()[1]})) > 0',
      'socket.socket(socket.AF_UNIX).fileno()',
      'socket.socket(type=socket.SOCK_DGRAM).fileno()',
    ]
    for outcome in judge(pool, *attempts):
      assert outcome.failure.startswith('raised PermissionError'), outcome


@needs_landlock
@pytest.mark.parametrize(
  'attempt, failure',
  [
    pytest.param(
      '[0 for _ in iter(int, 1)]', 'time limit', marks=pytest.mark.long
    ),
    ('9**9**9**9', 'time limit'),
    ('len(bytearray(1 << 40))', 'memory'),
    ('sys.exit(3)', 'exit 3'),
    ('os._exit(4)', 'exit 4'),
    ('os.abort()', 'signal SIG'),  # no process may signal one there
    ('os.closerange(0, 4096) or 1', ''),
    ('float("nan")', 'returned nan'),
    ('"1.0"', "returned '1.0' of type str"),
    ('os.kill(os.getppid(), 9) or 1', 'raised PermissionError'),
    ('fcntl.fcntl(0, 8, os.getppid()) or 1', 'raised PermissionError'),
    ('os.setuid(1234) or 1', 'raised PermissionError'),
    ('os.system("true") or [] > 1', 'raised TypeError'),
    ('[os.fork() for _ in range(3)] and time.sleep(1000)', 'time limit'),
    ('[os.fork() for _ in range(9)] and time.sleep(1000)', 'processes'),
    ('os.write(3, b"{}" + bytes([10])) and time.sleep(1000)', 'wrote to'),
    (
      'os.write(3, b"[" * 100_000 + bytes([10])) and time.sleep(1000)',
      'wrote to',
    ),
  ],
)
def test_a_bad_answer_fails_in_time_and_the_pool_goes_on(
  pool, hasty, attempt, failure
):
  pool = hasty if failure == 'time limit' else pool
  (before,) = judge(pool, 'os.getppid()')
  start = time.monotonic()
  (outcome,) = judge(pool, attempt)
  assert time.monotonic() - start < HANG_SECS
  assert outcome.reward is None and outcome.failure, outcome
  assert failure in outcome.failure
  (after,) = judge(pool, 'os.getppid()')
  assert after.reward is not None
  if 'fork' not in attempt:  # the same worker, which imports nothing again
    assert after.reward == before.reward


@needs_landlock
def test_a_call_ends_at_its_limit(hasty):
  def call():
    (outcome,) = judge(hasty, 'time.sleep(999)')
    assert outcome.failure == 'time limit'

  judge(hasty, '1')
  pace.assert_ends_at(LIMIT_SECS, call)


@needs_landlock
@pytest.mark.parametrize(
  'attempt',
  [
    pytest.param('[0 for _ in iter(int, 1)]', marks=pytest.mark.long),
    pytest.param(
      'os.fork() + 1 and [0 for _ in iter(int, 1)]', marks=pytest.mark.long
    ),
  ],
)
def test_an_answer_that_works_ends_at_its_processor_time(attempt):
  with workers_of(1.0, HANG_SECS) as workers:
    waits, before, works, after = judge(
      workers,
      'time.sleep(1.7) or 1',
      'len(PREPARED)',
      attempt,
      'len(PREPARED)',
    )
    assert (waits.reward, waits.failure) == (1, '')
    assert (works.reward, works.failure) == (None, 'time limit')
    assert works.secs < HANG_SECS / 2
    if 'fork' not in attempt:  # the worker has ended the call, and goes on
      assert after.reward == before.reward + 2


@needs_landlock
def test_an_answer_cannot_change_what_the_next_one_finds(pool):
  change = 'globals().update(eval=lambda text: 99.0) or 1.0'
  leave = 'os.environ.update(LEFT="1") or sys.path.clear() or 1.0'
  look = '("LEFT" in os.environ) + (not sys.path)'
  outcomes = judge(pool, change, '2', leave, look, 'os.getcwd() == "/"')
  assert [one.reward for one in outcomes] == [1, 2, 1, 0, 1]


# Who evaluates can look for the word with which an answer begins.
WORD = (
  '(lambda f: f(f, sys._getframe()))'
  '(lambda f, x: x.f_locals.get("word") or f(f, x.f_back))'
)


@needs_landlock
@pytest.mark.parametrize(
  'values, failure, name',
  [
    ('[5.0, 6.0]', 'returned 2 values for 1 completions', 'evaluates'),
    ('[NaN]', 'returned nan', 'evaluates'),
    ('5.0', 'wrote to the pipe of answers', 'evaluates'),
    ('[1e30]', '', 'evaluates'),
    ('[1e30]', 'returned 1e+30, which is not from 0 to 1', 'from_0_to_1'),
    ('[-0.1]', 'returned -0.1, which is not from 0 to 1', 'from_0_to_1'),
    ('[0.5]', '', 'from_0_to_1'),
  ],
)
def test_what_an_answer_sends_is_checked(pool, values, failure, name):
  data = f'{{"values": {values}}}\n'.encode()
  send = 'os.write(3, {} + {!r}) and os._exit(0)'
  blind, found = judge(
    pool, send.format('b""', data), send.format(WORD, data), name=name
  )
  assert blind == (None, 'wrote to the pipe of answers', blind.secs)
  assert found.failure.startswith(failure)
  assert (found.reward is None) == bool(failure)


@needs_landlock
def test_bounds_hold_for_what_a_function_returns(pool):
  outcomes = judge(pool, '0', '1', '1.5', '-1', 'None', name='from_0_to_1')
  assert [one.reward for one in outcomes] == [0, 1, None, None, None]
  assert [bool(one.failure) for one in outcomes] == [0, 0, 1, 1, 0]


@needs_landlock
def test_the_worker_prepares_before_the_time_counts(hasty):
  secs = LIMIT_SECS + 0.5
  (outcome,) = judge(hasty, 'len(PREPARED) > 0', example={'prepare_secs': secs})
  assert outcome.reward == 1 and outcome.secs < LIMIT_SECS
  (outcome,) = judge(hasty, '1', example={'unusable': True})
  assert outcome.failure == 'raised ValueError: no such task'


@needs_landlock
def test_batches_and_partial_functions_are_confined_too(pool, tmp_path):
  pytest.importorskip('cloudpickle')
  file = str(tmp_path / 'evil')
  assert [x.reward for x in judge(pool, '1', '2', name='evaluates_all')] == [
    1, 2,
  ]  # fmt: skip
  partial = functools.partial(confined_judges.evaluates, unused=1)
  attempt = f'open({file!r}, "w")'
  (outcome,) = judge(pool, attempt, name='evaluates_all')
  assert outcome.failure.startswith('raised PermissionError')
  (outcome,) = [
    one for (one,) in pool.run([workers_lib.Call(partial, ('p', attempt, {}))])
  ]
  assert outcome.failure.startswith('raised PermissionError')


@needs_landlock
def test_score_counts_what_failed(hasty):
  judges = [
    rewards.WeightedReward(
      'own', confined_judges.evaluates, where='workers', failed=-1.0
    )
  ]
  scores = rewards.score(
    judges, ['p'] * 3, ['1', 'x', 'time.sleep(999)'], [{}] * 3, workers=hasty
  )
  assert scores.reward.tolist() == [1, -1, -1]
  assert scores.failures is not None
  reasons = [text.partition(':')[0] for text in scores.failures[:, 0]]
  assert reasons == ['', 'raised NameError', 'time limit']


def test_without_landlock_nothing_is_called(monkeypatch):
  monkeypatch.setattr(sandbox, 'refusal', lambda means: 'too old a kernel')
  with workers_lib.Workers(1) as workers:
    with pytest.raises(sandbox.SandboxError, match='Landlock .too old a kern'):
      judge(workers, '1')
    assert judge(workers, '1', name='unmarked')[0].reward is not None


@needs_landlock
def test_workers_start_early_of_both_kinds():
  names = [MODULE + name for name in ('evaluates', 'unmarked')]
  with workers_lib.Workers(1, HANG_SECS) as workers:
    workers.start(names)
    assert sorted(one.confined for one in workers._idle) == [False, True]
    pids = [one._guarded._process.pid for one in workers._idle]
    assert judge(workers, '1')[0].reward == 1
    assert judge(workers, '1', name='unmarked')[0].failure == ''
    assert {one._guarded._process.pid for one in workers._idle} == {*pids}
