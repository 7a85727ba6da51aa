"""The trie over a group's sampled ids: who shares how long a prefix."""

from collections.abc import Callable
from typing import Any

from jax import lax
import jax.numpy as jnp

from grpo_jax.losses._base import Array


def fold_group(
  function: Callable[..., Any], start: Any, tokens: Array, *arrays: Array
) -> Any:
  """Folds over the completions of each group, compared with all of it.

  Holds a few arrays `[P,G,T]`, never `[P,G,G,T]`: the completions are taken one
  by one.

  Args:
    function: `(total, common, *rows) -> total`, called once for each completion
      of a group. `common` i32[P,G,1] is the number of leading ids that it and
      each of its group have in common (`T` with itself), so the token at `t`
      is shared with all before it where `t < common`, and what comes before it
      where `t <= common`. `rows` are the completion's own, `[P,1,T]`.
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
