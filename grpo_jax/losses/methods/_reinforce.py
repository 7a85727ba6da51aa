"""REINFORCE, the methods derived from it, and imitation."""

from grpo_jax.losses._base import LossTransform
from grpo_jax.losses._base import chain
from grpo_jax.losses._credit import center_by_group
from grpo_jax.losses._credit import center_by_length
from grpo_jax.losses._credit import constant_advantage
from grpo_jax.losses._credit import divide_by_group_mean
from grpo_jax.losses._credit import leave_one_out
from grpo_jax.losses._credit import normalize_by_group
from grpo_jax.losses._credit import use_reward
from grpo_jax.losses._objective import ppo_clip
from grpo_jax.losses._objective import score_function
from grpo_jax.losses._penalty import imitate_positives
from grpo_jax.losses._penalty import maybe_kl
from grpo_jax.losses._shaping import normalize_over_tokens
from grpo_jax.losses._shaping import subtract_kl_to_go
from grpo_jax.losses._weight import mean_over_sequence_sums
from grpo_jax.losses._weight import mean_over_sequences
from grpo_jax.losses._weight import mean_over_tokens
from grpo_jax.losses._weight import scale_by_informative_groups


def reinforce() -> LossTransform:
  r"""REINFORCE without a baseline.

  .. math:: J = \frac{1}{B} \sum_i r_i \sum_t \log \pi(o_{it})

  References:
    Williams, `Simple statistical gradient-following algorithms for
    connectionist reinforcement learning
    <https://doi.org/10.1007/BF00992696>`_, 1992
  """
  return chain(use_reward(), mean_over_sequence_sums(), score_function())


def rloo() -> LossTransform:
  r"""REINFORCE with the mean of the group's other rewards as baseline.

  .. math:: J = \frac{1}{B} \sum_i \Bigl(r_i - \frac{1}{G-1} \sum_{j \neq i}
                r_j\Bigr) \sum_t \log \pi(o_{it})

  It is unbiased, because the baseline does not depend on the completion that it
  is subtracted from. Some released code has the clipped ratio of the whole
  completion instead of the log-probability.

  References:
    Ahmadian et al., `Back to Basics <https://arxiv.org/abs/2402.14740>`_, 2024
  """
  # A sum over tokens, because a division by the length would bias the gradient.
  return chain(leave_one_out(), mean_over_sequence_sums(), score_function())


def gpg() -> LossTransform:
  r"""Group Policy Gradient: no ratio, no deviation, informative groups count.

  .. math::
    J = \frac{\alpha}{N} \sum_{i,t} (r_i - \bar r) \log \pi(o_{it}), \quad
    \alpha = \frac{B}{B - M}

  Here `B` counts the valid completions, and `M` those of them in groups of
  equal rewards. This is the paper's method with :math:`F_{norm} = 1`. The paper
  also samples until enough groups are informative, which is no part of a loss.

  References:
    Chu et al., `GPG <https://arxiv.org/abs/2504.02546>`_, 2025
  """
  return chain(
    center_by_group(),
    mean_over_tokens(),
    # `N` also counts the tokens of groups of equal rewards, which are not
    # dropped. The factor alpha makes up for them.
    scale_by_informative_groups(),
    score_function(),
  )


def opo() -> LossTransform:
  r"""On-Policy RL with the Optimal reward baseline.

  .. math:: J = \frac{1}{B} \sum_i \Bigl(r_i - \frac{\sum_j |o_j| r_j}
                {\sum_j |o_j|}\Bigr) \sum_t \log \pi(o_{it})

  It is meant for exactly one update per rollout.

  References:
    Hao et al., `OPO <https://arxiv.org/abs/2505.23585>`_, 2025
  """
  return chain(center_by_length(), mean_over_sequence_sums(), score_function())


def maxrl() -> LossTransform:
  r"""Maximum likelihood RL: ascends the log of the success rate.

  .. math:: J = \frac{1}{B} \sum_i \frac{r_i - \bar r}{\bar r}
                \sum_t \log \pi(o_{it})

  Groups whose mean reward is not positive have no gradient.

  References:
    `Maximum Likelihood Reinforcement Learning
    <https://arxiv.org/abs/2602.02710>`_, 2026
  """
  return chain(
    divide_by_group_mean(), mean_over_sequence_sums(), score_function()
  )


