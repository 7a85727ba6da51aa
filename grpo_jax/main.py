"""The command line: parses, checks, calls; everything else is a library."""

from collections.abc import Callable
import contextlib
import json
import os
import resource
import shutil
import sys
import textwrap
import threading
import traceback
from typing import Any
from typing import NamedTuple
from typing import NoReturn

from absl import app
from absl import flags
from absl import logging
from ml_collections import config_flags

from grpo_jax import arguments
from grpo_jax import options
from grpo_jax import signals

_STOP = signals.Stop()
_CONFIG = config_flags.DEFINE_config_file(
  'config', None, 'A config file, with an argument after a colon if it has one.'
)
_FLAGS = {
  'workdir': flags.DEFINE_string(
    'workdir', None, 'Directory of the run; train goes on from what is in it.'
  ),
  'verbose': flags.DEFINE_bool(
    'verbose', False, 'Show the traceback of an error in the input too.'
  ),
  'json': flags.DEFINE_bool(
    'json', False, 'Print JSON, for a program to read.'
  ),
  'check': flags.DEFINE_bool(
    'check',
    False,
    'Show config, shapes, memory and the first rollout; train nothing.',
  ),
  'replay': flags.DEFINE_string(
    'replay',
    None,
    "Directory of an earlier run's completions, to train on these instead of "
    'sampling (that run needs log.completions_every_steps=1).',
  ),
  'profile_steps': flags.DEFINE_list(
    'profile_steps',
    [],
    'FIRST,LAST: rollouts to record with the JAX profiler, counted from 1.',
  ),
  'checkpoint': flags.DEFINE_string(
    'checkpoint', 'latest', "Which to load: a rollout, 'latest' or 'best'."
  ),
  'examples': flags.DEFINE_integer(
    'examples', 0, 'Held-out problems; 0: as many as the config says.'
  ),
  'samples': flags.DEFINE_integer('samples', 8, 'Completions per problem.'),
  'k': flags.DEFINE_list(
    'k', ['1', '8'], 'The k of pass@k and majority@k, none above --samples.'
  ),
  'temperature': flags.DEFINE_float(
    'temperature', None, "Of the sampling; 0: greedy. Default: the config's."
  ),
  'max_tokens': flags.DEFINE_integer(
    'max_tokens', None, "Longest completion, tokens. Default: the config's."
  ),
  'completions': flags.DEFINE_string(
    'completions', None, 'Parquet file for all completions with their rewards.'
  ),
  'prompt': flags.DEFINE_multi_string(
    'prompt', [], 'A prompt; may be repeated.'
  ),
  'prompts': flags.DEFINE_string(
    'prompts', None, 'File with a prompt on each line; - is standard input.'
  ),
  'number': flags.DEFINE_integer('number', 1, 'Completions of each prompt.'),
  'method': flags.DEFINE_string(
    'method', None, "A name of losses.methods, or your own 'module:function'."
  ),
  'method_kwargs': flags.DEFINE_string(
    'method_kwargs', '{}', 'Its arguments, as in \'{"high": 0.3}\'.'
  ),
  'fields': flags.DEFINE_string(
    'fields',
    None,
    "'module:function' that makes the fields a method of yours requires, or "
    'reward_parts of several rewards: from a batch [P,G,T], a dict of arrays.',
  ),
  'plot': flags.DEFINE_bool(
    'plot', False, 'Draw the coefficient against the ratio: audit-NAME.png.'
  ),
  'study': flags.DEFINE_string('study', None, 'Which: brakes.'),
  'seeds': flags.DEFINE_integer('seeds', 3, 'Runs of each arm of a study.'),
  'steps': flags.DEFINE_integer('steps', 30, 'Rollouts of each of these runs.'),
  'only': flags.DEFINE_list(
    'only', [], 'Arms to run and to show, separated by commas. Default: all.'
  ),
}

