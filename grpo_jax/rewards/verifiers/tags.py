"""The form of a completion: <think>...</think><answer>...</answer>."""

from collections.abc import Sequence
import functools
import re
from typing import Any
import unicodedata

from grpo_jax.rewards import _marks
from grpo_jax.rewards.verifiers import _shared

# Letters and signs without a shape: fillers of Hangul, and a blank of Braille.
_EMPTY = '\u115f\u1160\u3164\uffa0\u2800'


def _check(
  tags: Sequence[str] = ('think', 'answer'),
  allow_outside: bool = False,
  first_is_open: bool = False,
) -> None:
  del allow_outside, first_is_open
  _form(_names(tags))


@_marks.bounded
@_marks.checked(_check)
def format_tags(
  prompt: str,
  completion: str,
  example: dict[str, Any],
  *,
  tags: Sequence[str] = ('think', 'answer'),
  allow_outside: bool = False,
  first_is_open: bool = False,
) -> float:
  """1 if the completion consists of the tagged parts, in order, else 0.

  Every tag is opened once and closed once, in the order given, one part behind
  the other. No part is blank, nor made of characters that nobody sees. Between
  the parts, before the first and behind the last stands nothing but white
  space. Tags of other names count as text. A completion of more than 100,000
  characters has reward 0.

  >>> format_tags('', '<think>1+1</think> <answer>2</answer>', {})
  1.0
  >>> format_tags('', 'Well, <think>1+1</think><answer>2</answer>', {})
  0.0

  Args:
    prompt: is not used.
    completion: the text that was sampled.
    example: is not used.
    tags: the names of the tags, without angle brackets, all different.
    allow_outside: whether text may stand outside the parts.
    first_is_open: whether the prompt ends with the first opening tag, as some
      chat templates and `config.data.completion_prefix` have it. The completion
      must then not repeat it.

  Returns:
    1.0 or 0.0.

  Raises:
    ValueError: there are no tags, two are the same, or one is no name.
  """
  del prompt, example
  wanted, tag = _form(_names(tags))
  if len(completion) > _shared.MOST_CHARACTERS:
    return 0.0
  if first_is_open:
    completion = wanted[0] + completion
  pieces = tag.split(completion)
  if pieces[1::2] != wanted:
    return 0.0
  # Texts and tags alternate, and so do texts outside and inside the parts.
  texts = [text.strip() for text in pieces[::2]]
  outside, inside = texts[::2], texts[1::2]
  if not all(map(_is_seen, inside)):
    return 0.0
  return float(allow_outside or not any(outside))


def _names(tags: Any) -> str | tuple[Any, ...]:
  """The tags as what a cache can find."""
  return tags if isinstance(tags, str) else tuple(tags)


@functools.lru_cache(maxsize=64)
def _form(tags: str | tuple[Any, ...]) -> tuple[list[str], re.Pattern[str]]:
  """The tags of a completion in order, and what matches any of them."""
  # A string would be taken for its letters.
  names = () if isinstance(tags, str) else tags
  named = all(re.fullmatch(r'[\w-]+', str(name)) for name in names)
  if not names or not named or len({*map(str, names)}) < len(names):
    raise ValueError(
      f'tags of the reward format_tags are {tags!r:.80}, but a list of one or'
      " more different names is required, as in ('think', 'answer')."
    )
  wanted = [tag for name in names for tag in (f'<{name}>', f'</{name}>')]
  either = '|'.join(re.escape(str(name)) for name in names)
  return wanted, re.compile(f'(</?(?:{either})>)')


def _is_seen(text: str) -> bool:
  """Whether a text has a letter, a digit or a sign, unlike U+200B.

  >>> _is_seen('x'), _is_seen(' \\u200b\\x00')
  (True, False)
  """
  return any(
    unicodedata.category(character)[0] in 'LNPS' and character not in _EMPTY
    for character in text
  )
