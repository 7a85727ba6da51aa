"""math-verify, with numbers that are compared by their size.

It reads whatever it finds in a text, down to the first number of a formula that
it does not understand, and compares numbers at six places behind the point. So
here a text is read whole or not at all, and numbers are compared relative to
their size.
"""

import ast
import functools
import importlib.util
import re
from types import FunctionType
from types import ModuleType
from typing import Any

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


_NEAR = 5e-6  # of six digits that agree, relative
_EXACT = 1e-10  # relative, of numbers that no decimal can write out


class Library:
  """What a verifier needs of math-verify."""

  def __init__(self):
    from latex2sympy2_extended import math_normalization as normal
    from math_verify import parser

    self._grader = _own_grader()
    self._read = _own_reader(parser)
    rules = normal.NormalizationConfig(
      basic_latex=True,
      units=False,
      malformed_operators=True,
      nits=True,
      boxed='none',
      equations=False,
    )
    self._normal = functools.partial(normal.normalize_latex, config=rules)

  def parse(self, text: str, parsing_timeout: None) -> list[Any]:
    """The expression that a text is, between dollar signs; raises if none."""
    del parsing_timeout
    text = text.removeprefix('$').removesuffix('$')
    return [self._read(self._normal(text))]

  def verify(
    self,
    wanted: list[Any],
    found: list[Any],
    allow_set_relation_comp: bool,
    timeout_seconds: None,
  ) -> bool:
    """Whether two expressions are equal."""
    return self._grader.verify(
      wanted,
      found,
      allow_set_relation_comp=allow_set_relation_comp,
      timeout_seconds=timeout_seconds,
    )


def _own_reader(parser: ModuleType) -> FunctionType:
  """The reader of math-verify without its cache, to which R is not r."""
  from latex2sympy2_extended import latex2sympy2

  kept = latex2sympy2.ConversionConfig(lowercase_symbols=False)
  read = parser.parse_latex_cached
  read = getattr(read, '__wrapped__', read)
  convert = functools.partial(latex2sympy2.latex2sympy, conversion_config=kept)
  return FunctionType(
    read.__code__, {**vars(parser), 'latex2sympy': convert}, 'read'
  )


def _own_grader() -> ModuleType:
  """The module of math-verify that compares, in a copy that is ours.

  Everything in it that compares two numbers, also within sets, intervals and
  matrices, calls one function, and what compares two letters another. They are
  replaced in the copy alone.
  """
  from math_verify import grader
  import sympy

  spec = importlib.util.spec_from_file_location(
    'math_verify.grader', grader.__file__
  )
  assert spec is not None and spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  usual = module.sympy_numeric_eq

  def near(a: Any, b: Any, float_rounding: int, numeric_precision: int) -> bool:
    if usual(a, b, float_rounding, numeric_precision):
      return not _are_apart(a, b)
    return _are_same_digits(a, b)

  same = module.sympy_compare_symbols

  def alike(a: Any, b: Any) -> bool:
    if isinstance(a, sympy.Symbol) and isinstance(b, sympy.Symbol):
      return a.name == b.name
    return same(a, b)

  vars(module)['sympy_numeric_eq'] = near
  vars(module)['sympy_compare_symbols'] = alike
  return module


def _are_apart(a: Any, b: Any) -> bool:
  """Whether two expressions differ by more than a share of their size."""
  import sympy

  if isinstance(a, sympy.MatrixBase) or isinstance(b, sympy.MatrixBase):
    return False  # their entries have been compared
  try:
    sizes, gaps = (_coefficients(one) for one in (a, a - b))
    largest = max(sizes.values(), default=sympy.Integer(0))
    return any(
      gap > _NEAR * sizes.get(term, 1e-9 * largest)
      for term, gap in gaps.items()
    )
  except (TypeError, ValueError, AttributeError):
    return False


def _coefficients(expression: Any) -> dict[Any, Any]:
  """The size of the factor of each term; of a number, its own size."""
  import sympy

  value = expression.doit()
  if not value.free_symbols:
    return {sympy.Integer(1): abs(value.evalf(30))}
  terms = sympy.expand(value).evalf(30).as_coefficients_dict()
  return {term: abs(size) for term, size in terms.items()}


def _are_same_digits(a: Any, b: Any) -> bool:
  """Whether two numbers agree in ten digits, and one of them goes on.

  A root or a third cannot be written out: large ones agree in their digits
  before they agree at six places behind the point.
  """
  import sympy

  try:
    numbers = [one.doit() for one in (a, b)]
    if any(one.free_symbols for one in numbers) or not any(
      map(_goes_on, numbers)
    ):
      return False
    if not any(one.has(sympy.Float) for one in numbers):
      return False
    first, second = (one.evalf(30) for one in numbers)
    return bool(abs(first - second) <= _EXACT * abs(first))
  except (TypeError, ValueError, AttributeError):
    return False


