"""Mathematical answers that mean the same, by math-verify and sympy.

math-verify reads whatever it finds in a text, down to the first number of a
formula that it does not understand, and compares numbers at six places behind
the point. So here a text is read whole or not at all, and numbers are compared
relative to their size.
"""

from collections.abc import Callable
import functools
import importlib.util
import logging
import re
from types import FunctionType
from types import ModuleType
from typing import Any
from typing import NamedTuple
import unicodedata

from grpo_jax.rewards import _base
from grpo_jax.rewards.verifiers import _notation
from grpo_jax.rewards.verifiers import _shared
from grpo_jax.rewards.verifiers import _units

_MOST = 1000  # characters of an answer; no answer of MATH has 200
_MOST_DEPTH = 20  # braces and brackets in one another
_MOST_POWERS = 30
_RAISED = r'(?:\^|\*\*)[\s{(]*'
# Powers and factorials whose value has more digits than memory or time allow:
# an exponent of 6 digits, and a factorial of a number of 5 digits or of another
# factorial.
_HUGE = re.compile(rf'{_RAISED}-?\d[\d.,]{{5}}|\d{{5}}[\s}})]*!|!\s*!|\)\s*!')
# 12\\,345 is one number, which math-verify takes for two.
_THIN_SPACE = re.compile(r'(?<=\d)\\[,;:! ](?=\d{3}(?!\d))')
_MISSING = (
  'The reward math_equivalence requires the package math-verify, which is not'
  " installed; run pip install 'grpo_jax[math]'."
)
_SET = re.compile(
  r'\\(?:text|textrm|textbf|textit|mathrm|mathbf|mbox)\s*\{([^{}]*)\}'
)
_ALL_WORDS = re.compile(r"[^\W\d_]+(?:[ \-'\u2019]+[^\W\d_]+)*")
_PERCENT = re.compile(r'\s*\\?%\s*$')
_ROUNDED = re.compile(r'^\s*(?:\\approx(?![a-zA-Z])|\u2248)')
_STOP = re.compile(r'(?:(?<=[^\s.,;\\])|\\[,;:! ]\s*)[.,;]$')  # but no dots
_MARKDOWN = re.compile(r'^\s*\*\*(.+?)\*\*\s*$', re.DOTALL)
_DELIMITED = re.compile(r'^\s*\\[(\[](.*)\\[)\]]\s*$', re.DOTALL)
_WIDE = re.compile('[\uff01-\uff5e]')
_DATE = re.compile(r'\d{4}-\d\d?-\d\d?|\d\d?/\d\d?/\d{4}')
_BASE = re.compile(r'[0-9]\s*_\s*(?!\{?\s*10\b)')
_TOWER = re.compile(rf'{_RAISED}(\d+)[\s}})]*{_RAISED}(\d*)')


def _check(require_box: bool = True) -> None:
  del require_box
  # Importing it takes a second, and workers do that themselves.
  try:
    found = importlib.util.find_spec('math_verify')
  except ValueError:  # somebody has made it unimportable
    found = None
  if found is None:
    raise ValueError(_MISSING)


def _import() -> None:
  """Imports math-verify and sympy, and builds the tables of its parser."""
  _library()
  _is_equal('\\frac{1}{2}+x', '0.5+x')


