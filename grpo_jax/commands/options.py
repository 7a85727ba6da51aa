"""Every option of a config, and what `--help` prints of options and commands.

Name, type, default and meaning are read off the dataclasses of `config.fields`,
whose docstrings head the sections.
"""

from collections.abc import Sequence
import dataclasses
import difflib
import inspect
import textwrap
import typing
from typing import NamedTuple

from grpo_jax.commands import table
from grpo_jax.commands.peers import PEERS
from grpo_jax.config import Config
from grpo_jax.config.from_dict import type_name

EXAMPLES = """\
  grpo-jax doctor --workdir=runs
  grpo-jax train --config=configs/arithmetic.py --workdir=runs/arithmetic
  grpo-jax eval --workdir=runs/arithmetic --samples=16 --k=1,4,16
  grpo-jax sample --workdir=runs/arithmetic --prompt=47+85=
  grpo-jax serve runs/arithmetic --port=8000
  grpo-jax convert runs/arithmetic models/arithmetic --dtype=bfloat16
  grpo-jax report runs/arithmetic --out=report.html
  grpo-jax audit dapo --plot
  grpo-jax environment my_games:Countdown --episodes=50
  grpo-jax study brakes --config=configs/arithmetic.py --workdir=runs/brakes"""

_HEAD = """\
Post-trains language models with group-based reinforcement learning.

grpo-jax COMMAND [--FLAG=VALUE ...]

"""
_EXIT_CODES = """\
Exit codes: 0 done; 2 the input cannot be used, as one sentence says; 130 and
143 stopped by Ctrl-C or SIGTERM (and saved: the same command goes on); 75
another process of the run is gone (the same command goes on)."""


class Option(NamedTuple):
  """One field of the config."""

  name: str  # as in --config.NAME
  type: str  # as annotated
  default: str  # as typed after --config.NAME=
  meaning: str


class Section(NamedTuple):
  """One dataclass of the config."""

  name: str  # its path in the config, '' for the config itself
  meaning: str  # its docstring
  options: tuple[Option, ...]


def describe(config_class: type = Config) -> tuple[Option, ...]:
  """Every option, in the order of `sections`.

  Args:
    config_class: A dataclass whose fields carry their meanings.

  Returns:
    Options; those of a field `rewards` that is a tuple of dataclasses are
    `rewards` itself, then `rewards[].name` and the like.

  >>> describe()[1]
  Option(name='steps', type='int', default='60', meaning='Rollouts.')
  """
  return tuple(
    option for section in sections(config_class) for option in section.options
  )


def sections(
  config_class: type = Config, path: str = ''
) -> tuple[Section, ...]:
  """The options of a dataclass at `path`, then those of dataclasses inside."""
  hints = typing.get_type_hints(config_class)
  options, inner = [], []
  for field in dataclasses.fields(config_class):
    hint, meaning = hints[field.name], field.metadata.get('meaning', '')
    name = f'{path}.{field.name}' if path else field.name
    option = Option(name, type_name(hint), _default(field), meaning)
    item, *_ = *typing.get_args(hint), None  # Reward in tuple[Reward, ...]
    if dataclasses.is_dataclass(hint):
      inner += sections(typing.cast(type, hint), name)
    elif dataclasses.is_dataclass(item):
      first, *rest = sections(typing.cast(type, item), f'{name}[]')
      head = option._replace(meaning=meaning or first.meaning)
      inner += [Section(name, first.meaning, (head, *first.options)), *rest]
    else:
      options.append(option)
  meaning = ' '.join(inspect.cleandoc(config_class.__doc__ or '').split())
  return Section(path, meaning, tuple(options)), *inner


def _default(field: dataclasses.Field) -> str:
  if field.default_factory is not dataclasses.MISSING:
    return repr(field.default_factory())
  value = field.default
  if isinstance(value, tuple):  # as a ConfigDict has it
    value = tuple(
      vars(item) if dataclasses.is_dataclass(item) else item for item in value
    )
  return '' if value is dataclasses.MISSING else repr(value)


