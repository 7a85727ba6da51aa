"""Methods against the collapse of the policy's entropy."""

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

  The chosen tokens are drawn at random among those whose covariance lies
  between two bounds; `detach_covariance` has its formula. They couple the whole
  batch, so the chain has `scope='batch'`.

  Args:
    share: Share of the batch's kept tokens that is chosen, in [0, 1].
    low_covariance: Covariances of chosen tokens are larger than this, in nats
      times the unit of the advantage.
    high_covariance: Covariances of chosen tokens are smaller than this.
    low, high, deviation, epsilon: See `help(losses.methods)`.

  References:
    Cui et al., `The Entropy Mechanism of Reinforcement Learning
    <https://arxiv.org/abs/2505.22617>`_, 2025
  """
  return chain(
    normalize_by_group(deviation, epsilon),
    mean_over_tokens(),
    ppo_clip(low, high),
    # After the clip, because it edits the objective that the clip sets.
    detach_covariance(share, low_covariance, high_covariance),
  )


def kl_cov(
  share=2e-4, coefficient=1.0, deviation='population', epsilon=0.0
) -> LossTransform:
  r"""KL-Cov: a penalty on the tokens whose covariance drives the entropy down.

  .. math::
    J = \frac{1}{N} \sum_{i,t} s_{it} A_i - c\, |\log s_{it}|\,
      1[it \in \operatorname{top}_k \operatorname{cov}]

  `penalize_covariance` has the covariance and :math:`k`. The ranks couple the
  whole batch, so the chain has `scope='batch'`.

  Args:
    share: Share of the batch's kept tokens that is penalised, in [0, 1].
    coefficient: :math:`c`, per nat.
    deviation, epsilon: See `help(losses.methods)`.

  References:
    Cui et al., `The Entropy Mechanism of Reinforcement Learning
    <https://arxiv.org/abs/2505.22617>`_, 2025
  """
  return chain(
    normalize_by_group(deviation, epsilon),
    mean_over_tokens(),
    # Without a clip: only the penalty holds the policy back.
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

  :math:`H_{it}` is the entropy of the old policy, and :math:`\tau` the value
  that the given share of the rollout's tokens reaches. `N` counts all kept
  tokens.

  Args:
    share: Share of the tokens that is trained, in [0, 1].
    low, high, deviation, epsilon: See `help(losses.methods)`.

  References:
    Wang et al., `Beyond the 80/20 Rule <https://arxiv.org/abs/2506.01939>`_,
    2025
  """
  return chain(
    normalize_by_group(deviation, epsilon),
    # Sets advantages to 0 and drops no token, so `N` counts all of them.
    mask_low_entropy(share),
    mean_over_tokens(),
    ppo_clip(low, high),
  )


def gtpo_entropy(
  alpha=0.9, low=0.2, high=0.28, deviation='population', epsilon=0.0
) -> LossTransform:
  r"""GTPO of Tan et al.: token rewards shaped by entropy.

  .. math::
    J = \frac{1}{N} \sum_{i,t} \min\bigl(s_{it} A_{it},
      \operatorname{clip}(s_{it}, 1 - l, 1 + h) A_{it}\bigr)

  The advantage is that of `credit_tokens_by_entropy`. (Another method called
  GTPO is `gtpo_conflict`.)

  Args:
    alpha: Share of the reward itself in a token's reward, in [0, 1]; the rest
      is distributed by entropy.
    low, high: See `help(losses.methods)`.
    deviation, epsilon: Likewise, over the tokens of the right or of the wrong
      completions of a group.

  References:
    Tan et al., `GTPO and GRPO-S <https://arxiv.org/abs/2508.04349>`_, 2025
  """
  return chain(
    credit_tokens_by_entropy(alpha, deviation, epsilon),
    mean_over_tokens(),
    ppo_clip(low, high),
  )


def grpo_s(
  alpha=0.9, low=0.2, high=0.28, deviation='population', epsilon=0.0
) -> LossTransform:
  r"""GRPO-S of Tan et al.: completion rewards shaped by entropy, mean ratios.

  .. math::
    J = \frac{1}{B} \sum_i \min\bigl(\bar s_i A_i, \operatorname{clip}(
      \bar s_i, 1 - l, 1 + h) A_i\bigr), \quad
    \bar s_i = \frac{1}{|o_i|} \sum_t s_{it}

  The advantage is that of `credit_completions_by_entropy`.

  Args:
    alpha: Share of the reward itself in a completion's reward, in [0, 1]; the
      rest is distributed by entropy.
    low, high, deviation, epsilon: See `help(losses.methods)`.

  References:
    Tan et al., `GTPO and GRPO-S <https://arxiv.org/abs/2508.04349>`_, 2025
  """
  return chain(
    credit_completions_by_entropy(alpha, deviation, epsilon),
    # 1 / (B L_i) for each of L_i equal terms: one term per completion.
    mean_over_sequences(),
    average_ratio(),
    ppo_clip(low, high),
  )
