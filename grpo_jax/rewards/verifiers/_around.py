r"""What may stand around a number that is an answer.

A number is an answer where nothing goes on with it: 72 is one in '72 clips' and
'$72.', and none in '72k', '72²' and '72+1'. What may follow is listed here, so
that whatever nobody has thought of ends no number.
"""

import re

_CURRENCY = '$\u20ac\u00a3\u00a5\u20b9\u20a9\u00a2'
_CJK = '\u3040-\u9fff\uac00-\ud7af'
_THOUSANDS = '\u5341\u767e\u5343\u4e07\u842c\u4ebf\u5104\u5146'  # of Chinese
# Words that make another number of the one before them.
_CHANGES = frozenset(
  'hundred hundreds thousand thousands million millions billion billions'
  ' trillion trillions dozen dozens score k mil mill mio mln mn bn bln mrd tn'
  ' squared cubed factorial divided multiplied mod modulo choose halves thirds'
  ' quarters gross sin cos tan cot sec csc log ln lg exp sqrt pi'.split()
)
# These do so before another number, or before a letter.
_JOINS = frozenset('plus minus times over to x'.split())
# Words in front of a number in a box that make another of it, or bound it.
_DENIES = _CHANGES | frozenset(
  'less more greater fewer least most over under above below between not no'
  ' never than minus negative half twice double plus times from up without'
  ' except or and'.split()
)
# What may follow a number without a space, beside whole words.
_SHORT_UNITS = frozenset(
  'mm cm dm m km in ft yd yds mi mg g kg lb lbs oz ml mL cl dl l L s sec secs'
  ' ms min mins h hr hrs am pm mph kph kmh rpm Hz kHz MHz GHz W kW MW kWh V kV'
  ' A mA N kN J kJ Pa kPa hPa cc sqft pt pts pcs cal kcal GB MB kB TB st nd rd'
  ' th'.split()
)
_LETTERS = frozenset('aAIgmshlLNJWVCF')  # units and words, behind a space

