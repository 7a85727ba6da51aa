"""Multiple choice: the letter that a completion settles on."""

import functools
import re
from typing import Any
import unicodedata

from grpo_jax.rewards import _base
from grpo_jax.rewards.verifiers import _shared

_MARK = r'[(\[{*_"\'`]*+'
_CLOSED = r'[)\]}*_"\'`]*+'
# What says which letter is meant. The letter comes behind it, but in the last
# alternative, where it comes first: 'B is correct'.
_NOUN = (
  r'(?:answer|ans|choice|option|selection|solution|result|response|pick|letter'
  r'|correct(?:\s+one)?|right\s+one|Antwort|respuesta|r[ée]ponse|risposta'
  r'|resposta|\u043e\u0442\u0432\u0435\u0442)'
)
_STATEMENT = re.compile(
  rf"""
  \b(?i: {_NOUN} (?:\s+(?:correcta|correcte|corretta|correta))? (?:
      \s+ (?:is|would\s+be|must\s+be|should\s+be|has\s+to\s+be|will\s+be
        |ist|es|est|\u00e8|\u00e9)\b
      (?:\s+(?:therefore|thus|then|clearly|indeed|la|le|die|der))?
    | [*_"']* \s* (?:[:=\uff1a]>? | [-=]> | \u2192 | [-\u2013\u2014](?=\s))
    | \s*\. (?=\s*{_MARK}[A-Z]{_CLOSED}\s*$) ) )
  | \b(?i:I|we|I'd|I'll|we'll|I\s+would|I\s+will|I\s+am|I'm|let's|let\s+us) \s+
    (?:therefore\s+|thus\s+|then\s+)?
    (?:choos(?:e|ing)|chose|pick(?:ing)?|select(?:ing)?|opt\s+for|say
      |settle\s+on|(?:go|going|am\s+going)\s+with)\b
  | (?: ^ | [.!?]\s | \b(?i:so|thus|therefore|hence|is|it's|be),?\s)
    [^\S\n]*+ [*_]*+
    (?i:choose|pick|select|option|choice|answer) \s+
    (?={_MARK}[A-Z]{_CLOSED}\s*
      (?:[.,;:!\-\u2013\u2014]|$|(?i:because|since|as)\b))
  | \b(?i:it\s+(?:is|must\s+be|has\s+to\s+be)|it's|that\s+leaves|so|thus|hence
      |therefore) [,:]? \s+
    (?={_MARK}[A-Z]{_CLOSED}[.!]?\s*$)
  | <answer> | [\u2705\u2234\u21d2]\ufe0f? (?=\s*{_MARK}[A-Z])
  | (?:\u7b54\u6848|\u7b54\u3048|\uc815\ub2f5) \s*
    (?:\u662f|\u4e3a|\u70ba|\u306f|\uc740|[:\uff1a])
  | \u6545?\u9009 \s* [:\uff1a]? (?=\s*[A-Z])
  | (?P<letter> (?<![\w(\[{{*"'`]) {_MARK}[A-Z]{_CLOSED} )
    \s++ is \s++ (?:the\s++)?
    (?:only\s++)? (?:correct|right|best|final|answer|true|option\b)
  """,
  re.VERBOSE | re.MULTILINE,
)
# In front of a statement: it says what is not the answer.
_NOT_MEANT = re.compile(
  r'\b(?i:incorrect|wrong|false|least[^\S\n]+\w+|second|worst|unlikely|not\s+the'
  r'|other|untrue)[^\S\n]+(?:\w+[^\S\n]+)?\Z'
)
_DENIED = re.compile(
  r'[\s)\]}*_"\'`]*+(?i:(?:is|are|was)\s+(?:not|never|wrong|incorrect|false'
  r"|the\s+(?:wrong|incorrect))\b|isn['\u2019]t\b|can(?:not|['\u2019]t)\b)"
)
_TAGS = re.compile(r'</?[a-z]{1,12}/?>|<\|[^<>|]{0,40}\|?>')
_SIGNS = re.compile('[\u2600-\u27bf\U0001f300-\U0001faff\u2234\ufe0f]')
_BRACED = re.compile(r'^\s*\{\s*(\w)\s*\}\s*$')
_SIZES = re.compile(
  r'\\(?:rm|bf|it|sf|tt|displaystyle|large|Large|LARGE|huge|Huge)(?![a-zA-Z])'
)
_SEVERAL = re.compile(
  r'(?:\b(?:n?or|and|neither|either|both|not)|[A-Z)*][,/&])\s*[(\[*]*$'
)
_DRESS = ' \t\r\n*_$#>"\'`:=-\u2192'  # what may stand in front of a letter
_WRAPPED = re.compile(
  r'\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathsf|mathit|boxed|mbox|fbox)'
  r'\s*\{([^{}]*)\}'
)
_NAMED = re.compile(
  r'(?i:(?:the\s+)?(?:correct\s+)?(?:option|choice|answer|letter)(?:\s+is\b)?)'
  r'[\s:*_]+(?=[(\[*_]*[A-Z](?![a-zA-Z]))'
)


