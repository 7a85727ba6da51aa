"""Answers that are one number: GSM8K, and numbers with a tolerance."""

from fractions import Fraction
import functools
import math
import re
from typing import Any

from grpo_jax.rewards import _marks
from grpo_jax.rewards.verifiers import _shared
from grpo_jax.rewards.verifiers import boxed

# A minus belongs to the number unless something stands directly before it: in
# '10-3' and in 'GPT-4' it does not. Digits are ASCII; \d has 600 more.
_MINUS = r'(?:(?<![\w.)\]}%])[-\u2212])?'
_DIGITS = r'(?:[0-9][0-9,]*(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+)'
_PLAIN = re.compile(_MINUS + _DIGITS)
# After the mark of GSM8K a currency sign or bold type may come first.
# All repetitions are possessive: '#### $ $ $ ...' took minutes without it.
_MARKED = re.compile(r'####[\s$*]*+([-\u2212]?[\s$]*+' + _DIGITS + ')')
_EXPONENT = r'(?:[eE][-+]?[0-9]+)?'
_RICH = re.compile(
  f'({_MINUS}{_DIGITS}{_EXPONENT})(?:\\s*/\\s*({_DIGITS}{_EXPONENT}))?'
  r'(\s*\\?%)?'
)
# In 2^5, x_5, 6/5, \frac{6}{5} and 1e5 there is no number 5, nor in 5/6, 5^2
# and 5e3. Around a number, ** without a digit is bold type.
_INSIDE = re.compile(
  r'(?:(?:[\^_/]\s*\{?|\}\s*\{)[\s$]*[-\u2212]?|[0-9][eE][-+]?|[0-9)]\*\*)$'
)
_GOES_ON = re.compile(
  r'\s*+[/^]\s*+\{?\s*+[-\u2212]?[0-9.]|[eE][-+]?[0-9]|\*\*[0-9]'
)
# A factorial and an imaginary number, which only count in a box: 'It is 5!'
_OTHER = re.compile(r'[0-9]\s*(?:!|[ij](?![a-zA-Z]))')
_FRAC = re.compile(r'\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}')
_MOST_DIGITS = 400  # of one number; no float has more in front of its point


@_marks.bounded
def last_number(prompt: str, completion: str, example: dict[str, Any]) -> float:
  """1 if the last number of the completion is the last of the answer, else 0.

  The answers of GSM8K end in the number that counts, behind '####'. Commas in
  numbers do not count, nor do zeros behind the point. If the last number is an
  exponent, an index or part of a fraction, there is none. The last 100,000
  characters are read, and a number has at most 400 characters.

  >>> last_number('', 'That makes $1,200.', {'answer': '12 * 100 #### 1200'})
  1.0

  Args:
    prompt: is not used.
    completion: the text that was sampled.
    example: the record of the data source; its 'answer' is the reference.

  Returns:
    1.0 or 0.0; 0.0 for a completion without a number.

  Raises:
    ValueError: the record has no field 'answer', or no number in it.
  """
  del prompt
  wanted = _wanted('last_number', example)
  return float(_last(_shared.end_of(completion)) == wanted)


@_marks.bounded
def gsm8k(
  prompt: str,
  completion: str,
  example: dict[str, Any],
  *,
  strict: bool = False,
) -> float:
  r"""1 if the final number of the completion is that of the answer, else 0.

  One place of the completion counts, the first of these that it has: the number
  directly behind the last '####', the last number in the last \boxed{}, or the
  last number of the text. If there is a '####' or a box without a number, the
  reward is 0, and nothing else is looked at. Commas, currency and percent signs
  and units do not count, but what is part of a power or of a fraction is no
  number: 6/5 and 2^5 are not 5. The last 100,000 characters are read, and a
  number has at most 400 characters.

  >>> gsm8k('', '3 * 24 = 72 eggs\n#### 72', {'answer': '#### 72'})
  1.0
  >>> gsm8k('', 'It is 72.', {'answer': '#### 72'}, strict=True)
  0.0

  Args:
    prompt: is not used.
    completion: the text that was sampled.
    example: the record of the data source; its 'answer' is the reference, with
      or without the solution in front of '####'.
    strict: whether only a number behind '####' counts.

  Returns:
    1.0 or 0.0; 0.0 for a completion without a number.

  Raises:
    ValueError: the record has no field 'answer', or no number in it.

  References:
    Cobbe et al., `Training Verifiers to Solve Math Word Problems
    <https://arxiv.org/abs/2110.14168>`_, 2021
  """
  del prompt
  wanted = _wanted('gsm8k', example)
  text = _shared.end_of(completion)
  mark = text.rfind('####')
  if mark >= 0:
    marked = _MARKED.match(text, mark)
    found = None
    if marked and not _GOES_ON.match(text, marked.end()):
      found = _plain(marked.group(1))
  elif strict:
    found = None
  else:
    found = _last(_boxed_or_whole(text))
  return float(found == wanted)