_WORD = re.compile(r"[^\W\d_]+(?:['\u2019][^\W\d_]+)?")
_HYPHENED = re.compile(r'[a-zA-Z]+(?:[-\u2010\u2011][a-zA-Z]+)*')
_OPERAND = re.compile(r'\s*[-\u2212(\\$]*\s*(?:\d|[a-zA-Z](?![a-zA-Z]))')
_PART = re.compile(
  r'\s+(?:(?:a|an|one|two|three)\s+)?(?:half|third|quarter|fourth|fifth|tenth)'
)
_TO_THE = re.compile(r'\s+the\s+(?:\S+\s+){0,2}power\b')
# A power or a quotient may stand on the next line.
_GOES_ON = re.compile(r'\s*+(?:[/^]\s*+\{?\s*+[-\u2212]?[0-9.]|\*\*[0-9])')
_SPACES = re.compile(
  r'(?:[^\S\n]|\\[,;:! ]|~|\\q?quad(?![a-zA-Z])|[\u200b\ufeff])++'
)
_SIGN = re.compile(  # directly behind the last digit, with or without a space
  rf"""
  (?:[^\S\n]|\\[,;:! ])*+ (?:\\%|%) (?!\s*[\w(])  # %, but not the modulo
  | % (?=\s+[a-zA-Z]{{2}})
  | [^\S\n]*+ \\?[{_CURRENCY}] (?![\d^])
  | \s*+ \^ \s*+ \{{?+ \s*+ \\circ \s*+ \}}?+ [CF]? (?!\w)  # degrees
  | (?:\s*[\u00b0\u00ba]|\\degree) [CF]? (?!\w)
  | [-\u2010\u2011] (?=[a-zA-Z]{{3}})  # 72-hour
  | / (?=[a-zA-Z]{{2}}|[hsdl](?!\w))  # 72/hour
  | (?![{_THOUSANDS}]) [{_CJK}]
  """,
  re.VERBOSE,
)
_TEXT = re.compile(
  r'(?:[^\S\n]|\\[,;:! ]|~)*+'
  r'\\(?:text|textbf|textit|mathrm|mbox|operatorname)\s*\{([^{}]{0,80})\}'
)
_POWER = re.compile(r'\s*+(?:\^\s*+\{?+\s*+-?[123]\s*+\}?|[\u00b2\u00b3])')
_STOPS = r',;?\u2026\u3002\uff0c\u3001\uff1b\uff1f\uff01\u0964'
_CLOSERS = re.compile(
  rf"""(?:
    [{_STOPS}] | [.:\uff1a] (?!\d) | ! (?![\w=!])
    | ["'\u2019\u201d\u00bb`)\]}}|$\u3011\u300d\u300f\uff09]
    | \\[)\]$}}] | \\\\ | \\right\b \s* (?:\\?[)\]}}|.])
    | \*{{1,3}} (?!\w) | _{{1,2}} (?!\w)  # Markdown
    | </? [a-zA-Z][^<>]{{0,40}} > | <\| [^<>|]{{0,40}} (?:\|>)?
  )++""",
  re.VERBOSE,
)
# Behind a sentence's end a word may follow without a space; '72.Next'.
_STUCK = re.compile(
  rf"""(?<=[.!:{_STOPS}]) ["'(]*[^\W\d_] | \\n (?![a-z]) | [{_CJK}]""", re.X
)
_AFTER = re.compile(
  rf"""
  \Z | \d (?!\d*\s*[/\u2044]\s*\d)  # another number, but no mixed one
  | ["'\u201c\u2018\u300c`#&@|=\u2248\u2192\u21d2] | -> | < (?=[/|a-zA-Z])
  | [(\[{{] (?=\s*(?:[^\W\d_]{{2}} | \d | \\?[{_CURRENCY}] | \\text))
  | [-\u2013\u2014]{{1,3}} (?=\s*(?:[^\W\d_]{{2}} | [aAI]\s) | \s*\Z)
  | (?:[*_]{{2,3}} | _) (?=[^\W\d_]{{2}} | \d | \s | \Z) (?![*_]*\s*\d*\s*[*])
  | \* (?=[^\W\d_]{{2}} | \s*(?:\n | \Z | [^\W\d_]{{2}}))
  | [.,;:!?] (?=\s | \Z) | \\[)\]\\]
  | \\[(\[$] | \$ | \\(?:text|boxed|approx|to|(?:Long)?[Rr]ightarrow|implies
    |blacksquare|square|qed|checkmark|because|therefore) (?![a-zA-Z])
  | [\u2600-\u27bf\U0001f300-\U0001faff] (?!\s*\d) | [{_CJK}]
  """,
  re.VERBOSE,
)
_COMMANDS = (
  'text textbf textit textrm mathrm mathbf boldsymbol bm mbox boxed fbox left'
  ' big Big quad qquad approx to Rightarrow rightarrow Longrightarrow implies'
  ' iff therefore because item n t displaystyle space colon ensuremath'
).split()
# What makes a number behind it a part of something.
_INSIDE = re.compile(
  rf"""(?:
    (?: [\^/] \s* \{{? | (?:[^\W_][^\S\n]*|[)}}]) _\{{? | \}} \s* \{{ )
      [\s$]* [-\u2212]?
    | [0-9][eE][-+]? | [0-9)]\*\* | [0-9][.:] | [^\W_a-zA-Z0-9{_CJK}]
    | [0-9a-z)}}\]] [^\S\n]*
      (?:[\u00d7\u00b7\u22c5\u00f7\u2217] | \*(?!\*)) [^\S\n]*
    | (?:[0-9)}}\]] | (?<![a-zA-Z]) [b-hj-z]) [^\S\n]* \u00b1 [^\S\n]*
    | (?<![a-zA-Z]) [b-hj-z] [^\S\n]* [-+\u2212] [^\S\n]*
    | [0-9)] \( | (?i: (?<![a-zA-Z])
      (?:minus|negative|log|ln|lg|exp|sin|cos|tan|sqrt|half\sof|twice)) \s+
    | [\u2264\u2265\u2260] \s*
    | [0-9] \s* x \s*
    | [\u221a\u00b1\u2213] [\s({{]* | [a-zA-Z] \( \s* [-\u2212]?
    | [-\u2212] \s* [({{|]+ \s*
    | (?<![<\w/]) [a-zA-Z]\w{{0,20}} [^\S\n]*
      (?:[<>\u2264\u2265\u2260]|!=|[<>]=) [^\S\n]*
    | \\ (?!(?:{'|'.join(_COMMANDS)})(?![a-zA-Z])) [a-zA-Z]+ [*]?
      (?:\s*\[[^\[\]]{{0,9}}\])? \s* [({{]? \s* [-\u2212]?
  ) \\?[{_CURRENCY}]? \Z""",
  re.VERBOSE,
)


