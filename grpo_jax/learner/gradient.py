"""The gradient of one optimizer batch, in two stages.

The model gives log-probabilities by `jax.vjp`. The loss gives d loss / d logp,
an array of the small shape [P,G,T]. The pull-back of this array through the
model is the gradient of the parameters. So losses never see a model, and where
a transform couples the whole batch (`scope == 'batch'`), d loss / d logp is
computed for all of it before the first pull-back. The gradient is a sum over
micro-batches: it depends neither on their size nor on packing or sharding.

The balance of experts couples the whole batch in the same way: it is a product
of two sums over tokens, how often each expert was chosen and how probable it
was. The first has no gradient; so its total is found in a forward pass before
the others, and the second is one more output of the model to pull back from.
"""

import dataclasses
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from grpo_jax import losses
from grpo_jax import models
from grpo_jax.learner import micro_batches
from grpo_jax.learner import offload
from grpo_jax.learner import row_shards
from grpo_jax.learner import token_shards
from grpo_jax.learner import trust_region
from grpo_jax.learner.types import Gradient
from grpo_jax.learner.types import Learner
from grpo_jax.mesh import sharding
from grpo_jax.mesh import shards
from grpo_jax.models import LOGP
from grpo_jax.models import Scores
from grpo_jax.models import Wanted
from grpo_jax.models.layout import Layout

Array = jax.Array


def score_all(
  learner: Learner,
  frozen: Any,
  params: Any,
  layout: Layout,
  num_micro: Array,
  shape: tuple[int, ...],
  wanted: Wanted = LOGP,
) -> Scores:
  """`Scores` [P,G,T] of a stack of micro-batches, without a gradient.

  Args:
    learner: What stays the same from update to update.
    frozen: The parameters that no update changes, or None.
    params: Of the policy, or of the reference, which may lie on the host.
    layout: Micro-batches, [N, rows, ...].
    num_micro: i32[], how many of the N hold anything.
    shape: (P, G, T).
    wanted: What else is asked for; its ids are i32[P,G,T,K].

  Returns:
    [P,G,T] or [P,G,T,K] each; 0 for completions in no row.
  """
  at = shards.positions(learner.mesh, shape[2])

  def on_shard(join, trees, given, layout):
    num_micro, wanted = given

    def score(rows):
      own = token_shards.take(wanted, at, rows.completion, rows.inside)
      return learner.scoring.score(join(trees[0]), rows, own)

    return [], micro_batches.map_rows(score, layout, num_micro, shape), ()

  _, scores, _ = row_shards.run(
    on_shard,
    learner,
    frozen,
    [offload.to_device(params)],
    (num_micro, wanted),
    layout,
    given_at=(PartitionSpec(), at),
  )
  return scores


def score_teacher(
  learner: Learner,
  params: Any,
  layout: Layout,
  num_micro: Array,
  shape: tuple[int, ...],
) -> Scores:
  """`score_all` by the teacher.

  Args:
    learner: What stays the same from update to update; it has a teacher.
    params: All of the teacher's parameters, which may lie on the host.
    layout: Micro-batches, [N, rows, ...].
    num_micro: i32[], how many of the N hold anything.
    shape: (P, G, T).

  Returns:
    [P,G,T]; 0 for completions in no row. With the likeliest tokens, if the loss
    reads them.
  """
  teacher = learner.teacher
  assert teacher is not None  # else nothing reads these scores
  axes = teacher.logical_axes
  placement = dataclasses.replace(learner.placement, logical_axes=axes)
  scores = dataclasses.replace(
    learner, scoring=teacher.scoring, placement=placement, expert_balance=0.0
  )
  wanted = Wanted(likeliest=learner.method.top_tokens)
  return score_all(scores, None, params, layout, num_micro, shape, wanted)


