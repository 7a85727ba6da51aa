r"""The last answer of a completion that has no \boxed{}."""

import re

from grpo_jax.rewards.verifiers import _shared

_MOST = 1000  # characters from the end in which an answer is sought
_STATED = re.compile(
  r'\b(?:answer|result|solution|value|total)\b[*_]*'
  r'(?:\s+(?:is|would be|must be|equals)\b[*_]*\s*:?|\s*[:=]|[*_]*:)[*_]*',
  re.IGNORECASE,
)
_BOLD = re.compile(r'\*\*([^*\n]+)\*\*|__([^_\n]+)__')
_FORMULA = re.compile(
  r'\$\$(.+?)\$\$|\\\[(.+?)\\\]|\\\((.+?)\\\)|(?<![\\$])\$([^$\n]+)\$',
  re.DOTALL,
)
_NUMBER = re.compile(
  r'(?<![\w.])[-\u2212+]?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:\s*/\s*\d+)?(?:\s?\\?%)?'
)
_SENTENCE = re.compile(
  r'[.!?](?=\s|$)|\n|,?\s(?:not|because|since|which|where|so|as)\s'
)


def answer(text: str) -> str:
  r"""The last answer that a text states.

  The last one of these counts: what follows 'answer is', 'answer:' or the like,
  and what is set in bold type. Without either it is the last formula, or the
  last number.

  >>> answer('It is $4$. No: the answer is **$5$**.'), answer('So **72** it is')
  ('5', '72')

  Args:
    text: the end of a completion.

  Returns:
    The answer; '' if there is none.
  """
  text = text[-_MOST:]
  found = [
    (one.start(), _behind(text, one.end())) for one in _STATED.finditer(text)
  ]
  for one in _BOLD.finditer(text):
    inside = (one.group(1) or one.group(2)).strip()
    if _is_answer(inside):
      found.append((one.start(), _bare(inside)))
  found = [one for one in found if one[1]]
  if found:
    return max(found)[1]
  formula = _shared.last(_FORMULA.finditer(text))
  number = _shared.last(_NUMBER.finditer(text))
  if formula and (number is None or number.start() < formula.end()):
    return _inside(formula)
  if number is None or re.search(r'\bnot\s+$', text[: number.start()]):
    return ''
  return number.group().strip()


def _inside(formula: re.Match[str]) -> str:
  return next(part for part in formula.groups() if part is not None).strip()


def _behind(text: str, at: int) -> str:
  """The answer behind 'the answer is'."""
  rest = text[at:].lstrip(' \t\n*_:')
  line = rest.partition('\n')[0]
  formula = _FORMULA.search(
    line if '\\[' not in rest[:3] and '$$' not in rest[:3] else rest
  )
  if formula and len(line[: formula.start()].split()) < 4:
    return _inside(formula)
  ends = _SENTENCE.search(line)
  return _bare(line[: ends.start()] if ends else line)


def _is_answer(bold: str) -> bool:
  """Whether a bold text may be an answer, and not a heading."""
  if bold.endswith(':') or re.match(r'(?i)(?:step|part|case|note)\b', bold):
    return False
  if _STATED.search(bold):
    return False  # which is found as a statement
  return bool(re.search(r'\d|\\[a-z]|\$', bold)) or len(bold) == 1


def _bare(text: str) -> str:
  """A formula without bold type, dollar signs and what names it."""
  text = text.strip().strip('*_').strip()
  formula = _FORMULA.fullmatch(text)
  return (_inside(formula) if formula else text).strip(' *_.')