def ends(text: str, at: int) -> bool:
  """Whether a number that ends at a place of a text is not part of more.

  >>> ends('72 clips', 2), ends('72k', 2), ends('72 + 1', 2)
  (True, False, False)

  Args:
    text: any text.
    at: the place behind the last digit.

  Returns:
    Whether what follows is one of the things that may follow.
  """
  if _GOES_ON.match(text, at):
    return False
  if sign := _SIGN.match(text, at):
    at = sign.end()
  is_hyphened = bool(sign and sign.group() in '-\u2010\u2011')
  attached = (_HYPHENED if is_hyphened else _WORD).match(text, at)
  if attached and not (sign and sign.group() in '-/\u2010\u2011'):
    if not _is_attached(text, attached):
      return False
  at = attached.end() if attached else at
  while unit := _TEXT.match(text, at):
    if any(map(_changes, unit.group(1).lower().split())):
      return False
    at = unit.end()
    at = power.end() if (power := _POWER.match(text, at)) else at
  if closers := _CLOSERS.match(text, at):
    at = closers.end()
  spaces = _SPACES.match(text, at)
  if at == len(text) or text.startswith('\n', at):
    return True
  if not spaces:
    return bool(_STUCK.match(text, at))
  return _may_follow(text, spaces.end())


def _is_attached(text: str, found: re.Match[str]) -> bool:
  """Whether letters directly behind a number are a unit or a word."""
  word, follows = found.group(), text[found.end() : found.end() + 1]
  if follows and follows in '(^_\u00b2\u00b3':
    return False
  if word in _SHORT_UNITS:
    return True
  if re.fullmatch(f'[{_CJK}]+', word):
    return word[0] not in _THOUSANDS
  return len(word) > 3 and word.islower() and not _changes(word)


def _changes(word: str) -> bool:
  return word.strip('.,') in _CHANGES


def _may_follow(text: str, at: int) -> bool:
  """Whether what stands behind a number and a space may stand there."""
  if at == len(text) or text.startswith('\n', at):
    return True
  word = _WORD.match(text, at)
  if not word:
    return bool(_AFTER.match(text, at))
  said = word.group().lower()
  if _changes(said) or text.startswith('(', word.end()):
    return False
  if said in _JOINS and _OPERAND.match(text, word.end()):
    return False
  if said == 'to' and _TO_THE.match(text, word.end()):
    return False
  if said in ('and', 'a', 'one') and _PART.match(
    text, at + 3 if said == 'and' else at - 1
  ):
    return False
  return len(said) > 1 or word.group() in _LETTERS


def begins(text: str, at: int) -> bool:
  """Whether a number that begins at a place of a text is not part of more.

  >>> begins('about 72', 6), begins('2^72', 2), begins('x < 72', 4)
  (True, False, False)

  Args:
    text: any text.
    at: the place of its sign or first digit.

  Returns:
    Whether it is no exponent, index, factor, denominator or bound.
  """
  return not _INSIDE.search(text[max(0, at - 40) : at])


_NAMES = (
  r'(?:[mcdk]?m|in|ft|yd|mi|s|sec|min|hr?|k?g|mol|units?|(?:centi|kilo|milli)?'
  r'met(?:er|re)s?|feet|foot|inch(?:es)?|yards?|miles?|seconds?)'
)
_POWERS = re.compile(
  r'((?<=[\s\d/{(~])'
  + _NAMES
  + r'\s*\}?)\s?\^\s?(?:\{\s?-?[1-4]\s?\}|-?[1-4](?!\d))'
)


