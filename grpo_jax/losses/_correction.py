r"""Corrections for a sampler that is not the old policy (once per rollout).

The sampler's arithmetic, its filters or its age make it another policy than the
one whose gradient is taken. With :math:`w = \pi_{old} / \pi_{sampler}` these
transforms multiply the advantage by a weight or by a gate. They touch neither
the penalty nor any denominator. The `w` of a whole completion is the product
over its tokens.
"""

from collections.abc import Callable
import math

import jax.numpy as jnp

from grpo_jax.losses import _ops
from grpo_jax.losses._base import Array
from grpo_jax.losses._base import LossTransform
from grpo_jax.losses._stages import on_advantage


def _corrected(
  name: str,
  factor: Callable[..., tuple[Array, Array]],
  level: str,
  metric: str,
  self_normalized: bool = False,
  **hyper,
) -> LossTransform:
  """Multiplies the advantage by a factor of the log importance weight.

  Args:
    name: Of the transform.
    factor: `(log weight f32[P,G,T], **hyper) -> (factor, where it acted)`,
      arrays f32[P,G,T] and bool[P,G,T].
    level: Whose log weight `factor` gets: `'token'`, `'sequence'` (the sum over
      the completion) or `'mean'` (the mean over the completion).
    metric: Name of the metric that marks the tokens on which the factor acted.
    self_normalized: Whether the factors are divided by their mean over the
      rollout's trained tokens.
    **hyper: Numbers, schedules or controllers.
  """

  _ops.check_flag(name, 'self_normalized', self_normalized)

  def log_weight(batch):
    own = batch.logp_old - batch.logp_sampler
    if level == 'token':
      return own
    mean = level == 'mean'
    # Log weights are 0 outside the mask, so the sum is over the completion.
    pooled = _ops.sequence_mean(own, batch) if mean else jnp.sum(own, axis=-1)
    return jnp.broadcast_to(_ops.per_token(pooled), own.shape)

  def advantage(advantage, batch, **hyper):
    log_w = log_weight(batch)
    weight, acted = factor(log_w, **hyper)
    if self_normalized:
      # The mean is 0 if no token is trained or all weights are 0. The weights
      # are then 0 instead of NaN.
      weight = _ops.safe_divide(weight, _ops.masked_mean(weight, batch.keep))
    # Above this bound `saturating_exp` cuts the weight. A metric shows where,
    # because a cut weight no longer corrects for the sampler.
    saturated = log_w > _ops.MAX_LOG_RATIO
    return advantage * weight, {metric: acted, f'{metric}_saturated': saturated}

  advantage.__qualname__ = name  # for the errors of the stage
  return on_advantage(advantage, ('logp_old', 'logp_sampler'), **hyper)


def _truncated(log_w, cap):
  weight = _ops.saturating_exp(log_w)
  return jnp.minimum(weight, cap), weight > cap


def _outside(log_w, low, high):
  # In logarithms, as the exp of a long completion may overflow. A `low` of 1
  # gives minus infinity: no lower bound.
  return (log_w < jnp.log1p(-low)) | (log_w > jnp.log1p(high))


def truncate_token_importance(cap=2.0, self_normalized=False) -> LossTransform:
  r"""Truncated importance sampling, token by token.

  .. math:: A_{it} \leftarrow A_{it} \min(w_{it}, C)

  Args:
    cap: `C`, an absolute ratio.
    self_normalized: Whether the weights are divided by their mean over the
      rollout's trained tokens.

  Returns:
    A `LossTransform` that edits the advantage. Its metric
    `importance_truncated` marks the tokens above the cap.

  References:
    Yao et al., `Your Efficient RL Framework Secretly Brings You Off-Policy RL
    Training <https://fengyao.notion.site/off-policy-rl>`_, 2025
  """
  _ops.check_numbers(
    'truncate_token_importance', least=0, most=math.inf, above=True, cap=cap
  )
  return _corrected(
    'truncate_token_importance',
    _truncated,
    'token',
    'importance_truncated',
    self_normalized,
    cap=cap,
  )


def truncate_sequence_importance(
  cap=2.0, self_normalized=False
) -> LossTransform:
  r"""Truncated importance sampling of whole completions.

  .. math:: A_{it} \leftarrow A_{it} \min\Bigl(\prod_s w_{is}, C\Bigr)

  Args:
    cap: `C`, an absolute ratio.
    self_normalized: Whether the weights are divided by their mean over the
      rollout's trained tokens.

  Returns:
    A `LossTransform` that edits the advantage. Its metric
    `importance_truncated` marks the tokens of completions above the cap.
  """
  _ops.check_numbers(
    'truncate_sequence_importance', least=0, most=math.inf, above=True, cap=cap
  )
  return _corrected(
    'truncate_sequence_importance',
    _truncated,
    'sequence',
    'importance_truncated',
    self_normalized,
    cap=cap,
  )


