"""Attention of a few new tokens to a ring of cached keys, as one kernel.

The scores stay in the chip's own memory. A block of keys that no query sees is
not read. The queries of a whole group lie side by side, so that the keys of
their prompt are read once for all of them. There is no gradient, because
sampling needs none.

There is a kernel for TPUs (Mosaic) and one for CUDA (Triton). Both agree with
the portable version in Pallas's interpret mode, and are lowered on a CPU.
Neither has run on the hardware yet, so their block sizes are guesses.

JAX lowers a Triton kernel for one kind of GPU. Version 0.11 knows only the GPUs
on its own list (no RTX A6000, for example) and refuses others while lowering;
0.10 and 0.12 ask the device itself. Where the kernel is refused,
`model.attention='xla'` runs without it.

Who sees what is defined as in `attend_recent`: query q of row b sees place j of
N if and only if `(newest[b] - j) mod N < count[b, q]`.
"""

import functools

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as plgpu
import jax.numpy as jnp

from grpo_jax.models import softmax
from grpo_jax.models.kernels.rows import over_devices

Array = jax.Array

# JAX 0.12 warns that its Triton backend will be removed. Before pyproject.toml
# allows a JAX without it, this kernel has to move to Mosaic GPU.
_GPU_KEYS, _GPU_QUERIES = 64, 64  # at most in a block; guesses
_GPU_HEAD = 256  # blocks of larger heads would not fit into the chip's memory
_LANES = 128  # a block takes a multiple of 128 of its last axis, or all of it
_TPU_KEYS, _TPU_QUERIES = 512, 512  # at most in a block; guesses


