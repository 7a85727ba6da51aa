"""Splash attention, JAX's Pallas kernel for TPU, over the rows of a layout.

It agrees with the portable version in Pallas's interpret mode, and is lowered
for TPU on a CPU. It has not run on a TPU yet, so the tile sizes are guesses.
"""

import dataclasses
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

from grpo_jax.models import _remat
from grpo_jax.models.kernels._split import over_devices
from grpo_jax.models.layout import Blocks
from grpo_jax.models.layout import Layout

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class BlocksMask(mask_lib.Mask):
  """Which key each query sees in a row of blocks, computed a tile at a time.

  Attributes:
    blocks: The sizes of the layout's blocks.
    columns: The length of a row, padding included.
  """

  blocks: Blocks
  columns: int

  @property
  def shape(self) -> tuple[int, int]:
    """The number of queries and of keys."""
    return self.columns, self.columns

  def __getitem__(self, index) -> np.ndarray:
    """The tile of two slices, bool[queries, keys]."""
    query, key = (np.arange(self.columns)[part] for part in index)
    edge, size = self.blocks.prompt_tokens, self.blocks.completion_tokens
    same = (query[:, None] - edge) // size == (key[None] - edge) // size
    return ((key < edge)[None] | same) & (key[None] <= query[:, None])


def _splash_sizes(columns: int) -> tuple[int, int]:
  """How many columns a row is padded to, and the columns of a tile.

  A tile is a multiple of 128, and a padded row a multiple of a tile.
  """
  tile = 512 if columns >= 2048 else 256 if columns >= 512 else 128
  return -(-columns // tile) * tile, tile


def splash_suits(layout: Layout, window: int | None) -> bool:
  """Whether `splash` can express a layer's attention.

  Its mask is static. In a row of blocks, the distance between a completion and
  its prompt depends on the prompt's length, so a static mask cannot express a
  window. In other rows the kernel compares segments for equality, so it cannot
  express that one segment continues another (its parent).
  """
  if layout.blocks is None:
    return not layout.parents
  return window is None


def splash(
  query: Array,
  key: Array,
  value: Array,
  layout: Layout,
  window: int | None,
  interpret: bool = False,
  cap: float | None = None,
) -> Array:
  """Splash attention over the rows of a layout.

  Args:
    query: f[R,S,H,D].
    key: f[R,S,K,D].
    value: f[R,S,K,D].
    layout: Packed or padded rows, in which segments have no parents, or blocks.
    window: How many tokens a token sees, itself included; None means all.
    interpret: Whether Pallas interprets the kernel, on any platform.
    cap: Scores s become `cap * tanh(s / cap)`; None: as they are.

  Returns:
    f[R,S,H,D]; finite but meaningless in padding.
  """
  columns, tile = _splash_sizes(query.shape[1])
  if layout.blocks is not None:
    mask = BlocksMask(layout.blocks, columns)
    segment = (layout.segment > 0).astype(jnp.int32)
  elif window is not None:
    mask = mask_lib.LocalMask((columns, columns), (window - 1, 0), 0)
    segment = layout.segment
  else:
    mask = mask_lib.CausalMask((columns, columns))
    segment = layout.segment
  sizes = ('block_q', 'block_kv', 'block_q_dkv', 'block_kv_dkv', 'block_q_dq')
  sizes = kernel_lib.BlockSizes(**dict.fromkeys((*sizes, 'block_kv_dq'), tile))
  more = columns - query.shape[1]

  def heads_first(x):
    x = jnp.pad(x, ((0, 0), (0, more), (0, 0), (0, 0)))
    return jnp.swapaxes(x, 1, 2)

  def local(query, key, value, segment):
    kernel: Any = kernel_lib.make_splash_mha(
      mask_lib.MultiHeadMask([mask] * query.shape[2]),
      block_sizes=sizes,
      head_shards=1,
      q_seq_shards=1,
      attn_logits_soft_cap=cap,
      residual_checkpoint_name=_remat.ATTENTION,
      interpret=interpret,
    )
    segment = jnp.pad(segment, ((0, 0), (0, more)))
    ids = kernel_lib.SegmentIds(segment, segment)
    scaled = query * query.shape[-1] ** -0.5
    scaled, key, value = map(heads_first, (scaled, key, value))
    output: Any = jax.vmap(kernel)(scaled, key, value, ids)
    return jnp.swapaxes(output, 1, 2)[:, : query.shape[1]]

  return over_devices(
    local,
    (query, key, value, segment),
    ('r.h.', 'r.h.', 'r.h.', 'r.'),
    'r.h.',
    key.shape[2],
  )
