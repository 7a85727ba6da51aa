"""Programs in completions, right and wrong, and those that cheat."""

import types

import pytest

from grpo_jax.rewards import generated_code
from grpo_jax.rewards import sandbox

LIMITS = sandbox.Limits(time_secs=120.0)  # which only what hangs takes

pytestmark = pytest.mark.skipif(
  not sandbox.available().means, reason=f'no sandbox: {sandbox.available()}'
)

ASSERTS = ['assert add(1, 2) == 3', 'assert add(0, 0) == 0', 'assert add(2, 2)']
PAIRS = [{'stdin': '1 2\n', 'stdout': '3\n'}, {'stdin': '4 4', 'stdout': '8'}]


def block(code):
  return f'I think:\n```python\nwrong(\n```\nNo:\n```python\n{code}\n```\nDone.'


@pytest.mark.parametrize(
  'code, tests, share',
  [
    ('def add(x, y): return x + y', ASSERTS, 1),
    ('def add(x, y): return x * y', ASSERTS, 2 / 3),
    ('def add(x, y): return 3', ASSERTS, 2 / 3),
    ('def add(x, y): return None', ASSERTS, 0),
    ('def add(x', ASSERTS, 0),
    ('import sys; sys.exit(0)', ASSERTS, 0),
    ('import os; os._exit(0)', ASSERTS, 0),
    ('print(sum(map(int, input().split())))', PAIRS, 1),
    ('print(sum(map(int, input().split())), "  \\n")', PAIRS, 1),
    ('print(3)', PAIRS, 1 / 2),
    ('print(sum(map(int, input().split()))); 1 / 0', PAIRS, 0),
  ],
)
def test_the_share_of_passed_tests(code, tests, share):
  example = {'index': 7, 'tests': tests}
  found = generated_code.python_tests('p', block(code), example, limits=LIMITS)
  assert found == pytest.approx(share)
  found = generated_code.all_python_tests(
    'p', block(code), example, limits=LIMITS
  )
  assert found == (share == 1)


@pytest.mark.parametrize('completion', ['', '3', '```python\nprint(3)'])
def test_without_a_whole_block_there_is_no_program(completion):
  example = {'tests': [{'stdout': '3'}]}
  assert generated_code.python_tests('p', completion, example) == 0
  assert generated_code.all_python_tests('p', completion, example) == 0


@pytest.mark.parametrize(
  'tests', [None, [], 'assert f()', [3], [{'stdin': ''}]]
)
def test_an_example_without_tests_is_an_error(tests):
  for function in (
    generated_code.python_tests,
    generated_code.all_python_tests,
  ):
    with pytest.raises(ValueError, match='example with index 7 has'):
      function('p', block('1'), {'index': 7, 'tests': tests})


def test_half_a_surrogate_pair_is_an_error_of_the_code():
  example = {'tests': PAIRS[:1]}
  for code in ('print(3)  # \ud800', 'print("\udfff" and 3)'):
    found = generated_code.python_tests('', block(code), example, limits=LIMITS)
    assert found == 1  # a '?' in a comment or in a text changes nothing
  found = generated_code.python_tests(
    '', block('x\ud800 = 3; print(x)'), example, limits=LIMITS
  )
  assert found == 0


@pytest.mark.parametrize('name', ['python_tests', 'all_python_tests'])
def test_many_tests_or_a_slow_machine_are_no_fault(name, monkeypatch):
  took, now = [], [0.0]

  def run(code, stdin, limits, insist):
    secs = took.pop(0)
    now[0] += min(limits.time_secs, secs)
    return sandbox.Ran(
      0, '1', '', 'time limit' if secs > limits.time_secs else ''
    )

  monkeypatch.setattr(sandbox, 'run', run)
  clock = types.SimpleNamespace(monotonic=lambda: now[0])
  monkeypatch.setattr(generated_code, 'time', clock)
  example = {'tests': [{'stdout': '1'}] * 9}
  judge = getattr(generated_code, name)

  def judged(*secs):
    took[:] = secs
    return judge('', block('1'), example, total_secs=4.0)

  assert judged(*[0.1] * 9) == 1
  slow = judged(*[0.9] * 9)
  assert slow.reward is None
  assert slow.failure == 'total_secs=4.0 over at test 5 of 9'
  # A program that takes half of the time for one test is too slow.
  right = 2 / 9 if name == 'python_tests' else 0
  assert judged(0.1, 3.0, *[2.0] * 7) == right


def test_a_loop_is_a_failed_test():
  limits = LIMITS._replace(time_secs=1.0)
  code = 'while True: pass'
  example = {'tests': PAIRS[:1]}
  assert not generated_code.python_tests(
    '', block(code), example, limits=limits
  )
