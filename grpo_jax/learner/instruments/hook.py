"""Instruments see a rollout before its updates, and after them."""

from collections.abc import Sequence
import dataclasses
from typing import Any
from typing import NamedTuple
from typing import Protocol

import numpy as np

from grpo_jax.learner.types import TrainState
from grpo_jax.learner.updates import Credited
from grpo_jax.learner.updates import Measured


@dataclasses.dataclass
class Findings:
  """What instruments have measured of a rollout, by name."""

  metrics: Measured = dataclasses.field(default_factory=dict)
  numbers: dict[str, float] = dataclasses.field(default_factory=dict)
  # f32[P,G,T], 0 outside the mask.
  tokens: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)


class Instrument(Protocol):
  """Measures rollouts; the updates neither need nor change by it."""

  def is_due(self, step: int) -> bool:
    """Whether the rollout of this number is measured."""
    ...

  def before(self, state: TrainState, credited: Credited) -> Any:
    """What `after` needs of the time before the first update.

    Args:
      state: Before the updates, which donate it.
      credited: The rollout with its advantages.
    """
    ...

  def after(
    self, state: TrainState, credited: Credited, before: Any
  ) -> Findings:
    """What is measured.

    Args:
      state: After the last update.
      credited: As in `before`.
      before: What `before` returned.
    """
    ...


class Watch(NamedTuple):
  """The instruments that measure a rollout, and what they have seen."""

  credited: Credited
  seen: list[tuple[Instrument, Any]]

  def findings(self, state: TrainState) -> Findings:
    """What they have found, once the updates are taken.

    Args:
      state: After the last update.
    """
    together = Findings()
    for instrument, before in self.seen:
      found = instrument.after(state, self.credited, before)
      together.metrics |= found.metrics
      together.numbers |= found.numbers
      together.tokens |= found.tokens
    return together


def watch(
  due: Sequence[Instrument], state: TrainState, credited: Credited
) -> Watch:
  """Shows a rollout to instruments before its first update.

  Args:
    due: Those that measure it.
    state: Before the updates.
    credited: The rollout with its advantages.
  """
  return Watch(credited, [(one, one.before(state, credited)) for one in due])
