"""The command line: parses, checks, calls; everything else is a library."""

import json
import os
import resource
import sys

from absl import app
from absl import flags
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

  if _CONFIG.value is None or _WORKDIR.value is None:
    raise ValueError(
      f'grpo-jax train needs --config and --workdir. Usage:\n{_USAGE}'
    )
  result = loop.train(config.resolve(_CONFIG.value), _WORKDIR.value)
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
  if sys.stderr.isatty():
    print(file=sys.stderr)
  print(
    json.dumps(
      {name: round(value, 4) for name, value in result.items()}
      | {'peak_memory_gib': round(peak, 2)}
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
        f'are {", ".join(COMMANDS)}. Usage:\n{_USAGE}'
      )
    COMMANDS[name]()
  except ValueError as error:
    if _VERBOSE.value:
      raise
    print(f'grpo-jax: {error}', file=sys.stderr)
    raise SystemExit(2) from error


def run() -> None:
  """The console script."""
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '1')
  app.run(main)
