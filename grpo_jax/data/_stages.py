"""The stages of a source that has a curriculum."""

import dataclasses
from typing import Any


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
