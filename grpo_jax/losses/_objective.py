"""Objective: f(s, A), the trust region."""

import math
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

  The gradient is exactly 0 where :math:`s > 1 + h` and :math:`A > 0`, or
  :math:`s < 1 - l` and :math:`A < 0`. The metrics `clipped_high` and
  `clipped_low` mark these tokens.

  A cap `c` replaces the ratio by :math:`\min(s, c)` where :math:`A < 0`, so the
  objective there is at least :math:`c A`. This is the dual clip, and at the
  same time the two-sided clip, which caps the ratio of the unclipped branch.
  The metric `clipped_cap` marks the tokens above it.

  Args:
    low: `l`, distance of the lower bound from 1.
    high: `h`, distance of the upper bound from 1.
    cap: `c`, the largest ratio that acts where :math:`A < 0`: an absolute ratio
      above `1 + high`. None is no cap.

  Returns:
    A `LossTransform` that sets the objective.

  Raises:
    ValueError: A negative distance, a `low` of 1 or more, bounds in the place
      of distances, or a `cap` inside the clip range.

  References:
    Schulman et al., `Proximal Policy Optimization Algorithms
    <https://arxiv.org/abs/1707.06347>`_, 2017; Ye et al., `Mastering Complex
    Control in MOBA Games <https://arxiv.org/abs/1912.09729>`_, 2020
  """
  _ops.check_range('ppo_clip', low, high)
  if isinstance(low, int | float) and low >= 1:
    raise ValueError(
      f'ppo_clip got low={low}, so that the lower bound of the ratio is '
      f'{1 - low:g}, below which no ratio lies; give a distance below 1.'
    )
  if cap is not None:
    _ops.check_number('ppo_clip', 'cap', cap, least=0, most=math.inf)
  # A schedule or a controller has no value yet that could be checked.
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
      # A capped token is held, and no longer pulled back.
      clip['outside_high'] &= ~beyond
    return value * advantage, {**ratio_metrics, **clip}

  # Without a cap there is no metric `clipped_cap` either.
  capped: dict[str, Any] = {} if cap is None else {'cap': cap}
  return set_objective(
    objective, zero_without_advantage=True, low=low, high=high, **capped
  )


def hold_outside(
  ratio: Array, low, high, advantage: Array
) -> tuple[Array, dict[str, Array]]:
  """The ratio, held at a bound where the advantage would push it further.

  Args:
    ratio: f[P,G,T].
    low: Distance of the lower bound from 1, a number or f[P,G,T].
    high: Distance of the upper bound from 1, likewise.
    advantage: f[P,G,T].

  Returns:
    The ratio, constant on the side where the advantage points out of the range,
    and the metrics of `_ops.clip_metrics`.
  """
  clip = _ops.clip_metrics(ratio > 1 + high, ratio < 1 - low, advantage)
  # Not jnp.clip, which would also hold tokens that the advantage pulls back.
  held = jnp.where(clip['clipped_high'], 1 + high, ratio)
  return jnp.where(clip['clipped_low'], 1 - low, held), clip


def importance_weighted() -> LossTransform:
  """The ratio times the advantage, without a trust region: :math:`s A`.

  Returns:
    A `LossTransform` that sets the objective.
  """

  def objective(terms, batch):
    ratio, metrics = _ops.importance_ratio(terms)
    return ratio * batch.advantage, metrics

  return set_objective(objective, zero_without_advantage=True)


def score_function() -> LossTransform:
  r"""The advantage times the log-probability: :math:`A \log \pi`.

  Its gradient is that of REINFORCE. There is no ratio in it, so the policy
  before the update is not needed, and a second update on the same rollout is
  biased.

  Returns:
    A `LossTransform` that sets the objective.

  References:
    Williams, `Simple statistical gradient-following algorithms for
    connectionist reinforcement learning
    <https://doi.org/10.1007/BF00992696>`_, 1992
  """

  def objective(terms, batch):
    return batch.advantage * terms.logp

  return set_objective(objective, zero_without_advantage=True)


def capped_score_function(low=1.0, high=4.0) -> LossTransform:
  r"""The score function, weighted by the clipped ratio.

  .. math:: sg\bigl[\operatorname{clip}(s, 1 - l, 1 + h)\bigr]\, A \log \pi

  No token loses its gradient. The metrics `capped_high` and `capped_low` mark
  the tokens whose weight is clipped.

  Args:
    low: `l`, distance of the lower bound from 1. 1 is no bound, as ratios are
      positive.
    high: `h`, distance of the upper bound from 1.

  Returns:
    A `LossTransform` that sets the objective.

  Raises:
    ValueError: A negative distance, or bounds in the place of distances.

  References:
    MiniMax, `MiniMax-M1 <https://arxiv.org/abs/2506.13585>`_, 2025 (CISPO)
  """
  _ops.check_range('capped_score_function', low, high)

  def objective(terms, batch, low, high):
    ratio, metrics = _ops.importance_ratio(terms)
    weight = lax.stop_gradient(jnp.clip(ratio, 1 - low, 1 + high))
    metrics |= {'capped_high': ratio > 1 + high, 'capped_low': ratio < 1 - low}
    return weight * batch.advantage * terms.logp, metrics

  return set_objective(
    objective, zero_without_advantage=True, low=low, high=high
  )


def sigmoid_gate(positive=1.0, negative=1.05) -> LossTransform:
  r"""A soft gate around ratio 1, with one width for each sign of the advantage.

  .. math:: \frac{4}{\tau} \sigma\bigl(\tau (s - 1)\bigr) A

  Its slope in `s` is `A` at ratio 1 and falls off smoothly on both sides.

  Args:
    positive: :math:`\tau` where :math:`A > 0`.
    negative: :math:`\tau` elsewhere.

  Returns:
    A `LossTransform` that sets the objective.

  References:
    Gao et al., `Soft Adaptive Policy Optimization
    <https://arxiv.org/abs/2511.20347>`_, 2025
  """
  _ops.check_number('sigmoid_gate', 'positive', positive, above=True, least=0)
  _ops.check_number('sigmoid_gate', 'negative', negative, above=True, least=0)

  def objective(terms, batch, positive, negative):
    ratio, metrics = _ops.importance_ratio(terms)
    tau = jnp.where(batch.advantage > 0, positive, negative)
    # 4 / tau makes the slope 1 at ratio 1, where that of the sigmoid is 1 / 4.
    gate = 4 / tau * jax.nn.sigmoid(tau * (ratio - 1))
    return gate * batch.advantage, metrics

  return set_objective(
    objective, zero_without_advantage=True, positive=positive, negative=negative
  )


def gamma_weighted_score(
  positive=(2.0, 3.0), negative=(3.0, 2.0)
) -> LossTransform:
  r"""The score function, weighted by the ratio in the shape of a gamma density.

  .. math:: sg\bigl[s^k e^{\lambda (1 - s)}\bigr]\, A \log \pi

  Args:
    positive: :math:`(k, \lambda)` where :math:`A \ge 0`: two numbers, each of
      which may be a schedule or a `Controller`.
    negative: :math:`(k, \lambda)` where :math:`A < 0`, likewise.

  Returns:
    A `LossTransform` that sets the objective.

  Raises:
    ValueError: An argument is no pair.

  References:
    Shen et al., `VESPO <https://arxiv.org/abs/2602.10693>`_, 2026
  """

  for name, pair in (('positive', positive), ('negative', negative)):
    if not isinstance(pair, tuple | list) or len(pair) != 2:
      raise ValueError(
        f'gamma_weighted_score got {name}={pair!r}; give a pair (k, lambda) of '
        'numbers or schedules.'
      )
    for value in pair:
      _ops.check_number('gamma_weighted_score', name, value, least=0)
  names = 'power', 'decay', 'power_negative', 'decay_negative'

  def objective(terms, batch, power, decay, power_negative, decay_negative):
    ratio, metrics = _ops.importance_ratio(terms)
    above = batch.advantage >= 0
    power = jnp.where(above, power, power_negative)
    decay = jnp.where(above, decay, decay_negative)
    # `ratio` saturates, so its logarithm has to as well.
    log_ratio = jnp.minimum(terms.log_ratio, _ops.MAX_LOG_RATIO)
    # One exp of a sum: each factor alone may overflow.
    log_weight = power * log_ratio + decay * (1 - ratio)
    weight = lax.stop_gradient(jnp.exp(log_weight))
    return weight * batch.advantage * terms.logp, metrics

  return set_objective(
    objective,
    zero_without_advantage=True,
    **dict(zip(names, (*positive, *negative))),
  )
