"""Methods whose ratio belongs to the whole completion."""

from grpo_jax.losses._base import LossTransform
from grpo_jax.losses._base import chain
from grpo_jax.losses._credit import normalize_by_group
from grpo_jax.losses._objective import importance_weighted
from grpo_jax.losses._objective import ppo_clip
from grpo_jax.losses._ratio import clip_log_ratio
from grpo_jax.losses._ratio import pool_log_ratio
from grpo_jax.losses._weight import mean_over_sequences


def gspo(low=3e-4, high=4e-4) -> LossTransform:
  r"""Group Sequence Policy Optimization: pools the ratio, then clips it.

  .. math::
    J = \frac{1}{B} \sum_i \min\bigl(s_i A_i, \operatorname{clip}(s_i, 1 - l,
      1 + h) A_i\bigr), \quad
    s_i = \exp\Bigl(\frac{1}{|o_i|} \sum_t \log s_{it}\Bigr)

  Args:
    low: Distance of the lower clip bound from 1.
    high: Distance of the upper clip bound from 1.

  Returns:
    A `LossTransform`.

  References:
    Zheng et al., `Group Sequence Policy Optimization
    <https://arxiv.org/abs/2507.18071>`_, 2025
  """
  return chain(
    normalize_by_group(),
    mean_over_sequences(),
    pool_log_ratio(),
    ppo_clip(low, high),
  )


def gmpo(limit=0.4) -> LossTransform:
  r"""Geometric-Mean Policy Optimization: clips each ratio, then pools them.

  .. math::
    J = \frac{1}{B} \sum_i A_i \exp\Bigl(\frac{1}{|o_i|} \sum_t
      \operatorname{clip}_{A_i}(\log s_{it}, -c, c)\Bigr)

  The clip acts on the side to which the advantage pushes, as in PPO.

  Args:
    limit: The bound `c`, in log space; 0.4 is the paper's (e^-0.4, e^0.4).

  Returns:
    A `LossTransform`.

  References:
    Zhao et al., `Geometric-Mean Policy Optimization
    <https://arxiv.org/abs/2507.20673>`_, 2025
  """
  return chain(
    normalize_by_group(),
    mean_over_sequences(),
    clip_log_ratio(limit),
    pool_log_ratio(),
    importance_weighted(),
  )
