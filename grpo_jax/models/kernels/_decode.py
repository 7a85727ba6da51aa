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

from grpo_jax.models import attention
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
  implementation: str = 'xla',
) -> attention.Partial:
  """Attention to the newest `count` places of a ring of `N` places.

  Query q of row b sees place j iff `(newest[b] - j) mod N < count[b, q]`. A
  right-padded prompt is such a ring (newest = length - 1, count = length), and
  so is a row's own cache whose oldest entries have been overwritten.

  Args:
    query: f[B,Q,H,D]; the rows of a group side by side, for their prompt.
    key: f[B,N,K,D].
    value: f[B,N,K,D].
    newest: i32[B], in [0, N) where anything is seen: the place written last.
    count: i32[B,Q], places seen; 0 gives output 0, more than N is N.
    implementation: `'xla'`; `'pallas'`, the kernel of the platform that the
      program is compiled for (TPU or CUDA; elsewhere it is `'xla'`); or
      `'interpret'`, the TPU's kernel on any platform, slowly.

  Returns:
    A `Partial`: the output in the query's dtype, and the log-sum-exp of the
    scores, f32[B,Q,H], -1e30 where nothing is seen.

  Raises:
    ValueError: The implementation is unknown.
  """
  arrays = query, key, value, newest, count
  if implementation == 'xla':
    return _portable(*arrays)
  if implementation == 'interpret':
    return on_tpu(*arrays, interpret=True)
  if implementation != 'pallas':
    raise ValueError(
      f'implementation={implementation!r} is unknown to attend_recent; give '
      "'xla', 'pallas' or 'interpret'."
    )

  def compiled(*arrays):
    partial = lax.platform_dependent(
      *arrays, tpu=on_tpu, cuda=on_gpu, default=_portable
    )
    return tuple(partial)

  axes = ('r.h.', 'r.h.', 'r.h.', 'r', 'r.')
  return attention.Partial(
    *over_devices(compiled, arrays, axes, ('r.h.', 'r.h'), key.shape[2])
  )


def _portable(query, key, value, newest, count) -> attention.Partial:
  age = (newest[:, None] - jnp.arange(key.shape[1])[None]) % key.shape[1]
  visible = age[:, None] < count[:, :, None]
  return attention.attend(query, key, value, visible)
