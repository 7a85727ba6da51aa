"""The learner: one optimizer step, and what else changes its state.

Everything here is pure; `compiled` gives the jitted, donated versions.
"""

from collections.abc import Callable
import dataclasses
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from grpo_jax import gradient
from grpo_jax import losses
from grpo_jax import metrics
from grpo_jax import optim
from grpo_jax import overshoot
from grpo_jax import policy_metrics
from grpo_jax import sharding
from grpo_jax.layout import Layout

Array = jax.Array


class TrainState(NamedTuple):
  """What an optimizer step changes."""

  params: Any  # float32 master weights
  opt_state: Any
  loss_state: Any  # of the method; moved once per rollout
  reference: Any  # parameters, like params, if the method has one, else None
  step: Array  # i32[], optimizer steps taken
  nonfinite: Array  # i32[], steps not taken: the gradient was not finite
  idle: Array  # i32[], steps not taken: every advantage was 0


@dataclasses.dataclass(frozen=True)
class Learner:
  """The static part of training.

  Attributes:
    score: `(params, layout, with_entropy) -> Scores`, of rows of a layout.
    method: A chain of loss transforms.
    optimizer: An optax transformation; its `update` also gets
      `first_of_rollout` bool[], `clipped_share` f32[], `advantage_scale` f32[],
      the root mean square of the trained tokens' advantages, and `outward`.
    on_zero_advantage: A batch whose advantages are all 0 is a `'skip'`, which
      leaves parameters and moments as they are, or a `'step'` like any other,
      in which momentum, weight decay and penalties still move the parameters.
    mesh: From `sharding.make_mesh`.
    logical_axes: The model's; see `sharding.of_params`.
    with_outward: The optimizer wants `outward`, the gradient of the clipped
      tokens' outward log-ratios, which takes a backward pass of its own.
    score_forward: `score` for derivatives in forward mode, where overshoot is
      measured.
    coast_steps: Steps with zero gradient that overshoot is predicted for.
    records: The optimizer is made by `optim.record_adam_moments`.
  """

  score: Callable[..., Any]
  method: losses.LossTransform
  optimizer: optax.GradientTransformation
  on_zero_advantage: str
  mesh: jax.sharding.Mesh
  logical_axes: Callable[..., Any]
  with_outward: bool = False
  score_forward: Callable[..., Any] | None = None
  coast_steps: int = 1
  records: bool = False

  def __post_init__(self):
    if self.on_zero_advantage not in ('skip', 'step'):
      raise ValueError(
        f'on_zero_advantage={self.on_zero_advantage!r} is neither '
        "'skip' nor 'step'; set config.learner.on_zero_advantage to one."
      )

  @property
  def with_entropy(self) -> bool:
    """Whether the loss reads the entropy."""
    return 'entropy' in self.method.requires

  @property
  def with_reference(self) -> bool:
    """Whether the loss reads a reference policy."""
    return 'logp_ref' in self.method.requires


def init(learner: Learner, params: Any) -> TrainState:
  """A fresh state around given parameters.

  Args:
    learner: See `Learner`.
    params: float32 parameters.

  Returns:
    A `TrainState` with zero moments and counters, and a copy of the parameters
    as the reference if the method has one.
  """
  zero = jnp.zeros((), jnp.int32)
  return TrainState(
    params,
    learner.optimizer.init(params),
    learner.method.init(),
    jax.tree.map(jnp.copy, params) if learner.with_reference else None,
    step=zero,
    nonfinite=zero,
    idle=zero,
  )


def state_sharding(learner: Learner, params: Any) -> TrainState:
  """Where each array of the state lies: moments beside their parameters."""
  everywhere = sharding.replicated(learner.mesh)
  of_params = sharding.of_params(learner.mesh, params, learner.logical_axes)
  abstract = jax.eval_shape(lambda p: init(learner, p), params)
  of_moments = optax.tree.map_params(
    learner.optimizer,
    lambda _, place: place,
    abstract.opt_state,
    of_params,
    transform_non_params=lambda _: everywhere,
  )
  return jax.tree.map(lambda _: everywhere, abstract)._replace(
    params=of_params,
    opt_state=of_moments,
    reference=of_params if learner.with_reference else None,
  )


