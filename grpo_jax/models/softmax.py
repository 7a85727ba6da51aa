"""Softmax attention over some of the keys, in plain JAX.

Where rows share a prompt, attention to the prompt and to the row's own tokens
is computed apart. Each part is a `Partial`: its output and the log-sum-exp of
its scores, by which `merge` puts two parts together exactly.

Shapes: `Q` queries, `N` keys, `H` query heads, `K` key-value heads, `D` head
size; `h = H / K` query heads read the same keys.
"""

from typing import NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from grpo_jax.mesh import sharding

Array = jax.Array

CHECKPOINT_NAME = 'attention'
"""What `jax.checkpoint` calls the output and the log-sum-exp of attention."""

# The score of a key that a query does not see, and the log-sum-exp of no keys.
# Finite, because 0 * -inf and -inf - -inf would be NaN.
NEVER = -1e30


class Partial(NamedTuple):
  """Attention over some of the keys, ready to be merged with the others.

  Attributes:
    output: f[B,Q,H,D], normalised over these keys alone.
    log_mass: f32[B,Q,H], log-sum-exp of the scores; `NEVER` without keys.
  """

  output: Array
  log_mass: Array


def attend(
  query: Array,
  key: Array,
  value: Array,
  visible: Array,
  forward_mode: bool = False,
  cap: float | None = None,
) -> Partial:
  """Softmax attention with grouped heads; the softmax is computed in float32.

  The backward pass computes the scores again, so that no array of Q times N
  numbers is kept between the passes.

  Args:
    query: f[B,Q,H,D].
    key: f[B,N,K,D].
    value: f[B,N,K,D].
    visible: bool[B,Q,N], which keys a query sees. A query that sees none gets
      the output 0.
    forward_mode: Whether `jax.jvp` will differentiate this. A function with a
      backward pass of its own cannot be; then JAX derives both, and a backward
      pass keeps the scores.
    cap: Scores s become `cap * tanh(s / cap)`; None: as they are.

  Returns:
    A `Partial` over these keys.
  """
  # Heads before positions, or XLA makes transposed copies for the products.
  run = _plain if forward_mode else _attend
  output, log_mass = run(
    cap,
    jnp.moveaxis(_grouped(query, key.shape[2]), 1, 3),
    jnp.moveaxis(key, 2, 1),
    jnp.moveaxis(value, 2, 1),
    visible,
  )
  return _partial(jnp.moveaxis(output, 3, 1), log_mass)


def attend_recent(
  query: Array,
  key: Array,
  value: Array,
  newest: Array,
  count: Array,
  cap: float | None = None,
) -> Partial:
  """Attention of few queries to the newest places of a cache, for decoding.

  A cache is a ring of N places: what is written after the last place goes to
  the first again. Query q of row b sees the `count[b, q]` newest places, that
  is, place j if `(newest[b] - j) mod N < count[b, q]`. A right-padded prompt is
  such a ring too, with newest = length - 1 and count = length.

  Args:
    query: f[B,Q,H,D].
    key: f[B,K,D,N]. Few queries read a whole cache, which must not be copied
      into another order first; see `attention.cache_axes`.
    value: f[B,K,N,D].
    newest: i32[B], the place written last; or i32[B,Q], that of each query.
    count: i32[B,Q], how many places a query sees; 0 gives the output 0.
    cap: Scores s become `cap * tanh(s / cap)`; None: as they are.

  Returns:
    A `Partial` over these keys.
  """
  places = key.shape[3]
  newest = newest.reshape(len(newest), -1, 1)
  back = (newest - jnp.arange(places)[None, None]) % places
  visible = back < count[:, :, None]
  query = jnp.moveaxis(_grouped(query, key.shape[1]), 1, 3)
  output, log_mass = _softmax(
    _capped(_product('bkhqd,bkdn->bkhqn', query, key), visible, cap),
    lambda mass: _product('bkhqn,bknd->bkhqd', mass, value),
  )
  output = jnp.moveaxis(output, 3, 1).astype(value.dtype)
  return _partial(output, log_mass[..., 0])


