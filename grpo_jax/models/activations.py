"""How much memory a backward pass keeps of each token, counted roughly."""

import jax.numpy as jnp

from grpo_jax.models.config import ModelConfig


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
