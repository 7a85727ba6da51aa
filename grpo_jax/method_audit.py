"""Audits of methods by name, for the terminal and for programs."""

import ast
import re
import shutil
import sys
from typing import Any

from grpo_jax import diagnostics
from grpo_jax import losses
from grpo_jax import named


def of(
  name: str, method_kwargs: str = '{}', fields: str | None = None
) -> diagnostics.Audit:
  """Audits the method that a name stands for.

  Args:
    name: Of `losses.methods`, or `'module:function'`.
    method_kwargs: Its arguments, a Python dict in text.
    fields: `'module:function'`; see `diagnostics.audit`.

  Raises:
    ValueError: No such method, wrong arguments, or a field that is missing.
  """
  try:
    kwargs = ast.literal_eval(method_kwargs)
    dict(**kwargs)
  except (ValueError, SyntaxError, TypeError) as error:
    raise ValueError(
      f'--method_kwargs={method_kwargs} is no dict of arguments; give one, as '
      'in --method_kwargs="{\'high\': 0.3}".'
    ) from error
  method = named.method(name, kwargs, '--method')
  make = named.imported(fields, '--fields') if fields else None
  try:
    return diagnostics.audit(method, make)
  except TypeError as error:
    raise ValueError(
      f'{name} cannot be evaluated with --method_kwargs={method_kwargs} '
      f'({str(error).splitlines()[0]}); give numbers where it wants numbers.'
    ) from error


def to_json(
  name: str, audit: diagnostics.Audit, figure: str | None = None
) -> dict[str, Any]:
  """An audit for a program: `method`, the parts of `Audit`, `figure`."""
  return {
    'method': name,
    **diagnostics.to_json(audit),
    'figure': figure,
  }


def figure(name: str, audit: diagnostics.Audit) -> str:
  """Draws the clipping into the current directory; returns the file's name."""
  path = f'audit-{re.sub("[^A-Za-z0-9_.-]+", "-", name)}.png'
  diagnostics.plot(audit.clipping, name, path)
  return path


def show(
  name: str, audit: diagnostics.Audit, figure: str | None = None
) -> None:
  """Prints an audit for a person."""
  from rich import box
  from rich import console
  from rich import table as rich_table

  grid = rich_table.Table(box=box.SIMPLE, show_header=False, pad_edge=False)
  section = ''
  for group, label, text in diagnostics.describe(name, audit):
    grid.add_row('' if group == section else group, label, text)
    section = group
  if figure:
    grid.add_row('figure', '', figure)
  _console(console).print(grid, markup=False)


def every() -> dict[str, diagnostics.Audit]:
  """Audits of all named methods, with their default arguments.

  It takes half a minute, so a terminal sees how far it is.
  """
  from rich import console
  from rich import progress

  names = progress.track(
    losses.methods.__all__,
    'auditing',
    console=console.Console(stderr=True),
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


def show_table(rows: list[dict[str, str]]) -> None:
  """Prints the table of methods for a person."""
  from rich import box
  from rich import console
  from rich import table as rich_table

  made = rich_table.Table(box=box.SIMPLE, pad_edge=False)
  for name in rows[0]:
    made.add_column(name, overflow='fold', no_wrap=name == 'method')
  for row in rows:
    made.add_row(*row.values())
  out = _console(console)
  out.print(made, markup=False)
  for name, meaning in diagnostics.COLUMNS.items():
    out.print(f'{name}: {meaning}', markup=False)


def markdown(rows: list[dict[str, str]]) -> str:
  """The table of methods as the README has it."""
  names = list(rows[0])
  lines = [names, ['---'] * len(names), *(list(row.values()) for row in rows)]
  return '\n'.join(
    f'| {" | ".join(cell.replace("|", "&#124;") for cell in line)} |'
    for line in lines
  )


def columns_markdown() -> str:
  """What the columns mean, as the README has it."""
  return '\n'.join(
    f'- {name}: {meaning}' for name, meaning in diagnostics.COLUMNS.items()
  )


def _console(console):
  """As wide as the terminal; a table in a file needs room."""
  width = shutil.get_terminal_size((160, 24)).columns
  return console.Console(width=width, highlight=False)


if __name__ == '__main__':
  print(f'{markdown(table(every()))}\n\n{columns_markdown()}')
