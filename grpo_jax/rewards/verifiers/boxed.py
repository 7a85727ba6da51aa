r"""Answers in \boxed{}, compared as text."""

import re
from typing import Any

from grpo_jax.rewards import _marks
from grpo_jax.rewards.verifiers import _shared

_BOX = re.compile(r'\\boxed\s*\{')
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


@_marks.bounded
def boxed_text(prompt: str, completion: str, example: dict[str, Any]) -> float:
  r"""1 if the last \boxed{} of completion and answer are the same text, else 0.

  Of several boxes the last one counts, whatever the others hold; if the last
  box has no closing brace, there is no box. White space and dollar signs do not
  count. Texts that mean the same but are written differently, such as 1/2 and
  \frac12, are not equal; `math_equivalence` compares meanings. An answer
  without a box is taken whole. The last 100,000 characters are read.

  >>> boxed_text('', r'So it is \boxed{\frac12}.', {'answer': r'\frac12'})
  1.0

  Args:
    prompt: is not used.
    completion: the text that was sampled.
    example: the record of the data source; its 'answer' is the reference, or a
      list of which any counts.

  Returns:
    1.0 or 0.0; 0.0 for a completion without a box.

  Raises:
    ValueError: the record has no field 'answer', or the answer is empty.
  """
  del prompt
  answers = _shared.answers('boxed_text', example)
  wanted = [one for one in answers if _wanted(one)]
  if not wanted:
    raise _shared.unusable(
      'boxed_text', 'a text that is not empty', example['answer']
    )
  box = last_box(_shared.end_of(completion))
  if box is None:
    return 0.0
  found = bare(box)
  return float(
    any(found == _wanted(one) or _shared.is_value(found, one) for one in wanted)
  )


def _wanted(answer: _shared.Answer) -> str:
  box = last_box(answer.text)
  return bare(answer.text if box is None else box)


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
  opening = _BOX.match(text, start) if start >= 0 else None
  if opening is None:
    return None
  depth = 1
  for token in _BRACE.finditer(text, opening.end()):
    depth += {'{': 1, '}': -1}.get(token.group(), 0)
    if not depth:
      return text[opening.end() : token.start()]
  return None


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
