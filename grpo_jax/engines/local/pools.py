"""Rows with contexts of their own: who has which, and who waits elsewhere.

A pool has rows of one width, which are drawn by one program. A context that
nobody draws on keeps its row until another needs it; then it is parked on the
host, and comes back unchanged.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any
from typing import NamedTuple

import numpy as np

from grpo_jax.engines.local import contexts
from grpo_jax.engines.protocol import Request
from grpo_jax.mesh import host_arrays


@dataclasses.dataclass(eq=False)
class Turn:
  """A call that waits or is drawn.

  Attributes:
    number: What `submit` has returned.
    place: Which of the completions of the request, from 0.
    request: What was asked for.
    ids: i32[n], of the request.
    drawn: What each call of the devices has drawn of it, `Drawn` [c].
    version: Of the policy, for each token of these, i32[c].
    age: How many tokens that are.
    read: See `Sampled`.
    parked: Likewise.
  """

  number: int
  place: int
  request: Request
  ids: np.ndarray
  drawn: list[Any] = dataclasses.field(default_factory=list)
  version: list[np.ndarray] = dataclasses.field(default_factory=list)
  age: int = 0
  read: int = 0
  parked: bool = False

  @property
  def last(self) -> int:
    """The newest token, which is not in the cache yet."""
    return int(self.drawn[-1].token[-1] if self.age else self.ids[-1])


@dataclasses.dataclass(eq=False)
class Context:
  """What the cache of a row holds.

  Attributes:
    width: Places of its cache.
    ids: i32[n], what is to be read into it, in order.
    read: How many of them are in the cache.
    part: Which pool of this width it has a row of, or had.
    row: Of its pool; None while it is parked.
    parked: Its cache on the host, while it has no row.
    turn: What is drawn behind it; None while it waits.
    users: How many calls may be followed from it, with the one that is drawn.
    prompt: The bytes of the ids by which calls that follow none find it; None
      if they do not.
    waits_since: When its last turn ended, in turns of the queue.
    states: What the states were behind the ids of `prompt`; see `Kept`.
  """

  width: int
  ids: np.ndarray
  read: int = 0
  part: int = 0
  row: int | None = None
  parked: Any = None
  turn: Turn | None = None
  users: int = 0
  prompt: bytes | None = None
  waits_since: int = 0
  states: Any = None


class Kept(NamedTuple):
  """What others may go on from.

  Attributes:
    context: Whose cache holds it, perhaps with more behind it.
    ids: i32[n], up to the last that was drawn, which is in no cache yet.
    states: What the states were when the others had been read, from
      `Pool.pick_states`: the context may have gone on since then, and a state
      does not go back. None if nobody can go on from there.
  """

  context: Context
  ids: np.ndarray
  states: Any


class Pool:
  """The rows of one width.

  Args:
    programs: What copies rows.
    params: What `sampler_params` returned; for shapes alone.
    rows: How many.
    width: Places of a cache.
  """

  def __init__(
    self,
    programs: contexts.Programs,
    params: Any,
    rows: int,
    width: int,
  ):
    self._programs = programs
    self.contexts: list[Context | None] = [None] * rows
    self.cache = programs.empty(params, rows, width)

  @property
  def free_row(self) -> int | None:
    """A row that no context has; None if there is none."""
    return self.contexts.index(None) if None in self.contexts else None

  @property
  def waits_longest(self) -> Context | None:
    """Of the contexts that nobody draws on, who has waited longest."""
    waiting = [one for one in self.contexts if one and one.turn is None]
    return min(waiting, key=lambda one: one.waits_since, default=None)

  def park(self, context: Context) -> int:
    """Takes a context to the host; returns the row that is free now."""
    row = context.row
    assert row is not None
    context.parked = host_arrays.to_host(self.copy(context))
    self.release(context)
    return row

  def copy(self, context: Context) -> Any:
    """The cache of a context that has a row here."""
    assert context.row is not None
    return self.pick(context.row)

  def pick(self, row: int) -> Any:
    """The cache of a row."""
    return contexts.pick(self._programs, self.cache, np.int32(row))

  def pick_states(self, row: int) -> Any:
    """What is kept of a row that does not grow; see `contexts`."""
    return contexts.pick_states(self._programs, self.cache, np.int32(row))

  def place(self, cache: Any, row: int) -> None:
    """Puts a cache of one row, of this pool or another, into a row."""
    self.cache = contexts.place(
      self._programs, self.cache, cache, np.int32(row)
    )

  def seat(self, context: Context, row: int, cache: Any = None) -> None:
    """Gives a row to a context.

    Args:
      context: Without one.
      row: That is free.
      cache: Of one row, which is to be in it; None: nothing.
    """
    if cache is not None:
      self.place(cache, row)
    context.row, context.parked = row, None
    self.contexts[row] = context

  def release(self, context: Context) -> None:
    """Takes the row of a context from it."""
    if context.row is not None:
      self.contexts[context.row] = None
      context.row = None

  @property
  def drawn_on(self) -> Sequence[Context]:
    """The contexts behind which something is drawn."""
    return [one for one in self.contexts if one and one.turn]
