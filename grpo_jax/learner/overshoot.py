"""Overshoot: how far an update moves clipped tokens, and what moves them.

A token that the trust region has switched off has no gradient. Its probability
still changes: momentum carries the parameters on, and other tokens change the
parameters that they share with it. The unit is nats of log-ratio. It is counted
outward, which is further away from the policy that drew the rollout.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from grpo_jax import losses
from grpo_jax import optim
from grpo_jax.learner import metrics
from grpo_jax.learner import micro_batches
from grpo_jax.learner import offload
from grpo_jax.learner import row_shards
from grpo_jax.learner import token_shards
from grpo_jax.learner import trust_region
from grpo_jax.learner.types import Gradient
from grpo_jax.learner.types import Learner
from grpo_jax.learner.types import TrainState
from grpo_jax.learner.types import Update
from grpo_jax.mesh import shards
from grpo_jax.models import LOGP
from grpo_jax.models import Scores
from grpo_jax.models.layout import Layout

Array = jax.Array
Measured = dict[str, metrics.Metric]


def measure(
  learner: Learner,
  frozen: Any,
  state: TrainState,
  found: Gradient,
  update: Update,
  batch: losses.Batch,
  layout: Layout,
  num_micro: Array,
) -> Measured:
  """What an update does to the tokens that were clipped before it.

  Each part of the parameters' motion is multiplied by the derivative of the
  log-probabilities at the old parameters (in forward mode). Then the tokens are
  scored at the new parameters. With three parts this costs about seven forward
  passes; the update itself costs three. The parts take memory, each as much as
  the parameters; no activations are kept.

  Args:
    learner: What stays the same from update to update.
    frozen: The parameters that no update changes, or None.
    state: Before the update.
    found: The gradient of the update.
    update: What the optimizer did.
    batch: The prepared optimizer batch, [P,G,T].
    layout: Its micro-batches, [N, rows, ...].
    num_micro: i32[], how many of the N hold anything.

  Returns:
    Means over the clipped tokens, nats:

    - `overshoot`: outward motion as it happened, scored again after the update;
    - `overshoot_positive`: its positive part, so that tokens which move back
      inward count as 0;
    - `overshoot_carried`, `overshoot_fresh`, `overshoot_predicted`: outward
      motion along the part of the update that earlier gradients carry, along
      the part of this gradient, and along what the optimizer would do in
      `coast_steps` steps without any gradient; to first order.

    And over all trained tokens `ends_clipped` and `ends_outside`: the shares
    that are, after the update, clipped, and outside on either side. (Tokens
    without advantage have no side, and count as inside. A range that changes
    from update to update is taken as it is at the first.)
  """
  shape = batch.mask.shape
  at = shards.positions(learner.mesh, shape[2])

  tangents = _tangents(learner, state, found.grads, update)

  def on_shard(join, trees, given, layout):
    (old, new, *parts), (num_micro, top_ids) = trees, given
    # `score` may use attention with a backward pass of its own, which `jax.jvp`
    # cannot differentiate.
    scoring = learner.scoring
    score_forward = scoring.score_forward or scoring.score

    # Forward mode gives the motion of every token in one pass. A backward pass
    # gives the derivative of a single number.
    def along(rows):
      def score(p):
        return score_forward(join(p), rows, LOGP).logp

      return {
        name: jax.jvp(score, (old,), (tangent,))[1]
        for name, tangent in zip(tangents, parts, strict=True)
      }

    def after(rows):
      ids = token_shards.take(top_ids, at, rows.completion, rows.inside)
      return scoring.score(join(new), rows, learner.wanted(ids))

    of_tokens = (
      micro_batches.map_rows(along, layout, num_micro, shape),
      micro_batches.map_rows(after, layout, num_micro, shape),
    )
    return [], of_tokens, ()

  trees = [state.params, update.params, *tangents.values()]
  _, (slopes, scores), _ = row_shards.run(
    on_shard,
    learner,
    frozen,
    trees,
    (num_micro, learner.top_ids(batch)),
    layout,
    given_at=(PartitionSpec(), at),
  )
  # Of the tokens that were clipped before the update, not of those that are
  # clipped after it.
  direction = trust_region.outward(found.terms, batch)
  chosen = direction != 0
  motion = direction * (scores.logp - found.scores.logp)
  measured: Measured = {
    'overshoot': metrics.masked_mean(motion, chosen),
    'overshoot_positive': metrics.masked_mean(jnp.maximum(motion, 0), chosen),
  }
  for name, slope in slopes.items():
    measured[f'overshoot_{name}'] = metrics.masked_mean(
      direction * slope, chosen
    )
  measured |= ends(learner, scores, batch, state.loss_state)
  # The parameters do not move by an update that is not accepted.
  return {
    name: metrics.only_if(update.accepted, value)
    for name, value in measured.items()
  }


def _tangents(
  learner: Learner, state: TrainState, grads: Any, update: Update
) -> dict[str, Any]:
  """Motions of the parameters, by what moves them; see `measure`."""
  before, after = offload.to_device((state.opt_state, update.opt_state))
  # Brakes read the extra arguments, in the split and on the coast too.
  parts = optim.split_update(
    learner.optimizer.transform,
    before,
    after,
    update.updates,
    state.params,
    gradient=grads,
    **update.extra,
  )
  coasted = optim.coast(
    learner.optimizer.transform,
    before,
    state.params,
    learner.measuring.coast_steps,
    **update.extra,
  )
  return {
    'carried': parts.carried,
    'fresh': parts.fresh,
    'predicted': coasted.moved,
  }


def ends(
  learner: Learner, scores: Scores, batch: losses.Batch, loss_state: Any
) -> Measured:
  """`ends_clipped` and `ends_outside`; see `measure`."""
  # One range for all updates of a rollout, or their shares could not be
  # compared; see `measure`.
  if 'updates_done' in batch.extras:
    none = jnp.zeros(batch.mask.shape, jnp.float32)
    extras = {**batch.extras, 'updates_done': none}
    batch = batch._replace(extras=extras)
  _, terms = learner.loss(scores, batch, loss_state)
  return {
    'ends_clipped': metrics.masked_mean(
      trust_region.clipped(terms), batch.keep
    ),
    'ends_outside': metrics.masked_mean(
      trust_region.outside(terms), batch.keep
    ),
  }
