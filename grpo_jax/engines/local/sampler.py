"""The compiled programs of the engine: prefill, decode, regroup.

- `prefill` reads prompts and draws the first token of every completion.
- `decode` draws one token after another for all rows in step.
- `regroup` moves rows, with their caches, into other lanes.

A lane is a prompt with `W` rows that continue it. A program is compiled for a
number of lanes, their width and the length of the caches. Which completion a
row draws, and when it began, is data. So between two calls of `decode` rows
that have ended can be dropped or replaced; `schedule` decides which.

Shapes: `P` prompts of at most `N` tokens, `A` lanes, `B = A * W` rows, `M`
columns of the rows' caches, `C` columns drawn by one call.
"""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
from typing import Any
from typing import NamedTuple
from typing import TypeVar

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from grpo_jax import models
from grpo_jax.engines.local.next_token import Choices
from grpo_jax.engines.local.next_token import Numbers
from grpo_jax.engines.local.next_token import next_token
from grpo_jax.mesh import sharding
from grpo_jax.models import attention
from grpo_jax.models import states

Array = jax.Array
AnyArray = jax.Array | np.ndarray
RowsT = TypeVar('RowsT', bound=Any)


class Prompts(NamedTuple):
  """Right-padded prompts, and how they are continued.

  Attributes:
    tokens: i32[P,N].
    length: i32[P].
    keys: u32[P,G,2], the words of a key for each completion.
    numbers: How each prompt is continued, arrays [P].
  """

  tokens: AnyArray
  length: AnyArray
  keys: AnyArray
  numbers: Numbers


class Rows(NamedTuple):
  """The state of the rows between two calls.

  The rows of a lane lie side by side. All rows write their caches at the same
  column, `clock` modulo M, whenever each of them began, so that one slice is
  written and no scatter. The caches are rings.

  Attributes:
    last: i32[B], the newest token of each row, which is not in the cache yet.
    age: i32[B], how many tokens the row's completion has.
    ended: bool[B], whether the completion has ended; nothing more is drawn.
    key: key[B], of the completion.
    numbers: How each row is drawn, arrays [B].
    clock: i32[], how many columns the rows' caches have been given.
    prompt_length: i32[A], of each lane's prompt.
    prompt_cache: For each layer the keys and values of the prompts, f[A,...]
      with N positions; see `attention.cache_axes`. A layer with a shorter
      window has only as many as its window. One with a state, or one that
      shares those of another, has nothing.
    cache: For each layer the keys and values of the rows' own tokens, f[B,...]
      with M positions, or as many as the window; or the rows' states, in which
      their prompts are too, see `states`.
  """

  last: Array
  age: Array
  ended: Array
  key: Array
  numbers: Numbers
  clock: Array
  prompt_length: Array
  prompt_cache: Any
  cache: Any


class Drawn(NamedTuple):
  """What one call has drawn; 0 in columns after a row's end.

  Attributes:
    token: i32[B,C].
    logp: f32[B,C], under the policy, nats.
    log_kept: f32[B,C], log of the mass that the filters left.
    entropy: f32[B,C], of the policy, nats.
    routing: i32[B,C], of the pass that predicted the token, see
      `models.experts`; None if the model has no experts.
  """

  token: AnyArray
  logp: AnyArray
  log_kept: AnyArray
  entropy: AnyArray
  routing: AnyArray | None = None


def _places(kind: models.LayerKind, columns: int) -> int:
  """The length of a layer's cache: no longer than its window."""
  return min(columns, kind.window_tokens or columns)


