"""Units behind a number, and times of day."""

import re

_PREFIXES = {
  '': '', 'T': 'tera', 'G': 'giga', 'M': 'mega', 'k': 'kilo', 'h': 'hecto',
  'd': 'deci', 'c': 'centi', 'm': 'milli', '\u00b5': 'micro', '\u03bc': 'micro',
  'u': 'micro', 'n': 'nano', 'p': 'pico', 'f': 'femto',
}  # fmt: skip
_SI = {
  'm': 'meter metre', 'g': 'gram gramme', 's': 'second', 'A': 'ampere amp',
  'K': 'kelvin', 'mol': 'mole', 'cd': 'candela', 'N': 'newton', 'J': 'joule',
  'W': 'watt', 'Pa': 'pascal', 'Hz': 'hertz', 'C': 'coulomb', 'V': 'volt',
  'F': 'farad', '\u03a9': 'ohm', 'S': 'siemens', 'Wb': 'weber', 'T': 'tesla',
  'H': 'henry', 'L': 'liter litre', 'l': 'liter', 'eV': 'electronvolt',
  'cal': 'calorie', 'Bq': 'becquerel', 'Gy': 'gray', 'Sv': 'sievert',
  'lm': 'lumen', 'lx': 'lux', 'bar': 'bar', 'B': 'byte', 'Wh': 'watthour',
  'M': 'molar', 'pc': 'parsec', 'psi': 'psi', 'dyn': 'dyne', 'G': 'gauss',
  'Da': 'dalton', 'sr': 'steradian',
}  # fmt: skip
# The first name of each is what it is compared by.
_OTHERS = (
  'inch in inches', 'foot ft feet', 'yard yd yds yards', 'mile mi miles',
  'ounce oz ounces', 'pound lb lbs pounds', 'ton tons tonne tonnes',
  'second sec secs', 'minute min mins minutes', 'hour h hr hrs hours',
  'day d days', 'week wk weeks', 'month months', 'year yr yrs years',
  'century centuries', 'decade decades', 'acre acres', 'hectare ha hectares',
  'gallon gal gallons', 'quart qt quarts', 'pint pt pints', 'cup cups',
  'cent cents', 'dollar dollars', 'euro euros', 'rupee rupees', 'yen',
  'degree degrees deg', 'radian rad radians', 'atmosphere atm', 'ampere amps',
  'meter metres', 'centimeter cm', 'cc', 'ohm ohms Omega',
  'knot knots', 'bit bits', 'percent', 'dollar USD usd', 'euro EUR eur',
  'erg ergs', 'torr', 'mmhg mmHg', 'lightyear lightyears ly', 'AU au', 
  'nauticalmile nauticalmiles nmi',
  'horsepower hp', 'teaspoon teaspoons tsp', 'tablespoon tablespoons tbsp',
  'angstrom angstroms \u00c5 \u212b', 'dalton amu u', 'pence penny',
  'revolution revolutions rev revs', 'arcsecond arcseconds arcsec',
  'arcminute arcminutes arcmin', 'celsius centigrade', 'fahrenheit',
  'decibel dB', 'fortnight fortnights', 'stone stones', 'furlong furlongs',
  'peso pesos', 'yuan', 'won', 'ruble rubles', 'franc francs',
)  # fmt: skip


def _table() -> dict[str, str]:
  found = {}
  for symbol, names in _SI.items():
    name = names.split()[0]
    for short, long in _PREFIXES.items():
      found.setdefault(short + symbol, long + name)
      for spelling in names.split():
        for ending in '', 's', 'es':
          found.setdefault(long + spelling + ending, long + name)
  for line in _OTHERS:
    for spelling in line.split():
      found[spelling] = line.split()[0]
  return found