def reinforce_pp(
  kl_coefficient=0.01, low=0.2, high=0.2, deviation='population', epsilon=0.0
) -> LossTransform:
  r"""REINFORCE++: rewards minus KL to go, normalised over the rollout.

  .. math::
    J = \frac{1}{B} \sum_i \frac{1}{|o_i|} \sum_t \min\bigl(s_{it} A_{it},
      \operatorname{clip}(s_{it}, 1 - l, 1 + h) A_{it}\bigr), \quad
    A_{it} = \operatorname{z}\Bigl(r_i - \beta \sum_{s \ge t}
      \log \frac{\pi_{old}(o_{is})}{\pi_{ref}(o_{is})}\Bigr)

  `z` is the z-score among all trained tokens of the rollout.

  Args:
    kl_coefficient, low, high: See `help(losses.methods)`.
    deviation, epsilon: Likewise, over the tokens of the rollout.

  References:
    Hu et al., `REINFORCE++ <https://arxiv.org/abs/2501.03262>`_, 2025
  """
  # Only the number 0 leaves the term out, as a schedule may start at 0.
  none = isinstance(kl_coefficient, int | float) and kl_coefficient == 0
  return chain(
    use_reward(),
    # Before the z-score, which is that of the rewards minus their KL to go.
    *(() if none else (subtract_kl_to_go(kl_coefficient),)),
    normalize_over_tokens(deviation, epsilon),
    mean_over_sequences(),
    ppo_clip(low, high),
  )


def reinforce_pp_baseline(
  kl_coefficient=0.01, low=0.2, high=0.2, deviation='population', epsilon=0.0
) -> LossTransform:
  r"""REINFORCE++ with the group's mean as baseline, and k2 as a loss.

  .. math::
    J = \frac{1}{B} \sum_i \frac{1}{|o_i|} \sum_t \min\bigl(s_{it} A_i,
      \operatorname{clip}(s_{it}, 1 - l, 1 + h) A_i\bigr) - \beta\, k_2, \quad
    A_i = \operatorname{z}(r_i - \bar r)

  `z` is the z-score among all trained tokens of the rollout.

  Args:
    kl_coefficient, low, high: See `help(losses.methods)`.
    deviation, epsilon: Likewise, over the tokens of the rollout.

  References:
    Hu et al., `REINFORCE++ <https://arxiv.org/abs/2501.03262>`_, 2025
  """
  return chain(
    center_by_group(),
    normalize_over_tokens(deviation, epsilon),
    mean_over_sequences(),
    ppo_clip(low, high),
    # As a loss, k2 has the gradient of KL(policy || reference).
    *maybe_kl(kl_coefficient, 'k2'),
  )


def positive_nll(
  coefficient=0.1, low=0.2, high=0.28, deviation='population', epsilon=0.0
) -> LossTransform:
  r"""The clip of DAPO, and imitation of completions above their group's mean.

  .. math::
    J = \frac{1}{N} \sum_{i,t} \min\bigl(s_{it} A_i, \operatorname{clip}(s_{it},
      1 - l, 1 + h) A_i\bigr) + \frac{c}{N_+} \sum_{A_i > 0} \log \pi(o_{it})

  :math:`N_+` counts the kept tokens where :math:`A_i > 0`. This is the loss of
  VAPO without its critic. `imitate_positives` adds the second term to any other
  method.

  Args:
    coefficient: :math:`c`, without unit.
    low, high, deviation, epsilon: See `help(losses.methods)`.

  References:
    Yue et al., `VAPO <https://arxiv.org/abs/2504.05118>`_, 2025
  """
  return chain(
    normalize_by_group(deviation, epsilon),
    mean_over_tokens(),
    ppo_clip(low, high),
    imitate_positives(coefficient),
  )


def supervised() -> LossTransform:
  r"""Maximum likelihood of given completions, as a method like any other.

  .. math:: J = \frac{1}{N} \sum_{i,t} \log \pi(o_{it})
  """
  return chain(constant_advantage(1.0), mean_over_tokens(), score_function())