@dataclasses.dataclass(frozen=True)
class Sampler:
  """What the compiled programs are compiled for.

  It is hashable and a static argument of the jitted functions below, which call
  its methods.

  Attributes:
    model: See `models.transformer`.
    choices: Which ways of choosing a token there are.
    group: Completions per prompt.
    mesh: The mesh over which rows are split; None for one device.
    everywhere: Whether each device of `tensor` has the caches of some rows of
      its data shard, with all heads; else it has some heads of all rows. The
      weights are split by heads in any case.
  """

  model: models.Layered
  choices: Choices
  group: int
  mesh: jax.sharding.Mesh | None = None
  everywhere: bool = False

  def prefill(
    self, params, prompts: Prompts, columns: int
  ) -> tuple[Rows, Drawn]:
    """Reads prompts, and draws the first token of every completion.

    Args:
      params: What `sampler_params` returned.
      prompts: See `Prompts`.
      columns: `M`, the length of the rows' caches, tokens.

    Returns:
      A lane of `group` rows for each prompt, and the first token of each row
      (C = 1).
    """
    number, width = prompts.tokens.shape
    positions = jnp.broadcast_to(jnp.arange(width), (number, width))
    hidden, cache, routing = read_hidden(
      self.model,
      params,
      prompts.tokens,
      positions,
      self._where_caches_are(
        attention.over_prompts(
          jnp.asarray(prompts.length), self.model.config.attention
        )
      ),
    )
    # One position per prompt: logits of all would be N times as large.
    end = (prompts.length - 1)[:, None]
    last = jnp.take_along_axis(hidden, end[:, :, None], axis=1)[:, 0]
    if routing is not None:
      routing = jnp.take_along_axis(routing, end, axis=1)[:, 0]
      routing = jnp.repeat(routing, self.group)
    # All completions of a prompt begin from the same logits.
    logits = self.model.head(params, last)
    count = number * self.group

    def room(x, axis, places):  # an empty cache of the rows
      shape = [count, *x.shape[1:]]
      shape[axis] = places
      return jnp.zeros(shape, x.dtype)

    # Every completion goes on from the state behind its prompt.
    fork = lambda x: jnp.repeat(x, self.group, axis=0)
    own = self._by_layer(room, cache, columns, fork)
    rows = Rows(
      **no_tokens(prompts, self.group),
      clock=jnp.zeros((), jnp.int32),
      prompt_length=jnp.asarray(prompts.length),
      prompt_cache=self._placed(
        [
          layer if kind.mixer == 'attention' else ()
          for kind, layer in zip(self.model.config.kinds, cache, strict=True)
        ]
      ),
      cache=self._placed(own),
    )
    logits = jnp.repeat(logits, self.group, axis=0)
    rows, drawn = draw(rows, logits, self.choices, routing)
    return rows, _by_rows(jax.tree.map(lambda x: x[:, None], drawn))

  def decode(
    self, params, rows: Rows, limit: Array, floor: Array
  ) -> tuple[Rows, Drawn]:
    """Draws token after token for every row that goes on.

    Args:
      params: What `sampler_params` returned.
      rows: See `Rows`.
      limit: i32[], how many tokens to draw per row, at most `C`.
      floor: i32[]; decoding stops when no more rows than this go on, if each
        shard of the caches is taken for as full as the fullest.

    Returns:
      The rows, and what they have drawn: C = `drawn_columns(M)` columns, filled
      from column 0.
    """
    prompt_length = self._prompt_length(rows)
    shards = sharding.current_row_shards() * self.pieces

    def alive(ended):
      on_shard = jnp.sum(~ended.reshape(shards, -1), axis=1, dtype=jnp.int32)
      return shards * jnp.max(on_shard)

    def read(rows):
      hidden, caches, routing = read_hidden(
        self.model,
        params,
        rows.last[:, None],
        (prompt_length + rows.age - 1)[:, None],  # where `last` stands
        self._where_caches_are(
          attention.over_cache(
            rows.prompt_length,
            rows.age,
            rows.clock,
            self.model.config.attention,
          )
        ),
        list(zip(rows.prompt_cache, rows.cache, strict=True)),
      )
      # Only the rows' own caches have changed, not those of the prompts.
      own = self._placed([own for _, own in caches or ()])
      rows = rows._replace(cache=own, clock=rows.clock + 1)
      return hidden, rows, routing

    columns = max(
      layer[0].shape[self._axes.positions[0]]
      for kind, layer in zip(self.model.config.kinds, rows.cache, strict=True)
      if kind.mixer == 'attention' and layer
    )
    rows, drawn = draw_until(
      self.model, params, rows, read, alive, columns, limit, floor,
      self.choices, self._on_all,
    )  # fmt: skip
    return rows, _by_rows(drawn)

  def regroup(
    self, parts: Sequence[Rows], lane: Array, row: Array, columns: int
  ) -> Rows:
    """Moves rows into other lanes, with caches that may be longer.

    Args:
      parts: The rows before. Rows and lanes are numbered through all parts, on
        each shard of the caches by itself. The caches of the second and later
        parts are empty.
      lane: i32[A'], for each new lane the old lane whose prompt it continues.
      row: i32[B'], for each place of the new lanes the row that moves there; -1
        for none.
      columns: The new length of the caches, `M'`. It may be larger than `M`
        only if no ring of the first part has come around yet: in a longer ring
        the old entries would lie in the wrong places.

    Returns:
      The new `Rows`, at the clock of the first part.
    """

    def pick(part, index):
      # They lie on every device of a data shard.
      taken = sharding.take_rows(part, index, self.pieces)
      return sharding.constrain_rows(taken)

    def pick_cache(part, index):
      return sharding.take_rows(part, index, 1, self.everywhere)

    def grown(x, axis, places):
      widths = [(0, 0)] * 4
      widths[axis] = 0, places - x.shape[axis]
      return jnp.pad(x, widths)

    def joined(name, index, pick=pick):
      trees = [getattr(part, name) for part in parts]
      return jax.tree.map(lambda *x: pick(x, index), *trees)

    # An empty place becomes a copy of row 0 that has ended.
    lane, row = self._on_all((lane, row))
    some = self._on_all(jnp.maximum(row, 0))
    first = parts[0]
    parts = [
      p._replace(cache=self._by_layer(grown, p.cache, columns)) for p in parts
    ]
    return Rows(
      **{
        name: joined(name, some) for name in ('last', 'age', 'key', 'numbers')
      },
      cache=self._placed(joined('cache', some, pick_cache)),
      ended=joined('ended', some) | (row < 0),
      clock=first.clock,
      prompt_length=joined('prompt_length', lane),
      prompt_cache=self._placed(joined('prompt_cache', lane, pick_cache)),
    )

  def drawn_columns(self, columns: int) -> int:
    """How many tokens one call of `decode` can draw per row, `C`."""
    return max(
      _places(kind, columns)
      for kind in self.model.config.kinds
      if kind.mixer == 'attention'
    )

  def _by_layer(self, function, cache, columns: int, of_state=lambda x: x):
    """A function of (array, axis, places) on the caches of all layers.

    States have no places, and another function.
    """

    def one(kind, layer):
      if kind.mixer != 'attention':
        return tuple(map(of_state, layer))
      places = _places(kind, columns)
      return tuple(
        function(x, axis, places)
        for x, axis in zip(layer, self._axes.positions, strict=bool(layer))
      )

    return list(map(one, self.model.config.kinds, cache))

  def _placed(self, cache: Any) -> Any:
    """The caches of all layers, each split over the devices."""
    return placed(self.model.config, cache, self._axes.heads, self.everywhere)

  @property
  def pieces(self) -> int:
    """Into how many pieces the rows of a data shard fall; see `everywhere`."""
    if not self.everywhere or self.mesh is None:
      return 1
    return self.mesh.shape['tensor']

  def _on_all(self, tree: Any) -> Any:
    """Numbers of rows, on every device of a data shard.

    Left to itself, the compiler splits them as the caches are split, and sends
    them for each token.
    """
    if not self.everywhere:
      return tree
    return jax.tree.map(
      lambda x: sharding.constrain_rows(x) if x.ndim == 1 else x, tree
    )

  def _where_caches_are(
    self, function: attention.Attention
  ) -> attention.Attention:
    """Attention that brings queries to the caches, and outputs back."""
    if not self.everywhere:
      return function

    def there(tree):
      # A token of a row is little beside its cache, and beside the weights.
      return jax.tree.map(lambda x: sharding.constrain_rows(x, True), tree)

    def back(tree):
      tree = there(tree)
      return jax.tree.map(lambda x: sharding.constrain_cache(x, 2), tree)

    def attend(query, key, value, *rest, **options):
      output, cache = function(*there((query, key, value)), *rest, **options)
      return back(output), cache

    def make_states():
      made = function.states

      def convolve(x, taps, kept):
        found, kept = made.convolve(there(x), taps, kept)
        return back(found), kept

      def recur(arrays, kept):
        output, kept = made.recur(there(arrays), kept)
        return back(output), kept

      return made._replace(convolve=convolve, recur=recur)

    return attention.Attention(attend, make_states)

  @property
  def routes(self) -> bool:
    """Whether the model says which experts it chose."""
    return self.model.routes

  @property
  def _axes(self) -> attention.CacheAxes:
    """The order of axes in a cache."""
    return attention.cache_axes(self.model.config.attention)

  def _prompt_length(self, rows: Rows) -> Array:
    """The length of each row's prompt, i32[B]."""
    width = rows.last.shape[0] // rows.prompt_length.shape[0]
    return jnp.repeat(rows.prompt_length, width)