_EXAMPLES = """\
  grpo-jax train --config=configs/arithmetic.py --workdir=runs/arithmetic
  grpo-jax eval --workdir=runs/arithmetic --samples=16 --k=1,4,16
  grpo-jax sample --workdir=runs/arithmetic --prompt=47+85=
  grpo-jax audit dapo --plot
  grpo-jax study brakes --config=configs/arithmetic.py --workdir=runs/brakes"""

_EXIT_CODES = """\
Exit codes: 0 done; 2 the input cannot be used, as one sentence says; 130 and
143 stopped by Ctrl-C or SIGTERM (and saved: the same command goes on)."""


def train() -> None:
  """`grpo-jax train`."""
  from grpo_jax import check
  from grpo_jax import loop

  config = _config()
  if _value('check'):
    report = check.inspect(config, _value('workdir'))
    (_print_json if _value('json') else check.show)(report)
    return
  result = loop.train(
    config,
    _value('workdir'),
    _STOP,
    _value('replay'),
    _step_range(_value('profile_steps')),
  )
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
  _print_json(
    {
      name: value if value is None else round(value, 4)
      for name, value in {**result, 'peak_memory_gib': peak}.items()
    }
  )
  if _STOP.signal is not None:
    raise SystemExit(128 + _STOP.signal)


def evaluate() -> None:
  """`grpo-jax eval`."""
  from grpo_jax import inference

  policy = inference.load(_config(), _value('workdir'), _value('checkpoint'))
  summary = inference.evaluate(
    policy,
    examples=_value('examples'),
    samples=_value('samples'),
    ks=[_whole('k', k) for k in _value('k')],
    temperature=_value('temperature'),
    max_tokens=_value('max_tokens'),
    completions=_value('completions'),
  )
  if _value('json'):
    _print_json(summary)
  else:
    inference.show(summary)


def sample() -> None:
  """`grpo-jax sample`."""
  from grpo_jax import inference

  policy = inference.load(_config(), _value('workdir'), _value('checkpoint'))
  inference.sample(
    policy,
    inference.prompts(_value('prompt'), _value('prompts')),
    number=_value('number'),
    temperature=_value('temperature'),
    max_tokens=_value('max_tokens'),
    write=_print_json if _value('json') else None,
  )


def methods() -> None:
  """`grpo-jax methods`."""
  from grpo_jax import method_audit

  table = method_audit.table(method_audit.every())
  if _value('json'):
    _print_json(table)
  else:
    method_audit.show_table(table)


def audit() -> None:
  """`grpo-jax audit`."""
  from grpo_jax import method_audit

  name = _value('method')
  result = method_audit.of(name, _value('method_kwargs'), _value('fields'))
  figure = method_audit.figure(name, result) if _value('plot') else None
  if _value('json'):
    _print_json(method_audit.to_json(name, result, figure))
  else:
    method_audit.show(name, result, figure)


def study() -> None:
  """`grpo-jax study`."""
  from grpo_jax import studies

  summary = studies.named(_value('study'))(
    _config(),
    _value('workdir'),
    seeds=_value('seeds'),
    steps=_value('steps'),
    only=_value('only'),
  )
  if _value('json'):
    _print_json(studies.to_json(summary))
  else:
    studies.show(summary)


class Command(NamedTuple):
  """One command: what runs it, what it does, and the flags that it reads."""

  run: Callable[[], None]
  what: str
  flags: tuple[str, ...]
  takes: str = ''  # the flag whose value is given without its name


COMMANDS = {
  'train': Command(
    train,
    'Trains, from where the workdir stands; one JSON line at the end.',
    (
      'config', 'workdir', 'check', 'replay', 'profile_steps', 'json',
      'verbose',
    ),
  ),
  'eval': Command(
    evaluate,
    'pass@k, majority@k and lengths of a checkpoint on held-out problems.',
    (
      'workdir', 'config', 'checkpoint', 'examples', 'samples', 'k',
      'temperature', 'max_tokens', 'completions', 'json', 'verbose',
    ),
  ),
  'methods': Command(
    methods,
    'The table of all methods, each column read off by evaluating them.',
    ('json', 'verbose'),
  ),
  'audit': Command(
    audit,
    'What one method does to prefixes, reward scale, clipped tokens.',
    ('method', 'method_kwargs', 'fields', 'plot', 'json', 'verbose'),
    takes='method',
  ),
  'sample': Command(
    sample,
    'Completions of given prompts, written as they come.',
    (
      'workdir', 'config', 'checkpoint', 'prompt', 'prompts', 'number',
      'temperature', 'max_tokens', 'json', 'verbose',
    ),
  ),
  'study': Command(
    study,
    'Runs that differ in one thing, and their table; goes on where it was.',
    (
      'study', 'workdir', 'config', 'seeds', 'steps', 'only', 'json', 'verbose',
    ),
    takes='study',
  ),
}  # fmt: skip


