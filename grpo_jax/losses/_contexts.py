"""What turns that are taken in one context do to the policy there.

Proposition 1 (see `_trie.py`) holds for any context that episodes of a group
share, not for prompts alone. The context of a turn is all that the policy has
read when the turn begins: the prompt, its own turns, and what an environment
wrote between them. In an episode that forks, it is the way from the prompt to
the turn, without the branches beside it.
"""

from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
from jax.typing import ArrayLike

from grpo_jax.losses import _trie
from grpo_jax.losses._base import Array

_LANES = 0x9E3779B9, 0x7F4A7C15  # one key is 32 bits, and a context has two
_NOTHING = 0x2545F491  # what comes before the first token


class SharedContext(NamedTuple):
  """Who takes a turn in the same context, `[P,G,N]`, and what they pull.

  All arrays are 0 for a turn that an episode does not have.

  Attributes:
    turns: i32[P,G,N], turns of the group that begin in the context of this one.
    sharers: i32[P,G,N], episodes that these turns belong to.
    weight: f[P,G,N], W_agg: sum of the coefficients of their first tokens.
    total: f[P,G,N], sum of the absolute values of these.
  """

  turns: jax.Array
  sharers: jax.Array
  weight: jax.Array
  total: jax.Array


def shared_context_weight(
  tokens: ArrayLike,
  previous: ArrayLike,
  mask: ArrayLike,
  turn: ArrayLike,
  coefficient: ArrayLike,
  most: int,
) -> SharedContext:
  """For the first turns of each episode, counts who begins one in its context.

  A turn is represented by its first token. All others of it follow tokens that
  the turn itself has chosen.

  Args:
    tokens: i32[P,G,T], ids; those that an environment wrote count too.
    previous: i32[P,G,T], the place on T of the token that each token follows,
      -1 behind the prompt; see `episodes.types.Episode`.
    mask: bool[P,G,T], the policy chose this token; all False for an episode
      that is not valid.
    turn: i32[P,G,T], the number of each token's turn, from 0.
    coefficient: f[P,G,T], -d loss / d logp; read inside the mask only.
    most: N, how many turns of each episode are looked at. Later ones are
      not counted among those that share a context.

  Returns:
    A `SharedContext`. Contexts are compared by 64 bits that are made of their
    ids, so two that differ are taken for one with a chance of 5e-20.

  >>> shared = shared_context_weight(
  ...   tokens=jnp.array([[[5, 9, 7], [5, 9, 8], [6, 9, 7]]]),
  ...   previous=jnp.broadcast_to(jnp.array([-1, 0, 1]), (1, 3, 3)),
  ...   mask=jnp.broadcast_to(jnp.array([True, False, True]), (1, 3, 3)),
  ...   turn=jnp.broadcast_to(jnp.array([0, 0, 1]), (1, 3, 3)),
  ...   coefficient=jnp.array([[[1.0, 0, 1], [1, 0, 1], [-2, 0, -2]]]),
  ...   most=2)
  >>> shared.sharers.tolist(), shared.weight.tolist()
  ([[[3, 2], [3, 2], [3, 1]]], [[[0.0, 2.0], [0.0, 2.0], [0.0, -2.0]]])
  """
  mask, coefficient = jnp.asarray(mask, bool), jnp.asarray(coefficient)
  own = [mask & (jnp.asarray(turn) == n) for n in range(most)]
  over_tokens = lambda reduce: jnp.stack([reduce(x, -1) for x in own], -1)
  there, first = over_tokens(jnp.any), over_tokens(jnp.argmax)  # [P,G,N]
  at_first = lambda x: jnp.take_along_axis(x, first, axis=-1)
  keys = [*map(at_first, _context_keys(jnp.asarray(tokens), previous))]
  pull = jnp.where(there, at_first(coefficient), 0)

  def add(shared, other):  # one episode after another: nothing is [P,G,G]
    *other_keys, other_there, other_pull = (x[:, None] for x in other)
    has = jnp.zeros_like(there)
    for n in range(most):
      same = there & other_there[..., n : n + 1]
      for key, other_key in zip(keys, other_keys, strict=True):
        same &= key == other_key[..., n : n + 1]
      pulled = jnp.where(same, other_pull[..., n : n + 1], 0)
      has |= same
      shared = shared._replace(
        turns=shared.turns + same,
        weight=shared.weight + pulled,
        total=shared.total + jnp.abs(pulled),
      )
    return shared._replace(sharers=shared.sharers + has), None

  none, zero = jnp.zeros_like(there, jnp.int32), jnp.zeros_like(pull)
  others = tuple(jnp.moveaxis(x, 1, 0) for x in (*keys, there, pull))
  return lax.scan(add, SharedContext(none, none, zero, zero), others)[0]


