"""Reductions over the vocabulary, which may be split over devices.

On a mesh the output layer leaves the logits split over the axis `tensor`. They
are not gathered: each shard of the vocabulary reduces what it has, and numbers
of rows are all that is sent. The last argument of each function is the mesh
axis of the shards; None means that all of the vocabulary is here.

Shapes: `B` rows, `V` ids that are here.
"""

import math

import jax
from jax import lax
import jax.numpy as jnp

Array = jax.Array
Axis = str | None


def ids(x: Array, axis: Axis) -> Array:
  """The ids of the columns of f[B,V], i32[V]."""
  here = jnp.arange(x.shape[-1])
  return here if axis is None else here + _first(x, axis)


def largest(x: Array, axis: Axis) -> Array:
  """The largest number of each row, f32[B,1]."""
  top = jnp.max(x, axis=-1, keepdims=True)
  return top if axis is None else lax.pmax(top, axis)


def total(x: Array, axis: Axis) -> Array:
  """The sum of each row, f32[B]."""
  here = jnp.sum(x, axis=-1)
  return here if axis is None else lax.psum(here, axis)


def log_sum_exp(x: Array, axis: Axis) -> Array:
  """The log of the sum of exponentials of each row, f32[B]."""
  if axis is None:
    return jax.nn.logsumexp(x, axis=-1)
  top = largest(x, axis)
  return jnp.log(total(jnp.exp(x - top), axis)) + top[:, 0]


def softmax(x: Array, axis: Axis) -> Array:
  """Exponentials over the sum of those of the row, f32[B,V]."""
  if axis is None:
    return jax.nn.softmax(x, axis=-1)
  mass = jnp.exp(x - largest(x, axis))
  return mass / total(mass, axis)[:, None]


def kth(x: Array, k: Array, most: int, axis: Axis) -> Array:
  """The k-th largest number of each row, f32[B,1]; -inf where k is 0.

  Args:
    x: f32[B,V].
    k: i32[B], at most `most`.
    most: No larger than the vocabulary.
    axis: Of the shards of the vocabulary.
  """
  if axis is not None:
    # The largest of all are among the largest of each shard.
    some = lax.top_k(x, min(most, x.shape[-1]))[0]
    x = lax.all_gather(some, axis, axis=1, tiled=True)
  place = jnp.maximum(k - 1, 0)
  return jnp.where(k > 0, _pick(lax.top_k(x, most)[0], place), -jnp.inf)[
    :, None
  ]


def least_share(share: Array, top_p: Array, axis: Axis) -> Array:
  """The smallest share that top-p keeps, f32[B,1].

  A token stays while those before it do not reach top_p. So the token with
  which they reach it stays too, and at least one token does. The smallest
  probability that stays is a threshold for the unsorted probabilities, so no
  token must be put back in its place.

  Args:
    share: f32[B,V], probabilities.
    top_p: f32[B,1], above 0.
    axis: Of the shards of the vocabulary.
  """
  if axis is None:
    order = jnp.sort(share, axis=-1, descending=True)
    before = jnp.cumsum(order, axis=-1) - order
    return jnp.min(
      jnp.where(before < top_p, order, jnp.inf), axis=-1, keepdims=True
    )

  # To sort, each device would need the whole vocabulary. The threshold is also
  # the smallest number such that all that is larger does not reach top_p.
  # Positive floats are ordered as their bits are, so 30 halvings find it
  # exactly, and each sends one number of a row.
  def halve(_, bounds):
    low, high = bounds  # more than `low` reaches top_p, more than `high` not
    middle = (low + high) // 2
    at = lax.bitcast_convert_type(middle, jnp.float32)
    more = total(jnp.where(share > at[:, None], share, 0), axis)
    short = more < top_p[:, 0]
    return jnp.where(short, low, middle), jnp.where(short, middle, high)

  none = total(share, axis).astype(jnp.int32) * 0  # as varied as the rows are
  one = lax.bitcast_convert_type(jnp.float32(1), jnp.int32)
  _, least = lax.fori_loop(0, 30, halve, (none - 1, none + one))
  return lax.bitcast_convert_type(least, jnp.float32)[:, None]


def likeliest(kept: Array, scaled: Array, axis: Axis) -> tuple[Array, Array]:
  """The likeliest token, the first of several, and its logit.

  Args:
    kept: f32[B,V], the logits that the filters left.
    scaled: f32[B,V], the logits before the filters.
    axis: Of the shards of the vocabulary.

  Returns:
    i32[B] and f32[B].
  """
  place = jnp.argmax(kept, axis=-1)
  if axis is None:
    return place, _pick(scaled, place)
  best, shard = _pick(kept, place), lax.axis_index(axis)
  # Not "best equals the largest of all": where these are NaN, one must answer.
  less = best < lax.pmax(best, axis)
  first = lax.pmin(jnp.where(less, lax.axis_size(axis), shard), axis)
  return _told(place, scaled, shard == first, axis)


