"""The gradient of one optimizer batch, in two stages.

The model gives log-probabilities by `jax.vjp`; the loss gives `c = d loss /
d logp`, an array of the small shape [P,G,T]; the pull-back of `c` through the
model is the gradient of the parameters. So losses never see a model, and where
one transform couples the whole batch (`scope == 'batch'`), `c` is computed for
all of it before the first pull-back. The gradient is a sum over micro-batches
and depends on their size, on packing and on sharding in no way.
"""

from typing import Any
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from grpo_jax import losses
from grpo_jax import metrics
from grpo_jax import micro
from grpo_jax import overshoot
from grpo_jax import policy_metrics
from grpo_jax.layout import Layout

Array = jax.Array


class Gradient(NamedTuple):
  """What the passes of one optimizer batch give."""

  grads: Any  # of the loss, like the parameters, float32
  outward: Any  # of the clipped tokens' outward log-ratios, if wanted
  loss: Array  # f32[]
  logp: Array  # f32[P,G,T]
  direction: Array  # f32[P,G,T], see `overshoot.outward`
  clipped: Array  # bool[P,G,T], see `overshoot.clipped`


def score_all(
  learner: Any,
  params: Any,
  layout: Layout,
  num_micro: Array,
  shape: tuple[int, ...],
  with_entropy: bool = False,
):
  """`Scores` [P,G,T] of a stack of micro-batches, without a gradient.

  Args:
    learner: See `learner.Learner`.
    params: Of the policy, the reference, ...
    layout: Micro-batches, [N, rows, ...].
    num_micro: i32[], how many of the N hold anything.
    shape: (P, G, T).
    with_entropy: Whether to compute the entropy too.
  """

  def score(rows):
    return learner.score(params, rows, with_entropy)

  return micro.of_all(score, layout, num_micro, shape)


def _loss_and_cotangent(learner, scores, batch, loss_state):
  """((loss, terms), d loss / d scores) of any arrangement of completions."""

  def loss(scores):
    return losses.surrogate_loss(
      learner.method, scores.logp, batch, loss_state, scores.entropy
    )

  return jax.value_and_grad(loss, has_aux=True)(scores)


def _outward(pull_back, cotangent, direction, grads):
  """The clipped tokens' pull-back; no pass where there are none."""
  outward = jax.tree.map(jnp.zeros_like, cotangent)._replace(logp=direction)
  return lax.cond(
    jnp.any(direction != 0),
    lambda: pull_back(outward)[0],
    lambda: jax.tree.map(jnp.zeros_like, grads),
  )


def of_batch(
  learner: Any,
  params: Any,
  loss_state: Any,
  batch: losses.Batch,
  layout: Layout,
  num_micro: Array,
) -> tuple[Gradient, dict[str, metrics.Metric]]:
  """The gradient of one optimizer batch, summed over its micro-batches.

  Args:
    learner: See `learner.Learner`.
    params: Of the policy.
    loss_state: Of the `TrainState`.
    batch: A prepared optimizer batch, [P,G,T].
    layout: Its micro-batches, [N, rows, ...].
    num_micro: i32[], how many of the N hold anything.

  Returns:
    A `Gradient` and metrics.
  """
  whole = None
  if learner.method.scope == 'batch':
    scores = score_all(
      learner, params, layout, num_micro, batch.mask.shape, learner.with_entropy
    )
    whole = _loss_and_cotangent(learner, scores, batch, loss_state)

  def one(k):
    rows = micro.rows(layout, k)
    scores, pull_back = jax.vjp(
      lambda p: learner.score(p, rows, learner.with_entropy), params
    )
    if whole is not None:
      loss, measured = jnp.zeros(()), {}
      cotangent = micro.take(whole[1], rows.completion)
      terms = whole[0][1]
      direction, off = micro.take(
        (overshoot.outward(terms, batch), overshoot.clipped(terms)),
        rows.completion,
      )
    else:
      part = micro.take(batch, rows.completion)
      (loss, terms), cotangent = _loss_and_cotangent(
        learner, scores, part, loss_state
      )
      measured = policy_metrics.of_terms(terms, part)
      direction = overshoot.outward(terms, part)
      off = overshoot.clipped(terms)
    grads = pull_back(cotangent)[0]
    beyond = None
    if learner.with_outward:
      beyond = _outward(pull_back, cotangent, direction, grads)
    seen = scores, cotangent.logp, direction, off
    return (grads, beyond, loss), measured, seen, rows.completion

  def body(k, total):
    summed, measured, seen, completion = one(k)
    put = lambda every, part: micro.put(every, part, completion)
    return (
      jax.tree.map(jnp.add, total[0], summed),
      metrics.merge(total[1], measured),
      jax.tree.map(put, total[2], seen),
    )

  shapes = jax.eval_shape(one, 0)
  zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes[0])
  nothing = lambda x: jnp.zeros(batch.mask.shape, x.dtype)
  start = zeros, metrics.empty(shapes[1]), jax.tree.map(nothing, shapes[2])
  summed, measured, seen = lax.fori_loop(0, num_micro, body, start)
  grads, beyond, loss = summed
  if whole is not None:
    (loss, terms), _ = whole
    measured = policy_metrics.of_terms(terms, batch)
  scores, slope, direction, off = seen
  # The same batch at ratio 1: what the method intends on shared tokens.
  logp = jnp.where(batch.mask, lax.stop_gradient(scores.logp), 0)
  sampler = None if batch.logp_sampler is None else logp
  unmoved = batch._replace(logp_old=logp, logp_sampler=sampler)
  _, intended = _loss_and_cotangent(learner, scores, unmoved, loss_state)
  measured |= policy_metrics.of_prefixes(batch, -slope, -intended.logp)
  found = Gradient(grads, beyond, loss, scores.logp, direction, off)
  return found, measured
