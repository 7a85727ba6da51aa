"""Compiling the programs of an update before the first rollout is there."""

import contextlib
import dataclasses
import threading

import jax

from grpo_jax.episodes.types import Rollout
from grpo_jax.learner import lowering
from grpo_jax.learner.updates import Updater
from grpo_jax.models.layout import LayoutSpec


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


def start(
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
      for lower in lowering.lowering(updater, layout, example, step).values():
        lower().compile()

  # A daemon, because Python would wait for any other thread before it ends, and
  # the compiler cannot be interrupted; see `commands.main.run`.
  thread = threading.Thread(target=run, name='compile ahead', daemon=True)
  thread.start()
  return Compiling(thread)