def differentiate(
  learner: Learner,
  frozen: Any,
  params: Any,
  loss_state: Any,
  batch: losses.Batch,
  layout: Layout,
  num_micro: Array,
  everything: bool = False,
) -> Gradient:
  """The gradient of one optimizer batch, summed over its micro-batches.

  Rows in which no completion is `informative` are left out.

  Args:
    learner: What stays the same from update to update.
    frozen: The parameters that no update changes, or None.
    params: Those that the gradient is of.
    loss_state: Of the `TrainState`.
    batch: A prepared optimizer batch, [P,G,T].
    layout: Its micro-batches, [N, rows, ...].
    num_micro: i32[], how many of the N hold anything.
    everything: Whether all completions are scored.

  Returns:
    The gradient, and what `step_metrics` and `overshoot` measure afterwards.
    Completions that were left out have the log-probabilities of the old policy
    and the entropy 0.
  """
  # Where rows are coupled: d loss / d scores of the whole batch, and in which
  # direction clipped tokens leave, [P,G,T].
  coupled = None
  # By the method, or because tokens of one completion lie in several of them.
  if learner.method.scope == 'batch' or layout.first is not None:
    scores = score_all(
      learner,
      frozen,
      params,
      layout,
      num_micro,
      batch.mask.shape,
      learner.wanted(learner.top_ids(batch)),
    )
    (_, terms), slopes = _loss_and_slopes(learner, scores, batch, loss_state)
    coupled = slopes, trust_region.outward(terms, batch)
  needed = informative(learner, batch)
  kept = None if everything else needed  # the others are left out
  if kept is not None:
    num_micro = micro_batches.number_needed(
      layout, kept, sharding.row_shards(learner.mesh)
    )
  at = token_shards.specs(learner.mesh, batch)

  def on_shard(join, trees, given, layout):
    loss_state, batch, coupled, num_micro, kept = given
    if kept is not None:
      layout = micro_batches.needed_first(layout, kept)
    return _of_own(
      learner,
      join,
      trees[0],
      loss_state,
      batch,
      coupled,
      num_micro,
      layout,
      at,
      may_be_none=kept is not None,
    )

  (grads, *outward), of_tokens, statistics = row_shards.run(
    on_shard,
    learner,
    frozen,
    [params],
    (loss_state, batch, coupled, num_micro, kept),
    layout,
    number=1 + learner.optimizer.with_outward,
    given_at=(PartitionSpec(), at, at.mask, PartitionSpec(), PartitionSpec()),
  )
  scores, slope, disagreement = of_tokens
  if kept is not None and batch.logp_old is not None:
    logp = jnp.where(kept[..., None], scores.logp, batch.logp_old)
    scores = scores._replace(logp=logp)
  # The loss once more, of the whole batch. It costs next to nothing beside the
  # model, and saves merging the terms of the micro-batches for the metrics.
  loss, terms = learner.loss(scores, batch, loss_state)
  routed = None
  if statistics is not None:
    routed = models.Routed(statistics, disagreement)
  outward = outward[0] if outward else None
  return Gradient(
    grads, outward, loss, scores, terms, slope, routed, needed, num_micro
  )


def informative(learner: Learner, batch: losses.Batch) -> Array | None:
  """Which completions an update needs: those that have an advantage.

  Args:
    learner: What stays the same from update to update.
    batch: The prepared optimizer batch, [P,G,T].

  Returns:
    bool[P,G]; None if all are needed: because the method finds something in the
    others, or the balance of experts does, or the learner computes them.
  """
  method = learner.method
  is_zero = method.zero_without_advantage and method.scope == 'row'
  if learner.compute_all or learner.expert_balance or not is_zero:
    return None
  return jnp.any(batch.keep & (batch.advantage != 0), axis=-1)


def _of_own(
  learner,
  join,
  params,
  loss_state,
  batch,
  coupled,
  num_micro,
  layout,
  at,
  may_be_none,
):
  """The gradient that the rows at hand give, and what is measured of them.

  Args:
    learner: What stays the same from update to update.
    join: See `row_shards.run`.
    params: What a data shard has of those that the gradient is of.
    loss_state: Of the `TrainState`.
    batch: The prepared optimizer batch: what a data shard has of it.
    coupled: d loss / d scores of all rows and the directions of clipped tokens,
      [P,G,T]; None: they are found for each micro-batch by itself.
    num_micro: i32[], how many micro-batches hold anything.
    layout: Micro-batches, [N, rows, ...].
    at: What `token_shards.specs` tells of the batch.
    may_be_none: Whether `num_micro` may be 0.

  Returns:
    Trees like the parameters: the gradient, and that of the clipped tokens'
    outward log-ratios if the learner wants it. (`Scores`, d loss / d logp,
    disagreement of routers), [P,G,T]. Statistics of routers: sums over the
    tokens in these rows.
  """
  of_mass = None  # d loss / d the probabilities of experts
  if learner.expert_balance:
    statistics = shards.sum_over(
      _statistics(learner, join, params, batch, layout, num_micro, at)
    )
    balance = lambda mass: models.balance(statistics._replace(mass=mass))
    slope = jax.grad(balance)(statistics.mass)
    of_mass = learner.expert_balance * slope

  def micro_batch(k):
    rows = micro_batches.rows(layout, k)
    (scores, mass), pull_back, routed = jax.vjp(
      lambda p: _scored(learner, join(p), rows, batch, at),
      params,
      has_aux=True,
    )
    no_slope = jax.tree.map(jnp.zeros_like, mass)
    of_routers = no_slope if of_mass is None else of_mass
    if coupled is not None:
      slopes, direction = token_shards.take(
        coupled, at.mask, rows.completion, rows.inside
      )
    else:
      part = token_shards.take(batch, at, rows.completion)
      (_, terms), slopes = _loss_and_slopes(learner, scores, part, loss_state)
      direction = trust_region.outward(terms, part)
    grads = [pull_back((slopes, of_routers))[0]]
    if learner.optimizer.with_outward:
      back = lambda slopes: pull_back((slopes, no_slope))
      grads.append(_outward(back, slopes, direction, grads[0]))
    statistics, disagreement = routed or (None, None)
    sums = grads, statistics
    return sums, (scores, slopes.logp, disagreement), rows

  def add(k, total):
    summed, seen, rows = micro_batch(k)
    put = lambda whole, part: token_shards.put(
      whole, part, rows.completion, rows.inside
    )
    return (
      jax.tree.map(jnp.add, total[0], summed),
      jax.tree.map(put, total[1], seen),
    )

  # A loop needs its first carry: shapes and dtypes, found without computing.
  of_params, of_tokens, _ = jax.eval_shape(micro_batch, 0)

  def nothing():
    return (
      jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), of_params),
      jax.tree.map(
        lambda x: jnp.zeros(batch.mask.shape + x.shape[3:], x.dtype), of_tokens
      ),
    )

  sums, seen = micro_batches.over(layout, num_micro, add, nothing, may_be_none)
  grads, statistics = sums
  return grads, seen, statistics


