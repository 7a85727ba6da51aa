"""Completions that must be the reference, character by character."""

from typing import Any

from grpo_jax.rewards import _marks
from grpo_jax.rewards.verifiers import _shared


@_marks.bounded
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
