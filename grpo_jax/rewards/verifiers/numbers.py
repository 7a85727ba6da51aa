"""Answers that are one number: GSM8K, and numbers with a tolerance."""

from fractions import Fraction
import functools
import math
import re
from typing import Any

from grpo_jax.rewards import _base
from grpo_jax.rewards.verifiers import _around
from grpo_jax.rewards.verifiers import _shared

# A minus belongs to the number unless something stands directly before it: in
# '10-3' and in 'GPT-4' it does not. Digits are ASCII; \d has 600 more.
_DASHES = '-\u2212\u2010\u2011\u2012\u2013\ufe63\uff0d'
_COINS = '$\u20ac\u00a3\u00a5\u20b9'
_MINUS = (
  rf'(?:(?<![\w.)\]}}%])[{_DASHES}](?:\\?[{_COINS}])?'
  rf'|(?<=[=\u2248])\s{{0,3}}[-\u2212]\s{{0,3}}(?:\\?[{_COINS}])?)?'
)
_DIGITS = r'(?:[0-9][0-9,]*(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+)'
_PLAIN = re.compile(_MINUS + _DIGITS)
# In a box only a sign may stand in front of the digits, with spaces around it.
_SIGNED = rf'(?:[{_DASHES}]\s*(?:\\?[{_COINS}]\s*)?)?'
_BOXED = re.compile(_SIGNED + _DIGITS)
# After the mark of GSM8K a currency sign or bold type may come first.
# All repetitions are possessive: '#### $ $ $ ...' took minutes without it.
_MARKED = re.compile(
  r'####:?(?:\s*+(?:[a-zA-Z]\s*+[:=]|[aA]nswer\s*+:|[tT]he\s+answer\s+is\b:?))?+'
  rf'(?:[\s{_COINS}*`=(]|\\[(]|\\(?=\$))*+'
  rf'([{_DASHES}+]?(?:[\s{_COINS}]|\\(?=\$))*+{_DIGITS})'
)
_MARKED_BOX = re.compile(r'####[\s$*]*+\\boxed')
_EXPONENT = r'(?:[eE][-+]?[0-9]+)?'
_TENS = (
  r'(?:\s?(?:[x\u00d7*\u00b7\u22c5]|\\times|\\cdot)\s?10\s?(?:\^|\*\*)\s?'
  r'(?:\{\s?(?P<raised>[-+\u2212]?\s?[0-9]+)\s?\}'
  r'|\(\s?(?P<bracketed>[-+\u2212]?\s?[0-9]+)\s?\)|(?P<power>[-+\u2212]?[0-9]+)))?'
)
_PERCENT = r'(?P<percent>\s?(?:\\?%|per\s?cent(?![a-z])))?'
# 3 1/4 is a mixed number; 3/4, with or without spaces, is a fraction.
_VALUE = (
  rf'(?:(?P<whole>[0-9][0-9,]{{0,11}})\s(?P<over>[0-9]{{1,9}})/(?P<under>[0-9]{{1,9}})'
  rf'(?![0-9.,]*[0-9])'
  rf'|(?P<above>{_DIGITS}{_EXPONENT})'
  rf'(?:\s*/\s*(?P<below>{_DIGITS}{_EXPONENT}))?{_TENS})'
  rf'{_PERCENT}'
)
_RICH = re.compile(f'(?P<sign>{_MINUS}){_VALUE}')
_RICH_BOXED = re.compile(f'(?P<sign>{_SIGNED}){_VALUE}')
_FRAC = re.compile(
  r'([0-9]\s*)?\\[dtc]?frac\s*'
  r'(?:\{([^{}]*)\}\s*\{([^{}]*)\}|([0-9])\s*([0-9]))'
)
_ONE = re.compile(rf'[{_DASHES}]?\s?{_DIGITS}')
# A power of ten alone, and small digits behind a ten.
_SMALL = re.compile('(?<=10)[\u2070\xb9\xb2\xb3\u2074-\u2079\u207b]+')
_POWER_OF_TEN = re.compile(
  r'(?<![\w.,^\u00d7*\u00b7\u22c5/{(])(?<![\u00d7*\u00b7\u22c5x/^]\s)'
  r'(?<!times)(?<!times\s)(?<!cdot)(?<!cdot\s)10(?=\s?(?:\^|\*\*))'
)
_VULGARS = re.compile(f'([0-9])?([{"".join(_shared.FRACTIONS)}])')
_MOST_DIGITS = 400  # of one number; no float has more in front of its point


