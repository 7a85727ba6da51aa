"""Audits of methods that stand in no run, by name."""

import ast
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
import re
from typing import Any

from grpo_jax import diagnostics
from grpo_jax import losses
from grpo_jax.config import importing
from grpo_jax.config import plain_text
from grpo_jax.diagnostics import COLUMNS as COLUMNS
from grpo_jax.diagnostics import Audit as Audit
from grpo_jax.run.build import method as build_method


def audit(
  name: str, method_kwargs: str = '{}', fields: str | None = None
) -> Audit:
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
  method = build_method.make_method(name, kwargs, '--method')
  make = importing.imported(fields, f'--fields={fields!r}') if fields else None
  try:
    return diagnostics.audit(method, make)
  except TypeError as error:
    first = plain_text.first_line(error)
    raise ValueError(
      f'{name} cannot be evaluated with --method_kwargs={method_kwargs} '
      f'({first}); give numbers where it wants numbers.'
    ) from error


def every(
  track: Callable[[Iterable[str]], Iterable[str]] = iter,
) -> dict[str, Audit]:
  """Audits of all named methods, with their default arguments.

  Args:
    track: Passes the names on, and may show how far they are.
  """
  return {
    name: diagnostics.audit(getattr(losses.methods, name)())
    for name in track(losses.methods.__all__)
  }


def table(audits: Mapping[str, Audit]) -> list[dict[str, str]]:
  """A row for each audit: `method` and `COLUMNS`."""
  return [
    {'method': name, **diagnostics.cells(audit)}
    for name, audit in audits.items()
  ]


def lines(name: str, made: Audit) -> list[tuple[str, str, str]]:
  """An audit as a page: section, label and text; a section is named once."""
  found, before = [], ''
  for section, label, text in diagnostics.describe(name, made):
    found.append(('' if section == before else section, label, text))
    before = section
  return found


def to_json(name: str, made: Audit, file: str | None = None) -> dict[str, Any]:
  """An audit as JSON can hold it: `method`, the parts of `Audit`, `figure`."""
  return {'method': name, **diagnostics.to_json(made), 'figure': file}


def draw(name: str, made: Audit) -> str:
  """Draws the clipping into the current directory; returns the file's name."""
  path = f'audit-{re.sub("[^A-Za-z0-9_.-]+", "-", name)}.png'
  diagnostics.plot(made.clipping, name, path)
  return path