def _value(name: str) -> Any:
  return _FLAGS[name].value


def _print_json(values: Any) -> None:
  print(json.dumps(values), flush=True)


def _config():
  """The config of the flags, checked."""
  from grpo_jax import config

  values = _CONFIG.value
  if not hasattr(values, 'to_dict'):
    raise ValueError(
      f'get_config returned {values!r:.80}, which is no ConfigDict; return '
      'grpo_jax.config.default() with your changes.'
    )
  return config.resolve(values)


def _whole(name: str, text: str) -> int:
  try:
    return int(text)
  except ValueError as error:
    raise ValueError(
      f'--{name} has {text!r}; give whole numbers, separated by commas.'
    ) from error


def _step_range(given: list[str]) -> tuple[int, int]:
  """First and last step; (0, 0) for none."""
  steps = [_whole('profile_steps', step) for step in given] or [0, 0]
  if len(steps) != 2 or not 0 <= steps[0] <= steps[1]:
    raise ValueError(
      f'--profile_steps={",".join(given)} is no range; give the first and the '
      'last rollout, as in --profile_steps=3,5.'
    )
  return steps[0], steps[1]


def main(argv: list[str]) -> None:
  """Runs the command that the first argument names."""
  try:
    COMMANDS[argv[1]].run()
  except KeyboardInterrupt:
    raise SystemExit(130) from None
  except BrokenPipeError:
    raise
  except (ValueError, OSError) as error:
    _refuse(error)


def help_text(command: str, width: int) -> str:
  """What `grpo-jax [command] --help` prints.

  Args:
    command: A command, or '' for all of them.
    width: Columns.
  """
  if command not in COMMANDS:
    rows = [f'  {name:8}{known.what}' for name, known in COMMANDS.items()]
    return '\n'.join(
      [
        'Post-trains language models with group-based reinforcement learning.',
        '',
        'grpo-jax COMMAND [--FLAG=VALUE ...]',
        '',
        *rows,
        '',
        'Examples:',
        _EXAMPLES,
        '',
        _EXIT_CODES,
        'grpo-jax COMMAND --help shows the flags of a command.',
      ]
    )
  _, what, names, takes = COMMANDS[command]
  rows = []
  for name in names:
    flag = flags.FLAGS[name]
    given = '' if flag.boolean else '=...'
    default = (
      f' ({flag.default_as_str})' if flag.value not in (None, [], False) else ''
    )
    rows.append((f'--{name}{given}', f'{flag.help}{default}'))
  takes = f' {takes.upper()}' if takes else ''
  title = textwrap.wrap(f'grpo-jax {command}{takes}: {what}', width)
  text = [*title, '', _columns(rows, width)]
  if command == 'train':
    text += ['', 'Fields of the config:', '', options.help_text(width)]
  return '\n'.join([*text, '', _EXIT_CODES])


def _columns(rows: list[tuple[str, str]], width: int) -> str:
  """Two columns, the second wrapped to the width of the terminal."""
  lines = []
  for left, right in rows:
    for line in textwrap.wrap(right, max(width - 24, 20)):
      lines.append(f'  {left:22}{line}')
      left = ''
  return '\n'.join(lines)


