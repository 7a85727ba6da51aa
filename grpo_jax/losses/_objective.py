"""Objective: f(s, A), the trust region."""

from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from grpo_jax.losses import _ops
from grpo_jax.losses._base import Array
from grpo_jax.losses._base import LossTransform
from grpo_jax.losses._stages import set_objective


def ppo_clip(low=0.2, high=0.2, cap=None) -> LossTransform:
  r"""The clipped surrogate.

  .. math:: \min\bigl(s A, \operatorname{clip}(s, 1 - l, 1 + h) A\bigr)

  The gradient is exactly 0 where `s > 1 + h` and `A > 0`, or `s < 1 - l` and
  `A < 0`; those tokens are the metrics `clipped_high` and `clipped_low`.

  A cap `c` replaces the ratio by `min(s, c)` for `A < 0`: the objective then is
  at least `c A` (dual clip), which is the same as `min(s, c)` in the unclipped
  branch (two-sided clip). Its tokens are the metric `clipped_cap`.

  Args:
    low: Distance of the lower bound from 1.
    high: Distance of the upper bound from 1.
    cap: Largest ratio that acts where `A < 0`, an absolute ratio above
      `1 + high`; None for no such bound.

  Returns:
    A `LossTransform` that sets the objective.

  Raises:
    ValueError: A negative distance, or `cap` inside the clip range.

  References:
    Schulman et al., `Proximal Policy Optimization Algorithms
    <https://arxiv.org/abs/1707.06347>`_, 2017; Ye et al., `Mastering Complex
    Control in MOBA Games <https://arxiv.org/abs/1912.09729>`_, 2020
  """
  _ops.check_range('ppo_clip', low, high)
  if isinstance(cap, int | float) and isinstance(high, int | float):
    if cap <= 1 + high:
      raise ValueError(
        f'ppo_clip got cap={cap} and high={high}; give a cap above 1 + high.'
      )

  def objective(terms, batch, low, high, **capped):
    ratio, ratio_metrics = _ops.importance_ratio(terms)
    advantage = batch.advantage
    value, clip = hold_outside(ratio, low, high, advantage)
    if capped:
      beyond = (ratio > capped['cap']) & (advantage < 0)
      value = jnp.where(beyond, capped['cap'], value)
      clip['clipped_cap'] = beyond
      clip['outside_high'] &= ~beyond
    return value * advantage, {**ratio_metrics, **clip}

  capped: dict[str, Any] = {} if cap is None else {'cap': cap}
  return set_objective(objective, low=low, high=high, **capped)


def hold_outside(
  ratio: Array, low, high, advantage: Array
) -> tuple[Array, dict[str, Array]]:
  """The ratio, held at a bound where `A` would push it further; and metrics.

  Args:
    ratio: f[P,G,T].
    low: Distance of the lower bound from 1, a number or f[P,G,T].
    high: Distance of the upper bound from 1, likewise.
    advantage: f[P,G,T].

  Returns:
    The ratio, constant on the side where `A` points out of the range, and
    `_ops.clip_metrics`.
  """
  clip = _ops.clip_metrics(ratio > 1 + high, ratio < 1 - low, advantage)
  held = jnp.where(clip['clipped_high'], 1 + high, ratio)
  return jnp.where(clip['clipped_low'], 1 - low, held), clip


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


def capped_score_function(low=1.0, high=4.0) -> LossTransform:
  r"""The score function, weighted by the clipped ratio: it never lets go.

  .. math:: sg\bigl[\operatorname{clip}(s, 1 - l, 1 + h)\bigr]\, A \log \pi

  Args:
    low: Distance of the lower bound from 1; 1 is none, as ratios are positive.
    high: Distance of the upper bound from 1.

  Returns:
    A `LossTransform` that sets the objective.

  Raises:
    ValueError: A negative distance.

  References:
    MiniMax, `MiniMax-M1 <https://arxiv.org/abs/2506.13585>`_, 2025 (CISPO)
  """
  _ops.check_range('capped_score_function', low, high)

  def objective(terms, batch, low, high):
    ratio, metrics = _ops.importance_ratio(terms)
    weight = lax.stop_gradient(jnp.clip(ratio, 1 - low, 1 + high))
    metrics |= {'capped_high': ratio > 1 + high, 'capped_low': ratio < 1 - low}
    return weight * batch.advantage * terms.logp, metrics

  return set_objective(objective, low=low, high=high)


def sigmoid_gate(positive=1.0, negative=1.05) -> LossTransform:
  r"""A soft gate around ratio 1, of another width for each sign.

  .. math:: \frac{4}{\tau} \sigma\bigl(\tau (s - 1)\bigr) A

  Its slope in `s` is 1 at 1 and falls off smoothly on both sides.

  Args:
    positive: `tau` where `A > 0`.
    negative: `tau` elsewhere.

  Returns:
    A `LossTransform` that sets the objective.

  References:
    Gao et al., `Soft Adaptive Policy Optimization
    <https://arxiv.org/abs/2511.20347>`_, 2025
  """

  def objective(terms, batch, positive, negative):
    ratio, metrics = _ops.importance_ratio(terms)
    tau = jnp.where(batch.advantage > 0, positive, negative)
    gate = 4 / tau * jax.nn.sigmoid(tau * (ratio - 1))
    return gate * batch.advantage, metrics

  return set_objective(objective, positive=positive, negative=negative)


def gamma_weighted_score(
  positive=(2.0, 3.0), negative=(3.0, 2.0)
) -> LossTransform:
  r"""The score function, weighted by a gamma density's shape of the ratio.

  .. math:: sg\bigl[s^k e^{\lambda (1 - s)}\bigr]\, A \log \pi

  Args:
    positive: `(k, lambda)` where `A >= 0`.
    negative: `(k, lambda)` where `A < 0`.

  Returns:
    A `LossTransform` that sets the objective.

  References:
    Shen et al., `VESPO <https://arxiv.org/abs/2602.10693>`_, 2026
  """

  def objective(terms, batch):
    ratio, metrics = _ops.importance_ratio(terms)
    above = batch.advantage >= 0
    power = jnp.where(above, positive[0], negative[0])
    decay = jnp.where(above, positive[1], negative[1])
    log_ratio = jnp.minimum(terms.log_ratio, _ops.MAX_LOG_RATIO)
    log_weight = power * log_ratio + decay * (1 - ratio)
    weight = lax.stop_gradient(jnp.exp(log_weight))
    return weight * batch.advantage * terms.logp, metrics

  return set_objective(objective)
