"""A reward for programs: the share of an example's tests that they pass.

The program runs in a sandbox (`sandbox.run`), once per test. A config names the
functions as 'grpo_jax.rewards.generated_code:python_tests'. Let them run in
workers, which judge several completions at a time.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import re
import secrets
from typing import Any

from grpo_jax.rewards import sandbox

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


def python_tests(
  prompt: str,
  completion: str,
  example: dict[str, Any],
  *,
  limits: sandbox.Limits | None = None,
  insist: bool = False,
) -> float:
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
    limits: Of each test; by default 10 seconds and 1 GiB.
    insist: As of `sandbox.run`.

  Returns:
    The share, between 0 and 1; 0 without a code block.

  Raises:
    ValueError: The example has no tests, or one of another kind.
    SandboxError: The system offers no sandbox.
  """
  del prompt
  tests = _tests(example)
  code = last_code_block(completion)
  if code is None:
    return 0.0
  passed = sum(_passes(code, test, limits, insist) for test in tests)
  return passed / len(tests)


def all_python_tests(
  prompt: str,
  completion: str,
  example: dict[str, Any],
  *,
  limits: sandbox.Limits | None = None,
  insist: bool = False,
) -> float:
  """1 if the last code block passes all tests, and 0 otherwise.

  It stops at the first test that fails. Arguments and errors are those of
  `python_tests`.
  """
  del prompt
  tests = _tests(example)
  code = last_code_block(completion)
  return float(
    code is not None
    and all(_passes(code, test, limits, insist) for test in tests)
  )


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


def _passes(
  code: str,
  test: str | Mapping[str, str],
  limits: sandbox.Limits | None,
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
