"""Fits of measured numbers, and comparisons that rounding does not decide.

Two numbers that differ by less than a tolerance count as equal. Which of them a
text names is then decided by a fixed order, and not by how a processor rounds.
"""

import numpy as np
from numpy.typing import ArrayLike

TOLERANCE = 3e-6
"""Relative, and above the rounding of a method that casts to float32."""


def divide(x, y, where: ArrayLike = True) -> np.ndarray:
  """x / y, and 0 where y is 0 or `where` is False."""
  zeros = np.zeros(np.broadcast(x, y).shape)
  return np.divide(x, y, out=zeros, where=(y != 0) & where)


def differs(changed: np.ndarray, base: np.ndarray) -> bool:
  """Whether a change is more than rounding of the largest value."""
  change, size = np.abs(changed - base), np.abs(base)
  return bool(change.max(initial=0) > TOLERANCE * size.max(initial=0))


def moved_by(read: dict[str, np.ndarray], besides: tuple[str, ...]) -> list:
  """Names of the changes that change a quantity, but for those in `besides`."""
  moved = [name for name, x in read.items() if differs(x, read['base'])]
  return [name for name in moved if name not in besides]


def leading(scores, tolerance: float) -> int:
  """Index of the first score that is as large as any, up to the tolerance."""
  return int(np.argmax(np.asarray(scores) >= np.max(scores) - tolerance))


def factor_of(value: np.ndarray, model: ArrayLike = 1.0, tolerance=TOLERANCE):
  """The c of `value = c * model`, up to rounding; None if there is none."""
  if not value.size or not np.isfinite(value).all():
    return None
  model = np.asarray(model)
  factor = float(np.median(value / model))
  off = np.abs(value - factor * model).max()
  # Relative to the largest: a small value may be a difference of large ones.
  return factor if off <= tolerance * np.abs(value).max() else None


def least_squares(target: np.ndarray, *columns: np.ndarray):
  """Coefficients of the best sum of the columns, and its largest error."""
  matrix = np.stack(columns, axis=-1)
  coefficients = np.linalg.lstsq(matrix, target, rcond=None)[0]
  return coefficients, np.abs(matrix @ coefficients - target).max()
