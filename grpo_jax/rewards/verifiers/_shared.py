"""What several verifiers need: references, boxes, and how much is read."""

from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Set
import decimal
from fractions import Fraction
import math
import numbers
import re
from typing import Any
from typing import NamedTuple
from typing import TypeVar

_Item = TypeVar('_Item')

# Characters of a completion that a verifier reads. 100,000 characters are about
# 25,000 tokens of English, and take a few milliseconds.
MOST_CHARACTERS = 100_000
_MOST_DIGITS = 400  # of a number as a text
_NUMBER = re.compile(
  r'[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3})?'
)
BOX = re.compile(r'\\boxed\s*\{')
# A backslash and what it escapes come first, so that \{ counts as no brace.
_BRACE = re.compile(r'\\.|[{}]', re.DOTALL)
# What denies an expression, or hides it. Readers of numbers pass over it.
DENIED = re.compile(
  r'\\(?:neq?|not|neg|lnot|notin|n(?:sim|cong|eqq|leq?|geq?|less|gtr)|n?exists'
  r'|forall|[hv]?phantom|b?cancel|xcancel|sout)(?![a-zA-Z])'
  r'|\\(?:text|mathrm|mbox)\s*\{\s*not\b'
  '|[\u2260\u00ac\u2203\u2204\u2200]'
)
_ORDER = r'(?:[<>\u2264\u2265]|\\(?:l|g)(?:t|e|eq|eqslant|eqq)(?![a-zA-Z]))'
BOUND = re.compile(rf'\s*{_ORDER}')  # one side is missing

# Characters that are fractions: what stands above and below the line.
FRACTIONS = {
  '\u00bd': '12', '\u2153': '13', '\u2154': '23', '\u00bc': '14',
  '\u00be': '34', '\u2155': '15', '\u2156': '25', '\u2157': '35',
  '\u2158': '45', '\u2159': '16', '\u215a': '56', '\u215b': '18',
  '\u215c': '38', '\u215d': '58', '\u215e': '78',
}  # fmt: skip
_RAISED = str.maketrans(
  '\u2070\xb9\xb2\xb3\u2074\u2075\u2076\u2077\u2078\u2079\u207b\u207f',
  '0123456789-n',
)


class Answer(NamedTuple):
  """One answer that counts as right.

  Attributes:
    text: As a verifier compares it; a number is written without an exponent and
      without zeros behind the point.
    value: The number or truth value, if the record holds one and no text.
  """

  text: str
  value: Fraction | bool | None = None


def answers(reward: str, example: Mapping[str, Any]) -> tuple[Answer, ...]:
  """The reference answers, of which any is right.

  >>> [one.text for one in answers('gsm8k', {'answer': [72.0, 'seventy-two']})]
  ['72', 'seventy-two']

  Args:
    reward: The name of the verifier, for the error message.
    example: The record of the data source. Its 'answer' is a text, a number, or
      a list of these.

  Returns:
    One for each item of a list; else one.

  Raises:
    ValueError: The record has no field 'answer', or there is something else in
      it: a dict, say, no value, or an empty list.
  """
  if 'answer' not in example:
    raise ValueError(
      f"{reward} requires the field 'answer', but the example has the"
      f' fields {sorted(example)}; set config.data.answer_field to the field'
      ' that holds the answer.'
    )
  given = _python_value(example['answer'])
  items = list(given) if isinstance(given, list | tuple | Set) else [given]
  if not items:
    raise unusable(reward, 'at least one item', given)
  return tuple(_answer(reward, _python_value(item)) for item in items)


def shown_answer(record: Mapping[str, Any]) -> str:
  """The text that a demonstration shows as the answer of a record.

  >>> shown_answer({'answer': [72.0, 'seventy-two']})
  '72'

  Args:
    record: With 'answer'. Of several that are right, the first is shown.

  Raises:
    ValueError: The answer is no text, no number and no list of these.
  """
  return answers('A demonstration', record)[0].text


def unusable(reward: str, required: str, given: Any) -> ValueError:
  """The error of a reference that a verifier cannot compare with.

  Args:
    reward: The name of the verifier.
    required: What it needs in the answer, as a noun.
    given: What the answer is.

  Returns:
    The error, to be raised.
  """
  return ValueError(
    f'{reward} requires {required} in the answer, but the example has'
    f' {given!r:.80}; give another reward, or correct the record.'
  )


