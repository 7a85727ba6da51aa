"""What `--help` prints."""

from collections.abc import Mapping
import re
import textwrap
from typing import Any

from absl import flags

from grpo_jax.commands import options

EXAMPLES = """\
  grpo-jax doctor --workdir=runs
  grpo-jax train --config=configs/arithmetic.py --workdir=runs/arithmetic
  grpo-jax eval --workdir=runs/arithmetic --samples=16 --k=1,4,16
  grpo-jax sample --workdir=runs/arithmetic --prompt=47+85=
  grpo-jax convert runs/arithmetic models/arithmetic --dtype=bfloat16
  grpo-jax report runs/arithmetic --out=report.html
  grpo-jax audit dapo --plot
  grpo-jax study brakes --config=configs/arithmetic.py --workdir=runs/brakes"""

_EXIT_CODES = """\
Exit codes: 0 done; 2 the input cannot be used, as one sentence says; 130 and
143 stopped by Ctrl-C or SIGTERM (and saved: the same command goes on); 75
another process of the run is gone (the same command goes on)."""


def text(commands: Mapping[str, Any], command: str, width: int) -> str:
  """What `grpo-jax [command] --help` prints.

  Args:
    commands: `table.COMMANDS`.
    command: A command, or '' for all of them.
    width: Columns.
  """
  if command not in commands:
    rows = [f'  {name:8}{known.what}' for name, known in commands.items()]
    return '\n'.join(
      [
        'Post-trains language models with group-based reinforcement learning.',
        '',
        'grpo-jax COMMAND [--FLAG=VALUE ...]',
        '',
        *rows,
        '',
        'Examples:',
        EXAMPLES,
        '',
        _EXIT_CODES,
        'grpo-jax COMMAND --help shows the flags of a command.',
      ]
    )
  _, what, names, takes = commands[command]
  rows = []
  for name in names:
    flag = flags.FLAGS[name]
    # absl writes '<a|b>: ' before the help, and a line if the flag repeats.
    meaning = re.sub(r'^<[^>]*>: |;\n.*', '', flag.help or '', flags=re.DOTALL)
    given = '' if flag.boolean else '=...'
    default = (
      f' ({flag.default_as_str})' if flag.value not in (None, [], False) else ''
    )
    rows.append((f'--{name}{given}', f'{meaning}{default}'))
  typed = ' '.join([command, *map(placeholder, takes)])
  title = textwrap.wrap(f'grpo-jax {typed}: {what}', width)
  lines = [*title, '', _columns(rows, width)]
  if command == 'train':
    lines += ['', 'Fields of the config:', '', options.help_text(width)]
  return '\n'.join([*lines, '', _EXIT_CODES])


def placeholder(name: str) -> str:
  """What stands for the value of a flag that needs no name.

  >>> placeholder('workdir'), placeholder('*run')
  ('WORKDIR', '[RUN ...]')
  """
  word = name.lstrip('*').upper()
  return f'[{word} ...]' if name.startswith('*') else word


def _columns(rows: list[tuple[str, str]], width: int) -> str:
  """Two columns, the second wrapped to the width of the terminal."""
  lines = []
  for left, right in rows:
    for line in textwrap.wrap(right, max(width - 24, 20)):
      lines.append(f'  {left:22}{line}')
      left = ''
  return '\n'.join(lines)
