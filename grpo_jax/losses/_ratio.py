"""Ratio: what happens to the log-ratio before the objective reads it."""

import jax
from jax import lax
import jax.numpy as jnp

from grpo_jax.losses import _ops
from grpo_jax.losses._base import LossTransform
from grpo_jax.losses._stages import on_log_ratio


def pool_log_ratio(gradient='sequence') -> LossTransform:
  r"""Replaces each token's log-ratio by its completion's mean.

  .. math:: \log s_i = \frac{1}{|o_i|} \sum_t \log s_{it}

  The mean runs over `mask`: a token that is not trained still counts in the
  ratio of its completion.

  Args:
    gradient: `'sequence'` takes the gradient through the mean. `'token'` keeps
      the mean as value, with the slope of the token itself:
      :math:`sg[s_i]\, \pi_{it} / sg[\pi_{it}]`. The two differ where advantages
      differ inside a completion.

  Returns:
    A `LossTransform` that edits the log-ratio.

  Raises:
    ValueError: An unknown `gradient`.

  References:
    Zheng et al., `Group Sequence Policy Optimization
    <https://arxiv.org/abs/2507.18071>`_, 2025
  """
  if gradient not in ('sequence', 'token'):
    raise ValueError(
      f"pool_log_ratio got gradient={gradient!r}; give 'sequence' or 'token'."
    )

  def log_ratio(terms, batch):
    own = terms.log_ratio
    mean = _ops.per_token(_ops.sequence_mean(own, batch))
    if gradient == 'token':
      # The value is `mean`, and the slope that of `own`.
      return own + lax.stop_gradient(mean - own)
    return mean

  return on_log_ratio(log_ratio)


def sum_log_ratio() -> LossTransform:
  r"""Replaces each token's log-ratio by the sum over its completion.

  .. math:: \log S_i = \sum_t \log s_{it}

  Returns:
    A `LossTransform` that edits the log-ratio.
  """

  def log_ratio(terms, batch):
    del batch  # log-ratios are 0 outside the mask
    return _ops.per_token(jnp.sum(terms.log_ratio, axis=-1))

  return on_log_ratio(log_ratio)


def average_ratio() -> LossTransform:
  r"""Replaces each token's ratio by its completion's arithmetic mean.

  .. math:: s_i = \frac{1}{|o_i|} \sum_t s_{it}

  Returns:
    A `LossTransform` that edits the log-ratio.

  References:
    Tan et al., `GTPO and GRPO-S <https://arxiv.org/abs/2508.04349>`_, 2025
  """

  def log_ratio(terms, batch):
    # Not minus infinity, which makes the slope of an empty completion NaN.
    own = jnp.where(batch.mask, terms.log_ratio, -1e30)
    # In logarithms, as a single large ratio may overflow.
    total = jax.nn.logsumexp(own, axis=-1)
    length = jnp.maximum(_ops.length(batch), 1).astype(own.dtype)
    mean = total - jnp.log(length)
    return _ops.per_token(mean)

  return on_log_ratio(log_ratio)


def clip_log_ratio(low=0.4, high=0.4) -> LossTransform:
  r"""Clips each token's log-ratio on the side its advantage pushes it to.

  .. math:: \min(\log s, h) \text{ if } A > 0, \quad
            \max(\log s, -l) \text{ if } A < 0

  Args:
    low: `l`, distance of the lower bound from a log-ratio of 0, in nats.
    high: `h`, distance of the upper bound, likewise.

  Returns:
    A `LossTransform` that edits the log-ratio.

  Raises:
    ValueError: A negative distance.

  References:
    Zhao et al., `Geometric-Mean Policy Optimization
    <https://arxiv.org/abs/2507.20673>`_, 2025. The paper has one number for
    both sides.
  """
  _ops.check_distances('clip_log_ratio', low, high, 'log-ratio 0')

  def log_ratio(terms, batch, low, high):
    above, below = terms.log_ratio > high, terms.log_ratio < -low
    metrics = _ops.clip_metrics(above, below, batch.advantage)
    # Not jnp.clip, which would also hold tokens that the advantage pulls back.
    value = jnp.where(metrics['clipped_high'], high, terms.log_ratio)
    return jnp.where(metrics['clipped_low'], -low, value), metrics

  return on_log_ratio(log_ratio, low=low, high=high)
