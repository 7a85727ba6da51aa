"""A calculator for policies: arithmetic, and nothing else of Python.

No name of it reaches anything but a number, and no text keeps it busy: the
text, the depth and the numbers have limits.
"""

import ast
from collections.abc import Callable
import math
import operator
from typing import Any

from grpo_jax.environments import tools

_MOST_CHARACTERS = 1000
_MOST_BITS = 4096  # of an integer; 1,233 digits
_CONSTANTS = {'pi': math.pi, 'e': math.e}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
  'abs': abs, 'ceil': math.ceil, 'cos': math.cos, 'exp': math.exp,
  'floor': math.floor, 'gcd': math.gcd, 'ln': math.log, 'log': math.log,
  'log10': math.log10, 'log2': math.log2, 'max': max, 'min': min,
  'round': round, 'sin': math.sin, 'sqrt': math.sqrt, 'tan': math.tan,
}  # fmt: skip
_SIGNS: dict[type, Callable[..., Any]] = {
  ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
  ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv,
  ast.Mod: operator.mod, ast.Pow: operator.pow,
  ast.UAdd: operator.pos, ast.USub: operator.neg,
}  # fmt: skip
_SPELLINGS = str.maketrans(
  {
    '×': '*',
    '·': '*',
    '÷': '/',
    '−': '-',
    '^': '**',
    '\n': ' ',
    '\r': ' ',
    '\t': ' ',
    '\u00a0': ' ',
  }  # fmt: skip
)


@tools.tool
def calculator(expression: str) -> str:
  """Calculates the value of an arithmetic expression.

  >>> calculator('(1 + 2) * 4 / 3')
  '4'

  Args:
    expression: Numbers, + - * / // % ^, brackets, pi, e and functions such as
      sqrt(2), round(2.5, 1), log(10), max(1, 2).
  """
  if len(expression) > _MOST_CHARACTERS:
    raise ValueError(
      f'the expression has {len(expression)} characters, but at most '
      f'{_MOST_CHARACTERS} are read'
    )
  text = expression.translate(_SPELLINGS).strip()
  if odd := [one for one in text if not (one.isascii() and one.isprintable())]:
    raise ValueError(f'it is no arithmetic: it has {ascii(odd[0])}')
  try:
    tree = ast.parse(text, mode='eval')
    return _written(_value(tree.body))
  except SyntaxError as error:
    raise ValueError(f'it is no arithmetic: {error.msg}') from None
  except (RecursionError, MemoryError):
    raise ValueError('it is nested too deeply') from None
  except ZeroDivisionError:
    raise ValueError('it divides by zero') from None
  except OverflowError:
    raise ValueError('a number in it is too large') from None
  except TypeError as error:
    raise ValueError(f'it cannot be calculated: {error}') from None


def _value(node: ast.AST) -> int | float:
  """The value of a part of an expression."""
  if isinstance(node, ast.Constant) and type(node.value) in (int, float):
    return _bounded(node.value)
  if isinstance(node, ast.Name) and node.id in _CONSTANTS:
    return _CONSTANTS[node.id]
  if isinstance(node, ast.UnaryOp) and type(node.op) in _SIGNS:
    return _SIGNS[type(node.op)](_value(node.operand))
  if isinstance(node, ast.BinOp) and type(node.op) in _SIGNS:
    left, right = _value(node.left), _value(node.right)
    if isinstance(node.op, ast.Pow):
      _check_power(left, right)
    return _bounded(_SIGNS[type(node.op)](left, right))
  if isinstance(node, ast.Call) and not node.keywords:
    name = getattr(node.func, 'id', '')
    if name in _FUNCTIONS:
      return _bounded(_FUNCTIONS[name](*map(_value, node.args)))
  raise ValueError(
    f'it has {ast.unparse(node)[:40]!r}, but numbers, + - * / // % ^, brackets '
    f'and {", ".join((*_CONSTANTS, *_FUNCTIONS))} are all that is known'
  )


def _check_power(base: int | float, exponent: int | float) -> None:
  """Refuses a power before it fills the memory."""
  if isinstance(base, int) and isinstance(exponent, int):
    if base.bit_length() * exponent > 2 * _MOST_BITS:
      raise OverflowError


def _bounded(value: Any) -> int | float:
  if isinstance(value, complex) or value != value:
    raise ValueError('the result is no real number')
  if abs(value) == math.inf:
    raise OverflowError
  if isinstance(value, int) and value.bit_length() > _MOST_BITS:
    raise OverflowError
  return value


def _written(value: int | float) -> str:
  """A number with at most 12 digits of a decimal: 0.1 + 0.2 is 0.3."""
  if isinstance(value, int):
    return str(value)
  text = f'{value:.12g}'
  return '0' if text == '-0' else text
