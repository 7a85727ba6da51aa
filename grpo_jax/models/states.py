"""States: what layers without keys and values remember of the tokens before.

Such a layer asks for two things, whichever way its tokens lie in rows: what it
has read at the tokens just before each (`inputs`), and the outputs of the gated
delta rule along the path of each token (`recur`; see `delta`). A token's path
are the tokens before it that it may see: its own segment's, and those of the
prompt that this one continues.

Four constructors make `States`, as those of `attention` of the same names make
attention. What is kept between two calls is one tuple of arrays for each layer:
the newest inputs, f[B,taps-1,...], oldest first, of each convolution; and the
state f32[B,H,D,E]. They do not grow, so they cannot go back either: what is
read on from an earlier place needs what was kept there.

Shapes: `B` or `R` rows, `Q` or `S` columns, `K` key heads, `H` value heads, `D`
and `E` the sizes of a key and of a value.
"""

from collections.abc import Callable
import functools
import math
from typing import Any
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from grpo_jax.mesh import sharding
from grpo_jax.mesh import shards
from grpo_jax.models import delta
from grpo_jax.models.layout import Blocks
from grpo_jax.models.layout import Layout

Array = jax.Array


class States(NamedTuple):
  """What a layer with a state calls.

  Attributes:
    load: From the cache of the layer to what was kept, one entry for each array
      of it; None: nothing was, and the rows begin.
    inputs: From (x f[B,Q,...], number, kept f[B,number-1,...] or None) to a
      tuple of `number` arrays like x, which hold what x was so many tokens
      before, from `number - 1` to 0 (x itself), and 0 before the first token;
      and what is to be kept.
    recur: From queries, keys, values, rates and decays, see `delta.recur`, and
      the kept state or None, to the outputs f32[B,Q,H,E] and the state that is
      to be kept.
    store: From what is to be kept and the cache to the new cache.
  """

  load: Callable[..., Any]
  inputs: Callable[..., tuple[tuple[Array, ...], Any]]
  recur: Callable[..., tuple[Array, Any]]
  store: Callable[..., Any]


HEADS: dict[str, tuple[int, ...]] = {
  'convolution': (2,),
  'delta': (2, 2, 2, 1),
}
"""The axis of heads, or of channels, in what layers of a mixer keep."""


def over_layout(layout: Layout) -> States:
  """For the rows of a layout, in scoring and training; nothing is kept.

  Args:
    layout: Without branches; see `Layout.reach`.
  """
  assert layout.reach is None, 'a state has no branches'
  # Rows that are cut have cut blocks.
  if layout.blocks is not None and shards.parts() == 1:
    inputs, recur = _over_blocks(layout, layout.blocks)
  else:
    inputs, recur = _over_segments(layout)
  return States(
    load=lambda cache: None,
    inputs=lambda x, number, _: (inputs(x, number), None),
    recur=lambda arrays, _: (recur(arrays), None),
    store=lambda kept, cache: cache,
  )


def over_prompts(length: Array) -> States:
  """For right-padded prompts, behind which the caches are those of their ends.

  Args:
    length: i32[P], tokens of each prompt.
  """
  return States(
    load=lambda cache: None,
    inputs=functools.partial(_line_inputs, count=length),
    recur=functools.partial(_line_recur, count=length),
    store=lambda kept, cache: tuple(kept),
  )


def over_cache() -> States:
  """For one new token of each row that is being decoded.

  The cache of a layer is a pair: nothing, in the place of what the prompt has,
  and what each row keeps.
  """
  return States(
    load=lambda cache: cache[1],
    inputs=_line_inputs,
    recur=_line_recur,
    store=lambda kept, cache: (cache[0], tuple(kept)),
  )


