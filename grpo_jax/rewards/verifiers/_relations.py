r"""Equations and inequalities: names of values, assignments, intervals."""

import re

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


def unnamed(wanted: str, found: str) -> tuple[str, str]:
  r"""Two answers, without the name of a value that only one of them gives.

  >>> unnamed('3x^2', "f'(x) = 3x^2"), unnamed('x=1', 'y=1')
  (('3x^2', '3x^2'), ('x=1', 'y=1'))

  Args:
    wanted: an answer.
    found: another one.
  """
  texts = [_turned(wanted), _turned(found)]
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


def _turned(text: str) -> str:
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
  sets = [_solved(part) for part in parts[::2]]
  letters = {one[0] for one in sets if one}
  if None in sets or len(letters) != 1:
    return text
  (letter,) = letters
  return rf'{letter}\in ' + r'\cup '.join(one[1] for one in sets if one)


def _solved(text: str) -> tuple[str, str] | None:
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
