"""Refuses arguments that are no numbers, or mean nothing."""

import math
from numbers import Real
from typing import Any

from jax import core
import jax.numpy as jnp
import numpy as np


def check(
  who: str,
  argument: str,
  value: Any,
  *,
  above: bool = False,
  whole: bool = False,
) -> None:
  """Raises a ValueError unless a number is finite and 0 or more.

  Args:
    who: The function that was called.
    argument: What it calls the argument.
    value: What it was given, perhaps as an array. What `jit` traces passes.
    above: Whether it must be more than 0.
    whole: Whether it must be a whole number.
  """
  if isinstance(value, core.Tracer):
    return
  given: Any = value.item() if getattr(value, 'shape', None) == () else value
  real = isinstance(given, Real) and not isinstance(given, bool)
  if real and _fits(value, above, whole):
    return
  kind = 'whole' if whole else 'finite'
  needed = f'a {kind} number ' + ('above 0' if above else 'that is 0 or more')
  raise ValueError(f'{who} got {argument}={given!r:.60}; give {needed}.')


def _fits(number: Any, above: bool, whole: bool) -> bool:
  # False for NaN as well.
  finite = 0 <= number < math.inf and not (above and number == 0)
  return bool(finite) and not (whole and number != int(number))


def share(who: str, argument: str, value: Any) -> None:
  """Raises a ValueError unless a number is at least 0 and less than 1.

  Args:
    who: See `check`.
    argument: See `check`.
    value: See `check`.
  """
  check(who, argument, value)
  if not isinstance(value, core.Tracer) and value >= 1:
    raise ValueError(f'{who} got {argument}={value}; give less than 1.')


def reals(who: str, argument: str, value: Any) -> np.ndarray:
  """Numbers as float64 of any shape.

  Args:
    who: See `check`.
    argument: See `check`.
    value: A number or an array of them.

  Raises:
    ValueError: It is neither.
  """
  given = np.asarray(value)
  kinds = jnp.integer, jnp.floating
  if not any(jnp.issubdtype(given.dtype, kind) for kind in kinds):
    raise ValueError(f'{who} got {argument}={value!r:.60}; give numbers.')
  return given.astype(np.float64)