def _python_value(value: Any) -> Any:
  """A value of NumPy and bytes as Python has them."""
  if isinstance(value, bytes):
    return value.decode('utf-8', 'backslashreplace')
  if hasattr(value, 'dtype'):
    if getattr(value, 'ndim', 0):
      return value.tolist()
    if (
      getattr(value.dtype, 'kind', '') == 'f'
    ):  # a float32 of 0.1 is meant to be 0.1
      return float(str(value))
    return _python_value(value.item())
  return value


def _answer(reward: str, given: Any) -> Answer:
  """One answer, as a text."""
  if isinstance(given, bool):
    return Answer(str(given), given)
  if isinstance(given, str):
    return Answer(given)
  if isinstance(given, Mapping):
    fields = sorted(map(str, given))
    raise ValueError(
      f'{reward} requires a text, a number or a list of these in the answer,'
      f' but the example has a dict with the fields {fields}; name the one that'
      ' holds it in config.data.answer_field, behind the field of the dict and'
      f" a point, as in 'answer.{fields[0] if fields else 'text'}', or make its"
      ' value the answer.'
    )
  if isinstance(given, numbers.Real | decimal.Decimal):
    if not _is_finite(given):
      raise unusable(reward, 'a finite number', given)
    value = Fraction(str(given))  # 0.1 is a tenth, and not the nearest float
    return Answer(_written(given, value), value)
  raise unusable(reward, 'a text, a number or a list of these', given)


def _is_finite(given: Any) -> bool:
  """Whether a number can be written out."""
  if isinstance(given, numbers.Rational):  # no float may be as large
    return True
  if isinstance(given, decimal.Decimal):
    return given.is_finite() and abs(given.adjusted()) <= _MOST_DIGITS
  return math.isfinite(given)


def _written(given: Any, value: Fraction) -> str:
  """A number as a person writes it."""
  if isinstance(given, numbers.Rational):
    return str(value)
  exact = decimal.Context(prec=2 * _MOST_DIGITS)  # rounds no digits away
  return format(decimal.Decimal(str(given)).normalize(exact), 'f')


def is_value(text: str, answer: Answer) -> bool:
  """Whether a text is the number or truth value that a record holds as such.

  >>> is_value(' 72.0', Answer('72', Fraction(72)))
  True
  """
  if answer.value is None or len(text) > _MOST_DIGITS:
    return False
  if isinstance(answer.value, bool):  # JSON writes true, and Python True
    return text.strip().casefold() == answer.text.casefold()
  found = _NUMBER.fullmatch(text.strip())
  return found is not None and Fraction(found.group()) == answer.value


def last(items: Iterable[_Item]) -> _Item | None:
  """The last item, or None; no more than one is kept in memory."""
  found = None
  for item in items:
    found = item
  return found


def end_of(completion: str) -> str:
  """The last `MOST_CHARACTERS` characters; answers stand at the end."""
  return completion[-MOST_CHARACTERS:]


def last_box(text: str) -> str | None:
  r"""What the last \boxed{} of a text holds.

  The time is linear in the length of the text.

  >>> last_box(r'\boxed{1}, no: \boxed{\{2, 3\}}')
  '\\{2, 3\\}'

  Args:
    text: any text.

  Returns:
    The text between the braces of the last box, with the braces inside it; None
    if there is no box, or no brace that closes the last one.
  """
  # The place of the last box is sought from the end: a text of 100,000 open
  # boxes costs no more than one.
  start = text.rfind('\\boxed')
  opening = BOX.match(text, start) if start >= 0 else None
  if opening is None:
    return None
  depth = 1
  for token in _BRACE.finditer(text, opening.end()):
    depth += {'{': 1, '}': -1}.get(token.group(), 0)
    if not depth:
      return text[opening.end() : token.start()]
  return None


def as_power(found: re.Match[str]) -> str:
  """Small raised digits as an exponent, such as ^{-3}."""
  return f'^{{{found[0].translate(_RAISED)}}}'


def bare(text: str) -> str:
  """A text without white space and dollar signs.

  >>> bare('$1 + 2$')
  '1+2'

  Args:
    text: any text.

  Returns:
    The rest of the text.
  """
  return ''.join(text.split()).replace('$', '')


def plain(value: Any) -> Any:
  """Dicts and lists, of a ConfigDict too."""
  if isinstance(value, Mapping):
    return {key: plain(value[key]) for key in value}
  return [*map(plain, value)] if isinstance(value, list | tuple) else value
