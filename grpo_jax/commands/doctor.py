"""`grpo-jax doctor`: are these hosts healthy?"""

from collections.abc import Sequence
import os
import sys
import textwrap
import time
from typing import Any
from typing import NoReturn

from grpo_jax.commands import engine
from grpo_jax.commands import printing
from grpo_jax.commands import together
from grpo_jax.commands.arguments import Arguments
from grpo_jax.hosts import processes
from grpo_jax.planning import accelerators
from grpo_jax.planning import doctor
from grpo_jax.planning.doctor import Line
from grpo_jax.planning.host_checks import FAILED
from grpo_jax.planning.host_checks import SLOW

_INDENT = 9  # where the text of a check begins
_LEAST_COLUMNS = 40


def run(arguments: Arguments) -> int:
  """`grpo-jax doctor`; returns the exit code, 2 if a check has failed."""
  if arguments.engine:
    return engine.run(arguments)
  found = accelerators.look()  # before JAX holds the memory of the devices
  # Where a check fails, a launcher must not start the doctor again.
  with together.joined(arguments, late_code=2) as peers:
    learner = None
    if arguments.learner:
      learner = arguments.learner, arguments.secret
    return examine(
      peers,
      arguments.workdir,
      arguments.json,
      arguments.verbose,
      found,
      learner,
    )


def examine(
  peers: processes.Processes,
  workdir: str | None,
  as_json: bool = False,
  with_traces: bool = False,
  found: accelerators.Found | None = None,
  learner: tuple[str, str] | None = None,
) -> int:
  """Makes all checks and prints what they have found.

  Args:
    peers: The processes, all of which must call it. The first one is to be the
      only one whose standard output is seen.
    workdir: A directory or a bucket to write a file to; None for none.
    as_json: Print one line of JSON at the end, and nothing before.
    with_traces: Print the traceback of a check that has failed.
    found: What was found on this host before JAX has used a device; None looks
      now.
    learner: See `doctor.examine`.

  Returns:
    The exit code: 2 if a check has failed, else 0.
  """
  lines: list[Line] = []

  def tell(line: Line) -> None:
    lines.append(line)
    if not as_json:
      printing.say(text(line, printing.columns()))
    if with_traces and line.trace:
      printing.say(line.trace, file=sys.stderr)

  def finish() -> int:
    code = 2 if any(line.verdict == FAILED for line in lines) else 0
    if as_json:
      printing.show_json(to_json(lines, peers.number))
    elif not code:
      printing.say(summary(lines))
    if code and peers.is_first:
      printing.say(summary(lines), file=sys.stderr)
    return code

  def give_up(line: Line) -> NoReturn:  # in another thread
    code = 2
    try:
      tell(line)
      code = finish()
      if not peers.is_first:
        said = f'grpo-jax: {line.name}: {line.measured}'
        printing.say(said, file=sys.stderr)
      elif peers.number > 1:  # the others end with the first one, but worse
        time.sleep(3)
    finally:  # nobody may be reading any more
      os._exit(code)

  doctor.examine(peers, workdir, tell, give_up, found=found, learner=learner)
  return finish()


def text(line: Line, columns: int = 80) -> str:
  """A line of the report for a person, which takes some lines.

  Args:
    line: The line.
    columns: How wide the terminal is.
  """
  secs = f'{line.secs:.2f} s' if line.secs else ''
  if line.compile_secs:
    secs += f', {line.compile_secs:.2f} s of it compiling'
  shown = [f'{line.verdict:{_INDENT}}{line.name}{secs and f" ({secs})"}']
  several = len(line.values) > 1
  said = [line.measured] if line.measured else []
  said += [
    f'process {rank}: {why}' if several else why for rank, why in line.failures
  ]
  said += [f'expected: {line.expected}'] if line.expected else []
  for one in said:
    shown += textwrap.wrap(
      one,
      max(columns, _LEAST_COLUMNS),
      initial_indent=' ' * _INDENT,
      subsequent_indent=' ' * (_INDENT + 2),
      break_long_words=False,
      break_on_hyphens=False,
    )
  return '\n'.join(shown)


def summary(lines: Sequence[Line]) -> str:
  """What all checks come to, in a sentence."""
  failed, slow = (
    [line.name for line in lines if line.verdict == verdict]
    for verdict in (FAILED, SLOW)
  )
  if failed:
    return (
      f'grpo-jax: {len(failed)} of {len(lines)} checks failed '
      f'({", ".join(failed)}); do what these checks say, and run the doctor '
      'again.'
    )
  if slow:
    return (
      f'No check failed, but {len(slow)} of {len(lines)} found less than '
      f'expected ({", ".join(slow)}).'
    )
  return 'No check failed.'


def to_json(lines: Sequence[Line], number: int) -> dict[str, Any]:
  """The report for a program.

  Args:
    lines: The checks, in their order.
    number: How many processes have made them.
  """
  return {
    'failed': [line.name for line in lines if line.verdict == FAILED],
    'slow': [line.name for line in lines if line.verdict == SLOW],
    'processes': number,
    'checks': [
      {
        'check': line.name,
        'verdict': line.verdict,
        'secs': round(line.secs, 4),
        'compile_secs': round(line.compile_secs, 4),
        'measured': line.measured,
        'expected': line.expected,
        'values': list(line.values),
        'failures': [
          {'process': rank, 'sentence': why} for rank, why in line.failures
        ],
      }
      for line in lines
    ],
  }
