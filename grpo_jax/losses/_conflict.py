"""Tokens that right and wrong completions of a group share."""

from jax import lax
import jax.numpy as jnp

from grpo_jax.losses import _ops
from grpo_jax.losses._base import Array
from grpo_jax.losses._base import Batch


def conflict_tokens(batch: Batch) -> Array:
  """Tokens that right and wrong completions of a group share, at either end.

  A token is in conflict if a completion of the group whose centered reward has
  the other sign has the same id at the same position. Only the unbroken run of
  conflicts from the first token counts, and the one up to the last, where
  positions are counted from each completion's end.

  Args:
    batch: See `Batch`.

  Returns:
    bool[P,G,T].

  References:
    Simoni et al., `GTPO <https://arxiv.org/abs/2508.03772>`_, 2025
  """
  sign = jnp.sign(_ops.centered_reward(batch))
  position = jnp.arange(batch.mask.shape[-1])[None, None]
  length = jnp.max(jnp.where(batch.mask, position + 1, 0), axis=-1)
  # The same map there and back: position t is t' = L - 1 - t from the end.
  turned = jnp.clip(length[..., None] - 1 - position, 0)

  def run(tokens, mask):
    def add(j, found):
      other = [
        lax.dynamic_index_in_dim(x, j, axis=1) for x in (tokens, mask, sign)
      ]
      opposite = _ops.per_token(sign * other[2] < 0)
      return found | ((tokens == other[0]) & mask & other[1] & opposite)

    found = lax.fori_loop(0, mask.shape[1], add, jnp.zeros_like(mask))
    return jnp.cumprod(found.astype(jnp.int32), axis=-1).astype(bool)

  leading = run(batch.tokens, batch.mask)
  turn = lambda x: jnp.take_along_axis(x, turned, axis=-1)
  inside = position < length[..., None]
  trailing = run(turn(batch.tokens), turn(batch.mask) & inside)
  return leading | (turn(trailing) & batch.mask)
