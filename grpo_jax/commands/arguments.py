"""Turns what was typed into what absl reads, and explains what was mistyped."""

from collections.abc import Collection
from collections.abc import Sequence
import pathlib

from grpo_jax.commands import options
from grpo_jax.training import workdir

PACKAGE = pathlib.Path(__file__).parent.parent


def prepared(
  argv: list[str], switches: Collection[str], takes: Sequence[str] = ()
) -> list[str]:
  """The arguments in one form, with a `--config`.

  `-name value` and the like become `--name=value`. The path of a config file
  that comes with the package is completed. Without `--config`, the config is
  that of the run in the workdir.

  Args:
    argv: Program, command, arguments.
    switches: Flags that take no value.
    takes: Flags whose values may be given without their names, in this order,
      as in `audit dapo`.

  Returns:
    Program, command, and the arguments as `--name=value` or `--name`.

  Raises:
    ValueError: No config is given, and the workdir holds no run.
  """
  arguments = [
    f'--config={installed(one.removeprefix("--config="))}'
    if one.startswith('--config=')
    else one
    for one in _joined(argv[2:], switches)
  ]
  unnamed = [i for i, one in enumerate(arguments) if not one.startswith('-')]
  for i, name in zip(unnamed, takes):
    arguments[i] = f'--{name}={arguments[i]}'
  given = dict(one.split('=', 1) for one in arguments if '=' in one)
  if '--config' not in given and '--workdir' in given:
    workdir.config_of(given['--workdir'])  # raises if there is no run
    saved = PACKAGE / 'commands' / 'saved_config.py'
    arguments.insert(0, f'--config={saved}:{given["--workdir"]}')
  return [*argv[:2], *arguments]


def _joined(arguments: list[str], switches: Collection[str]) -> list[str]:
  """Every flag as `--name=value`."""
  joined, rest = [], list(arguments)
  while rest:
    argument = rest.pop(0)
    if argument.startswith('-') and argument != '-':
      argument = f'--{argument.lstrip("-")}'
      name = argument.removeprefix('--')
      # absl reads `--nocheck` as `--check=false`.
      alone = '=' in name or name in switches or name.startswith('no')
      # A value may begin with one dash: a negative number, or `-` for standard
      # input.
      if not alone and rest and not rest[0].startswith('--'):
        argument += f'={rest.pop(0)}'
    joined.append(argument)
  return joined


def installed(config: str) -> str:
  """The path of a config file, perhaps with an argument after a colon.

  'configs/x.py' stands for the file of the installed package, unless there is
  such a file in the current directory.
  """
  file = config.split(':')[0]
  if pathlib.Path(file).exists() or not file.startswith('configs/'):
    return config
  if not (PACKAGE / file).exists():
    return config
  return config.replace(file, str(PACKAGE / file), 1)


def unknown_field(arguments: list[str]) -> str | None:
  """A message about the first `--config.NAME` that the config does not have.

  None if there is no such argument.
  """
  known = {option.name for option in options.describe()}
  for argument in arguments:
    given = argument.partition('=')[0]
    name = given.removeprefix('--config.')
    # These take any name, and rewards an index such as rewards[0].
    inside = name.startswith(
      ('learner.method_kwargs.', 'data.chat_kwargs.', 'rewards')
    )
    if name == given or name in known or inside:
      continue
    near = options.suggest(name)
    advice = f'the nearest is config.{near}' if near else 'see --help'
    return f'config.{name} is no field of the config; {advice}.'
  return None


def raised_by_config(error: Exception) -> str | None:
  """The message of a ValueError that was raised in a config file.

  ml_collections puts the traceback of that error, with its line breaks escaped,
  into the text of its own error. None if `error` is of another kind.
  """
  last = str(error).replace('\\n', '\n').strip().splitlines()[-1:]
  kind, _, sentence = ''.join(last).partition(': ')
  traced = 'Traceback (most recent call last)' in str(error)
  return sentence if traced and kind == 'ValueError' else None
