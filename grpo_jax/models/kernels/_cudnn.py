"""cuDNN's fused attention over the rows of a layout, for GPUs.

Through `jax.nn.dot_product_attention`, whose arguments have been compared with
the portable version by its own XLA implementation, and lowered for CUDA from a
CPU; it has not run on a GPU from here yet.
"""

import functools

import jax
import jax.numpy as jnp

from grpo_jax.layout import Blocks
from grpo_jax.layout import Layout
from grpo_jax.models.kernels._split import over_devices

Array = jax.Array

_QKV = ('r.h.', 'r.h.', 'r.h.')


def cudnn_suits(layout: Layout, query: Array) -> bool:
  """Whether `cudnn` is a good choice for a layer of this model and layout.

  It wants bfloat16 and heads of 8, 16, ... 128; and a row of blocks is
  unfolded for it, which repeats the prompt's attention for every completion:
  not where that is most of the work (factor 4).
  """
  size = query.shape[-1]
  if query.dtype != jnp.bfloat16 or size % 8 or size > 128:
    return False
  if layout.blocks is None:
    return True
  blocks = layout.blocks
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

  Rows of one completion need the causal mask alone, since their padding comes
  last. Rows of blocks are unfolded into such rows for the attention (not for
  the rest of the layer): the log-sum-exp that `jax.nn.dot_product_attention`
  returns is rounded to bfloat16 and has no gradient, so prompt and completion
  cannot be computed apart and merged. Rows of several segments add a mask,
  [R,1,S,S]; nothing of that size has an axis for the heads.

  Args:
    query: f[R,S,H,D].
    key: f[R,S,K,D].
    value: f[R,S,K,D].
    layout: See `Layout`.
    window: Tokens that one sees, itself included; None is all.
    interpret: The same arguments computed by XLA.

  Returns:
    f[R,S,H,D]; finite rubbish in padding.
  """
  attend = functools.partial(_cudnn_call, interpret=interpret)
  if layout.blocks is not None:
    arrays, fold = _unfolded((query, key, value), layout, layout.blocks)
    return fold(attend(*arrays, window))
  if layout.column.shape[1] == 1:
    return attend(query, key, value, window)
  segment, parent, position = layout.segment, layout.parent, layout.position
  same = segment[:, :, None] == segment[:, None, :]
  continued = parent[:, :, None] == segment[:, None, :]
  mask = (same | continued) & (segment > 0)[:, None, :]
  if window is not None:
    mask &= position[:, :, None] - position[:, None, :] < window
  return attend(query, key, value, None, mask[:, None])


def _cudnn_call(query, key, value, window, *mask, interpret) -> Array:
  """Causal attention with a window or a mask, on each device's share."""
  columns = query.shape[1]
  more = columns % 2  # the gradient wants even sizes

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
  arrays += [jnp.pad(x, ((0, 0), (0, 0), (0, more), (0, more))) for x in mask]
  axes = (*_QKV, 'r...')[: len(arrays)]
  output = over_devices(local, tuple(arrays), axes, 'r.h.', key.shape[2])
  return output[:, :columns]


def _unfolded(arrays, layout: Layout, blocks: Blocks):
  """Rows of blocks as rows of one completion, and the way back.

  Args:
    arrays: f[R,S,...] each.
    layout: Whose prompts are left-aligned in their block.
    blocks: Its blocks.

  Returns:
    The arrays as f[R*G,N+T,...], the completion right behind its prompt and
    rubbish behind both; and a function from such an array back to f[R,S,...].
  """
  edge, group = blocks.prompt_tokens, blocks.completions
  tokens, rows = blocks.completion_tokens, layout.tokens.shape[0]
  length = jnp.sum(layout.segment[:, :edge] > 0, axis=1, dtype=jnp.int32)
  length = jnp.repeat(length, group)[:, None]
  place = jnp.arange(edge + tokens)[None]
  # Where each place of an unfolded row comes from, in prompt + completion.
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