def merge(first: Partial, second: Partial) -> Partial:
  r"""Attention over the keys of both parts.

  .. math:: o = \frac{e^{m_1} o_1 + e^{m_2} o_2}{e^{m_1} + e^{m_2}}
    = \sigma(m_1 - m_2) \, o_1 + (1 - \sigma(m_1 - m_2)) \, o_2

  with m the log-sum-exp of a part and o its output.
  """
  share = jax.nn.sigmoid(first.log_mass - second.log_mass)[..., None]
  share = share.astype(first.output.dtype)
  return Partial(
    share * first.output + (1 - share) * second.output,
    jnp.logaddexp(first.log_mass, second.log_mass),
  )


def drained(partial: Partial, sinks: Array | None) -> Array:
  r"""The output f[B,Q,H,D] of all keys, where each head may have a sink.

  .. math:: o' = \frac{e^m}{e^m + e^s} \, o = \sigma(m - s) \, o

  with m the log-sum-exp of the scores and s the sink: what a key with the score
  s and the value 0 leaves of the output o.

  Args:
    partial: Over all keys.
    sinks: f32[H]; None: the output is as it is.
  """
  if sinks is None:
    return partial.output
  sinks = sinks.astype(jnp.float32)[None, None]
  share = jax.nn.sigmoid(partial.log_mass - sinks)[..., None]
  return share.astype(partial.output.dtype) * partial.output


def _grouped(query: Array, kv_heads: int) -> Array:
  """Queries over sqrt(D), grouped by the keys that they read, f[B,Q,K,h,D]."""
  batch, queries, heads, size = query.shape
  shape = batch, queries, kv_heads, heads // kv_heads, size
  return query.reshape(shape) * size**-0.5


def _partial(output: Array, log_mass: Array) -> Partial:
  """A `Partial` from the output f[B,Q,K,h,D] and the mass f32[B,K,h,Q]."""
  shape = *output.shape[:2], -1
  log_mass = jnp.moveaxis(log_mass, 3, 1)
  return Partial(
    output.reshape(*shape, output.shape[-1]), log_mass.reshape(shape)
  )


def _product(axes: str, x: Array, y: Array) -> Array:
  """A product of two arrays in the dtype of `y`, with sums in float32."""
  dtype = y.dtype
  return jnp.einsum(
    axes, x.astype(dtype), y, preferred_element_type=jnp.float32
  )


def _rows(x: Array) -> Array:
  """f[B,K,h,Q,N] -> f[B,K,h*Q,N]."""
  return x.reshape(*x.shape[:2], -1, x.shape[-1])


def _over_queries(x: Array, y: Array) -> Array:
  """`_product` of f[B,K,h,Q,N] and f[B,K,h,Q,D] over queries, f32[B,K,N,D]."""
  if sharding.platform() != 'cpu':
    return _product('bkhqn,bkhqd->bknd', x, y)
  # The larger factor, x, stays as it lies. Of the plain product XLA makes a
  # transposed copy of it on a CPU; of this one, on a TPU.
  turned = jnp.matmul(
    jnp.swapaxes(_rows(y), 2, 3),
    _rows(x.astype(y.dtype)),
    preferred_element_type=jnp.float32,
  )
  return jnp.swapaxes(turned, 2, 3)


def _scores(query, key, visible, cap) -> Array:
  """Products of queries and keys, `NEVER` where invisible, f32[B,K,h,Q,N]."""
  return _capped(_product('bkhqd,bknd->bkhqn', query, key), visible, cap)


def _capped(scores, visible, cap) -> Array:
  """Scores f32[B,K,h,Q,N] under the cap, `NEVER` where invisible."""
  if cap is not None:
    scores = cap * jnp.tanh(scores / cap)
  return jnp.where(visible[:, None, None], scores, NEVER)


