"""Methods that act on what makes the entropy collapse."""

from grpo_jax.losses._base import LossTransform
from grpo_jax.losses._base import chain
from grpo_jax.losses._credit import normalize_by_group
from grpo_jax.losses._objective import importance_weighted
from grpo_jax.losses._penalty import penalize_covariance
from grpo_jax.losses._weight import mean_over_tokens


def kl_cov(share=2e-4, coefficient=1.0) -> LossTransform:
  r"""KL-Cov: a penalty on the tokens whose covariance drives entropy down.

  .. math::
    J = \frac{1}{N} \sum_{i,t} s_{it} A_i - c\, |\log s_{it}|\,
      1[it \in \operatorname{top}_k \operatorname{cov}]

  Args:
    share: Share of the batch's kept tokens that is penalised.
    coefficient: Factor `c`, per nat.

  Returns:
    A `LossTransform` of `scope='batch'`.

  References:
    Cui et al., `The Entropy Mechanism of Reinforcement Learning
    <https://arxiv.org/abs/2505.22617>`_, 2025
  """
  return chain(
    normalize_by_group(),
    mean_over_tokens(),
    importance_weighted(),
    penalize_covariance(share, coefficient),
  )
