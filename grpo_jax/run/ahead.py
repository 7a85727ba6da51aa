"""Sampling while learning: a rollout is drawn while another is learned from.

With `config.sampler.ahead=1`, rollout n + 1 is drawn and judged in a thread by
the policy before the updates of rollout n, while these updates run. So rollout
k is drawn by version max(k - 1, 0), never by another: what a run learns does
not depend on how fast its threads are.

A rollout is a function of parameters and of a `PromptState`. A checkpoint has
both, the parameters as `TrainState.older`, so it needs no rollout: whatever
ends a run before its thread has finished, the next start draws the same rollout
again.
"""

from collections.abc import Callable
from concurrent import futures
import dataclasses
import functools
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp

from grpo_jax import losses
from grpo_jax.engines import Completions
from grpo_jax.engines import Interruptible
from grpo_jax.episodes import rollout as rollout_lib
from grpo_jax.episodes.rollout import Judge
from grpo_jax.hosts import stop_signal
from grpo_jax.learner.types import TrainState
from grpo_jax.learner.updates import Updater
from grpo_jax.rollouts.dynamic_sampling import Drawn
from grpo_jax.rollouts.dynamic_sampling import PromptState
from grpo_jax.run import speed
from grpo_jax.run.build import build

_JUDGING_SECS = 2.0  # that a reward function may take when a run has ended


def warnings(run: build.Run) -> list[str]:
  """A sentence where nothing corrects for the age of the policy that samples.

  Args:
    run: The parts of the run.
  """
  draw, learn = run.draw, run.learn
  # With dynamic sampling the old policy of completions is the one that has
  # drawn them, whatever the anchor is; see `UpdateSpec.stale`.
  is_old = learn.update.anchor == 'sampler' or draw.resample_rounds > 0
  if not draw.ahead or _corrects(run, is_old):
    return []
  advice = "give learner.anchor='sampler'"
  if is_old or not _corrects(run, True):
    advice += " and a method with a ratio, such as 'importance_sampling'"
  return [
    'With config.sampler.ahead=1 completions come from a policy that is one '
    f'rollout older, and learner.anchor={learn.update.anchor!r} with the '
    f'method {learn.method!r} learns from them as if the policy '
    f'itself had drawn them, which is biased; {advice}.'
  ]


def _corrects(run: build.Run, is_old: bool) -> bool:
  """Whether the gradient depends on the policy that has drawn the completions.

  It is taken at one policy, of completions that this policy or one that differs
  from it has drawn.

  Args:
    run: See `warnings`.
    is_old: Whether the policy that has drawn them is the old policy.
  """
  method, group = run.learn.learner.method, run.draw.group
  known = {'entropy', 'noise', 'updates_done', *losses.Batch._fields}
  if not method.requires <= known:
    return True  # what a field of the user's own holds is not known here
  tokens = jnp.zeros((2, group, 4), jnp.int32)
  logp = jnp.full(tokens.shape, -1.0)
  reward = jnp.arange(2.0 * group).reshape(2, group) % 2
  parts = jnp.repeat(reward[..., None], len(run.rewards), -1)

  @jax.jit
  def slope(gap):
    # It differs from token to token, else dividing by its mean would cancel it.
    sampler = logp - gap * jax.lax.broadcasted_iota(logp.dtype, logp.shape, 2)
    batch = losses.make_batch(
      tokens == 0, reward, tokens=tokens, reward_parts=parts
    )
    batch = losses.check_batch(losses.with_required(method, batch))
    batch = batch._replace(
      logp_sampler=sampler, logp_old=sampler if is_old else logp
    )
    batch, state = losses.credit(method, batch, method.init())
    batch = losses.prepare(method, batch, state)
    return jax.grad(
      lambda x: losses.surrogate_loss(method, x, batch, state, -logp)[0]
    )(logp)

  return bool(jnp.any(slope(0.0) != slope(0.3)))


def with_older(run: build.Run, state: TrainState, copy=jnp.copy) -> TrainState:
  """The state, or its shapes, before the first rollout of a run.

  Args:
    run: The parts of the run.
    state: Without `older`.
    copy: Of one array of the parameters.
  """
  if not run.draw.ahead:
    return state
  return state._replace(older=jax.tree.map(copy, state.params))


@functools.partial(jax.jit, donate_argnums=1, keep_unused=True)
def _copied(params: Any, older: Any) -> Any:
  """The parameters, in the memory of older ones: the first are donated soon."""
  del older
  return jax.tree.map(jnp.copy, params)


