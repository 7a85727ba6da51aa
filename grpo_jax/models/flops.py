"""How many operations a model takes, counted from its matrix products."""

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
