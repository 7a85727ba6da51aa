"""What was typed, made into what absl's flags read; and what was mistyped."""

from collections.abc import Collection
import pathlib

from grpo_jax.commands import options
from grpo_jax.training import workdir

PACKAGE = pathlib.Path(__file__).parent.parent


def prepared(
  argv: list[str], switches: Collection[str], takes: str = ''
) -> list[str]:
  """The arguments in one form, with a config.

  `-name value` and the like become `--name=value`; a config file of the package
  is found from anywhere; without one, the config is that of the run in the
  workdir.

  Args:
    argv: Program, command, arguments.
    switches: Flags that take no value.
    takes: A flag whose value may come without its name.

  Raises:
    ValueError: No config is given, and the workdir holds no run.
  """
  arguments = [
    f'--config={installed(one.removeprefix("--config="))}'
    if one.startswith('--config=')
    else one
    for one in _joined(argv[2:], switches)
  ]
  if takes and arguments and not arguments[0].startswith('-'):
    arguments[0] = f'--{takes}={arguments[0]}'
  given = dict(one.split('=', 1) for one in arguments if '=' in one)
  if '--config' not in given and '--workdir' in given:
    workdir.config_of(given['--workdir'])  # says so if there is none
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
      alone = '=' in name or name in switches or name.startswith('no')
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
  """What to say of the first `--config.NAME` that is no field of the config."""
  known = {option.name for option in options.describe()}
  for argument in arguments:
    given = argument.partition('=')[0]
    name = given.removeprefix('--config.')
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
  """The sentence of a ValueError in a config file, out of its traceback."""
  last = str(error).replace('\\n', '\n').strip().splitlines()[-1:]
  kind, _, sentence = ''.join(last).partition(': ')
  traced = 'Traceback (most recent call last)' in str(error)
  return sentence if traced and kind == 'ValueError' else None
