"""Credit that looks at the entropy of the old policy (once per rollout)."""

import jax.numpy as jnp
import numpy as np

from grpo_jax.losses import _ops
from grpo_jax.losses._base import LossTransform
from grpo_jax.losses._controllers import first_entropy
from grpo_jax.losses._stages import on_advantage
from grpo_jax.losses._stages import set_advantage

LOG_2 = float(np.log(2))  # nats: the entropy of a fair coin
_LEAST = 1e-6  # nats; what is divided by


def _side(value, active, axes):
  """Each value times the number of active ones over their sum."""
  value = jnp.where(active, value, 0)
  total = jnp.sum(value, axis=axes, keepdims=True)
  number = jnp.sum(active, axis=axes, keepdims=True, dtype=value.dtype)
  return _ops.safe_divide(value * number, total)


def _shaped(reward, entropy, right, wrong, alpha, axes):
  r"""Rewards of right and of wrong entries, bent by entropy; see below."""
  bonus = _side(entropy, right, axes)
  malus = _side(1 / entropy, wrong, axes)
  return jnp.where(
    right,
    alpha * reward + (1 - alpha) * bonus,
    -(alpha + (1 - alpha) * malus),
  )


def credit_tokens_by_entropy(
  alpha=0.9, deviation='population', epsilon=0.0
) -> LossTransform:
  r"""Token rewards that grow with the entropy in right completions.

  With :math:`d_t` the completions of a group, of one side, that have a token
  `t`,

  .. math::
    \tilde r_{it} = \alpha r_i + (1 - \alpha)
      \frac{H_{it}}{\sum_k H_{kt}} d_t \ (r_i > 0), \quad
    \tilde r_{it} = -\alpha - (1 - \alpha)
      \frac{1 / H_{it}}{\sum_k 1 / H_{kt}} d_t \ (r_i \le 0)

  and the advantage is the z-score of the right side's token rewards among
  themselves, and of the wrong side's.

  Args:
    alpha: The paper's :math:`\alpha_1`; :math:`\alpha_2` is the rest.
    deviation: `'population'` or `'sample'`, over the tokens of a side.
    epsilon: Added to the deviation.

  Returns:
    A `LossTransform` that sets the advantage of each token.

  Raises:
    ValueError: An unknown `deviation`.

  References:
    Tan et al., `GTPO and GRPO-S <https://arxiv.org/abs/2508.04349>`_, 2025,
    equations 3 to 6. With rewards of 0 and 1 `alpha` drops out of the z-score.
  """
  _ops.check_deviation('credit_tokens_by_entropy', deviation)

  def advantage(batch, alpha, epsilon):
    above = _ops.per_token(batch.reward > 0)
    right, wrong = batch.mask & above, batch.mask & ~above
    entropy = jnp.maximum(batch.entropy_old, _LEAST)
    value = _shaped(
      _ops.per_token(batch.reward), entropy, right, wrong, alpha, axes=1
    )
    return sum(
      _ops.normalized(value, side, deviation, epsilon, (1, 2))
      for side in (right, wrong)
    )

  return set_advantage(
    advantage, requires=('entropy_old',), alpha=alpha, epsilon=epsilon
  )


def credit_completions_by_entropy(
  alpha=0.9, deviation='population', epsilon=0.0
) -> LossTransform:
  r"""Rewards that grow with the mean entropy of right completions.

  As `credit_tokens_by_entropy`, with the mean entropy of a completion in place
  of a token's; the advantage is the z-score over the whole group, since one
  over each side alone would erase the difference between right and wrong.

  Args:
    alpha: The paper's :math:`\alpha_1`; :math:`\alpha_2` is the rest.
    deviation: `'population'` or `'sample'`.
    epsilon: Added to the deviation.

  Returns:
    A `LossTransform` that sets the advantage.

  Raises:
    ValueError: An unknown `deviation`.

  References:
    Tan et al., `GTPO and GRPO-S <https://arxiv.org/abs/2508.04349>`_, 2025
  """
  _ops.check_deviation('credit_completions_by_entropy', deviation)

  def advantage(batch, alpha, epsilon):
    counted = jnp.any(batch.mask, axis=-1)
    right, wrong = counted & (batch.reward > 0), counted & (batch.reward <= 0)
    entropy = jnp.maximum(batch.entropy_old, _LEAST)
    mean = jnp.maximum(_ops.sequence_mean(entropy, batch), _LEAST)
    value = _shaped(batch.reward, mean, right, wrong, alpha, axes=1)
    return _ops.normalized(value, counted, deviation, epsilon, axis=1)

  return set_advantage(
    advantage, requires=('entropy_old',), alpha=alpha, epsilon=epsilon
  )


def subtract_entropy(coefficient=0.1) -> LossTransform:
  r"""Charges a completion for its mean entropy.

  .. math:: A_i \leftarrow A_i - \gamma \langle H \rangle_i

  Args:
    coefficient: `gamma`, per nat.

  Returns:
    A `LossTransform` that edits the advantage.

  References:
    Simoni et al., `GTPO <https://arxiv.org/abs/2508.03772>`_, 2025
  """

  def advantage(advantage, batch, coefficient):
    entropy = _ops.sequence_mean(batch.entropy_old, batch)
    return advantage - coefficient * _ops.per_token(entropy)

  return on_advantage(
    advantage, requires=('entropy_old',), coefficient=coefficient
  )


def silence_uncertain(entropy_limit=LOG_2) -> LossTransform:
  r"""No credit for completions of high entropy, if training began with little.

  .. math:: A_i \leftarrow 0 \text{ where } \langle H \rangle_i > limit
              \text{ and } \langle H \rangle_{first\ rollout} < \log 2

  Args:
    entropy_limit: Nats.

  Returns:
    A `LossTransform` that edits the advantage.

  References:
    Simoni et al., `GTPO <https://arxiv.org/abs/2508.03772>`_, 2025
  """

  def advantage(advantage, batch, entropy_limit, first):
    entropy = _ops.sequence_mean(batch.entropy_old, batch)
    silent = (entropy > entropy_limit) & (first < LOG_2)
    return jnp.where(_ops.per_token(silent), 0, advantage)

  return on_advantage(
    advantage,
    requires=('entropy_old',),
    entropy_limit=entropy_limit,
    first=first_entropy(),
  )


def mask_low_entropy(share=0.2) -> LossTransform:
  r"""Credits only the tokens of highest entropy; the others still count.

  .. math:: A_{it} \leftarrow A_{it}\, 1[H_{it} \ge \tau], \quad \tau =
              \text{the } \lfloor share \cdot N \rfloor \text{-th largest } H

  Args:
    share: Share of the rollout's trained tokens that keep their advantage.

  Returns:
    A `LossTransform` that edits the advantage.

  References:
    Wang et al., `Beyond the 80/20 Rule <https://arxiv.org/abs/2506.01939>`_,
    2025
  """

  def advantage(advantage, batch, share):
    entropy, kept = batch.entropy_old, batch.keep
    least = _ops.kth_largest(entropy, kept, _ops.share_of(share, kept))
    return jnp.where(entropy >= least, advantage, 0)

  return on_advantage(advantage, requires=('entropy_old',), share=share)
