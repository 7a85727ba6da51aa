"""The command line: parses, checks, calls; everything else is a library."""

import json
import os
import pathlib
import resource
import sys
import traceback
from typing import NoReturn

from absl import app
from absl import flags
from absl import logging
from ml_collections import config_flags

_CONFIG = config_flags.DEFINE_config_file(
  'config', None, 'A config file, with an argument after a colon if it has one.'
)
_WORKDIR = flags.DEFINE_string(
  'workdir', None, 'Directory for metrics and, later, checkpoints.'
)
_VERBOSE = flags.DEFINE_bool(
  'verbose', False, 'Show the traceback of an error in the input.'
)

_USAGE = """\
grpo-jax train --config=configs/arithmetic.py --workdir=runs/arithmetic
  [--config.seed=1] [--config.FIELD=VALUE ...]"""


def train() -> None:
  """`grpo-jax train`: trains, and prints one JSON line at the end."""
  from grpo_jax import config
  from grpo_jax import loop

  if not flags.FLAGS['config'].present or _WORKDIR.value is None:
    raise ValueError(
      f'grpo-jax train needs --config and --workdir. Usage:\n{_USAGE}'
    )
  result = loop.train(config.resolve(_CONFIG.value), _WORKDIR.value)
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
  print(
    json.dumps(
      {
        name: None if value is None else round(value, 4)
        for name, value in {**result, 'peak_memory_gib': peak}.items()
      }
    )
  )


COMMANDS = {'train': train}


def main(argv: list[str]) -> None:
  """Runs the command that the first argument names."""
  name = argv[1] if len(argv) > 1 else ''
  try:
    if name not in COMMANDS or len(argv) > 2:
      raise ValueError(
        f'grpo-jax got {" ".join(argv[1:]) or "no command"!r}; the commands '
        f'are: {", ".join(COMMANDS)}. Usage:\n{_USAGE}'
      )
    COMMANDS[name]()
  except (ValueError, OSError) as error:
    if _VERBOSE.value:
      raise
    _keep_traceback()
    _refuse(error)


def _keep_traceback() -> None:
  """Writes it into the workdir, if the run had got as far as making one."""
  workdir = pathlib.Path(_WORKDIR.value or '')
  if _WORKDIR.value and workdir.is_dir() and os.access(workdir, os.W_OK):
    (workdir / 'traceback.txt').write_text(traceback.format_exc())


def _parse(argv: list[str]) -> list[str]:
  """Reads the flags; what they cannot mean is said in one sentence."""
  try:
    return flags.FLAGS([_find_config(argument) for argument in argv])
  except (flags.Error, AttributeError, KeyError, OSError, TypeError) as error:
    if '--verbose' in argv:
      raise
    _refuse(error)


def _find_config(argument: str) -> str:
  """`configs/x.py` is the installed one where there is no such file."""
  prefix, file = '--config=', argument.removeprefix('--config=').split(':')[0]
  installed = pathlib.Path(__file__).parent / file
  if not argument.startswith(prefix) or pathlib.Path(file).exists():
    return argument
  if not file.startswith('configs/') or not installed.exists():
    return argument
  return argument.replace(file, str(installed), 1)


def _refuse(error: Exception) -> NoReturn:
  text = str(error)
  if isinstance(error, KeyError):
    text = f'there is no config field {text}.'
  text = text.replace('\\n', ' ').replace("\\'", "'")
  sentence = ' '.join(text.split())
  print(f'grpo-jax: {sentence}', file=sys.stderr)
  raise SystemExit(2) from None


def run() -> None:
  """The console script."""
  # Warnings only: jax tells at length which accelerators it did not find.
  logging.set_verbosity(logging.WARNING)
  app.run(main, flags_parser=_parse)
