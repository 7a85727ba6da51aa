"""The command line: parses the flags, checks them, and calls other modules."""

from collections.abc import Sequence
import contextlib
from importlib import metadata
import logging as logging_lib
import os
import platform
import shutil
import sys
import threading
import traceback
from typing import Any
from typing import NoReturn
import warnings

from absl import app
from absl import flags
from absl import logging

from grpo_jax import __version__
from grpo_jax.commands import arguments
from grpo_jax.commands import help_text
from grpo_jax.commands import refusals
from grpo_jax.commands import table
from grpo_jax.commands.flag_definitions import FLAGS as _FLAGS
from grpo_jax.config import plain_text
from grpo_jax.hosts import stop_signal

# Threads that may be inside XLA, which nothing can interrupt; see
# `compile_ahead.start` and `engines.local.side_by_side`.
_IN_XLA = 'compile ahead', 'sampling'


def main(argv: list[str]) -> None:
  """Runs the command that the first argument names."""
  try:
    with stop_signal.no_exit():
      code = table.COMMANDS[argv[1]].run()
  except KeyboardInterrupt:
    raise SystemExit(130) from None
  except BrokenPipeError:  # an OSError, but no fault of the input; see `run`
    raise
  except Exception as error:
    if refusals.sentence(error) is None:
      raise
    _refuse(error)
  raise SystemExit(code)


def _parse(argv: list[str]) -> list[str]:
  """Reads the flags.

  Prints the help or the version, or a sentence about what is wrong, and exits;
  else returns the arguments as `app.run` wants them.
  """
  command = argv[1] if len(argv) > 1 and argv[1][:1] != '-' else ''
  if '--version' in argv[1:2]:
    print(
      f'grpo-jax {__version__} (jax {metadata.version("jax")}, '
      f'Python {platform.python_version()})'
    )
    raise SystemExit(0)
  asks = _HELP & {one.partition('=')[0] for one in argv[1:]}
  if asks or command == 'help' or not argv[1:]:
    columns = shutil.get_terminal_size((80, 24)).columns
    print(help_text.text(table.COMMANDS, command, columns))
    raise SystemExit(0)
  try:
    if command not in table.COMMANDS:
      raise ValueError(
        f'got {command!r}; the commands are: {", ".join(table.COMMANDS)} '
        '(grpo-jax --help tells more).'
      )
    switches = {name for name in _FLAGS if flags.FLAGS[name].boolean}
    takes = table.COMMANDS[command].takes
    reads = table.COMMANDS[command].flags
    argv = arguments.prepared(argv, switches, takes, 'config' in reads)
    if command == 'study':
      reads = table.read_by_study(argv)
    arguments.refuse_unread(argv, reads, switches)
    _require_flags(command, reads, argv)
    argv, table.SET_LATER[:] = arguments.set_aside(argv)
    sys.argv[:] = argv  # where ml_collections looks for fields of the config
    with stop_signal.no_exit():  # a config file is code too
      return flags.FLAGS(argv)
  except Exception as error:  # a config file may raise anything
    said = arguments.mistyped(argv, error)
    if said is None and not isinstance(error, ValueError | OSError):
      said = f'The config cannot be used ({plain_text.named(error)}).'
    _refuse(ValueError(said) if said else error)


_IN_BUCKETS = 'train', 'eval', 'sample', 'doctor', 'report'
# The last ones are absl's, whose help is of other programs' flags too.
_HELP = {'--help', '-h', '-?', '--helpshort', '--helpfull', '--helpxml'}


def _require_flags(command: str, reads: Sequence[str], argv: list[str]) -> None:
  """Raises if the command lacks a flag that it needs, or has one in vain."""
  given = dict(one[2:].split('=', 1) for one in argv[2:] if '=' in one)
  workdir = given.get('workdir', '')
  if '://' in workdir and command not in _IN_BUCKETS:
    raise ValueError(
      f'--workdir={workdir} is in a bucket, where {command} cannot write; give '
      'a directory.'
    )
  for wanted in table.COMMANDS[command].takes:
    if not given.get(wanted) and not wanted.startswith('*'):
      raise ValueError(
        f'{command} needs a {wanted}. As in:\n{help_text.EXAMPLES}'
      )
  if command == 'study' and 'out' in reads and not given.get('out'):
    raise ValueError(
      f'study {given["study"]} needs --out, a folder for its tables and '
      'figures, as in --out=claims.'
    )
  if {'workdir', 'config'} <= {*reads} and not workdir:
    raise ValueError(
      f'{command} needs --workdir, and --config for a new run. As in:\n'
      f'{help_text.EXAMPLES}'
    )


