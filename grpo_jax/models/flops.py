"""Operations and activations of a model, counted from its matrix products."""

import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from grpo_jax.models.config import ModelConfig


def flops_per_token(
  config: ModelConfig, context: ArrayLike, with_head: bool = True
) -> np.ndarray:
  r"""Floating-point operations of a forward pass, for one token.

  .. math:: 2 N + 4 L H D \cdot \text{context}

  with N parameters in the matrices that a token is multiplied by, L layers and
  H heads of size D. N includes the output layer, but not the embedding, which
  is looked up; of experts it includes the router and the k that a token is
  given to. Norms, rotations and the softmax are not counted. A backward pass
  takes twice as many operations.

  Args:
    config: The shape of the model.
    context: How many tokens the token attends to, itself included; an array of
      any shape. A layer with a window sees no more than its window.
    with_head: Whether the logits are computed too.

  Returns:
    f64 of the shape of `context`.

  References:
    Chowdhery et al., `PaLM: Scaling Language Modeling with Pathways
    <https://arxiv.org/abs/2204.02311>`_, 2022, appendix B; it counts a backward
    pass too: 6 N + 12 L H D context.
  """
  heads = config.num_heads * config.head_dim
  kv_heads = config.num_kv_heads * config.head_dim
  attention = config.width * (2 * heads + 2 * kv_heads)
  mlp = 3 * config.width * config.mlp_width
  mixed = 0
  if config.experts is not None:
    active = 3 * config.experts.per_token * config.experts.width
    mixed = config.width * (active + config.experts.number)
  layers = sum(
    attention + (mixed if kind.experts else mlp) for kind in config.kinds
  )
  head = config.width * config.vocab_size if with_head else 0
  windows = [kind.window_tokens or np.inf for kind in config.kinds]
  context = np.asarray(context, np.float64)[..., None]
  seen = np.minimum(context, windows).sum(axis=-1)
  return 2 * (layers + head) + 4 * heads * seen


def bytes_per_token(
  config: ModelConfig, tensor: int = 1, lanes: int = 1
) -> int:
  """The activations that the layers keep for their gradients, bytes a token.

  Counted are the arrays that products and norms read: twice the residual stream
  in its dtype, four as wide as it, queries, keys and values three times (as
  projected, rotated, and their gradient), and four as wide as the MLP. Scores
  of attention are not kept. The logits are computed in chunks, and are not
  counted either.

  Args:
    config: The shape of the model. Its `remat` says what is kept of each layer;
      under all but `'none'`, all of one layer is there too. What is offloaded
      is not counted, but for two layers whose input is on its way.
    tensor: Over how many devices heads and hidden units are split, and the
      columns of the residual stream. What a layer's halves read is whole.
    lanes: To a multiple of which an array's last axis is filled up.

  Returns:
    Bytes per token, all layers together.
  """
  heads = config.num_heads + 2 * config.num_kv_heads
  hidden = config.mlp_width
  if config.experts is not None:
    hidden = max(hidden, config.experts.per_token * config.experts.width)
  itemsize = jnp.dtype(config.compute_dtype).itemsize
  stream = config.width * jnp.dtype(config.residual_dtype).itemsize
  split = 3 * heads * config.head_dim + 4 * hidden + 4 * config.width
  read = 2 * config.width * itemsize * (tensor > 1)
  stream //= tensor
  layer = 2 * stream + split // tensor * itemsize + read
  # Output and log-sum-exp of attention, as accelerators' kernels keep them.
  filled = -(-config.head_dim // lanes) * lanes
  attended = config.num_heads * (filled * itemsize + 4) // tensor
  return {
    'none': config.num_layers * layer,
    'layer': config.num_layers * stream + layer,
    'attention': config.num_layers * (stream + attended) + layer,
    'offload': 2 * stream + layer,
  }[config.remat]