def at_random(
  mass: Array, scaled: Array, uniform: Array, axis: Axis
) -> tuple[Array, Array]:
  """The first token at which the cumulative share passes `uniform`.

  This needs one random number per row, where the Gumbel trick needs V. The
  vocabulary is cut into about sqrt(V) blocks: first the block is found, then
  the token in it, so no running sum goes over the whole vocabulary. The shard
  with the block is found in the same way, from the masses of all shards.

  Sums and random numbers are float32. A token's probability is therefore off by
  about 2e-7, and a token that is rarer than this may never be drawn.

  Args:
    mass: f32[B,V], probabilities that need not add up to 1.
    scaled: f32[B,V], logits.
    uniform: f32[B] in [0, 1).
    axis: Of the shards of the vocabulary.

  Returns:
    The token, i32[B], and its logit, f32[B].
  """
  rows, vocab = mass.shape
  width = 1 << math.isqrt(vocab).bit_length()  # of a block
  blocks = math.ceil(vocab / width)
  mass = jnp.pad(mass, ((0, 0), (0, blocks * width - vocab)))
  mass = mass.reshape(rows, blocks, width)
  running = jnp.cumsum(jnp.sum(mass, axis=-1), axis=-1)
  if axis is None:
    threshold = uniform * running[:, -1]
    place = _passing(mass, running, threshold)
    return place, _pick(scaled, place)
  of_shards = lax.all_gather(running[:, -1], axis, axis=1)
  of_shards = jnp.cumsum(of_shards, axis=-1)
  threshold = uniform * of_shards[:, -1]
  shard, before = _part(of_shards, threshold[:, None])
  place = _passing(mass, running, threshold - before)
  return _told(place, scaled, shard == lax.axis_index(axis), axis)


def _passing(mass: Array, running: Array, threshold: Array) -> Array:
  """The first place at which the running sum passes a threshold, i32[B].

  Args:
    mass: f32[B,N,W], N blocks of W ids.
    running: f32[B,N], the sum of each block and of those before it.
    threshold: f32[B].
  """
  threshold, width = threshold[:, None], mass.shape[-1]
  block, before = _part(running, threshold)
  inside = _pick(mass, block)
  running = before[:, None] + jnp.cumsum(inside, axis=-1)
  # A filtered token has no mass. Rounding must not let it be drawn.
  some = inside > 0
  passed = (running > threshold) & some
  # Rounding may also leave no token of the block past the threshold. Then it is
  # the last token of the block that has any mass.
  end = width - 1 - jnp.argmax(jnp.flip(some, axis=-1), axis=-1)
  place = jnp.where(jnp.any(passed, axis=-1), jnp.argmax(passed, axis=-1), end)
  return block * width + place


def _part(running: Array, threshold: Array) -> tuple[Array, Array]:
  """The first part whose running sum f32[B,N] passes a threshold f32[B,1].

  Returns:
    The part, i32[B], and the sum of those before it, f32[B].
  """
  # Rounding may leave no part past the threshold. Then it is the last part that
  # has any mass: the first at which the running sum is complete.
  last = jnp.argmax(running >= running[:, -1:], axis=-1)
  part = jnp.minimum(jnp.sum(running <= threshold, axis=-1), last)
  before = jnp.where(part > 0, _pick(running, jnp.maximum(part - 1, 0)), 0)
  return part, before


def _pick(values: Array, place: Array) -> Array:
  """For every row b, `values[b, place[b]]` or `values[b, place[b], :]`."""
  place = place.reshape(-1, *(1,) * (values.ndim - 1))
  return jnp.take_along_axis(values, place, axis=1)[:, 0]


def _first(x: Array, axis: str) -> Array:
  """The id of the first column of f[B,V]."""
  return lax.axis_index(axis) * x.shape[-1]


def _told(
  place: Array, scaled: Array, here: Array, axis: str
) -> tuple[Array, Array]:
  """A token and its logit, told to all shards by the one that has them.

  Args:
    place: i32[B], the column of the token in this shard.
    scaled: f32[B,V], logits.
    here: bool[B], true in one shard for each row.
    axis: Of the shards of the vocabulary.
  """
  logit = jnp.where(here, _pick(scaled, place), 0)
  token = jnp.where(here, place + _first(scaled, axis), 0)
  return lax.psum((token, logit), axis)
