"""GRPO and the methods that keep its token-level ratio and clip."""

from grpo_jax.losses._base import LossTransform
from grpo_jax.losses._base import chain
from grpo_jax.losses._credit import center_by_group
from grpo_jax.losses._credit import drop_uniform_groups
from grpo_jax.losses._credit import normalize_by_group
from grpo_jax.losses._credit import shape_overlong_reward
from grpo_jax.losses._gate import mask_off_policy_negatives
from grpo_jax.losses._objective import ppo_clip
from grpo_jax.losses._penalty import maybe_kl
from grpo_jax.losses._shaping import divide_by_batch_deviation
from grpo_jax.losses._shaping import keep_largest_advantages
from grpo_jax.losses._weight import gate_small_advantages
from grpo_jax.losses._weight import mean_over_sequences
from grpo_jax.losses._weight import mean_over_tokens
from grpo_jax.losses._weight import sum_over_tokens


def grpo(
  low=0.2, high=0.2, kl_coefficient=0.04, deviation='population', epsilon=0.0
) -> LossTransform:
  r"""Group Relative Policy Optimization.

  .. math::
    J = \frac{1}{B} \sum_i \frac{1}{|o_i|} \sum_t \min\bigl(s_{it} A_i,
      \operatorname{clip}(s_{it}, 1 - l, 1 + h) A_i\bigr) - \beta\, k_3

  Args:
    low: Distance of the lower clip bound from 1; the paper names no number.
    high: Distance of the upper clip bound from 1.
    kl_coefficient: `beta`, per nat. 0 leaves the term out, and with it the
      reference model. The paper has 0.04, DeepSeek-R1 0.001.
    deviation: `'population'` or `'sample'`; the paper says "std" only.
    epsilon: Added to the deviation; released code has 1e-4 or 1e-6.

  Returns:
    A `LossTransform`.

  References:
    Shao et al., `DeepSeekMath <https://arxiv.org/abs/2402.03300>`_, 2024
  """
  return chain(
    normalize_by_group(deviation, epsilon),
    mean_over_sequences(),
    ppo_clip(low, high),
    *maybe_kl(kl_coefficient),
  )


def deepseek_v3_2(
  threshold=0.5, low=0.2, high=0.2, kl_coefficient=0.001, policy='old'
) -> LossTransform:
  r"""GRPO of DeepSeek-V3.2: unbiased KL, off-policy wrong answers masked.

  .. math::
    J = \frac{1}{B} \sum_i \frac{1}{|o_i|} \sum_t M_i \min\bigl(s_{it} A_i,
      \operatorname{clip}(s_{it}, 1 - l, 1 + h) A_i\bigr)
      - \beta\, s_{it} k_3, \quad A_i = r_i - \bar r

  `M = 0` where `A < 0` and the mean of `log(pi_old / pi)` over the completion
  exceeds the threshold.

  Args:
    threshold: Nats per token; the paper names no number.
    low: Distance of the lower clip bound from 1.
    high: Distance of the upper clip bound from 1.
    kl_coefficient: `beta`, per nat; the paper names no number.
    policy: What `M` measures from: `'old'`, or `'sampler'`, which the paper
      means if the engine's log-probabilities are not the learner's.

  Returns:
    A `LossTransform`. Keeping the engine's routing of experts and its sampling
    mask, the paper's other two, is not the loss's work.

  References:
    DeepSeek-AI, `DeepSeek-V3.2 <https://arxiv.org/abs/2512.02556>`_, 2025
  """
  return chain(
    center_by_group(),
    mean_over_sequences(),
    ppo_clip(low, high),
    mask_off_policy_negatives(threshold, policy),
    *maybe_kl(kl_coefficient, 'k3_weighted'),
  )


def cppo(
  threshold=1.0,
  pruning_rate=None,
  low=0.2,
  high=0.2,
  kl_coefficient=0.04,
  deviation='population',
  epsilon=0.0,
) -> LossTransform:
  r"""Completion Pruning Policy Optimization.

  .. math::
    J = \frac{1}{B} \sum_{i: |A_i| \ge \gamma} \frac{1}{|o_i|} \sum_t
      \min\bigl(s_{it} A_i, \operatorname{clip}(s_{it}, 1 - l, 1 + h) A_i\bigr)
      - \beta\, k_3

  Args:
    threshold: `gamma`, of the z-score; the paper's equation 7. It names no
      number.
    pruning_rate: If given, in place of the threshold: the share of each group
      that is pruned, least advantage first; `B` then counts the rest
      (equations 8 to 10).
    low: Distance of the lower clip bound from 1.
    high: Distance of the upper clip bound from 1.
    kl_coefficient: `beta`, per nat; 0 leaves the term out.
    deviation: `'population'` or `'sample'`, of the group's rewards.
    epsilon: Added to the deviation.

  Returns:
    A `LossTransform`. Filling the freed memory with more prompts is the
    rollout's work.

  References:
    Lin et al., `CPPO <https://arxiv.org/abs/2503.22342>`_, 2025. Its released
    code prunes over the local batch, not by group.
  """
  surrogate = ppo_clip(low, high), *maybe_kl(kl_coefficient)
  if pruning_rate is None:
    return chain(
      normalize_by_group(deviation, epsilon),
      mean_over_sequences(),
      gate_small_advantages(threshold),
      *surrogate,
    )
  return chain(
    normalize_by_group(deviation, epsilon),
    keep_largest_advantages(1 - pruning_rate),
    mean_over_sequences(),
    *surrogate,
  )


