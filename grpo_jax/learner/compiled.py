"""The functions of an update, jitted for the mesh of a learner."""

from collections.abc import Callable
import dataclasses
from typing import Any
from typing import Protocol

import jax

from grpo_jax.learner import gradient
from grpo_jax.learner import row_shards
from grpo_jax.learner import step as step_lib
from grpo_jax.learner.types import Learner
from grpo_jax.learner.types import TrainState
from grpo_jax.mesh import sharding


class Jitted(Protocol):
  """A function that `jax.jit` returned."""

  def __call__(self, *args: Any) -> Any:
    """Computes it; compiles it first, if the shapes are new."""
    ...

  def lower(self, *args: Any) -> jax.stages.Lowered:
    """Its program, not compiled yet."""
    ...

  def eval_shape(self, *args: Any) -> Any:
    """Shapes and dtypes of its result."""
    ...


@dataclasses.dataclass(frozen=True)
class Compiled:
  """The pure functions of an update, jitted; jit keeps a program per shapes.

  `frozen` are the parameters that no update changes, or None. They are an
  argument, because XLA would copy a constant into every program. Arguments that
  are donated must not be used again.

  Attributes:
    learner: What the functions are made from.
    abstract: The `TrainState` as shapes, dtypes and shardings, for a restore.
    init: `step.init(params)`, which are donated.
    refresh: `step.refresh(state, weight)`; the state is donated.
    credit: `step.credit(batch, loss_state)`.
    score: `gradient.score_all(frozen, params, layout, num_micro, shape,
      wanted)`; the shape is static.
    score_teacher: `gradient.score_teacher(params, layout, num_micro, shape)`;
      the last is static.
    step: `step.train_step(frozen, state, batch, prompts, layout, num_micro,
      rollout_start, number, watch)`; the state is donated, `watch` is static.
    finish: `step.rollout_end(frozen, params, batch, loss_state, prompts,
      layout, num_micro)`.
    fill: `row_shards.filled(layout, tokens, prompts)`.
  """

  learner: Learner
  abstract: TrainState
  init: Jitted
  refresh: Jitted
  credit: Jitted
  score: Jitted
  score_teacher: Jitted
  step: Jitted
  finish: Jitted
  fill: Jitted

  @property
  def mesh(self) -> jax.sharding.Mesh:
    """The mesh of the learner."""
    return self.learner.mesh


def jit_functions(learner: Learner, params: Any) -> Compiled:
  """Jits the functions of an update; nothing is compiled yet.

  Args:
    learner: What stays the same from update to update.
    params: Trained parameters, or their shapes and dtypes.
  """
  place = step_lib.state_sharding(learner, params)
  everywhere = sharding.replicated(learner.mesh)

  def jit(function: Callable[..., Any], **options: Any) -> Jitted:
    def traced(*args):
      with sharding.use(learner.mesh):
        return function(learner, *args)

    traced.__name__ = function.__name__  # its name in logs and profiles
    options = {'compiler_options': sharding.COMPILER_OPTIONS} | options
    return jax.jit(traced, **options)

  # Numbers of arguments below are without the learner, which `traced` adds.
  return Compiled(
    learner,
    abstract=jax.tree.map(
      lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at),
      jax.eval_shape(lambda p: step_lib.init(learner, p), params),
      place,
    ),
    init=jit(step_lib.init, donate_argnums=0, out_shardings=place),
    refresh=jit(step_lib.refresh, donate_argnums=0, out_shardings=place),
    # Where arrays [P,G,T] lie `token_shards` says.
    credit=jit(step_lib.credit, out_shardings=(None, everywhere, everywhere)),
    score=jit(
      gradient.score_all,
      static_argnums=4,
    ),
    score_teacher=jit(gradient.score_teacher, static_argnums=3),
    step=jit(
      step_lib.train_step,
      donate_argnums=1,
      static_argnums=8,
      out_shardings=(place, everywhere),
      compiler_options=sharding.leanly(learner.mesh),
    ),
    finish=jit(step_lib.rollout_end, out_shardings=everywhere),
    fill=jit(
      row_shards.filled, out_shardings=sharding.rows(learner.mesh, axis=1)
    ),
  )
