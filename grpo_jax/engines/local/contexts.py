"""The compiled programs of calls: read, decode, pick and place.

A row has a cache of its whole context, or its states behind that, so that it
can wait for an environment and then go on where it was:

- `read` reads what is new in the contexts of some rows;
- `decode` draws one token after another for all rows that are drawn on;
- `pick` and `place` copy the cache of one row out of the others, and back;
  `pick_states` copies what layers with a state keep of it.

What a row computes depends on its own tokens alone: on where they were read and
where they were drawn, not on the other rows, and not on which row it is. Shapes
are few: `B` rows and `M` places of a pool, `E` rows and `Q` tokens of a `read`,
`C` tokens of a `decode`.
"""

import dataclasses
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax import models
from grpo_jax.engines.local import sampler
from grpo_jax.engines.local.next_token import Choices
from grpo_jax.engines.local.next_token import Numbers
from grpo_jax.mesh import sharding
from grpo_jax.models import attention

Array = jax.Array
AnyArray = jax.Array | np.ndarray

STEPS = 16
"""The most tokens that one call of `decode` draws for a row, `C`."""


class Turns(NamedTuple):
  """What is drawn in each row of a pool; arrays [B], on the host between calls.

  Attributes:
    last: i32, the newest token, which is not in the cache yet.
    place: i32, its position, and so the number of tokens before it.
    age: i32, how many tokens the turn has.
    ended: bool, whether nothing more is drawn.
    words: u32[B,2], of the key of the turn.
    numbers: How it is drawn.
  """

  last: AnyArray
  place: AnyArray
  age: AnyArray
  ended: AnyArray
  words: AnyArray
  numbers: Numbers


class _Rows(NamedTuple):
  """`Turns` on the device; what `sampler.draw_until` goes on with."""

  last: Array
  place: Array
  age: Array
  ended: Array
  key: Array
  numbers: Numbers
  cache: Any


