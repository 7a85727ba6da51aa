"""The program: runs the command that was typed, and says how it has ended."""

from collections.abc import Sequence
import contextlib
import faulthandler
import importlib
from importlib import metadata
import logging as logging_lib
import os
import platform
import sys
import threading
import traceback
from typing import Any
from typing import NoReturn
import warnings

from absl import flags
from absl import logging

from grpo_jax import __version__
from grpo_jax.commands import arguments
from grpo_jax.commands import options
from grpo_jax.commands import printing
from grpo_jax.commands import table
from grpo_jax.commands import together
from grpo_jax.config import importing
from grpo_jax.config import plain_text
from grpo_jax.hosts import processes
from grpo_jax.hosts import stop_signal

# Threads that may be inside XLA, which nothing can interrupt; see
# `learner.programs.compile_ahead` and `engines.local.generation`.
_IN_XLA = 'compile ahead', 'sampling'
# The function of `run.build.names` that looks up what a command will need.
_LOOKED_UP = {
  'train': 'check', 'study': 'check', 'eval': 'check_evaluation',
  'sample': 'check_model', 'serve': 'check_model', 'plan': 'check_learning',
}  # fmt: skip
_HELP = {'--help', '-h', '-?', '--helpshort', '--helpfull', '--helpxml'}


def main(words: Sequence[str]) -> int:
  """Does what was typed; returns the exit code.

  Args:
    words: A command and what follows it, or flags that ask for help.
  """
  if answer := _information(words):
    print(answer)
    return 0
  try:
    with stop_signal.no_exit():  # a config file is code too
      read = arguments.read(words)
      _look_up(read)
      module, _, name = table.COMMANDS[read.command].run.partition(':')
      command = importlib.import_module(f'grpo_jax.commands.{module}')
      return getattr(command, name)(read) or 0
  except KeyboardInterrupt:
    return 130
  except BrokenPipeError:  # an OSError, but no fault of the input; see `run`
    raise
  except Exception as error:
    if printing.sentence(error) is None:
      raise
    return _refuse(error)


def _look_up(read: arguments.Arguments) -> None:
  """Looks up the names in a config, before seconds go into importing JAX."""
  if read.command not in _LOOKED_UP or read.config is None:
    return
  from grpo_jax.run.build import names

  getattr(names, _LOOKED_UP[read.command])(read.config)


def _information(words: Sequence[str]) -> str:
  """The version, or the help; '' if none of them is asked for."""
  if '--version' in words[:1]:
    return (
      f'grpo-jax {__version__} (jax {metadata.version("jax")}, '
      f'Python {platform.python_version()})'
    )
  asks = _HELP & {word.partition('=')[0] for word in words}
  if asks or words[:1] in ([], ['help']):
    return options.help_text(words[0] if words else '', printing.columns())
  return ''


def _refuse(error: Exception) -> int:
  """Prints an error to standard error; returns the exit code.

  The error is made into one line. Only our examples stay as they are, for they
  are commands, one on each line.
  """
  # Not the flag, because it may be the flags that could not be read.
  if {'--verbose', '-verbose'} & {*sys.argv}:
    _print_trace(error)
  text = printing.sentence(error) or plain_text.said(error)
  text, examples, _ = text.partition(f'\n{options.EXAMPLES}')
  text = plain_text.printable(' '.join(text.split()))
  print(f'grpo-jax: {text}{examples}', file=sys.stderr)
  again = isinstance(error, processes.StartAgain)
  return processes.START_AGAIN if again else 2


def _print_trace(error: BaseException) -> None:
  trace = ''.join(traceback.format_exception(error))
  printing.say(trace, end='', file=sys.stderr)


def _tell_of_thread(ended: Any) -> None:
  """Prints an error that has ended a thread."""
  if ended.exc_value is not None and ended.exc_type is not SystemExit:
    name = ended.thread.name if ended.thread else 'unknown'
    printing.say(f'The thread {name} has ended with an error:', file=sys.stderr)
    _print_trace(ended.exc_value)


_usual_warning = warnings.formatwarning


def _warning(*args: Any, **kwargs: Any) -> str:
  """A warning of Python, whose text may be anybody's."""
  return plain_text.printable(_usual_warning(*args, **kwargs))


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


def _prepare_process() -> None:
  """What is done once in a process, as `absl.app` does it."""
  logging.use_absl_handler()
  flags.FLAGS.mark_as_parsed()  # those of libraries
  with contextlib.suppress(Exception):  # of a stream without a file
    faulthandler.enable()


def run() -> NoReturn:
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
  printing.prepare_streams()
  # As for `python -m grpo_jax`: a console script lacks the current directory.
  importing.add_folder('.')
  _prepare_process()
  words = sys.argv[1:]
  # Only these have something to end in order when a signal comes.
  trains = words[:1] in (['train'], ['generate'])
  try:
    with together.STOP if trains else contextlib.nullcontext():
      code = main(words)
    sys.stdout.flush()
  except printing.Unwritten as error:
    code = _refuse(error)
  except BrokenPipeError:  # the reader has seen enough, as `| head` has
    # Python flushes standard output at its end, which would fail once more.
    printing.to_nowhere(sys.stdout.fileno())
    code = 1
  # A normal exit would wait for threads that compile or draw, or crash in them.
  if any(thread.name in _IN_XLA for thread in threading.enumerate()):
    sys.stderr.flush()
    os._exit(code)
  raise SystemExit(code)