def _goes_on(number: Any) -> bool:
  """Whether no decimal of finite length is the number."""
  import sympy

  if number.has(sympy.Float):
    return False
  if not number.is_Rational:
    return True
  rest = int(number.q)
  for prime in 2, 5:
    while rest % prime == 0:
      rest //= prime
  return rest > 1


# What only names the value behind '=': f'(2), P(X \ge 2), \frac{dy}{dx}.
_NAME = re.compile(
  r"""\s*(?:
    (?:[a-zA-Z]{1,4} | \\[a-zA-Z]+ (?:\s*\{[^{}=]*\})? )
      (?:\s*(?:\d?[A-Z]{0,3}|[a-z])(?![a-zA-Z]))
      (?:_\s*(?:\{[^{}=]*\} | \\?[a-zA-Z0-9]+)
        | \^\s*\{?\s*(?:-1|T|\\top|\\prime|\\circ|\([a-z0-9]\))\s*\}?
        | ['\u2019\u2032])*
      \s*(?:\\left)?(?:\((?:[^()]|\([^()]*\))*\) | \[[^\[\]]*\])?
    | \\[dt]?frac\s*\{\s*(?:d|\\partial|\\mathrm\{d\})[^{}=]*\}
      \s*\{\s*(?:d|\\partial|\\mathrm\{d\})[^{}=]*\} [^=]*
    | (?:\\?\||\\[lr]?[vV]ert)[^|=]*(?:\\?\||\\[lr]?[vV]ert)
    | \\(?:text|mathrm|operatorname)\s*\{[^{}=]*\}
      (?:\s*\((?:[^()]|\([^()]*\))*\))?
  )\s*$""",
  re.VERBOSE,
)
_RELATION = re.compile(
  r'=|[<>\u2264\u2265\u2260]|\\(?:l|g)(?:t|eq?|eqslant)(?![a-zA-Z])'
  r'|\\(?:neq?|in|approx|equiv|sim|cong)(?![a-zA-Z])'
)
_NO_NAME = re.compile(
  r'\\(?:neg|lnot|not|sqrt|pm|mp|sum|prod|int|approx)(?![a-zA-Z])'
)
_ORDER = (
  r'(<|>|\\l(?:t|eq?|eqslant)(?![a-zA-Z])|\\g(?:t|eq?|eqslant)(?![a-zA-Z]))'
)
_STOP = (
  r'l(?:t|eq?|eqslant)(?![a-zA-Z])|g(?:t|eq?|eqslant)(?![a-zA-Z])|text|in\b'
)
_SIDE = rf'((?:[^<>=,\\]|\\(?!{_STOP}).)+?)'
_ONE = re.compile(rf'\s*{_SIDE}\s*{_ORDER}\s*{_SIDE}\s*')
_TWO = re.compile(
  rf'\s*{_SIDE}\s*{_ORDER}\s*([a-zA-Z])\s*{_ORDER}\s*{_SIDE}\s*'
)
_ABSOLUTE = re.compile(
  rf'\s*(?:\\left)?(?:\||\\lvert)\s*([a-zA-Z])\s*(?:\\right)?(?:\||\\rvert)\s*{_ORDER}\s*(\d+(?:\.\d+)?)\s*'
)
_JOINED = re.compile(r'\\(?:text|mathrm|mbox)\s*\{\s*(or|and)\s*\}')
_ASSIGNED = re.compile(r'\s*([a-zA-Z])\s*=\s*([^=,]+?)\s*')


def unnamed(wanted: str, found: str) -> tuple[str, str]:
  r"""Two answers, without the name of a value that only one of them gives.

  >>> unnamed('3x^2', "f'(x) = 3x^2"), unnamed('x=1', 'y=1')
  (('3x^2', '3x^2'), ('x=1', 'y=1'))

  Args:
    wanted: an answer.
    found: another one.
  """
  texts = [_turned(wanted), _turned(found)]
  for at in (0, 1):
    parts = sides(texts[at])
    if len(parts) != 2 or _RELATION.search(_inner(texts[1 - at])):
      continue
    if _NAME.fullmatch(parts[0]) and not _NO_NAME.search(parts[0]):
      texts[at] = parts[1].strip()
      break
  names = [re.match(r'\s*(?:y|[fgh]\(x\))\s*=(?!.*=)', text) for text in texts]
  if names[0] and names[1]:
    texts = [
      text[one.end() :].strip()
      for text, one in zip(texts, names, strict=True)
      if one
    ]
  return texts[0], texts[1]


