"""Methods with another trust region than PPO's clip."""

from grpo_jax.losses._base import LossTransform
from grpo_jax.losses._base import chain
from grpo_jax.losses._credit import center_by_group
from grpo_jax.losses._credit import drop_uniform_groups
from grpo_jax.losses._credit import normalize_by_group
from grpo_jax.losses._gate import gate_binary_kl
from grpo_jax.losses._gate import gate_probability_change
from grpo_jax.losses._objective import capped_score_function
from grpo_jax.losses._objective import importance_weighted
from grpo_jax.losses._objective import score_function
from grpo_jax.losses._objective import sigmoid_gate
from grpo_jax.losses._penalty import pull_to_old
from grpo_jax.losses._shaping import divide_by_batch_deviation
from grpo_jax.losses._weight import mean_over_prompts
from grpo_jax.losses._weight import mean_over_sequences
from grpo_jax.losses._weight import mean_over_tokens


def importance_sampling() -> LossTransform:
  r"""The plain ratio, without a trust region.

  .. math:: J = \frac{1}{N} \sum_{i,t} s_{it} (r_i - \bar r)

  Returns:
    A `LossTransform`.
  """
  return chain(center_by_group(), mean_over_tokens(), importance_weighted())


def sapo(
  positive=1.0, negative=1.05, deviation='population', epsilon=0.0
) -> LossTransform:
  r"""Soft Adaptive Policy Optimization: a sigmoid gate in place of the clip.

  .. math::
    J = \frac{1}{B} \sum_i \frac{1}{|o_i|} \sum_t \frac{4}{\tau_i}
      \sigma\bigl(\tau_i (s_{it} - 1)\bigr) A_i

  Args:
    positive: `tau` where `A > 0`.
    negative: `tau` elsewhere; larger, so that wrong tokens let go sooner.
    deviation: `'population'` or `'sample'`, of the group's rewards.
    epsilon: Added to the deviation.

  Returns:
    A `LossTransform`.

  References:
    Gao et al., `Soft Adaptive Policy Optimization
    <https://arxiv.org/abs/2511.20347>`_, 2025
  """
  return chain(
    normalize_by_group(deviation, epsilon),
    mean_over_sequences(),
    sigmoid_gate(positive, negative),
  )


def cispo(
  low=1.0, high=4.0, deviation='population', epsilon=0.0
) -> LossTransform:
  r"""Clipped importance sampling weights: every token keeps its gradient.

  .. math::
    J = \frac{1}{N} \sum_{i,t} sg\bigl[\operatorname{clip}(s_{it}, 1 - l,
      1 + h)\bigr] A_i \log \pi(o_{it})

  Args:
    low: Distance of the lower bound from 1; 1 is none, as in the paper.
    high: Distance of the upper bound from 1. The paper names no number; 4, a
      ratio of 5, is ScaleRL's.
    deviation: `'population'` or `'sample'`, of the group's rewards.
    epsilon: Added to the deviation.

  Returns:
    A `LossTransform`. The paper divides by the tokens of each prompt's group
    inside the expectation over prompts (`mean_over_prompts` has that), released
    code and this by those of the batch. Its unified form with a mask `M` is the
    same chain with `ppo_clip` in place of the objective, but for the value.

  References:
    MiniMax, `MiniMax-M1 <https://arxiv.org/abs/2506.13585>`_, 2025
  """
  return chain(
    normalize_by_group(deviation, epsilon),
    mean_over_tokens(),
    capped_score_function(low, high),
  )


def prompt_mean(
  low=1.0, high=4.0, deviation='population', epsilon=0.0
) -> LossTransform:
  r"""ScaleRL's loss: CISPO, averaged over prompts, one deviation for all.

  .. math::
    J = \frac{1}{P} \sum_p \frac{1}{N_p} \sum_{i \in p, t}
      sg\bigl[\operatorname{clip}(s_{it}, 1 - l, 1 + h)\bigr]
      \frac{r_i - \bar r_p}{\sigma(r - \bar r)} \log \pi(o_{it})

  over prompts whose rewards differ; the deviation is that of all centered
  rewards of the rollout.

  Args:
    low: Distance of the lower bound from 1; 1 is none.
    high: Distance of the upper bound from 1.
    deviation: `'population'` or `'sample'`.
    epsilon: Added to the deviation.

  Returns:
    A `LossTransform`.

  References:
    Khatri et al., `The Art of Scaling RL Compute
    <https://arxiv.org/abs/2510.13786>`_, 2025
  """
  return chain(
    center_by_group(),
    divide_by_batch_deviation(deviation, epsilon, within_groups=True),
    drop_uniform_groups(),
    mean_over_prompts(),
    capped_score_function(low, high),
  )


def dppo_tv(low=0.2, high=0.2, cap=20.0) -> LossTransform:
  r"""Divergence PPO, gated by each token's part of the total variation.

  .. math::
    J = \frac{1}{N} \sum_{i,t} M_{it}\, sg[\min(s_{it}, c)] (r_i - \bar r)
      \log \pi(o_{it})

  with `M = 0` where the probability has risen by more than `h` while `A > 0`,
  or fallen by more than `l` while `A < 0`.

  Args:
    low: Largest fall of a token's probability.
    high: Largest rise.
    cap: Largest ratio, absolute. The paper has 5 or none, released code 20.

  Returns:
    A `LossTransform`. The paper measures from the sampler's probabilities, not
    from recomputed ones: set `learner.anchor='sampler'`.

  References:
    `Rethinking the Trust Region in LLM Reinforcement Learning
    <https://arxiv.org/abs/2602.04879>`_, 2026
  """
  return chain(
    center_by_group(),
    mean_over_tokens(),
    capped_score_function(1.0, cap - 1),
    gate_probability_change(low, high),
  )


def dppo_kl(threshold=0.05, cap=20.0) -> LossTransform:
  r"""Divergence PPO, gated by the binary KL of "this token or another".

  .. math::
    J = \frac{1}{N} \sum_{i,t} M_{it}\, sg[\min(s_{it}, c)] (r_i - \bar r)
      \log \pi(o_{it})

  with `M = 0` where that divergence exceeds the threshold and the probability
  has moved the way the advantage pushes.

  Args:
    threshold: Nats.
    cap: Largest ratio, absolute.

  Returns:
    A `LossTransform`. See `dppo_tv` on the anchor.

  References:
    `Rethinking the Trust Region in LLM Reinforcement Learning
    <https://arxiv.org/abs/2602.04879>`_, 2026
  """
  return chain(
    center_by_group(),
    mean_over_tokens(),
    capped_score_function(1.0, cap - 1),
    gate_binary_kl(threshold),
  )


def dro(coefficient=0.05) -> LossTransform:
  r"""Direct Reward Optimisation: a quadratic pull in place of a ratio.

  .. math::
    J = \frac{1}{N} \sum_{i,t} (r_i - \bar r) \log \pi(o_{it})
      - \frac{\beta}{2} (\log s_{it})^2

  Args:
    coefficient: `beta`.

  Returns:
    A `LossTransform`. This is the token-level form that released code has; the
    paper regresses the completion's log-ratio on its reward, with a learned
    value.

  References:
    Richemond et al., `Offline Regularised Reinforcement Learning
    <https://arxiv.org/abs/2405.19107>`_, 2024
  """
  return chain(
    center_by_group(),
    mean_over_tokens(),
    score_function(),
    pull_to_old(coefficient),
  )