def _check_choices(choices: str = 'ABCD') -> None:
  _patterns(str(choices))


@_base.bounded
@_base.checked(_check_choices)
def multiple_choice(
  prompt: str,
  completion: str,
  example: dict[str, Any],
  *,
  choices: str = 'ABCD',
) -> float:
  r"""1 if the completion settles on the letter of the answer, else 0.

  One place of the completion counts, the first of these that it has: the last
  \boxed{}; the last statement, as 'answer is', 'answer:', 'option B', 'I choose
  B' or 'B is correct'; or the last line that is not empty. A letter must stand
  at the start of that place, alone or before a point, colon, bracket or comma
  and more text, as in 'B', '(B)', '**B.** Paris' or '\text{B}'. Two letters, as
  in 'B or C', are no answer, nor is a list of the choices. Small letters count
  only where nothing follows them, because 'a' is a word. The last 100,000
  characters are read.

  >>> multiple_choice('', 'So the answer is (B).', {'answer': 'B'})
  1.0
  >>> multiple_choice('', 'The answer is B or C.', {'answer': 'B'})
  0.0

  Args:
    prompt: is not used.
    completion: the text that was sampled.
    example: the record of the data source; its 'answer' is a letter, in
      brackets or not, or the number of a choice, counted from 0; or a list of
      these, of which any counts.
    choices: the letters that may be chosen, capitals.

  Returns:
    1.0 or 0.0; 0.0 for a completion that settles on no letter.

  Raises:
    ValueError: the record has no field 'answer', or the answer is none of the
      choices; or `choices` are not different capital letters.
  """
  del prompt
  _patterns(str(choices))
  answers = _shared.answers('multiple_choice', example)
  wanted = {_wanted(one.text.strip(), choices) for one in answers} - {None}
  if not wanted:
    required = f'one of the choices {", ".join(choices)}'
    raise _shared.unusable('multiple_choice', required, example['answer'])
  return float(_find_letter(_shared.end_of(completion), choices) in wanted)


def _wanted(answer: str, choices: str) -> str | None:
  """The letter of a reference."""
  index = int(answer) if re.fullmatch('[0-9]{1,2}', answer) else len(choices)
  return choices[index] if index < len(choices) else _letter(answer, choices)


def _find_letter(text: str, choices: str) -> str | None:
  """The letter that a completion settles on."""
  if '\\boxed' in text:
    return _boxed(text, choices)
  statements = list(_STATEMENT.finditer(text))
  if not statements:
    return _last_line_letter(text, choices)
  statement = statements[-1]
  if _NOT_MEANT.search(text, max(0, statement.start() - 40), statement.start()):
    return None
  if statement['letter']:
    several = _SEVERAL.search(
      text[max(0, statement.start() - 20) : statement.start()]
    )
    said = {_letter(one['letter'] or '', choices) for one in statements}
    if len(said - {None}) > 2:
      return None
    return None if several else _letter(statement['letter'], choices)
  # The letter may stand on the next line, behind 'Answer:'.
  place = text[statement.end() :].lstrip(_DRESS + '\uff1a')
  line, _, rest = place.partition('\n')
  below = rest.lstrip().partition('\n')[0]
  letter = _letter(line, choices)
  if letter and _is_bare(line) and _is_bare(below):
    return None if _letter(below, choices) else letter  # a list goes on
  return letter


