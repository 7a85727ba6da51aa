"""`attend_recent` as a Triton kernel; lowered for CUDA, not yet run on a GPU.

JAX lowers a Triton kernel for one kind of GPU. Version 0.11 knows only the GPUs
on its own list (no RTX A6000, for example) and refuses others while lowering;
0.10 and 0.12 ask the device itself. Where the kernel is refused,
`model.attention='xla'` runs without it.
"""

import functools

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
import jax.numpy as jnp

from grpo_jax.models.attend import Partial
from grpo_jax.models.kernels import ring

# JAX 0.12 warns that its Triton backend will be removed. Before pyproject.toml
# allows a JAX without it, this kernel has to move to Mosaic GPU.
_KEYS, _QUERIES = 64, 64  # at most in a block; guesses


def _kernel(
  newest_ref, needed_ref, count_ref, query_ref, key_ref, value_ref,
  output_ref, log_mass_ref, *, block, cap,
):  # fmt: skip
  places, size = key_ref.shape
  newest, count = newest_ref[...], count_ref[...][:, None]
  query = query_ref[...]
  columns = jnp.arange(query.shape[1])

  def body(step, state):
    start = ring.block_back(newest, step, places, block) * block
    place = start + jnp.arange(block)
    inside = (place < places)[:, None] & (columns < size)[None]
    key, value = (
      plgpu.load(ref.at[place[:, None], columns[None]], mask=inside, other=0)
      for ref in (key_ref, value_ref)
    )
    return ring.add_block(
      state, query, key, value, start, newest, count, places, cap
    )

  state = lax.fori_loop(0, needed_ref[...], body, ring.empty(*query.shape))
  output, log_mass = ring.finish(state)
  output_ref[...] = output.astype(output_ref.dtype)
  log_mass_ref[...] = log_mass[:, 0]


def on_gpu(
  query, key, value, newest, count, cap=None, interpret=False
) -> Partial:
  """`attend_recent` as a Triton kernel.

  One program handles one row, one key-value head and up to 64 queries, and
  walks through all of the ring that they see. So few rows with a long cache do
  not fill a GPU.

  Args:
    query: As in `attend_recent`, like the next four.
    key: f[B,N,K,D].
    value: f[B,N,K,D].
    newest: i32[B].
    count: i32[B,Q].
    cap: As in `attend_recent`.
    interpret: Whether Pallas interprets the kernel, on any platform.
  """
  rows, places, kv_heads, size = key.shape
  queries = query.shape[1] * query.shape[2] // kv_heads
  some = min(_QUERIES, max(16, pl.next_power_of_2(queries)))
  stacked, seen = ring.by_kv_head(query, count, kv_heads, some)
  width = max(16, pl.next_power_of_2(size))
  stacked = jnp.pad(stacked, ((0, 0), (0, 0), (0, 0), (0, width - size)))
  block = min(_KEYS, max(16, pl.next_power_of_2(places)))
  scalar = pl.BlockSpec((None,), lambda b, k, m: (b,))
  query_spec = pl.BlockSpec(
    (None, None, some, width), lambda b, k, m: (b, k, m, 0)
  )
  key_spec = pl.BlockSpec(
    (None, places, None, size), lambda b, k, m: (b, 0, k, 0)
  )
  output, log_mass = pl.pallas_call(
    functools.partial(_kernel, block=block, cap=cap),
    grid=(rows, kv_heads, stacked.shape[2] // some),
    in_specs=[
      scalar,
      scalar,
      pl.BlockSpec((None, some), lambda b, k, m: (b, m)),
      query_spec,
      key_spec,
      key_spec,
    ],
    out_specs=[
      query_spec,
      pl.BlockSpec((None, None, some), lambda b, k, m: (b, k, m)),
    ],
    out_shape=[
      jax.ShapeDtypeStruct(stacked.shape, query.dtype),
      jax.ShapeDtypeStruct(stacked.shape[:3], jnp.float32),
    ],
    compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
    interpret=interpret,
  )(
    newest.astype(jnp.int32),
    ring.blocks_needed(newest, count, places, block),
    seen, stacked, key, value,
  )  # fmt: skip
  return Partial(
    ring.by_query(output[..., :size], query), ring.by_query(log_mass, query)
  )
