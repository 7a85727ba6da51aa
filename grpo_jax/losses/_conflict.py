"""Conflict tokens: what right and wrong completions of a group share."""

from jax import lax
import jax.numpy as jnp

from grpo_jax.losses import _ops
from grpo_jax.losses._base import Array
from grpo_jax.losses._base import Batch


def conflict_tokens(batch: Batch) -> Array:
  """Tokens that right and wrong completions of a group share, at either end.

  A token is in conflict if another completion of the group has the same id at
  the same position, and the centered rewards of the two completions differ in
  sign. Only two runs of such tokens count: the unbroken one from the first
  token on, and the unbroken one up to the last token. For the latter, positions
  are counted from each completion's end.

  Args:
    batch: See `Batch`.

  Returns:
    bool[P,G,T].

  References:
    Simoni et al., `GTPO <https://arxiv.org/abs/2508.03772>`_, 2025
  """
  if batch.tokens is None:
    raise ValueError(
      'conflict_tokens compares the ids of completions, but Batch.tokens is '
      'None; give the ids to make_batch.'
    )
  sign = jnp.sign(_ops.centered_reward(batch))
  position = jnp.arange(batch.mask.shape[-1])[None, None]
  length = jnp.max(jnp.where(batch.mask, position + 1, 0), axis=-1)
  # Position t of L is position L - 1 - t from the end, and the other way round,
  # so one map turns completions around and turns the result back.
  turned = jnp.clip(length[..., None] - 1 - position, 0)

  def run(tokens, mask):
    def add(j, found):
      other = [
        lax.dynamic_index_in_dim(x, j, axis=1) for x in (tokens, mask, sign)
      ]
      opposite = _ops.per_token(sign * other[2] < 0)
      return found | ((tokens == other[0]) & mask & other[1] & opposite)

    # One completion after another, so that no array is [P,G,G,T].
    found = lax.fori_loop(0, mask.shape[1], add, jnp.zeros_like(mask))
    return jnp.cumprod(found.astype(jnp.int32), axis=-1).astype(bool)

  leading = run(batch.tokens, batch.mask)
  turn = lambda x: jnp.take_along_axis(x, turned, axis=-1)
  # Behind the end the map is clipped to position 0, whose token must not count
  # once more.
  inside = position < length[..., None]
  trailing = run(turn(batch.tokens), turn(batch.mask) & inside)
  return leading | (turn(trailing) & batch.mask)
