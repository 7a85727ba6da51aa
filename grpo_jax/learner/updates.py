"""All updates of one rollout, as a function of values.

`credit_rollout` supplies what the method reads of policies and finds the
advantages; `take_updates` takes every update. Between the two, instruments see
the state, which the updates donate. `step.train_step` is one update.
"""

from collections.abc import Iterator
import dataclasses
import functools
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np

from grpo_jax import losses
from grpo_jax.episodes.types import Rollout
from grpo_jax.learner import metrics
from grpo_jax.learner import policies
from grpo_jax.learner import token_shards
from grpo_jax.learner.compiled import Compiled
from grpo_jax.learner.layouts import Layouts
from grpo_jax.learner.types import TrainState
from grpo_jax.learner.types import UpdateSpec
from grpo_jax.mesh import random_keys
from grpo_jax.models import lora
from grpo_jax.models.layout import LayoutSpec

Array = jax.Array
Measured = dict[str, metrics.Metric]


@dataclasses.dataclass(frozen=True)
class Updater:
  """What turns rollouts into updates; the same for all rollouts of a run.

  Attributes:
    compiled: The functions of an update.
    spec: How the updates of a rollout are taken.
    layout: How completions are laid out, before the first rollout has decided
      what it leaves open.
    frozen: Parameters of the model that no update changes, such as the weights
      beside adapters; None: there are none. Where programs are only lowered,
      shapes, dtypes and shardings will do.
    teacher: Parameters of the teacher, likewise; None: there is none.
  """

  compiled: Compiled
  spec: UpdateSpec
  layout: LayoutSpec
  frozen: Any
  teacher: Any = None

  def joined(self, params: Any) -> Any:
    """The trained parameters and the frozen ones, as the model takes them."""
    return lora.join(params, self.frozen)


class Credited(NamedTuple):
  """A rollout with its advantages, before its first update."""

  step: int  # number of the rollout
  batch: losses.Batch  # [P,G,T], on the mesh, 0 for invalid completions
  logp_old: ArrayLike | None  # f32[P,G,T], of invalid completions too
  loss_state: Any  # after the rollout's credit
  measured: Measured  # of the rollout
  layouts: Layouts
  scorings: int  # forward passes over the rollout, by the policy or reference

  @property
  def rollout(self) -> Rollout:
    """What was drawn."""
    return self.layouts.rollout


def credit_rollout(
  updater: Updater,
  layout: LayoutSpec,
  state: TrainState,
  rollout: Rollout,
  step: int,
) -> Credited:
  """Supplies what the method reads of policies, and finds the advantages.

  Args:
    updater: What turns rollouts into updates.
    layout: How completions are laid out. What it leaves open, this rollout
      decides.
    state: Before the first update of the rollout.
    rollout: See `episodes/types.py`. What other processes know of it has been
      gathered on the devices.
    step: Number of the rollout.
  """
  compiled, spec = updater.compiled, updater.spec
  layouts = Layouts(compiled, rollout, layout, spec.batches)
  score = functools.partial(policies.score, layouts, updater.frozen)
  batch, scorings = policies.with_policies(
    compiled.learner,
    spec,
    state,
    rollout,
    step,
    score,
    functools.partial(policies.score_teacher, layouts, updater.teacher),
  )
  logp_old, batch = batch.logp_old, token_shards.placed(compiled.mesh, batch)
  batch, loss_state, measured = compiled.credit(batch, state.loss_state)
  # The compiler may have another name for the same place.
  batch = token_shards.placed(compiled.mesh, batch)
  return Credited(
    step, batch, logp_old, loss_state, measured, layouts, scorings
  )


def logp_now(updater: Updater, state: TrainState, credited: Credited) -> Array:
  """f32[P,G,T], log-probabilities of a rollout by the policy of any state.

  Args:
    updater: What turns rollouts into updates.
    state: Before its updates or after them.
    credited: What `credit_rollout` returned.
  """
  return policies.score(credited.layouts, updater.frozen, state.params).logp


def take_updates(
  updater: Updater, state: TrainState, credited: Credited
) -> tuple[TrainState, Measured]:
  """Takes every update of one rollout.

  Args:
    updater: What turns rollouts into updates.
    state: Donated; do not use it again.
    credited: What `credit_rollout` returned.

  Returns:
    The new state, and metrics of the rollout and its updates.
  """
  compiled, spec, step = updater.compiled, updater.spec, credited.step
  state = state._replace(loss_state=credited.loss_state)
  start = jnp.copy(state.step)  # the state itself is donated
  measured, first = credited.measured, step * spec.batches * spec.epochs
  batches = optimizer_batches(spec, len(credited.rollout.prompts), step)
  for number, chosen in enumerate(batches, start=first):
    rows, used = credited.layouts.stack(chosen)
    state, more = compiled.step(
      updater.frozen,
      state,
      credited.batch,
      chosen,
      rows,
      used,
      start,
      np.int32(number),
      spec.watches(step),
    )
    measured = metrics.merge_outside(measured, more)
  refreshes = compiled.learner.with_reference and spec.refresh_steps
  if refreshes and (step + 1) % spec.refresh_steps == 0:
    weight = jnp.asarray(spec.refresh_weight, jnp.float32)
    state = compiled.refresh(state, weight)
  return state, measured


def optimizer_batches(
  spec: UpdateSpec, prompts: int, step: int
) -> Iterator[np.ndarray]:
  """Yields the prompts [P'] of each optimizer batch.

  The first epoch takes them in their order, every later one in its own.

  Args:
    spec: How the updates of a rollout are taken.
    prompts: How many there are.
    step: Number of the rollout.
  """
  order = np.arange(prompts)
  for epoch in range(spec.epochs):
    if epoch:
      rng = random_keys.generator(spec.seed, f'epoch {epoch}', step)
      order = rng.permutation(order)
    yield from np.split(order, spec.batches)