@_base.imports(_import)
@_base.checked(_check)
def math_equivalence(
  prompt: str,
  completion: str,
  example: dict[str, Any],
  *,
  require_box: bool = True,
) -> float:
  r"""1 if the answer of the completion means the same as the reference, else 0.

  The last \boxed{} of the completion counts, whatever other boxes hold; if it
  has no closing brace, there is no box. What is in it equals the reference if
  both are the same text but for white space, or if math-verify finds them
  equal: 1/2, 0.5 and \frac12; sets in any order; an interval and an inequality;
  numbers that agree at six places behind the point and in six digits; i is the
  imaginary unit, and R is not r; '%' does not count, nor does a unit or a name,
  as in 'f(2) = 5', that only one of them has. Two units or times of day must be
  the same, and so must derivatives, transposes, the order of products of
  transposes and of vectors, and words that say opposite things. What denies,
  bounds or changes a number, as in '\neq 5', '\geq 5' and '5 or more', is not
  that number. A formula is read whole or not at all.

  An answer of more than 1,000 characters, with more than 20 braces and brackets
  in one another, more than 30 powers, or a power or factorial too large to
  write out is wrong unless it is the same text. What is left can still
  keep sympy busy for minutes, and no timeout of math-verify is switched on,
  since these need signals: the time limit of the reward ends such a call. This
  needs the package math-verify: `pip install 'grpo_jax[math]'`.

  >>> math_equivalence('', r'So \boxed{0.5}.', {'answer': r'\frac{1}{2}'})
  1.0

  Args:
    prompt: is not used.
    completion: the text that was sampled.
    example: the record of the data source; its 'answer' is the reference, alone
      or in the last \boxed{} of a solution, or a list of which any counts.
    require_box: whether a completion without a box has reward 0. If not, the
      last answer in its last 1,000 characters counts: a statement or bold type;
      else the last formula or number.

  Returns:
    1.0 or 0.0; 0.0 for a completion without an answer.

  Raises:
    ValueError: math-verify is not installed; or the record has no field
      'answer', or the answer is empty or too long or too deep.
    MemoryError: there is too little memory to read the answer.

  References:
    Hendrycks et al., `Measuring Mathematical Problem Solving With the MATH
    Dataset <https://arxiv.org/abs/2103.03874>`_, 2021
  """
  del prompt
  _library()  # missing it is an error of every completion, not of some
  answers = _shared.answers('math_equivalence', example)
  wanted = [text for one in answers if (text := _wanted(one.text))]
  if not wanted:
    raise _shared.unusable(
      'math_equivalence',
      'an expression of at most 1,000 characters',
      example['answer'],
    )
  text = _shared.end_of(completion)
  found = _shared.last_box(text)
  if found is None:
    if require_box or '\\boxed' in text:
      return 0.0
    found = _last_answer(text)
  if len(found) > _MOST and _shared.bare(found) not in map(
    _shared.bare, wanted
  ):
    return 0.0
  found = _content(found)
  return float(any(_means(one, found) for one in wanted))


def _wanted(answer: str) -> str:
  """The expression of a reference; '' if it cannot be compared with."""
  box = _shared.last_box(answer)
  text = _content(answer if box is None else box)
  return '' if not _shared.bare(text) or _is_too_large(text) else text


def _means(wanted: str, found: str) -> bool:
  """Whether two expressions mean the same."""
  if _text(found) == _text(wanted):
    return True
  if not found.strip() or _is_too_large(found) or _differ(wanted, found):
    return False
  first, second = _units.clock(wanted), _units.clock(found)
  if first and second:
    if first[2] or second[2]:
      return _is_same_time(first, second)
    if "o'clock" in wanted + found:
      return first == second
  values = _notation.based(wanted), _notation.based(found)
  if None not in values:
    return values[0] == values[1]
  if (said := _say_same(wanted, found)) is not None:
    return said
  if _is_false(found):
    return False
  wanted, found = _notation.drop_name(wanted, found)
  wanted, found = _notation.in_order(wanted, found)
  wanted, found = (_units.split(text)[0] for text in (wanted, found))
  percent = _PERCENT.search(wanted), _PERCENT.search(found)
  bare = tuple(_PERCENT.sub('', text) for text in (wanted, found))
  if percent[0] or percent[1]:
    if _is_equal(*bare):
      return True
    wanted, found = (
      rf'\frac{{{text}}}{{100}}' if sign else text
      for text, sign in zip(bare, percent, strict=True)
    )
  if _is_equal(wanted, found):
    return True
  for rewritten in _notation.convert, _notation.interval:
    other = rewritten(wanted), rewritten(found)
    if other != (wanted, found) and _is_equal(*other):
      return True
  return False


def _text(text: str) -> str:
  """A text without white space, but between digits: 1 1/2 is not 11/2."""
  return _shared.bare(re.sub(r'(?<=\d)\s+(?=\d)', '|', text))


