"""`grpo-jax audit` and `grpo-jax methods`."""

from collections.abc import Iterable
import sys

from grpo_jax.commands import printing
from grpo_jax.commands.arguments import Arguments
from grpo_jax.lab import audits

# Columns that a terminal of 80 characters has room for.
_NARROW = ('ratio', 'W_agg', 'bias', 'scale')


def run(arguments: Arguments) -> None:
  """`grpo-jax audit`."""
  name = arguments.method
  made = audits.audit(name, arguments.method_kwargs, arguments.fields)
  file = audits.draw(name, made) if arguments.plot else None
  if arguments.json:
    printing.show_json(audits.to_json(name, made, file))
  else:
    show(name, made, file)


def run_table(arguments: Arguments) -> None:
  """`grpo-jax methods`."""
  rows = audits.table(audits.every(_track))
  if arguments.json:
    printing.show_json(rows)
  else:
    show_table(rows, arguments.wide)


def _track(names: Iterable[str]) -> Iterable[str]:
  """Shows a progress bar on a terminal: all audits take half a minute."""
  from rich import console
  from rich import progress

  return progress.track(
    names,
    'auditing',
    console=console.Console(stderr=True),  # stdout is for the table
    transient=True,
    disable=not sys.stderr.isatty(),
  )


def show(name: str, made: audits.Audit, file: str | None = None) -> None:
  """Prints an audit for a person."""
  from rich import table

  grid = table.Table.grid(padding=(0, 2))
  for line in audits.lines(name, made):
    grid.add_row(*line)
  if file:
    grid.add_row('figure', '', file)
  printing.show(grid)


def show_table(rows: list[dict[str, str]], wide: bool = False) -> None:
  """Prints the table of methods for a person.

  Args:
    rows: What `audits.table` returned.
    wide: All columns, which need about 160 characters, instead of `_NARROW`.
  """
  names = list(rows[0]) if wide else ['method', *_NARROW]
  made = printing.table(names, left=len(names))
  for column in made.columns[1:]:
    column.overflow = 'fold'
  made.columns[0].no_wrap = True
  for row in rows:
    made.add_row(*(row[name] for name in names))
  meanings = [f'{name}: {audits.COLUMNS[name]}' for name in names[1:]]
  more = 'grpo-jax audit NAME tells all of one method'
  if not wide:
    more += '; --wide shows all columns of this table'
  printing.show(made, *meanings, '', f'{more}.')