def context_summary(
  shared: SharedContext,
) -> dict[str, tuple[jax.Array, jax.Array]]:
  """Sums up the contexts that episodes share, by the number of the turn.

  A context counts if turns of two or more episodes begin in it. Where episodes
  fork, turns of several numbers may begin in one: each has its part of it.

  Args:
    shared: What `shared_context_weight` returned.

  Returns:
    For each turn `n`, pairs (sum f[], count f[]) whose quotients are:

    - `turn{n}_contexts`: shared contexts per group, over the groups of at least
      two episodes;
    - `turn{n}_weight`: mean W_agg of a shared context;
    - `turn{n}_uncancelled`: mean of abs(W_agg) / sum of abs(coefficient), over
      the shared contexts where that sum is not 0.
  """
  size = jnp.sum(jnp.any(shared.turns > 0, axis=-1), axis=1)  # [P]
  groups = jnp.sum(size >= 2, dtype=jnp.float32)
  once = 1 / jnp.maximum(shared.turns, 1).astype(shared.weight.dtype)
  # A context appears once for each of its turns; its shares add up to 1.
  each = jnp.where(shared.sharers >= 2, once, 0)
  moved = shared.total > 0
  share = jnp.abs(shared.weight) / jnp.where(moved, shared.total, 1)
  of_turn = {
    'nodes': each,
    'weight': each * shared.weight,
    'share': each * share,
    'moved': jnp.where(moved, each, 0),
  }
  sums = {
    n: {name: x[..., n : n + 1] for name, x in of_turn.items()}
    for n in range(each.shape[-1])
  }
  summary = {}
  for n, total in _trie.sum_of_each(sums).items():
    summary[f'turn{n}_contexts'] = total['nodes'], groups
    summary[f'turn{n}_weight'] = total['weight'], total['nodes']
    summary[f'turn{n}_uncancelled'] = total['share'], total['moved']
  return summary


def _context_keys(tokens: Array, previous: ArrayLike) -> list[Array]:
  """Two arrays u32[P,G,T] that are equal where the same ids come before.

  After k steps, `key` is made of the last 2^k tokens up to each token, and
  `before` is the place of the token in front of these.
  """
  previous = jnp.asarray(previous, jnp.int32)

  def at(x, place, lacking):
    found = jnp.take_along_axis(x, jnp.maximum(place, 0), axis=-1)
    return jnp.where(place < 0, lacking, found)

  nothing = jnp.uint32(_NOTHING)

  def step(_, carry):
    keys, before = carry
    keys = [
      _mixed(_mixed(key) + jnp.uint32(lane) * at(key, before, nothing))
      for key, lane in zip(keys, _LANES, strict=True)
    ]
    return keys, at(before, before, -1)

  start = [
    _mixed(tokens.astype(jnp.uint32) + jnp.uint32(lane)) for lane in _LANES
  ]
  steps = max(tokens.shape[-1] - 1, 0).bit_length()
  keys, _ = lax.fori_loop(0, steps, step, (start, previous))
  return [at(key, previous, nothing) for key in keys]


def _mixed(x: Array) -> Array:
  """Spreads each bit of u32 over all, one to one."""
  for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
    x = (x ^ (x >> shift)) * jnp.uint32(factor)
  return x ^ (x >> 16)
