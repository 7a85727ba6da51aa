"""Audits of methods by name, for the terminal and for programs."""

import ast
import re
import sys
from typing import Any

from grpo_jax import diagnostics
from grpo_jax import losses
from grpo_jax.commands import printing
from grpo_jax.commands.arguments import Arguments
from grpo_jax.config import importing
from grpo_jax.config import plain_text
from grpo_jax.run.build import method as build_method

# Columns that a terminal of 80 characters has room for.
_NARROW = ('ratio', 'W_agg', 'bias', 'scale')


def run(arguments: Arguments) -> None:
  """`grpo-jax audit`."""
  name = arguments.method
  made = audit(name, arguments.method_kwargs, arguments.fields)
  file = figure(name, made) if arguments.plot else None
  if arguments.json:
    printing.show_json(to_json(name, made, file))
  else:
    show(name, made, file)


def run_table(arguments: Arguments) -> None:
  """`grpo-jax methods`."""
  rows = table(every())
  if arguments.json:
    printing.show_json(rows)
  else:
    show_table(rows, arguments.wide)


def audit(
  name: str, method_kwargs: str = '{}', fields: str | None = None
) -> diagnostics.Audit:
  """Audits the method that a name stands for.

  Args:
    name: Of `losses.methods`, or `'module:function'`.
    method_kwargs: Its arguments, the text of a Python dict.
    fields: `'module:function'`; see `diagnostics.audit`.

  Returns:
    An `Audit`.

  Raises:
    ValueError: No such method, wrong arguments, or a field that is missing.
  """
  try:
    kwargs = ast.literal_eval(method_kwargs)
    dict(**kwargs)  # a TypeError unless it is a dict with texts as keys
  except (ValueError, SyntaxError, TypeError) as error:
    raise ValueError(
      f'--method_kwargs={method_kwargs} is no dict of arguments; give one, as '
      'in --method_kwargs="{\'high\': 0.3}".'
    ) from error
  method = build_method.method(name, kwargs, '--method')
  make = importing.imported(fields, f'--fields={fields!r}') if fields else None
  try:
    return diagnostics.audit(method, make)
  except TypeError as error:
    first = plain_text.first_line(error)
    raise ValueError(
      f'{name} cannot be evaluated with --method_kwargs={method_kwargs} '
      f'({first}); give numbers where it wants numbers.'
    ) from error


def to_json(
  name: str, made: diagnostics.Audit, file: str | None = None
) -> dict[str, Any]:
  """An audit as JSON can hold it: `method`, the parts of `Audit`, `figure`."""
  return {'method': name, **diagnostics.to_json(made), 'figure': file}


def figure(name: str, made: diagnostics.Audit) -> str:
  """Draws the clipping into the current directory; returns the file's name."""
  path = f'audit-{re.sub("[^A-Za-z0-9_.-]+", "-", name)}.png'
  diagnostics.plot(made.clipping, name, path)
  return path


def show(name: str, made: diagnostics.Audit, file: str | None = None) -> None:
  """Prints an audit for a person."""
  from rich import table as rich_table

  grid = rich_table.Table.grid(padding=(0, 2))
  section = ''
  for group, label, text in diagnostics.describe(name, made):
    grid.add_row('' if group == section else group, label, text)
    section = group
  if file:
    grid.add_row('figure', '', file)
  printing.show(grid)


def every() -> dict[str, diagnostics.Audit]:
  """Audits of all named methods, with their default arguments.

  This takes half a minute, so a progress bar is shown on a terminal.
  """
  from rich import console
  from rich import progress

  names = progress.track(
    losses.methods.__all__,
    'auditing',
    console=console.Console(stderr=True),  # stdout is for the table
    transient=True,
    disable=not sys.stderr.isatty(),
  )
  return {
    name: diagnostics.audit(getattr(losses.methods, name)()) for name in names
  }


def table(audits: dict[str, diagnostics.Audit]) -> list[dict[str, str]]:
  """The table of methods.

  Args:
    audits: By name.

  Returns:
    For each, `method` and the columns of `diagnostics.COLUMNS`.
  """
  return [
    {'method': name, **diagnostics.cells(audit)}
    for name, audit in audits.items()
  ]


def show_table(rows: list[dict[str, str]], wide: bool = False) -> None:
  """Prints the table of methods for a person.

  Args:
    rows: What `table` returned.
    wide: All columns, which need about 160 characters, instead of `_NARROW`.
  """
  names = list(rows[0]) if wide else ['method', *_NARROW]
  made = printing.table(names, left=len(names))
  for column in made.columns[1:]:
    column.overflow = 'fold'
  made.columns[0].no_wrap = True
  for row in rows:
    made.add_row(*(row[name] for name in names))
  meanings = [f'{name}: {diagnostics.COLUMNS[name]}' for name in names[1:]]
  more = 'grpo-jax audit NAME tells all of one method'
  if not wide:
    more += '; --wide shows all columns of this table'
  printing.show(made, *meanings, '', f'{more}.')


def markdown(rows: list[dict[str, str]]) -> str:
  """The table of methods as losses/README.md has it."""
  cells = [list(row.values()) for row in rows]
  return printing.markdown(list(rows[0]), cells, bar='&#124;').rstrip()


def columns_markdown() -> str:
  """What the columns mean, as a list in losses/README.md."""
  return '\n'.join(
    f'- {name}: {meaning}' for name, meaning in diagnostics.COLUMNS.items()
  )
