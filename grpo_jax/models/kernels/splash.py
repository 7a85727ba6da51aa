"""Splash attention, JAX's Pallas kernel for TPU, over rows of tokens.

It agrees with the portable version in Pallas's interpret mode, and is lowered
for TPU on a CPU. It has not run on a TPU yet, so the tile sizes are guesses.
"""

import dataclasses
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

from grpo_jax.mesh import shards
from grpo_jax.models import remat
from grpo_jax.models.kernels.split import over_devices
from grpo_jax.models.layout import Blocks
from grpo_jax.models.layout import Layout

Array = jax.Array


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
  express that one segment continues another (its parent). Parts of rows must
  consist of whole tiles.
  """
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
  of_key: Array | None = None,
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
    of_key: i32[R,N], `segment` of all columns, if the rows are cut.

  Returns:
    f[R,S,H,D]; finite but meaningless in padding.
  """
  queries, keys = query.shape[1], key.shape[1]
  columns, tile = _splash_sizes(keys)
  # A part is not padded: its neighbour has the columns behind it.
  of_query = tile if part is None else math.gcd(tile, queries)
  padded = columns if part is None else queries
  sizes = kernel_lib.BlockSizes(
    **dict.fromkeys(('block_q', 'block_q_dkv', 'block_q_dq'), of_query),
    **dict.fromkeys(('block_kv', 'block_kv_dkv', 'block_kv_dq'), tile),
  )
  of_key = segment if of_key is None else of_key
  if blocks is not None:
    assert segment is not None and of_key is not None
    segment, of_key = ((x > 0).astype(jnp.int32) for x in (segment, of_key))

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
      residual_checkpoint_name=remat.ATTENTION,
      interpret=interpret,
    )

  def local(query, key, value, *rest):
    given: list[Any] = [pad(query * query.shape[-1] ** -0.5, padded)]
    given += [pad(key, columns), pad(value, columns)]
    given = [jnp.swapaxes(x, 1, 2) for x in given]
    if segment is not None:
      own, of_key = pad(rest[0], padded), pad(rest[1], columns)
      given.append(kernel_lib.SegmentIds(own, of_key))

    def run(first):
      return lambda *given: jax.vmap(kernel(query.shape[2], first))(*given)

    if part is None:
      output = run(0)(*given)
    else:  # each part has a mask of its own, which is static
      firsts = range(0, keys, queries)
      output = jax.lax.switch(rest[-1], list(map(run, firsts)), *given)
    return jnp.swapaxes(output, 1, 2)[:, :queries]

  arrays: list[Any] = [query, key, value]
  axes = ['r.h.', 'r.h.', 'r.h.']
  if segment is not None:
    arrays, axes = arrays + [segment, of_key], axes + ['r.', 'r.']
  if part is not None:
    arrays, axes = [*arrays, part], [*axes, '']
  return over_devices(local, tuple(arrays), tuple(axes), 'r.h.', key.shape[2])
