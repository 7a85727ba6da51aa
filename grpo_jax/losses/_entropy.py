"""Credit that looks at the entropy of the old policy (once per rollout)."""

import math

import jax.numpy as jnp
import numpy as np

from grpo_jax.losses import _ops
from grpo_jax.losses._base import LossTransform
from grpo_jax.losses._controllers import first_entropy
from grpo_jax.losses._stages import on_advantage
from grpo_jax.losses._stages import set_advantage

LOG_2 = float(np.log(2))  # nats: the entropy of a fair coin
_LEAST = 1e-6  # nats; smaller entropies count as this, as 1 / H is taken


def _side(value, active, axes):
  """Each active value over the mean of the active ones; 0 elsewhere."""
  value = jnp.where(active, value, 0)
  total = jnp.sum(value, axis=axes, keepdims=True)
  number = jnp.sum(active, axis=axes, keepdims=True, dtype=value.dtype)
  return _ops.safe_divide(value * number, total)


def _shaped(reward, entropy, right, wrong, alpha, axes):
  """Rewards of right and of wrong entries, shaped by their entropy.

  An entry is a token or a completion.

  Args:
    reward: f32, of the entries.
    entropy: f32, of the entries, positive, nats; shaped like `right`.
    right: bool, entries of right completions.
    wrong: bool, entries of wrong ones; what is neither does not count.
    alpha: Share of the reward itself.
    axes: The axes of the means in the bonus and in the malus.

  Returns:
    For right entries, `alpha * reward` plus a bonus that grows with the
    entropy. For all others, `-alpha` minus a malus that shrinks as the entropy
    grows.
  """
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
  r"""Sets advantages of tokens that grow with the entropy in right completions.

  .. math::
    \tilde r_{it} = \alpha r_i + (1 - \alpha)
      \frac{H_{it}}{\sum_k H_{kt}} d_t \ (r_i > 0), \quad
    \tilde r_{it} = -\alpha - (1 - \alpha)
      \frac{1 / H_{it}}{\sum_k 1 / H_{kt}} d_t \ (r_i \le 0)

  The sums run over those completions of the group that are on the same side
  (right or wrong) and have a token `t`, and :math:`d_t` is their number. The
  advantage is the z-score of these token rewards, over all tokens of the group
  that are on the same side.

  Args:
    alpha: The paper's :math:`\alpha_1`, in [0, 1]; its :math:`\alpha_2` is
      :math:`1 - \alpha_1`.
    deviation: `'population'` or `'sample'`, over the tokens of a side.
    epsilon: Added to the deviation.

  Returns:
    A `LossTransform` that sets the advantage of each token and requires
    `entropy_old`.

  Raises:
    ValueError: An unknown `deviation`.

  References:
    Tan et al., `GTPO and GRPO-S <https://arxiv.org/abs/2508.04349>`_, 2025,
    equations 3 to 6. With rewards of 0 and 1 `alpha` drops out of the z-score.
  """
  _ops.check_numbers('credit_tokens_by_entropy', least=0, most=1, alpha=alpha)
  _ops.check_spread('credit_tokens_by_entropy', deviation, epsilon)

  def advantage(batch, alpha, epsilon):
    above = _ops.per_token(batch.reward > 0)
    right, wrong = batch.mask & above, batch.mask & ~above
    # A token that was certain has entropy 0, whose inverse is infinite.
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
  r"""Sets advantages that grow with the mean entropy of right completions.

  The formula is that of `credit_tokens_by_entropy`, with the mean entropy of a
  completion in place of a token's. The z-score runs over the whole group: one
  over each side alone would erase the difference between right and wrong.

  Args:
    alpha: The paper's :math:`\alpha_1`, in [0, 1]; its :math:`\alpha_2` is
      :math:`1 - \alpha_1`.
    deviation: `'population'` or `'sample'`.
    epsilon: Added to the deviation.

  Returns:
    A `LossTransform` that sets the advantage and requires `entropy_old`.

  Raises:
    ValueError: An unknown `deviation`.

  References:
    Tan et al., `GTPO and GRPO-S <https://arxiv.org/abs/2508.04349>`_, 2025
  """
  _ops.check_numbers(
    'credit_completions_by_entropy', least=0, most=1, alpha=alpha
  )
  _ops.check_spread('credit_completions_by_entropy', deviation, epsilon)

  def advantage(batch, alpha, epsilon):
    counted = jnp.any(batch.mask, axis=-1)
    right, wrong = counted & (batch.reward > 0), counted & (batch.reward <= 0)
    entropy = jnp.maximum(batch.entropy_old, _LEAST)
    # Bounded once more, because the mean of an empty completion is 0.
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
    coefficient: :math:`\gamma`, per nat.

  Returns:
    A `LossTransform` that edits the advantage and requires `entropy_old`.

  References:
    Simoni et al., `GTPO <https://arxiv.org/abs/2508.03772>`_, 2025
  """
  _ops.check_numbers('subtract_entropy', least=0, coefficient=coefficient)

  def advantage(advantage, batch, coefficient):
    entropy = _ops.sequence_mean(batch.entropy_old, batch)
    return advantage - coefficient * _ops.per_token(entropy)

  return on_advantage(
    advantage, requires=('entropy_old',), coefficient=coefficient
  )


def silence_uncertain(entropy_limit=LOG_2) -> LossTransform:
  r"""Sets advantages of uncertain completions to 0, if training began certain.

  .. math:: A_i \leftarrow 0 \text{ where } \langle H \rangle_i > limit
              \text{ and } \langle H \rangle_{first\ rollout} < \log 2

  :math:`\langle H \rangle` is a mean entropy: of the completion, and of the
  trained tokens of the first rollout.

  Args:
    entropy_limit: The limit, in nats.

  Returns:
    A `LossTransform` that edits the advantage and requires `entropy_old`.

  References:
    Simoni et al., `GTPO <https://arxiv.org/abs/2508.03772>`_, 2025
  """
  _ops.check_numbers(
    'silence_uncertain', least=0, most=math.inf, entropy_limit=entropy_limit
  )

  def advantage(advantage, batch, entropy_limit, first):
    entropy = _ops.sequence_mean(batch.entropy_old, batch)
    silent = (entropy > entropy_limit) & (first < LOG_2)
    return jnp.where(_ops.per_token(silent), 0, advantage)

  # A controller, because only its state remembers the first rollout.
  return on_advantage(
    advantage,
    requires=('entropy_old',),
    entropy_limit=entropy_limit,
    first=first_entropy(),
  )


def mask_low_entropy(share=0.2) -> LossTransform:
  r"""Sets the advantage to 0 but for the tokens of highest entropy.

  .. math:: A_{it} \leftarrow A_{it}\, 1[H_{it} \ge \tau], \quad \tau =
              \text{the } \lfloor share \cdot N \rfloor \text{-th largest } H

  Denominators still count all tokens. At least one of them keeps its advantage.

  Args:
    share: Share of the rollout's `N` trained tokens that keep their advantage,
      in [0, 1].

  Returns:
    A `LossTransform` that edits the advantage and requires `entropy_old`.

  References:
    Wang et al., `Beyond the 80/20 Rule <https://arxiv.org/abs/2506.01939>`_,
    2025
  """
  _ops.check_numbers('mask_low_entropy', least=0, most=1, share=share)

  def advantage(advantage, batch, share):
    entropy, kept = batch.entropy_old, batch.keep
    least = _ops.kth_largest(entropy, kept, _ops.share_of(share, kept))
    # Tokens that equal the threshold all keep their advantage.
    return jnp.where(entropy >= least, advantage, 0)

  return on_advantage(advantage, requires=('entropy_old',), share=share)