def placed(
  config: models.ModelConfig, cache: Any, heads: int, everywhere: bool = False
) -> Any:
  """The caches of all layers, split over the devices by rows and heads.

  Args:
    config: The shape of the model.
    cache: For each layer its arrays; there may be none.
    heads: The axis of heads in keys and values.
    everywhere: See `Sampler`.
  """

  def one(kind, layer):
    return tuple(
      sharding.constrain_cache(x, axis, everywhere)
      for x, axis in zip(layer, heads_axes(kind, heads), strict=bool(layer))
    )

  return list(map(one, config.kinds, cache))


def heads_axes(kind: models.LayerKind, heads: int) -> tuple[int, ...]:
  """The axis of heads in each array of a layer's cache.

  Args:
    kind: Of the layer.
    heads: The axis in keys and values.
  """
  return states.HEADS.get(kind.mixer) or (heads, heads)


def read_hidden(model: models.Layered, *given) -> tuple[Array, Any, Any]:
  """`hidden` of the model, and the code i32[B,Q] of its experts if any."""
  if not model.routes:
    return *model.hidden(*given), None
  hidden, cache, routed = model.hidden_routed(*given)
  return hidden, cache, routed.code


def _by_rows(drawn: Drawn) -> Drawn:
  """What was drawn, each row where its caches are."""
  return jax.tree.map(sharding.constrain_rows, drawn)


