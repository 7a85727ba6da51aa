"""`attend_recent` as a Mosaic kernel; lowered for TPU, not yet run on one."""

import functools

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from grpo_jax.models.attend import Partial
from grpo_jax.models.kernels import ring

_LANES = 128  # a block takes a multiple of 128 of its last axis, or all of it
_KEYS, _QUERIES = 512, 512  # at most in a block; guesses


def _kernel(
  newest_ref, needed_ref, count_ref, query_ref, key_ref, value_ref,
  output_ref, log_mass_ref, *state_refs, places, cap,
):  # fmt: skip
  row, step = pl.program_id(0), pl.program_id(3)
  block, newest = key_ref.shape[0], newest_ref[row]

  @pl.when(step == 0)
  def _():
    for ref, x in zip(state_refs, ring.empty(*query_ref.shape), strict=True):
      ref[...] = x

  @pl.when(step < needed_ref[row])
  def _():
    start = ring.block_back(newest, step, places, block) * block
    value = value_ref[...]
    # The last block may reach past the end of the array, where anything lies;
    # NaN would survive the product with a weight of 0.
    if places % block:
      place = start + lax.broadcasted_iota(jnp.int32, value.shape, 0)
      value = jnp.where(place < places, value, jnp.zeros_like(value))
    state = ring.add_block(
      tuple(ref[...] for ref in state_refs),
      query_ref[...], key_ref[...], value, start, newest, count_ref[...],
      places, cap,
    )  # fmt: skip
    for ref, x in zip(state_refs, state, strict=True):
      ref[...] = x

  @pl.when(step == pl.num_programs(3) - 1)
  def _():
    output, log_mass = ring.finish(tuple(ref[...] for ref in state_refs))
    output_ref[...] = output.astype(output_ref.dtype)
    log_mass_ref[...] = log_mass


def on_tpu(
  query, key, value, newest, count, cap=None, interpret=False
) -> Partial:
  """`attend_recent` as a Mosaic kernel.

  The cache is read as [B,N,K*D], as many heads at a time as fill the lanes.
  Each head's queries are zero in the columns of the other heads, so that one
  product gives the scores of all of them. (Only a TPU can show whether the
  compiler copies the cache to turn [B,N,K,D] into [B,N,K*D].)

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
  together = next(
    n
    for n in range(1, kv_heads + 1)
    if kv_heads % n == 0 and (n * size % _LANES == 0 or n == kv_heads)
  )
  stacked, seen = ring.by_kv_head(query, count, kv_heads, 16)
  own = jnp.eye(together, dtype=query.dtype)
  spread = stacked.reshape(rows, -1, together, *stacked.shape[2:])
  spread = jnp.einsum('bkhmd,hg->bkhmgd', spread, own)
  spread = spread.reshape(rows, kv_heads // together, -1, together * size)
  output, log_mass = _call(
    spread,
    key.reshape(rows, places, -1),
    value.reshape(rows, places, -1),
    newest.astype(jnp.int32),
    jnp.tile(seen, (1, together)),
    cap,
    interpret,
  )
  # Of each head's queries only the columns of that head are an output.
  output = output.reshape(rows, -1, together, stacked.shape[2], together, size)
  output = jnp.einsum('bkhmgd,hg->bkhmd', output, own).reshape(stacked.shape)
  log_mass = log_mass.reshape(stacked.shape[:3])
  return Partial(ring.by_query(output, query), ring.by_query(log_mass, query))


def _call(query, key, value, newest, count, cap, interpret):
  """Runs the kernel on the cache f[B,N,k*W], `W` columns at a time.

  Returns:
    The output f[B,k,M,W] and the log-sum-exp f32[B,k,M].
  """
  rows, heads, queries, width = query.shape
  places, block = key.shape[1], min(_KEYS, key.shape[1])
  some = next(
    m for m in range(min(_QUERIES, queries), 0, -16) if queries % m == 0
  )

  def keys_at(b, k, m, j, newest, needed):
    # After the last block needed the index stays the same, and Pallas reads a
    # block again only where its index changes.
    step = jnp.minimum(j, jnp.maximum(needed[b] - 1, 0))
    return b, ring.block_back(newest[b], step, places, block), k

  def queries_at(b, k, m, j, *_):
    return b, k, m, 0

  key_spec = pl.BlockSpec((None, block, width), keys_at)
  query_spec = pl.BlockSpec((None, None, some, width), queries_at)
  count_spec = pl.BlockSpec((None, some, 1), lambda b, k, m, j, *_: (b, m, 0))
  column = pltpu.VMEM((some, 1), jnp.float32)
  output, log_mass = pl.pallas_call(
    functools.partial(_kernel, places=places, cap=cap),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=2,
      grid=(rows, heads, queries // some, pl.cdiv(places, block)),
      in_specs=[count_spec, query_spec, key_spec, key_spec],
      out_specs=[
        query_spec,
        pl.BlockSpec((None, None, some, 1), queries_at),
      ],
      scratch_shapes=[column, column, pltpu.VMEM((some, width), jnp.float32)],
    ),
    out_shape=[
      jax.ShapeDtypeStruct(query.shape, query.dtype),
      jax.ShapeDtypeStruct((*query.shape[:3], 1), jnp.float32),
    ],
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=('parallel', 'parallel', 'parallel', 'arbitrary')
    ),
    interpret=interpret,
  )(
    newest,
    ring.blocks_needed(newest, count, places, block),
    count[..., None], query, key, value,
  )  # fmt: skip
  return output, log_mass[..., 0]
