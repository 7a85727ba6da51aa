r"""Ways to write an answer that math-verify misreads, in ways that it reads."""

import re

from grpo_jax.rewards.verifiers import _shared
from grpo_jax.rewards.verifiers import _units

_SET = re.compile(
  r'\\(?:text|textrm|textbf|textit|textsf|mathrm|mathbf|mathsf|mathit|mbox'
  r'|operatorname)\s*\{([^{}]*)\}'
)
_CHANGES = re.compile(
  r'\b(?:or|and)\s+(?:more|less|fewer|greater|above|below|over|under|up|\d)\b'
  r'|\bat\s+(?:least|most)\b'
  r'|\b(?:more|less|fewer|greater|larger|smaller|other)\s+than\b'
  r'|\b(?:not|never|wrong|incorrect|false|except|unless|if)\b'
  r'|\b(?:dozens?|gross|hundreds?|thousands?|[mbtr]illions?)\b'
  r'|\b(?:squared|cubed|factorial|mod|modulo|choose|minus|negative|pi)\b'
  r'|\b(?:halves|thirds|fourths|fifths|sixths|eighths|ninths|tenths'
  r'|hundredths|thousandths)\b',
  re.IGNORECASE,
)
_OPPOSITES = tuple(
  {
    word: at
    for at, words in enumerate(line.split('/'))
    for word in words.split()
  }
  for line in (
    'north northern northward northwards/south southern southward southwards',
    'east eastern eastward eastwards/west western westward westwards',
    'left leftward/right rightward',
    'up upward upwards/down downward downwards',
    'inward inwards/outward outwards',
    'clockwise/counterclockwise anticlockwise counter-clockwise anti-clockwise',
    'increase increased gain/decrease decreased',
    'profit/loss',
    'bc bce/ad ce',
    'noon/midnight',
    'morning/afternoon/evening/night',
    'heads/tails',
    'even/odd',
    'above/below',
    'before/after',
    'positive/negative',
    'january jan/february feb/march mar/april apr/may/june jun/july jul'
    '/august aug/september sep sept/october oct/november nov/december dec',
    'monday mon/tuesday tue/wednesday wed/thursday thu/friday fri/saturday sat'
    '/sunday sun',
  )
)
_TOKEN = re.compile(
  r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|[^\W\d_]+(?:['\u2019-][^\W\d_]+)*"
)
_LINKS = {'and', 'the', 'of', 'on', 'st', 'nd', 'rd', 'th'}


def changes(text: str) -> tuple[str, ...]:
  r"""What of the words of an answer makes another number of a number.

  >>> changes(r'5\text{ or more}'), changes(r'5\text{ apples}')
  (('or more',), ())

  Args:
    text: an answer.
  """
  return tuple(
    ' '.join(one.lower().split())
    for said in _SET.findall(text)
    for one in _CHANGES.findall(said)
  )


def are_opposite(wanted: str, found: str) -> bool:
  r"""Whether words of two answers say opposite things, as north and south do.

  A word that only one answer has denies nothing.

  >>> are_opposite(r'5\text{ m north}', r'5\text{ m South}')
  True

  Args:
    wanted: an answer.
    found: another one.
  """
  first, second = (
    re.findall(r'[a-z]+(?:-[a-z]+)*', ' '.join(_SET.findall(text)).lower())
    for text in (wanted, found)
  )
  for line in _OPPOSITES:
    sides = [
      [line[word] for word in side if word in line] for side in (first, second)
    ]
    if sides[0] and sides[1] and sides[0] != sides[1]:
      return True
  # 'north of east' has the words of 'east of north'.
  known = {word for line in _OPPOSITES[:2] for word in line}
  turned = [
    [word for word in side if word in known] for side in (first, second)
  ]
  return (
    len(turned[0]) > 1
    and sorted(turned[0]) == sorted(turned[1])
    and (turned[0] != turned[1])
  )


def phrase(text: str) -> tuple[str, ...]:
  r"""The words and numbers of an answer that has nothing else; else nothing.

  Units have one name each, and commas and 'and' do not count.

  >>> phrase(r'2\text{ hrs }30\text{ min}'), phrase('June 5'), phrase('x = 5')
  (('2', 'hour', '30', 'minute'), ('june', '5'), ())

  Args:
    text: an answer.
  """
  plain = _SET.sub(r' \1 ', text)
  plain = re.sub(
    r'\\[,;:! ]|\\q?quad(?![a-zA-Z])|~|[\s.,;!"]+(?!\d)', ' ', plain
  )
  if _TOKEN.sub('', plain).strip(' ,.;:()'):
    return ()
  tokens = []
  for token in _TOKEN.findall(plain):
    if token[0].isdigit():
      number = token.replace(',', '')
      tokens.append(number.rstrip('0').rstrip('.') if '.' in number else number)
    elif token.lower() not in _LINKS:
      name = _units.name(token) if tokens and tokens[-1][0].isdigit() else None
      tokens.append(name or token.lower())
  return tuple(tokens)


def is_decisive(tokens: tuple[str, ...]) -> bool:
  """Whether a phrase has words beside several numbers, or a word in front."""
  numbers = sum(token[0].isdigit() for token in tokens)
  words = sum(len(token) > 2 and not token[0].isdigit() for token in tokens)
  return bool(
    words and (numbers > 1 or (numbers and not tokens[0][0].isdigit()))
  )


_NUMBER = r'\d+(?:\.\d+)?|\.\d+'
_DEGREES = r'\s*(?:\^\s*(?:\\circ|\{\s*\\circ\s*\})|°)'
_ANGLE = re.compile(rf'({_NUMBER}){_DEGREES}')
_FUNCTION = re.compile(
  r'(\\(?:sin|cos|tan|cot|sec|csc)(?:\^(?:\d|\{-?\d\}))?\s*(?:\\left)?[({]?\s*)'
  rf'({_NUMBER}){_DEGREES}'
)
_RADIANS = r'{\\frac{%s\\pi}{180}}'  # to be put in by `re`
_SCIENTIFIC = re.compile(rf'([+-]?(?:{_NUMBER}))[eE]([+-]?\d{{1,9}})')
_REPEATING = re.compile(r'(\d*)\.(\d*)\\(?:overline|bar|dot)\s*\{(\d+)\}')
_IN_BASE = re.compile(
  r'\(?([0-9A-Za-z]+)\)?_\s*(?:([0-9])|\{\s*\(?([0-9]{1,2})\)?\s*\}|\{?\s*([a-z]+)\s*\}?)'
)
_BASES = {
  'two': 2, 'three': 3, 'four': 4, 'five': 5, 'six': 6, 'seven': 7, 'eight': 8,
  'nine': 9, 'ten': 10, 'twelve': 12, 'sixteen': 16,
}  # fmt: skip
_WORDS = (
  'zero one two three four five six seven eight nine ten eleven twelve thirteen'
  ' fourteen fifteen sixteen seventeen eighteen nineteen twenty'
).split()
# Ways to set a text that say nothing, and spellings of one thing.
_SPELLINGS = tuple(
  (re.compile(pattern), other)
  for pattern, other in (
    (r'\\(?:text)?color\s*\{\w+\}', ''),
    (r'\\(?:tag|hspace|vspace)\*?\s*\{[^{}]*\}', ''),
    (
      r'\\(?:tiny|small|normalsize|large|Large|LARGE|huge|Huge|displaystyle'
      r'|textstyle|limits|checkmark|therefore|blacksquare)(?![a-zA-Z])',
      ' ',
    ),
    (r'\\[bB]igg?[lrm]?(?![a-zA-Z])', ''),
    (r'\\left\s*\.|\\right\s*\.', ''),
    (r'\\underline\s*\{((?:[^{}]|\{[^{}]*\})*)\}', r'\1'),
    (
      r'\\(?:text|textbf|textit|mathrm|mathbf|boldsymbol|bm|mbox|mathit|mathsf)'
      r'\s*\{((?:[^{}a-zA-Z]|\\[dt]?frac|\{\d*\})*)\}',
      r'\1',
    ),
    (r'\{(\\times|\\cdot|:|=)\}', r' \1 '),
    (r'\\!', ''),
    (r'\\colon(?![a-zA-Z])', ':'),
    (r'(?<=\d)\s*:\s*(?=\d)', ':'),
    (r'\\lbrace(?![a-zA-Z])', r'\\{'),
    (r'\\rbrace(?![a-zA-Z])', r'\\}'),
    (r'\\\{\s*\\\}', r'\\emptyset '),
    (r'\\\\\s*\[\s*\d+\s*(?:mm|cm|pt|em|ex)\s*\]', r'\\\\'),
    (r'\\degree(?![a-zA-Z])|\u00ba', r'^\\circ'),
    (
      r'\\operatorname\s*\{(arcsin|arccos|arctan|sin|cos|tan|ln|log|exp)\}',
      r'\\\1 ',
    ),
    (r'\\(?:text|mathrm)\s*\{\s*pi\s*\}', r'\\pi '),
    (r'\\(?:nice|s)frac(?![a-zA-Z])', r'\\frac'),
    (r'\\sqrt\s*\[([^\[\]{}]+)\]\s*(\d)', r'\\sqrt[\1]{\2}'),
    (r'(?<=\d)\((\d+)\)$', r'\\cdot \1'),
    (r'^\((\d+)\)\((\d+)\)$', r'\1\\cdot \2'),
    (
      r'^\\(?:text|textbf|mathrm)\s*\{\s*(?:[Tt]he\s+)?(?:[Ff]inal\s+)?[Aa]nswer'
      r'(?:\s+is)?\s*:?\s*\}',
      '',
    ),
  )
)
# The words between are spaces; 1 1/2 is no eleven halves.
_MIXED = re.compile(
  r'(?<![\d.,/}^_])(\d{1,9})\s+(\d{1,9})\s*/\s*(\d{1,9})(?![\d.,])'
)
_MIXED_FRAC = re.compile(
  r'(?<![\d.,/}^_\w])(\d{1,9})\s*\\[dt]?frac\s*(?:\{\s*(\d{1,9})\s*\}\s*'
  r'\{\s*(\d{1,9})\s*\}|(\d)\s*(\d))(?=\s*(?:\\?%|$))'
)
_THOUSANDS = re.compile(
  r'(?<![\d.,])\d{1,3}(?:(?:[ \u00a0\u202f\u2009]|\\ )\d{3})+(?![\d])'
)
_WRAPPED = re.compile(r'\\(?:text|mathrm|mbox)\s*\{[^{}]*\}')
_TEXT = r'\\(?:text|mathrm|mbox)\s*\{([^{}]*)\}'
# Upright or bold letters that are no units: e and i, and vectors.
_UPRIGHT = re.compile(r'\\(?:mathrm|operatorname|text|rm)\s*\{\s*([ei])\s*\}')
_BOLD = re.compile(
  r'\\(?:mathbf|boldsymbol|bm|vec|hat|mathsf)\s*\{?\s*'
  r'(?:\\(?:mathbf|boldsymbol|bm)\s*\{\s*)?(\\imath|\\jmath|[ijk])\s*\}{0,2}(?![a-zA-Z])'
)
_BOLD_LETTER = re.compile(r'\\(?:mathbf|boldsymbol|bm)\s*\{([a-zA-Z])\}')
_SET_BOLD = re.compile(r'\\(?:mathbf|boldsymbol|bm)\s*\{([^{}\\a-z]*|[a-z])\}')
_ROOT = re.compile(r'\\sqrt\s*\(([^()]*)\)')
_PRIMES = re.compile(
  r"(\d+|[a-zA-Z)}\]])((?:'|\u2019|\u2032|\^\s*\{?\s*(?:\\prime\s*)+\}?)+)"
)
_SIGN_OF_TRANSPOSE = (
  r'(?:(?:\\top|\\intercal)(?![a-zA-Z])'
  r'|\\(?:mathsf|mathrm|text|rm)\s*\{?\s*T\s*\}?|T)'
)
_TRANSPOSED = re.compile(
  r'(?<![a-zA-Z\\])([A-Za-df-z)]|\\(?:vec|mathbf|bm)\s*\{[a-zA-Z]\})\s*\^\s*'
  rf'(?:\{{\s*{_SIGN_OF_TRANSPOSE}\s*\}}|{_SIGN_OF_TRANSPOSE})'
)
_TENS = {
  'hundred': 2, 'thousand': 3, 'k': 3, 'million': 6, 'billion': 9,
  'trillion': 12,
}  # fmt: skip
_WORD_OF_TEN = re.compile(
  r'(?<=[\d}])(?:\s|\\[,;:! ]|~)*(?:\\(?:text|mathrm|mbox)\s*\{\s*'
  r'(hundred|thousand|million|billion|trillion|k)(?![a-zA-Z])([^{}]*)\}'
  r'|(?<=\s)(hundred|thousand|million|billion|trillion)(?![a-zA-Z]))'
)
_COUNTED = re.compile(
  r'\\(?:text|mathrm|mbox)\s*\{\s*([-\d.,/]*\d)\s+([^{}]*)\}'
)
_SMALL = re.compile('[\u2070\xb9\xb2\xb3\u2074-\u2079\u207b\u207f]+')
_SIGNS = {
  '\u00d7': r'\times ', '\u00b7': r'\cdot ', '\u22c5': r'\cdot ',
  '\u00f7': r'\div ', '\u221e': r'\infty ', '\u2264': r'\le ',
  '\u2265': r'\ge ', '\u222a': r'\cup ', '\u2229': r'\cap ',
  '\u2208': r'\in ', '\u2205': r'\emptyset ', '\u03c0': r'\pi ',
}  # fmt: skip
_ROOT_SIGN = re.compile(
  '\u221a\\s*(?:\\(([^()]*)\\)|\\{([^{}]*)\\}|(\\d+|[a-zA-Z]))'
)
_QUOTIENT = re.compile(
  r'\\[dtc]?frac\s*\{\s*(?:d|\\partial)\s*(?:\^\s*\{?\s*(\d)\s*\}?)?\s*([a-zA-Z]?)'
  r'[^{}]{0,20}\}\s*\{\s*(?:d|\\partial)\s*([a-zA-Z])'
)
_VECTOR = re.compile(r'\\(?:vec|mathbf|boldsymbol|bm|hat|nabla)(?![a-zA-Z])')
_LETTER = re.compile(r'(?<![\\^{a-zA-Z])[a-zA-Z]|(?<!\^)\{[a-zA-Z]\}')
_NABLA = re.compile(r'\\nabla\s*(?:\\cdot|\\times)(?![a-zA-Z])')
_DOTS = re.compile(r'\\(?:[ldc]?dots|vdots)(?![a-zA-Z])|\u2026|\.\.\.')


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
  text = _with_commands(text)
  for pattern, other in _SPELLINGS:
    text = pattern.sub(other, text)
  text = _THOUSANDS.sub(lambda one: re.sub(r'[^\d]', '', one[0]), text.strip())
  text = _MIXED.sub(_improper, text)
  text = _MIXED_FRAC.sub(_improper, text)
  if found := _COUNTED.fullmatch(text):
    text = rf'{found[1]}\text{{ {found[2]}}}'
  text = _WORD_OF_TEN.sub(_power_of_ten, text)
  if found := _SCIENTIFIC.fullmatch(text):
    return rf'{found[1]} \cdot 10^{{{int(found[2])}}}'
  word = re.fullmatch(rf'{_TEXT}|([a-zA-Z]+)', text)
  if word and (name := (word[1] or word[2] or '').strip().lower()) in _WORDS:
    return str(_WORDS.index(name))
  text = _UPRIGHT.sub(r'\1', text)
  text = _BOLD.sub(_vector, text)
  if '\\times' in text:  # a cross product, it may be
    text = _BOLD_LETTER.sub(r'\\vec{\1}', text)
  text = _SET_BOLD.sub(r'\1', text)
  text = _PRIMES.sub(lambda one: one.group(1) + "'" * _primes(one), text)
  text = _TRANSPOSED.sub(r'\1^{T}', text)
  text = _ROOT.sub(r'\\sqrt{\1}', text)
  text = _FUNCTION.sub(r'\1' + _RADIANS % r'\2', text)
  return _REPEATING.sub(_fraction, text)


def convert(text: str) -> str:
  r"""A text with angles in radians, or with its number in base ten.

  That is another reading: 30^\circ answers what 30 answers, too, and the number
  of a base what its digits alone answer.

  >>> convert('10110_2'), convert(r'90^\circ')
  ('22', '{\\frac{90\\pi}{180}}')

  Args:
    text: An answer.

  Returns:
    The text, with these replaced.
  """
  if (value := based(text)) is not None:
    return str(value)
  return _ANGLE.sub(_RADIANS % r'\1', text)


def based(text: str) -> int | None:
  r"""The value of a number with a base from 2 to 36; None for anything else.

  >>> based('101_2'), based(r'1\text{A}_{16}'), based('x_2')
  (5, 26, None)

  Args:
    text: an answer.
  """
  plain = re.sub(r'\\(?:text|mathrm)\s*\{([^{}]*)\}', r'\1', text)
  found = _IN_BASE.fullmatch(''.join(plain.split()))
  if found is None or not re.search('[0-9]', found[1]) or len(found[1]) > 100:
    return None
  base = int(found[2] or found[3] or _BASES.get(found[4], 0))
  digits = found[1].lower()
  if 2 <= base <= 36 and all(int(digit, 36) < base for digit in digits):
    return int(digits, base)
  return None


def marks(text: str) -> tuple[tuple[str, int], ...]:
  r"""What of a text math-verify does not see.

  It takes f'(x) for f(x), A^T for A, dy/dx for 0, and 5 \ldots for 5.

  >>> marks("f''(x) + g"), marks('A^T')
  ((('f', 2),), (('A', -1),))

  Args:
    text: An answer.

  Returns:
    Each letter that is derived, with its number of primes; that is transposed,
    with -1; quotients of differentials with their order; and dots.
  """
  found = [
    (one.group(1), _primes(one))
    for one in _PRIMES.finditer(_WRAPPED.sub('', text))
  ]
  found += [(one.group(1), -1) for one in _TRANSPOSED.finditer(text)]
  found += [
    (f'{one.group(2)}/{one.group(3)}', int(one.group(1) or 1))
    for one in _QUOTIENT.finditer(text.replace('\\mathrm{d}', 'd'))
  ]
  found += [('...', 0) for _ in _DOTS.finditer(text)]
  if _TRANSPOSED.search(text) or (_VECTOR.search(text) and '\\times' in text):
    # Here a product has an order.
    terms = re.split(r'[-+=,]', ''.join(text.split()))
    found += [(one, 0) for one in terms if len(_LETTER.findall(one)) > 1]
  found += [(one.group(0), 0) for one in _NABLA.finditer(text)]
  return tuple(sorted(found))


def _primes(found: re.Match[str]) -> int:
  return len(re.findall(r"'|\u2019|\u2032|\\prime", found.group(2)))


def _with_commands(text: str) -> str:
  """A text with the commands of LaTeX for signs that have some."""
  if text.isascii():
    return text
  text = re.sub('^\\s*\u2013', '-', text).replace('\u2044', '/')
  text = _ROOT_SIGN.sub(
    lambda one: rf'\sqrt{{{one[1] or one[2] or one[3] or ""}}}', text
  )
  text = _SMALL.sub(_shared.as_power, text)
  for character, (above, below) in _shared.FRACTIONS.items():
    text = text.replace(character, rf'\frac{{{above}}}{{{below}}}')
  for character, command in _SIGNS.items():
    text = text.replace(character, command)
  return text


def _improper(found: re.Match[str]) -> str:
  """A mixed number as one fraction."""
  whole, *rest = (int(part) for part in found.groups() if part is not None)
  above, below = rest
  if not 0 < above < below:
    return found.group()
  return rf'\frac{{{whole * below + above}}}{{{below}}}'


def _power_of_ten(found: re.Match[str]) -> str:
  rest = rf'\text{{{found[2]}}}' if (found[2] or '').strip() else ''
  return rf' \cdot 10^{{{_TENS[found[1] or found[3]]}}}{rest}'


def _vector(found: re.Match[str]) -> str:
  letter = found.group(1).replace('\\imath', 'i').replace('\\jmath', 'j')
  return rf'\vec{{{letter}}}'


def _fraction(found: re.Match[str]) -> str:
  """A decimal that repeats, as a fraction."""
  whole, fixed, period = found.groups()
  number = int(whole + fixed + period) - int((whole + fixed) or 0)
  divisor = '9' * len(period) + '0' * len(fixed)
  return rf'{{\frac{{{number}}}{{{divisor}}}}}'


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


def drop_name(wanted: str, found: str) -> tuple[str, str]:
  r"""Two answers, without the name of a value that only one of them gives.

  >>> drop_name('3x^2', "f'(x) = 3x^2"), drop_name('x=1', 'y=1')
  (('3x^2', '3x^2'), ('x=1', 'y=1'))

  Args:
    wanted: an answer.
    found: another one.
  """
  texts = [_turn_around(wanted), _turn_around(found)]
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


def _turn_around(text: str) -> str:
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
  sets = [_solve(part) for part in parts[::2]]
  letters = {one[0] for one in sets if one}
  if None in sets or len(letters) != 1:
    return text
  (letter,) = letters
  return rf'{letter}\in ' + r'\cup '.join(one[1] for one in sets if one)


def _solve(text: str) -> tuple[str, str] | None:
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
