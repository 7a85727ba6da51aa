"""How far a rollout's tokens have moved when its last update is taken."""

import dataclasses

from grpo_jax import losses
from grpo_jax.learner import metrics
from grpo_jax.learner import updates
from grpo_jax.learner.instruments.hook import Findings
from grpo_jax.learner.types import TrainState
from grpo_jax.learner.updates import Credited
from grpo_jax.learner.updates import Updater


@dataclasses.dataclass(frozen=True)
class RolloutEnd:
  """Scores the rollouts in which overshoot is measured after their updates.

  Attributes:
    updater: What takes the updates.
  """

  updater: Updater

  def is_due(self, step: int) -> bool:
    """Whether overshoot is measured in a rollout."""
    return self.updater.spec.watches(step)

  def before(self, state: TrainState, credited: Credited) -> losses.Batch:
    """The rollout with the log-probabilities of the old policy."""
    if credited.batch.logp_old is not None:
      return credited.batch
    # The method needs none: its only update takes the ratio as exactly 1. The
    # updates donate the parameters that score them.
    logp_old = updates.logp_now(self.updater, state, credited)
    return credited.batch._replace(logp_old=logp_old)

  def after(
    self, state: TrainState, credited: Credited, before: losses.Batch
  ) -> Findings:
    """The metrics of `step.rollout_end`, over all prompts."""
    measured: updates.Measured = {}
    for chosen in credited.layouts.first_epoch():
      rows, used = credited.layouts.stack(chosen)
      more = self.updater.compiled.finish(
        self.updater.frozen,
        state.params,
        before,
        state.loss_state,
        chosen,
        rows,
        used,
      )
      measured = metrics.merge_outside(measured, more)
    return Findings(metrics=measured)
