"""Expressions that are safe to evaluate: arithmetic, and a few functions."""

import ast

_ARITHMETIC = ast.Add, ast.Sub, ast.Mult, ast.Div, ast.UAdd, ast.USub
_FUNCTIONS = frozenset(
  'sin cos tan cot sec csc asin acos atan acot sinh cosh tanh asinh acosh atanh'
  ' exp log ln sqrt Abs'.split()
)
# Any other letter is a variable to sympy; these are objects of its own.
_NO_VARIABLES = frozenset('INOQS')
_WRAPPERS = ast.Expression, ast.operator, ast.unaryop, ast.Load


def rewritten(text: str, algebra: bool) -> str | None:
  """An expression written anew, so that nothing but the expression is left.

  `sympy.parse_expr` evaluates a text as Python does, so it must be given no
  other. A comment, which a verifier might read numbers from, is dropped.

  >>> rewritten('(8 - 2) * 4  # 1 1', algebra=False)
  '(8 - 2) * 4'
  >>> rewritten('x**2/2 + C', algebra=True)
  'x ** 2 / 2 + C'
  >>> rewritten('__import__("os").getpid()', algebra=True)

  Args:
    text: What a model wrote.
    algebra: Whether powers, decimal fractions, variables of one letter, pi and
      functions of one number are allowed too.

  Returns:
    The expression; None if the text is anything else.
  """
  try:
    tree = ast.parse(text.strip(), mode='eval')
    if all(_is_allowed(node, algebra) for node in ast.walk(tree)):
      return ast.unparse(tree)
  # Thousands of brackets raise the last two.
  except (SyntaxError, ValueError, RecursionError, MemoryError):
    pass
  return None


def _is_allowed(node: ast.AST, algebra: bool) -> bool:
  match node:
    case ast.Constant():
      return type(node.value) is int or (algebra and type(node.value) is float)
    case ast.BinOp() | ast.UnaryOp():
      powers = algebra and isinstance(node.op, ast.Pow)
      return powers or isinstance(node.op, _ARITHMETIC)
    case ast.Call(func=ast.Name(), args=[_], keywords=[]):
      return algebra
    case ast.Name():
      variable = len(node.id) == 1 and node.id not in _NO_VARIABLES
      return algebra and (variable or node.id == 'pi' or node.id in _FUNCTIONS)
  return isinstance(node, _WRAPPERS)