def credit(
  learner: Learner, batch: losses.Batch, loss_state: Any
) -> tuple[losses.Batch, Any, dict[str, metrics.Metric]]:
  """Advantages of a whole rollout; once per rollout.

  Args:
    learner: See `Learner`.
    batch: The rollout, [P,G,T].
    loss_state: Of the `TrainState`.

  Returns:
    The credited batch, the new loss state, and metrics of the rollout.
  """
  given = losses.check_batch(batch)  # with the rewards as they came
  batch, loss_state = losses.credit(learner.method, batch, loss_state)
  measured = policy_metrics.of_credit(given, batch)
  extras = {
    name: value
    for name, value in batch.extras.items()
    if not name.startswith(losses.CREDIT_METRIC)
  }
  return batch._replace(extras=extras), loss_state, measured


def train_step(
  learner: Learner,
  state: TrainState,
  batch: losses.Batch,
  prompts: Array,
  layout: Layout,
  num_micro: Array,
  rollout_start: Array,
  watch: bool = False,
) -> tuple[TrainState, dict[str, metrics.Metric]]:
  """One optimizer step.

  Args:
    learner: See `Learner`.
    state: See `TrainState`.
    batch: The credited rollout, [P,G,T].
    prompts: i32[P'], the prompts of this optimizer batch.
    layout: The micro-batches of these, [N, rows, ...]; its completions are
      numbered p' * G + g within the optimizer batch.
    num_micro: i32[], how many of the N hold anything, at least 1.
    rollout_start: i32[], `state.step` before the rollout's first update; the
      optimizer's `first_of_rollout` says whether there has been one.
    watch: Whether to measure overshoot too, see `overshoot.of_step`; static.

  Returns:
    The new state and metrics. A step whose gradient is not finite changes
    nothing but a counter; so does one without advantages, if that is to be
    skipped (its penalties then have no effect either).
  """
  batch = jax.tree.map(lambda x: x[prompts], batch)
  if 'updates_done' in learner.method.requires:
    done = jnp.full(batch.mask.shape, state.step - rollout_start, jnp.float32)
    batch = batch._replace(extras={**batch.extras, 'updates_done': done})
  batch = losses.prepare(learner.method, batch, state.loss_state)
  found, measured = gradient.of_batch(
    learner, state.params, state.loss_state, batch, layout, num_micro
  )
  grad_norm = optax.tree.norm(found.grads)
  finite = jnp.isfinite(grad_norm)
  idle = ~jnp.any(batch.keep & (batch.advantage != 0))
  if learner.on_zero_advantage == 'step':
    idle = jnp.zeros((), bool)
  go = finite & ~idle
  first = state.step == rollout_start
  for name in measured:
    if name.startswith('sampler_gap'):  # drift is not the sampler's fault
      measured[name] = metrics.only_if(first, measured[name])
  extra = _extra_arguments(learner, found, batch, first)
  updates, opt_state = optax.with_extra_args_support(learner.optimizer).update(
    found.grads, state.opt_state, state.params, **extra
  )
  params = optax.apply_updates(state.params, updates)
  if learner.records:
    moments = optim.moment_metrics(opt_state)
    measured |= {k: metrics.masked_mean(v, go) for k, v in moments.items()}
  if watch:
    tangents = _tangents(learner, state, opt_state, updates, extra)
    given = batch, state.loss_state, layout, num_micro
    watched = overshoot.of_step(
      learner, state.params, params, tangents, found, *given
    )
    measured |= {k: metrics.only_if(go, v) for k, v in watched.items()}

  def choose(new, old):
    return jax.tree.map(lambda n, o: jnp.where(go, n, o), new, old)

  new_state = TrainState(
    choose(params, state.params),
    choose(opt_state, state.opt_state),
    state.loss_state,
    state.reference,
    step=state.step + go,
    nonfinite=state.nonfinite + ~finite,
    idle=state.idle + (finite & idle),
  )
  measured |= _of_update(new_state, found.loss, grad_norm, updates, finite, go)
  return new_state, measured


def _of_update(state, loss, grad_norm, updates, finite, go):
  """Metrics of one optimizer step, taken or not."""
  one = jnp.ones((), jnp.float32)
  return {
    'loss': metrics.masked_mean(loss, finite),
    'grad_norm': metrics.masked_mean(grad_norm, finite),
    'update_norm': metrics.Mean(
      jnp.where(go, optax.tree.norm(updates), 0), one
    ),
    'param_norm': metrics.Mean(optax.tree.norm(state.params), one),
    # Counters of the state, which only grow.
    'nonfinite_steps': metrics.Max(state.nonfinite.astype(jnp.float32)),
    'idle_steps': metrics.Max(state.idle.astype(jnp.float32)),
  }


