"""Mathematical answers that mean the same, by math-verify and sympy."""

import functools
import importlib.util
import logging
import re
from typing import Any

from grpo_jax.rewards import _marks
from grpo_jax.rewards.verifiers import _final
from grpo_jax.rewards.verifiers import _notation
from grpo_jax.rewards.verifiers import _shared
from grpo_jax.rewards.verifiers import _units
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
_SET = re.compile(
  r'\\(?:text|textrm|textbf|textit|mathrm|mathbf|mbox)\s*\{([^{}]*)\}'
)
_ALL_WORDS = re.compile(r"[^\W\d_]+(?:[ \-'\u2019]+[^\W\d_]+)*")
_PERCENT = re.compile(r'\s*\\?%\s*$')
_ROUNDED = re.compile(r'^\s*(?:\\approx(?![a-zA-Z])|\u2248)')
_STOP = re.compile(r'(?<=[^\s.,;\\])[.,;]$')  # but no dots
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


@_marks.imports(_import)
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
  numbers of which six digits agree, whatever their size; i is the imaginary
  unit; '%' does not count, nor does a unit that only one of them has. Two units
  or times of day must be the same, and so must derivatives and transposes. What
  denies or bounds a number, as in '\neq 5' and '\geq 5', is not that number. A
  formula is read whole or not at all.

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
  found = boxed.last_box(text)
  if found is None:
    if require_box or '\\boxed' in text:
      return 0.0
    found = _final.answer(text)
  if len(found) > _MOST and boxed.bare(found) not in map(boxed.bare, wanted):
    return 0.0
  found = _content(found)
  return float(any(_means(one, found) for one in wanted))


def _wanted(answer: str) -> str:
  """The expression of a reference; '' if it cannot be compared with."""
  box = boxed.last_box(answer)
  text = _content(answer if box is None else box)
  return '' if not boxed.bare(text) or _is_too_large(text) else text


def _means(wanted: str, found: str) -> bool:
  """Whether two expressions mean the same."""
  if boxed.bare(found) == boxed.bare(wanted):
    return True
  if not found.strip() or _is_too_large(found) or _differ(wanted, found):
    return False
  first, second = _units.clock(wanted), _units.clock(found)
  if first and second and (first[2] or second[2]):
    return _is_same_time(first, second)
  if _words(wanted) and _words(wanted) == _words(found):
    return True
  wanted, found = (_units.split(text)[0] for text in (wanted, found))
  percent = _PERCENT.search(wanted), _PERCENT.search(found)
  if bool(percent[0]) != bool(percent[1]):  # the sign may be left out
    bare = (_PERCENT.sub('', text) for text in (wanted, found))
    if _is_equal(*bare):
      return True
  if _is_equal(wanted, found):
    return True
  other = _notation.converted(wanted), _notation.converted(found)
  return other != (wanted, found) and _is_equal(*other)


def _is_same_time(
  wanted: tuple[int, int, str], found: tuple[int, int, str]
) -> bool:
  """Whether two times of day are one, if one half of the day may be unsaid."""
  if wanted[2] and found[2]:
    return wanted == found
  said, other = (wanted, found) if wanted[2] else (found, wanted)
  late = said[0] % 12 + 12 * (said[2] == 'p')
  return other[1] == said[1] and other[0] in (said[0], late)


def _words(text: str) -> str:
  """A text of words alone, in small letters; '' if it is anything else."""
  plain = _SET.sub(r'\1', text)
  plain = re.sub(r'\\[,;:! ]|~|\s+', ' ', plain).strip(' .!$')
  bracketed = re.fullmatch(r'\(\s*(\w)\s*\)', plain)
  plain = bracketed.group(1) if bracketed else plain
  is_set = plain != text.strip(' .!$') or ' ' in plain
  return plain.casefold() * bool(is_set and _ALL_WORDS.fullmatch(plain))


def _content(text: str) -> str:
  """A text without what stands around it or is only another way to write it."""
  text = (
    _STOP.sub('', text.strip()).strip('$').replace('\\varnothing', '\\emptyset')
  )
  text = _ROUNDED.sub('', _THIN_SPACE.sub('', text))
  # A longer text is refused, and would take long.
  return text if len(text) > _MOST else _notation.readable(text)


def _differ(wanted: str, found: str) -> bool:
  r"""Whether one text denies or bounds what the other one states.

  math-verify takes '\neq 5', '\phantom{5}', '\geq 5' and '5_6' for 5, the point
  (1,2) for the set \{1,2\} and for the solutions 1,2, all units for one, and
  f'(x) for f(x).
  """
  if bool(boxed.DENIED.search(wanted)) != bool(boxed.DENIED.search(found)):
    return True
  if {_brackets(wanted), _brackets(found)} == {'set', 'tuple'}:
    return True
  if _brackets(found) == 'tuple' and _is_list(wanted):
    return True
  if _notation.marks(wanted) != _notation.marks(found):
    return True
  units = _units.split(wanted)[1], _units.split(found)[1]
  if units[0] and units[1] and units[0] != units[1]:
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
    import math_verify  # noqa: F401
  except ImportError as error:
    raise ValueError(_MISSING) from error
  # It warns that its timeouts are off, which they are on purpose.
  logging.getLogger('math_verify').setLevel(logging.ERROR)
  from grpo_jax.rewards.verifiers import _algebra

  return _algebra.Library()


def _is_equal(wanted: str, found: str) -> bool:
  """Whether two texts are equal expressions.

  Raises:
    MemoryError: The reference could not be read for lack of memory, which is no
      fault of the completion.
  """
  try:
    return _equal(_parsed(wanted), _parsed_found(found))
  except RecursionError:
    return False


def _parsed_found(text: str) -> tuple[Any, ...]:
  try:
    return _parsed(text)
  except MemoryError:
    return ()


# The completions of a group share a reference, and often an answer. What is
# raised is not kept: with more memory or a flatter stack it may succeed.
@functools.lru_cache(maxsize=256)
def _parsed(text: str) -> tuple[Any, ...]:
  """The expression of a text; nothing if it is none that can be read whole."""
  try:
    found = _library().parse(f'${text}$', parsing_timeout=None)
    return tuple(map(_with_imaginary_unit, found))
  except (RecursionError, MemoryError):
    raise
  except Exception:
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
