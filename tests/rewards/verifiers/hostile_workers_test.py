"""The hostile corpus in workers: every completion has an outcome, in time."""

import gc
import importlib.util
import os
import resource
import socket
import threading

import pytest

from grpo_jax.rewards import sandbox
from grpo_jax.rewards import verifiers
from grpo_jax.rewards import workers as workers_lib
from tests.rewards.verifiers import golden_test
from tests.rewards.verifiers import hostile
from tests.rewards.verifiers import hostile_code

LIMIT_SECS = 60.0  # none but sympy needs a hundredth of it
HASTY_SECS = 4.0  # for sympy, which may need any time
HANG_SECS = 120.0  # which only what hangs takes
EVERY = 20  # of the completions of a kind, one in so many is in the short part
MODULE = 'tests.rewards.verifiers'
NAMES = [
  name
  for name in verifiers.__all__
  if importlib.util.find_spec(golden_test.PACKAGES.get(name, 'json'))
  and name not in golden_test.APART  # gym_test.py has what is hostile to it
]
# The last number is what counts by the rule of the verifier, whatever marks
# stand around it; and a wide digit is a digit of a formula.
BY_RULE = {
  ('math_equivalence', '\\boxed{７３１９}'),
  ('last_number', '#### 7319 ####'),
  ('last_number', '\\boxed{7319'),
  ('last_number', '</answer></think>#### 7319 #### wrong'),
  ('last_number', '\\boxed{7319}\n\\boxed'),
  ('number', '#### 7319 ####'),
  ('number', '</answer></think>#### 7319 #### wrong'),
}


class Health:
  """What the process holds; it must be the same after each batch."""

  def __init__(self):
    gc.collect()  # what earlier tests have left
    self.threads = threading.active_count()
    self.descriptors = len(os.listdir('/proc/self/fd'))
    self.children = len(_children())
    self.most_bytes = _resident_bytes() + (256 << 20)

  def check(self):
    now = Health()
    for name in ('threads', 'descriptors', 'children'):
      assert getattr(now, name) == getattr(self, name), name
    assert _resident_bytes() < self.most_bytes


def _children():
  path = f'/proc/self/task/{os.getpid()}/children'
  with open(path) as file:
    return file.read().split()


def _resident_bytes():
  with open('/proc/self/statm') as file:
    return int(file.read().split()[1]) * resource.getpagesize()


def call(name, completion):
  return workers_lib.Call(
    f'{MODULE}.hostile_judge:judge', ('', completion, hostile.example_of(name))
  )


def run_checked(pool, calls):
  """Outcomes, each a number, None or a failure, in time."""
  outcomes = [outcome for (outcome,) in pool.run(calls)]
  for outcome in outcomes:
    assert outcome.secs < HANG_SECS, outcome
    assert outcome.reward is None or not outcome.failure
  return outcomes


def judge_all(pool, texts):
  """All verifiers on all texts; the failures by verifier and text."""
  failures = {}
  # A few at a time, because the pool holds all of its calls in memory.
  for first in range(0, len(texts), 8):
    failures |= judge_some(pool, texts[first : first + 8])
  return failures


def judge_some(pool, texts):
  """The same for a batch; then all verifiers judge right completions."""
  rows = [(name, text) for text in texts for name in NAMES]
  outcomes = run_checked(pool, [call(*row) for row in rows])
  found = {
    row
    for row, outcome in zip(rows, outcomes)
    if outcome.reward not in (0, None)
  }
  assert found == {row for row in BY_RULE if row in {*rows}}
  right = pool.run(
    [call(name, hostile.RIGHT_COMPLETIONS[name]) for name in NAMES]
  )
  assert [outcome.reward for (outcome,) in right] == [1.0] * len(NAMES)
  return {row: x.failure for row, x in zip(rows, outcomes) if x.failure}


@pytest.fixture
def pools():
  """For completions of each kind but sympy, and for those of sympy."""
  before = Health()
  with (
    workers_lib.Workers(2, LIMIT_SECS, memory_limit_bytes=2 << 30) as patient,
    workers_lib.Workers(2, HASTY_SECS, memory_limit_bytes=2 << 30) as hasty,
  ):
    pairs = [(name, hostile.RIGHT_COMPLETIONS[name]) for name in NAMES]
    for workers in (patient, hasty):
      workers.run([call(*pair) for pair in pairs])
    yield patient, hasty
  before.check()


