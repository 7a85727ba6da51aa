"""Attention of a few new tokens to a ring of cached keys, as one kernel.

The scores stay in the chip's own memory. A block of keys that no query sees is
not read. The queries of a whole group lie side by side, so that the keys of
their prompt are read once for all of them. There is no gradient, because
sampling needs none.

Both kernels agree with the portable version in Pallas's interpret mode, and are
lowered for TPU (Mosaic) and CUDA (Triton) on a CPU. Neither has run on the
hardware yet, so their block sizes are guesses.
"""

import functools

import jax
from jax import lax
import jax.numpy as jnp

from grpo_jax.models import attend
from grpo_jax.models.attend import Partial
from grpo_jax.models.kernels.decode_gpu import on_gpu
from grpo_jax.models.kernels.decode_tpu import on_tpu
from grpo_jax.models.kernels.split import over_devices

Array = jax.Array


def attend_recent(
  query: Array,
  key: Array,
  value: Array,
  newest: Array,
  count: Array,
  cap: float | None = None,
  interpret: bool = False,
) -> Partial:
  """`models.attention.attend_recent` by the kernel of the platform.

  The platform is the one that the program is compiled for. TPU and CUDA have a
  kernel; on any other the portable version runs.

  Args:
    query: f[B,Q,H,D]; for attention to a shared prompt, the queries of all rows
      that share it lie along Q.
    key: f[B,N,K,D], as projected: heads after positions.
    value: f[B,N,K,D].
    newest: i32[B], the place written last, in [0, N) where anything is seen.
    count: i32[B,Q], places seen; 0 gives output 0, more than N counts as N.
    cap: Scores s become `cap * tanh(s / cap)`; None: as they are.
    interpret: Whether the TPU's kernel is interpreted, slowly, on any platform.

  Returns:
    A `Partial`: the output in the query's dtype, and the log-sum-exp of the
    scores, f32[B,Q,H], which is -1e30 where nothing is seen.
  """
  arrays = query, key, value, newest, count
  if interpret:
    return on_tpu(*arrays, cap=cap, interpret=True)

  def portable(query, key, value, newest, count):
    key, value = jnp.moveaxis(key, 1, 3), jnp.moveaxis(value, 1, 2)
    return attend.attend_recent(query, key, value, newest, count, cap)

  def compiled(*arrays):
    partial = lax.platform_dependent(
      *arrays,
      tpu=functools.partial(on_tpu, cap=cap),
      cuda=functools.partial(on_gpu, cap=cap),
      default=portable,
    )
    return tuple(partial)

  axes = ('r.h.', 'r.h.', 'r.h.', 'r', 'r.')
  return Partial(
    *over_devices(
      compiled, arrays, axes, ('r.h.', 'r.h'), key.shape[2], everywhere=True
    )
  )
