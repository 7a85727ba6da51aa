"""One update, and what else changes the state of training.

The functions are pure. `compiled` jits them and donates the state.
"""

import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import optax

from grpo_jax import losses
from grpo_jax import optim
from grpo_jax.learner import gradient
from grpo_jax.learner import metrics
from grpo_jax.learner import offload
from grpo_jax.learner import overshoot
from grpo_jax.learner import step_metrics
from grpo_jax.learner import token_shards
from grpo_jax.learner import trust_region
from grpo_jax.learner.types import Learner
from grpo_jax.learner.types import TrainState
from grpo_jax.learner.types import Update
from grpo_jax.mesh import sharding
from grpo_jax.models.layout import Layout

Array = jax.Array
Measured = dict[str, metrics.Metric]


def init(learner: Learner, params: Any) -> TrainState:
  """A fresh state around given parameters.

  Args:
    learner: What stays the same from update to update.
    params: float32 parameters.

  Returns:
    A `TrainState` with zero moments and counters, and a copy of the parameters
    as the reference if the method has one.
  """
  zero = jnp.zeros((), jnp.int32)
  return TrainState(
    params,
    learner.optimizer.transform.init(params),
    learner.method.init(),
    # A copy, because updates donate the state, and a buffer only once.
    jax.tree.map(jnp.copy, params) if learner.with_reference else None,
    step=zero,
    nonfinite=zero,
    idle=zero,
  )


def state_sharding(learner: Learner, params: Any) -> TrainState:
  """Where each array of the state lies: moments beside their parameters.

  What the learner offloads lies in the memory of the host, split in the same
  way.
  """
  everywhere = sharding.replicated(learner.mesh)
  place = learner.placement
  of_params = sharding.param_shardings(place.mesh, params, place.logical_axes)
  away = offload.on_host(of_params)
  abstract = jax.eval_shape(lambda p: init(learner, p), params)
  masked = lambda node: isinstance(node, optax.MaskedNode)

  def beside(kept, path, param):
    if masked(kept):
      return kept
    names = place.logical_axes(path, param.ndim)
    at = sharding.beside(place.mesh, kept.shape, names)
    return offload.on_host(at) if place.offload_moments else at

  # optax tells apart the trees in its state that are like the parameters. Some
  # have no array for some parameters, or one of another shape.
  of_moments = optax.tree.map_params(
    learner.optimizer.transform,
    beside,
    abstract.opt_state,
    jax.tree_util.tree_map_with_path(
      lambda path, _: sharding.path_names(path), params
    ),
    params,
    transform_non_params=lambda _: everywhere,
    is_leaf=masked,
  )
  of_reference = away if place.offload_reference else of_params
  return jax.tree.map(lambda _: everywhere, abstract)._replace(
    params=of_params,
    opt_state=of_moments,
    reference=of_reference if learner.with_reference else None,
  )


def credit(
  learner: Learner, batch: losses.Batch, loss_state: Any
) -> tuple[losses.Batch, Any, Measured]:
  """Advantages of a whole rollout; once per rollout.

  Args:
    learner: What stays the same from update to update.
    batch: The rollout, [P,G,T].
    loss_state: Of the `TrainState`.

  Returns:
    The credited batch, the new loss state, and metrics of the rollout.
  """
  # Measured before credit shapes the rewards.
  given = losses.check_batch(batch)
  uniform = losses.uniform_groups(given)
  batch, new_state = losses.credit(learner.method, batch, loss_state)
  # A controller that has followed an infinite KL would never come back.
  sound = _stays_finite(new_state, loss_state)
  loss_state = jax.tree.map(
    lambda new, old: jnp.where(sound, new, old), new_state, loss_state
  )
  measured = step_metrics.metrics_of_credit(
    given, batch, uniform, learner.measuring.ages
  )
  # They have been measured, so updates need not carry them.
  extras = {
    name: value
    for name, value in batch.extras.items()
    if not name.startswith(losses.CREDIT_METRIC)
  }
  batch = token_shards.constrain(batch._replace(extras=extras))
  return batch, loss_state, measured


