"""Overshoot: how far clipped tokens are moved on, and by what.

A token that the trust region has switched off has no gradient. It still moves:
momentum carries the parameters on, and other tokens move what they share. The
unit is nats of log-ratio, counted outward, away from the policy before the
update.
"""

from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from grpo_jax import losses
from grpo_jax import metrics
from grpo_jax import micro
from grpo_jax.layout import Layout

Array = jax.Array
Measured = dict[str, metrics.Metric]

# Metrics that mark tokens whose gradient a trust region has switched off: above
# its range, below it, and where the mark does not say on which side.
_ABOVE = ('clipped_high', 'clipped_cap')
_BELOW = ('clipped_low', 'off_policy')
_EITHER = ('gated', 'detached')
_PULLED_BACK = ('outside_high', 'outside_low')


def outward(terms: losses.SurrogateTerms, batch: losses.Batch) -> Array:
  """The direction in which each clipped token leaves its range, f32[P,G,T].

  Args:
    terms: What `losses.surrogate_loss` returned.
    batch: What it was given.

  Returns:
    1 where a trained token is clipped above its range, -1 where below (whatever
    ratio the range is about: the token's own, its completion's), the sign of
    its own log-ratio where the method does not say, and 0 for all others.
  """
  old = terms.logp if batch.logp_old is None else batch.logp_old
  direction = jnp.where(_any(terms, _EITHER), jnp.sign(terms.logp - old), 0)
  direction = jnp.where(_any(terms, _BELOW), -1, direction)
  direction = jnp.where(_any(terms, _ABOVE), 1, direction)
  direction = lax.stop_gradient(direction)
  return jnp.where(batch.keep, direction, 0).astype(jnp.float32)


def clipped(terms: losses.SurrogateTerms) -> Array:
  """bool[P,G,T], the tokens that a trust region has switched off."""
  return _any(terms, _ABOVE + _BELOW + _EITHER)


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

  It takes, for each tangent, the product with the scores' derivative in forward
  mode at the old parameters, and a forward pass at the new ones: with three
  tangents about seven forward passes, where the step itself takes three. In
  memory it takes the tangents; activations are not kept.

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
    that are, after the step, clipped, and outside on either side. (Tokens
    without advantage have no side, and count as inside. A range that depends on
    the updates done is that of the first update.)
  """
  shape = batch.mask.shape

  def along(rows):
    def score(p):
      return learner.score_forward(p, rows, False).logp

    return {
      name: jax.jvp(score, (params,), (tangent,))[1]
      for name, tangent in tangents.items()
    }

  def after(rows):
    return learner.score(moved, rows, learner.with_entropy)

  slopes = micro.of_all(along, layout, num_micro, shape)
  scores = micro.of_all(after, layout, num_micro, shape)
  direction = found.direction
  chosen = direction != 0
  motion = direction * (scores.logp - found.logp)
  measured: Measured = {
    'overshoot': metrics.masked_mean(motion, chosen),
    'overshoot_positive': metrics.masked_mean(jnp.maximum(motion, 0), chosen),
  }
  for name, slope in slopes.items():
    measured[f'overshoot_{name}'] = metrics.masked_mean(
      direction * slope, chosen
    )
  return measured | ends(learner, scores, batch, loss_state)


def ends(
  learner: Any, scores: Any, batch: losses.Batch, loss_state: Any
) -> Measured:
  """The shares of a batch that lie beyond their clip range; see `of_step`."""
  if 'updates_done' in batch.extras:
    none = jnp.zeros(batch.mask.shape, jnp.float32)
    extras = {**batch.extras, 'updates_done': none}
    batch = batch._replace(extras=extras)
  _, terms = losses.surrogate_loss(
    learner.method, scores.logp, batch, loss_state, scores.entropy
  )
  beyond = clipped(terms)
  outside = beyond | _any(terms, _PULLED_BACK)
  return {
    'ends_clipped': metrics.masked_mean(beyond, batch.keep),
    'ends_outside': metrics.masked_mean(outside, batch.keep),
  }


def _any(terms: losses.SurrogateTerms, names: tuple[str, ...]) -> Array:
  """bool[P,G,T], whether a token bears any of some marks."""
  found = jnp.zeros(terms.log_ratio.shape, bool)
  for name in names:
    if name in terms.metrics:
      found |= terms.metrics[name].astype(bool)
  return found
