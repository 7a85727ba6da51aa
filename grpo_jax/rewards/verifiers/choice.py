"""Multiple choice: the letter that a completion settles on."""

import functools
import re
from typing import Any

from grpo_jax.rewards import _marks
from grpo_jax.rewards.verifiers import _shared
from grpo_jax.rewards.verifiers import boxed

_STATEMENT = re.compile(
  r'\b(?:answer|choice|option)(?:\s+is\b|\s*:)', re.IGNORECASE
)
_DRESS = ' \t\r\n*_$#>"\'`'  # what may stand around a letter: Markdown, quotes
_WRAPPED = re.compile(r'\\(?:text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}')


def _check_choices(choices: str = 'ABCD') -> None:
  _patterns(str(choices))


@_marks.bounded
@_marks.checked(_check_choices)
def multiple_choice(
  prompt: str,
  completion: str,
  example: dict[str, Any],
  *,
  choices: str = 'ABCD',
) -> float:
  r"""1 if the completion settles on the letter of the answer, else 0.

  One place of the completion counts, the first of these that it has: the last
  \boxed{}, what follows the last 'answer is', 'answer:', 'choice is', 'option
  is' or the like, or the last line that is not empty. A letter must stand at
  the start of that place, alone or before a point, colon, bracket or comma and
  more text, as in 'B', '(B)', '**B.** Paris' or '\text{B}'. Two letters, as in
  'B or C', are no answer. Small letters count only where nothing follows them,
  because 'a' is a word. The last 100,000 characters are read.

  >>> multiple_choice('', 'So the answer is (B).', {'answer': 'B'})
  1.0
  >>> multiple_choice('', 'The answer is B or C.', {'answer': 'B'})
  0.0

  Args:
    prompt: is not used.
    completion: the text that was sampled.
    example: the record of the data source; its 'answer' is a letter, in
      brackets or not, or the number of a choice, counted from 0.
    choices: the letters that may be chosen, capitals.

  Returns:
    1.0 or 0.0; 0.0 for a completion that settles on no letter.

  Raises:
    ValueError: the record has no field 'answer', or the answer is none of the
      choices; or `choices` are not different capital letters.
  """
  del prompt
  _patterns(str(choices))
  answer = _shared.answer('multiple_choice', example)
  index = int(answer) if re.fullmatch('[0-9]{1,2}', answer) else len(choices)
  if index < len(choices):
    wanted = choices[index]
  else:
    wanted = _letter(answer, choices)
  if wanted is None:
    raise _shared.unusable(
      'multiple_choice', f'one of the choices {", ".join(choices)}', answer
    )
  return float(_letter(_place(_shared.end_of(completion)), choices) == wanted)


def _place(text: str) -> str:
  """The part of a completion that holds its answer."""
  if '\\boxed' in text:
    return boxed.last_box(text) or ''
  statement = _shared.last(_STATEMENT.finditer(text))
  if statement is not None:
    # The letter may stand on the next line, behind 'Answer:'.
    return _first_line(text[statement.end() :].lstrip(_DRESS))
  return _first_line(text.rstrip().rpartition('\n')[2])


def _first_line(text: str) -> str:
  return text.partition('\n')[0]


def _letter(text: str, choices: str) -> str | None:
  """The letter at the start of a text, unless a second one follows."""
  text = text[:1000].replace('\\(', '').replace('\\)', '')
  text = _WRAPPED.sub(r'\1', text).strip(_DRESS)
  # A small letter: nothing but brackets and a point around it.
  alone = re.fullmatch(r'[(\[]?\s*([A-Za-z])\s*[)\]]?[.:]?', text)
  if alone and alone.group(1).upper() in choices:
    return alone.group(1).upper()
  letter, another = _patterns(choices)
  found = letter.match(text)
  if not found:
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
    rf'[(\[]?([{choices}])(?=[)\]*.:,]|\s+(?:because|since|as|[-\u2013\u2014])\s)'
  )
  # 'B, C' and '(B) or (C)' are two letters; in 'C. Both A and B' the second is
  # no more than the text of the choice.
  another = re.compile(
    rf'[\s)\]*.:]*(?:,|/|&|and\b|or\b)[\s(\[*]*(?:(?:and|or)\s+)?[(\[*]*'
    rf"[{choices}](?![\w'])"
  )
  return letter, another