def _refuse(error: Exception) -> NoReturn:
  """Prints an error to standard error, and exits with 2.

  The error is made into one line. Only our examples stay as they are, for they
  are commands, one on each line.
  """
  # Not the flag, because it may be the flags that could not be parsed.
  if '--verbose' in sys.argv:
    _print_trace(error)
  # Errors of ml_collections hold escaped line breaks and quotes.
  text = refusals.sentence(error) or plain_text.said(error)
  text = text.replace('\\n', ' ').replace("\\'", "'")
  text, examples, _ = text.partition(f'\n{help_text.EXAMPLES}')
  text = plain_text.printable(' '.join(text.split()))
  print(f'grpo-jax: {text}{examples}', file=sys.stderr)
  raise SystemExit(2) from None


def _print_trace(error: BaseException) -> None:
  trace = ''.join(traceback.format_exception(error))
  print(plain_text.printable(trace), end='', file=sys.stderr)


def _tell_of_thread(given: Any) -> None:
  """Prints an error that has ended a thread."""
  if given.exc_value is not None and given.exc_type is not SystemExit:
    name = given.thread.name if given.thread else 'unknown'
    said = plain_text.printable(f'The thread {name} has ended with an error:')
    print(said, file=sys.stderr)
    _print_trace(given.exc_value)


_usual_warning = warnings.formatwarning


def _warning(*given: Any, **named: Any) -> str:
  """A warning of Python, whose text may be anybody's."""
  return plain_text.printable(_usual_warning(*given, **named))


def _hide_orbax(unraisable: Any) -> None:
  """Hides errors that Orbax raises where nothing can catch them.

  After a save or a restore has failed, its callbacks fail once more.
  `checkpoint.py` has reported the failure by then.
  """
  error = unraisable.exc_value
  trace = ''.join(traceback.format_tb(unraisable.exc_traceback))
  said = '' if error is None else plain_text.said(error)
  if 'orbax' in trace or 'Event loop is closed' in said:
    return
  about = plain_text.shown(unraisable.object)
  print(f'An error that nothing could catch, in {about}:', file=sys.stderr)
  if error is not None:
    _print_trace(error)


class _Plain(logging_lib.Formatter):
  """Lines of logs of libraries, whose text may be anybody's."""

  def format(self, record: logging_lib.LogRecord) -> str:
    return plain_text.printable(super().format(record))


def run() -> None:
  """The console script."""
  # What matters in the long logs of jax and orbax is printed as one sentence.
  logging.set_verbosity(logging.FATAL)
  sys.unraisablehook = _hide_orbax
  # What ends in a traceback is a fault of ours, but its text may be anybody's.
  sys.excepthook = lambda _, error, __: _print_trace(error)
  threading.excepthook = _tell_of_thread
  if logging_lib.lastResort is not None:  # as asyncio uses it
    logging_lib.lastResort.setFormatter(_Plain())
  warnings.formatwarning = _warning
  refusals.prepare_streams()
  # Only a training run has something to save when a signal comes.
  trains = sys.argv[1:2] == ['train']
  try:
    try:
      with table.STOP if trains else contextlib.nullcontext():
        app.run(main, flags_parser=_parse)
    except SystemExit as error:
      _end(error.code if isinstance(error.code, int) else bool(error.code))
    except refusals.Unwritten as error:  # the help
      _refuse(error)
  except BrokenPipeError:  # the reader has seen enough, as `| head` has
    # Python flushes standard output at its end, which would fail once more.
    refusals.to_nowhere(sys.stdout.fileno())
    raise SystemExit(1) from None


def _end(code: int) -> NoReturn:
  """Exits, with a sentence if not all that was printed could be written."""
  try:
    sys.stdout.flush()
  except refusals.Unwritten as error:
    _refuse(error)
  # A normal exit would wait for threads that compile or draw, or crash in them.
  if any(thread.name in _IN_XLA for thread in threading.enumerate()):
    sys.stderr.flush()
    os._exit(code)
  raise SystemExit(code)