def train_step(
  learner: Learner,
  frozen: Any,
  state: TrainState,
  batch: losses.Batch,
  prompts: Array,
  layout: Layout,
  num_micro: Array,
  rollout_start: Array,
  number: Array,
  watch: bool = False,
) -> tuple[TrainState, Measured]:
  """One update: a gradient, a step of the optimizer, and metrics of both.

  Args:
    learner: What stays the same from update to update.
    frozen: The parameters that no update changes, or None.
    state: What the update changes.
    batch: The credited rollout, [P,G,T].
    prompts: i32[P'], the prompts of this optimizer batch.
    layout: The micro-batches of these, [N, rows, ...]; its completions are
      numbered p' * G + g within the optimizer batch.
    num_micro: i32[], how many of the N hold anything, at least 1.
    rollout_start: i32[], `state.step` before the rollout's first update.
    number: i32[], of this update among those of the run, from 0, whether they
      were taken or not: where the optimizer's schedules are.
    watch: Whether to measure overshoot too, see `overshoot.measure`; static.

  Returns:
    The new state and metrics. An update changes nothing but counters if its
    loss or its gradient is not finite, or if it would make an entry of the
    parameters or of the optimizer's state infinite or NaN. The same holds for
    an update whose advantages are all 0, if `on_zero_advantage` is `'skip'`;
    penalties then have no effect.
  """
  batch = _prepared(learner, state, batch, prompts, rollout_start)
  state = state._replace(opt_state=optim.set_schedules(state.opt_state, number))
  found = gradient.differentiate(
    learner,
    frozen,
    state.params,
    state.loss_state,
    batch,
    layout,
    num_micro,
    everything=watch,  # overshoot is of all tokens
  )
  first = state.step == rollout_start
  update = _optimizer_step(learner, state, found, batch, first, watch)
  new_state = _taken_over(state, update)
  measured = step_metrics.metrics_of_update(
    learner, new_state, found, update, batch, num_micro, first
  )
  learning_rate = learner.measuring.learning_rate
  if learning_rate is not None:
    measured |= step_metrics.metrics_of_schedule(learning_rate(number))
  if watch:
    measured |= overshoot.measure(
      learner, frozen, state, found, update, batch, layout, num_micro
    )
  return new_state, measured


def _prepared(learner, state, batch, prompts, rollout_start) -> losses.Batch:
  """Some prompts of a rollout as an optimizer batch, with its weights."""
  # Taken inside the program: `prompts` is data, so all optimizer batches share
  # one compilation.
  batch = jax.tree.map(lambda x: x[prompts], batch)
  if 'updates_done' in learner.method.requires:
    done = jnp.full(batch.mask.shape, state.step - rollout_start, jnp.float32)
    batch = batch._replace(extras={**batch.extras, 'updates_done': done})
  return losses.prepare(learner.method, batch, state.loss_state)


def _optimizer_step(learner, state, found, batch, first, watch) -> Update:
  """What the optimizer makes of a gradient; nothing, if it is refused."""
  off = trust_region.clipped(found.terms) & batch.keep
  # At least 1, because an optimizer batch may have no token to train.
  kept = jnp.maximum(jnp.sum(batch.keep, dtype=jnp.float32), 1)
  square = jnp.sum(jnp.where(batch.keep, jnp.square(batch.advantage), 0))
  extra = {
    'first_of_rollout': first,
    'clipped_share': jnp.sum(off, dtype=jnp.float32) / kept,
    'advantage_scale': jnp.sqrt(square / kept),
  }
  if learner.optimizer.with_outward:
    extra['outward'] = found.outward
  idle = ~jnp.any(batch.keep & (batch.advantage != 0))
  idle &= learner.optimizer.on_zero_advantage == 'skip'

  # Moments that lie on the host are brought to the device inside the branches
  # below. So they are there for the optimizer alone, and the compiler may let
  # them pass one after the other; what a branch is given is there at once.
  @jax.jit  # traced once
  def taken():
    before = offload.to_device(state.opt_state)
    # Most optax transformations refuse arguments that they do not know.
    optimizer = optax.with_extra_args_support(learner.optimizer.transform)
    updates, opt_state = optimizer.update(
      found.grads, before, state.params, **extra
    )
    params = optax.apply_updates(state.params, updates)
    made = params, opt_state, updates
    # An optimizer may compute in another dtype than it was given.
    given = state.params, before, state.params
    return jax.tree.map(lambda x, like: jnp.asarray(x, like.dtype), made, given)

  def look():
    before = offload.to_device(state.opt_state)
    return _stays_finite(taken()[:2], (state.params, before))

  def take():
    params, opt_state, updates = taken()
    opt_state = offload.back(opt_state, state.opt_state)
    norm = optax.tree.norm(updates)
    # As large as the parameters, so they are not kept where nothing reads them.
    return params, opt_state, updates if watch else None, norm

  def refuse():
    nothing = jax.tree.map(jnp.zeros_like, state.params) if watch else None
    return state.params, state.opt_state, nothing, jnp.zeros(())

  # One number that is finite tells that no entry of the gradient is inf or NaN.
  grad_norm = optax.tree.norm(found.grads)
  sound = {
    'loss': jnp.isfinite(found.loss),
    'gradient': jnp.isfinite(grad_norm),
  }
  # The update is computed twice: to look at it, and to take it. A choice
  # between new and old arrays would hold both at the same time, and copy a
  # donated state first.
  sound['update'] = lax.cond(
    sound['loss'] & sound['gradient'] & ~idle,
    look,
    lambda: jnp.array(True),
  )
  finite = functools.reduce(jnp.logical_and, sound.values())
  params, opt_state, updates, norm = lax.cond(finite & ~idle, take, refuse)
  return Update(
    params, opt_state, updates, norm, extra, grad_norm, sound, finite, idle
  )