def mask_token_importance(
  low=0.5, high=4.0, self_normalized=False
) -> LossTransform:
  r"""Importance weights of tokens, 0 outside a range (IcePop).

  .. math:: A_{it} \leftarrow A_{it}\, w_{it}\,
              1[1 - l \le w_{it} \le 1 + h]

  Args:
    low: `l`, distance of the lower bound from 1.
    high: `h`, distance of the upper bound from 1.
    self_normalized: Whether the weights are divided by their mean over the
      rollout's trained tokens.

  Returns:
    A `LossTransform` that edits the advantage. Its metric `importance_masked`
    marks the tokens outside the range.

  Raises:
    ValueError: A negative distance, or bounds in the place of distances.

  References:
    Ling Team, `Every Step Evolves <https://arxiv.org/abs/2510.18855>`_, 2025
  """
  _ops.check_range('mask_token_importance', low, high)

  def factor(log_w, low, high):
    outside = _outside(log_w, low, high)
    return jnp.where(outside, 0, _ops.saturating_exp(log_w)), outside

  return _corrected(
    'mask_token_importance',
    factor,
    'token',
    'importance_masked',
    self_normalized,
    low=low,
    high=high,
  )


def mask_sequence_importance(cap=3.0, self_normalized=False) -> LossTransform:
  r"""Importance weights of completions, 0 above a bound.

  .. math:: A_{it} \leftarrow A_{it}\, W_i\, 1[W_i \le C], \quad
              W_i = \prod_s w_{is}

  Args:
    cap: `C`, an absolute ratio.
    self_normalized: Whether the weights are divided by their mean over the
      rollout's trained tokens.

  Returns:
    A `LossTransform` that edits the advantage. Its metric `importance_masked`
    marks the tokens of completions above the bound.
  """
  _ops.check_numbers(
    'mask_sequence_importance', least=0, most=math.inf, above=True, cap=cap
  )

  def factor(log_w, cap):
    weight = _ops.saturating_exp(log_w)
    return jnp.where(weight > cap, 0, weight), weight > cap

  return _corrected(
    'mask_sequence_importance',
    factor,
    'sequence',
    'importance_masked',
    self_normalized,
    cap=cap,
  )


def gate_geometric_mean(low=0.01, high=0.01) -> LossTransform:
  r"""Drops the credit of completions whose mean token weight is far from 1.

  .. math:: A_{it} \leftarrow A_{it}\, 1\Bigl[1 - l \le
              \exp\Bigl(\frac{1}{|o_i|} \sum_s \log w_{is}\Bigr)
              \le 1 + h\Bigr]

  This is a gate only: completions that pass it are not weighted.

  Args:
    low: `l`, distance of the lower bound from 1.
    high: `h`, distance of the upper bound from 1.

  Returns:
    A `LossTransform` that edits the advantage. Its metric `geometric_gated`
    marks the tokens of completions outside the range.

  Raises:
    ValueError: A negative distance, or bounds in the place of distances.
  """
  _ops.check_range('gate_geometric_mean', low, high)

  def factor(log_w, low, high):
    outside = _outside(log_w, low, high)
    return jnp.where(outside, 0, 1), outside

  return _corrected(
    'gate_geometric_mean',
    factor,
    'mean',
    'geometric_gated',
    low=low,
    high=high,
  )


def mask_stale(versions=1, whole=False) -> LossTransform:
  r"""Drops the credit of tokens that a policy too old has drawn.

  .. math:: A_{it} \leftarrow A_{it}\, 1[a_{it} \le V]

  The age :math:`a_{it}` of a token is the number of rollouts that the policy
  has learned from since the version that drew it. What is dropped still counts
  in every denominator, and in the penalty.

  Args:
    versions: `V`, the largest age that is learned from.
    whole: Whether a token that is too old drops its whole completion.

  Returns:
    A `LossTransform` that edits the advantage and requires `age`, in
    `Batch.extras`: f32[P,G,T]. Its metric `stale_masked` marks what is dropped.
  """
  _ops.check_numbers('mask_stale', least=0, most=math.inf, versions=versions)
  _ops.check_flag('mask_stale', 'whole', whole)

  def advantage(advantage, batch, versions):
    stale = (batch.extras['age'] > versions) & batch.mask
    if whole:
      stale = jnp.any(stale, axis=-1, keepdims=True) & batch.mask
    return jnp.where(stale, 0, advantage), {'stale_masked': stale}

  advantage.__qualname__ = 'mask_stale'  # for the errors of the stage
  return on_advantage(advantage, ('age',), versions=versions)
