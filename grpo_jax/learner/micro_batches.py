"""Micro-batches: computing on all completions, a few rows at a time.

A stack of micro-batches is a `Layout` with a leading axis `N`. The first
`num_micro` of them hold something. That number is traced, so that batches of
different lengths run the same program.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from grpo_jax.episodes.types import Rollout
from grpo_jax.learner import token_shards
from grpo_jax.models import layout
from grpo_jax.models import stack
from grpo_jax.models.layout import Layout
from grpo_jax.models.layout import LayoutSpec

Array = jax.Array


def rows(stacked: Layout, k: Array) -> Layout:
  """Micro-batch number k of a stack."""
  return jax.tree.map(
    lambda x: lax.dynamic_index_in_dim(x, k, keepdims=False), stacked
  )


def over(
  stacked: Layout,
  num_micro: Array,
  body: Callable[[Any, Any], Any],
  start: Callable[[], Any],
  may_be_none: bool = False,
) -> Any:
  """Calls `body(k, carry)` for every micro-batch of a stack that is used.

  Args:
    stacked: Micro-batches, [N, rows, ...].
    num_micro: i32[], how many of the N are used.
    body: From the number of a micro-batch and what is carried to what is
      carried next.
    start: Makes what the first call gets.
    may_be_none: Whether `num_micro` may be 0, so that `start` is the result.
  """
  if stacked.tokens.shape[0] == 1:
    # In a loop nothing would depend on `k`, and the compiler for TPUs would
    # compute all of it once before the loop and once more inside.
    only = lambda: body(jnp.array(0), start())
    return lax.cond(num_micro > 0, only, start) if may_be_none else only()
  return lax.fori_loop(0, num_micro, body, start())


def needed_first(stacked: Layout, needed: Array) -> Layout:
  """A stack whose first rows are those with a completion that is needed.

  Args:
    stacked: Micro-batches, [N, rows, ...]; on a data shard the rows it has.
    needed: bool[P,G], which completions are needed.
  """
  order = jnp.argsort(~_with_needed(stacked, needed).reshape(-1))
  return jax.tree.map(
    lambda x: x.reshape(-1, *x.shape[2:])[order].reshape(x.shape), stacked
  )


def number_needed(stacked: Layout, needed: Array, shards: int) -> Array:
  """How many micro-batches of `needed_first` hold a completion that is needed.

  Args:
    stacked: Micro-batches, [N, rows, ...], of all data shards.
    needed: bool[P,G], which completions are needed.
    shards: Data shards, each of which has as many rows of a micro-batch.

  Returns:
    i32[], of the shard that has the most.
  """
  rows = _with_needed(stacked, needed)
  of_shard = rows.reshape(len(rows), shards, -1)
  most = jnp.max(jnp.sum(of_shard, axis=(0, 2), dtype=jnp.int32))
  return -(-most // of_shard.shape[2])


def _with_needed(stacked: Layout, needed: Array) -> Array:
  """bool[N, rows], whether a row has a completion that is needed."""
  found = jnp.take(
    needed.reshape(-1), stacked.completion, mode='fill', fill_value=False
  )
  return jnp.any(found, axis=-1)


def map_rows(
  function: Callable[[Layout], Any],
  stacked: Layout,
  num_micro: Array,
  shape: tuple[int, ...],
) -> Any:
  """Calls a function for every micro-batch, and gathers the results.

  Args:
    function: From the rows of a micro-batch to a tree of [R,C,T,...] arrays.
    stacked: Micro-batches, [N, rows, ...].
    num_micro: i32[], how many of the N hold anything.
    shape: (P, G, T).

  Returns:
    The tree with [P,G,T,...] arrays, 0 for completions in no row. On a data
    shard what it has of them; see `token_shards.put`.
  """

  def body(k, whole):
    chosen = rows(stacked, k)
    part = function(chosen)
    return jax.tree.map(
      lambda w, x: token_shards.put(w, x, chosen.completion, chosen.inside),
      whole,
      part,
    )

  part = jax.eval_shape(lambda: function(rows(stacked, jnp.array(0))))
  own = token_shards.local_shape(shape)
  nothing = lambda: jax.tree.map(
    lambda x: jnp.zeros(own + x.shape[3:], x.dtype), part
  )
  return over(stacked, num_micro, body, nothing)


def cut_rollout(
  rollout: Rollout,
  chosen: np.ndarray,
  spec: LayoutSpec,
  shards: np.ndarray | None = None,
) -> tuple[Layout, int]:
  """The micro-batches of some prompts of a rollout.

  Args:
    rollout: What was drawn.
    chosen: Numbers of the P' prompts.
    spec: How completions are laid out.
    shards: See `models.stack.micro_batches`.

  Returns:
    What `models.stack.micro_batches` returns: a `Layout` [N, rows, ...], and
    how many of the N hold anything. Its tokens are `stack.number_tokens` if
    this process does not know all of them.
  """
  written, slots = _written(rollout, chosen, spec)
  mask = np.asarray(rollout.batch.mask)[chosen]
  layout.check_slots(mask, rollout.length[chosen], slots)
  return stack.micro_batches(*written, spec, shards, slots)


def decided(
  rollout: Rollout, chosen: np.ndarray, spec: LayoutSpec
) -> LayoutSpec:
  """What `models.stack.decide` returns for some prompts of a rollout."""
  written, slots = _written(rollout, chosen, spec)
  return stack.decide(*written, spec, slots)


def _written(rollout: Rollout, chosen: np.ndarray, spec: LayoutSpec):
  """(prompts, ids, lengths) of some prompts, and the slots of trees."""
  length, slots = rollout.length[chosen], None
  if rollout.previous is not None:
    whole = spec.share and spec.branches
    slots_of = layout.whole_trees if whole else layout.slots_of_trees
    slots = slots_of(length, rollout.previous[chosen])
  if rollout.holder is not None:
    shape = rollout.batch.mask.shape
    numbers = stack.number_tokens(rollout.prompts, shape, chosen)
    return (*numbers, length), slots
  prompts = [rollout.prompts[p] for p in chosen]
  return (prompts, np.asarray(rollout.batch.tokens)[chosen], length), slots
