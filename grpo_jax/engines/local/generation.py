"""One call of the engine: the loop on the host around the compiled programs.

The loop repeats three steps until every completion has ended:

1. The device decodes, until enough rows have ended, the caches are full, or a
   report is due (`Generation._advance`).
2. The host reads, in one transfer, what was drawn and which rows have ended,
   and appends it to the completions so far (`CompletionsSoFar.write`).
3. The host decides what comes next: prompts are admitted, rows are dropped, or
   caches grow (`Generation._rearrange`, by the rules of `schedule`).

Several generations run at once on the cores of a CPU (`side_by_side`).
XLA runs most products of a small model on one core: they are too small to be
worth dividing. So the prompts are divided, and every piece has a thread and
calls of its own; on two cores a decode step of 64 rows then takes half the time
or three quarters. Each piece reads all weights, which must be little beside its
rows. The product with the output layer, if that is the larger part, uses all
cores by itself.
"""

from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses
import queue
import threading
from typing import Any

import jax
import numpy as np

from grpo_jax.config import waits
from grpo_jax.engines.local import arrays
from grpo_jax.engines.local import sampler as sampler_lib
from grpo_jax.engines.local import schedule
from grpo_jax.mesh import host_arrays
from grpo_jax.mesh import sharding

_MOST_BYTES = 2**22  # of weights, for each row of a piece
_LEAST_WORK = 2**25  # weights in bytes, times the rows of a piece


@dataclasses.dataclass
class CompletionsSoFar:
  """What has been drawn so far of N = P * G completions, on the host.

  Attributes:
    drawn: Arrays [N,T]; row p * G + g holds completion g of prompt p.
    version: i32[N,T], of the policy that has drawn each token.
    length: i32[N], tokens of each completion up to now.
    ended: bool[N], which completions are whole.
    holder: i64[P], the process that has drawn each prompt's completions; the
      others do not know their tokens. None: every process knows all.
  """

  drawn: sampler_lib.Drawn
  version: np.ndarray
  length: np.ndarray
  ended: np.ndarray
  holder: np.ndarray | None = None

  @classmethod
  def nothing(
    cls, sampler: sampler_lib.Sampler, prompts: int, tokens: int, shares: bool
  ) -> 'CompletionsSoFar':
    """Before the first token of so many prompts; T = `tokens`."""
    shape = prompts * sampler.group, tokens
    rest = (np.zeros(shape, np.float32) for _ in range(3))
    drawn = sampler_lib.Drawn(np.zeros(shape, np.int32), *rest)
    if sampler.routes:
      drawn = drawn._replace(routing=np.zeros(shape, np.int32))
    length, ended = (np.zeros(shape[:1], kind) for kind in (np.int32, bool))
    holder = np.zeros((prompts,), np.int64) if shares else None
    return cls(drawn, np.zeros(shape, np.int32), length, ended, holder)

  def part(self, first: int, end: int, group: int) -> 'CompletionsSoFar':
    """The completions of the prompts from `first` to `end`, in this memory."""
    rows = slice(first * group, end * group)
    drawn = jax.tree.map(lambda x: x[rows], self.drawn)
    holder = None if self.holder is None else self.holder[first:end]
    return CompletionsSoFar(
      drawn, self.version[rows], self.length[rows], self.ended[rows], holder
    )

  def write(
    self,
    completion: np.ndarray,
    drawn: Any,
    version: int,
    count: np.ndarray,
    here: np.ndarray | bool = True,
  ):
    """Appends what the rows of one call have drawn.

    Args:
      completion: i64[B], the completion of each row, -1 for none.
      drawn: A `Drawn` [B,C], on the host.
      version: Of the policy that has drawn it.
      count: i32[B], how many columns, from the first on, belong to the
        completion; 0 for a row that has none.
      here: bool[B], which rows this process holds. Of the others it learns the
        lengths only.
    """
    # Each token goes to its completion, after the tokens already there.
    count_here = np.where(here, count, 0)[:, None]
    row, column = np.nonzero(np.arange(drawn.token.shape[1]) < count_here)
    place = completion[row], self.length[completion[row]] + column
    # Leaves, because a model without experts has no `routing`.
    parts = jax.tree.leaves(drawn)
    for whole, part in zip(jax.tree.leaves(self.drawn), parts, strict=True):
      whole[place] = part[row, column]
    self.version[place] = version
    # Not for the other rows: NumPy takes their -1 for the last completion.
    some = count > 0
    self.length[completion[some]] += count[some]


