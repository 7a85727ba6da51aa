"""Attention over rows of tokens by kernels: cuDNN's on GPUs, splash on TPUs.

cuDNN's is called through `jax.nn.dot_product_attention`. Two things are tested
on a CPU: JAX's XLA implementation of that function, inputs the same arguments,
agrees with the portable version; and the call to cuDNN is lowered for CUDA.
Splash attention is JAX's Pallas kernel. It agrees with the portable version in
Pallas's interpret mode, and is lowered for TPU on a CPU. Neither has run on its
hardware yet, so the tile sizes are guesses.
"""

from collections.abc import Callable
import dataclasses
import functools
import math
from typing import Any

import jax
from jax.experimental.pallas.ops.tpu.splash_attention import (
  splash_attention_kernel as kernel_lib,
)
from jax.experimental.pallas.ops.tpu.splash_attention import (
  splash_attention_mask as mask_lib,
)
import jax.numpy as jnp
import numpy as np

from grpo_jax.mesh import sharding
from grpo_jax.mesh import shards
from grpo_jax.models.layout import Blocks
from grpo_jax.models.layout import Layout
from grpo_jax.models.layout import reached
from grpo_jax.models.softmax import CHECKPOINT_NAME

Array = jax.Array

_QKV = ('r.h.', 'r.h.', 'r.h.')