def _say_same(wanted: str, found: str) -> bool | None:
  """Whether words, or words and numbers, are the same; None for formulas."""
  words = _notation.phrase(wanted), _notation.phrase(found)
  if words[0] and words[0] == words[1]:
    if _SET.search(wanted + found) or _notation.is_decisive(words[0]):
      return True
  if all(map(_notation.is_decisive, words)):
    return False
  said = _said(wanted), _said(found)
  if said[0] and said[0] == said[1] and _SET.search(wanted + found):
    return True
  return None


def _is_false(found: str) -> bool:
  """Whether an answer equates two numbers that differ, or x with x + 1."""
  *sides, last = _notation.sides(found)
  if not sides or len(sides) > 5:
    return False
  letter = sides[0].strip()
  if len(letter) == 1 and re.search(
    rf'(?<![a-zA-Z\\]){re.escape(letter)}(?![a-zA-Z])', last
  ):
    return True
  numbers = [side for side in (*sides, last) if _is_number(side)]
  return _is_number(last) and not all(
    _is_equal(side, last) for side in numbers[:-1]
  )


def _is_number(text: str) -> bool:
  """Whether a text has digits, and no letters but those of commands."""
  plain = re.sub(
    r'\\(?:[dt]?frac|sqrt|cdot|times|div|pi|left|right)(?![a-z])', '', text
  )
  return bool(re.search(r'\d', plain)) and not re.search(r'[a-zA-Z\\,]', plain)


def _is_same_time(
  wanted: tuple[int, int, str], found: tuple[int, int, str]
) -> bool:
  """Whether two times of day are one, if one half of the day may be unsaid."""
  if wanted[2] and found[2]:
    return wanted == found
  said, other = (wanted, found) if wanted[2] else (found, wanted)
  late = said[0] % 12 + 12 * (said[2] == 'p')
  return other[1] == said[1] and other[0] in (said[0], late)


def _said(text: str) -> str:
  """A text of words alone, in small letters; '' if it is anything else."""
  plain = _SET.sub(r'\1', text)
  plain = re.sub(r'\\[,;:! ]|~|\s+', ' ', plain).strip(' .!$"')
  bracketed = re.fullmatch(r'\(\s*(\w)\s*\)', plain)
  plain = (bracketed.group(1) if bracketed else plain).casefold()
  if not _ALL_WORDS.fullmatch(plain):
    return ''
  plain = re.sub(r'^there (?:is|are) ', '', plain)
  return re.sub(r'(?<=\w)(?<!s)s$', '', plain) if ' ' in plain else plain


def _content(text: str) -> str:
  """A text without what stands around it or is only another way to write it."""
  text = (
    _STOP.sub('', _DELIMITED.sub(r'\1', text.strip()))
    .strip('$')
    .replace('\\varnothing', '\\emptyset')
  )
  text = _ROUNDED.sub('', _THIN_SPACE.sub('', text))
  text = _MARKDOWN.sub(
    r'\1', unicodedata.normalize('NFKC', text) if _WIDE.search(text) else text
  )
  # A longer text is refused, and would take long.
  return text if len(text) > _MOST else _notation.readable(text)


def _differ(wanted: str, found: str) -> bool:
  r"""Whether one text denies or bounds what the other one states.

  math-verify takes '\neq 5', '\phantom{5}', '\geq 5' and '5_6' for 5, the point
  (1,2) for the set \{1,2\} and for the solutions 1,2, all units for one, and
  f'(x) for f(x).
  """
  if bool(_shared.DENIED.search(wanted)) != bool(_shared.DENIED.search(found)):
    return True
  if {_brackets(wanted), _brackets(found)} == {'set', 'tuple'}:
    return True
  if _brackets(found) == 'tuple' and _is_list(wanted):
    return True
  if _notation.joins(wanted) != _notation.joins(found):
    return True
  sides = _notation.drop_name(wanted, found)
  if _notation.marks(sides[0]) != _notation.marks(sides[1]):
    return True
  units = _units.split(wanted)[1], _units.split(found)[1]
  if units[0] and units[1] and units[0] != units[1]:
    return True
  if _is_other_angle(wanted, units[1]) or _is_other_angle(found, units[0]):
    return True
  if _DATE.search(wanted) or _DATE.search(found):
    return True  # which only the same text is
  if _notation.changes(wanted) != _notation.changes(found):
    return True
  if _notation.are_opposite(wanted, found):
    return True
  if _BASE.search(found) and not _BASE.search(wanted):
    return True
  return bool(_shared.BOUND.match(wanted)) != bool(_shared.BOUND.match(found))


