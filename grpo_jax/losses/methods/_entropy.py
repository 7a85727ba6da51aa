"""Methods that act on what makes the entropy collapse."""

from grpo_jax.losses._base import LossTransform
from grpo_jax.losses._base import chain
from grpo_jax.losses._credit import normalize_by_group
from grpo_jax.losses._entropy import credit_completions_by_entropy
from grpo_jax.losses._entropy import credit_tokens_by_entropy
from grpo_jax.losses._entropy import mask_low_entropy
from grpo_jax.losses._gate import detach_covariance
from grpo_jax.losses._objective import importance_weighted
from grpo_jax.losses._objective import ppo_clip
from grpo_jax.losses._penalty import penalize_covariance
from grpo_jax.losses._ratio import average_ratio
from grpo_jax.losses._weight import mean_over_sequences
from grpo_jax.losses._weight import mean_over_tokens


def clip_cov(
  share=2e-4,
  low_covariance=1.0,
  high_covariance=5.0,
  low=0.2,
  high=0.2,
  deviation='population',
  epsilon=0.0,
) -> LossTransform:
  r"""Clip-Cov: no gradient for some tokens that drive the entropy down.

  .. math::
    J = \frac{1}{N} \sum_{i,t} \min\bigl(s_{it} A_i, \operatorname{clip}(s_{it},
      1 - l, 1 + h) A_i\bigr), \text{ detached where chosen}

  Args:
    share: Share of the batch's kept tokens that is chosen.
    low_covariance: Least covariance of these.
    high_covariance: Largest covariance of these.
    low: Distance of the lower clip bound from 1.
    high: Distance of the upper clip bound from 1.
    deviation: `'population'` or `'sample'`, of the group's rewards.
    epsilon: Added to the deviation.

  Returns:
    A `LossTransform` of `scope='batch'`.

  References:
    Cui et al., `The Entropy Mechanism of Reinforcement Learning
    <https://arxiv.org/abs/2505.22617>`_, 2025
  """
  return chain(
    normalize_by_group(deviation, epsilon),
    mean_over_tokens(),
    ppo_clip(low, high),
    detach_covariance(share, low_covariance, high_covariance),
  )


def kl_cov(
  share=2e-4, coefficient=1.0, deviation='population', epsilon=0.0
) -> LossTransform:
  r"""KL-Cov: a penalty on the tokens whose covariance drives entropy down.

  .. math::
    J = \frac{1}{N} \sum_{i,t} s_{it} A_i - c\, |\log s_{it}|\,
      1[it \in \operatorname{top}_k \operatorname{cov}]

  Args:
    share: Share of the batch's kept tokens that is penalised.
    coefficient: Factor `c`, per nat.
    deviation: `'population'` or `'sample'`, of the group's rewards.
    epsilon: Added to the deviation.

  Returns:
    A `LossTransform` of `scope='batch'`.

  References:
    Cui et al., `The Entropy Mechanism of Reinforcement Learning
    <https://arxiv.org/abs/2505.22617>`_, 2025
  """
  return chain(
    normalize_by_group(deviation, epsilon),
    mean_over_tokens(),
    importance_weighted(),
    penalize_covariance(share, coefficient),
  )


def forking_tokens(
  share=0.2, low=0.2, high=0.28, deviation='population', epsilon=0.0
) -> LossTransform:
  r"""The 80/20 rule: only tokens of high entropy are trained.

  .. math::
    J = \frac{1}{N} \sum_{i,t} 1[H_{it} \ge \tau] \min\bigl(s_{it} A_i,
      \operatorname{clip}(s_{it}, 1 - l, 1 + h) A_i\bigr)

  Args:
    share: Share of the rollout's tokens that is trained; `N` counts all.
    low: Distance of the lower clip bound from 1.
    high: Distance of the upper clip bound from 1.
    deviation: `'population'` or `'sample'`, of the group's rewards.
    epsilon: Added to the deviation.

  Returns:
    A `LossTransform`.

  References:
    Wang et al., `Beyond the 80/20 Rule <https://arxiv.org/abs/2506.01939>`_,
    2025
  """
  return chain(
    normalize_by_group(deviation, epsilon),
    mask_low_entropy(share),
    mean_over_tokens(),
    ppo_clip(low, high),
  )


def gtpo_entropy(
  alpha=0.9, low=0.2, high=0.28, deviation='population', epsilon=0.0
) -> LossTransform:
  r"""GTPO of Tan et al.: token rewards bent by entropy.

  .. math::
    J = \frac{1}{N} \sum_{i,t} \min\bigl(s_{it} A_{it},
      \operatorname{clip}(s_{it}, 1 - l, 1 + h) A_{it}\bigr)

  with the advantage of `credit_tokens_by_entropy`.

  Args:
    alpha: The reward's own part; the rest goes by entropy.
    low: Distance of the lower clip bound from 1.
    high: Distance of the upper clip bound from 1.
    deviation: `'population'` or `'sample'`.
    epsilon: Added to the deviation.

  Returns:
    A `LossTransform`.

  References:
    Tan et al., `GTPO and GRPO-S <https://arxiv.org/abs/2508.04349>`_, 2025.
    (Another GTPO is `gtpo_conflict`.)
  """
  return chain(
    credit_tokens_by_entropy(alpha, deviation, epsilon),
    mean_over_tokens(),
    ppo_clip(low, high),
  )


def grpo_s(
  alpha=0.9, low=0.2, high=0.28, deviation='population', epsilon=0.0
) -> LossTransform:
  r"""GRPO-S of Tan et al.: the same for completions, with their mean ratio.

  .. math::
    J = \frac{1}{B} \sum_i \min\bigl(\bar s_i A_i, \operatorname{clip}(
      \bar s_i, 1 - l, 1 + h) A_i\bigr), \quad
    \bar s_i = \frac{1}{|o_i|} \sum_t s_{it}

  with the advantage of `credit_completions_by_entropy`.

  Args:
    alpha: The reward's own part; the rest goes by entropy.
    low: Distance of the lower clip bound from 1.
    high: Distance of the upper clip bound from 1.
    deviation: `'population'` or `'sample'`.
    epsilon: Added to the deviation.

  Returns:
    A `LossTransform`.

  References:
    Tan et al., `GTPO and GRPO-S <https://arxiv.org/abs/2508.04349>`_, 2025
  """
  return chain(
    credit_completions_by_entropy(alpha, deviation, epsilon),
    mean_over_sequences(),
    average_ratio(),
    ppo_clip(low, high),
  )
