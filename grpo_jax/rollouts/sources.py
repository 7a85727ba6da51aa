"""Where a run gets its rollouts: from a `Source`, one after another.

A source draws by parameters that the learner has published, some versions old
or new. What it draws is a function of its `Receipt` and of those parameters. A
checkpoint keeps the receipt, so that a run which is stopped, or killed, draws
the same rollouts again.

`AtOnce` draws a rollout when it is asked for. `Ahead` draws it, and has it
judged, in a thread by the policy before the updates of the rollout that is
learned from, while these updates run. So rollout k is drawn by version
max(k - 1, 0), never by another: what a run learns does not depend on how fast
its threads are. The receipt holds these parameters, so a checkpoint needs no
rollout: whatever ends a run before its thread has finished, the next start
draws the same rollout again.
"""

from collections.abc import Callable
from collections.abc import Iterator
from concurrent import futures
import contextlib
import dataclasses
import functools
import threading
import time
from typing import Any
from typing import NamedTuple
from typing import Protocol

import jax
import jax.numpy as jnp

from grpo_jax.episodes import rollout as rollout_lib
from grpo_jax.episodes.types import Rollout
from grpo_jax.rollouts import dynamic_sampling
from grpo_jax.rollouts.dynamic_sampling import Drawn
from grpo_jax.rollouts.dynamic_sampling import PromptState