def no_tokens(prompts: Prompts, group: int) -> dict[str, Any]:
  """Fields of the rows [P*G] of some prompts before their first token."""
  count = prompts.keys.shape[0] * group
  words = jnp.asarray(prompts.keys).reshape(count, -1)
  numbers = jax.tree.map(lambda x: jnp.repeat(x, group), prompts.numbers)
  return dict(
    last=jnp.zeros((count,), jnp.int32),
    age=jnp.zeros((count,), jnp.int32),
    ended=numbers.limit <= 0,
    key=jax.random.wrap_key_data(words, impl='threefry2x32'),
    numbers=numbers,
  )


def draw(
  rows: RowsT,
  logits: Array,
  choices: Choices,
  routing: Array | None = None,
) -> tuple[RowsT, Drawn]:
  """Draws one more token for every row that has not ended.

  Args:
    rows: `Rows`, or another tuple with the fields that `no_tokens` makes.
    logits: f32[B,V].
    choices: Those of `rows.numbers`.
    routing: i32[B], see `Drawn`.

  Returns:
    The rows, and the tokens [B]: 0 in rows that have ended.
  """
  # The random number belongs to the position in the completion, not to the
  # clock: rows begin at different times.
  at_age = jax.vmap(jax.random.fold_in)(rows.key, rows.age)
  uniform = jax.vmap(jax.random.uniform)(at_age)
  chosen = next_token(logits, uniform, rows.age, rows.numbers, choices)
  drawn = Drawn(*chosen, routing)
  going, end = ~rows.ended, jnp.array(choices.eos_ids, jnp.int32)
  drawn = drawn._replace(token=drawn.token.astype(jnp.int32))
  drawn = jax.tree.map(lambda x: jnp.where(going, x, 0), drawn)
  is_end = jnp.any(drawn.token[:, None] == end[None], axis=-1)
  age = rows.age + going
  rows = rows._replace(
    last=drawn.token,
    age=age,
    ended=rows.ended | is_end | (age >= rows.numbers.limit),
  )
  return rows, drawn


