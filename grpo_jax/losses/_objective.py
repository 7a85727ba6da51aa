"""Objective: f(s, A), the trust region."""

import jax.numpy as jnp

from grpo_jax.losses import _ops
from grpo_jax.losses._base import LossTransform
from grpo_jax.losses._stages import set_objective


def ppo_clip(low=0.2, high=0.2) -> LossTransform:
  r"""The clipped surrogate.

  .. math:: \min\bigl(s A, \operatorname{clip}(s, 1 - l, 1 + h) A\bigr)

  The gradient is exactly 0 where `s > 1 + h` and `A > 0`, or `s < 1 - l` and
  `A < 0`; those tokens are the metrics `clipped_high` and `clipped_low`.

  Args:
    low: Distance of the lower bound from 1.
    high: Distance of the upper bound from 1.

  Returns:
    A `LossTransform` that sets the objective.

  References:
    Schulman et al., `Proximal Policy Optimization Algorithms
    <https://arxiv.org/abs/1707.06347>`_, 2017
  """

  def objective(terms, batch, low, high):
    ratio, ratio_metrics = _ops.importance_ratio(terms)
    advantage = batch.advantage
    clip = _ops.clip_metrics(ratio > 1 + high, ratio < 1 - low, advantage)
    value = jnp.where(clip['clipped_high'], 1 + high, ratio)
    value = jnp.where(clip['clipped_low'], 1 - low, value)
    return value * advantage, {**ratio_metrics, **clip}

  return set_objective(objective, low=low, high=high)


def importance_weighted() -> LossTransform:
  r"""The ratio times the advantage, without a trust region: :math:`s A`.

  Returns:
    A `LossTransform` that sets the objective.
  """

  def objective(terms, batch):
    ratio, metrics = _ops.importance_ratio(terms)
    return ratio * batch.advantage, metrics

  return set_objective(objective)


def score_function() -> LossTransform:
  r"""The advantage times the log-probability: :math:`A \log \pi`.

  Its gradient is that of REINFORCE. No ratio appears, so the policy before the
  update is not needed, and a second update on one rollout is biased.

  Returns:
    A `LossTransform` that sets the objective.

  References:
    Williams, `Simple statistical gradient-following algorithms for
    connectionist reinforcement learning
    <https://doi.org/10.1007/BF00992696>`_, 1992
  """

  def objective(terms, batch):
    return batch.advantage * terms.logp

  return set_objective(objective)
