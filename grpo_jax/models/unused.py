"""Ids that no token of the tokenizer has, which no policy may draw."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array

LOGIT = -1e30
"""Of an id that is never drawn.

Its probability is 0 at any temperature, also where the policy is nearly sure,
and it is finite: entropies and gradients have products of it with 0.
"""


def without(logits: Array, unused: Sequence[tuple[int, int]]) -> Array:
  """The logits of a policy that never draws some ids.

  Args:
    logits: f32[..., V].
    unused: Runs `(first, end)` of ids; none: the logits stay what they are.

  Returns:
    f32[..., V], with `LOGIT` at these ids.
  """
  if not unused:
    return logits
  never = np.zeros(logits.shape[-1], bool)
  for first, end in unused:
    never[first:end] = True
  # As many axes as the logits have: ranks are not promoted here.
  never = never.reshape((1,) * (logits.ndim - 1) + (-1,))
  return jnp.where(never, LOGIT, logits)
