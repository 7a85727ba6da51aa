"""Which completion is drawn in which row; decided on the host, in NumPy.

Rows end at different times. A row that has ended costs as much as one that goes
on, so when enough have, those that go on are moved into fewer rows, or the
prompts that wait are let in beside them. Few sizes are allowed, because a
program is compiled for each; and lanes become narrower, because the rows of a
group that go on seldom fill a lane as wide as the group.
"""

import dataclasses
import math

import numpy as np

_LEAST_ROWS = 8  # fewer take as long
_HALVINGS = 3  # so the last size is an eighth of the first
_LONG_PROMPT = 256  # tokens; from here on a lane costs more than its rows


@dataclasses.dataclass(frozen=True)
class Schedule:
  """The sizes that one call of the engine may use.

  Attributes:
    group: Completions per prompt.
    prompts: Prompts read at the start.
    prompt_tokens: Width of the prompts' cache.
    shards: Lanes are a multiple of this.
  """

  group: int
  prompts: int
  prompt_tokens: int
  shards: int = 1

  @property
  def narrow(self) -> int:
    """Rows of a lane after the first arrangement."""
    split = 2 if self.prompt_tokens >= _LONG_PROMPT else 4
    return max(1, self.group // split)

  @property
  def sizes(self) -> list[int]:
    """Numbers of rows to shrink to, largest first."""
    first, unit = self.prompts * self.group, self.narrow * self.shards
    halves = [first / 2**k for k in range(1, _HALVINGS + 1)]
    sizes = [unit * math.ceil(size / unit) for size in halves]
    return [size for size in sizes if _LEAST_ROWS <= size < first]

  @property
  def admitted(self) -> int:
    """Prompts that are let in at once, into the part that has ended.

    0 if there is no room beside the rows of the first of `sizes`: prompts that
    wait then do so until all rows have ended.
    """
    if not self.sizes:
      return 0
    room = self.prompts * self.group - self.sizes[0]
    rows = math.ceil(self.group / self.narrow) * self.narrow
    return room // (rows * self.shards) * self.shards

  def floor(self, rows: int, alive: int, waiting: bool) -> int:
    """How few rows must go on before it is worth asking `lanes`.

    Args:
      rows: Rows now.
      alive: Those that go on.
      waiting: Whether prompts wait.
    """
    smaller = [size for size in self.sizes if size < rows]
    if waiting and self.admitted:
      smaller = self.sizes[:1]
    if not smaller:
      return 0
    retry = alive - max(1, rows // 16)  # they did not fit into their lanes
    return max(0, smaller[0] if alive > smaller[0] else retry)

  def lanes(
    self, prompt: np.ndarray, alive: np.ndarray, waiting: bool
  ) -> np.ndarray | None:
    """Fewer rows for those that go on, if they fit.

    Args:
      prompt: i64[B], the prompt of each row.
      alive: bool[B], which rows go on.
      waiting: Whether prompts wait; then only half of the rows will do.

    Returns:
      [A',W'], the row that moves to each place of the new lanes, -1 for none;
      or None to stay.
    """
    by_prompt: dict[int, list[int]] = {}
    for row in np.flatnonzero(alive):
      by_prompt.setdefault(int(prompt[row]), []).append(int(row))
    pieces = [
      rows[start : start + self.narrow]
      for rows in by_prompt.values()
      for start in range(0, len(rows), self.narrow)
    ]
    waiting = waiting and self.admitted > 0
    sizes = self.sizes[:1] if waiting else self.sizes
    fitting = [size for size in sizes if size >= len(pieces) * self.narrow]
    if not fitting or (min(fitting) >= len(alive) and not waiting):
      return None
    return self._filled(pieces, min(fitting) // self.narrow)

  def new_lanes(self, first: int) -> np.ndarray:
    """[A',W'], as `lanes`, of the prompts just admitted.

    Args:
      first: The number of their first row.
    """
    rows = first + np.arange(self.admitted * self.group)
    rows = rows.reshape(self.admitted, self.group)
    number = math.ceil(self.group / self.narrow)
    pieces = [
      group[start : start + self.narrow]
      for group in rows
      for start in range(0, self.group, self.narrow)
    ]
    return self._filled(pieces, self.admitted * number)

  def _filled(self, pieces, number: int) -> np.ndarray:
    lanes = np.full((number, self.narrow), -1, np.int64)
    for place, rows in enumerate(pieces):
      lanes[place, : len(rows)] = rows
    return lanes
