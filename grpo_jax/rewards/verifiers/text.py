r"""Answers compared as text: whole, or in the last \boxed{}."""

from typing import Any

from grpo_jax.rewards import _base
from grpo_jax.rewards.verifiers import _shared


@_base.bounded
def exact_match(prompt: str, completion: str, example: dict[str, Any]) -> float:
  """1 if the completion is the reference answer, else 0.

  White space at both ends does not count. An answer that is a number and no
  text is compared as a number: 72.0 is 72.

  >>> exact_match('47+85=', '231', {'answer': '231'})
  1.0

  Args:
    prompt: is not used.
    completion: the text that was sampled.
    example: the record of the data source; its 'answer' is the reference, or a
      list of which any counts.

  Returns:
    1.0 or 0.0.

  Raises:
    ValueError: the record has no field 'answer', or it is no text, number or
      list of these.
  """
  del prompt
  found = completion.strip()
  return float(
    any(
      found == one.text.strip() or _shared.is_value(found, one)
      for one in _shared.answers('exact_match', example)
    )
  )


@_base.bounded
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
  box = _shared.last_box(_shared.end_of(completion))
  if box is None:
    return 0.0
  found = _shared.bare(box)
  return float(
    any(found == _wanted(one) or _shared.is_value(found, one) for one in wanted)
  )


def _wanted(answer: _shared.Answer) -> str:
  box = _shared.last_box(answer.text)
  return _shared.bare(answer.text if box is None else box)
