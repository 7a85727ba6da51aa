"""What both decoding kernels need: the ring's arithmetic, a running softmax.

Who sees what is defined as in `attend_recent`: query q of row b sees place j of
N if and only if `(newest[b] - j) mod N < count[b, q]`.
"""

import jax
from jax import lax
from jax.experimental import pallas as pl
import jax.numpy as jnp

Array = jax.Array

NEVER = -1e30  # the log-sum-exp of no scores, as in `models.attend`


def by_kv_head(query: Array, count: Array, kv_heads: int, multiple: int):
  """Scales the queries and groups them by the key-value head that they read.

  Returns:
    The queries f[B,K,M,D] and their counts i32[B,M]. `M` is `Q * H / K`, padded
    to a multiple of `multiple` with queries that see nothing.
  """
  rows, queries, heads, size = query.shape
  shared = heads // kv_heads
  query = query.reshape(rows, queries, kv_heads, shared, size) * size**-0.5
  query = jnp.moveaxis(query, 2, 1).reshape(rows, kv_heads, -1, size)
  more = -query.shape[2] % multiple
  query = jnp.pad(query, ((0, 0), (0, 0), (0, more), (0, 0)))
  count = jnp.pad(jnp.repeat(count, shared, axis=1), ((0, 0), (0, more)))
  return query, count.astype(jnp.int32)


def by_query(x: Array, like: Array) -> Array:
  """Undoes the grouping of `by_kv_head`: [B,K,M,...] -> [B,Q,H,...]."""
  rows, queries, heads, _ = like.shape
  kv_heads = x.shape[1]
  x = x[:, :, : queries * heads // kv_heads]
  x = x.reshape(rows, kv_heads, queries, heads // kv_heads, *x.shape[3:])
  return jnp.moveaxis(x, 1, 2).reshape(rows, queries, heads, *x.shape[4:])


def blocks_needed(newest: Array, count: Array, places: int, block: int):
  """i32[B]: how many blocks lie from the newest back to the oldest one seen."""
  reach = jnp.minimum(jnp.max(count, axis=1), places)
  oldest = newest - reach + 1
  last, number = newest // block, pl.cdiv(places, block)
  wrapped = last + 1 + number - (oldest + places) // block
  needed = jnp.where(
    oldest >= 0, last - oldest // block + 1, jnp.minimum(wrapped, number)
  )
  return jnp.where(reach > 0, needed, 0).astype(jnp.int32)


def block_back(newest, steps, places: int, block: int):
  """The block that lies `steps` blocks before the newest, around the ring."""
  # `//` would also handle negative numbers, and to lower that, Mosaic must know
  # which TPU it compiles for. `newest` is -1 only where nothing is seen.
  index = lax.div(jnp.maximum(newest, 0), jnp.int32(block)) - steps
  return jnp.where(index < 0, index + pl.cdiv(places, block), index)


def add_block(
  state,
  query,
  key,
  value,
  start,
  newest,
  count,
  places: int,
  cap: float | None = None,
):
  """Adds one block of keys to a running softmax; the body of both kernels.

  Args:
    state: What the blocks so far gave: the greatest score f32[M,1], the mass
      f32[M,1], and the output f32[M,D], not yet divided by the mass.
    query: f[M,D], scaled.
    key: f[n,D].
    value: f[n,D], finite also where no query sees it.
    start: i32[], the place of the block's first key.
    newest: i32[].
    count: i32[M,1].
    places: `N`.
    cap: Scores s become `cap * tanh(s / cap)`; None: as they are.

  Returns:
    The state with this block added.
  """
  top, total, output = state
  scores = lax.dot_general(
    query, key, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
  )
  if cap is not None:
    scores = cap * jnp.tanh(scores / cap)
  place = start + lax.broadcasted_iota(jnp.int32, scores.shape, 1)
  age = jnp.where(place <= newest, newest - place, newest - place + places)
  seen = (age < count) & (place < places)
  scores = jnp.where(seen, scores, NEVER)
  new_top = jnp.maximum(top, jnp.max(scores, axis=1, keepdims=True))
  mass = jnp.where(seen, jnp.exp(scores - new_top), 0)
  kept = jnp.exp(top - new_top)
  added = lax.dot_general(
    mass.astype(value.dtype),
    value,
    (((1,), (0,)), ((), ())),
    preferred_element_type=jnp.float32,
  )
  total = total * kept + jnp.sum(mass, axis=1, keepdims=True)
  return new_top, total, output * kept + added


def finish(state):
  """The output f32[M,D] and the log-sum-exp f32[M,1] of a running softmax."""
  top, total, output = state
  safe = jnp.where(total == 0, 1, total)
  return output / safe, jnp.where(total == 0, NEVER, jnp.log(safe) + top)


def empty(queries: int, size: int):
  """The state of a running softmax that has seen no block."""
  column = jnp.zeros((queries, 1), jnp.float32)
  return column + NEVER, column, jnp.zeros((queries, size), jnp.float32)