def draw_until(
  model: models.Layered,
  params: Any,
  rows: RowsT,
  read: Callable[[RowsT], tuple[Array, RowsT, Any]],
  alive: Callable[[Array], Array],
  columns: int,
  limit: Array,
  floor: Array,
  choices: Choices,
  placed: Callable[[Any], Any] = lambda tree: tree,
) -> tuple[RowsT, Drawn]:
  """Draws token after token for every row that goes on.

  Args:
    model: Whose output layer is asked.
    params: What `sampler_params` returned.
    rows: See `draw`.
    read: Reads the newest token of each row. Returns the last hidden states
      f[B,1,D], the rows with what their caches are now, and the routing
      i32[B,1], if the model has experts.
    alive: How many rows are counted as alive, i32[], of which have ended.
    columns: `C`, of what is returned.
    limit: i32[], how many tokens to draw per row, at most `C`.
    floor: i32[]; drawing stops when no more rows than this are alive.
    choices: Those of `rows.numbers`.
    placed: Puts arrays of all rows where they are to lie.

  Returns:
    The rows, and what they have drawn, in columns from 0 on.
  """
  shape = rows.last.shape[0], columns
  nothing = Drawn(
    jnp.zeros(shape, jnp.int32), *(jnp.zeros(shape) for _ in range(3))
  )
  if model.routes:
    nothing = nothing._replace(routing=nothing.token)

  def going(carry):
    step, rows, _ = carry
    return (step < limit) & (alive(rows.ended) > floor)

  def body(carry):
    step, rows, drawn = carry
    hidden, rows, routing = read(rows)
    logits = model.head(params, hidden[:, 0])
    if routing is not None:
      routing = routing[:, 0]
    rows, new = draw(rows, logits, choices, routing)
    rows, new = placed(rows), placed(new)
    put = lambda to, x: lax.dynamic_update_slice_in_dim(
      to, x[:, None], step, axis=1
    )
    return step + 1, rows, jax.tree.map(put, drawn, new)

  # A loop on the device: the host is asked once per call, not once per token.
  start = jnp.zeros((), jnp.int32), placed(rows), nothing
  _, rows, drawn = lax.while_loop(going, body, start)
  return rows, drawn


def compiled(
  name: str, static: tuple[int, ...] = (), donated: tuple[int, ...] = ()
):
  """A method of `Sampler`, or of what has a mesh, as a jitted function.

  Args:
    name: The method's name.
    static: Positions of the static arguments besides its object, which is 0.
    donated: Positions of the arguments whose memory the result may take.
  """

  def call(owner, *args):
    with sharding.use(owner.mesh):
      return getattr(owner, name)(*args)

  call.__name__ = name
  return jax.jit(
    call,
    static_argnums=(0, *static),
    donate_argnums=donated,
    # The learner's programs have the same options; otherwise the two would
    # round differently and disagree on logp.
    compiler_options=sharding.COMPILER_OPTIONS,
  )


prefill = compiled('prefill', static=(3,))
# Donated, so that decoding writes into its own caches and needs no second set.
decode = compiled('decode', donated=(2,))
# Rows that change places cannot be written into the arrays they are read from.
regroup = compiled('regroup', static=(4,))