def suggest(name: str) -> str | None:
  """The option of ours that somebody meant.

  Args:
    name: A field that the config does not have: misspelt, in the wrong section,
      or a name of TRL or verl; verl's may lack its first parts.

  Returns:
    A name of ours, or None if nothing is near.

  >>> suggest('num_generations'), suggest('actor_rollout_ref.rollout.n')
  ('sampler.group', 'sampler.group')
  >>> suggest('sampler.temprature'), suggest('lr'), suggest('zzz')
  ('sampler.temperature', 'optim.lr', None)
  """
  name = name.removeprefix('--').removeprefix('config.')
  last = name.rpartition('.')[2]
  ours = [o.name for o in describe() if ('[' in o.name) == ('[' in name)]
  if name in ours:
    return name

  # The last part counts first, since the name may be in the wrong section.
  def likeness(own: str) -> tuple[float, float]:
    return _ratio(last, own.rpartition('.')[2]), _ratio(name, own)

  near = max(ours, key=likeness)
  close = likeness(near)[0]
  exact, part = _from_peer(name), _from_peer(last)
  if exact or (part and part.endswith(f'.{last}')):
    return exact or part
  if close == 1:  # the right name, in the wrong section
    return near
  return part or (near if close > 0.66 else None)


def _from_peer(name: str) -> str | None:
  """Our name for a name of TRL or verl, or for the last parts of verl's."""
  exact = [p.ours for p in PEERS if name and name in (p.trl, p.verl)]
  ends = [p.ours for p in PEERS if p.verl.endswith(f'.{name}')]
  return next(iter(exact + ends), None)


def _ratio(one: str, other: str) -> float:
  return difflib.SequenceMatcher(None, one, other).ratio()


def help_text(name: str, width: int) -> str:
  """What `grpo-jax [command] --help` prints.

  Args:
    name: A command, or '' for all of them.
    width: Columns.
  """
  if name not in table.COMMANDS:
    listed = '\n'.join(
      line
      for command, one in table.COMMANDS.items()
      for line in _row(
        command, one.what, max(map(len, table.COMMANDS)) + 4, max(width, 44)
      )
    )
    return (
      f'{_HEAD}{listed}\n\nExamples:\n{EXAMPLES}\n\n{_EXIT_CODES}\n'
      'grpo-jax COMMAND --help shows the flags of a command.'
    )
  command = table.COMMANDS[name]
  typed = ' '.join([name, *map(placeholder, command.takes)])
  lines = textwrap.wrap(f'grpo-jax {typed}: {command.what}', width) + ['']
  for flag in command.flags:
    lines += _row(*_flag(flag), 24, max(width, 44))
  if name == 'train':
    lines += ['', 'Fields of the config:', '', fields(width)]
  return '\n'.join([*lines, '', _EXIT_CODES])


def _flag(name: str) -> tuple[str, str]:
  """How a flag is typed, and what it means, with its default."""
  meaning, kind, default = table.FLAGS[name]
  if default not in (None, (), False):
    several = isinstance(default, tuple)
    shown = ','.join(map(str, default)) if several else str(default)
    meaning += f' ({shown!r})'
  return f'--{name}{"" if kind is bool else "=..."}', meaning


def fields(width: int) -> str:
  """All options of the config: how to type them, and what they mean.

  Args:
    width: Columns of the terminal.

  Returns:
    Lines of at most `width` columns.
  """
  lines = []
  for section in sections():
    heading = f'{section.name}: ' if section.name else ''
    lines += ['', *_wrapped(heading + section.meaning, width)]
    for option in section.options:
      name = option.name.replace('[]', '[0]')
      left = f'--config.{name}={option.default}'
      lines += _row(left, option.meaning, min(44, width // 2), width)
  return '\n'.join(lines[1:])


def placeholder(name: str) -> str:
  """What stands for the value of a flag that needs no name.

  >>> placeholder('workdir'), placeholder('*run'), placeholder('?name')
  ('WORKDIR', '[RUN ...]', '[NAME]')
  """
  word = name.lstrip('*?').upper()
  return {'*': f'[{word} ...]', '?': f'[{word}]'}.get(name[0], word)


def _row(left: str, right: str, column: int, width: int) -> Sequence[str]:
  """Lines of two columns, of which the second begins at `column`."""
  lines, left = [], f'  {left}'
  if len(left) + 2 > column:
    lines, left = _wrapped(left, width, '    '), ''
  for line in _wrapped(right, width - column) or ['']:
    lines.append(f'{left:{column}}{line}'.rstrip())
    left = ''
  return lines


def _wrapped(text: str, width: int, indent: str = '') -> list[str]:
  return textwrap.wrap(
    text, width, subsequent_indent=indent, break_on_hyphens=False
  )
