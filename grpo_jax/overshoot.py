"""Overshoot: how far clipped tokens are moved on, and by what.

A token that the trust region has switched off has no gradient. It still moves:
momentum carries the parameters on, and other tokens move what they share. The
unit is nats of log-ratio, counted outward, away from the policy before the
update.
"""

from typing import Any

import jax
import jax.numpy as jnp

from grpo_jax import losses
from grpo_jax import metrics
from grpo_jax import micro
from grpo_jax.layout import Layout

Array = jax.Array
Measured = dict[str, metrics.Metric]

# Metrics that mark tokens whose gradient a trust region has switched off.
CLIPPED = (
  'clipped_high', 'clipped_low', 'clipped_cap', 'gated', 'off_policy',
  'detached',
)  # fmt: skip
_PULLED_BACK = ('outside_high', 'outside_low')


def outward(terms: losses.SurrogateTerms, batch: losses.Batch) -> Array:
  """The direction in which each clipped token leaves its range, f32[P,G,T].

  Args:
    terms: What `losses.surrogate_loss` returned.
    batch: What it was given.

  Returns:
    1 where a trained token without gradient has a ratio above 1, -1 where below
    1 (the ratio that the objective takes: pooled, say), and 0 for all others.
  """
  clipped = _any(terms, CLIPPED) & batch.keep
  return jnp.where(clipped, jnp.sign(terms.log_ratio), 0).astype(jnp.float32)


def of_step(
  learner: Any,
  params: Any,
  moved: Any,
  tangents: dict[str, Any],
  found: Any,
  batch: losses.Batch,
  loss_state: Any,
  layout: Layout,
  num_micro: Array,
) -> Measured:
  """What a step does to the tokens that were clipped before it.

  It takes a forward pass and the product of its derivative with each tangent,
  in forward mode, at the old parameters, and a forward pass at the new ones:
  with three tangents about five forward passes, where the step itself takes
  three, and the memory of the tangents.

  Args:
    learner: See `learner.Learner`.
    params: Parameters before the step.
    moved: Parameters after it.
    tangents: Trees like the parameters, by the names of their metrics.
    found: The `gradient.Gradient` of the step, from before it.
    batch: A prepared optimizer batch, [P,G,T].
    loss_state: Of the `TrainState`.
    layout: Its micro-batches, [N, rows, ...].
    num_micro: i32[], how many of the N hold anything.

  Returns:
    Means over the clipped tokens, nats:

    - `overshoot`: outward motion as it happened, scored again after the step;
    - `overshoot_positive`: of that, what goes outward at all;
    - `overshoot_NAME`: outward motion along each tangent, to first order.

    And over all trained tokens `ends_clipped` and `ends_outside`, the shares
    that are, after the step, without gradient, and outside on either side.
    (Tokens without advantage have no side, and count as inside.)
  """
  shape = batch.mask.shape

  def along(rows):
    def score(p):
      return learner.score_forward(p, rows, False).logp

    _, derivative = jax.linearize(score, params)
    return {name: derivative(tangent) for name, tangent in tangents.items()}

  def after(rows):
    return learner.score(moved, rows, learner.with_entropy)

  slopes = micro.of_all(along, layout, num_micro, shape)
  scores = micro.of_all(after, layout, num_micro, shape)
  direction = found.direction
  clipped = direction != 0
  motion = direction * (scores.logp - found.logp)
  measured: Measured = {
    'overshoot': metrics.masked_mean(motion, clipped),
    'overshoot_positive': metrics.masked_mean(jnp.maximum(motion, 0), clipped),
  }
  for name, slope in slopes.items():
    measured[f'overshoot_{name}'] = metrics.masked_mean(
      direction * slope, clipped
    )
  return measured | ends(learner, scores, batch, loss_state)


def ends(
  learner: Any, scores: Any, batch: losses.Batch, loss_state: Any
) -> Measured:
  """The shares of a batch that lie beyond their clip range; see `of_step`."""
  _, terms = losses.surrogate_loss(
    learner.method, scores.logp, batch, loss_state, scores.entropy
  )
  clipped = _any(terms, CLIPPED)
  outside = clipped | _any(terms, _PULLED_BACK)
  return {
    'ends_clipped': metrics.masked_mean(clipped, batch.keep),
    'ends_outside': metrics.masked_mean(outside, batch.keep),
  }


def _any(terms: losses.SurrogateTerms, names: tuple[str, ...]) -> Array:
  """bool[P,G,T], whether a token bears any of some marks."""
  found = jnp.zeros(terms.log_ratio.shape, bool)
  for name in names:
    if name in terms.metrics:
      found |= terms.metrics[name]
  return found