def _softmax(scores, times_value):
  """Output f32[B,K,h,Q,D] and log-sum-exp f32[B,K,h,Q,1] of scores.

  Args:
    scores: f32[B,K,h,Q,N].
    times_value: Multiplies f32[B,K,h,Q,N] with the values.
  """
  top = jnp.max(scores, axis=-1, keepdims=True)
  # In another shape, or XLA writes it over the scores on a CPU, one number at a
  # time, which takes ten times as long.
  mass = jnp.exp(_rows(scores) - _rows(top)).reshape(scores.shape)
  total = jnp.sum(mass, axis=-1, keepdims=True)
  # All scores of a query that sees nothing are equal, so without this it would
  # get the mean of all values.
  blind = top <= NEVER
  output = jnp.where(blind, 0, times_value(mass) / total)
  return output, jnp.where(blind, NEVER, jnp.log(total) + top)


def _plain(cap, query, key, value, visible):
  return _forward(cap, query, key, value, visible)[0]


_attend = jax.custom_vjp(_plain, nondiff_argnums=(0,))


def _forward(cap, query, key, value, visible):
  """Output and log-sum-exp, and what the backward pass needs of them.

  Args:
    cap: Scores s become `cap * tanh(s / cap)`; None: as they are.
    query: f[B,K,h,Q,D].
    key: f[B,K,N,D].
    value: f[B,K,N,D].
    visible: bool[B,Q,N].
  """
  output, log_mass = _softmax(
    _scores(query, key, visible, cap),
    lambda mass: _product('bkhqn,bknd->bkhqd', mass, value),
  )
  # All that comes from these two, or none of it, is kept.
  output = checkpoint_name(output, CHECKPOINT_NAME)
  log_mass = checkpoint_name(log_mass, CHECKPOINT_NAME)
  kept = query, key, value, visible, output, log_mass
  return (output.astype(value.dtype), log_mass[..., 0]), kept


def _backward(cap, kept, cotangent):
  r"""The gradients of query, key and value.

  With scores s, log-sum-exp m and output :math:`o_q = \sum_n P_{qn} v_n`, where
  :math:`P_{qn} = e^{s_{qn} - m_q}`, and a bar for the gradient of each:

  .. math:: \bar s_{qn} = P_{qn}
    \bigl(\bar o_q \cdot v_n - \bar o_q \cdot o_q + \bar m_q\bigr)

  and times :math:`1 - (s / c)^2` for scores under a cap c.
  """
  query, key, value, visible, output, log_mass = kept
  output_bar, log_mass_bar = cotangent
  scores = _scores(query, key, visible, cap)
  # Where a query sees nothing, scores and log_mass are both NEVER, and the
  # exponential of their difference would be 1.
  blind = log_mass <= NEVER
  mass = jnp.exp(scores - jnp.where(blind, 0, log_mass))
  # A sum over D instead of one over N: the products of o_bar with all values,
  # averaged by P, are the product with the output.
  mean = jnp.sum(output_bar * output, axis=-1, keepdims=True)
  # With a selection, or XLA computes it inside the product that follows, which
  # is slower on a CPU. Where a query sees nothing, the mass is 0 anyway.
  less = jnp.where(blind, 0, mean - log_mass_bar[..., None])
  along = _product('bkhqd,bknd->bkhqn', output_bar, value)
  scores_bar = mass * (along - less)
  if cap is not None:  # NEVER squared would be infinite, and 0 times that NaN
    seen = jnp.where(visible[:, None, None], scores, 0)
    scores_bar *= 1 - jnp.square(seen / cap)
  query_bar = _product('bkhqn,bknd->bkhqd', scores_bar, key)
  key_bar = _over_queries(scores_bar, query)
  value_bar = _over_queries(mass, output_bar)
  return (
    query_bar.astype(query.dtype),
    key_bar.astype(key.dtype),
    value_bar.astype(value.dtype),
    None,  # `visible` is of bool
  )


_attend.defvjp(_forward, _backward)
