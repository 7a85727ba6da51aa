"""Sampling while learning: a rollout is drawn while another is learned from.

Rollout n + 1 is drawn and judged in a thread by the policy before the updates
of rollout n, while these updates run. So rollout k is drawn by version
max(k - 1, 0), never by another: what a run learns does not depend on how fast
its threads are.

The receipt holds these parameters, so a checkpoint needs no rollout: whatever
ends a run before its thread has finished, the next start draws the same rollout
again.
"""

from collections.abc import Iterator
from concurrent import futures
import contextlib
import dataclasses
import functools
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp

from grpo_jax.episodes import rollout as rollout_lib
from grpo_jax.rollouts.dynamic_sampling import Drawn
from grpo_jax.rollouts.sources import Delivery
from grpo_jax.rollouts.sources import Receipt
from grpo_jax.rollouts.sources import SharedDevices

_JUDGING_SECS = 2.0  # that a reward function may take when a run has ended


class GivenUp(KeyboardInterrupt):
  """Nobody waits any more for what a thread draws.

  It is no `Exception`, so that an `except Exception` in an event loop or a
  reward function does not swallow it.
  """


@functools.partial(jax.jit, donate_argnums=1, keep_unused=True)
def _copied(params: Any, older: Any) -> Any:
  """The parameters, in the memory of older ones: the first are donated soon."""
  del older
  return jax.tree.map(jnp.copy, params)


@dataclasses.dataclass
class Ahead(SharedDevices):
  """Draws each rollout, but the first of a start, before it is asked for.

  At its end, what is being drawn is given up, and the thread has ended. Only a
  reward function that is called in this process cannot be ended: after two
  seconds its thread is left alone, and does nothing more once the function has
  returned.

  `draw` calls `between` as often as it can, and has completions judged by
  `judging`.
  """

  def __post_init__(self):
    self._newest: tuple[Any, int] | None = None
    self._thread: threading.Thread | None = None
    self._drawn: futures.Future[tuple[Drawn, float]] | None = None
    self._is_left = self._is_judging = False

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
        drawn, secs = self.drawn(self.receipt.prompts, version)
      else:
        drawn, secs = self._drawn.result()
        self._join()
    # From here on no signal ends it: what has drawn this rollout is donated.
    rollout, prompts, counts = drawn
    counts = {**counts, 'ahead_wait_secs': time.monotonic() - begun}
    self.unload()
    assert self._newest is not None  # published before
    (params, _), self._newest, self._drawn = self._newest, None, None
    self.receipt = Receipt(prompts, (_copied(params, older),))
    if version + 1 < self.rollouts:
      self._begin(version + 1)
    return Delivery(rollout, self.receipt, counts, secs)

  @contextlib.contextmanager
  def paused(self) -> Iterator[None]:
    """See `Source`."""
    self._join()  # its error, if it has one, is that of the next rollout
    assert self._newest is not None  # the learner is done with it
    self.load(*self._newest)
    yield

  def between(self) -> None:
    """Ends what is being drawn, once nobody waits for it any more."""
    if self._is_left:
      raise GivenUp

  def judging(
    self, judge: rollout_lib.Judge, completions: Any
  ) -> tuple[Any, Any]:
    """A `Judging` of the thread."""
    self._is_judging = True
    judged = rollout_lib.judged_alone(judge, completions)
    self._is_judging = False
    self.between()
    return judged

  def close(self) -> None:
    """See `Source`."""
    self._is_left, secs = True, _JUDGING_SECS
    while self._thread is not None and self._thread.is_alive() and secs > 0:
      self._thread.join(0.1)
      secs -= 0.1 * self._is_judging

  def _begin(self, version: int) -> None:
    """Begins to draw the rollout that a version will learn from."""
    drawn: futures.Future[tuple[Drawn, float]] = futures.Future()
    prompts, (older,) = self.receipt
    self._drawn = drawn

    def draw():
      try:
        drawn.set_result(self.drawn(prompts, version))
      except BaseException as error:  # `next` raises it
        drawn.set_exception(error)

    try:
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
