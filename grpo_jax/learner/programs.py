"""The programs of a rollout's updates, before there is a rollout.

They are lowered, for which the devices of the mesh need not be there, or
compiled in a thread.
"""

from collections.abc import Callable
import contextlib
import dataclasses
import functools
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax import losses
from grpo_jax.episodes.types import Rollout
from grpo_jax.learner import layouts
from grpo_jax.learner import policies
from grpo_jax.learner import token_shards
from grpo_jax.learner import updates
from grpo_jax.learner.updates import Updater
from grpo_jax.mesh import sharding
from grpo_jax.models import LOGP
from grpo_jax.models.layout import LayoutSpec


def lowerings(
  updater: Updater, layout: LayoutSpec, example: Rollout, step: int = 0
) -> dict[str, Callable[[], Any]]:
  """What lowers the programs of a rollout's updates.

  Args:
    updater: What turns rollouts into updates.
    layout: How completions are laid out.
    example: A rollout of the shapes to compile for, such as the largest; the
      values in it do not matter.
    step: Number of the rollout; see `UpdateSpec.watches`.

  Returns:
    For each program a function that lowers it: `train_step`, `credit`, and what
    scores before the first update: `score_all`, `score_entropy` if the entropy
    is needed too, `score_reference` of a reference on the host, and
    `score_teacher` if there is one.
  """
  compiled, spec, frozen = updater.compiled, updater.spec, updater.frozen
  mesh, learner, state = compiled.mesh, compiled.learner, compiled.abstract
  shape, prompts = example.batch.mask.shape, len(example.prompts)
  lower = functools.partial(sharding.lower, mesh)
  chosen = next(updates.optimizer_batches(spec, prompts, 0))
  rows, used = layouts.abstract_stack(compiled, example, chosen, layout)
  part, scoring = (len(chosen), *shape[1:]), {}

  # They note the program; no parameters are there yet.
  def noted(name, program, *args):
    scoring[name] = lambda: lower(program, *args)
    return jax.tree.map(
      lambda x: jnp.zeros(shape + x.shape[3:], x.dtype),
      program.eval_shape(*args),
    )

  def unscored(params, wanted=LOGP):
    name = 'score_entropy' if wanted.entropy else 'score_all'
    if params is state.reference:
      (name,) = learner.reference_scorings
    args = frozen, params, rows, used, part, wanted
    return noted(name, compiled.score, *args)

  def untaught():
    args = updater.teacher, rows, used, part
    return noted('score_teacher', compiled.score_teacher, *args)

  # What the method reads must be there; its values do not matter. Tokens of an
  # earlier policy alone would not be scored.
  version = np.full(shape, step, np.int32)
  example = example._replace(batch=example.batch._replace(version=version))
  batch, _ = policies.with_policies(
    learner, spec, state, example, step, unscored, untaught
  )
  batch = losses.with_required(learner.method, batch)
  batch = token_shards.placed(mesh, batch, abstract=True)
  credited, *_ = jax.eval_shape(compiled.credit, batch, state.loss_state)
  credited = token_shards.placed(mesh, credited, abstract=True)
  everywhere = sharding.replicated(mesh)
  start = jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere)
  number, watch = np.int32(0), spec.watches(step)
  args = frozen, state, credited, chosen, rows, used, start, number, watch
  return {
    'train_step': lambda: lower(compiled.step, *args),
    'credit': lambda: lower(compiled.credit, batch, state.loss_state),
    **scoring,
  }


def scoring_names(updater: Updater) -> list[str]:
  """The programs of `lowerings` that score before the first update."""
  learner = updater.compiled.learner
  with_entropy = 'entropy_old' in learner.method.requires
  own = 'score_entropy' if with_entropy else 'score_all'
  names = [own] if policies.scores_old(learner, updater.spec) else []
  names += learner.reference_scorings
  return names + ['score_teacher'] * learner.with_teacher


def memory_gib(
  updater: Updater, layout: LayoutSpec, example: Rollout
) -> dict[str, float]:
  """Memory that the compiled update needs on each device, GiB.

  Args:
    updater: What turns rollouts into updates.
    layout: How completions are laid out.
    example: A rollout of the shapes to compile for.

  Returns:
    What the compiler says: `temporary`, and `peak`, which counts arguments and
    results too.
  """
  # In rollout 0 overshoot is measured, if in any.
  step = lowerings(updater, layout, example)['train_step']()
  needs: Any = step.compile().memory_analysis()
  # Results lie in the memory of donated arguments, which counts once.
  held = needs.argument_size_in_bytes + needs.output_size_in_bytes
  peak = held - needs.alias_size_in_bytes + needs.temp_size_in_bytes
  gib = 2**30
  return {'temporary': needs.temp_size_in_bytes / gib, 'peak': peak / gib}


@dataclasses.dataclass(frozen=True)
class Compiling:
  """What is being compiled.

  Attributes:
    thread: Compiles; None: nothing is compiled ahead.
  """

  thread: threading.Thread | None = None

  def wait(self) -> None:
    """Waits for the end; an update before it would be compiled twice."""
    if self.thread is not None:
      self.thread.join()


NOTHING = Compiling()


def compile_ahead(
  updater: Updater, layout: LayoutSpec, example: Rollout, step: int
) -> Compiling:
  """Compiles the programs of an update in a thread of its own.

  Meanwhile the sampler is compiled and the first rollout is drawn. If that has
  other shapes than the example, the update is compiled once more. Packed rows
  are not compiled ahead: their shapes depend on lengths of completions.

  Args:
    updater: See `Updater`. jit keeps the programs for its functions.
    layout: How the first rollout to come is laid out.
    example: A rollout of the shapes to compile for, such as the largest; the
      values in it do not matter.
    step: Number of the first rollout to come; see `UpdateSpec.watches`.
  """
  if layout.kind == 'packed' or jax.process_count() > 1:
    return NOTHING

  def run():
    # What fails here fails again in the first update, which raises it.
    with contextlib.suppress(BaseException):
      for lower in lowerings(updater, layout, example, step).values():
        lower().compile()

  # A daemon, because Python would wait for any other thread before it ends, and
  # the compiler cannot be interrupted; see `commands.main.run`.
  thread = threading.Thread(target=run, name='compile ahead', daemon=True)
  thread.start()
  return Compiling(thread)