@_base.bounded
def last_number(prompt: str, completion: str, example: dict[str, Any]) -> float:
  """1 if the last number of the completion is the last of the answer, else 0.

  The answers of GSM8K end in the number that counts, behind '####'. Commas in
  numbers do not count, nor do zeros behind the point. If the last number is a
  part of a larger expression, as in 72k, 72^2 or x_72, there is none; in the
  last box, it must be stated alone or with words and units. The last
  100,000 characters are read, and a number has at most 400 characters.

  >>> last_number('', 'That makes $1,200.', {'answer': '12 * 100 #### 1200'})
  1.0

  Args:
    prompt: is not used.
    completion: the text that was sampled.
    example: the record of the data source; its 'answer' is the reference, or a
      list of which any counts.

  Returns:
    1.0 or 0.0; 0.0 for a completion without a number.

  Raises:
    ValueError: the record has no field 'answer', or no number in it.
  """
  del prompt
  wanted = _wanted('last_number', example)
  return float(_last(_shared.end_of(completion)) in wanted)


@_base.bounded
def gsm8k(
  prompt: str,
  completion: str,
  example: dict[str, Any],
  *,
  strict: bool = False,
) -> float:
  r"""1 if the final number of the completion is that of the answer, else 0.

  One place of the completion counts, the first of these that it has: the number
  directly behind the last '####' (a name, as 'x =' or 'Answer:', or a box may
  stand between), the last number in the last \boxed{}, or the
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
    boxes = _MARKED_BOX.match(text, mark)
    marked = None if boxes else _MARKED.match(text, mark)
    found = _last(text[mark:], box_counts=True) if boxes else None
    if marked and _around.ends(text, _end(marked)):
      found = _plain(marked.group(1))
  elif strict:
    found = None
  else:
    found = _last(text, box_counts=True)
  return float(found in wanted)


@functools.lru_cache(maxsize=64)
def _tolerances(
  absolute_tolerance: float = 0.0, relative_tolerance: float = 1e-6
) -> tuple[Fraction, Fraction]:
  """Both tolerances, exactly."""
  for name, value in (
    ('absolute_tolerance', absolute_tolerance),
    ('relative_tolerance', relative_tolerance),
  ):
    if not (math.isfinite(value) and value >= 0):
      raise ValueError(
        f'{name} of the reward number is {value}, but a finite number that is'
        ' not negative is required; give one.'
      )
  return Fraction(absolute_tolerance), Fraction(relative_tolerance)


@_base.bounded
@_base.checked(_tolerances)
def number(
  prompt: str,
  completion: str,
  example: dict[str, Any],
  *,
  absolute_tolerance: float = 0.0,
  relative_tolerance: float = 1e-6,
) -> float:
  r"""1 if the last number of the completion is near that of the answer, else 0.

  Numbers may be decimals, fractions such as 3/4, mixed numbers such as 3 1/4,
  and percentages (12% is 0.12), and have an exponent, as in 1.5e-3. Near means

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
  answers = _shared.answers('number', example)
  wanted = [
    value for one in answers if (value := _last_rich(one.text)) is not None
  ]
  if not wanted:
    raise _shared.unusable('number', 'a number', example['answer'])
  found = _last_rich(_shared.end_of(completion))
  if found is None:
    return 0.0
  absolute, relative = tolerances
  return float(
    any(
      abs(found - one) <= max(absolute, relative * abs(one)) for one in wanted
    )
  )


def _wanted(reward: str, example: dict[str, Any]) -> set[Fraction]:
  """The numbers that count as right; items that are none are passed over."""
  found = (_last(one.text) for one in _shared.answers(reward, example))
  wanted = {value for value in found if value is not None}
  if not wanted:
    raise _shared.unusable(reward, 'a number', example['answer'])
  return wanted


def _box(text: str) -> str | None:
  """What the last box of a text holds; None if the text has no box."""
  if '\\boxed' not in text:
    return None
  # A box that is not closed is a box without a number.
  box = _shared.last_box(text) or ''
  denied = _shared.DENIED.search(box) or _shared.BOUND.match(box)
  return '' if denied else box


