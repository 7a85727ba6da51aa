"""Calls that go on from each other, drawn whenever they come.

An episode calls the engine turn by turn. What it has read and drawn stays in
the cache of its row, so that the next turn reads only what is new. Here is the
loop on the host around the programs of `contexts`. One turn of it:

1. Calls that wait get rows (`Queue._seat`): the row of the call that they go on
   from; or another, with a copy of what they share with that.
2. What is new in them is read, piece by piece (`Queue._read`).
3. A few tokens are drawn in all rows (`Queue._draw`), by several pools at once
   where a width has several.

What is drawn depends on the calls before it in its own context alone: not on
when it came, nor on what came beside it. A row is as wide as its own length
asks for, and each width has as many rows, in one pool or in several equal ones;
no shape changes. What is shared with the call before, and the pieces in which
the rest is read, are functions of the ids.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
from concurrent import futures
import functools
import itertools
import math
import operator
from typing import Any

import jax
import numpy as np

from grpo_jax.engines.local import arrays
from grpo_jax.engines.local import contexts
from grpo_jax.engines.local import next_token
from grpo_jax.engines.local.pools import Context
from grpo_jax.engines.local.pools import Kept
from grpo_jax.engines.local.pools import Pool
from grpo_jax.engines.local.pools import Turn
from grpo_jax.engines.protocol import GOING
from grpo_jax.engines.protocol import Request
from grpo_jax.engines.protocol import Sampled
from grpo_jax.mesh import host_arrays
from grpo_jax.mesh import sharding
from grpo_jax.models import layout
from grpo_jax.models.protocol import Layered

_PIECES = 4, 16, 64, 256, 1024  # tokens of one row that are read at once
# Tokens of all rows that are read at once: as many as take so many operations,
# between the bounds, so that reading them takes longer than asking for it, and
# little is read in vain where few wait.
_READ_FLOPS = 2**33
_READ_TOKENS = {'cpu': (64, 4096)}
_READ_TOKENS_ELSEWHERE = 512, 8192


def tokens_at_once(params: Any, mesh: jax.sharding.Mesh | None) -> int:
  """How many tokens of all rows are read at once.

  Args:
    params: What `sampler_params` returned, or their shapes.
    mesh: Of the sampler.
  """
  size = sum(x.size for x in jax.tree.leaves(params))
  bounds = _READ_TOKENS.get(sharding.platform(mesh), _READ_TOKENS_ELSEWHERE)
  least, most = bounds
  return min(max(least, _READ_FLOPS // (2 * size)), most)


def pieces_of(tokens: int) -> list[int]:
  """The pieces that are read, if so many tokens of all rows are at once."""
  return [size for size in _PIECES if size <= tokens]


def rows_at_once(tokens: int, piece: int, rows: int, shards: int) -> int:
  """In how many rows of each data shard a piece is read at once."""
  return max(1, min(rows // shards, tokens // piece // shards))


def longest_read(
  params: Any, mesh: jax.sharding.Mesh, rows: int
) -> tuple[int, int]:
  """How many rows, and tokens of each, are read at once by the longest piece.

  Args:
    params: See `tokens_at_once`.
    mesh: Of the sampler.
    rows: Of a pool.
  """
  tokens, shards = tokens_at_once(params, mesh), sharding.row_shards(mesh)
  piece = pieces_of(tokens)[-1]
  return shards * rows_at_once(tokens, piece, rows, shards), piece


class Queue:
  """Draws calls; see the module.

  Args:
    model: See `models.transformer`.
    held: The parameters.
    widths: The numbers of places that a cache may have.
    rows: How many rows each width has; a multiple of the data shards.
    parts: Into how many pools to divide them, which are drawn at once.
    mesh: The sampler's mesh; None for one device.
    decode: Turns ids into text; needed for stop strings only.
    tried: For which numbers of rows and widths all programs were compiled
      before; is added to.
  """

  def __init__(
    self,
    model: Layered,
    held: arrays.Held,
    widths: Sequence[int],
    rows: int,
    parts: int = 1,
    mesh: jax.sharding.Mesh | None = None,
    decode: Callable[[Any], str] | None = None,
    tried: set[tuple[int, int]] | None = None,
  ):
    self._model, self._held = model, held
    self._widths, self._mesh, self._decode = sorted({*widths}), mesh, decode
    self.rows, self._parts = rows, parts
    self._tried = set() if tried is None else tried
    self._shards = 1 if mesh is None else sharding.row_shards(mesh)
    self._reading = contexts.Programs(model, mesh)
    self._pools: dict[tuple[int, int], Pool] = {}  # by width and part
    self._waiting: list[Turn] = []
    self._contexts: dict[tuple[int, int], Kept] = {}
    self._has_states = model.config.has_states
    self._prompts: dict[bytes, Context] = {}
    self._choices: next_token.Choices | None = None
    self._clock = 0

  @property
  def _params(self) -> Any:
    return self._held.now[0]

  @property
  def live(self) -> bool:
    """Whether something waits or is drawn."""
    return bool(self._waiting) or self._draws

  @property
  def _draws(self) -> bool:
    """Whether something is drawn."""
    return any(pool.drawn_on for pool in self._pools.values())

  @property
  def is_empty(self) -> bool:
    """Whether nothing is live, and nothing is kept."""
    return not self.live and not self._contexts

  def add(self, number: int, request: Request) -> None:
    """Takes a request under its number.

    Raises:
      ValueError: It is empty or too long, or asks for stop strings without a
        `decode`.
    """
    if not len(request.ids):
      raise ValueError(
        f'The request for {request.name} is empty; give at least one token.'
      )
    layout.bucket(self._length(request), self._widths, request.name)
    arrays.end_of([], request.sampling, self._decode)
    ids = np.asarray(request.ids, np.int32)
    for place in range(len(request.keys)):
      self._waiting.append(Turn(number, place, request, ids))

  def turn(self, every_tokens: int | None = None) -> list[Sampled]:
    """Seats, reads and draws once.

    Args:
      every_tokens: See `Engine.completed`.

    Returns:
      What has finished, and what goes on, if it was asked for.
    """
    self._clock += 1
    while self._seat_some():
      self._read()
    pools = [pool for _, pool in sorted(self._pools.items()) if pool.drawn_on]
    over: list[Sampled] = []
    for pool, drawn in zip(
      pools, self._drawn(pools, every_tokens), strict=True
    ):
      over += self._settle(pool, *drawn, every_tokens)
    return over

  def _drawn(
    self, pools: list[Pool], every_tokens: int | None
  ) -> Iterable[tuple[contexts.Turns, int, Any]]:
    """What `_draw` gives of each pool."""
    draw = functools.partial(self._draw, every_tokens=every_tokens)
    if self._parts == 1:  # in this thread: several processes must do alike
      return map(draw, pools)
    with futures.ThreadPoolExecutor(self._parts) as threads:
      return [*threads.map(draw, pools)]

  def forget(self, number: int) -> None:
    """Nothing will follow a request; if it has not finished, it is given up."""
    self._waiting = [one for one in self._waiting if one.number != number]
    for pool in self._pools.values():
      for context in pool.drawn_on:
        assert context.turn is not None
        if context.turn.number == number:
          context.turn, context.waits_since = None, self._clock
          self._leave(context)
    for place in itertools.count():
      if (number, place) not in self._contexts:
        return
      self._leave(self._contexts.pop((number, place)).context)

  def _leave(self, context: Context) -> None:
    """A context has a user less."""
    context.users -= 1
    if not context.users:
      if context.row is not None:
        self._pool_of(context).release(context)
      context.parked = None
      if context.prompt is not None:
        del self._prompts[context.prompt]

  @staticmethod
  def _length(request: Request) -> int:
    return len(request.ids) + request.limit

  def _pool_of(self, context: Context) -> Pool:
    """The pool of which a context has a row."""
    assert context.row is not None
    return self._pools[context.width, context.part]

  def _pools_of(self, width: int) -> list[Pool]:
    """The pools of a width, by their part; made when they are first needed."""
    if (width, 0) not in self._pools:
      rows = self.rows // self._parts
      for part in range(self._parts):
        pool = Pool(self._reading, self._params, rows, width)
        self._pools[width, part] = pool
      if (rows, width) not in self._tried:
        self._tried.add((rows, width))
        self._try(self._pools[width, 0], width)
    return [self._pools[width, part] for part in range(self._parts)]

  def _find_row(self, width: int) -> tuple[int, int] | None:
    """A row that is free, or made free; None if all are drawn on.

    Returns:
      The part of its pool, and its number there.
    """
    parts = [*enumerate(self._pools_of(width))]
    free = [one for one in parts if one[1].free_row is not None]
    if free:
      part, pool = min(free, key=lambda one: len(one[1].drawn_on))
      assert pool.free_row is not None
      return part, pool.free_row
    longest = [pool.waits_longest for _, pool in parts]
    waiting = [one for one in longest if one is not None]
    if not waiting:
      return None
    # Who has waited longest has the slowest environment, it seems.
    context = min(waiting, key=lambda one: one.waits_since)
    return context.part, self._pool_of(context).park(context)

  def _try(self, pool: Pool, width: int) -> None:
    """Calls the programs that a new pool may need later, so they are compiled.

    Else a run would compile in its midst, once somebody says more than anybody
    has before, or is parked. What draws is needed at once. What copies from
    another width compiles soon, and few runs need it.
    """
    for piece in sorted({self._piece(count) for count in range(1, width)}):
      self._read_piece(pool, piece, [])
    taken = pool.pick(0)
    for one in taken, host_arrays.to_host(taken):
      pool.place(one, 0)
    if self._has_states:
      pool.pick_states(0)

  def _seat_some(self) -> bool:
    """Gives rows to calls that wait, as far as they can have them now."""
    waiting, left = self._waiting, []
    for place, turn in enumerate(waiting):
      choices = self._choices_of(turn)
      if choices != self._choices and self._draws:
        # One program draws all rows. Those behind it wait too, or it would wait
        # for as long as others come.
        left += waiting[place:]
        break
      if self._seat(turn):
        self._choices = choices
      else:
        left.append(turn)
    self._waiting = left
    return len(left) < len(waiting)

  def _choices_of(self, turn: Turn) -> next_token.Choices:
    return next_token.choices_of(
      [turn.request.sampling], self._model.config.vocab_size
    )

  def _seat(self, turn: Turn) -> bool:
    """Gives a row to a call; False if it has to wait."""
    source, shared, states = self._source(turn)
    if source is not None and source.read < shared:
      return False  # it is read just now
    width = layout.bucket(
      self._length(turn.request), self._widths, turn.request.name
    )
    context = source
    goes_on = (
      source is not None
      and source.turn is None
      and source.width == width
      and source.read == shared
    )
    if not goes_on or context is None:
      context = Context(width, turn.ids)
    if context.row is None:
      found = self._find_row(width)
      if found is None:
        return False
      cache = None
      if source is not None and shared:
        cache = source.parked
        turn.parked = cache is not None
        if cache is None:
          cache = self._pool_of(source).copy(source)
        if self._has_states:  # the source may have gone on
          states = host_arrays.to_host(states) if turn.parked else states
          cache = [a or b for a, b in zip(states, cache, strict=True)]
      context.part, row = found
      self._pools[width, context.part].seat(context, row, cache)
    context.ids, context.read, context.turn = turn.ids, shared, turn
    context.users += 1
    turn.read = len(turn.ids) - shared
    prompt = turn.ids[:-1].tobytes()
    if turn.request.follows is None and prompt not in self._prompts:
      self._prompts[prompt], context.prompt = context, prompt
    return True

  def _source(self, turn: Turn) -> tuple[Context | None, int, Any]:
    """From which context a call goes on, and how much of it is shared.

    The last token of a call is never shared: what is behind it is drawn from
    the pass that reads it. And the last that was drawn is in no cache yet. Of a
    model with states all that was read is shared, or nothing.

    Returns:
      The context; how many of its ids; and what the states were behind these.
    """
    follows, most = turn.request.follows, len(turn.ids) - 1
    if follows is None:
      context = self._prompts.get(turn.ids[:-1].tobytes())
      if context is None:
        return None, 0, None
      return context, most, context.states
    if follows not in self._contexts:
      return None, 0, None  # forgotten
    context, ids, states = self._contexts[follows]
    shared = min(most, len(ids) - 1)
    differ = np.flatnonzero(ids[:shared] != turn.ids[:shared])
    shared = int(differ[0]) if len(differ) else shared
    if self._has_states and (states is None or shared < len(ids) - 1):
      return None, 0, None
    return context, shared, states

  def _read(self) -> None:
    """Reads what is new in the contexts that have got a row."""
    for pool in self._pools.values():
      while new := [one for one in pool.drawn_on if self._unread(one)]:
        by_piece: dict[int, list[Context]] = {}
        for one in new:
          by_piece.setdefault(self._piece(self._unread(one)), []).append(one)
        for piece, some in sorted(by_piece.items()):
          self._read_piece(pool, piece, some)
      for one in pool.drawn_on if self._has_states else ():
        if one.prompt is not None and one.states is None:
          assert one.row is not None
          one.states = pool.pick_states(one.row)

  @staticmethod
  def _unread(context: Context) -> int:
    """How many tokens of a context are still to be read."""
    assert context.turn is not None
    return 0 if context.turn.age else len(context.ids) - 1 - context.read

  @functools.cached_property
  def _most_tokens(self) -> int:
    return tokens_at_once(self._params, self._mesh)

  def _piece(self, count: int) -> int:
    """In which piece the next of so many tokens are read."""
    pieces = pieces_of(self._most_tokens)
    place = sum(size < count for size in pieces)
    if place == len(pieces) or (place and 2 * count < pieces[place]):
      place -= 1  # or most of the piece would be padding
    return pieces[place]

  def _read_piece(self, pool: Pool, piece: int, some: list[Context]) -> None:
    """Reads a piece of each of some contexts, as many at once as is due.

    Of none, nothing is read, by the program of this piece.
    """
    of_shard = len(pool.contexts) // self._shards
    each = rows_at_once(
      self._most_tokens, piece, len(pool.contexts), self._shards
    )
    by_shard: list[list[Context]] = [[] for _ in range(self._shards)]
    for one in some:
      assert one.row is not None
      by_shard[one.row // of_shard].append(one)
    for first in range(0, max(1, *map(len, by_shard)), each):
      shape = self._shards * each
      rows, start, count = (np.zeros(shape, np.int32) for _ in range(3))
      tokens = np.zeros((shape, piece), np.int32)
      for shard, ones in enumerate(by_shard):
        for n, one in enumerate(ones[first : first + each], shard * each):
          assert one.row is not None
          ids = one.ids[one.read : -1][:piece]
          tokens[n, : len(ids)], count[n] = ids, len(ids)
          rows[n], start[n] = one.row % of_shard, one.read
          one.read += len(ids)
      given = self._on_devices((rows, tokens, start, count))
      pool.cache = contexts.read(
        self._reading, self._params, pool.cache, *given
      )

  def _on_devices(self, tree: Any) -> Any:
    if self._mesh is None:
      return tree
    return host_arrays.from_local(tree, sharding.rows(self._mesh))

  def _turns(self, pool: Pool) -> contexts.Turns:
    """What is drawn in the rows of a pool."""
    assert self._choices is not None
    drawn = [one and one.turn for one in pool.contexts]
    some = next(one.request.sampling for one in drawn if one)
    rows = len(drawn)
    last, place, age = (np.zeros(rows, np.int32) for _ in range(3))
    words = np.zeros((rows, 2), np.uint32)
    for row, one in enumerate(drawn):
      if one:
        last[row], age[row] = one.last, one.age
        place[row] = len(one.ids) - 1 + one.age
        words[row] = one.request.keys[one.place]
    numbers = next_token.numbers_of(
      [one.request.sampling if one else some for one in drawn],
      [one.request.limit if one else 0 for one in drawn],
      self._model.config.vocab_size,
    )
    ended = np.array([one is None for one in drawn])
    return contexts.Turns(last, place, age, ended, words, numbers)

  def _draw(
    self, pool: Pool, every_tokens: int | None
  ) -> tuple[contexts.Turns, int, Any]:
    """Draws some tokens in the rows of a pool; see `turn`.

    Returns:
      What was to be drawn, by which version, and on the host what was drawn,
      with the ages and ends of the rows.
    """
    assert self._choices is not None
    turns, going = self._turns(pool), len(pool.drawn_on)
    # Rows that have ended wait for the others, and for other pools, so not for
    # long.
    floor = going - math.ceil(going / 8)
    params, version = self._held.now
    pool.cache, after, drawn = contexts.decode(
      contexts.Programs(self._model, self._mesh, self._choices),
      params,
      pool.cache,
      self._on_devices(turns),
      np.int32(min(every_tokens or contexts.STEPS, contexts.STEPS)),
      np.int32(floor),
    )
    found = host_arrays.to_host((drawn, after.age, after.ended))
    return turns, version, found

  def _settle(
    self,
    pool: Pool,
    turns: contexts.Turns,
    version: int,
    found: tuple[Any, np.ndarray, np.ndarray],
    every_tokens: int | None,
  ) -> list[Sampled]:
    """Notes what `_draw` has drawn; returns what `turn` does, of this pool."""
    drawn, age, ended = found
    new = age - turns.age
    over = []
    for context in pool.drawn_on:
      row, turn = context.row, context.turn
      assert row is not None and turn is not None
      own = operator.itemgetter((row, slice(new[row])))
      turn.drawn.append(jax.tree.map(own, drawn))
      turn.version.append(np.full(new[row], version, np.int32))
      turn.age = int(age[row])
      goes_on = not ended[row]
      if (
        goes_on and not every_tokens and not turn.request.sampling.stop_strings
      ):
        continue
      one = self._sampled(turn, goes_on)
      if one.finish != GOING:
        self._keep(context, turn, one)
      if one.finish != GOING or every_tokens:
        over.append(one)
    return over

  def _sampled(self, turn: Turn, goes_on: bool) -> Sampled:
    """What was drawn of a call; it may have come to a stop string."""
    whole = jax.tree.map(lambda *x: np.concatenate(x), *turn.drawn)
    turn.drawn = [whole]  # so that the next time joins little
    turn.version = [np.concatenate(turn.version)]
    return arrays.sampled(
      (turn.number, turn.request, turn.place),
      whole,
      turn.version[0],
      self._decode,
      goes_on=goes_on,
      read=turn.read,
      parked=turn.parked,
    )

  def _keep(self, context: Context, turn: Turn, one: Sampled) -> None:
    """Notes what others may go on from."""
    whole, states = np.concatenate([turn.ids, one.ids]), None
    # Behind a stop string more may have been read than is kept.
    if self._has_states and len(one.ids) == turn.age:
      assert context.row is not None
      states = self._pool_of(context).pick_states(context.row)
    context.ids, context.read, context.turn = whole, len(whole) - 1, None
    context.waits_since = self._clock
    self._contexts[turn.number, turn.place] = Kept(context, whole, states)