def _parse(argv: list[str]) -> list[str]:
  """Reads the flags; what they cannot mean is said in one sentence."""
  command = argv[1] if len(argv) > 1 and argv[1][:1] != '-' else ''
  if {'--help', '-h'} & set(argv[1:]) or command == 'help':
    print(help_text(command, shutil.get_terminal_size((80, 24)).columns))
    raise SystemExit(0)
  try:
    if command not in COMMANDS:
      raise flags.Error(
        f'grpo-jax got {command!r}; the commands are: {", ".join(COMMANDS)} '
        '(grpo-jax --help tells more).'
      )
    switches = {name for name in _FLAGS if flags.FLAGS[name].boolean}
    argv = arguments.prepared(argv, switches, COMMANDS[command].takes)
    parsed = flags.FLAGS(argv)
    _check_flags(command, parsed)
  except Exception as error:  # a config file may raise anything
    said = arguments.unknown_field(argv) or arguments.raised_by_config(error)
    if said is None and not isinstance(error, _SENTENCES):
      said = f'The config cannot be used ({type(error).__name__}: {error}).'
    _refuse(ValueError(said) if said else error)
  return parsed


# Errors whose text is a sentence, or nearly; others come from a config file.
_SENTENCES = (flags.Error, ValueError, OSError, KeyError)


def _check_flags(command: str, parsed: list[str]) -> None:
  """Raises if there is something that the command does not read."""
  read = COMMANDS[command].flags
  known = ', '.join(f'--{name}' for name in read)
  others = [f'--{name}' for name in _FLAGS if flags.FLAGS[name].present]
  others = [name for name in others if name not in known.split(', ')]
  if parsed[2:] or others:
    raise flags.Error(
      f'grpo-jax {command} got {" ".join(parsed[2:] + others)}, which it does '
      f'not read; its flags are {known}'
      f'{", --config.FIELD" if "config" in read else ""}.'
    )
  if '://' in (_value('workdir') or ''):
    raise flags.Error(
      f'--workdir={_value("workdir")} is no local path, and buckets cannot be '
      'written yet; give a directory.'
    )
  wanted = COMMANDS[command].takes
  if wanted and not _value(wanted):
    raise flags.Error(
      f'grpo-jax {command} needs a {wanted}. As in:\n{_EXAMPLES}'
    )
  if 'workdir' in read and not _value('workdir'):
    raise flags.Error(
      f'grpo-jax {command} needs --workdir, and --config for a new run. As '
      f'in:\n{_EXAMPLES}'
    )


def _refuse(error: Exception) -> NoReturn:
  """Says in one sentence why nothing was done, or no more."""
  if '--verbose' in sys.argv:
    traceback.print_exception(error)
  text = str(error)
  if isinstance(error, KeyError):
    text = (
      f'the config has no {text}; --config.learner.method_kwargs="{{...}}" '
      'gives all arguments of a method at once.'
    )
  text = text.replace('\\n', ' ').replace("\\'", "'")
  print(f'grpo-jax: {" ".join(text.split())}', file=sys.stderr)
  raise SystemExit(2) from None


def _hide_orbax(unraisable: Any) -> None:
  """Its callbacks fail once more where nothing can catch them.

  After a save or a restore that has failed; `checkpoint.py` has said so.
  """
  trace = ''.join(traceback.format_tb(unraisable.exc_traceback))
  closed = 'Event loop is closed' in str(unraisable.exc_value)
  if 'orbax' not in trace and not closed:
    sys.__unraisablehook__(unraisable)


def run() -> None:
  """The console script."""
  # What jax and orbax log at length is said here in a sentence, if it matters.
  logging.set_verbosity(logging.FATAL)
  sys.unraisablehook = _hide_orbax
  trains = sys.argv[1:2] == ['train']  # which alone has something to save
  try:
    with _STOP if trains else contextlib.nullcontext():
      app.run(main, flags_parser=_parse)
  except SystemExit as error:
    # Python would wait for the compiler, or crash it.
    if any(thread.name == 'compile ahead' for thread in threading.enumerate()):
      sys.stdout.flush()
      sys.stderr.flush()
      os._exit(error.code if isinstance(error.code, int) else bool(error.code))
    raise
  except BrokenPipeError:  # the reader has seen enough, as `| head` has
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise SystemExit(1) from None