def check_verifiers(pools):
  health = Health()
  failures = {}
  for kind in hostile.KINDS:
    texts = list(hostile.KINDS[kind].values())
    failures = judge_all(pools[kind == 'sympy'], texts)
    health.check()
    # Only sympy is slow, or needs more memory than there is.
    assert {name for name, _ in failures} <= {'math_equivalence'}, kind
    reasons = ('time limit', 'memory', 'signal', 'raised MemoryError')
    assert all(why.startswith(reasons) for why in failures.values()), failures
    assert kind == 'sympy' or not failures
  return failures  # of sympy, which is the last kind


def test_some_of_each_kind_but_sympy_have_outcomes():
  before = Health()
  texts = [
    text
    for kind, named in hostile.KINDS.items()
    if kind != 'sympy'
    for text in list(named.values())[::EVERY]
  ]
  with workers_lib.Workers(
    2, LIMIT_SECS, memory_limit_bytes=2 << 30
  ) as workers:
    assert not judge_all(workers, texts)
  before.check()


@pytest.mark.long
def test_all_have_outcomes(pools):
  failures = check_verifiers(pools)
  assert len(failures) < len(hostile.KINDS['sympy'])


def test_there_are_enough():
  sizes = {kind: len(texts) for kind, texts in hostile.KINDS.items()}
  assert min(sizes.values()) >= 12, sizes
  assert sum(sizes.values()) >= 440 and len(hostile_code.PROGRAMS) >= 60
  every = [text for texts in hostile.KINDS.values() for text in texts.values()]
  assert len({*every}) == len(every)
  assert not {*every} & {*hostile.RIGHT_COMPLETIONS.values()}


def check_code(every, tmp_path):
  if not sandbox.available().means:
    pytest.skip(f'no sandbox: {sandbox.available()}')
  before = Health()
  mark = tmp_path / 'mark'
  programs = list(hostile_code.PROGRAMS.items())[::every]
  judge = f'{MODULE}.hostile_code:judge'
  heard = []
  with (
    workers_lib.Workers(2, 5 * HANG_SECS) as workers,
    _listening(heard) as port,
  ):

    def of(program):
      given = hostile_code.completion(program, str(mark), port)
      return workers_lib.Call(judge, ('', given, {}))

    right = of(hostile_code.RIGHT)
    assert [x.reward for (x,) in workers.run([right, right])] == [1.0, 1.0]
    health = Health()
    for first in range(0, len(programs), 16):
      batch = dict(programs[first : first + 16])
      calls = [of(program) for program in batch.values()]
      outcomes = run_checked(workers, calls)
      for name, outcome in zip(batch, outcomes, strict=True):
        # Ended by the sandbox, long before the limit of the worker.
        assert (outcome.reward, outcome.failure) == (0.0, ''), name
      (outcome,) = workers.run([right])[0]
      assert outcome.reward == 1.0
      health.check()
  before.check()
  assert not heard and not mark.exists() and not os.path.lexists(mark)


class _listening:
  """Sockets of TCP and UDP that nobody must reach."""

  def __init__(self, heard):
    self._heard = heard

  def __enter__(self):
    self._tcp, self._udp = (
      socket.socket(),
      socket.socket(type=socket.SOCK_DGRAM),
    )
    self._tcp.bind(('127.0.0.1', 0))
    port = self._tcp.getsockname()[1]
    self._udp.bind(('127.0.0.1', port))
    self._tcp.listen()
    return port

  def __exit__(self, *_):
    for one in (self._tcp, self._udp):
      one.setblocking(False)
      try:
        one.recvfrom(1) if one is self._udp else one.accept()[0].close()
        self._heard.append(one)
      except BlockingIOError:
        pass
      one.close()


def test_some_programs_have_outcomes(tmp_path):
  check_code(EVERY, tmp_path)


@pytest.mark.long
def test_all_programs_have_outcomes(tmp_path):
  check_code(1, tmp_path)
