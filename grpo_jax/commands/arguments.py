"""Turns what was typed into what absl reads, and explains what was mistyped."""

import ast
from collections.abc import Collection
from collections.abc import Sequence
import pathlib
import re
from typing import Any

from absl import flags

from grpo_jax.commands import options
from grpo_jax.config import importing
from grpo_jax.config import plain_text
from grpo_jax.run.keep import workdir

PACKAGE = pathlib.Path(__file__).parent.parent


def prepared(
  argv: list[str],
  switches: Collection[str],
  takes: Sequence[str] = (),
  has_config: bool = True,
) -> list[str]:
  """The arguments in one form, with a `--config`.

  `-name value` and the like become `--name=value`. The path of a config file
  that comes with the package is completed. Without `--config`, the config is
  that of the run in the workdir.

  Args:
    argv: Program, command, arguments.
    switches: Flags that take no value.
    takes: Flags whose values may be given without their names, in this order,
      as in `audit dapo`. The last, if its name begins with a star, may be given
      any number of times.
    has_config: Whether the command reads a config.

  Returns:
    Program, command, and the arguments as `--name=value` or `--name`.

  Raises:
    ValueError: There is no such config file; or no config is given, and the
      workdir holds no run.
  """
  arguments = _joined(argv[2:], switches)
  for i, one in enumerate(arguments):
    if one.startswith('--config='):
      arguments[i] = f'--config={installed(one.removeprefix("--config="))}'
  unnamed = [i for i, one in enumerate(arguments) if not one.startswith('-')]
  named = {one.partition('=')[0] for one in arguments}
  free = [name for name in takes if f'--{name}' not in named]
  if free and free[-1].startswith('*'):
    free += [free[-1]] * len(unnamed)
  for i, name in zip(unnamed, free):
    arguments[i] = f'--{name.lstrip("*")}={arguments[i]}'
  given = dict(one.split('=', 1) for one in arguments if '=' in one)
  if has_config and '--config' not in given and given.get('--workdir'):
    workdir.config_of(given['--workdir'])  # raises if there is no run
    saved = PACKAGE / 'commands' / 'saved_config.py'
    arguments.insert(0, f'--config={saved}:{given["--workdir"]}')
  # ml_collections wants the config before its fields.
  arguments.sort(key=lambda one: not one.startswith('--config='))
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


def refuse_unread(
  argv: list[str], read: Sequence[str], switches: Collection[str]
) -> None:
  """Raises a ValueError about arguments that a command does not read.

  Args:
    argv: What `prepared` returned.
    read: Flags of the command.
    switches: Flags that take no value.
  """
  has_config = 'config' in read
  names = {f'--{name}' for name in read}
  names |= {f'--no{name}' for name in read if name in switches}

  def is_read(argument):
    name = argument.partition('=')[0]
    of_config = name.startswith(('--config.', '--noconfig.'))
    return name in names or (has_config and of_config)

  if unread := [one for one in argv[2:] if not is_read(one)]:
    shown = [one.partition('=')[0] for one in unread]
    near = importing.nearest(shown[0], names)
    field = options.suggest(shown[0])
    if not near and has_config and field and shown[0].startswith('--'):
      near = f' (did you mean --config.{field}?)'
    known = ', '.join(f'--{name}' for name in read)
    raise ValueError(
      f'{argv[1]} got {" ".join(shown)}, which it does not read{near}; its '
      f'flags are {known}{", --config.FIELD" if has_config else ""}.'
    )
  booleans = {o.name for o in options.describe() if o.type == 'bool'}
  for one in argv[2:]:
    name = one.removeprefix('--').removeprefix('config.')
    alone = name in switches or name in booleans or one.startswith('--no')
    if '=' not in one and not alone:
      raise ValueError(f'{one} has no value; give one, as in {one}=VALUE.')


# Fields that absl cannot set: dicts, whose names are not known to it, and the
# method, with which the arguments of another one have to go.
_LATER = re.compile(
  r'--config\.(learner\.method|(learner\.method_kwargs|data\.chat_kwargs)'
  r'(\.[^=]+)?)='
)


def set_aside(argv: list[str]) -> tuple[list[str], list[str]]:
  """The arguments for absl, and those for `set_fields`.

  >>> set_aside(['grpo-jax', 'train', '--config.learner.method_kwargs.low=.2'])
  (['grpo-jax', 'train'], ['--config.learner.method_kwargs.low=.2'])
  """
  later = [one for one in argv if _LATER.match(one)]
  return [one for one in argv if not _LATER.match(one)], later


def set_fields(config: dict[str, Any], later: Sequence[str]) -> str:
  """Sets the method, its arguments and the variables of chat templates.

  Arguments that the config has for its own method are dropped if another one is
  chosen.

  Args:
    config: Nested dicts, which are changed.
    later: From `set_aside`.

  Returns:
    A sentence about arguments that were dropped; '' if none were.

  Raises:
    ValueError: A value cannot be read.
  """
  given = [one.removeprefix('--config.').partition('=') for one in later]
  names = {name for name, _, _ in given}
  learner, said = config.setdefault('learner', {}), ''
  chosen = [text for name, _, text in given if name == 'learner.method'][-1:]
  before, kwargs = learner.get('method'), learner.get('method_kwargs')
  if chosen and before not in (None, *chosen) and kwargs:
    learner['method_kwargs'] = {}
    if 'learner.method_kwargs' not in names:
      dropped = ', '.join(f'{name}={value}' for name, value in kwargs.items())
      said = (
        f'the config has arguments for the method {before}, which are left out '
        f'({dropped}), because the command line chooses {chosen[0]}; give its '
        'own with --config.learner.method_kwargs.NAME=VALUE.'
      )
  for name, _, text in given:
    *groups, last = name.split('.')
    group = config
    for one in groups:
      group = group.setdefault(one, {})
      if not isinstance(group, dict):
        raise ValueError(
          f'config.{name} cannot be set, because {one} is {group!r:.60}; give '
          f'all of it at once, as in --config.{".".join(groups)}="{{...}}".'
        )
    group[last] = _read(text, group.get(last))
  return said


