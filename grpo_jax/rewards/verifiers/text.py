"""Completions that must be the reference, character by character."""

from typing import Any

from grpo_jax.rewards import _marks
from grpo_jax.rewards.verifiers import _shared


@_marks.bounded
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
  wanted = _shared.answer('exact_match', example)
  return float(completion.strip() == wanted.strip())
