"""What `--help` prints."""

from collections.abc import Sequence
import textwrap

from grpo_jax.commands import options
from grpo_jax.commands import table

EXAMPLES = """\
  grpo-jax doctor --workdir=runs
  grpo-jax train --config=configs/arithmetic.py --workdir=runs/arithmetic
  grpo-jax eval --workdir=runs/arithmetic --samples=16 --k=1,4,16
  grpo-jax sample --workdir=runs/arithmetic --prompt=47+85=
  grpo-jax convert runs/arithmetic models/arithmetic --dtype=bfloat16
  grpo-jax report runs/arithmetic --out=report.html
  grpo-jax audit dapo --plot
  grpo-jax study brakes --config=configs/arithmetic.py --workdir=runs/brakes"""

_HEAD = """\
Post-trains language models with group-based reinforcement learning.

grpo-jax COMMAND [--FLAG=VALUE ...]

"""
_EXIT_CODES = """\
Exit codes: 0 done; 2 the input cannot be used, as one sentence says; 130 and
143 stopped by Ctrl-C or SIGTERM (and saved: the same command goes on); 75
another process of the run is gone (the same command goes on)."""


def text(name: str, width: int) -> str:
  """What `grpo-jax [command] --help` prints.

  Args:
    name: Of a command, or '' for all of them.
    width: Columns.
  """
  if name not in table.COMMANDS:
    rows = [f'  {name:8}{one.what}\n' for name, one in table.COMMANDS.items()]
    return (
      f'{_HEAD}{"".join(rows)}\nExamples:\n{EXAMPLES}\n\n{_EXIT_CODES}\n'
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
  for section in options.sections():
    heading = f'{section.name}: ' if section.name else ''
    lines += ['', *_wrapped(heading + section.meaning, width)]
    for option in section.options:
      name = option.name.replace('[]', '[0]')
      left = f'--config.{name}={option.default}'
      lines += _row(left, option.meaning, min(44, width // 2), width)
  return '\n'.join(lines[1:])


def placeholder(name: str) -> str:
  """What stands for the value of a flag that needs no name.

  >>> placeholder('workdir'), placeholder('*run')
  ('WORKDIR', '[RUN ...]')
  """
  word = name.lstrip('*').upper()
  return f'[{word} ...]' if name.startswith('*') else word


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
