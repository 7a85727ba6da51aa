"""Where a run gets its rollouts: from a `Source`, one after another.

A source draws by parameters that the learner has published, some versions old
or new. What it draws is a function of its `Receipt` and of those parameters. A
checkpoint keeps the receipt, so that a run which is stopped, or killed, draws
the same rollouts again.
"""

from collections.abc import Callable
import contextlib
import dataclasses
import time
from typing import Any
from typing import NamedTuple

from grpo_jax.episodes.types import Rollout
from grpo_jax.rollouts import dynamic_sampling
from grpo_jax.rollouts.dynamic_sampling import Drawn
from grpo_jax.rollouts.dynamic_sampling import PromptState

Draw = Callable[[PromptState, int], Drawn]
"""`(prompts, version)` -> the rollout that this version will learn from."""
Wait = Callable[[], contextlib.AbstractContextManager[None]]
"""Gives a context in which a signal need not wait: it raises there."""


class Receipt(NamedTuple):
  """What the rollouts that are still to come are drawn from.

  Attributes:
    prompts: Where the next rollout finds its prompts.
    params: Copies of the trained parameters that draw the next rollouts, where
      those of the checkpoint do not: one for each version, the oldest first.
  """

  prompts: PromptState = PromptState()
  params: tuple[Any, ...] = ()

  def to_json(self, whole: Callable[[Rollout], Rollout]) -> dict[str, Any]:
    """All but the parameters, as a dict of what JSON can hold, and of bytes.

    `older` in it is the number of their versions.

    Args:
      whole: Makes a rollout whole that other processes know a part of.
    """
    surplus = self.prompts.surplus
    prompts = self.prompts._replace(surplus=surplus and whole(surplus))
    return {**dynamic_sampling.to_json(prompts), 'older': len(self.params)}


def receipt_from_json(values: dict[str, Any], params: Any) -> Receipt:
  """The `Receipt` whose `to_json` has returned these values."""
  return Receipt(dynamic_sampling.from_json(values), tuple(params))


class Delivery(NamedTuple):
  """A rollout to learn from, and what its source tells of it.

  Attributes:
    rollout: See `Rollout`.
    receipt: What draws those that follow.
    counts: Metrics of the drawing.
    secs: What drawing and judging took.
  """

  rollout: Rollout
  receipt: Receipt
  counts: dict[str, float]
  secs: float


class Source:
  """Gives the rollouts of a run, each once and in their order.

  Attributes:
    receipt: What the rollouts are drawn from that `next` has not given yet. Set
      it before the first `publish` of a start.
  """

  receipt: Receipt = Receipt()

  def first(self, params: Any) -> Receipt:
    """The receipt before the first rollout of a run.

    Args:
      params: Trained parameters of version 0; what is kept of them is a copy.
    """
    del params
    return Receipt()

  def publish(self, params: Any, version: int) -> None:
    """Takes parameters that later rollouts may be drawn by.

    A source may begin to use them late, and may skip some.

    Args:
      params: Trained parameters. They stay as they are until `next` has
        returned; after that the learner donates them.
      version: How many rollouts they have learned from.
    """
    raise NotImplementedError

  def next(self, version: int) -> Delivery:
    """The rollout that a version will learn from; waits until it is drawn.

    When it returns, the memory of the devices is free for an update, but for
    what the source needs to go on drawing. If it raises, or a signal ends its
    wait, the `receipt` and what it holds are as before.

    Args:
      version: That of the parameters that were published last.
    """
    raise NotImplementedError

  def prepare(self, version: int) -> None:
    """Makes ready what `next(version)` needs of the host; devices learn now."""

  def paused(self) -> contextlib.AbstractContextManager[None]:
    """In it nothing is drawn, and the engine has the newest parameters."""
    return contextlib.nullcontext()

  def close(self) -> None:
    """Gives up what is being drawn."""


@dataclasses.dataclass
class SharedDevices(Source):
  """A source that draws on the devices that learn.

  Attributes:
    draw: Samples and judges, or reads what was drawn.
    load: `(params, version)`: gives the engine trained parameters.
    unload: Takes them from it; an update needs the memory, and moves them.
    wait: See `Wait`.
    rollouts: How many the run has; for more than these nothing is done.
  """

  draw: Draw
  load: Callable[[Any, int], None]
  unload: Callable[[], None]
  wait: Wait = contextlib.nullcontext
  rollouts: int = 0

  def drawn(self, prompts: PromptState, version: int) -> tuple[Drawn, float]:
    """What `draw` returns, and how many seconds it took."""
    begun = time.monotonic()
    return self.draw(prompts, version), time.monotonic() - begun


@dataclasses.dataclass
class AtOnce(SharedDevices):
  """Draws a rollout when it is asked for, by the policy that learns from it.

  Attributes:
    fill: Reads the prompts of a rollout early.
  """

  fill: Callable[[], None] = lambda: None

  def publish(self, params: Any, version: int) -> None:
    """See `Source`."""
    self.load(params, version)

  def next(self, version: int) -> Delivery:
    """See `Source`."""
    with self.wait():
      drawn, secs = self.drawn(self.receipt.prompts, version)
    rollout, prompts, counts = drawn
    self.unload()
    self.receipt = Receipt(prompts)
    return Delivery(rollout, self.receipt, counts, secs)

  def prepare(self, version: int) -> None:
    """See `Source`."""
    if version < self.rollouts:
      self.fill()
