"""Completions that a regular expression describes."""

import functools
import re

# The only way to see what an expression repeats.
from re import _parser as syntax  # pyright: ignore[reportAttributeAccessIssue]
from typing import Any

from grpo_jax.rewards import _marks
from grpo_jax.rewards.verifiers import _shared

_MOST_REPEATS = 4  # 2 to this power is still few ways


def _check(regex: str, full: bool = False, flags: str = '') -> None:
  del full
  _compiled(regex, flags)


@_marks.checked(_check)
def regular_expression(
  prompt: str,
  completion: str,
  example: dict[str, Any],
  *,
  regex: str,
  full: bool = False,
  flags: str = '',
) -> float:
  r"""1 if a regular expression matches the completion, else 0.

  Python's matcher tries every way to divide a text. If a part that is repeated
  may itself have several lengths, as in (a+)+, (a{1,3})* or (a|bc)*, these ways
  can be exponentially many. So such an expression is refused, unless the inner
  part is possessive or atomic, as in (a++)+, (a{1,3}+)* or (?>a|bc)*. An
  expression with repetitions side by side, such as .*a.*b.*c, still takes a
  time that grows with a power of the length. So does a single one, because a
  match is sought from every place: \d+x takes 20 seconds for 100,000 digits,
  and (?<!\d)\d++x a hundredth of one. The time limit of the reward ends it. A
  completion of more than 100,000 characters has reward 0.

  >>> regular_expression('', 'It is 42.', {}, regex=r'\b\d+\.$')
  1.0
  >>> regular_expression('', 'It is 42.', {}, regex=r'\d+', full=True)
  0.0

  Args:
    prompt: is not used.
    completion: the text that was sampled.
    example: is not used.
    regex: the expression, in the syntax of Python's module `re`.
    full: whether it must match the whole completion, and not just a part.
    flags: letters of `re`: 'i' for any case, 'm' for ^ and $ at every line, 's'
      for a point that matches line ends, 'x' for comments, 'a' for ASCII.

  Returns:
    1.0 or 0.0.

  Raises:
    ValueError: the expression is not valid, or may take exponential time; or
      a flag is unknown.
  """
  del prompt, example
  compiled = _compiled(regex, flags)
  if len(completion) > _shared.MOST_CHARACTERS:
    return 0.0
  match = compiled.fullmatch if full else compiled.search
  return float(match(completion) is not None)


@functools.lru_cache(maxsize=64)
def _compiled(regex: str, flags: str) -> re.Pattern[str]:
  unknown = sorted({*flags} - {*'imsxa'})
  if unknown:
    raise ValueError(
      f'flags of the reward regular_expression are {flags!r}, but'
      f" {', '.join(unknown)} is unknown; give letters of 'imsxa'."
    )
  bits = functools.reduce(
    lambda bits, letter: bits | getattr(re, letter.upper()), flags, 0
  )
  try:
    compiled = re.compile(regex, bits)
    nested = _is_ambiguous(syntax.parse(regex, bits), False)
  except (re.error, RecursionError, OverflowError) as error:
    raise ValueError(
      f'regex of the reward regular_expression is {regex!r:.80}, which is not'
      f' valid: {error}; correct it.'
    ) from error
  if nested:
    raise ValueError(
      f'regex of the reward regular_expression is {regex!r:.80}, which repeats'
      ' a part that may have several lengths; it can take exponential time.'
      ' Make the inner part possessive or atomic, as in (a++)+ or (?>a|bc)*.'
    )
  return compiled


def _is_ambiguous(item: Any, repeated: bool) -> bool:
  """Whether a repeated part of a parsed expression may have several lengths."""
  if isinstance(item, syntax.SubPattern):
    return any(_is_ambiguous(one, repeated) for one in item)
  if not isinstance(item, tuple | list):
    return False
  kind = str(item[0]) if item and isinstance(item, tuple) else ''
  if kind in ('ATOMIC_GROUP', 'POSSESSIVE_REPEAT'):
    # What has matched is not divided anew; what is inside still may be.
    return _is_ambiguous(item[1], False)
  if kind in ('MAX_REPEAT', 'MIN_REPEAT'):
    low, high, body = item[1]
    if repeated and low != high:
      return True
    return _is_ambiguous(body, repeated or int(high) > _MOST_REPEATS)
  if kind == 'BRANCH' and repeated:
    return True
  return any(_is_ambiguous(one, repeated) for one in item)
