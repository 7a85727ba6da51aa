"""Reward functions that come with the package."""

import re
from typing import Any


def exact_match(prompt: str, completion: str, example: dict[str, Any]) -> float:
  """1 if the completion is the reference answer, else 0.

  White space at both ends does not count. An answer that is not a string is
  compared by the text that `str` makes of it.

  >>> exact_match('47+85=', '231', {'answer': '231'})
  1.0

  Args:
    prompt: is not used.
    completion: the text that was sampled.
    example: the record of the data source; its 'answer' is the reference.

  Returns:
    1.0 or 0.0.

  Raises:
    ValueError: the record has no field 'answer'.
  """
  del prompt
  return float(completion.strip() == _answer('exact_match', example).strip())


def _answer(reward: str, example: dict[str, Any]) -> str:
  """The reference answer, or a ValueError in the name of a reward."""
  if 'answer' not in example:
    raise ValueError(
      f"{reward} requires the field 'answer', but the example has the"
      f' fields {sorted(example)}; set config.data.answer_field to the field'
      ' that holds the answer.'
    )
  return str(example['answer'])


_NUMBER = re.compile(r'-?\d[\d,]*(?:\.\d+)?')


def last_number(prompt: str, completion: str, example: dict[str, Any]) -> float:
  """1 if the last number of the completion is the last of the answer, else 0.

  The answers of GSM8K end in the number that counts, behind '####'. Commas in
  numbers do not count, nor do zeros behind the point.

  >>> last_number('', 'That makes $1,200.', {'answer': '12 * 100 #### 1200'})
  1.0

  Args:
    prompt: is not used.
    completion: the text that was sampled.
    example: the record of the data source; its 'answer' is the reference.

  Returns:
    1.0 or 0.0; 0.0 for a completion without a number.

  Raises:
    ValueError: the record has no field 'answer', or no number in it.
  """
  del prompt
  wanted = _last_number(_answer('last_number', example))
  if wanted is None:
    raise ValueError(
      f'last_number requires a number in the answer, but the example has'
      f' {example["answer"]!r:.80}; give another reward, or correct the record.'
    )
  return float(_last_number(completion) == wanted)


def _last_number(text: str) -> float | None:
  found = _NUMBER.findall(text)
  return float(found[-1].replace(',', '')) if found else None


def boxed_text(prompt: str, completion: str, example: dict[str, Any]) -> float:
  r"""1 if the last \boxed{} of completion and answer are the same text, else 0.

  White space and dollar signs do not count. Texts that mean the same but are
  written differently, such as 1/2 and \frac12, are not equal. An answer without
  a box is taken whole.

  >>> boxed_text('', r'So it is \boxed{\frac12}.', {'answer': r'\frac12'})
  1.0

  Args:
    prompt: is not used.
    completion: the text that was sampled.
    example: the record of the data source; its 'answer' is the reference.

  Returns:
    1.0 or 0.0; 0.0 for a completion without a box.

  Raises:
    ValueError: the record has no field 'answer'.
  """
  del prompt
  answer = _answer('boxed_text', example)
  wanted = _boxed(answer)
  wanted = answer if wanted is None else wanted
  found = _boxed(completion)
  return float(found is not None and _bare(found) == _bare(wanted))


def _boxed(text: str) -> str | None:
  r"""What the last \boxed{} holds, with the braces inside it; None: no box."""
  start = text.rfind('\\boxed{')
  if start < 0:
    return None
  start += len('\\boxed{')
  depth = 1
  for place, character in enumerate(text[start:], start):
    depth += (character == '{') - (character == '}')
    if not depth:
      return text[start:place]
  return None


def _bare(text: str) -> str:
  return ''.join(text.split()).replace('$', '')
