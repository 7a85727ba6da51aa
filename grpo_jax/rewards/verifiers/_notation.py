r"""Ways to write a number that math-verify misreads, in ways that it reads."""

import re

_NUMBER = r'\d+(?:\.\d+)?|\.\d+'
_DEGREES = r'\s*(?:\^\s*(?:\\circ|\{\s*\\circ\s*\})|°)'
_ANGLE = re.compile(rf'({_NUMBER}){_DEGREES}')
_FUNCTION = re.compile(
  r'(\\(?:sin|cos|tan|cot|sec|csc)(?:\^(?:\d|\{-?\d\}))?\s*(?:\\left)?[({]?\s*)'
  rf'({_NUMBER}){_DEGREES}'
)
_RADIANS = r'{\\frac{%s\\pi}{180}}'  # to be put in by `re`
_SCIENTIFIC = re.compile(rf'([+-]?(?:{_NUMBER}))[eE]([+-]?\d{{1,9}})')
_REPEATING = re.compile(r'(\d*)\.(\d*)\\(?:overline|bar)\s*\{(\d+)\}')
_IN_BASE = re.compile(r'([0-9]+)_(?:([0-9])|\{\s*([0-9]{1,2})\s*\})')
_WORDS = (
  'zero one two three four five six seven eight nine ten eleven twelve thirteen'
  ' fourteen fifteen sixteen seventeen eighteen nineteen twenty'
).split()
_TEXT = r'\\(?:text|mathrm|mbox)\s*\{([^{}]*)\}'
_UNIT = re.compile(
  rf'(?:{_TEXT}|(?<=[\d\s}}])([a-zA-Z][a-zA-Z/ ]*))(?:\^(?:\d|\{{\d\}}))?\s*$'
)
_UNITS = {
  spelling: names[0]
  for names in map(
    str.split,
    (
      'mm millimeter millimeters millimetre millimetres',
      'cm centimeter centimeters centimetre centimetres',
      'm meter meters metre metres',
      'km kilometer kilometers kilometre kilometres',
      'in inch inches',
      'ft foot feet',
      'yd yard yards',
      'mi mile miles',
      'mg milligram milligrams',
      'g gram grams',
      'kg kilogram kilograms',
      's sec second seconds',
      'min minute minutes',
      'h hr hour hours',
      'day days',
      'week weeks',
      'month months',
      'year years',
      'cent cents',
      'dollar dollars',
    ),
  )
  for spelling in names
}


def readable(text: str) -> str:
  r"""A text in which math-verify reads each number as it is meant.

  These are powers of ten as programs write them, numbers in words up to twenty,
  decimals that repeat, and degrees in a sine or another such function.

  >>> readable('1.5e-3'), readable(r'\text{six}'), readable(r'0.1\overline{6}')
  ('1.5 \\cdot 10^{-3}', '6', '{\\frac{15}{90}}')

  Args:
    text: An answer.

  Returns:
    The text, with these replaced.
  """
  if found := _SCIENTIFIC.fullmatch(text):
    return rf'{found[1]} \cdot 10^{{{int(found[2])}}}'
  word = re.fullmatch(rf'{_TEXT}|([a-zA-Z]+)', text)
  if word and (name := (word[1] or word[2]).strip().lower()) in _WORDS:
    return str(_WORDS.index(name))
  text = _FUNCTION.sub(r'\1' + _RADIANS % r'\2', text)
  return _REPEATING.sub(_fraction, text)


def converted(text: str) -> str:
  r"""A text with angles in radians, or with its number in base ten.

  That is another reading: 30^\circ answers what 30 answers, too, and the number
  of a base what its digits alone answer.

  >>> converted('10110_2'), converted(r'90^\circ')
  ('22', '{\\frac{90\\pi}{180}}')

  Args:
    text: An answer.

  Returns:
    The text, with these replaced.
  """
  if found := _IN_BASE.fullmatch(text):
    digits, base = found[1], int(found[2] or found[3])
    if 2 <= base <= 36 and all(int(digit) < base for digit in digits):
      return str(int(digits, base))
  return _ANGLE.sub(_RADIANS % r'\1', text)


def unit(text: str) -> tuple[str, ...]:
  r"""The units behind a number; () if there are none, or others than we know.

  >>> unit(r'10\text{ meters}'), unit('10 km/h'), unit(r'10\text{ apples}')
  (('m',), ('km', 'h'), ())

  Args:
    text: An answer.

  Returns:
    One name for each part of a quotient, whatever the power.
  """
  found = _UNIT.search(text)
  if not found:
    return ()
  words = re.sub(r'\b(?:square|cubic|sq)\b', '', found[1] or found[2] or '')
  parts = re.split(r'/|\bper\b', words.replace('~', ' '))
  names = tuple(_UNITS.get(part.strip(' .'), '') for part in parts)
  return names if all(names) else ()


def _fraction(found: re.Match[str]) -> str:
  """A decimal that repeats, as a fraction."""
  whole, fixed, period = found.groups()
  number = int(whole + fixed + period) - int((whole + fixed) or 0)
  divisor = '9' * len(period) + '0' * len(fixed)
  return rf'{{\frac{{{number}}}{{{divisor}}}}}'
