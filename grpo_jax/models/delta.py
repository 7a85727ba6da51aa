"""Placeholder, token by token (to be replaced before anything lands)."""

from typing import NamedTuple, Any
import jax, jax.numpy as jnp
from jax import lax


class Path(NamedTuple):
  segment: Any
  parent: Any


def _prep(q, k):
  n = lambda x: x * lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-6)
  q, k = q.astype(jnp.float32), k.astype(jnp.float32)
  return n(q) * q.shape[-1] ** -0.5, n(k)


def step(q, k, v, rate, decay, s):
  q, k = _prep(q, k)
  r = v.shape[1] // k.shape[1]
  q, k = jnp.repeat(q, r, 1), jnp.repeat(k, r, 1)
  s = jnp.exp(decay)[..., None, None] * s
  u = rate[..., None] * (
    v.astype(jnp.float32) - jnp.einsum('bhde,bhd->bhe', s, k)
  )
  s = s + k[..., :, None] * u[..., None, :]
  return jnp.einsum('bhde,bhd->bhe', s, q), s


def recur(q, k, v, rate, decay, state, path=None):
  m = lambda x: jnp.moveaxis(x, 1, 0)
  if path is None:

    def f(s, a):
      o, s = step(*a, s)
      return s, o

    s, o = lax.scan(f, state, tuple(map(m, (q, k, v, rate, decay))))
    return m(o), s
  B, S = path.segment.shape
  table = jnp.zeros((S + 1, *state.shape), state.dtype)
  b = jnp.arange(B)

  def f(t, a):
    seg, par, first, *a = a
    src = jnp.where(first, par, seg)
    s = jnp.where((src > 0)[:, None, None, None], t[src, b], 0)
    o, s = step(*a, s)
    t = t.at[seg, b].set(s)
    return t, o

  first = jnp.concatenate(
    [jnp.ones((B, 1), bool), path.segment[:, 1:] != path.segment[:, :-1]], 1
  )
  t, o = lax.scan(
    f,
    table,
    tuple(map(m, (path.segment, path.parent, first, q, k, v, rate, decay))),
  )
  return m(o), state
