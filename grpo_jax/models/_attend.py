"""Softmax attention over some of the keys, in plain JAX.

Shapes: `Q` queries, `N` keys, `H` query heads, `K` key-value heads, `D` head
size; `h = H / K` query heads read the same keys.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

Array = jax.Array

NEVER = -1e30  # the log-sum-exp of nothing; finite, so that 0 * it is 0


class Partial(NamedTuple):
  """Attention over some of the keys, ready to be merged with the rest."""

  output: Array  # f[B,Q,H,D], normalised over its own keys
  log_mass: Array  # f32[B,Q,H], log-sum-exp of its scores


def attend(
  query: Array,
  key: Array,
  value: Array,
  visible: Array,
  forward_mode: bool = False,
) -> Partial:
  """Softmax attention with grouped heads, in float32 inside.

  The backward pass computes the scores again: of Q times N numbers nothing is
  kept between the passes.

  Args:
    query: f[B,Q,H,D].
    key: f[B,N,K,D].
    value: f[B,N,K,D].
    visible: bool[B,Q,N]; a query that sees nothing gets output 0.
    forward_mode: Leaves both passes to JAX, which alone can differentiate in
      forward mode; the scores are kept for a backward pass.

  Returns:
    A `Partial` over these keys.
  """
  # Heads before positions: the products then need no transposed copies.
  run = _plain if forward_mode else _attend
  output, log_mass = run(
    jnp.moveaxis(_grouped(query, key.shape[2]), 1, 3),
    jnp.moveaxis(key, 2, 1),
    jnp.moveaxis(value, 2, 1),
    visible,
  )
  return _partial(jnp.moveaxis(output, 3, 1), log_mass)


def attend_recent(
  query: Array, key: Array, value: Array, newest: Array, count: Array
) -> Partial:
  """Attention of few queries to the newest places of a ring of N places.

  Keys are read where they lie. Query q of row b sees place j iff
  `(newest[b] - j) mod N < count[b, q]`. A right-padded prompt is such a ring
  (newest = length - 1, count = length), and so is a row's own cache, even if
  its oldest entries have been overwritten.

  Args:
    query: f[B,Q,H,D].
    key: f[B,K,N,D], heads first: so a product of few queries needs no copy.
    value: f[B,K,N,D].
    newest: i32[B], the place written last.
    count: i32[B,Q], places seen; 0 gives output 0.

  Returns:
    A `Partial` over these keys.
  """
  places = key.shape[2]
  back = (newest[:, None] - jnp.arange(places)[None]) % places
  visible = back[:, None] < count[:, :, None]
  query = jnp.moveaxis(_grouped(query, key.shape[1]), 1, 3)
  output, log_mass = _softmax(
    _scores('bkhqd,bknd->bkhqn', query, key, visible),
    lambda mass: _product('bkhqn,bknd->bkhqd', mass, value),
  )
  output = jnp.moveaxis(output, 3, 1).astype(value.dtype)
  return _partial(output, log_mass[..., 0])


def merge(first: Partial, second: Partial) -> Array:
  """Attention over both sets of keys, f[B,Q,H,D]."""
  share = jax.nn.sigmoid(first.log_mass - second.log_mass)[..., None]
  share = share.astype(first.output.dtype)
  return share * first.output + (1 - share) * second.output


def _grouped(query: Array, kv_heads: int) -> Array:
  """f[B,Q,H,D] -> f[B,Q,K,h,D], scaled."""
  batch, queries, heads, size = query.shape
  shape = batch, queries, kv_heads, heads // kv_heads, size
  return query.reshape(shape) * size**-0.5


def _partial(output: Array, log_mass: Array) -> Partial:
  """From f[B,Q,K,h,D] and f32[B,K,h,Q]."""
  shape = *output.shape[:2], -1
  log_mass = jnp.moveaxis(log_mass, 3, 1)
  return Partial(
    output.reshape(*shape, output.shape[-1]), log_mass.reshape(shape)
  )


def _product(axes: str, x: Array, y: Array) -> Array:
  """A product in the inputs' dtype with sums in float32."""
  dtype = y.dtype
  return jnp.einsum(
    axes, x.astype(dtype), y, preferred_element_type=jnp.float32
  )


def _scores(axes, query, key, visible) -> Array:
  """f32[B,K,h,Q,N]."""
  return jnp.where(visible[:, None, None], _product(axes, query, key), NEVER)


def _softmax(scores, times_value):
  """Output f32[B,K,h,Q,D] and log-sum-exp f32[B,K,h,Q,1]."""
  top = jnp.max(scores, axis=-1, keepdims=True)
  mass = jnp.exp(scores - top)
  total = jnp.sum(mass, axis=-1, keepdims=True)
  blind = top <= NEVER
  output = jnp.where(blind, 0, times_value(mass) / total)
  return output, jnp.where(blind, NEVER, jnp.log(total) + top)


def _plain(query, key, value, visible):
  return _forward(query, key, value, visible)[0]


_attend = jax.custom_vjp(_plain)


def _forward(query, key, value, visible):
  """From query f[B,K,h,Q,D], key and value f[B,K,N,D]."""
  output, log_mass = _softmax(
    _scores('bkhqd,bknd->bkhqn', query, key, visible),
    lambda mass: _product('bkhqn,bknd->bkhqd', mass, value),
  )
  kept = query, key, value, visible, output, log_mass
  return (output.astype(value.dtype), log_mass[..., 0]), kept


def _backward(kept, cotangent):
  r"""With :math:`P_{qn} = e^{s_{qn} - m_q}`, :math:`o_q = \sum_n P_{qn} v_n`:

  .. math:: \bar s_{qn} = P_{qn}
    \bigl(\bar o_q \cdot v_n - \bar o_q \cdot o_q + \bar m_q\bigr)
  """
  query, key, value, visible, output, log_mass = kept
  of_output, of_log_mass = cotangent
  scores = _scores('bkhqd,bknd->bkhqn', query, key, visible)
  # Where a query sees nothing, both are NEVER.
  mass = jnp.where(visible[:, None, None], jnp.exp(scores - log_mass), 0)
  mean = jnp.sum(of_output * output, axis=-1, keepdims=True)
  along = _product('bkhqd,bknd->bkhqn', of_output, value)
  of_scores = mass * (along - mean + of_log_mass[..., None])
  of_query = _product('bkhqn,bknd->bkhqd', of_scores, key)
  of_key = _product('bkhqn,bkhqd->bknd', of_scores, query)
  of_value = _product('bkhqn,bkhqd->bknd', mass, of_output)
  return (
    of_query.astype(query.dtype),
    of_key.astype(key.dtype),
    of_value.astype(value.dtype),
    None,
  )


_attend.defvjp(_forward, _backward)