def over_contexts(
  start: Array, count: Array, rows: Array | None = None
) -> States:
  """For new tokens of rows with a whole context of their own.

  Args:
    start: i32[E], the position of the first new token of each row. At 0 the row
      begins, whatever its cache holds.
    count: i32[E], how many of the Q tokens are new; the others are padding,
      which changes nothing.
    rows: i32[E], see `attention.over_contexts`.
  """

  def load(cache):
    if rows is not None:
      cache = [sharding.take_rows([x], rows) for x in cache]
    return [jnp.where(_along(start > 0, x), x, 0) for x in cache]

  def store(kept, cache):
    # As one place of each row, so that padding is left out.
    place = jnp.where(count > 0, 0, 1)[:, None]

    def put(buffer, new):
      whole = sharding.put_rows(
        buffer[:, None], new.astype(buffer.dtype)[:, None], place, 1, rows
      )
      return whole[:, 0]

    return tuple(map(put, cache, kept))

  return States(
    load=load,
    inputs=functools.partial(_line_inputs, count=count),
    recur=functools.partial(_line_recur, count=count),
    store=store,
  )


def _along(x: Array, like: Array) -> Array:
  """[B] -> [B,1,...], of the rank of another array."""
  return x.reshape(x.shape + (1,) * (like.ndim - x.ndim))


def _line_inputs(x, number, kept, count=None):
  """`States.inputs` of rows that are one line each.

  Args:
    x: f[B,Q,...].
    number: How many.
    kept: f[B,number-1,...] of the tokens before; None: there are none.
    count: i32[B], how many of the Q are tokens, from the first; None: all.
  """
  columns, before = x.shape[1], number - 1
  if kept is None:
    kept = jnp.zeros((x.shape[0], before, *x.shape[2:]), x.dtype)
  joined = jnp.concatenate([kept.astype(x.dtype), x], axis=1)
  found = tuple(joined[:, i : i + columns] for i in range(number))
  if count is None:
    return found, joined[:, columns:]
  index = count[:, None] + jnp.arange(before)[None]
  index = index.reshape(index.shape + (1,) * (x.ndim - 2))
  return found, jnp.take_along_axis(joined, index, axis=1)


def _line_recur(arrays, kept, count=None):
  """`States.recur` of rows that are one line each; see `_line_inputs`."""
  query, key, value, rate, decay = arrays
  if kept is None:
    sizes = value.shape[2], key.shape[-1], value.shape[-1]
    kept = jnp.zeros((value.shape[0], *sizes), jnp.float32)
  if count is not None:
    used = jnp.arange(value.shape[1])[None] < count[:, None]
    rate, decay = _unless_padding(used, rate, decay)
  if value.shape[1] > 1:
    return delta.recur(query, key, value, rate, decay, kept)
  query, key, value, rate, decay = (
    x[:, 0] for x in (query, key, value, rate, decay)
  )
  output, kept = delta.step(query, key, value, rate, decay, kept)
  return output[:, None], kept


def _unless_padding(used: Array, *numbers: Array) -> list[Array]:
  """Rates and decays of 0 in padding, which leaves a state what it is."""
  return [jnp.where(_along(used, x), x, 0) for x in numbers]


def _over_blocks(layout: Layout, blocks: Blocks):
  """Of rows of one prompt and equal blocks, which all go on from its end."""
  edge, group = blocks.prompt_tokens, blocks.completions
  used = layout.segment > 0
  prompt_length = jnp.sum(used[:, :edge], axis=1)

  def own(x):  # [R,S,...] -> the blocks, each a row of its own [R*G,T,...]
    return x[:, edge:].reshape(-1, blocks.completion_tokens, *x.shape[2:])

  def joined(prompt, blocks):
    own = blocks.reshape(len(prompt), -1, *blocks.shape[2:])
    return jnp.concatenate([prompt, own], axis=1)

  own_length = jnp.sum(own(used), axis=1)

  def inputs(x, number):
    prompt, kept = _line_inputs(x[:, :edge], number, None, prompt_length)
    rest, _ = _line_inputs(own(x), number, jnp.repeat(kept, group, axis=0))
    return tuple(map(joined, prompt, rest))

  def recur(arrays):
    prompts = [x[:, :edge] for x in arrays]
    prompt, kept = _line_recur(prompts, None, prompt_length)
    kept = jnp.repeat(kept, group, axis=0)
    rest, _ = _line_recur([own(x) for x in arrays], kept, own_length)
    return joined(prompt, rest)

  return inputs, recur