def attend_recent(
  query: Array,
  key: Array,
  value: Array,
  newest: Array,
  count: Array,
  cap: float | None = None,
  interpret: bool = False,
) -> softmax.Partial:
  """`models.attention.attend_recent` by the kernel of the platform.

  The platform is the one that the program is compiled for. TPU and CUDA have a
  kernel; on any other, and for heads of more than 256 entries on CUDA, the
  portable version runs.

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
    return softmax.attend_recent(query, key, value, newest, count, cap)

  fits = query.shape[-1] <= _GPU_HEAD

  def compiled(*arrays):
    partial = lax.platform_dependent(
      *arrays,
      tpu=functools.partial(on_tpu, cap=cap),
      cuda=functools.partial(on_gpu, cap=cap) if fits else portable,
      default=portable,
    )
    return tuple(partial)

  axes = ('r.h.', 'r.h.', 'r.h.', 'r', 'r.')
  return softmax.Partial(
    *over_devices(
      compiled, arrays, axes, ('r.h.', 'r.h'), key.shape[2], everywhere=True
    )
  )


def _by_kv_head(query: Array, count: Array, kv_heads: int, multiple: int):
  """Scales the queries and groups them by the key-value head that they read.

  Returns:
    The queries f[B,K,M,D] and their counts i32[B,M]. `M` is `Q * H / K`, padded
    to a multiple of `multiple` with queries that see nothing.
  """
  rows, queries, heads, size = query.shape
  shared = heads // kv_heads
  query = query.reshape(rows, queries, kv_heads, shared, size) * size**-0.5
  query = jnp.moveaxis(query, 2, 1).reshape(rows, kv_heads, -1, size)
  more = -query.shape[2] % multiple
  query = jnp.pad(query, ((0, 0), (0, 0), (0, more), (0, 0)))
  count = jnp.pad(jnp.repeat(count, shared, axis=1), ((0, 0), (0, more)))
  return query, count.astype(jnp.int32)


def _by_query(x: Array, like: Array) -> Array:
  """Undoes the grouping of `_by_kv_head`: [B,K,M,...] -> [B,Q,H,...]."""
  rows, queries, heads, _ = like.shape
  kv_heads = x.shape[1]
  x = x[:, :, : queries * heads // kv_heads]
  x = x.reshape(rows, kv_heads, queries, heads // kv_heads, *x.shape[3:])
  return jnp.moveaxis(x, 1, 2).reshape(rows, queries, heads, *x.shape[4:])


def _blocks_needed(newest: Array, count: Array, places: int, block: int):
  """i32[B]: how many blocks lie from the newest back to the oldest one seen."""
  reach = jnp.minimum(jnp.max(count, axis=1), places)
  oldest = newest - reach + 1
  last, number = newest // block, pl.cdiv(places, block)
  wrapped = last + 1 + number - (oldest + places) // block
  needed = jnp.where(
    oldest >= 0, last - oldest // block + 1, jnp.minimum(wrapped, number)
  )
  return jnp.where(reach > 0, needed, 0).astype(jnp.int32)


def _block_back(newest, steps, places: int, block: int):
  """The block that lies `steps` blocks before the newest, around the ring."""
  # `//` would also handle negative numbers, and to lower that, Mosaic must know
  # which TPU it compiles for. `newest` is -1 only where nothing is seen.
  index = lax.div(jnp.maximum(newest, 0), jnp.int32(block)) - steps
  return jnp.where(index < 0, index + pl.cdiv(places, block), index)


def _add_block(
  state,
  query,
  key,
  value,
  start,
  newest,
  count,
  places: int,
  cap: float | None = None,
):
  """Adds one block of keys to a running softmax; the body of both kernels.

  Args:
    state: What the blocks so far gave: the greatest score f32[M,1], the mass
      f32[M,1], and the output f32[M,D], not yet divided by the mass.
    query: f[M,D], scaled.
    key: f[n,D].
    value: f[n,D], finite also where no query sees it.
    start: i32[], the place of the block's first key.
    newest: i32[].
    count: i32[M,1].
    places: `N`.
    cap: Scores s become `cap * tanh(s / cap)`; None: as they are.

  Returns:
    The state with this block added.
  """
  top, total, output = state
  scores = lax.dot_general(
    query, key, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
  )
  if cap is not None:
    scores = cap * jnp.tanh(scores / cap)
  place = start + lax.broadcasted_iota(jnp.int32, scores.shape, 1)
  age = jnp.where(place <= newest, newest - place, newest - place + places)
  seen = (age < count) & (place < places)
  scores = jnp.where(seen, scores, softmax.NEVER)
  new_top = jnp.maximum(top, jnp.max(scores, axis=1, keepdims=True))
  mass = jnp.where(seen, jnp.exp(scores - new_top), 0)
  kept = jnp.exp(top - new_top)
  added = lax.dot_general(
    mass.astype(value.dtype),
    value,
    (((1,), (0,)), ((), ())),
    preferred_element_type=jnp.float32,
  )
  total = total * kept + jnp.sum(mass, axis=1, keepdims=True)
  return new_top, total, output * kept + added


def _finish(state):
  """The output f32[M,D] and the log-sum-exp f32[M,1] of a running softmax."""
  top, total, output = state
  safe = jnp.where(total == 0, 1, total)
  return output / safe, jnp.where(
    total == 0, softmax.NEVER, jnp.log(safe) + top
  )


def _empty(queries: int, size: int):
  """The state of a running softmax that has seen no block."""
  column = jnp.zeros((queries, 1), jnp.float32)
  return column + softmax.NEVER, column, jnp.zeros((queries, size), jnp.float32)


def _tpu_kernel(
  newest_ref, needed_ref, count_ref, query_ref, key_ref, value_ref,
  output_ref, log_mass_ref, *state_refs, places, cap,
):  # fmt: skip
  row, step = pl.program_id(0), pl.program_id(3)
  block, newest = key_ref.shape[0], newest_ref[row]

  @pl.when(step == 0)
  def _():
    for ref, x in zip(state_refs, _empty(*query_ref.shape), strict=True):
      ref[...] = x

  @pl.when(step < needed_ref[row])
  def _():
    start = _block_back(newest, step, places, block) * block
    value = value_ref[...]
    # The last block may reach past the end of the array, where anything lies;
    # NaN would survive the product with a weight of 0.
    if places % block:
      place = start + lax.broadcasted_iota(jnp.int32, value.shape, 0)
      value = jnp.where(place < places, value, jnp.zeros_like(value))
    state = _add_block(
      tuple(ref[...] for ref in state_refs),
      query_ref[...], key_ref[...], value, start, newest, count_ref[...],
      places, cap,
    )  # fmt: skip
    for ref, x in zip(state_refs, state, strict=True):
      ref[...] = x

  @pl.when(step == pl.num_programs(3) - 1)
  def _():
    output, log_mass = _finish(tuple(ref[...] for ref in state_refs))
    output_ref[...] = output.astype(output_ref.dtype)
    log_mass_ref[...] = log_mass


def on_tpu(
  query, key, value, newest, count, cap=None, interpret=False
) -> softmax.Partial:
  """`attend_recent` as a Mosaic kernel.

  The cache is read as [B,N,K*D], as many heads at a time as fill the lanes.
  Each head's queries are zero in the columns of the other heads, so that one
  product gives the scores of all of them. (Only a TPU can show whether the
  compiler copies the cache to turn [B,N,K,D] into [B,N,K*D].)

  Args:
    query: f[B,Q,H,D].
    key: f[B,N,K,D].
    value: f[B,N,K,D].
    newest: i32[B].
    count: i32[B,Q].
    cap: Scores s become `cap * tanh(s / cap)`; None: as they are.
    interpret: Whether Pallas interprets the kernel, on any platform.
  """
  rows, places, kv_heads, size = key.shape
  together = next(
    n
    for n in range(1, kv_heads + 1)
    if kv_heads % n == 0 and (n * size % _LANES == 0 or n == kv_heads)
  )
  stacked, seen = _by_kv_head(query, count, kv_heads, 16)
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
  # A head's queries have an output in the columns of that head alone.
  output = output.reshape(rows, -1, together, stacked.shape[2], together, size)
  output = jnp.einsum('bkhmgd,hg->bkhmd', output, own).reshape(stacked.shape)
  log_mass = log_mass.reshape(stacked.shape[:3])
  return softmax.Partial(_by_query(output, query), _by_query(log_mass, query))


def _call(query, key, value, newest, count, cap, interpret):
  """Runs the kernel on the cache f[B,N,k*W], `W` columns at a time.

  Returns:
    The output f[B,k,M,W] and the log-sum-exp f32[B,k,M].
  """
  rows, heads, queries, width = query.shape
  places, block = key.shape[1], min(_TPU_KEYS, key.shape[1])
  some = next(
    m for m in range(min(_TPU_QUERIES, queries), 0, -16) if queries % m == 0
  )

  def keys_at(b, k, m, j, newest, needed):
    # After the last block needed the index stays the same, and Pallas reads a
    # block again only where its index changes.
    step = jnp.minimum(j, jnp.maximum(needed[b] - 1, 0))
    return b, _block_back(newest[b], step, places, block), k

  def queries_at(b, k, m, j, *_):
    return b, k, m, 0

  key_spec = pl.BlockSpec((None, block, width), keys_at)
  query_spec = pl.BlockSpec((None, None, some, width), queries_at)
  count_spec = pl.BlockSpec((None, some, 1), lambda b, k, m, j, *_: (b, m, 0))
  column = pltpu.VMEM((some, 1), jnp.float32)
  output, log_mass = pl.pallas_call(
    functools.partial(_tpu_kernel, places=places, cap=cap),
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
    _blocks_needed(newest, count, places, block),
    count[..., None], query, key, value,
  )  # fmt: skip
  return output, log_mass[..., 0]


def _gpu_kernel(
  newest_ref, needed_ref, count_ref, query_ref, key_ref, value_ref,
  output_ref, log_mass_ref, *, block, cap,
):  # fmt: skip
  places, size = key_ref.shape
  newest, count = newest_ref[...], count_ref[...][:, None]
  query = query_ref[...]
  columns = jnp.arange(query.shape[1])

  def body(step, state):
    start = _block_back(newest, step, places, block) * block
    place = start + jnp.arange(block)
    inside = (place < places)[:, None] & (columns < size)[None]
    key, value = (
      plgpu.load(ref.at[place[:, None], columns[None]], mask=inside, other=0)
      for ref in (key_ref, value_ref)
    )
    return _add_block(
      state, query, key, value, start, newest, count, places, cap
    )

  state = lax.fori_loop(0, needed_ref[...], body, _empty(*query.shape))
  output, log_mass = _finish(state)
  output_ref[...] = output.astype(output_ref.dtype)
  log_mass_ref[...] = log_mass[:, 0]


def on_gpu(
  query, key, value, newest, count, cap=None, interpret=False
) -> softmax.Partial:
  """`attend_recent` as a Triton kernel.

  One program handles one row, one key-value head and up to 64 queries, and
  walks through all of the ring that they see. So few rows with a long cache do
  not fill a GPU.

  Args:
    query: f[B,Q,H,D].
    key: f[B,N,K,D].
    value: f[B,N,K,D].
    newest: i32[B].
    count: i32[B,Q].
    cap: Scores s become `cap * tanh(s / cap)`; None: as they are.
    interpret: Whether Pallas interprets the kernel, on any platform.
  """
  rows, places, kv_heads, size = key.shape
  queries = query.shape[1] * query.shape[2] // kv_heads
  some = min(_GPU_QUERIES, max(16, pl.next_power_of_2(queries)))
  stacked, seen = _by_kv_head(query, count, kv_heads, some)
  width = max(16, pl.next_power_of_2(size))
  stacked = jnp.pad(stacked, ((0, 0), (0, 0), (0, 0), (0, width - size)))
  block = min(_GPU_KEYS, max(16, pl.next_power_of_2(places)))
  scalar = pl.BlockSpec((None,), lambda b, k, m: (b,))
  query_spec = pl.BlockSpec(
    (None, None, some, width), lambda b, k, m: (b, k, m, 0)
  )
  key_spec = pl.BlockSpec(
    (None, places, None, size), lambda b, k, m: (b, 0, k, 0)
  )
  output, log_mass = pl.pallas_call(
    functools.partial(_gpu_kernel, block=block, cap=cap),
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
    _blocks_needed(newest, count, places, block),
    seen, stacked, key, value,
  )  # fmt: skip
  return softmax.Partial(
    _by_query(output[..., :size], query), _by_query(log_mass, query)
  )