def _extra_arguments(learner, found, batch, first) -> dict[str, Any]:
  """What the optimizer is told besides gradient, state and parameters."""
  clipped = jnp.sum(found.clipped & batch.keep, dtype=jnp.float32)
  kept = jnp.maximum(jnp.sum(batch.keep, dtype=jnp.float32), 1)
  square = jnp.sum(jnp.where(batch.keep, jnp.square(batch.advantage), 0))
  extra = {
    'first_of_rollout': first,
    'clipped_share': clipped / kept,
    'advantage_scale': jnp.sqrt(square / kept),
  }
  return extra | ({'outward': found.outward} if learner.with_outward else {})


def _tangents(learner, state, opt_state, updates, extra) -> dict[str, Any]:
  """Motions of the parameters, by what moves them; see `overshoot.of_step`."""
  parts = optim.split_update(
    learner.optimizer, state.opt_state, opt_state, updates, state.params,
    **extra,
  )  # fmt: skip
  coasted = optim.coast(
    learner.optimizer,
    state.opt_state,
    state.params,
    learner.coast_steps,
    **extra,
  )
  return {
    'carried': parts.carried,
    'fresh': parts.fresh,
    'predicted': coasted.moved,
  }


def rollout_end(
  learner: Learner,
  params: Any,
  batch: losses.Batch,
  loss_state: Any,
  prompts: Array,
  layout: Layout,
  num_micro: Array,
) -> dict[str, metrics.Metric]:
  """Where a rollout's last update has left its tokens.

  Args:
    learner: See `Learner`.
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
    learner, params, layout, num_micro, batch.mask.shape, learner.with_entropy
  )
  ends = overshoot.ends(learner, scores, batch, loss_state)
  kl = policy_metrics.kl_old(scores.logp, batch)
  return {
    'kl_rollout': kl['kl_old_k3'],
    'rollout_clipped': ends['ends_clipped'],
    'rollout_outside': ends['ends_outside'],
  }


def refresh(learner: Learner, state: TrainState, weight: Array) -> TrainState:
  """Moves the reference to the policy.

  Args:
    learner: See `Learner`.
    state: With a reference.
    weight: f32[], of the policy in the average; 1 makes a copy of it.

  Returns:
    The state with `(1 - weight) * reference + weight * params`.
  """
  del learner
  moved = jax.tree.map(
    lambda old, new: jnp.where(weight == 1, new, old + weight * (new - old)),
    state.reference,
    state.params,
  )
  return state._replace(reference=moved)


class Compiled(NamedTuple):
  """The learner's functions, jitted on its mesh."""

  abstract: TrainState  # shapes, dtypes and shardings, for a restore
  init: Callable[..., TrainState]
  refresh: Callable[..., TrainState]
  credit: Callable[..., Any]
  score: Callable[..., Any]
  train_step: Callable[..., Any]
  rollout_end: Callable[..., Any]


def compiled(learner: Learner, params: Any) -> Compiled:
  """Jits the functions of this module for one learner.

  Args:
    learner: See `Learner`.
    params: Parameters, or their shapes.

  Returns:
    `init(params)`, `credit(batch, loss_state)`, `score(params, layout,
    num_micro, shape, with_entropy)`, `refresh(state, weight)` and
    `train_step(state, ..., watch)`.
    The parameters given to `init` and the state given to `refresh` and
    `train_step` are donated: do not use them again.
  """
  place = state_sharding(learner, params)
  everywhere = sharding.replicated(learner.mesh)

  def jit(function, **options):
    def traced(*args):
      with sharding.use(learner.mesh):
        return function(learner, *args)

    traced.__name__ = function.__name__  # what logs and profiles say
    compiler_options = sharding.COMPILER_OPTIONS
    return jax.jit(traced, compiler_options=compiler_options, **options)

  abstract = jax.eval_shape(lambda p: init(learner, p), params)
  return Compiled(
    abstract=jax.tree.map(
      lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at),
      abstract,
      place,
    ),
    init=jit(init, donate_argnums=0, out_shardings=place),
    refresh=jit(refresh, donate_argnums=0, out_shardings=place),
    credit=jit(credit, out_shardings=everywhere),
    score=jit(
      gradient.score_all, static_argnums=(3, 4), out_shardings=everywhere
    ),
    train_step=jit(
      train_step,
      donate_argnums=0,
      static_argnums=6,
      out_shardings=(place, everywhere),
    ),
    rollout_end=jit(rollout_end, out_shardings=everywhere),
  )
