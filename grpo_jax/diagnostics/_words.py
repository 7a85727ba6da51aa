"""How numbers and dependencies are written, the same in every reading."""

from grpo_jax.diagnostics import _fit


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
  whole = abs(inverse - round(inverse)) < _fit.TOLERANCE * abs(inverse)
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
  if abs(factor - 1) < _fit.TOLERANCE:
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
