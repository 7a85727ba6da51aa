"""Several sources, one after the other."""

from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses
import itertools
from typing import Any


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
