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

from grpo_jax.learner import token_shards
from grpo_jax.models import stack
from grpo_jax.models.layout import Layout
from grpo_jax.models.layout import LayoutSpec
from grpo_jax.rollouts.types import Rollout

Array = jax.Array


def rows(stacked: Layout, k: Array) -> Layout:
  """Micro-batch number k of a stack."""
  return jax.tree.map(
    lambda x: lax.dynamic_index_in_dim(x, k, keepdims=False), stacked
  )


def over(
  stacked: Layout, num_micro: Array, body: Callable[[Any, Any], Any], start: Any
) -> Any:
  """Calls `body(k, carry)` for every micro-batch of a stack that is used.

  Args:
    stacked: Micro-batches, [N, rows, ...].
    num_micro: i32[], how many of the N hold anything, at least 1.
    body: From the number of a micro-batch and what is carried to what is
      carried next.
    start: What the first call gets.
  """
  if stacked.tokens.shape[0] == 1:
    # In a loop nothing would depend on `k`, and the compiler for TPUs would
    # compute all of it once before the loop and once more inside.
    return body(jnp.array(0), start)
  return lax.fori_loop(0, num_micro, body, start)


def of_all(
  function: Callable[[Layout], Any],
  stacked: Layout,
  num_micro: Array,
  shape: tuple[int, ...],
) -> Any:
  """Calls a function for every micro-batch, and gathers the results.

  Args:
    function: From the rows of a micro-batch to a tree of [R,C,T] arrays.
    stacked: Micro-batches, [N, rows, ...].
    num_micro: i32[], how many of the N hold anything.
    shape: (P, G, T).

  Returns:
    The tree with [P,G,T] arrays, 0 for completions in no row. On a data shard
    what it has of them; see `token_shards.put`.
  """

  def body(k, whole):
    chosen = rows(stacked, k)
    part = function(chosen)
    return jax.tree.map(
      lambda w, x: token_shards.put(w, x, chosen.completion), whole, part
    )

  part = jax.eval_shape(lambda: function(rows(stacked, jnp.array(0))))
  own = token_shards.local_shape(shape)
  whole = jax.tree.map(lambda x: jnp.zeros(own, x.dtype), part)
  return over(stacked, num_micro, body, whole)


def of_rollout(
  rollout: Rollout,
  chosen: np.ndarray,
  spec: LayoutSpec,
  shards: np.ndarray | None = None,
) -> tuple[Layout, int]:
  """The micro-batches of some prompts of a rollout.

  Args:
    rollout: See `rollouts/types.py`.
    chosen: Numbers of the P' prompts.
    spec: How completions are laid out.
    shards: See `models.stack.micro_batches`.

  Returns:
    What `models.stack.micro_batches` returns: a `Layout` [N, rows, ...], and
    how many of the N hold anything. Its tokens are `stack.numbered` if this
    process does not know all of them.
  """
  return stack.micro_batches(*_lengths(rollout, chosen), spec, shards)


def decided(
  rollout: Rollout, chosen: np.ndarray, spec: LayoutSpec
) -> LayoutSpec:
  """What `models.stack.decided` returns for some prompts of a rollout."""
  return stack.decided(*_lengths(rollout, chosen), spec)


def _lengths(rollout: Rollout, chosen: np.ndarray):
  """The prompts, the sampled ids and the lengths of some prompts."""
  if rollout.holder is not None:
    shape = rollout.batch.mask.shape
    numbers = stack.numbered(rollout.prompts, shape, chosen)
    return *numbers, rollout.length[chosen]
  return (
    [rollout.prompts[p] for p in chosen],
    np.asarray(rollout.batch.tokens)[chosen],
    rollout.length[chosen],
  )
