"""Score-function methods: no ratio, hence one update per rollout."""

from grpo_jax.losses._base import LossTransform
from grpo_jax.losses._base import chain
from grpo_jax.losses._credit import constant_advantage
from grpo_jax.losses._credit import leave_one_out
from grpo_jax.losses._credit import use_reward
from grpo_jax.losses._objective import score_function
from grpo_jax.losses._weight import mean_over_tokens
from grpo_jax.losses._weight import sum_over_tokens


def reinforce() -> LossTransform:
  r"""REINFORCE without a baseline.

  .. math:: J = \frac{1}{B} \sum_i r_i \sum_t \log \pi(o_{it})

  Returns:
    A `LossTransform`.

  References:
    Williams, `Simple statistical gradient-following algorithms for
    connectionist reinforcement learning
    <https://doi.org/10.1007/BF00992696>`_, 1992
  """
  return chain(use_reward(), sum_over_tokens(), score_function())


def rloo() -> LossTransform:
  r"""REINFORCE with the mean of the group's other rewards as baseline.

  .. math:: J = \frac{1}{B} \sum_i \Bigl(r_i - \frac{1}{G-1} \sum_{j \neq i}
                r_j\Bigr) \sum_t \log \pi(o_{it})

  Unbiased: the baseline does not depend on the completion it is taken from.

  Returns:
    A `LossTransform`.

  References:
    Ahmadian et al., `Back to Basics <https://arxiv.org/abs/2402.14740>`_, 2024
    (some released code has a sequence-level clipped ratio instead).
  """
  return chain(leave_one_out(), sum_over_tokens(), score_function())


def supervised() -> LossTransform:
  r"""Maximum likelihood of given completions, as a method like any other.

  .. math:: J = \frac{1}{N} \sum_{i,t} \log \pi(o_{it})

  Returns:
    A `LossTransform`.
  """
  return chain(constant_advantage(1.0), mean_over_tokens(), score_function())
