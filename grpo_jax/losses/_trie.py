r"""The trie over a group's sampled ids: what completions do to a shared token.

Completions of one group that begin with the same tokens pull on the same
log-probabilities, so a token is moved by the sum of their coefficients,

.. math:: W_{agg} = \sum_{i \in S} c_{it}, \qquad
          c_{it} = -\frac{\partial\, loss}{\partial \log \pi_{it}},

over the completions :math:`S` that share it with everything before it
(proposition 1 of Fontana et al., `On the Hidden Objective Biases of
Group-based Reinforcement Learning <https://arxiv.org/abs/2601.05002>`_, 2026,
with :math:`c = \omega A`).
"""

from collections.abc import Callable
from typing import Any
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
from jax.typing import ArrayLike

from grpo_jax.losses._base import Array


def fold_group(
  function: Callable[..., Any], start: Any, tokens: Array, *arrays: Array
) -> Any:
  """Folds over the completions of each group, compared with all of it.

  Holds a few arrays `[P,G,T]`, never `[P,G,G,T]`: the completions are taken one
  by one.

  Args:
    function: `(total, common, *rows) -> total`, called once for each completion
      of a group. `common` i32[P,G,1] is the number of leading ids that it
      shares with each completion of its group (`T` with itself). Two
      completions have the same ids up to and including `t` where `t < common`,
      and the same ids before `t` where `t <= common`. `rows` are the
      completion's own, `[P,1,T]`.
    start: The first `total`, a pytree whose arrays keep shape and dtype.
    tokens: i32[P,G,T], ids; padding and what a tool wrote are compared too.
    *arrays: `[P,G,T]`, whose rows `function` gets.

  Returns:
    The last `total`.
  """
  width = tokens.shape[-1]
  position = jnp.arange(width, dtype=jnp.int32)[None, None]

  def step(total, other):
    ids, *rows = (x[:, None] for x in other)  # [P,1,T]
    unequal = jnp.where(tokens == ids, width, position)
    common = jnp.min(unequal, axis=-1, keepdims=True)
    return function(total, common, *rows), None

  others = tuple(jnp.moveaxis(x, 1, 0) for x in (tokens, *arrays))
  return lax.scan(step, start, others)[0]


class SharedPrefix(NamedTuple):
  """The trie over a group's sampled ids, laid out on its tokens, `[P,G,T]`.

  The node of the token at `t` is the set of completions that have the same ids
  up to and including `t` and sampled the id at `t`. All arrays are 0 outside
  the mask.

  Attributes:
    sharers: i32[P,G,T], completions in the node; 1: shared with nobody.
    weight: f[P,G,T], W_agg: sum of the node's coefficients.
    total: f[P,G,T], sum of their absolute values.
  """

  sharers: jax.Array
  weight: jax.Array
  total: jax.Array


def shared_prefix_weight(
  tokens: ArrayLike, mask: ArrayLike, coefficient: ArrayLike
) -> SharedPrefix:
  """For every token, counts who shares it and sums their coefficients.

  Holds a few arrays `[P,G,T]`, never `[P,G,G,T]`.

  Args:
    tokens: i32[P,G,T], ids. Where the mask has holes (what a tool wrote), the
      ids in them count as part of the prefix.
    mask: bool[P,G,T], the policy chose this token; all False for a completion
      that is not valid.
    coefficient: f[P,G,T], -d loss / d logp; read inside the mask only.

  Returns:
    A `SharedPrefix`.

  >>> tokens = jnp.array([[[5, 7, 2], [5, 8, 2]]])
  >>> shared = shared_prefix_weight(
  ...   tokens, jnp.ones((1, 2, 3), bool),
  ...   jnp.array([[[0.5, 0.5, 0.5], [-0.25, -0.25, -0.25]]]))
  >>> shared.sharers.tolist(), shared.weight.tolist()
  ([[[2, 1, 1], [2, 1, 1]]], [[[0.25, 0.5, 0.5], [0.25, -0.25, -0.25]]])
  """
  tokens, coefficient = jnp.asarray(tokens), jnp.asarray(coefficient)
  mask = jnp.asarray(mask, bool)
  position = jnp.arange(tokens.shape[-1], dtype=jnp.int32)[None, None]

  def add(shared, common, sampled, pull):
    same = (position < common) & mask & sampled
    pull = jnp.where(same, pull, 0)
    return SharedPrefix(
      shared.sharers + same, shared.weight + pull, shared.total + jnp.abs(pull)
    )

  zero = jnp.zeros_like(coefficient)
  start = SharedPrefix(jnp.zeros_like(mask, jnp.int32), zero, zero)
  return fold_group(add, start, tokens, mask, coefficient)


def prefix_summary(
  shared: SharedPrefix,
) -> dict[str, tuple[jax.Array, jax.Array]]:
  """Sums up the nodes of all tries, each node once.

  A node is `whole` if all completions of its group that hold any token are in
  it, and these are two or more; it is `part` if two or more are, but not all.

  Args:
    shared: What `shared_prefix_weight` returned.

  Returns:
    For `kind` in `whole` and `part`, pairs (sum f[], count f[]) whose quotients
    are as follows. (Pairs, so that the means of several batches can be joined.)

    - `kind_tokens`: number of nodes (a node is one token) per group, over the
      groups of at least two completions;
    - `kind_weight`: mean W_agg of a node;
    - `kind_uncancelled`: mean of abs(W_agg) / sum of abs(coefficient), over the
      nodes where that sum is not 0. 1: all pull one way; 0: they cancel.
  """
  holds = jnp.any(shared.sharers > 0, axis=-1, keepdims=True)
  size = jnp.sum(holds, axis=1, keepdims=True, dtype=jnp.int32)  # [P,1,1]
  groups = jnp.sum(size >= 2, dtype=jnp.float32)
  several = (shared.sharers >= 2) & (size >= 2)
  once = 1 / jnp.maximum(shared.sharers, 1).astype(shared.weight.dtype)
  moved = shared.total > 0
  share = jnp.abs(shared.weight) / jnp.where(moved, shared.total, 1)
  sums = {}
  for kind, chosen in (
    ('whole', several & (shared.sharers == size)),
    ('part', several & (shared.sharers < size)),
  ):
    # A node appears once for each of its completions; its shares add up to 1.
    each = jnp.where(chosen, once, 0)
    sums[kind] = {
      'nodes': each,
      'weight': each * shared.weight,
      'share': each * share,
      'moved': jnp.where(moved, each, 0),
    }
  summary = {}
  for kind, total in _sums(sums).items():
    summary[f'{kind}_tokens'] = total['nodes'], groups
    summary[f'{kind}_weight'] = total['weight'], total['nodes']
    summary[f'{kind}_uncancelled'] = total['share'], total['moved']
  return summary


def _sums(tree: Any) -> Any:
  """The sum of each array [P,G,T], all in one loop.

  XLA does not join reductions by itself on a CPU, where it takes 20 ms to
  compile each of them. On several devices each array alone: a loop over several
  arrays is not split, and every device would gather them whole.
  """
  mesh = jax.sharding.get_abstract_mesh()
  devices = jax.device_count() if mesh.empty else mesh.size
  return _total(tree) if devices == 1 else jax.tree.map(_total, tree)


def _total(tree: Any) -> Any:
  """The sum of each array [P,G,T], in one loop."""
  add = lambda left, right: jax.tree.map(jnp.add, left, right)
  zero = jax.tree.map(lambda x: jnp.zeros((), x.dtype), tree)
  # Sums of sums are more exact than a sum of all numbers one by one.
  return lax.reduce(lax.reduce(tree, zero, add, (2,)), zero, add, (0, 1))