_UNITS = _table()
_QUOTIENTS = {
  'mph': {'mile': 1, 'hour': -1},
  'kph': {'kilometer': 1, 'hour': -1},
  'kmh': {'kilometer': 1, 'hour': -1},
  'kmph': {'kilometer': 1, 'hour': -1},
  'rpm': {'revolution': 1, 'minute': -1},
}
# Spellings of more than one word, as one.
_JOINED = (
  (re.compile(r'light[\s-]+year', re.IGNORECASE), 'lightyear'),
  (re.compile(r'nautical\s+mile', re.IGNORECASE), 'nauticalmile'),
  (re.compile(r'mm\s+Hg'), 'mmHg'),
  (
    re.compile(r'(?:degrees?\s+|\u00b0\s*)(?:C(?:elsius)?|celsius)\b'),
    'celsius',
  ),
  (
    re.compile(r'(?:degrees?\s+|\u00b0\s*)(?:F(?:ahrenheit)?|fahrenheit)\b'),
    'fahrenheit',
  ),
  (re.compile(r'\u03bc\s+(?=[a-zA-Z])'), '\u03bc'),
  (re.compile(r'\b([kM])\s+\u03a9'), '\\1\u03a9'),
)
_SQUARE = {'square': 2, 'sq': 2, 'cubic': 3, 'cu': 3}
_SET = (
  r'\\(?:text|textrm|textit|textbf|mathrm|mathit|mbox|operatorname|rm|unit)'
)
_HELD = r'\{((?:[^{}]|\{[^{}]*\})*)\}'
_GAP = r'(?:\s|\\[,;:! ]|~)'
_POWER = r'(?:\s?(?:\^\s?(?:-?\d|\{\s?-?\d\s?\})|[\u00b2\u00b3]))?'
_PART = (
  rf'{_GAP}*(?:(?:\\cdot|\\times|/|\u00b7){_GAP}*)?'
  rf'(?:{_SET}\s*{_HELD}|\\(?:Omega|mu)(?![a-zA-Z])){_POWER}'
)
_TRAILING = re.compile(rf'(?:{_PART})+[\s.]*$')
# Letters that are set as a formula are units only if the whole is known.
_GAPS = re.compile(rf'{_GAP}+$')
_PLAIN = re.compile(
  rf'(?<=[\d\s}}~)]){_GAP}*([a-zA-Z\u00b5\u03bc\u03a9]+{_POWER}'
  rf'(?:\s*(?:/|\u00b7|\\cdot|per\b|{_GAP})\s*[a-zA-Z]+{_POWER})*)[\s.]*$'
)
# Words behind a number and a space: what is counted.
_NOUN = re.compile(
  rf'(?<=\d){_GAP}+(?!sinh|cosh|tanh|sqrt)([a-z]{{4,}}(?: [a-z]{{2,}})*)[\s.]*$'
)
_DEGREES = re.compile(
  rf'{_GAP}*(?:\^\s*\{{?\s*\\circ\s*\}}?|\\degree(?![a-zA-Z])|[\u00b0\u00ba])'
  rf'{_GAP}*(?:{_SET}\s*\{{\s*([CF])\s*\}}|([CF])?)[\s.]*$'
)
_SIDE = rf'\{{\s*((?={_SET})(?:[^{{}}]|\{{(?:[^{{}}]|\{{[^{{}}]*\}})*\}})*)\}}'
_FRACTION = re.compile(rf'\\[dt]?frac\s*{_SIDE}\s*{_SIDE}{_POWER}[\s.]*$')
_COINS = {
  '\\$': 'dollar',
  '$': 'dollar',
  '\u20ac': 'euro',
  '\u00a3': 'sterling',
  '\u00a5': 'yen',
  '\u20b9': 'rupee',
  '\u00a2': 'cent',
}
_COIN = re.compile(r'\\?\$|[\u20ac\u00a3\u00a5\u20b9\u00a2]')
_LONE = 'mgshlLNJWVK\u03a9'  # single letters that are units behind a space
_CLOCK = re.compile(
  r'(\d{1,2})(?::([0-5]\d))?\s*(?:([ap])\s?\.?\s?m\.?)?\s*', re.IGNORECASE
)

Unit = frozenset[tuple[str, int]]


def split(text: str) -> tuple[str, Unit | None]:
  r"""What stands in front of a unit, and the unit.

  >>> front, unit = split(r'10\text{ km/h}')
  >>> front, sorted(unit)
  ('10', [('hour', -1), ('kilometer', 1)])
  >>> split(r'7\text{ apples}'), split('5x')
  (('7', frozenset()), ('5x', None))

  Args:
    text: an answer.

  Returns:
    The text in front, and names with their powers: none for a word that is no
    unit known here; None, and all of the text, where there is no unit.
  """
  if coin := _COIN.search(text):
    unit = frozenset([(_COINS[coin.group()], 1)])
    return split(_COIN.sub('', text))[0].strip(), unit
  text = text.replace('\u2103', '\u00b0C')
  if found := _FRACTION.search(text):
    above, below = (
      re.sub(rf'{_SET}\s*{_HELD}', r'\1', side) for side in found.groups()
    )
    unit = _unit(f'{above}/({below})')
    if unit and (front := _GAPS.sub('', text[: found.start()])):
      return front, unit
  found = _DEGREES.search(text)
  if found and (letter := found[1] or found[2]):
    named = 'celsius' if letter == 'C' else 'fahrenheit'
    return text[: found.start()].strip(), frozenset([(named, 1)])
  found = _TRAILING.search(text)
  if found and (front := text[: found.start()].strip()):
    unit = _unit(found.group())
    # An index, a letter or a number in the text is none of a unit.
    is_noun = re.search(r'\d', front) and not re.search(
      r'_\s*\{?\w+\}?$', front
    )
    if unit or (is_noun and not _is_formula(found.group())):
      return front, unit or frozenset()
  found = _PLAIN.search(text)
  if found:
    unit = _unit(found.group(1))
    lone = len(found.group(1)) == 1
    spaced = not re.search(r'[\d})]$', text[: found.start(1)])
    known = found.group(1) in _LONE if spaced else found.group(1) == '\u03a9'
    if unit and (not lone or known):
      return text[: found.start()].strip(), unit
  found = _NOUN.search(text)
  return (text[: found.start()], frozenset()) if found else (text, None)