@dataclasses.dataclass(frozen=True)
class Programs:
  """What the compiled programs are compiled for; a static argument of them.

  Attributes:
    model: See `models.transformer`.
    mesh: Over whose data shards the rows are split; None for one device.
    choices: Which ways of choosing a token there are; of `decode` alone.
  """

  model: models.Layered
  mesh: jax.sharding.Mesh | None = None
  choices: Choices = Choices()

  def read_contexts(
    self, params, cache: Any, rows: Array, tokens: Array, start: Array,
    count: Array,
  ) -> Any:  # fmt: skip
    """Reads tokens into the caches of some rows.

    Args:
      params: What `sampler_params` returned.
      cache: For each layer the keys and values of the rows of a pool, f[B,...]
        with M places, see `attention.cache_axes`; or their states. () of one
        that shares keys and values.
      rows: i32[E], numbered on each data shard by itself.
      tokens: i32[E,Q].
      start: i32[E], the position of the first of them.
      count: i32[E], how many of them there are; 0 for a row that is padding.

    Returns:
      The caches.
    """
    positions = start[:, None] + jnp.arange(tokens.shape[1])[None]
    _, cache, _ = sampler.read_hidden(
      self.model,
      params,
      tokens,
      positions,
      attention.over_contexts(start, count, rows, self.model.config.attention),
      cache,
    )
    return self._placed(cache)

  def decode_contexts(
    self, params, cache: Any, turns: Turns, limit: Array, floor: Array
  ) -> tuple[Any, Turns, sampler.Drawn]:
    """Draws token after token for every row that has not ended.

    Args:
      params: What `sampler_params` returned.
      cache: See `read_contexts`.
      turns: What is drawn.
      limit: i32[], how many tokens to draw per row, at most `STEPS`.
      floor: i32[]; decoding stops when no more rows than this go on.

    Returns:
      The caches, the turns, and what was drawn, in columns from 0 on.
    """
    words = jnp.asarray(turns.words)
    rows = _Rows(
      last=jnp.asarray(turns.last),
      place=jnp.asarray(turns.place),
      age=jnp.asarray(turns.age),
      ended=jnp.asarray(turns.ended),
      key=jax.random.wrap_key_data(words, impl='threefry2x32'),
      numbers=turns.numbers,
      cache=cache,
    )

    def read(rows):
      going = (~rows.ended).astype(jnp.int32)
      hidden, cache, routing = sampler.read_hidden(
        self.model,
        params,
        rows.last[:, None],
        rows.place[:, None],
        attention.over_contexts(
          rows.place, going, None, self.model.config.attention
        ),
        rows.cache,
      )
      rows = rows._replace(place=rows.place + going, cache=self._placed(cache))
      return hidden, rows, routing

    def alive(ended):
      return jnp.sum(~ended, dtype=jnp.int32)

    rows, drawn = sampler.draw_until(
      self.model, params, rows, read, alive, STEPS, limit, floor, self.choices
    )
    turns = turns._replace(
      last=rows.last, place=rows.place, age=rows.age, ended=rows.ended
    )
    return rows.cache, turns, drawn

  def pick_context(self, cache: Any, row: Array) -> Any:
    """The cache of one row, f[1,...] for each layer, on every data shard."""
    return jax.tree.map(lambda x: sharding.pick_row(x, row), cache)

  def pick_states_alone(self, cache: Any, row: Array) -> Any:
    """`pick_context` of layers with a state; nothing of the others."""
    kinds = self.model.config.kinds
    states = [
      () if kind.mixer == 'attention' else layer
      for kind, layer in zip(kinds, cache, strict=True)
    ]
    return self.pick_context(states, row)

  def place_context(self, cache: Any, one: Any, row: Array) -> Any:
    """The caches of a pool with that of one row in its place.

    Args:
      cache: Of the pool.
      one: From `pick_context`. It may be of another pool: places that are
        missing get zeros, and those that are too many are left out.
      row: i32[], which row of the pool.
    """

    def put(x, one):
      one = one[:, *(slice(size) for size in x.shape[1:])]
      widths = [(0, x.shape[n] - one.shape[n]) for n in range(1, one.ndim)]
      return sharding.place_row(x, jnp.pad(one, [(0, 0), *widths]), row)

    return self._placed(jax.tree.map(put, cache, one))

  def shapes(self, params, rows: int, places: int) -> Any:
    """The caches of a pool: shapes, dtypes, and where they lie on a mesh.

    Args:
      params: What `sampler_params` returned.
      rows: `B`.
      places: `M`.
    """

    # Traced once: a run makes its pools anew for each rollout.
    token = jax.ShapeDtypeStruct((1, 1), np.int32)
    one = _shortest.eval_shape(self, params, token)

    def whole(x, heads, axis=None, portable_axis=None):
      shape = [rows, *x.shape[1:]]
      if axis is not None and portable_axis is not None:
        del shape[portable_axis]
        shape.insert(axis, places)
      at = self.mesh and jax.sharding.NamedSharding(
        self.mesh, sharding.cache_spec(self.mesh, tuple(shape), heads)
      )
      return jax.ShapeDtypeStruct(tuple(shape), x.dtype, sharding=at)

    portable = attention.cache_axes('xla').positions

    def of_layer(kind, layer):
      axes = [sampler.heads_axes(kind, self._axes.heads)]
      if kind.mixer == 'attention':
        axes += [self._axes.positions, portable]
      return tuple(map(whole, layer, *axes))

    return list(map(of_layer, self.model.config.kinds, one))

  def empty(self, params, rows: int, places: int) -> Any:
    """Caches of a pool, on the devices; see `shapes`."""
    return jax.tree.map(
      lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding),
      self.shapes(params, rows, places),
    )

  def shortest_cache(self, params, tokens: Array) -> Any:
    """The cache of few tokens; portable, as a kernel may not take so few."""
    over = attention.over_prompts(jnp.ones(1, jnp.int32), 'xla')
    positions = jnp.zeros_like(tokens)
    return sampler.read_hidden(self.model, params, tokens, positions, over)[1]

  def _placed(self, cache: Any) -> Any:
    return sampler.placed(self.model.config, cache, self._axes.heads)

  @property
  def _axes(self) -> attention.CacheAxes:
    platform = sharding.platform(self.mesh)
    return attention.cache_axes(self.model.config.attention, platform)


read = sampler.compiled('read_contexts', donated=(2,))
decode = sampler.compiled('decode_contexts', donated=(2,))
pick = sampler.compiled('pick_context')
pick_states = sampler.compiled('pick_states_alone')
place = sampler.compiled('place_context', donated=(1,))
_shortest = sampler.compiled('shortest_cache')