def dual_clip_grpo(
  low=0.2, high=0.2, cap=3.0, deviation='population', epsilon=0.0
) -> LossTransform:
  r"""GRPO with PPO's dual clip, without a KL term.

  .. math::
    J = \frac{1}{B} \sum_i \frac{1}{|o_i|} \sum_t f_{it}, \quad
    f = \max\bigl(\min(s A, \operatorname{clip}(s, 1 - l, 1 + h) A), c A\bigr)
      \text{ if } A < 0

  Args:
    low: Distance of the lower clip bound from 1.
    high: Distance of the upper clip bound from 1.
    cap: `c`, an absolute ratio.
    deviation: `'population'` or `'sample'`, of the group's rewards.
    epsilon: Added to the deviation.

  Returns:
    A `LossTransform`.

  References:
    Ye et al., `Mastering Complex Control in MOBA Games
    <https://arxiv.org/abs/1912.09729>`_, 2020
  """
  return chain(
    normalize_by_group(deviation, epsilon),
    mean_over_sequences(),
    ppo_clip(low, high, cap),
  )


def two_sided_grpo(
  low=0.2, high=0.2, cap=4.0, deviation='population', epsilon=0.0
) -> LossTransform:
  r"""GRPO with INTELLECT-2's two-sided clip.

  .. math::
    J = \frac{1}{N} \sum_{i,t} \min\bigl(\min(s_{it}, \delta) A_i,
      \operatorname{clip}(s_{it}, 1 - l, 1 + h) A_i\bigr)

  Args:
    low: Distance of the lower clip bound from 1.
    high: Distance of the upper clip bound from 1.
    cap: `delta`, an absolute ratio. It acts where `A < 0`, as the dual clip.
    deviation: `'population'` or `'sample'`, of the group's rewards.
    epsilon: Added to the deviation.

  Returns:
    A `LossTransform`. The paper's recipe adds `add_kl(0.001)` and a small
    `add_entropy_bonus`.

  References:
    Prime Intellect, `INTELLECT-2 <https://arxiv.org/abs/2505.07291>`_, 2025
  """
  return chain(
    normalize_by_group(deviation, epsilon),
    mean_over_tokens(),
    ppo_clip(low, high, cap),
  )


def lite_ppo(
  low=0.2, high=0.2, deviation='population', epsilon=0.0
) -> LossTransform:
  r"""Lite PPO: the group's mean, the batch's deviation, every token alike.

  .. math::
    J = \frac{1}{N} \sum_{i,t} \min\bigl(s_{it} A_i,
      \operatorname{clip}(s_{it}, 1 - l, 1 + h) A_i\bigr), \quad
    A_i = \frac{r_i - \bar r_{group}}{\sigma_{batch}(r)}

  Args:
    low: Distance of the lower clip bound from 1.
    high: Distance of the upper clip bound from 1.
    deviation: `'population'` or `'sample'`.
    epsilon: Added to the deviation.

  Returns:
    A `LossTransform`.

  References:
    Liu et al., `Tricks or Traps? <https://arxiv.org/abs/2508.08221>`_, 2025
  """
  return chain(
    center_by_group(),
    divide_by_batch_deviation(deviation, epsilon),
    mean_over_tokens(),
    ppo_clip(low, high),
  )


def dr_grpo(max_tokens=3000, low=0.2, high=0.2) -> LossTransform:
  r"""GRPO done right: no division by the deviation or by the length.

  .. math::
    J = \frac{1}{B L_{max}} \sum_{i,t} \min\bigl(s_{it} A_i,
      \operatorname{clip}(s_{it}, 1 - l, 1 + h) A_i\bigr), \quad
    A_i = r_i - \bar r

  Args:
    max_tokens: `L_max`, a constant: the completion budget. It sets the scale of
      the loss and nothing else. 3000 is the released code's.
    low: Distance of the lower clip bound from 1.
    high: Distance of the upper clip bound from 1.

  Returns:
    A `LossTransform`.

  References:
    Liu et al., `Understanding R1-Zero-Like Training
    <https://arxiv.org/abs/2503.20783>`_, 2025
  """
  return chain(
    center_by_group(), sum_over_tokens(max_tokens), ppo_clip(low, high)
  )


def dapo(
  low=0.2,
  high=0.28,
  soft_tokens=4096,
  max_tokens=20480,
  deviation='population',
  epsilon=0.0,
) -> LossTransform:
  r"""Decoupled clip and dynamic sampling policy optimization.

  .. math::
    J = \frac{1}{N} \sum_{i,t} \min\bigl(s_{it} A_i,
      \operatorname{clip}(s_{it}, 1 - l, 1 + h) A_i\bigr)

  over groups whose rewards differ before length is penalised. Refilling the
  batch with such groups is the rollout's work. The paper divides by the tokens
  of each prompt's group inside the expectation over prompts
  (`mean_over_prompts` has that); its code, and this, by those of the batch.

  Args:
    low: Distance of the lower clip bound from 1.
    high: Distance of the upper clip bound from 1.
    soft_tokens: Width of the length penalty's ramp, in tokens.
    max_tokens: Length at which the length penalty reaches 1, in tokens.
    deviation: `'population'` or `'sample'`, of the group's rewards.
    epsilon: Added to the deviation.

  Returns:
    A `LossTransform`.

  References:
    Yu et al., `DAPO <https://arxiv.org/abs/2503.14476>`_, 2025
  """
  return chain(
    drop_uniform_groups(),
    shape_overlong_reward(soft_tokens, max_tokens),
    normalize_by_group(deviation, epsilon),
    mean_over_tokens(),
    ppo_clip(low, high),
  )
