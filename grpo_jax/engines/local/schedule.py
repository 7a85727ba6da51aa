"""Which completion is drawn in which row; decided on the host, in NumPy.

The device decodes all rows in step, one token each. Completions end at
different times, and a row whose completion has ended costs as much as before.
So when enough rows have ended, this module rearranges the others: it moves
those that go on into fewer rows, or it admits prompts that wait into the rows
that have become free.

Rows lie in lanes. A lane is one prompt and `W` rows that continue it, which
share the prompt's keys and values. At the start each prompt has one lane for
its whole group. After the first rearrangement lanes are narrower, because the
rows of a group that still go on seldom fill a lane as wide as the group.

With several data shards, equally many rows lie on each: the first of equal
parts of an array [B] on the first shard, and so on. A row stays on its shard,
so that no keys and values are sent to another device. Rows to be moved are
therefore numbered on each shard by itself.

A program is compiled for each number of rows, so only a few numbers are used.
"""

import dataclasses
import math

import numpy as np

_LEAST_ROWS = 8  # fewer rows than this take as long to decode
_HALVINGS = 3  # the smallest number of rows is an eighth of the first
# From this many tokens on, reading a lane's prompt costs more than its rows do;
# then fewer, wider lanes are better.
_LONG_PROMPT = 256


@dataclasses.dataclass(frozen=True)
class Schedule:
  """The numbers of rows that one call of the engine may use.

  Attributes:
    group: Completions per prompt.
    prompts: How many prompts are read at the start. Others wait.
    prompt_tokens: Width of the prompts' cache, tokens.
    shards: Into how many parts the caches are split by rows: the data shards,
      or all devices. Equally many lanes lie on each.
  """

  group: int
  prompts: int
  prompt_tokens: int
  shards: int = 1

  @property
  def narrow(self) -> int:
    """Rows of a lane, `W`, after the first rearrangement."""
    split = 2 if self.prompt_tokens >= _LONG_PROMPT else 4
    return max(1, self.group // split)

  @property
  def sizes(self) -> list[int]:
    """The numbers of rows that may be shrunk to, largest first."""
    first, unit = self.prompts * self.group, self.narrow * self.shards
    # Whole lanes, and equally many on each data shard.
    halves = [first / 2**k for k in range(1, _HALVINGS + 1)]
    sizes = [unit * math.ceil(size / unit) for size in halves]
    return [size for size in sizes if _LEAST_ROWS <= size < first]

  @property
  def admitted(self) -> int:
    """How many waiting prompts are admitted at once.

    Prompts are admitted when the rows that go on fit into the first of `sizes`.
    They get the rest of the rows that there were at the start. If that is too
    little for one prompt on each shard, this is 0, and prompts wait until all
    rows have ended.
    """
    if not self.sizes:
      return 0
    room = self.prompts * self.group - self.sizes[0]
    rows = math.ceil(self.group / self.narrow) * self.narrow
    return room // (rows * self.shards) * self.shards

  def fullest(self, alive: np.ndarray) -> int:
    """How many rows bool[B] go on, had every shard as many as the fullest."""
    return self.shards * int(alive.reshape(self.shards, -1).sum(axis=1).max())

  def floor(self, rows: int, alive: int, waiting: bool) -> int:
    """How far to decode: until no more rows than this go on.

    Args:
      rows: The number of rows now.
      alive: How many of them go on; see `fullest`.
      waiting: Whether prompts wait.

    Returns:
      The number of rows at which `lanes` should be asked for a rearrangement;
      0 if there is none to come.
    """
    smaller = [size for size in self.sizes if size < rows]
    if waiting and self.admitted:
      smaller = self.sizes[:1]
    if not smaller:
      return 0
    # So few rows go on that they could fit, but `lanes` found that they leave
    # too many places of their lanes empty. Ask again a little later.
    retry = alive - max(1, rows // 16)
    return max(0, smaller[0] if alive > smaller[0] else retry)

  def lanes(
    self, prompt: np.ndarray, alive: np.ndarray, waiting: bool
  ) -> np.ndarray | None:
    """New lanes for the rows that go on, if there are fewer that hold them.

    Args:
      prompt: i64[B], the prompt of each row.
      alive: bool[B], which rows go on.
      waiting: Whether prompts wait. Then the rows must fit into the first of
        `sizes`, which leaves room for the prompts.

    Returns:
      i64[A',W'], for each place of the new lanes the row of its shard that
      moves there, -1 for none; or None, and nothing is moved.
    """
    of_shards = (x.reshape(self.shards, -1) for x in (prompt, alive))
    pieces = [self._pieces(*one) for one in zip(*of_shards, strict=True)]
    # Each shard gets as many lanes as the one that needs most.
    needed = max(map(len, pieces)) * self.shards * self.narrow
    waiting = waiting and self.admitted > 0
    sizes = self.sizes[:1] if waiting else self.sizes
    fitting = [size for size in sizes if size >= needed]
    if not fitting or (min(fitting) >= len(alive) and not waiting):
      return None  # too many rows go on, or it would be no fewer rows
    number = min(fitting) // self.narrow // self.shards
    return np.concatenate([self._filled(some, number) for some in pieces])

  def _pieces(self, prompt: np.ndarray, alive: np.ndarray) -> list[list[int]]:
    """The rows of one shard that go on, in pieces that fit into a lane each."""
    # All rows of a lane continue the same prompt, so a prompt's rows are cut
    # into pieces of a lane each; the last piece may leave places empty.
    by_prompt: dict[int, list[int]] = {}
    for row in np.flatnonzero(alive):
      by_prompt.setdefault(int(prompt[row]), []).append(int(row))
    return [
      rows[start : start + self.narrow]
      for rows in by_prompt.values()
      for start in range(0, len(rows), self.narrow)
    ]

  def new_lanes(self, first: int) -> np.ndarray:
    """The lanes of prompts that were just admitted, as `lanes` returns them.

    Args:
      first: The number of their first row on each shard; the others follow it.

    Returns:
      i64[A',W'].
    """
    prompts = self.admitted // self.shards
    rows = first + np.arange(prompts * self.group).reshape(prompts, self.group)
    number = math.ceil(self.group / self.narrow)
    pieces = [
      group[start : start + self.narrow]
      for group in rows
      for start in range(0, self.group, self.narrow)
    ]
    return np.tile(self._filled(pieces, prompts * number), (self.shards, 1))

  def joined(self, *parts: np.ndarray) -> np.ndarray:
    """Arrays of rows, or of lanes, behind each other on each shard."""
    of_shards = [x.reshape(self.shards, -1, *x.shape[1:]) for x in parts]
    whole = np.concatenate(of_shards, axis=1)
    return whole.reshape(-1, *whole.shape[2:])

  def _filled(self, pieces, number: int) -> np.ndarray:
    """Lanes of a shard: the first hold a piece each, the others nothing."""
    lanes = np.full((number, self.narrow), -1, np.int64)
    for place, rows in enumerate(pieces):
      lanes[place, : len(rows)] = rows
    return lanes
