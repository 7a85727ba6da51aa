r"""Words of an answer: what they change, and answers of words and numbers.

Most words behind a number only say what is counted. Some change the number, as
in '5 or more', and some have an opposite: 5 m to the left is not 5 m to the
right.
"""

import re

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