def sides(text: str) -> list[str]:
  r"""What stands between the signs '=' of a text, but for those in brackets.

  >>> sides('P(X=1) = 1/4')
  ['P(X=1) ', ' 1/4']

  Args:
    text: an answer.
  """
  parts, depth = [''], 0
  for at, character in enumerate(text):
    depth += (character in '({[') - (character in ')}]')
    is_sign = character == '=' and text[max(0, at - 1) : at] not in (
      '<',
      '>',
      '!',
    )
    if is_sign and not depth:
      parts.append('')
    else:
      parts[-1] += character
  return parts


def _inner(text: str) -> str:
  """A text without what stands in brackets."""
  return re.sub(r'\([^()]*\)|\{[^{}]*\}|\[[^\[\]]*\]', '', text)


def _turned(text: str) -> str:
  """2 = x as x = 2."""
  found = re.fullmatch(r'\s*([^=a-zA-Z]+)=\s*([a-zA-Z])\s*', text)
  return f'{found[2]}={found[1]}' if found else text


def in_order(wanted: str, found: str) -> tuple[str, str]:
  r"""Values with names as a tuple, where the other answer is one.

  >>> in_order('(2,3)', 'y=3, x=2')
  ('(2,3)', '(2,3)')

  Args:
    wanted: an answer.
    found: another one.
  """
  texts = [wanted, found]
  for at in (0, 1):
    if not re.fullmatch(r'\s*(?:\\left)?\(.*\)\s*', texts[1 - at], re.DOTALL):
      continue
    parts = re.split(r',|\\text\s*\{\s*and\s*\}', texts[at])
    found_parts = [
      _ASSIGNED.fullmatch(re.sub(r'\\[,;:! ]', ' ', part)) for part in parts
    ]
    if len(parts) > 1 and all(found_parts):
      named = {one[1]: one[2] for one in found_parts if one}
      if len(named) == len(parts):
        texts[at] = '(' + ','.join(named[name] for name in sorted(named)) + ')'
  return texts[0], texts[1]


def joins(text: str) -> str:
  """What stands between two inequalities: 'or', 'and', or nothing."""
  if not re.search(_ORDER, text):
    return ''
  found = {one.group(1) for one in _JOINED.finditer(text)}
  return 'and' * ('and' in found)


def interval(text: str) -> str:
  r"""Inequalities of one letter as the set of its values; others as they are.

  >>> interval(r'x < -1 \text{ or } x > 1'), interval('3 > x > -3')
  ('x\\in (-\\infty,-1)\\cup (1,\\infty)', 'x\\in (-3,3)')

  Args:
    text: an answer.
  """
  parts = _JOINED.split(text)
  if 'and' in parts[1::2]:
    return text
  sets = [_solved(part) for part in parts[::2]]
  letters = {one[0] for one in sets if one}
  if None in sets or len(letters) != 1:
    return text
  (letter,) = letters
  return rf'{letter}\in ' + r'\cup '.join(one[1] for one in sets if one)


def _solved(text: str) -> tuple[str, str] | None:
  """The letter of an inequality, and the interval of its values."""
  if found := _ABSOLUTE.fullmatch(text):
    letter, sign, size = found.groups()
    closed = 'e' in sign
    if sign[:2] in ('<', '\\l'):
      return letter, f'[-{size},{size}]' if closed else f'(-{size},{size})'
    if closed:
      return letter, rf'(-\infty,-{size}]\cup [{size},\infty)'
    return letter, rf'(-\infty,-{size})\cup ({size},\infty)'
  if found := _TWO.fullmatch(text):
    low, first, letter, second, high = found.groups()
    if _is_less(first) != _is_less(second):
      return None
    if not _is_less(first):
      low, first, second, high = high, second, first, low
    opening, closing = (
      '[' if 'e' in first else '(',
      ']' if 'e' in second else ')',
    )
    return letter, f'{opening}{low},{high}{closing}'
  found = _ONE.fullmatch(text)
  if not found:
    return None
  left, sign, right = found.groups()
  less = _is_less(sign)
  if not re.fullmatch('[a-zA-Z]', left):
    left, right, less = right, left, not less
  if not re.fullmatch('[a-zA-Z]', left) or re.search(
    r'(?<![\\a-zA-Z])[a-zA-Z]', right
  ):
    return None
  closed = 'e' in sign
  if less:
    return left, rf'(-\infty,{right}' + (']' if closed else ')')
  return left, ('[' if closed else '(') + rf'{right},\infty)'


def _is_less(sign: str) -> bool:
  return sign[:2] in ('<', '\\l')