def _is_other_angle(text: str, unit: _units.Unit | None) -> bool:
  """Whether a text is in degrees, and a unit is something else."""
  return bool(unit) and unit != {('degree', 1)} and _units.angle(text)


def _brackets(text: str) -> str:
  r"""Whether a text is a 'set' \{1,2\}, a 'tuple' (1,2), or neither: ''."""
  text = re.sub(r'\\(left|right)(?![a-z])|\s', '', text)
  if text.startswith('\\{') and text.endswith('\\}'):
    # {x | 1 < x < 2} is (1,2) too.
    return '' if re.search(r'[|:<>]|\\mid|\\[gl]', text) else 'set'
  return 'tuple' * bool(re.fullmatch(r'\([^()]+(,[^()]+)+\)', text))


def _is_list(text: str) -> bool:
  """Whether a text has several values, with commas between, in no brackets."""
  text = re.sub(r'(?<=\d),(?=\d{3}(?!\d))', '', text)
  before = None
  while before != text:
    before, text = text, re.sub(r'[({\[][^(){}\[\]]*[)}\]]', '', text)
  names = re.findall(r'([a-zA-Z](?:_\{?\w+\}?)?)\s*=', text)
  if '\\pm' in text or '\\mp' in text or len(names) > len({*names}):
    return True
  return ',' in text and '=' not in text


def _is_too_large(text: str) -> bool:
  """Whether a text is refused before a parser sees it."""
  if len(text) > _MOST or text.count('^') + text.count('**') > _MOST_POWERS:
    return True
  depth = deepest = 0
  for character in text:
    depth += (character in '{([') - (character in '})]')
    deepest = max(deepest, depth)
  if deepest > _MOST_DEPTH or _HUGE.search(text):
    return True
  # 2^{10^3} is a number of 302 digits, and 9^{9^9} of 370 million; where the
  # second exponent is no number, it may be anything.
  return any(
    len(first) * int(second or 9) > 5 for first, second in _TOWER.findall(text)
  )


class _Library(NamedTuple):
  """What a verifier needs of math-verify."""

  read: Callable[[str], Any]  # the expression that a text is; raises if none
  verify: Callable[[list[Any], list[Any]], bool]  # whether two are equal


@functools.cache
def _library() -> _Library:
  try:
    from math_verify import parser
  except ImportError as error:
    raise ValueError(_MISSING) from error
  from latex2sympy2_extended import math_normalization as normal

  # It warns that its timeouts are off, which they are on purpose.
  logging.getLogger('math_verify').setLevel(logging.ERROR)
  rules = normal.NormalizationConfig(
    basic_latex=True,
    units=False,
    malformed_operators=True,
    nits=True,
    boxed='none',
    equations=False,
  )
  read = _own_reader(parser)
  verify = functools.partial(
    _own_grader().verify, allow_set_relation_comp=True, timeout_seconds=None
  )
  return _Library(
    lambda text: read(normal.normalize_latex(text, config=rules)), verify
  )


def _is_equal(wanted: str, found: str) -> bool:
  """Whether two texts are equal expressions.

  Raises:
    MemoryError: The reference could not be read for lack of memory, which is no
      fault of the completion.
  """
  try:
    expected = _parsed(wanted)
  except RecursionError:
    return False
  try:
    given = _parsed(found)
    if not expected or not given:
      return False
    return _library().verify([*expected], [*given])
  except Exception:  # a lack of memory too
    return False


