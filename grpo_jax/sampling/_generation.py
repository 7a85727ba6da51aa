"""One call of the engine: admits prompts, decodes, rearranges, collects.

The device decodes until enough rows have ended, the caches are full or a report
is due; then the host reads what was drawn and who has ended, once, and decides
what comes next.
"""

from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax import sharding
from grpo_jax.sampling import _sampler
from grpo_jax.sampling import _schedule


@dataclasses.dataclass
class Book:
  """What has been drawn so far, by completion; N = P * G of them."""

  drawn: _sampler.Drawn  # [N,T] on the host
  length: np.ndarray  # i32[N]

  def write(self, completion: np.ndarray, drawn: Any, count: np.ndarray):
    """Appends to each row's completion its first `count` columns.

    Args:
      completion: i64[B], -1 for none.
      drawn: A `Drawn` [B,C], on the host.
      count: i32[B], 0 where there is no completion.
    """
    row, column = np.nonzero(np.arange(drawn.token.shape[1]) < count[:, None])
    place = completion[row], self.length[completion[row]] + column
    for whole, part in zip(self.drawn, drawn, strict=True):
      whole[place] = part[row, column]
    some = count > 0
    self.length[completion[some]] += count[some]


@dataclasses.dataclass
class Generation:
  """Completions of some prompts, on their way.

  Attributes:
    sampler: The compiled programs' static part.
    params: What it reads.
    schedule: The sizes it may use.
    prompts: Host arrays, all prompts in their order.
    max_tokens: Of a completion.
    columns: Allowed room in the rows' caches, tokens, ascending; the last holds
      a whole completion.
    book: The result.
    waiting: How many prompts wait; they are the last ones.
    rows: On the device.
    completion: i64[B], p * G + g of each row, -1 for none.
    going: bool[B], the row's completion goes on.
    clock: Tokens that the rows' caches have been given.
    room: The present one of `columns`.
  """

  sampler: _sampler.Sampler
  params: Any
  schedule: _schedule.Schedule
  prompts: _sampler.Prompts
  max_tokens: int
  columns: Sequence[int]
  book: Book = dataclasses.field(init=False)
  waiting: int = dataclasses.field(init=False)
  rows: Any = None
  completion: np.ndarray = dataclasses.field(init=False)
  going: np.ndarray = dataclasses.field(init=False)
  clock: int = 0
  room: int = dataclasses.field(init=False)

  def __post_init__(self):
    self.waiting = len(self.prompts.length)
    shape = self.waiting * self.sampler.group, self.columns[-1]
    token = np.zeros(shape, np.int32)
    rest = (np.zeros(shape, np.float32) for _ in range(3))
    self.book = Book(
      _sampler.Drawn(token, *rest), np.zeros(shape[:1], np.int32)
    )
    self.going = np.zeros((0,), bool)

  def run(self, every_tokens: int | None = None) -> Iterator[Book]:
    """Yields the book after every stretch of work; at last it is complete.

    Args:
      every_tokens: Most tokens between two reports; None: as many as can be.
    """
    while self.waiting or self.going.any():
      if not self.going.any():
        self._start()
        yield self.book
      else:
        self._rearrange()
      if self.going.any():
        self._advance(every_tokens)
        yield self.book

  def _admit(self, number: int):
    """The next `number` prompts as rows, their completions, who goes on."""
    first = len(self.prompts.length) - self.waiting
    taken = min(number, self.waiting)
    self.waiting -= taken

    def part(x, filler):
      widths = [(0, number - taken)] + [(0, 0)] * (x.ndim - 1)
      return np.pad(x[first : first + taken], widths, constant_values=filler)

    host = {
      'tokens': part(self.prompts.tokens, 0),
      'length': part(self.prompts.length, 1),
      'index': part(self.prompts.index, -1),
    }
    if self.sampler.mesh is not None:
      host = jax.device_put(host, sharding.rows(self.sampler.mesh))
    group = self.sampler.group
    completion = np.full((number * group,), -1, np.int64)
    completion[: taken * group] = first * group + np.arange(taken * group)
    rows, drawn = _sampler.prefill(
      self.sampler,
      self.params,
      _sampler.Prompts(**host, key=self.prompts.key),
      jnp.asarray(self.max_tokens, jnp.int32),
      self.columns[0],
    )
    drawn, ended = jax.device_get((drawn, rows.ended))
    self.book.write(completion, drawn, (completion >= 0).astype(np.int32))
    return rows, completion, ~ended

  def _start(self):
    """Prompts that wait take all rows."""
    self.rows, self.completion, self.going = self._admit(self.schedule.prompts)
    self.clock, self.room = 0, self.columns[0]

  def _rearrange(self):
    """Lets prompts in, drops rows, makes room: whatever is due, at once."""
    group = self.sampler.group
    waiting = self.waiting > 0 and self.schedule.admitted > 0
    alive, old = self.going, len(self.going)
    width = old // self.rows.prompt_length.shape[0]
    lanes = self.schedule.lanes(self.completion // group, alive, waiting)
    full = self.clock == self.room < self.columns[-1]
    if lanes is None and not full:
      return
    parts, completion, going = [self.rows], self.completion, alive
    if lanes is None:
      lanes = np.arange(old).reshape(-1, width)
    elif waiting:
      more, its_completion, its_going = self._admit(self.schedule.admitted)
      parts.append(more)
      completion = np.concatenate([completion, its_completion])
      going = np.concatenate([going, its_going])
      lanes = np.concatenate([lanes, self.schedule.new_lanes(old)])
    of_lane = np.maximum(lanes.max(axis=1), 0)  # any row of it
    lane = np.where(
      of_lane < old,
      of_lane // width,
      old // width + (of_lane - old) // group,
    )
    if full:
      self.room = self.columns[self.columns.index(self.room) + 1]
    row = lanes.reshape(-1).astype(np.int32)
    place = lane.astype(np.int32), row
    if self.sampler.mesh is not None:
      place = jax.device_put(place, sharding.rows(self.sampler.mesh))
    self.rows = _sampler.regroup(self.sampler, parts, *place, self.room)
    self.completion = np.where(row < 0, -1, completion[row])
    self.going = np.where(row < 0, False, going[row])

  def _advance(self, every_tokens: int | None):
    """Decodes until something is due."""
    limit = self.room
    if self.room < self.columns[-1]:
      limit -= self.clock  # then there is more room to be had
    floor = self.schedule.floor(
      len(self.going), int(self.going.sum()), self.waiting > 0
    )
    scalars = self.max_tokens, min(limit, every_tokens or limit), floor
    self.rows, drawn = _sampler.decode(
      self.sampler,
      self.params,
      self.rows,
      *(jnp.asarray(x, jnp.int32) for x in scalars),
    )
    drawn, age, ended = jax.device_get((drawn, self.rows.age, self.rows.ended))
    some = self.completion >= 0
    count = np.where(some, age - self.book.length[self.completion], 0)
    self.book.write(self.completion, drawn, count)
    self.going = ~ended
    self.clock += int(count.max())
