"""Learning from a rollout: its updates, what they measure, what they take."""

from collections.abc import Callable
from collections.abc import Sequence
from typing import NamedTuple

import jax

from grpo_jax.episodes.types import Rollout
from grpo_jax.learner import metrics
from grpo_jax.learner import speed
from grpo_jax.learner import updates
from grpo_jax.learner.instruments import hook
from grpo_jax.learner.instruments.hook import Findings
from grpo_jax.learner.instruments.hook import Instrument
from grpo_jax.learner.layouts import Layouts
from grpo_jax.learner.types import TrainState
from grpo_jax.learner.updates import Updater
from grpo_jax.models.layout import LayoutSpec


class Learned(NamedTuple):
  """What a rollout and its updates have made."""

  state: TrainState
  measured: dict[str, float]
  secs: float  # of the updates and their scorings, without instruments
  layouts: Layouts
  scorings: int  # forward passes over the rollout before its first update
  findings: Findings  # of instruments


def learn(
  updater: Updater,
  layout: LayoutSpec,
  state: TrainState,
  rollout: Rollout,
  step: int,
  meanwhile: Callable[[], dict[str, float]] = dict,
  instruments: Sequence[Instrument] = (),
) -> Learned:
  """Takes the updates of a rollout; their metrics are plain numbers.

  JAX returns from a call before its result is computed. Reading the metrics
  waits for it, so `secs` is the duration of the updates; or that of
  `meanwhile`, if it takes longer. It is called before that wait, and its
  metrics replace those of the same names.

  Args:
    updater: Has the compiled programs.
    layout: How completions are laid out, as far as it is decided.
    state: Donated; do not use it again.
    rollout: What to learn from.
    step: Number of the rollout.
    meanwhile: Called while the devices compute.
    instruments: What else is measured, if it is due.
  """

  def credit():
    credited = updates.credit_rollout(updater, layout, state, rollout, step)
    if due:  # these seconds are not those of instruments
      jax.block_until_ready(credited.batch)
    return credited

  def take():
    after, measured = updates.take_updates(updater, state, credited)
    more = meanwhile()
    return after, metrics.to_scalars(measured), more

  due = [one for one in instruments if one.is_due(step)]
  credited, credit_secs = speed.timed(credit)
  watch = hook.watch(due, state, credited)
  (state, measured, more), update_secs = speed.timed(take)
  findings = watch.findings(state)
  if findings.metrics:
    measured |= metrics.to_scalars(findings.metrics)
  return Learned(
    state,
    measured | more,
    credit_secs + update_secs,
    credited.layouts,
    credited.scorings,
    findings,
  )