def _check_tolerances(
  absolute_tolerance: float = 0.0, relative_tolerance: float = 1e-6
) -> None:
  _tolerances(absolute_tolerance, relative_tolerance)


@_marks.bounded
@_marks.checked(_check_tolerances)
def number(
  prompt: str,
  completion: str,
  example: dict[str, Any],
  *,
  absolute_tolerance: float = 0.0,
  relative_tolerance: float = 1e-6,
) -> float:
  r"""1 if the last number of the completion is near that of the answer, else 0.

  Numbers may be decimals, fractions such as 3/4, percentages (12% is 0.12), and
  have an exponent, as in 1.5e-3. Near means

      |found - wanted| <= max(absolute_tolerance, relative_tolerance * |wanted|)

  If the completion has a \boxed{}, the last number in the last box counts. The
  last 100,000 characters are read; a number has at most 400 characters, and an
  exponent of at most 400 in size.

  >>> number('', 'about 0.3333', {'answer': '1/3'}, absolute_tolerance=1e-3)
  1.0

  Args:
    prompt: is not used.
    completion: the text that was sampled.
    example: the record of the data source; the last number of its 'answer' is
      the reference.
    absolute_tolerance: the largest distance that counts as equal.
    relative_tolerance: the same, as a share of the reference.

  Returns:
    1.0 or 0.0; 0.0 for a completion without a number.

  Raises:
    ValueError: the record has no field 'answer', or no number in it; or a
      tolerance is negative or not finite.
  """
  del prompt
  tolerances = _tolerances(absolute_tolerance, relative_tolerance)
  answer = _shared.answer('number', example)
  wanted = _last_rich(_boxed_or_whole(answer))
  if wanted is None:
    raise _shared.unusable('number', 'a number', answer)
  found = _last_rich(_boxed_or_whole(_shared.end_of(completion)))
  if found is None:
    return 0.0
  absolute, relative = tolerances
  return float(abs(found - wanted) <= max(absolute, relative * abs(wanted)))


@functools.lru_cache(maxsize=64)
def _tolerances(absolute: float, relative: float) -> tuple[Fraction, Fraction]:
  """Both tolerances, exactly."""
  for name, value in (
    ('absolute_tolerance', absolute),
    ('relative_tolerance', relative),
  ):
    if not (math.isfinite(value) and value >= 0):
      raise ValueError(
        f'{name} of the reward number is {value}, but a finite number that is'
        ' not negative is required; give one.'
      )
  return Fraction(absolute), Fraction(relative)


def _wanted(reward: str, example: dict[str, Any]) -> Fraction:
  answer = _shared.answer(reward, example)
  wanted = _last(answer)
  if wanted is None:
    raise _shared.unusable(reward, 'a number', answer)
  return wanted


def _boxed_or_whole(text: str) -> str:
  """Where the number of a text stands; '' if its last box states none."""
  if '\\boxed' not in text:
    return text
  # A box that is not closed is a box without a number.
  box = boxed.last_box(text) or ''
  if boxed.DENIED.search(box) or boxed.BOUND.match(box) or _OTHER.search(box):
    return ''
  return box


def _last(text: str) -> Fraction | None:
  text = text.replace('{,}', ',')
  found = _shared.last(_PLAIN.finditer(text))
  if (
    found is None or _is_part(text, found) or _GOES_ON.match(text, found.end())
  ):
    return None
  return _plain(found.group())


def _is_part(text: str, found: re.Match[str]) -> bool:
  """Whether a number is an exponent, an index or a denominator."""
  return bool(_INSIDE.search(text[max(0, found.start() - 20) : found.start()]))


def _last_rich(text: str) -> Fraction | None:
  text = _FRAC.sub(r'\1/\2', text.replace('{,}', ','))
  found = _shared.last(_RICH.finditer(text))
  if found is None or _is_part(text, found):
    return None
  above, below, percent = found.groups()
  value = _plain(above)
  divisor = Fraction(1) if below is None else _plain(below)
  if value is None or not divisor:
    return None
  return value / divisor / (100 if percent else 1)


def _plain(text: str) -> Fraction | None:
  """The value of a number as it is written; None if it is too long."""
  for ignored in (',', '$', ' ', '\n', '\t'):
    text = text.replace(ignored, '')
  text = text.replace('\u2212', '-')
  exponent = re.split('[eE]', text)[1:]
  if len(text) > _MOST_DIGITS or (exponent and abs(int(exponent[0])) > 400):
    return None
  try:
    return Fraction(text)
  except ValueError:  # white space of another kind behind the minus
    return None