def without_powers(text: str) -> str:
  r"""A text without the powers of units, whose digits are no numbers.

  >>> without_powers('72 cm^2'), without_powers('x^2')
  ('72 cm', 'x^2')

  Args:
    text: any text.
  """
  return _POWERS.sub(r'\1', text)


# In a box: what changes nothing, and what only says how a text is set.
_NOTHING = re.compile(
  r'\\(?:displaystyle|left|right|big|Big|limits)(?![a-zA-Z])|\\[()]'
  r'|\\(?:text)?color\s*\{\w+\}'
  r'|(?<!\\)\$|[\u200b\ufeff]'
)
_BLANK = re.compile(r'\\(?:[,;:! ]|q?quad(?![a-zA-Z]))|~')
_THIN = re.compile(r'(?<=\d)(?:\\[,;:! ]|\{,\})(?=\d{3}(?!\d))')
_SET = re.compile(
  r'\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|boldsymbol|bm|mbox|emph)'
  r'\s*\{([^{}]*)\}'
)
_DEGREES = re.compile(r'(?<!\s)\s*+\^\s*+\{?+\s*+\\circ\s*+\}?|\\degree')
_UNIT_POWER = re.compile(
  r'(?<=[a-zA-Z])\s*+(?:\^\s*+\{?+\s*+-?[123]\s*+\}?|[\u00b2\u00b3])'
)
_SIDES = re.compile(
  r'(?<![<>!\u2264\u2265])=|\u2248|\\(?:approx|simeq|doteq)\b'
)
_REMARK = re.compile(r'\([^\W\d_]{2,}[^\W\d_ ]*\)')
# Commas stand before three digits, in India before two as well: 7,2 is no 72.
_LISTED = re.compile(r',(?!(?:\d\d,)*\d{3}(?!\d))')
_OR_MORE = re.compile(
  r'\b(?:or\s+(?:more|less|fewer|greater|above|below|over|under)|and\s+up'
  r'|at\s+(?:least|most)|(?:more|less|fewer|greater)\s+than)\b'
)
_REST = re.compile(
  rf'[^\W\d_]|[\s.,;:?\'"*)}}\]/%\u00b0\u2019\u201d\-{_CURRENCY}\\]'
)


def stated(box: str, number: re.Pattern[str]) -> re.Match[str] | None:
  r"""The number that a box states, alone or with words and units around it.

  >>> plain = re.compile('[0-9]+')
  >>> stated(r'x = \text{about } 72\text{ cm}^2', plain).group()
  '72'
  >>> stated('x < 72', plain), stated('72x', plain), stated('71, 72', plain)
  (None, None, None)

  Args:
    box: what a box holds.
    number: matches a number with its sign.

  Returns:
    The match; None if the box holds anything else.
  """
  text = _THIN.sub('', _NOTHING.sub('', box))
  text = _UNIT_POWER.sub('', text)
  text = _DEGREES.sub('\u00b0', _BLANK.sub(' ', text))
  for _ in range(3):
    text = _SET.sub(r' \1 ', text)
  *others, text = _SIDES.split(_UNIT_POWER.sub('', text))
  if others and re.fullmatch(r'\s*[^\W\d_]?\s*', text):  # 72 = x
    text = others[-1]
  text = text.replace('\\$', '$').replace('\\%', '%').strip()
  found = number.search(text)
  if found is None or _LISTED.search(found.group().rstrip(',')):
    return None
  front = text[: found.start()]
  rest = _REMARK.sub('', text[found.end() :])
  words = _WORD.findall(front)
  if any(len(w) == 1 and w not in 'aA' or w.lower() in _DENIES for w in words):
    return None
  if _WORD.sub('', front).strip(' ({[*\'":+' + _CURRENCY):
    return None
  if _OR_MORE.search(rest):
    return None
  if rest and (rest[0] == '!' or _REST.sub('', rest) or '(' in rest):
    return None
  return found if ends(text, found.end()) else None