def _last_line_letter(text: str, choices: str) -> str | None:
  """The letter of the last line, unless it is one of a list."""
  lines = [line for line in text.rstrip()[-4000:].splitlines() if line.strip()][
    -2:
  ]
  if not lines or _lists(lines[-1], choices):
    return None
  letters = [_letter(line, choices) for line in lines]
  if len(lines) == 2 and None not in letters and letters[0] != letters[1]:
    # Two lines of one form are a list; behind a list a letter alone is none.
    if _is_bare(lines[0]) == _is_bare(lines[1]):
      return None
    before, own = (choices.index(str(letter)) for letter in letters)
    if own == before + 1:
      return None
  return letters[-1]


def _is_bare(line: str) -> bool:
  """Whether a line has one letter or digit."""
  return len(re.sub(r'[\W_]', '', line)) == 1


def _boxed(text: str, choices: str) -> str | None:
  """The letter of the last box, unless boxes beside it have others."""
  box = _shared.last_box(text)
  if box is None or _lists(box, choices):
    return None
  letter = _letter(_BRACED.sub(r'\1', box), choices)
  before = text[: text.rindex('\\boxed')]
  start = before.rfind('\\boxed')
  if start >= 0 and (opening := _shared.BOX.match(before, start)):
    inside, closed, between = before[opening.end() :].partition('}')
    near = closed and re.fullmatch(
      r'(?:[\s$,;/|&.)(\\]|and|or){0,20}', between[:21]
    )
    if near and _letter(inside, choices) not in (None, letter):
      return None
  return letter


def _lists(text: str, choices: str) -> bool:
  """Whether a text names choice after choice, as 'A. one B. two C. three'."""
  named = re.findall(
    rf'(?<![\w\\(\[*])[(\[*]*+([{choices}])[*]*+(?:[.):\]]|\s\()', text[:4000]
  )
  return len(named) > 2 and named == sorted(named) and len({*named}) > 2


def _letter(text: str, choices: str) -> str | None:
  """The letter at the start of a text, unless a second one follows."""
  text = text[:1000].replace('\\(', '').replace('\\)', '')
  text = _SIGNS.sub('', _SIZES.sub('', _TAGS.sub(' ', text)))
  for _ in range(2):
    text = _WRAPPED.sub(r'\1', text)
  text = unicodedata.normalize('NFKC', text).strip(_DRESS)
  text = _NAMED.sub('', text, count=1) if _NAMED.match(text) else text
  text = text.strip(_DRESS)
  # A small letter: nothing but brackets and a point around it.
  alone = re.fullmatch(r'[(\[]?\s*([A-Za-z])\s*[)\]]?[.:!;,]?', text)
  if alone and alone.group(1).upper() in choices:
    return alone.group(1).upper()
  letter, another = _patterns(choices)
  found = letter.match(text)
  if not found or _DENIED.match(text, found.end()):
    return None
  second = another.match(text[found.end() :])
  return None if second else found.group(1)


@functools.lru_cache(maxsize=64)
def _patterns(choices: str) -> tuple[re.Pattern[str], re.Pattern[str]]:
  """A letter with what stands around it, and a second one behind it."""
  if not re.fullmatch('[A-Z]+', choices) or len({*choices}) < len(choices):
    raise ValueError(
      f'choices of the reward multiple_choice are {choices!r:.80}, but'
      " different capital letters are required, as in 'ABCD'."
    )
  letter = re.compile(
    rf'[(\[]?\s*([{choices}])(?=\s*[)\]}}]|_(?![\w{{])|[*"`.:,;!\u3002\u3040-\u30ff\uac00-\ud7af]'
    r"|'(?![a-zA-Z0-9]|\s*\Z)"
    r'|\s+(?:because|since|as|which|with|where|due|given|not|[=(\-\u2013\u2014])'
    r'[\s\w($\\])'
  )
  # 'B, C', 'B. C.' and '(B) or (C)' are two letters; in 'C. Both A and B' and
  # 'B. A cat' the second is no more than the text of the choice.
  another = re.compile(
    rf'[\s)\]}}*_.:"\'`;(]*(?:(?:[,/&|+;=<>~]|and\b|or\b|also\b|maybe\b'
    r'|perhaps\b|possibly\b|no\b|wait\b|plus\b|as\s+well\s+as\b)[\s(\[*_]*)*'
    rf'(?:(?:and|or)\s+)?[(\[*_{{]*[{choices}]'
    r"(?:(?![\w'])(?!\s+[a-z])|(?=\s+(?:and|or)\b))"
  )
  return letter, another