@dataclasses.dataclass
class Generation:
  """The completions of some prompts while they are being drawn.

  The first seven attributes are given; the others are the state of the loop.

  Attributes:
    sampler: The static part of the compiled programs.
    held: The parameters; each call reads those that are there when it begins.
    schedule: Decides the numbers of rows.
    prompts: All prompts in their order, on the host.
    columns: The lengths that the rows' caches may have, tokens, ascending; the
      last holds a whole completion.
    so_far: What has been drawn: nothing at first, at the end the result.
    shares: Whether each process learns the completions that its own devices
      draw, and no others.
    waiting: How many prompts wait. They are the last ones of `prompts`.
    rows: The state of the rows, on the device.
    completion: i64[B], the completion p * G + g of each row, -1 for none.
    going: bool[B], whether the row's completion goes on.
    clock: How many columns the rows' caches have been given since `_start`.
    room: The present length of the caches, one of `columns`.
  """

  sampler: sampler_lib.Sampler
  held: arrays.Held
  schedule: schedule.Schedule
  prompts: sampler_lib.Prompts
  columns: Sequence[int]
  so_far: CompletionsSoFar
  shares: bool = False
  waiting: int = dataclasses.field(init=False)
  rows: Any = dataclasses.field(init=False, default=None)
  completion: np.ndarray = dataclasses.field(init=False)
  going: np.ndarray = dataclasses.field(init=False)
  clock: int = dataclasses.field(init=False, default=0)
  room: int = dataclasses.field(init=False)

  def __post_init__(self):
    self.waiting = len(self.prompts.length)
    self.going = np.zeros((0,), bool)

  def run(self, every_tokens: int | None = None) -> Iterator[CompletionsSoFar]:
    """Draws all completions.

    Args:
      every_tokens: How many tokens to draw between two reports, at most; None:
        as many as possible.

    Yields:
      `so_far`, the same object each time; at the last time it is complete.
    """
    while self.waiting or self.going.any():
      if not self.going.any():
        self._start()
        yield self._reported()
      else:
        self._rearrange()
      if self.going.any():  # the first token may have ended every row
        self._advance(every_tokens)
        yield self._reported()

  def _reported(self) -> CompletionsSoFar:
    """What has been drawn, and what of it is whole."""
    over = (self.completion >= 0) & ~self.going
    self.so_far.ended[self.completion[over]] = True
    return self.so_far

  def _admit(self, number: int):
    """Reads the next prompts and draws the first token of each completion.

    Args:
      number: How many prompts; a program is compiled for this number. If fewer
        wait, the others are padding, whose rows have ended from the start.

    Returns:
      Their rows, the completion of each row, and which rows go on.
    """
    first = len(self.prompts.length) - self.waiting
    taken = min(number, self.waiting)
    self.waiting -= taken

    some = arrays.padded(self.prompts, first, taken, number)
    if self.sampler.mesh is not None:
      some = host_arrays.from_local(some, sharding.rows(self.sampler.mesh))
    group = self.sampler.group
    completion = np.full((number * group,), -1, np.int64)
    completion[: taken * group] = first * group + np.arange(taken * group)
    params, version = self.held.now
    rows, drawn = sampler_lib.prefill(
      self.sampler,
      params,
      some,
      self.columns[0],
    )
    if self.shares:
      assert self.sampler.mesh is not None and self.so_far.holder is not None
      of_shards = host_arrays.holders(self.sampler.mesh)
      holder = np.repeat(of_shards, number // len(of_shards))
      self.so_far.holder[first : first + taken] = holder[:taken]
    drawn, ended = self._to_host(drawn, rows.ended)
    count = (completion >= 0).astype(np.int32)
    here = self._here(len(count))
    self.so_far.write(completion, drawn, version, count, here)
    return rows, completion, ~ended

  def _to_host(self, drawn: sampler_lib.Drawn, *rest: jax.Array) -> Any:
    """What was drawn, as far as this process is to know it, and the rest."""
    if not self.shares:
      return host_arrays.to_host((drawn, *rest))
    return host_arrays.rows_to_host(drawn), *host_arrays.to_host(rest)

  def _here(self, rows: int) -> np.ndarray | bool:
    """Which of so many rows this process holds."""
    if not self.shares:
      return True
    assert self.sampler.mesh is not None
    of_shards = host_arrays.holders(self.sampler.mesh) == jax.process_index()
    return np.repeat(of_shards, rows // len(of_shards))

  def _start(self):
    """Begins anew with prompts that wait, when no row goes on."""
    self.rows, self.completion, self.going = self._admit(self.schedule.prompts)
    self.clock, self.room = 0, self.columns[0]

  def _rearrange(self):
    """Admits prompts, drops rows and lets caches grow, whichever is due.

    One call of the device does all that is due, because every call copies the
    caches.
    """
    group, shards = self.sampler.group, self.schedule.shards
    waiting = self.waiting > 0 and self.schedule.admitted > 0
    alive, old = self.going, len(self.going) // shards  # rows on each shard
    width = len(alive) // self.rows.prompt_length.shape[0]
    lanes = self.schedule.lanes(self.completion // group, alive, waiting)
    # The longest cache is a ring: its oldest entries belong to completions that
    # have ended, so it never needs to grow.
    full = self.clock == self.room < self.columns[-1]
    if lanes is None and not full:
      return
    parts, completion, going = [self.rows], self.completion, alive
    if lanes is None:  # the caches are full, and every row stays where it is
      lanes = np.tile(np.arange(old).reshape(-1, width), (shards, 1))
    elif waiting:
      more, its_completion, its_going = self._admit(self.schedule.admitted)
      parts.append(more)
      joined = self.schedule.joined
      completion = joined(completion, its_completion)
      going = joined(going, its_going)
      lanes = joined(lanes, self.schedule.new_lanes(old))
    # The old lane that each new lane continues: any row that moves there tells.
    # Rows of the second part are numbered after those of the first, and its
    # lanes are as wide as a group. An empty lane copies lane 0 of its shard.
    of_lane = np.maximum(lanes.max(axis=1), 0)
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
      place = host_arrays.from_local(place, sharding.rows(self.sampler.mesh))
    self.rows = sampler_lib.regroup(self.sampler, parts, *place, self.room)

    def moved(x):
      return np.take_along_axis(
        x.reshape(shards, -1), row.reshape(shards, -1), axis=1
      ).ravel()

    self.completion = np.where(row < 0, -1, moved(completion))
    self.going = np.where(row < 0, False, moved(going))

  def _advance(self, every_tokens: int | None):
    """Decodes until something is due, and collects what was drawn."""
    limit = self.room  # one call returns as many columns as the caches have
    if self.room < self.columns[-1]:
      limit -= self.clock  # stop when the caches are full, to let them grow
    limit = min(limit, self.sampler.drawn_columns(self.room))
    floor = self.schedule.floor(
      len(self.going), self.schedule.fullest(self.going), self.waiting > 0
    )
    scalars = min(limit, every_tokens or limit), floor
    params, version = self.held.now
    self.rows, drawn = sampler_lib.decode(
      self.sampler,
      params,
      self.rows,
      *map(np.int32, scalars),
    )
    drawn, age, ended = self._to_host(drawn, self.rows.age, self.rows.ended)
    some = self.completion >= 0
    # A row that ended on the way drew fewer tokens than the others.
    count = np.where(some, age - self.so_far.length[self.completion], 0)
    here = self._here(len(count))
    self.so_far.write(self.completion, drawn, version, count, here)
    self.going = ~ended
    self.clock += int(count.max())  # some row drew a token in every step


def pieces(cores: int, prompts: int, group: int, layers: int, head: int) -> int:
  """Into how many pieces to divide prompts.

  Args:
    cores: At most so many.
    prompts: As many as are drawn at once.
    group: Completions of each.
    layers: Bytes of the weights of all layers.
    head: Bytes of the output layer's.
  """
  if head > layers:
    return 1
  weights = layers + head
  rows = max(_LEAST_WORK / weights, weights / _MOST_BYTES)
  most = int(prompts * group / rows)
  return max(1, min(cores, prompts, most))


def side_by_side(steps: Sequence[Iterator[Any]]) -> Iterator[None]:
  """Takes all steps of some iterators, each iterator in a thread of its own.

  Yields after every step of any of them. What one raises is raised here; the
  others then end after their present step, for which nothing waits.
  """
  if len(steps) == 1:
    for _ in steps[0]:
      yield
    return
  taken: queue.SimpleQueue[Any] = queue.SimpleQueue()
  left, end = threading.Event(), object()

  def take(one):
    try:
      for _ in one:
        if left.is_set():
          return
        taken.put(None)
      taken.put(end)
    except BaseException as error:
      taken.put(error)

  going = len(steps)
  try:
    for one in steps:
      # No daemon: Python waits for the step before it ends, and would abort in
      # XLA otherwise. A command need not wait; see `commands.main.run`.
      threading.Thread(target=take, args=(one,), name='sampling').start()
    while going:
      step = waits.take(taken)
      if isinstance(step, BaseException):
        raise step
      going -= step is end
      yield
  finally:
    left.set()