_JUDGING_SECS = 2.0  # that a reward function may take when a run has ended

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
    waited_secs: How many of these the learner waited for; None: all.
    tokens: Completion tokens that were drawn in `secs`; None: those of the
      rollout. Dynamic sampling may draw more or fewer.
  """

  rollout: Rollout
  receipt: Receipt
  counts: dict[str, float]
  secs: float
  waited_secs: float | None = None
  tokens: float | None = None


class Source(Protocol):
  """Gives the rollouts of a run, each once and in their order.

  Attributes:
    receipt: What the rollouts are drawn from that `next` has not given yet. Set
      it before the first `publish` of a start.
  """

  receipt: Receipt

  def first(self, params: Any) -> Receipt:
    """The receipt before the first rollout of a run.

    Args:
      params: Trained parameters of version 0; what is kept of them is a copy.
    """
    ...

  def publish(self, params: Any, version: int) -> None:
    """Takes parameters that later rollouts may be drawn by.

    A source may begin to use them late, and may skip some.

    Args:
      params: Trained parameters. They stay as they are until `next` has
        returned; after that the learner donates them.
      version: How many rollouts they have learned from.
    """
    ...

  def next(self, version: int) -> Delivery:
    """The rollout that a version will learn from; waits until it is drawn.

    When it returns, the memory of the devices is free for an update, but for
    what the source needs to go on drawing. If it raises, or a signal ends its
    wait, the `receipt` and what it holds are as before.

    Args:
      version: That of the parameters that were published last.
    """
    ...

  def prepare(self, version: int) -> None:
    """Makes ready what `next(version)` needs of the host; devices learn now."""
    ...

  def paused(self) -> contextlib.AbstractContextManager[None]:
    """In it nothing is drawn, and the engine has the newest parameters."""
    ...

  def close(self) -> None:
    """Gives up what is being drawn."""
    ...


def _timed(
  draw: Draw, prompts: PromptState, version: int
) -> tuple[Drawn, float]:
  """What `draw` returns, and how many seconds it took."""
  begun = time.monotonic()
  return draw(prompts, version), time.monotonic() - begun


@dataclasses.dataclass
class AtOnce:
  """Draws a rollout when it is asked for, by the policy that learns from it.

  Attributes:
    draw: Samples and judges, or reads what was drawn.
    load: `(params, version)`: gives the engine trained parameters.
    unload: Takes them from it; an update needs the memory, and moves them.
    wait: See `Wait`.
    rollouts: How many the run has; for more than these nothing is done.
    fill: Reads the prompts of a rollout early.
    receipt: See `Source`.
  """

  draw: Draw
  load: Callable[[Any, int], None]
  unload: Callable[[], None]
  wait: Wait = contextlib.nullcontext
  rollouts: int = 0
  fill: Callable[[], None] = lambda: None
  receipt: Receipt = Receipt()

  def first(self, params: Any) -> Receipt:
    """See `Source`."""
    del params
    return Receipt()

  def publish(self, params: Any, version: int) -> None:
    """See `Source`."""
    self.load(params, version)

  def next(self, version: int) -> Delivery:
    """See `Source`."""
    with self.wait():
      drawn, secs = _timed(self.draw, self.receipt.prompts, version)
    rollout, prompts, counts = drawn
    self.unload()
    self.receipt = Receipt(prompts)
    tokens = counts.get('tokens_drawn')
    return Delivery(rollout, self.receipt, counts, secs, None, tokens)

  def prepare(self, version: int) -> None:
    """See `Source`."""
    if version < self.rollouts:
      self.fill()

  def paused(self) -> contextlib.AbstractContextManager[None]:
    """See `Source`."""
    return contextlib.nullcontext()

  def close(self) -> None:
    """See `Source`; nothing is being drawn."""


class GivenUp(KeyboardInterrupt):
  """Nobody waits any more for what a thread draws.

  It is no `Exception`, so that an `except Exception` in an event loop or a
  reward function does not swallow it.
  """


@dataclasses.dataclass
class Lease:
  """The time in which somebody waits for what a thread draws.

  Attributes:
    has_ended: Nobody waits any more.
    is_judging: Rewards are being called, which may take as long as they like.
  """

  has_ended: bool = False
  is_judging: bool = False

  def check(self) -> None:
    """Raises `GivenUp` once it has ended; for engine, rewards and workers."""
    if self.has_ended:
      raise GivenUp

  def judging(
    self, judge: rollout_lib.Judge, episodes: rollout_lib.Episodes
  ) -> tuple[rollout_lib.Episodes, Any]:
    """The `Judging` of the thread."""
    self.is_judging = True
    try:
      return rollout_lib.judged_alone(judge, episodes, self.check)
    finally:
      self.is_judging = False


@functools.partial(jax.jit, donate_argnums=1, keep_unused=True)
def _copied(params: Any, older: Any) -> Any:
  """The parameters, in the memory of older ones: the first are donated soon."""
  del older
  return jax.tree.map(jnp.copy, params)


@dataclasses.dataclass
class Ahead:
  """Draws each rollout, but the first of a start, before it is asked for.

  At its end, what is being drawn is given up, and the thread has ended. Only a
  reward function that is called in this process cannot be ended: after two
  seconds its thread is left alone, and calls no other.

  Attributes:
    draw: Samples and judges. It calls `lease.check` as often as it can, and has
      completions judged by `lease.judging`.
    load: See `AtOnce`.
    unload: Takes the parameters from the engine.
    wait: See `Wait`.
    rollouts: How many the run has.
    fill: Reads the prompts of a rollout, before a thread draws it.
    lease: Ends when the source is closed.
    receipt: See `Source`.
  """

  draw: Draw
  load: Callable[[Any, int], None]
  unload: Callable[[], None]
  wait: Wait = contextlib.nullcontext
  rollouts: int = 0
  fill: Callable[[], None] = lambda: None
  lease: Lease = dataclasses.field(default_factory=Lease)
  receipt: Receipt = Receipt()

  def __post_init__(self):
    self._newest: tuple[Any, int] | None = None
    self._thread: threading.Thread | None = None
    self._drawn: futures.Future[tuple[Drawn, float]] | None = None

  def first(self, params: Any) -> Receipt:
    """See `Source`."""
    return Receipt(params=(jax.tree.map(jnp.copy, params),))

  def publish(self, params: Any, version: int) -> None:
    """See `Source`; the engine may be drawing by those before."""
    self._newest = params, version

  def next(self, version: int) -> Delivery:
    """See `Source`; `ahead_wait_secs` is how long this has taken."""
    begun, (older,) = time.monotonic(), self.receipt.params
    with self.wait():
      if self._drawn is None:  # the first of a start
        self.load(older, max(version - 1, 0))
        drawn, secs = _timed(self.draw, self.receipt.prompts, version)
      else:
        drawn, secs = self._drawn.result()
        self._join()
    # From here on no signal ends it: what has drawn this rollout is donated.
    rollout, prompts, counts = drawn
    waited = time.monotonic() - begun
    counts = {**counts, 'ahead_wait_secs': waited}
    self.unload()
    assert self._newest is not None  # published before
    (params, _), self._newest, self._drawn = self._newest, None, None
    self.receipt = Receipt(prompts, (_copied(params, older),))
    if version + 1 < self.rollouts:
      self._begin(version + 1)
    tokens = counts.get('tokens_drawn')
    return Delivery(rollout, self.receipt, counts, secs, waited, tokens)

  def prepare(self, version: int) -> None:
    """See `Source`; the thread draws it already."""

  @contextlib.contextmanager
  def paused(self) -> Iterator[None]:
    """See `Source`."""
    self._join()  # its error, if it has one, is that of the next rollout
    assert self._newest is not None  # the learner is done with it
    self.load(*self._newest)
    yield

  def close(self) -> None:
    """See `Source`."""
    self.lease.has_ended, secs = True, _JUDGING_SECS
    while self._thread is not None and self._thread.is_alive() and secs > 0:
      self._thread.join(0.1)
      secs -= 0.1 * self.lease.is_judging

  def _begin(self, version: int) -> None:
    """Begins to draw the rollout that a version will learn from."""
    drawn: futures.Future[tuple[Drawn, float]] = futures.Future()
    prompts, (older,) = self.receipt
    self._drawn = drawn

    def draw():
      try:
        drawn.set_result(_timed(self.draw, prompts, version))
      except BaseException as error:  # `next` raises it
        drawn.set_exception(error)

    try:
      self.fill()  # here, because some prompts bear no other thread
      self.load(older, version - 1)
    except Exception as error:
      drawn.set_exception(error)
      return
    # A daemon, because a second Ctrl-C ends the program without waiting for a
    # reward function.
    self._thread = threading.Thread(target=draw, name='ahead', daemon=True)
    self._thread.start()

  def _join(self) -> None:
    if self._thread is not None:
      self._thread.join()
      self._thread = None
