"""cuDNN's fused attention over rows of tokens, for GPUs.

It is called through `jax.nn.dot_product_attention`. Two things are tested on a
CPU: JAX's XLA implementation of that function, given the same arguments, agrees
with the portable version; and the call to cuDNN is lowered for CUDA. The kernel
itself has not run on a GPU yet.
"""

import functools

import jax
import jax.numpy as jnp

from grpo_jax.models.kernels.split import over_devices
from grpo_jax.models.layout import Blocks
from grpo_jax.models.layout import Layout

Array = jax.Array

_QKV = ('r.h.', 'r.h.', 'r.h.')


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
  is rounded to bfloat16 and has no gradient.) A row of several segments adds a
  mask, bool[R,1,S,S], which all heads share.

  Args:
    query: f[R,S,H,D].
    key: f[R,S,K,D].
    value: f[R,S,K,D].
    layout: See `Layout`.
    window: How many tokens a token sees, itself included; None means all.
    interpret: Whether XLA computes it instead of cuDNN, on any platform.

  Returns:
    f[R,S,H,D]; finite but meaningless in padding.
  """
  attend = functools.partial(cudnn_causal, interpret=interpret)
  if layout.blocks is not None:
    arrays, fold = _unfolded((query, key, value), layout, layout.blocks)
    return fold(attend(*arrays, window=window))
  if layout.column.shape[1] == 1:
    return attend(query, key, value, window)
  segment, parent, position = layout.segment, layout.parent, layout.position
  same = segment[:, :, None] == segment[:, None, :]
  continued = parent[:, :, None] == segment[:, None, :]
  mask = (same | continued) & (segment > 0)[:, None, :]
  if window is not None:
    mask &= position[:, :, None] - position[:, None, :] < window
  return attend(query, key, value, None, mask[:, None])


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
    window: See `cudnn`.
    mask: bool[R,1,S,S], which of the keys before it a query sees; None: all.
    interpret: See `cudnn`.

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
    whole = jnp.concatenate([prompt, rest], axis=1)
    return jnp.take_along_axis(whole, source[..., None, None], axis=1)

  def fold(x):
    prompt = x.reshape(rows, group, *x.shape[1:])[:, 0, :edge]
    rest = jnp.take_along_axis(x, own[..., None, None], axis=1)
    return jnp.concatenate(
      [prompt, rest.reshape(rows, -1, *x.shape[2:])], axis=1
    )

  return tuple(map(unfold, arrays)), fold