@dataclasses.dataclass
class Ahead:
  """Draws the rollouts of a run, when they are asked for or before.

  A context manager. At its end, what is being drawn is given up, and the thread
  has ended. Only a reward function that is called in this process cannot be
  ended: after two seconds its thread is left alone, and does nothing more once
  the function has returned.

  Attributes:
    run: The parts of the run.
    updater: Joins parameters for the engine.
    draw: `(run, prompt_state, step) -> Drawn`: samples and judges, or reads the
      files of a replay.
  """

  run: build.Run
  updater: Updater
  draw: Callable[[build.Run, PromptState, int], Drawn]

  def __post_init__(self):
    self._is_on = bool(self.run.draw.ahead)
    self._thread: threading.Thread | None = None
    self._drawn: futures.Future[tuple[Drawn, float]] | None = None
    self._is_left = self._is_judging = False

  def __enter__(self) -> 'Ahead':
    if self._is_on:
      self.run = self.run._replace(
        engine=Interruptible(self.run.engine, self._between),
        judging=self._judging,
      )
      if self.run.workers is not None:
        self.run.workers.between = self._between
    return self

  def __exit__(self, *_: Any) -> None:
    self._is_left, secs = True, _JUDGING_SECS
    while self._thread is not None and self._thread.is_alive() and secs > 0:
      self._thread.join(0.1)
      secs -= 0.1 * self._is_judging

  def take(
    self, state: TrainState, prompt_state: PromptState, step: int
  ) -> tuple[Drawn, float]:
    """The next rollout, and how many seconds it took to draw it.

    If it is drawn ahead, its counts have `ahead_wait_secs`, how many of these
    seconds were waited for.

    Args:
      state: Before the updates of the rollout.
      prompt_state: Before the rollout.
      step: Number of the rollout.

    Raises:
      Exception: What `draw` has raised, in the thread too.
    """
    if not self._is_on:
      return speed.timed(self.draw, self.run, prompt_state, step)
    begun = time.monotonic()
    if self._drawn is None:  # the first of a start
      self._load(state.older, max(step - 1, 0))
      drawn, secs = speed.timed(self.draw, self.run, prompt_state, step)
    else:
      drawn, secs = self._drawn.result()
      self._wait()
      self._drawn = None
    rollout, prompt_state, counts = drawn
    counts = {**counts, 'ahead_wait_secs': time.monotonic() - begun}
    return (rollout, prompt_state, counts), secs

  def before_updates(
    self, state: TrainState, prompt_state: PromptState, step: int
  ) -> tuple[TrainState, Any]:
    """Takes the parameters from the engine, or begins to draw by a copy.

    Args:
      state: Before the updates of the rollout.
      prompt_state: Before the next rollout.
      step: Number of the rollout.

    Returns:
      The state for the updates, and what `after_updates` wants.
    """
    # The update needs the memory, and moves the parameters.
    self.run.engine.unload()
    if not self._is_on:
      return state, None
    older = _copied(state.params, state.older)
    if step + 1 < self.run.steps:
      self._load(older, step)
      self._begin(prompt_state, step + 1)
    return state._replace(older=None), older

  def after_updates(
    self, state: TrainState, older: Any, step: int
  ) -> TrainState:
    """The state for the next rollout; unless it is drawn, the engine gets it.

    Args:
      state: After the updates of the rollout.
      older: From `before_updates`.
      step: Number of the next rollout.
    """
    if self._is_on:
      return state._replace(older=older)
    self._load(state.params, step)
    return state

  def give_newest(self, state: TrainState, step: int) -> None:
    """Gives the engine the newest policy, once it has drawn the next rollout.

    Args:
      state: After `step` rollouts.
      step: Their number.
    """
    if self._is_on:
      self._wait()  # its error, if it has one, is that of the next rollout
      self._load(state.params, step)

  def _load(self, params: Any, version: int) -> None:
    self.run.engine.load(self.updater.joined(params), version=version)

  def _begin(self, prompt_state: PromptState, step: int) -> None:
    drawn: futures.Future[tuple[Drawn, float]] = futures.Future()

    def draw():
      try:
        drawn.set_result(speed.timed(self.draw, self.run, prompt_state, step))
      except BaseException as error:  # `take` raises it
        drawn.set_exception(error)

    self._drawn = drawn
    # A daemon, because a second Ctrl-C ends the program without waiting for a
    # reward function.
    self._thread = threading.Thread(target=draw, name='ahead', daemon=True)
    self._thread.start()

  def _wait(self) -> None:
    if self._thread is not None:
      self._thread.join()
      self._thread = None

  def _judging(self, judge: Judge, completions: Completions):
    self._is_judging = True
    judged = rollout_lib.judged_alone(judge, completions)
    self._is_judging = False
    self._between()
    return judged

  def _between(self) -> None:
    """Ends what is being drawn, once nobody waits for it any more."""
    if self._is_left:
      raise stop_signal.Stopped
