"""Methods with another trust region than PPO's clip."""

import math

from grpo_jax.losses import _ops
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
  """
  return chain(center_by_group(), mean_over_tokens(), importance_weighted())


def sapo(
  positive=1.0, negative=1.05, deviation='population', epsilon=0.0
) -> LossTransform:
  r"""Soft Adaptive Policy Optimization: a sigmoid gate in place of the clip.

  .. math::
    J = \frac{1}{B} \sum_i \frac{1}{|o_i|} \sum_t \frac{4}{\tau_i}
      \sigma\bigl(\tau_i (s_{it} - 1)\bigr) A_i

  Here :math:`\sigma` is the sigmoid function.

  Args:
    positive: :math:`\tau` where :math:`A > 0`.
    negative: :math:`\tau` elsewhere. It is larger, so that the gradient of
      wrong tokens fades nearer to ratio 1.
    deviation, epsilon: See `help(losses.methods)`.

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

  The paper divides the sum over a prompt's group by the tokens of that group,
  inside the expectation over prompts (`mean_over_prompts` does that). Released
  code divides by the tokens of the batch, and so does this. The paper's unified
  form also has a token mask `M`. As long as no weight is clipped, that form has
  the gradient of this chain with `ppo_clip` as its objective.

  Args:
    low, high, deviation, epsilon: See `help(losses.methods)`. A `low` of 1 is
      no bound, as ratios are positive; the paper has none either. The paper
      names no number for `high`; 4, a largest ratio of 5, is that of ScaleRL.

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
  r"""The loss of ScaleRL: CISPO, averaged over prompts, with one deviation.

  .. math::
    J = \frac{1}{P} \sum_p \frac{1}{N_p} \sum_{i \in p, t}
      sg\bigl[\operatorname{clip}(s_{it}, 1 - l, 1 + h)\bigr]
      \frac{r_i - \bar r_p}{\sigma(r - \bar r)} \log \pi(o_{it})

  The sums run over prompts whose rewards differ. The deviation is that of all
  centered rewards of the rollout.

  Args:
    low, high, deviation, epsilon: See `help(losses.methods)`. A `low` of 1 is
      no bound, as ratios are positive.

  References:
    Khatri et al., `The Art of Scaling RL Compute
    <https://arxiv.org/abs/2510.13786>`_, 2025
  """
  return chain(
    center_by_group(),
    divide_by_batch_deviation(deviation, epsilon, within_groups=True),
    # The deviation contains the rewards of these groups all the same, as it
    # runs over all valid completions.
    drop_uniform_groups(),
    mean_over_prompts(),
    capped_score_function(low, high),
  )


def dppo_tv(low=0.2, high=0.2, cap=20.0) -> LossTransform:
  r"""Divergence PPO, gated by each token's part of the total variation.

  .. math::
    J = \frac{1}{N} \sum_{i,t} M_{it}\, sg[\min(s_{it}, c)] (r_i - \bar r)
      \log \pi(o_{it})

  :math:`M_{it} = 0` where the probability of the token has risen by more than
  `h` and :math:`A > 0`, or fallen by more than `l` and :math:`A < 0`; otherwise
  it is 1.

  The paper measures from the sampler's probabilities and not from recomputed
  ones. In a run that is `learner.anchor='sampler'`.

  Args:
    low: `l`, the largest fall of a token's probability, not of its ratio.
    high: `h`, the largest rise, likewise.
    cap: :math:`c`, the largest absolute ratio, a number. The paper has 5 or
      none, released code 20.

  References:
    `Rethinking the Trust Region in LLM Reinforcement Learning
    <https://arxiv.org/abs/2602.04879>`_, 2026
  """
  _ops.check_number('dppo_tv', 'cap', cap, least=1, most=math.inf, moves=False)
  return chain(
    center_by_group(),
    mean_over_tokens(),
    # Bounds of a ratio as distances from 1: none below, `cap` above.
    capped_score_function(1.0, cap - 1),
    gate_probability_change(low, high),
  )


def dppo_kl(low=0.05, high=0.05, cap=20.0) -> LossTransform:
  r"""Divergence PPO, gated by a binary KL: this token against all others.

  .. math::
    J = \frac{1}{N} \sum_{i,t} M_{it}\, sg[\min(s_{it}, c)] (r_i - \bar r)
      \log \pi(o_{it})

  :math:`M_{it} = 0` where that divergence, given in `gate_binary_kl`, exceeds
  its bound and the probability has moved the way the advantage pushes;
  otherwise it is 1. As in `dppo_tv`, the paper measures from the sampler's
  probabilities. It has one bound for both directions.

  Args:
    low: Bound of the divergence of a token whose probability has fallen, in
      nats.
    high: Bound for one whose probability has risen, in nats.
    cap: :math:`c`, the largest absolute ratio, a number.

  References:
    `Rethinking the Trust Region in LLM Reinforcement Learning
    <https://arxiv.org/abs/2602.04879>`_, 2026
  """
  _ops.check_number('dppo_kl', 'cap', cap, least=1, most=math.inf, moves=False)
  return chain(
    center_by_group(),
    mean_over_tokens(),
    # Bounds of a ratio as distances from 1: none below, `cap` above.
    capped_score_function(1.0, cap - 1),
    gate_binary_kl(low, high),
  )


def dro(coefficient=0.05) -> LossTransform:
  r"""Direct Reward Optimisation: a quadratic pull in place of a ratio.

  .. math::
    J = \frac{1}{N} \sum_{i,t} (r_i - \bar r) \log \pi(o_{it})
      - \frac{\beta}{2} (\log s_{it})^2

  This is the token-level form of released code. The paper regresses the
  log-ratio of a completion on its reward, with a learned value function.

  Args:
    coefficient: :math:`\beta`, per squared nat.

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
