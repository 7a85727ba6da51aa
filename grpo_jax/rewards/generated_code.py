"""A reward for programs: the share of an example's tests that they pass.

The program runs in a sandbox (`sandbox.run`), once per test. A config names the
functions as 'grpo_jax.rewards.generated_code:python_tests'. They run in worker
processes, which judge several completions at a time. `total_secs` must lie
below the time limit of these: then a program without end fails its tests, and
the call goes on; a call that is late itself would leave out the completion. A
run refuses to start otherwise.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import re
import secrets
import time
from typing import Any

from grpo_jax.rewards import _base
from grpo_jax.rewards import sandbox
from grpo_jax.rewards._base import Outcome

_ASSERTING = """\
import sys
code, test, word = {code!r}, {test!r}, sys.stdin.readline()
names = {{'__name__': '__main__'}}
exec(compile(code, 'code', 'exec'), names)
exec(compile(test, 'test', 'exec'), names)
sys.__stdout__.write('\\n' + word)
"""


def last_code_block(text: str) -> str | None:
  """The last block between ``` fences; None if there is none.

  A language may stand behind the opening fence. A block without an end is none,
  because a completion that was cut has not given its program.

  >>> last_code_block('Try ```python\\nprint(1)\\n``` so.')
  'print(1)\\n'
  """
  blocks = re.findall(r'```[^\n`]*\n(.*?)```', text, re.DOTALL)
  return blocks[-1] if blocks else None


def _check(
  limits: Mapping[str, Any] | sandbox.Limits | None = None,
  total_secs: float = 8.0,
  insist: bool = False,
) -> str:
  """What to warn of; raises a ValueError without a sandbox or with bad limits.

  An argument of both functions below.
  """
  _limits(limits)
  if not total_secs > 0:
    raise ValueError(
      f'total_secs of the reward for generated code is {total_secs}, but a'
      ' positive number is required; give one.'
    )
  missing = sandbox.missing()
  if not missing:
    return ''
  if not insist:
    raise ValueError(
      f'A reward would run generated code, but {missing}; allow unprivileged'
      ' user namespaces, use a kernel with Landlock (5.13 or newer), or insist'
      " by kwargs={'insist': True}: the code then runs with limits of time and"
      ' memory alone, as this user.'
    )
  return (
    f'Generated code runs with limits of time and memory alone, as this user,'
    f' because {missing}.'
  )


def _limits(
  given: Mapping[str, Any] | sandbox.Limits | None,
) -> sandbox.Limits:
  if given is None:
    return sandbox.Limits()
  if isinstance(given, sandbox.Limits):
    return given
  unknown = {*given} - {*sandbox.Limits._fields}
  if unknown:
    raise ValueError(
      f'limits of the reward for generated code has {sorted(unknown)}, but its'
      f' fields are {", ".join(sandbox.Limits._fields)}; correct them.'
    )
  return sandbox.Limits(**given)


@_base.limits_itself
@_base.checked(_check)
def python_tests(
  prompt: str,
  completion: str,
  example: dict[str, Any],
  *,
  limits: Mapping[str, Any] | sandbox.Limits | None = None,
  total_secs: float = 8.0,
  insist: bool = False,
) -> float | Outcome:
  """The share of tests that the last code block of a completion passes.

  Each test of `example['tests']` is one of

  - a line or a few lines of Python that raise an error unless the code is
    right, such as 'assert add(1, 2) == 3'. They run behind the code, in the
    same process: a policy could learn to find the word that tells of success.
    Tests of the other kind cannot be met without the right output;
  - `{'stdin': ..., 'stdout': ...}`: the code must end with exit code 0, and
    print this text. Spaces at the ends of lines and empty lines at the end are
    not compared.

  Args:
    prompt: Not used.
    completion: What was sampled.
    example: The record, with 'tests'.
    limits: Of each test, a `sandbox.Limits` or its fields by name; by default
      10 seconds and 1 GiB.
    total_secs: For all tests of a completion. If one test took half of that,
      those that are not done by then have failed.
    insist: As of `sandbox.run`.

  Returns:
    The share, between 0 and 1; 0 without a code block. A failure if the time is
    over before all tests are done, and no single one took long: a right program
    must not lose tests because there are many, or because the machine is slow.

  Raises:
    ValueError: The example has no tests, or one of another kind.
    SandboxError: The system offers no sandbox.
  """
  del prompt
  share = lambda results, number: sum(results) / number
  return _graded(share, completion, example, limits, total_secs, insist)


@_base.limits_itself
@_base.checked(_check)
def all_python_tests(
  prompt: str,
  completion: str,
  example: dict[str, Any],
  *,
  limits: Mapping[str, Any] | sandbox.Limits | None = None,
  total_secs: float = 8.0,
  insist: bool = False,
) -> float | Outcome:
  """1 if the last code block passes all tests, and 0 otherwise.

  It stops at the first test that fails. Arguments, failures and errors are
  those of `python_tests`.
  """
  del prompt
  every = lambda results, _: float(all(results))
  return _graded(every, completion, example, limits, total_secs, insist)


def _graded(
  grade: Callable[[Iterator[bool], int], float],
  completion: str,
  example: Mapping[str, Any],
  limits: Mapping[str, Any] | sandbox.Limits | None,
  total_secs: float,
  insist: bool,
) -> float | Outcome:
  """What the results of all tests, and their number, are worth."""
  tests = _tests(example)
  code = last_code_block(completion)
  if code is None:
    return 0.0
  try:
    results = _results(code, tests, _limits(limits), total_secs, insist)
    return grade(results, len(tests))
  except _TimeOver as over:
    return Outcome(None, str(over))


def _tests(example: Mapping[str, Any]) -> Sequence[Any]:
  tests = example.get('tests')
  if not isinstance(tests, Sequence) or isinstance(tests, str) or not tests:
    raise ValueError(
      f'The example with index {example.get("index")} has {tests!r:.80} as'
      " 'tests', but a list with at least one test is required."
    )
  for test in tests:
    if not isinstance(test, str) and not (
      isinstance(test, Mapping) and 'stdout' in test
    ):
      raise ValueError(
        f'The example with index {example.get("index")} has the test'
        f" {test!r:.80}, but a text or {{'stdin': ..., 'stdout': ...}} is"
        ' required.'
      )
  return tests


class _TimeOver(Exception):
  """The time for all tests is over, and the program is not to blame."""


def _results(
  code: str,
  tests: Sequence[Any],
  limits: sandbox.Limits,
  total_secs: float,
  insist: bool,
) -> Iterator[bool]:
  """Whether each test passes, one after the other."""
  start = time.monotonic()
  left, longest = total_secs, 0.0
  for number, test in enumerate(tests, start=1):
    passes = False
    if left > 0:
      within = limits._replace(time_secs=min(limits.time_secs, left))
      passes = _passes(code, test, within, insist)
      now_left = start + total_secs - time.monotonic()
      longest, left = max(longest, left - now_left), now_left
    if not passes and left <= 0 and longest < total_secs / 2:
      raise _TimeOver(
        f'total_secs={total_secs} over at test {number} of {len(tests)}'
      )
    yield passes


def _passes(
  code: str,
  test: str | Mapping[str, str],
  limits: sandbox.Limits,
  insist: bool,
) -> bool:
  if isinstance(test, str):
    word = secrets.token_hex(16)
    program = _ASSERTING.format(code=code, test=test)
    ran = sandbox.run(program, word + '\n', limits, insist)
    passes = ran.stdout.endswith(f'\n{word}\n')
  else:
    ran = sandbox.run(code, test.get('stdin') or '', limits, insist)
    passes = _same_text(ran.stdout, test['stdout'])
  if ran.failure.startswith('refused'):
    raise sandbox.SandboxError(f'The sandbox could not be made: {ran.failure}')
  return passes and not ran.failure


def _same_text(one: str, other: str) -> bool:
  one, other = (
    '\n'.join(line.rstrip() for line in text.splitlines()).rstrip()
    for text in (one, other)
  )
  return one == other