def _last(text: str, box_counts: bool = False) -> Fraction | None:
  """The number that a text ends in; in a box, the one that the box states.

  Args:
    text: any text.
    box_counts: whether the last box counts, wherever it stands. If not, it does
      where the last number of the text stands in it.
  """
  text = _around.without_powers(text.replace('{,}', ','))
  found = _shared.last(_PLAIN.finditer(text))
  box = _box(text)
  if box is not None and (
    box_counts or (found and _is_in_last_box(text, found.start()))
  ):
    found = _around.stated(box, _BOXED)
    return None if found is None else _plain(found.group())
  if found is None or not _is_whole(text, found):
    return None
  return _plain(found.group())


def _is_in_last_box(text: str, at: int) -> bool:
  start = text.rfind('\\boxed')
  box = _shared.last_box(text)
  return box is not None and start < at < text.index(box, start) + len(box)


def _end(found: re.Match[str]) -> int:
  """The place behind the last digit; a comma behind it is none of its own."""
  return found.end() - len(found.group()) + len(found.group().rstrip(','))


def _is_whole(text: str, found: re.Match[str]) -> bool:
  """Whether a number of a text is no part of a larger expression."""
  return _around.begins(text, found.start()) and _around.ends(text, _end(found))


def _last_rich(text: str) -> Fraction | None:
  text = _around.without_powers(text)
  box = _box(text)
  text = _VULGARS.sub(_spelled_fraction, text if box is None else box)
  text = _SMALL.sub(_shared.as_power, text)
  text = _POWER_OF_TEN.sub('1*10', text.replace('\u2044', '/'))
  text = _FRAC.sub(_quotient, text.replace('{,}', ','))
  if box is not None:
    stated = _around.stated(text, _RICH_BOXED)
    return None if stated is None else _rich(stated)
  found = _shared.last(_RICH.finditer(text))
  if found is None or not _is_whole(text, found):
    return None
  return _rich(found)


def _spelled_fraction(found: re.Match[str]) -> str:
  """A fraction that is one character, behind the digits of a mixed number."""
  digit, character = found.groups()
  fraction = '/'.join(_shared.FRACTIONS[character])
  return f'{digit} {fraction}' if digit else fraction


def _quotient(found: re.Match[str]) -> str:
  r"""\frac{3}{4} as 3/4; as it is where a part is no number."""
  whole, above, below, short_above, short_below = found.groups()
  above, below = (short_above or above).strip(), (short_below or below).strip()
  if not (_ONE.fullmatch(above) and _ONE.fullmatch(below)):
    return found.group()
  return f'{whole.strip()} {above}/{below}' if whole else f'{above}/{below}'


def _rich(found: re.Match[str]) -> Fraction | None:
  """The value of a decimal, fraction, mixed number, power of ten or percentage.

  None if it is too large to write out, or not defined.
  """
  part = found.groupdict()
  negative = any(dash in part['sign'] for dash in _DASHES)
  if part['whole'] is not None:
    above, below = map(int, (part['over'], part['under']))
    if not 0 < above < below:  # two numbers, and the second is the last
      value = Fraction(above, below) if below else None
      negative = False
    else:
      value = int(part['whole'].replace(',', '')) + Fraction(above, below)
  else:
    value = _plain(part['above'])
    if part['below'] is not None:
      below = _plain(part['below'])
      value = value / below if value is not None and below else None
    raised = part['raised'] or part['bracketed'] or part['power']
    if raised is not None and value is not None:
      power = _power(raised)
      value = None if power is None else value * Fraction(10) ** power
  if value is None:
    return None
  return (-value if negative else value) / (100 if part['percent'] else 1)


def _power(text: str) -> int | None:
  """An exponent of ten; None if it is too large."""
  text = text.replace('\u2212', '-').replace(' ', '')
  return int(text) if len(text) < 5 and abs(int(text)) <= 400 else None


def _plain(text: str) -> Fraction | None:
  """The value of a number as it is written; None if it is too long."""
  text = re.sub(rf'[\s,\\{_COINS}=\u2248]', '', text)
  text = re.sub(f'[{_DASHES}]', '-', text)
  exponent = re.split('[eE]', text)[1:]
  if len(text) > _MOST_DIGITS or (
    exponent and (len(exponent[0]) > 5 or abs(int(exponent[0])) > 400)
  ):
    return None
  try:
    return Fraction(text)
  except ValueError:  # white space of another kind behind the minus
    return None