def _over_segments(layout: Layout):
  """Of rows of any segments, which may be cut over devices."""
  column, size = (
    jnp.arange(layout.tokens.shape[1])[None],
    layout.tokens.shape[1],
  )
  if shards.parts() > 1:
    column = column + shards.first_column(size)
  find = _earlier(layout, column)

  def inputs(x, number):
    whole = shards.gather_columns(x)

    def before(tokens):
      at, is_there = find(tokens)
      at, is_there = _along(jnp.maximum(at, 0), x), _along(is_there, x)
      taken = jnp.take_along_axis(whole, at, axis=1)
      return jnp.where(is_there, taken, 0)

    return (*(before(number - 1 - i) for i in range(number - 1)), x)

  path = delta.Path(
    *map(shards.gather_columns, (layout.segment, layout.parent))
  )

  def recur(arrays):
    query, key, value, *numbers = arrays
    numbers = _unless_padding(layout.segment > 0, *numbers)
    whole, back = _columns_for_heads([query, key, value, *numbers])
    query, key, value, rate, decay = whole
    sizes = value.shape[2], key.shape[-1], value.shape[-1]
    state = jnp.zeros((value.shape[0], *sizes), jnp.float32)
    return back(delta.recur(query, key, value, rate, decay, state, path)[0])

  return inputs, recur


def _earlier(layout: Layout, column: Array):
  """Where the tokens before each token are.

  Args:
    layout: The rows, or their part that is here.
    column: i32[1,S], the columns that are here, numbered through all parts.

  Returns:
    From a number of tokens to (i32[R,S], bool[R,S]): the column of the token
    that is so many before, and whether there is one.
  """
  position, used = layout.position, layout.segment > 0
  if not layout.parents:
    return lambda tokens: (column - tokens, used & (position >= tokens))
  parent = layout.parent
  all_segments, positions = map(
    shards.gather_columns, (layout.segment, layout.position)
  )
  everywhere = jnp.broadcast_to(
    jnp.arange(all_segments.shape[1])[None], all_segments.shape
  )
  # The last column of each segment, of which there are at most as many.
  last = jax.vmap(
    lambda number, at: (
      jnp.zeros_like(at, shape=(at.size + 1,)).at[number].max(at)
    )
  )(all_segments, everywhere)
  end = jnp.take_along_axis(last, parent, axis=1)  # of the parent
  behind = position - jnp.take_along_axis(positions, end, axis=1) - 1

  def find(tokens):
    goes_over = (parent > 0) & (tokens > behind)
    at = jnp.where(goes_over, end - (tokens - behind - 1), column - tokens)
    return at, used & (position >= tokens)

  return find


def _columns_for_heads(arrays):
  """All columns of some heads, if rows are cut over devices; and the way back.

  Each device gets an equal part of the heads, or all, if they do not divide.

  Args:
    arrays: [R,S/parts,heads,...].

  Returns:
    The arrays; and from f[R,S,heads,...] of these to f[R,S/parts,...] of all.
  """
  parts = shards.parts()
  if parts == 1:
    return arrays, lambda x: x
  if math.gcd(*(x.shape[2] for x in arrays)) % parts:
    size = arrays[0].shape[1]
    first = shards.first_column(size)
    return [
      shards.gather_columns(x) for x in arrays
    ], lambda x: lax.dynamic_slice_in_dim(x, first, size, axis=1)

  def exchange(x, split, concat):
    return lax.all_to_all(
      x, 'context', split_axis=split, concat_axis=concat, tiled=True
    )

  return [exchange(x, 2, 1) for x in arrays], lambda x: exchange(x, 1, 2)
