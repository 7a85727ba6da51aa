"""States: what layers without keys and values remember of the tokens before.

Such a layer asks for two things, whichever way its tokens lie in rows: a short
convolution over the tokens just before each (`convolve`), and the outputs of
the gated delta rule (`recur`; see `delta`), both along its path. A token's path
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
from collections.abc import Iterable
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
    convolve: From (x f[B,Q,...], taps f[n,...], kept f[B,n-1,...] or None) to
      f32[B,Q,...], the sum of x at a token and at the n - 1 before it, each
      channel times its tap, the last tap for the token itself; and what is to
      be kept. Before the first token x is 0.
    recur: From queries, keys, values, rates and decays, see `delta.recur`, and
      the kept state or None, to the outputs f32[B,Q,H,E] and the state that is
      to be kept.
    store: From what is to be kept and the cache to the new cache.
  """

  load: Callable[..., Any]
  convolve: Callable[..., tuple[Array, Any]]
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
    convolve, recur = _over_blocks(layout, layout.blocks)
  else:
    convolve, recur = _over_segments(layout)
  return States(
    load=lambda cache: None,
    convolve=lambda x, taps, _: (convolve(x, taps), None),
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
    convolve=functools.partial(_convolve_line, count=length),
    recur=functools.partial(_recur_line, count=length),
    store=lambda kept, cache: tuple(kept),
  )


def over_cache() -> States:
  """For one new token of each row that is being decoded.

  The cache of a layer is a pair: nothing, in the place of what the prompt has,
  and what each row keeps.
  """
  return States(
    load=lambda cache: cache[1],
    convolve=_convolve_line,
    recur=_recur_line,
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
    convolve=functools.partial(_convolve_line, count=count),
    recur=functools.partial(_recur_line, count=count),
    store=store,
  )


def _along(x: Array, like: Array) -> Array:
  """[B] -> [B,1,...], of the rank of another array."""
  return x.reshape(x.shape + (1,) * (like.ndim - x.ndim))


def _convolve_line(x, taps, kept, count=None):
  """`States.convolve` of rows that are one line each.

  Args:
    x: f[B,Q,...].
    taps: f[n,...].
    kept: f[B,n-1,...] of the tokens before; None: there are none.
    count: i32[B], how many of the Q are tokens, from the first; None: all.
  """
  columns, before = x.shape[1], len(taps) - 1
  if kept is None:
    kept = jnp.zeros((x.shape[0], before, *x.shape[2:]), x.dtype)
  joined = jnp.concatenate([kept.astype(x.dtype), x], axis=1)
  found = (joined[:, i : i + columns] for i in range(len(taps)))
  if count is None:
    return _times_taps(found, taps), joined[:, columns:]
  index = count[:, None] + jnp.arange(before)[None]
  index = index.reshape(index.shape + (1,) * (x.ndim - 2))
  kept = jnp.take_along_axis(joined, index, axis=1)
  return _times_taps(found, taps), kept


def _times_taps(inputs: Iterable[Array], taps: Array) -> Array:
  """The sum of arrays f[B,Q,...], each times its tap f[...], in float32."""
  total = jnp.zeros((), jnp.float32)
  for x, tap in zip(inputs, taps.astype(jnp.float32), strict=True):
    total += x.astype(jnp.float32) * tap[None, None]
  return total


def _recur_line(arrays, kept, count=None):
  """`States.recur` of rows that are one line each; see `_convolve_line`."""
  query, key, value, rate, decay = arrays
  if count is not None:
    used = jnp.arange(value.shape[1])[None] < count[:, None]
    # Of 0, they leave a state what it is.
    rate, decay = (jnp.where(_along(used, x), x, 0) for x in (rate, decay))
  if value.shape[1] > 1:
    return delta.recur(query, key, value, rate, decay, kept)
  if kept is None:
    sizes = value.shape[2], key.shape[-1], value.shape[-1]
    kept = jnp.zeros((value.shape[0], *sizes), jnp.float32)
  query, key, value, rate, decay = (
    x[:, 0] for x in (query, key, value, rate, decay)
  )
  output, kept = delta.step(query, key, value, rate, decay, kept)
  return output[:, None], kept


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

  def convolve(x, taps):
    prompt, kept = _convolve_line(x[:, :edge], taps, None, prompt_length)
    kept = jnp.repeat(kept, group, axis=0)
    return joined(prompt, _convolve_line(own(x), taps, kept)[0])

  def recur(arrays):
    prompts = [x[:, :edge] for x in arrays]
    prompt, kept = _recur_line(prompts, None, prompt_length)
    kept = jnp.repeat(kept, group, axis=0)
    rest, _ = _recur_line([own(x) for x in arrays], kept, own_length)
    return joined(prompt, rest)

  return convolve, recur


def _over_segments(layout: Layout):
  """Of rows of any segments, which may be cut over devices."""
  segment, parent, position = map(
    shards.gather_columns, (layout.segment, layout.parent, layout.position)
  )
  find = _earlier(segment, parent, position, layout.parents)
  path = delta.Path(segment, parent)

  def convolve(x, taps):
    (x,), back = _columns_for_heads([x])
    if x.shape[2] < taps.shape[1]:  # some of the heads
      first = shards.part() * x.shape[2]
      taps = lax.dynamic_slice_in_dim(taps, first, x.shape[2], axis=1)

    def before(tokens):
      if not tokens:
        return x
      at, is_there = (_along(y, x) for y in find(tokens))
      taken = jnp.take_along_axis(x, jnp.maximum(at, 0), axis=1)
      return jnp.where(is_there, taken, 0)

    return back(_times_taps(map(before, reversed(range(len(taps)))), taps))

  def recur(arrays):
    whole, back = _columns_for_heads(arrays)
    query, key, value, rate, decay = whole
    return back(delta.recur(query, key, value, rate, decay, None, path)[0])

  return convolve, recur


def _earlier(segment: Array, parent: Array, position: Array, parents: bool):
  """Where the tokens before each token are.

  Args:
    segment: i32[R,S], as in a `Layout`.
    parent: Likewise.
    position: Likewise.
    parents: Whether any segment continues another.

  Returns:
    From a number of tokens to (i32[R,S], bool[R,S]): the column of the token
    that is so many before, and whether there is one.
  """
  used = segment > 0
  column = jnp.broadcast_to(jnp.arange(segment.shape[1])[None], segment.shape)
  if not parents:
    return lambda tokens: (column - tokens, used & (position >= tokens))
  # The last column of each segment, of which there are at most as many.
  last = jnp.zeros((len(segment), segment.shape[1] + 1), column.dtype)
  last = jax.vmap(lambda x, at, value: x.at[at].max(value))(
    last, segment, column
  )
  end = jnp.take_along_axis(last, parent, axis=1)  # of the parent
  behind = position - jnp.take_along_axis(position, end, axis=1) - 1

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