# The completions of a group share a reference, and often an answer. What is
# raised is not kept: with more memory or a flatter stack it may succeed.
@functools.lru_cache(maxsize=256)
def _parsed(text: str) -> tuple[Any, ...]:
  """The expression of a text; nothing if it is none that can be read whole."""
  import sympy

  try:
    found = _library().read(text)
    # To math-verify a lone i is a letter.
    letters = getattr(found, 'free_symbols', ())
    units = {one: sympy.I for one in letters if str(one) == 'i'}
    return (found.xreplace(units) if units else found,)
  except (RecursionError, MemoryError):
    raise
  except Exception:  # parser and sympy raise many types; such a text is none
    return ()


_MOST_BEHIND = 1000  # characters from the end in which an answer is sought
_STATED = re.compile(
  r'\b(?:answer|result|solution|value|total)\b[*_]*'
  r'(?:\s+(?:is|would be|must be|equals)\b[*_]*\s*:?|\s*[:=]|[*_]*:)[*_]*',
  re.IGNORECASE,
)
_BOLD = re.compile(r'\*\*([^*\n]+)\*\*|__([^_\n]+)__')
_FORMULA = re.compile(
  r'\$\$(.+?)\$\$|\\\[(.+?)\\\]|\\\((.+?)\\\)|(?<![\\$])\$([^$\n]+)\$',
  re.DOTALL,
)
_WRITTEN = re.compile(
  r'(?<![\w.])[-\u2212+]?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:\s*/\s*\d+)?(?:\s?\\?%)?'
)
_SENTENCE = re.compile(
  r'[.!?](?=\s|$)|\n|,?\s(?:not|because|since|which|where|so|as)\s'
)


def _last_answer(text: str) -> str:
  r"""The last answer that a text states.

  The last one of these counts: what follows 'answer is', 'answer:' or the like,
  and what is set in bold type. Without either it is the last formula, or the
  last number.

  >>> _last_answer('It is $4$. No: the answer is **$5$**.')
  '5'
  >>> _last_answer('So **72** it is')
  '72'

  Args:
    text: the end of a completion.

  Returns:
    The answer; '' if there is none.
  """
  text = text[-_MOST_BEHIND:]
  found = [
    (one.start(), _behind(text, one.end())) for one in _STATED.finditer(text)
  ]
  for one in _BOLD.finditer(text):
    inside = (one.group(1) or one.group(2)).strip()
    if _may_answer(inside):
      found.append((one.start(), _bare(inside)))
  found = [one for one in found if one[1]]
  if found:
    return max(found)[1]
  formula = _shared.last(_FORMULA.finditer(text))
  number = _shared.last(_WRITTEN.finditer(text))
  if formula and (number is None or number.start() < formula.end()):
    return _inside(formula)
  if number is None or re.search(r'\bnot\s+$', text[: number.start()]):
    return ''
  return number.group().strip()


def _inside(formula: re.Match[str]) -> str:
  return next(part for part in formula.groups() if part is not None).strip()


def _behind(text: str, at: int) -> str:
  """The answer behind 'the answer is'."""
  rest = text[at:].lstrip(' \t\n*_:')
  line = rest.partition('\n')[0]
  formula = _FORMULA.search(
    line if '\\[' not in rest[:3] and '$$' not in rest[:3] else rest
  )
  if formula and len(line[: formula.start()].split()) < 4:
    return _inside(formula)
  ends = _SENTENCE.search(line)
  return _bare(line[: ends.start()] if ends else line)


def _may_answer(bold: str) -> bool:
  """Whether a bold text may be an answer, and not a heading."""
  if bold.endswith(':') or re.match(r'(?i)(?:step|part|case|note)\b', bold):
    return False
  if _STATED.search(bold):
    return False  # which is found as a statement
  return bool(re.search(r'\d|\\[a-z]|\$', bold)) or len(bold) == 1


def _bare(text: str) -> str:
  """A formula without bold type, dollar signs and what names it."""
  text = text.strip().strip('*_').strip()
  formula = _FORMULA.fullmatch(text)
  return (_inside(formula) if formula else text).strip(' *_.')


_NEAR = 5e-6  # of six digits that agree, relative
_EXACT = 1e-10  # relative, of numbers that no decimal can write out


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
