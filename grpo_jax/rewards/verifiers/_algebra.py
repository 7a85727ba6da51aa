"""math-verify, with numbers that are compared by their size.

It reads whatever it finds in a text, down to the first number of a formula that
it does not understand, and compares numbers at six places behind the point. So
here a text is read whole or not at all, and numbers are compared relative to
their size.
"""

import functools
import importlib.util
from types import FunctionType
from types import ModuleType
from typing import Any

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
