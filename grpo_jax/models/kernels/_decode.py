"""Attention of a few new tokens to a ring of cached keys, as one kernel.

The scores never leave the chip, a block of keys that nobody sees is not read,
and the queries of a whole group lie side by side, so that the keys of a shared
prompt are read from memory once. Forward only: sampling has no gradient.

Both kernels have been compared with the portable version in Pallas's interpret
mode, and lowered for TPU (Mosaic) and CUDA (Triton) from a CPU; neither has run
on the hardware yet, and their block sizes are guesses.
"""

import jax
from jax import lax
import jax.numpy as jnp

from grpo_jax.models import _attend as attend
from grpo_jax.models._attend import Partial
from grpo_jax.models.kernels._decode_gpu import on_gpu
from grpo_jax.models.kernels._decode_tpu import on_tpu
from grpo_jax.models.kernels._split import over_devices

Array = jax.Array


def attend_recent(
  query: Array,
  key: Array,
  value: Array,
  newest: Array,
  count: Array,
  interpret: bool = False,
) -> Partial:
  """`models.attention.attend_recent` by the kernel of the platform.

  Keys lie as they are projected, heads after positions.

  That is the platform which the program is compiled for: TPU or CUDA; elsewhere
  the portable version runs.

  Args:
    query: f[B,Q,H,D]; the rows of a lane side by side, for their prompt.
    key: f[B,N,K,D].
    value: f[B,N,K,D].
    newest: i32[B], in [0, N) where anything is seen: the place written last.
    count: i32[B,Q], places seen; 0 gives output 0, more than N is N.
    interpret: The TPU's kernel as it runs on any platform, slowly.

  Returns:
    A `Partial`: the output in the query's dtype, and the log-sum-exp of the
    scores, f32[B,Q,H], -1e30 where nothing is seen.
  """
  arrays = query, key, value, newest, count
  if interpret:
    return on_tpu(*arrays, interpret=True)

  def portable(query, key, value, newest, count):
    key, value = jnp.swapaxes(key, 1, 2), jnp.swapaxes(value, 1, 2)
    return attend.attend_recent(query, key, value, newest, count)

  def compiled(*arrays):
    partial = lax.platform_dependent(
      *arrays, tpu=on_tpu, cuda=on_gpu, default=portable
    )
    return tuple(partial)

  axes = ('r.h.', 'r.h.', 'r.h.', 'r', 'r.')
  return Partial(
    *over_devices(compiled, arrays, axes, ('r.h.', 'r.h'), key.shape[2])
  )
