"""What several verifiers need: the reference answer, and how much is read."""

from collections.abc import Iterable
from typing import Any
from typing import TypeVar

_Item = TypeVar('_Item')

# Characters of a completion that a verifier reads. 100,000 characters are about
# 25,000 tokens of English, and take a few milliseconds.
MOST_CHARACTERS = 100_000


def answer(reward: str, example: dict[str, Any]) -> str:
  """The reference answer.

  Args:
    reward: The name of the verifier, for the error message.
    example: The record of the data source.

  Returns:
    The text of the field 'answer'.

  Raises:
    ValueError: The record has no field 'answer'.
  """
  if 'answer' not in example:
    raise ValueError(
      f"{reward} requires the field 'answer', but the example has the"
      f' fields {sorted(example)}; set config.data.answer_field to the field'
      ' that holds the answer.'
    )
  return str(example['answer'])


def unusable(reward: str, required: str, given: Any) -> ValueError:
  """The error of a reference that a verifier cannot compare with.

  Args:
    reward: The name of the verifier.
    required: What it needs in the answer, as a noun.
    given: What the answer is.

  Returns:
    The error, to be raised.
  """
  return ValueError(
    f'{reward} requires {required} in the answer, but the example has'
    f' {given!r:.80}; give another reward, or correct the record.'
  )


def last(items: Iterable[_Item]) -> _Item | None:
  """The last item, or None; no more than one is kept in memory."""
  found = None
  for item in items:
    found = item
  return found


def end_of(completion: str) -> str:
  """The last `MOST_CHARACTERS` characters; answers stand at the end."""
  return completion[-MOST_CHARACTERS:]
