"""Fits of measured numbers, in words; comparisons that no rounding decides.

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


def number(value: float, digits: int = 4, kind: str = 'g') -> str:
  """A number with some digits, in one of the formats g, e and f.

  Some readings lie halfway between two prints (0.1725 = 0.69 / 4). A rounding
  error would decide on their last digit, so it is rounded away first.
  """
  return f'{float(f"{value:.7g}"):.{digits}{kind}}'


def short(value: float | None, digits: int = 3, rounding: float = 1e-6) -> str:
  """A number in a table: '0' for rounding errors, '-' for None."""
  if value is None:
    return '-'
  return '0' if abs(value) < rounding else number(value, digits)


def percent(share: float, digits: int = 3) -> str:
  """`'on 12.5 % of the tokens'`, for a share in [0, 1]."""
  return f'on {number(100 * share, digits)} % of the tokens'


def fraction(factor: float, symbols: tuple[str, ...]) -> str:
  """`factor / (symbols)`: `'1/N'`, `'1/(3000 B)'`, `'2/(B L_i)'`, `'1/8'`."""
  inverse = 1 / factor
  whole = abs(inverse - round(inverse)) < TOLERANCE * abs(inverse)
  if abs(inverse) > 1.5 and whole:
    factor, symbols = 1.0, (f'{round(inverse)}', *symbols)
  if not symbols:
    return number(factor)
  below = ' '.join(symbols)
  return f'{number(factor)}/' + (below if len(symbols) == 1 else f'({below})')


def multiple(factor: float, text: str) -> str:
  """`factor text`; a factor of 1 is not written."""
  if text == '1':
    return number(factor)
  if abs(factor - 1) < TOLERANCE:
    return text
  return f'{number(factor)} ' + (text if text.startswith('(') else f'({text})')


def depends(names) -> str:
  """What a quantity of no known form depends on."""
  return f'depends on {", ".join(names) or "none of the probed"}'


def also(names, known) -> str:
  """What a quantity depends on besides `known`, what its closed form says."""
  more = [name for name in names if name not in known]
  return f'; also {depends(more)}' if more else ''


def markdown(lines) -> str:
  """A table in Markdown, of lines of cells."""
  # `|log r|` in a cell would end the cell, so the bar is escaped.
  return '\n'.join(
    f'| {" | ".join(cell.replace("|", "&#124;") for cell in line)} |'
    for line in lines
  )