def _read(text: str, before: Any) -> Any:
  """A value as it was typed, of the type of the value before, if there is one.

  >>> _read('.2', None), _read('low', None), _read('1', 0.5), _read('1', 'x')
  (0.2, 'low', 1.0, '1')
  """
  if isinstance(before, str):
    return text
  named = {'true': True, 'false': False, 'none': None}
  try:
    value = ast.literal_eval(text)
  except (ValueError, SyntaxError, MemoryError, RecursionError):
    value = named.get(text.lower(), text)
    if text.lower().lstrip('+-') in ('inf', 'nan'):
      value = float(text)
  is_whole = type(value) is int and isinstance(before, float)
  return float(value) if is_whole else value


def installed(config: str) -> str:
  """The path of a config file, perhaps with an argument after a colon.

  'configs/x.py' stands for the file of the installed package, or of the
  checkout that is installed, unless there is such a file in the current
  directory.

  Raises:
    ValueError: There is no such file.
  """
  file = config.split(':')[0]
  if pathlib.Path(file).is_file():
    return config
  checkout = PACKAGE.parent
  # Beside an installed package are other packages, which may have configs too.
  is_checkout = (checkout / 'pyproject.toml').is_file()
  for folder in (PACKAGE, checkout) if is_checkout else (PACKAGE,):
    if file.startswith('configs/') and (folder / file).is_file():
      return config.replace(file, str(folder / file), 1)
  raise ValueError(
    f'There is no config file {file!r}; give the path of a Python file with '
    'get_config, such as configs/arithmetic.py.'
  )


# ml_collections names the module of a config file after the flag.
_NO_FUNCTION = "module 'config_config' has no attribute 'get_config'"


def mistyped(argv: list[str], error: Exception) -> str | None:
  """What is wrong with what was typed, by the error of reading it.

  Args:
    argv: What `prepared` returned.
    error: Raised by absl, by ml_collections or by a config file.

  Returns:
    A sentence, or None if `error` has one, or is of another kind.
  """
  if isinstance(error, IndexError) and any(
    argument.startswith('--config.rewards[') for argument in argv
  ):
    return (
      'config.rewards has no such place; give all of them at once, as in '
      "--config.rewards=\"({'name': 'exact_match', 'weight': 1.0},)\"."
    )
  text = plain_text.said(error)
  if isinstance(error, AttributeError) and text == _NO_FUNCTION:
    return (
      'The config file has no get_config; define this function, and return '
      'grpo_jax.config.default() with your changes.'
    )
  if isinstance(error, ValueError) and 'Traceback' not in text:
    said = None if not isinstance(error, flags.Error) else _of_value(error)
    return said or unknown_field(argv)
  return unknown_field(argv) or raised_by_config(error) or _of_value(error)


def _of_value(error: Exception) -> str | None:
  """A sentence about a value that absl could not read."""
  found = re.match(
    r'flag --([^=\s]+)=(.*?): ', plain_text.said(error), re.DOTALL
  )
  if found is None:
    return None
  name, text = found.groups()
  types = {option.name: option.type for option in options.describe()}
  if name.startswith('config.'):
    kind = types.get(name.removeprefix('config.'))
    return f'{name} is {text!r}; it must be of type {kind}.' if kind else None
  flag = flags.FLAGS[name]
  known = getattr(flag.parser, 'enum_values', None)
  kinds = {
    'int': 'a whole number',
    'float': 'a number',
    'bool': 'true or false',
  }
  wanted = f'one of {", ".join(known)}' if known else kinds[flag.flag_type()]
  return f'--{name}={text!r} cannot be read; give {wanted}.'


def unknown_field(arguments: list[str]) -> str | None:
  """A message about the first `--config.NAME` that the config does not have.

  None if there is no such argument.
  """
  known = {option.name for option in options.describe()}
  for argument in arguments:
    given = argument.partition('=')[0]
    name = given.removeprefix('--config.')
    if name == given or name in known or _LATER.match(argument):
      continue
    # Of the right form; perhaps there is no such place.
    if re.sub(r'^rewards\[\d+\]', 'rewards[]', name) in {*known, 'rewards[]'}:
      continue
    near = options.suggest(name)
    advice = f'the nearest is config.{near}' if near else 'see --help'
    return f'config.{name} is no field of the config; {advice}.'
  return None


def raised_by_config(error: Exception) -> str | None:
  """The message of an error that was raised in a config file.

  ml_collections puts the traceback of that error, with its line breaks escaped,
  into the text of its own error. None if `error` is of another kind.
  """
  text = plain_text.said(error)
  if 'Traceback (most recent call last)' not in text:
    return None
  last = text.replace('\\n', '\n').strip().rpartition('\n')[2]
  kind, _, sentence = last.partition(': ')
  if kind == 'ValueError':
    return sentence
  return f'The config file cannot be used ({last}); correct it.'