def _stays_finite(new: Any, old: Any) -> Array:
  """Whether every entry that was finite still is, bool[].

  An optimizer may begin with infinity, as the best loss so far.
  """
  # Arrays of one shape together, so that XLA reads each of them once: a moment
  # is needed for its own new value, and for that of its parameter.
  kept: dict[Any, Array] = {}
  pairs = zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True)
  for after, before in pairs:
    if jnp.issubdtype(after.dtype, jnp.inexact):
      fine = jnp.isfinite(after) | ~jnp.isfinite(before)
      place = after.shape, jax.typeof(after).sharding
      kept[place] = kept[place] & fine if place in kept else fine
  whole = [jnp.all(fine) for fine in kept.values()]
  return functools.reduce(jnp.logical_and, whole, jnp.array(True))


def _taken_over(state: TrainState, update: Update) -> TrainState:
  """The state after an update."""
  return TrainState(
    update.params,
    update.opt_state,
    state.loss_state,
    state.reference,
    step=state.step + update.accepted,
    nonfinite=state.nonfinite + ~update.finite,
    idle=state.idle + (update.finite & update.idle),
  )


def rollout_end(
  learner: Learner,
  frozen: Any,
  params: Any,
  batch: losses.Batch,
  loss_state: Any,
  prompts: Array,
  layout: Layout,
  num_micro: Array,
) -> Measured:
  """Metrics of a rollout's tokens under the policy after the last update.

  Args:
    learner: What stays the same from update to update.
    frozen: The parameters that no update changes, or None.
    params: After the last update.
    batch: The credited rollout, [P,G,T], with `logp_old`.
    loss_state: Of the `TrainState`.
    prompts: i32[P'], some of its prompts.
    layout: Micro-batches of these, [N, rows, ...].
    num_micro: i32[], how many of the N hold anything.

  Returns:
    Over all trained tokens `kl_rollout`, an estimate of KL(old || policy) per
    token (k3, nats), and `rollout_clipped` and `rollout_outside`, the shares
    that are clipped and outside their range on either side.
  """
  batch = jax.tree.map(lambda x: x[prompts], batch)
  batch = losses.prepare(learner.method, batch, loss_state)
  scores = gradient.score_all(
    learner,
    frozen,
    params,
    layout,
    num_micro,
    batch.mask.shape,
    learner.wanted(learner.top_ids(batch)),
  )
  ends = overshoot.ends(learner, scores, batch, loss_state)
  kl = step_metrics.kl_old(scores.logp, batch)
  return {
    'kl_rollout': kl['kl_old_k3'],
    'rollout_clipped': ends['ends_clipped'],
    'rollout_outside': ends['ends_outside'],
  }


def refresh(learner: Learner, state: TrainState, weight: Array) -> TrainState:
  """Moves the reference to the policy.

  Args:
    learner: What stays the same from update to update.
    state: With a reference.
    weight: f32[], of the policy in the average; 1 makes a copy of it.

  Returns:
    The state with `(1 - weight) * reference + weight * params`.
  """
  del learner  # `compiled.jit_functions` passes it to every function
  before = offload.to_device(state.reference)
  reference = optax.incremental_update(state.params, before, weight)
  return state._replace(reference=reference)
