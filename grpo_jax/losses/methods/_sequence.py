"""Methods with one ratio for the whole completion."""

from grpo_jax.losses._base import LossTransform
from grpo_jax.losses._base import chain
from grpo_jax.losses._credit import center_by_group
from grpo_jax.losses._credit import normalize_by_group
from grpo_jax.losses._objective import gamma_weighted_score
from grpo_jax.losses._objective import importance_weighted
from grpo_jax.losses._objective import ppo_clip
from grpo_jax.losses._ratio import clip_log_ratio
from grpo_jax.losses._ratio import pool_log_ratio
from grpo_jax.losses._ratio import sum_log_ratio
from grpo_jax.losses._weight import mean_over_sequence_sums
from grpo_jax.losses._weight import mean_over_sequences
from grpo_jax.losses._weight import mean_over_tokens


def gspo(
  low=3e-4, high=4e-4, deviation='population', epsilon=0.0
) -> LossTransform:
  r"""Group Sequence Policy Optimization: pools the ratio, then clips it.

  .. math::
    J = \frac{1}{B} \sum_i \min\bigl(s_i A_i, \operatorname{clip}(s_i, 1 - l,
      1 + h) A_i\bigr), \quad
    s_i = \exp\Bigl(\frac{1}{|o_i|} \sum_t \log s_{it}\Bigr)

  Args:
    low, high, deviation, epsilon: See `help(losses.methods)`. The bounds are
      near 1, because a mean moves less than the ratio of a single token.

  References:
    Zheng et al., `Group Sequence Policy Optimization
    <https://arxiv.org/abs/2507.18071>`_, 2025
  """
  return chain(
    normalize_by_group(deviation, epsilon),
    # 1 / (B L_i) for each of L_i equal terms: one term per completion.
    mean_over_sequences(),
    pool_log_ratio(),
    ppo_clip(low, high),
  )


def gspo_token(
  low=3e-4, high=4e-4, deviation='population', epsilon=0.0
) -> LossTransform:
  r"""GSPO-token: the ratio of the completion, the slope of each token.

  .. math::
    J = \frac{1}{B} \sum_i \frac{1}{|o_i|} \sum_t \min\bigl(s_{it} A_{it},
      \operatorname{clip}(s_{it}, 1 - l, 1 + h) A_{it}\bigr), \quad
    s_{it} = sg[s_i] \frac{\pi_{it}}{sg[\pi_{it}]}

  With one advantage per completion, as here, value and gradient are those of
  `gspo`. They differ once an `on_advantage` makes the advantage depend on the
  token.

  Args:
    low, high, deviation, epsilon: See `help(losses.methods)`.

  References:
    Zheng et al., `Group Sequence Policy Optimization
    <https://arxiv.org/abs/2507.18071>`_, 2025
  """
  return chain(
    normalize_by_group(deviation, epsilon),
    mean_over_sequences(),
    pool_log_ratio(gradient='token'),
    ppo_clip(low, high),
  )


def luspo(
  low=2e-3, high=2.5e-3, deviation='population', epsilon=0.0
) -> LossTransform:
  r"""Length-Unbiased Sequence Policy Optimization: GSPO times the length.

  .. math::
    J = \frac{1}{B} \sum_i |o_i| \min\bigl(s_i A_i, \operatorname{clip}(s_i,
      1 - l, 1 + h) A_i\bigr)

  The ratio :math:`s_i` is that of `gspo`.

  Args:
    low, high, deviation, epsilon: See `help(losses.methods)`.

  References:
    Liu et al., `LUSPO <https://arxiv.org/abs/2602.05261>`_, 2026
  """
  return chain(
    normalize_by_group(deviation, epsilon),
    # 1 / B for each of |o_i| equal terms: the factor |o_i| of the formula.
    mean_over_sequence_sums(),
    pool_log_ratio(),
    ppo_clip(low, high),
  )


def gcpo(
  low=0.2, high=0.2, deviation='population', epsilon=0.0
) -> LossTransform:
  r"""The loss of Group Contrastive Policy Optimization: the ratio is a product.

  .. math::
    J = \frac{1}{B} \sum_i \min\bigl(S_i A_i, \operatorname{clip}(S_i, 1 - l,
      1 + h) A_i\bigr), \quad S_i = \prod_t s_{it}

  The other half of the method puts the reference answer into a group that has
  no right one, which is no part of a loss.

  Args:
    low, high, deviation, epsilon: See `help(losses.methods)`. We do not know
      the paper's bounds.

  References:
    `GCPO <https://arxiv.org/abs/2510.07790>`_, 2025
  """
  return chain(
    normalize_by_group(deviation, epsilon),
    mean_over_sequences(),
    sum_log_ratio(),
    ppo_clip(low, high),
  )


def vespo(positive=(2.0, 3.0), negative=(3.0, 2.0)) -> LossTransform:
  r"""VESPO: a smooth weight of the completion's ratio, from a variational view.

  .. math::
    J = \frac{1}{N} \sum_{i,t} sg\bigl[S_i^k e^{\lambda (1 - S_i)}\bigr]
      (r_i - \bar r) \log \pi(o_{it}), \quad S_i = \prod_t s_{it}

  The ratio saturates at :math:`e^{20}`; released code clamps it too.

  Args:
    positive: :math:`(k, \lambda)` where :math:`A \ge 0`: two numbers, each of
      which may be a schedule or a `Controller`.
    negative: :math:`(k, \lambda)` where :math:`A < 0`, likewise.

  References:
    Shen et al., `VESPO <https://arxiv.org/abs/2602.10693>`_, 2026
  """
  return chain(
    center_by_group(),
    mean_over_tokens(),
    sum_log_ratio(),
    gamma_weighted_score(positive, negative),
  )


def gmpo(
  low=0.4, high=0.4, deviation='population', epsilon=0.0
) -> LossTransform:
  r"""Geometric-Mean Policy Optimization: clips each ratio, then pools them.

  .. math::
    J = \frac{1}{B} \sum_i A_i \exp\Bigl(\frac{1}{|o_i|} \sum_t
      \operatorname{clip}_{A_i}(\log s_{it}, -l, h)\Bigr)

  The clip acts on the side to which the advantage pushes, as in PPO.

  Args:
    low: :math:`l`, distance of the lower bound of a log-ratio from 0, in nats.
    high: :math:`h`, distance of its upper bound, likewise. The paper has 0.4
      for both: ratios from :math:`e^{-0.4}` to :math:`e^{0.4}`.
    deviation, epsilon: See `help(losses.methods)`.

  References:
    Zhao et al., `Geometric-Mean Policy Optimization
    <https://arxiv.org/abs/2507.20673>`_, 2025
  """
  return chain(
    normalize_by_group(deviation, epsilon),
    mean_over_sequences(),
    # In this order: after the pooling, the mean would be clipped and not the
    # tokens.
    clip_log_ratio(low, high),
    pool_log_ratio(),
    importance_weighted(),
  )
