"""Mathematical answers that mean the same, by math-verify and sympy."""

import functools
import importlib.util
import logging
import re
from typing import Any

from grpo_jax.rewards import _marks
from grpo_jax.rewards.verifiers import _notation
from grpo_jax.rewards.verifiers import _shared
from grpo_jax.rewards.verifiers import boxed

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


@_marks.checked(_check)
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
  numbers to 6 places behind the point; i is the imaginary unit; '%' does not
  count, nor does a unit that only one of them has. What denies or bounds a
  number, as in '\neq 5' and '\geq 5', is not that number.

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
      or in the last \boxed{} of a solution.
    require_box: whether a completion without a box has reward 0. If not,
      math-verify looks for an answer in its last 1,000 characters.

  Returns:
    1.0 or 0.0; 0.0 for a completion without an answer.

  Raises:
    ValueError: math-verify is not installed; or the record has no field
      'answer', or the answer is empty or too long or too deep.

  References:
    Hendrycks et al., `Measuring Mathematical Problem Solving With the MATH
    Dataset <https://arxiv.org/abs/2103.03874>`_, 2021
  """
  del prompt
  _library()  # missing it is an error of every completion, not of some
  answer = _shared.answer('math_equivalence', example)
  box = boxed.last_box(answer)
  wanted = _content(answer if box is None else box)
  if not boxed.bare(wanted) or _is_too_large(wanted):
    raise _shared.unusable(
      'math_equivalence', 'an expression of at most 1,000 characters', answer
    )
  text = _shared.end_of(completion)
  found = boxed.last_box(text)
  if found is None:
    if require_box or '\\boxed' in text:
      return 0.0
    found = text[-_MOST:]
    if _is_too_large(found):
      return 0.0
    return float(_equal(_parsed(wanted), _parsed(found, whole=False)))
  found = _content(found)
  if boxed.bare(found) == boxed.bare(wanted):
    return 1.0
  if not found.strip() or _is_too_large(found) or _differ(wanted, found):
    return 0.0
  if _equal(_parsed(wanted), _parsed(found)):
    return 1.0
  other = _notation.converted(wanted), _notation.converted(found)
  if other == (wanted, found):
    return 0.0
  return float(_equal(*map(_parsed, other)))


def _content(text: str) -> str:
  """A text without what stands around it or is only another way to write it."""
  text = text.strip().strip('$').replace('\\varnothing', '\\emptyset')
  text = _THIN_SPACE.sub('', text)
  # A longer text is refused, and would take long.
  return text if len(text) > _MOST else _notation.readable(text)


def _differ(wanted: str, found: str) -> bool:
  r"""Whether one text denies or bounds what the other one states.

  math-verify takes '\neq 5', '\phantom{5}', '\geq 5' and '5_6' for 5, the point
  (1,2) for the set \{1,2\} and for the solutions 1,2, and all units for one.
  """
  if bool(boxed.DENIED.search(wanted)) != bool(boxed.DENIED.search(found)):
    return True
  if {_brackets(wanted), _brackets(found)} == {'set', 'tuple'}:
    return True
  if _brackets(found) == 'tuple' and _is_list(wanted):
    return True
  units = _notation.unit(wanted), _notation.unit(found)
  if all(units) and units[0] != units[1]:
    return True
  if _BASE.search(found) and not _BASE.search(wanted):
    return True
  return bool(boxed.BOUND.match(wanted)) != bool(boxed.BOUND.match(found))


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


@functools.cache
def _library() -> Any:
  try:
    import math_verify
  except ImportError as error:
    raise ValueError(_MISSING) from error
  # It warns that its timeouts are off, which they are on purpose.
  logging.getLogger('math_verify').setLevel(logging.ERROR)
  return math_verify


# The completions of a group share a reference, and often an answer.
@functools.lru_cache(maxsize=256)
def _parsed(text: str, whole: bool = True) -> tuple[Any, ...]:
  """What math-verify reads: expressions, or the text itself, or nothing."""
  if whole:
    text = f'${text}$'
  try:
    found = _library().parse(text, parsing_timeout=None)
    return tuple(map(_with_imaginary_unit, found))
  except (Exception, RecursionError, MemoryError):
    return ()


def _with_imaginary_unit(parsed: Any) -> Any:
  """What math-verify has read, where a lone i is no letter."""
  import sympy

  letters = getattr(parsed, 'free_symbols', ())
  units = {one: sympy.I for one in letters if str(one) == 'i'}
  return parsed.xreplace(units) if units else parsed


def _equal(wanted: tuple[Any, ...], found: tuple[Any, ...]) -> bool:
  if not wanted or not found:
    return False
  try:
    return _library().verify(
      list(wanted),
      list(found),
      allow_set_relation_comp=True,
      timeout_seconds=None,
    )
  except (Exception, RecursionError, MemoryError):
    return False
