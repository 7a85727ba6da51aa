"""Sources made of other sources: joined, of a stage, without last turns.

A chat that ends with the assistant holds an answer, or its beginning. Files
for supervised fine-tuning hold whole chats, the answer included. A model that
reads the answer in its prompt learns nothing from its rewards, so the turn is
taken off the prompt, unless the data are meant to begin the completion.
"""

from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import itertools
from typing import Any

from grpo_jax.data import _messages
from grpo_jax.data._chat import is_by_assistant
from grpo_jax.data._chat import prompt_problem

FIELD = 'last_turn'  # of a record: the text that was taken off its prompt


@dataclasses.dataclass(frozen=True)
class Joined:
  """The records of several sources, one source after the other.

  >>> joined = Joined(['ab', 'c'])
  >>> len(joined), joined[1], joined[-1], list(joined)
  (3, 'b', 'c', ['a', 'b', 'c'])

  Args:
    sources: Objects with a length and items.
  """

  sources: Sequence[Any]

  def __len__(self) -> int:
    return sum(map(len, self.sources))

  def __getitem__(self, index: int) -> Any:
    source, place = self.part(index)
    return source[place]

  def part(self, index: int) -> tuple[Any, int]:
    """The source that holds a record, and the record's place in it."""
    place = range(len(self))[index]  # raises an IndexError past the end
    for source in self.sources:
      if place < len(source):
        return source, place
      place -= len(source)
    raise AssertionError

  def __iter__(self) -> Iterator[Any]:
    return itertools.chain.from_iterable(
      (source[place] for place in range(len(source))) for source in self.sources
    )


@dataclasses.dataclass(frozen=True)
class Stage:
  """A source as a run reads it at one point of its curriculum.

  Args:
    source: Has a method `drawn(index, number)`; see `prompt_stream`.
    number: How many records the run has drawn from it.
  """

  source: Any
  number: int

  def __len__(self) -> int:
    return len(self.source)

  def __getitem__(self, index: int) -> Any:
    return self.source.drawn(index, self.number)


def stages(source: Any) -> list[tuple[int, Any]]:
  """Every stage of a source, and where it begins.

  >>> stages(['a', 'b'])
  [(0, ['a', 'b'])]

  Args:
    source: One with a method `drawn` may say in `starts` at which numbers of
      records drawn its stages begin, the first at 0.

  Returns:
    For each stage how many records a run draws before it, and a source that
    reads by index in that stage. A source that does not say its stages is a
    single one, and is read by index as it is.
  """
  starts = getattr(source, 'starts', ())
  if not hasattr(source, 'drawn') or len(starts) < 2:
    return [(0, source)]
  return [(start, Stage(source, start)) for start in starts]


def without_last_turn(record: Mapping[str, Any]) -> Mapping[str, Any]:
  """A record whose prompt ends where the assistant is to answer.

  >>> chat = [{'role': 'user', 'content': '1+2='},
  ...         {'role': 'assistant', 'content': '3'}]
  >>> without_last_turn({'prompt': chat})
  {'prompt': [{'role': 'user', 'content': '1+2='}], 'last_turn': '3', \
'answer': '3'}

  Args:
    record: With 'prompt', and perhaps with 'answer'.

  Returns:
    The record itself, if its prompt is no chat that ends with the assistant.
    Otherwise a new one without the turns of the assistant at the end. The text
    of the last of them is in 'last_turn'; and in 'answer', if the record has
    none and the text is not blank. Of a turn that only calls tools, the text is
    a JSON list of the calls.

  Raises:
    ValueError: All turns are by the assistant.
  """
  prompt = record.get('prompt')
  if prompt is None or isinstance(prompt, str) or prompt_problem(prompt):
    return record
  asked = list(prompt)
  while asked and is_by_assistant(asked[-1]):
    asked.pop()
  if len(asked) == len(prompt):
    return record
  if not asked:
    raise ValueError(
      f'The chat {prompt!r:.80} holds turns of the assistant alone, so it asks'
      ' nothing; add the question before them, or remove the record.'
    )
  text = prompt[-1]['content']
  if not text.strip():
    text = _messages.call_text(prompt[-1]) or text
  taken = {**record, 'prompt': asked, FIELD: text}
  if record.get('answer') is None and text.strip():
    taken['answer'] = text
  return taken


@dataclasses.dataclass(frozen=True)
class WithoutLastTurns:
  """The records of a user's own source, by `without_last_turn`.

  Args:
    source: An object with a length and items, and perhaps with a curriculum.
  """

  source: Any

  def __len__(self) -> int:
    return len(self.source)

  def __getitem__(self, index: int) -> Any:
    return _taken(self.source[index])

  def __getattr__(self, name: str) -> Any:
    # A source has a curriculum if it has these.
    if name not in ('drawn', 'starts'):
      raise AttributeError(name)
    found = getattr(self.source, name)
    if name == 'starts':
      return found
    return lambda index, number: _taken(found(index, number))


def _taken(record: Any) -> Any:
  """As `without_last_turn`; what is no record is refused elsewhere."""
  if not isinstance(record, Mapping):
    return record
  return without_last_turn(record)