def over_devices(
  function: Callable[..., Any],
  arrays: tuple[Array, ...],
  axes: tuple[str, ...],
  output_axes: Any,
  heads: int,
  everywhere: bool = False,
) -> Any:
  """Calls a function of rows and heads on each device's share of them.

  The compiler cannot look into a kernel, and would gather all of its arguments
  on every device. In attention no row and no head depends on another, so each
  device can compute its own rows and heads.

  Args:
    function: A function of the arrays, for any number of rows and of heads.
    arrays: The arguments of the function.
    axes: For each array a string with one letter per axis: `r` for rows, `h`
      for heads (query or key-value), `.` for anything else.
    output_axes: Such a string for each array of the result, as a tree.
    heads: The number of key-value heads. All heads are split as these are.
    everywhere: Whether rows are split over `tensor` too, where it does not
      divide the heads.

  Returns:
    What the function returns. Without a mesh the function is called on the
    whole arrays. Rows or heads whose number the mesh does not divide are not
    split.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or mesh.size == 1:
    return function(*arrays)
  rows = arrays[0].shape[axes[0].index('r')]
  splits_rows = rows % sharding.row_shards(mesh) == 0
  splits_rows &= not sharding.on_shard()  # which has its own rows already
  places: dict[str, Any] = {
    'r': sharding.ROW_AXES if splits_rows else None,
    'h': 'tensor' if heads % mesh.shape['tensor'] == 0 else None,
    '.': None,
  }
  if everywhere and places['h'] is None and rows % mesh.size == 0:
    places['r'] = sharding.ALL_AXES

  def spec(letters):
    return jax.P(*(places[letter] for letter in letters))

  return jax.shard_map(
    function,
    in_specs=tuple(map(spec, axes)),
    out_specs=jax.tree.map(spec, output_axes),
    axis_names=set(mesh.axis_names) - set(mesh.manual_axes),
    check_vma=False,
  )(*arrays)


def cudnn_suits(query: Array, blocks: Blocks | None = None) -> bool:
  """Whether cuDNN is a good choice for a layer with these queries and rows.

  cuDNN needs bfloat16 and a head size of 8, 16, ... or 128. A row of blocks is
  unfolded for it, which repeats the prompt's attention for every completion. A
  row is suited if unfolding makes the work at most four times as much.

  Args:
    query: f[R,S,H,D].
    blocks: The equal blocks of every row; None if it has none.
  """
  size = query.shape[-1]
  if query.dtype != jnp.bfloat16 or size % 8 or size > 128:
    return False
  if blocks is None:
    return True
  prompt, tokens = blocks.prompt_tokens, blocks.completion_tokens
  own = prompt**2 + blocks.completions * tokens * (2 * prompt + tokens)
  return blocks.completions * (prompt + tokens) ** 2 <= 4 * own


def cudnn(
  query: Array,
  key: Array,
  value: Array,
  layout: Layout,
  window: int | None,
  interpret: bool = False,
) -> Array:
  """cuDNN's attention over the rows of a layout.

  A row of one completion needs the causal mask alone, since its padding comes
  last. A row of blocks is unfolded into such rows for the attention, and folded
  again for the rest of the layer. (Prompt and completion cannot be computed
  apart and merged: the log-sum-exp that `jax.nn.dot_product_attention` returns
  is rounded to bfloat16 and has no gradient.) A row of several segments, or of
  trees, adds a mask, bool[R,1,S,S], which all heads share.

  Args:
    query: f[R,S,H,D].
    key: f[R,S,K,D].
    value: f[R,S,K,D].
    layout: The rows.
    window: How many tokens a token sees, itself included; None means all.
    interpret: Whether XLA computes it instead of cuDNN, on any platform.

  Returns:
    f[R,S,H,D]; finite but meaningless in padding.
  """
  attend = functools.partial(cudnn_causal, interpret=interpret)
  arrays, fold = (query, key, value), lambda x: x
  reach, position, segment = layout.reach, layout.position, layout.segment
  if layout.blocks is not None:
    arrays, fold = _unfolded(arrays, layout, layout.blocks)
    if reach is not None:
      of_columns = [jnp.asarray(x)[..., None, None] for x in (reach, position)]
      unfolded, _ = _unfolded(of_columns, layout, layout.blocks)
      reach, position = (jnp.squeeze(x, (2, 3)) for x in unfolded)
  if reach is not None:
    mask = reached(reach, reach.shape[1])
  elif layout.blocks is not None or layout.column.shape[1] == 1:
    return fold(attend(*arrays, window=window))
  else:
    same = segment[:, :, None] == segment[:, None, :]
    continued = layout.parent[:, :, None] == segment[:, None, :]
    mask = (same | continued) & (segment > 0)[:, None, :]
  if window is not None:
    mask &= position[:, :, None] - position[:, None, :] < window
  return fold(attend(*arrays, window=None, mask=mask[:, None]))


def cudnn_causal(
  query: Array,
  key: Array,
  value: Array,
  window: int | None,
  mask: Array | None = None,
  interpret: bool = False,
) -> Array:
  """cuDNN's attention over rows of one sequence each, padded behind it.

  Args:
    query: f[R,S,H,D].
    key: f[R,S,K,D].
    value: f[R,S,K,D].
    window: How many tokens a token sees, itself included; None means all.
    mask: bool[R,1,S,S], which of the keys before it a query sees; None: all.
    interpret: Whether XLA computes it instead of cuDNN, on any platform.

  Returns:
    f[R,S,H,D]; finite but meaningless in padding.
  """
  columns = query.shape[1]
  more = columns % 2  # cuDNN's gradient needs an even number of columns

  def local(query, key, value, *mask):
    return jax.nn.dot_product_attention(
      query,
      key,
      value,
      mask=mask[0] if mask else None,
      is_causal=True,
      local_window_size=None if window is None else (window - 1, 0),
      implementation='xla' if interpret else 'cudnn',
    )

  arrays = [
    jnp.pad(x, ((0, 0), (0, more), (0, 0), (0, 0))) for x in (query, key, value)
  ]
  if mask is not None:
    arrays.append(jnp.pad(mask, ((0, 0), (0, 0), (0, more), (0, more))))
  axes = (*_QKV, 'r...')[: len(arrays)]
  output = over_devices(local, tuple(arrays), axes, 'r.h.', key.shape[2])
  return output[:, :columns]


def _unfolded(arrays, layout: Layout, blocks: Blocks):
  """Turns rows of blocks into rows of one completion each.

  Args:
    arrays: f[R,S,...] each.
    layout: A layout whose prompts are left-aligned in their block.
    blocks: The sizes of the layout's blocks.

  Returns:
    The arrays as f[R*G,N+T,...], where each completion follows its prompt
    without a gap and meaningless values follow both; and a function that turns
    such an array back into f[R,S,...].
  """
  edge, group = blocks.prompt_tokens, blocks.completions
  tokens, rows = blocks.completion_tokens, layout.tokens.shape[0]
  length = jnp.sum(layout.segment[:, :edge] > 0, axis=1, dtype=jnp.int32)
  length = jnp.repeat(length, group)[:, None]
  place = jnp.arange(edge + tokens)[None]
  # Each place of an unfolded row, as an index into prompt block + completion.
  source = jnp.where(place < length, place, place - length + edge)
  source = jnp.minimum(source, edge + tokens - 1)
  own = jnp.arange(tokens)[None] + length

  def unfold(x):
    prompt = jnp.repeat(x[:, :edge], group, axis=0)
    rest = x[:, edge:].reshape(rows * group, tokens, *x.shape[2:])
    joined = jnp.concatenate([prompt, rest], axis=1)
    return jnp.take_along_axis(joined, source[..., None, None], axis=1)

  def fold(x):
    prompt = x.reshape(rows, group, *x.shape[1:])[:, 0, :edge]
    rest = jnp.take_along_axis(x, own[..., None, None], axis=1)
    return jnp.concatenate(
      [prompt, rest.reshape(rows, -1, *x.shape[2:])], axis=1
    )

  return tuple(map(unfold, arrays)), fold


@dataclasses.dataclass(frozen=True)
class BlocksMask(mask_lib.Mask):
  """Which key each query sees in a row of blocks, computed a tile at a time.

  Attributes:
    blocks: The sizes of the layout's blocks.
    queries: How many queries there are.
    columns: The length of a row, padding included.
    first: The column of the first query.
  """

  blocks: Blocks
  queries: int
  columns: int
  first: int = 0

  @property
  def shape(self) -> tuple[int, int]:
    """The number of queries and of keys."""
    return self.queries, self.columns

  def __getitem__(self, index) -> np.ndarray:
    """The tile of two slices, bool[queries, keys]."""
    query = self.first + np.arange(self.queries)[index[0]]
    key = np.arange(self.columns)[index[1]]
    edge, size = self.blocks.prompt_tokens, self.blocks.completion_tokens
    same = (query[:, None] - edge) // size == (key[None] - edge) // size
    return ((key < edge)[None] | same) & (key[None] <= query[:, None])


LANES = 128
"""Columns of the smallest tile."""


def _splash_sizes(columns: int) -> tuple[int, int]:
  """How many columns a row is padded to, and the columns of a tile.

  A tile is a multiple of 128, and a padded row a multiple of a tile.
  """
  tile = 512 if columns >= 2048 else 256 if columns >= 512 else 128
  return -(-columns // tile) * tile, tile


def _mask(
  queries: int,
  columns: int,
  window: int | None,
  blocks: Blocks | None,
  first: int = 0,
) -> mask_lib.Mask:
  """Which keys each query may see, by their columns alone; see `BlocksMask`."""
  if blocks is not None:
    return BlocksMask(blocks, queries, columns, first)
  if window is not None:
    return mask_lib.LocalMask((queries, columns), (window - 1, 0), first)
  return mask_lib.CausalMask((queries, columns), first)


def splash_suits(layout: Layout, window: int | None) -> bool:
  """Whether `splash` can express a layer's attention over a layout's rows.

  Its mask is static. In a row of blocks, the distance between a completion and
  its prompt depends on the prompt's length, so a static mask cannot express a
  window. In other rows the kernel compares segments for equality, so it cannot
  express that one segment continues another (its parent), nor that tokens of a
  tree see a part of those before them. Parts of rows must consist of whole
  tiles.
  """
  if layout.reach is not None:
    return False
  if shards.parts() > 1 and layout.tokens.shape[1] % LANES:
    return False
  if layout.blocks is None:
    return not layout.parents
  return window is None


def splash(
  query: Array,
  key: Array,
  value: Array,
  segment: Array | None,
  window: int | None,
  interpret: bool = False,
  cap: float | None = None,
  blocks: Blocks | None = None,
  part: Array | None = None,
  key_segment: Array | None = None,
  sinks: Array | None = None,
) -> Array:
  """Splash attention over rows in which no segment continues another.

  Args:
    query: f[R,S,H,D]; of rows that are cut, those of one part.
    key: f[R,S,K,D].
    value: f[R,S,K,D].
    segment: i32[R,S], see `Layout`; None: each row is one sequence, and what
      pads it comes last, where the causal mask hides it.
    window: How many tokens a token sees, itself included; None means all.
    interpret: Whether Pallas interprets the kernel, on any platform.
    cap: Scores s become `cap * tanh(s / cap)`; None: as they are.
    blocks: The equal blocks of every row, each of which continues the prompt;
      None if it has none.
    part: i32[], the number of the part, if the rows are cut into equal parts,
      whose columns are a multiple of 128.
    key_segment: i32[R,N], `segment` of all columns, if the rows are cut.
    sinks: f32[H], of a layer that has them.

  Returns:
    f[R,S,H,D]; finite but meaningless in padding.
  """
  queries, keys = query.shape[1], key.shape[1]
  columns, tile = _splash_sizes(keys)
  # A part is not padded: its neighbour has the columns behind it.
  query_tile = tile if part is None else math.gcd(tile, queries)
  padded = columns if part is None else queries
  sizes = kernel_lib.BlockSizes(
    **dict.fromkeys(('block_q', 'block_q_dkv', 'block_q_dq'), query_tile),
    **dict.fromkeys(('block_kv', 'block_kv_dkv', 'block_kv_dq'), tile),
  )
  key_segment = segment if key_segment is None else key_segment
  if blocks is not None:
    assert segment is not None and key_segment is not None
    segment, key_segment = (
      (x > 0).astype(jnp.int32) for x in (segment, key_segment)
    )

  def pad(x, length):
    return jnp.pad(
      x, [(0, 0), (0, length - x.shape[1])] + [(0, 0)] * (x.ndim - 2)
    )

  def kernel(heads: int, first: int) -> Any:
    mask = _mask(padded, columns, window, blocks, first)
    return kernel_lib.make_splash_mha(
      mask_lib.MultiHeadMask([mask] * heads),
      block_sizes=sizes,
      head_shards=1,
      q_seq_shards=1,
      attn_logits_soft_cap=cap,
      residual_checkpoint_name=CHECKPOINT_NAME,
      interpret=interpret,
    )

  def local(query, key, value, *others):
    rest = list(others)
    inputs: list[Any] = [pad(query * query.shape[-1] ** -0.5, padded)]
    inputs += [pad(key, columns), pad(value, columns)]
    inputs = [jnp.swapaxes(x, 1, 2) for x in inputs]
    here = None if part is None else rest.pop()
    more = {} if sinks is None else {'sinks': rest.pop()}
    if segment is not None:
      own, key_segment = pad(rest[0], padded), pad(rest[1], columns)
      inputs.append(kernel_lib.SegmentIds(own, key_segment))

    def run(first):
      made = kernel(query.shape[2], first)
      return lambda *inputs: jax.vmap(lambda *row: made(*row, **more))(*inputs)

    if here is None:
      output = run(0)(*inputs)
    else:  # each part has a mask of its own, which is static
      firsts = range(0, keys, queries)
      output = jax.lax.switch(here, list(map(run, firsts)), *inputs)
    return jnp.swapaxes(output, 1, 2)[:, :queries]

  arrays: list[Any] = [query, key, value]
  axes = ['r.h.', 'r.h.', 'r.h.']
  if segment is not None:
    arrays, axes = arrays + [segment, key_segment], axes + ['r.', 'r.']
  if sinks is not None:
    arrays, axes = [*arrays, sinks], [*axes, 'h']
  if part is not None:
    arrays, axes = [*arrays, part], [*axes, '']
  return over_devices(local, tuple(arrays), tuple(axes), 'r.h.', key.shape[2])
