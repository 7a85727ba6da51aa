"""Rows of a table of which the suite has some, and the gate the others."""

from collections.abc import Container
from collections.abc import Iterable

import pytest


def chosen(rows: Iterable, some: Container) -> list:
  """Rows for `pytest.mark.parametrize`; those not in `some` are `long`.

  Args:
    rows: A value each, or a tuple of the values of several arguments.
    some: The rows that the suite has.
  """
  return [
    pytest.param(
      *(row if isinstance(row, tuple) else (row,)),
      marks=() if row in some else pytest.mark.long,
    )
    for row in rows
  ]