def _is_formula(said: str) -> bool:
  """Whether a text behind a number has a lone letter, a number or pi."""
  plain = re.sub(rf'{_SET}\s*{_HELD}', r' \1 ', said)
  plain = re.sub(r'\^\s*\{?\s*-?\d\s*\}?', ' ', plain)
  words = re.findall(r'\\?[a-zA-Z]+|\d+', plain)
  return any(
    word in ('pi', 'e', 'i')
    or word.isdigit()
    or (len(word) == 1 and word != 'a')
    for word in words
  )


def angle(text: str) -> bool:
  r"""Whether an answer is in degrees.

  >>> angle(r'45^\circ'), angle('45')
  (True, False)

  Args:
    text: an answer.
  """
  found = _DEGREES.search(text)
  return found is not None and not (found[1] or found[2])


def name(word: str) -> str | None:
  """The name of a unit, of which each has one; None for any other word.

  >>> name('hrs'), name('apples')
  ('hour', None)
  """
  if word in ('AM', 'PM'):  # of a time of day
    return None
  return _UNITS.get(word) or _UNITS.get(word.lower())


def _unit(text: str) -> Unit | None:
  """A product or quotient of units; None if a part is no unit known here."""
  text = re.sub(rf'{_SET}\s*{_HELD}', r' \1 ', text)
  text = text.replace('\\Omega', '\u03a9').replace('\\mu', '\u03bc')
  text = re.sub(r'\\AA(?![a-zA-Z])', '\u00c5', text)
  text = re.sub(r'\\(?:cdot|times)|\u00b7|\*', ' ', text)
  text = re.sub(r'\\[,;:! ]|~|[{}]', ' ', text)
  text = text.replace('\u00b2', '^2').replace('\u00b3', '^3')
  for spelling, joined in _JOINED:
    text = spelling.sub(joined, text)
  found: dict[str, int] = {}
  sign, wide, last = 1, 1, ''
  for token in re.findall(r'/|\^\s*-?\d|\d|[^\W\d_]+|\S', text):
    if token == '/' or token == 'per':
      sign = -1
    elif token == ')':
      sign = 1
    elif token[0] == '^' and last:
      power = int(token[1:])
      found[last] += sign * (power - 1)
    elif token in _SQUARE:
      wide = _SQUARE[token]
    elif token in ('squared', 'cubed') and last:
      found[last] += sign * (1 if token == 'squared' else 2)
    elif token in _QUOTIENTS:
      for unit, power in _QUOTIENTS[token].items():
        found[unit] = found.get(unit, 0) + sign * power
    elif (unit := name(token)) is not None:
      found[unit] = found.get(unit, 0) + sign * wide
      wide, last = 1, unit
    elif token not in '.(':
      return None
  return frozenset((unit, power) for unit, power in found.items() if power)


def clock(text: str) -> tuple[int, int, str] | None:
  r"""A time of day: hour, minutes, and 'a', 'p' or ''; None for anything else.

  >>> clock(r'3\text{ p.m.}'), clock('11:05')
  ((3, 0, 'p'), (11, 5, ''))

  Args:
    text: an answer.
  """
  plain = re.sub(rf'{_SET}\s*{_HELD}', r'\1', text)
  plain = re.sub(r'\\[,;:! ]|~', ' ', plain).strip(' $.')
  plain = re.sub(r"\s*(?:o'clock)$", ':00', plain)
  found = _CLOCK.fullmatch(plain)
  if not found:
    return None
  hour, minutes, half = found.groups()
  return int(hour), int(minutes or 0), (half or '').lower()