def _scored(
  learner: Learner,
  params: Any,
  rows: Layout,
  batch: losses.Batch,
  at: losses.Batch,
):
  """What the model says of some rows: what has a gradient, and what has none.

  Args:
    learner: What stays the same from update to update.
    params: As `learner.scoring` takes them.
    rows: A micro-batch.
    batch: The optimizer batch, [P,G,T].
    at: What `token_shards.specs` tells of it.

  Returns:
    ((`Scores`, f32[L,E]), `Routed`): [R,C,T], and the probabilities that the
    routers of L layers gave to each of E experts; None for both without
    experts.
  """
  scoring = learner.scoring
  ids, counted, sampled = (
    token_shards.take(x, at.mask, rows.completion, rows.inside)
    for x in (
      learner.top_ids(batch),
      batch.mask,
      batch.extras.get('routing_sampler'),
    )
  )
  wanted = learner.wanted(ids)
  if scoring.score_routed is None:
    return (scoring.score(params, rows, wanted), None), None
  scores, routed = scoring.score_routed(params, rows, wanted, counted, sampled)
  return (scores, routed.statistics.mass), routed


def _statistics(learner, join, params, batch, layout, num_micro, at):
  """The sums over all tokens of what routers did; see `routing.Statistics`."""

  def counted(k):
    rows = micro_batches.rows(layout, k)
    routed = _scored(learner, join(params), rows, batch, at)[1]
    assert routed is not None
    return routed.statistics

  sums = jax.eval_shape(counted, 0)
  return micro_batches.over(
    layout,
    num_micro,
    lambda k, total: jax.tree.map(jnp.add, total, counted(k)),
    lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), sums),
  )


def slope_at_ratio_one(
  learner: Learner, found: Gradient, batch: losses.Batch, loss_state: Any
) -> Array:
  """d loss / d logp, f32[P,G,T], if the policy had not moved.

  Args:
    learner: What stays the same from update to update.
    found: The gradient of the batch; its log-probabilities become those of the
      old policy and of the sampler. A penalty keeps its true log-ratio to the
      reference.
    batch: The prepared optimizer batch, [P,G,T].
    loss_state: Of the `TrainState`.
  """
  # Every field of a batch is 0 outside the mask, and sums over completions rely
  # on that; scores are not.
  logp = jnp.where(batch.mask, found.scores.logp, 0)
  sampler = None if batch.logp_sampler is None else logp
  unmoved = batch._replace(logp_old=logp, logp_sampler=sampler)
  (_, _), slopes = _loss_and_slopes(learner, found.scores, unmoved, loss_state)
  return slopes.logp


def _loss_and_slopes(learner, scores, batch, loss_state):
  """((loss, terms), d loss / d scores) of any arrangement of completions."""

  loss = lambda scores: learner.loss(scores, batch, loss_state)
  return jax.value_and_grad(loss, has_aux=True)(scores)


def _outward(pull_back, slopes, direction, grads):
  """The gradient of `sum(direction * logp)`.

  It takes no backward pass where no token is clipped.
  """
  outward = jax.tree.map(jnp.zeros_like, slopes)._replace(logp=direction)
  # All shards take it, or none: it gathers weights.
  some = jnp.any(direction != 0).astype(jnp.int32)
  return lax.cond(
    shards.sum_over(some) > 0,
    lambda: pull_back(outward)[0],
    lambda: jax.tree.map(jnp.zeros_like, grads),
  )
