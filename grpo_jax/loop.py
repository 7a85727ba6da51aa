"""The outer loop: sample, judge, learn, save, repeat."""

from collections.abc import Callable
import contextlib
import dataclasses
import functools
import pathlib
import time
from typing import Any

import numpy as np

from grpo_jax import build
from grpo_jax import data
from grpo_jax import keys
from grpo_jax import measure
from grpo_jax import metrics
from grpo_jax import replayed
from grpo_jax import resample
from grpo_jax import rollout as rollout_lib
from grpo_jax import session as session_lib
from grpo_jax import signals
from grpo_jax import warm_up
from grpo_jax.config import Config
from grpo_jax.learner import TrainState
from grpo_jax.resample import Drawn
from grpo_jax.resample import Supply
from grpo_jax.rollout import Rollout
from grpo_jax.session import Progress
from grpo_jax.session import Session
from grpo_jax.session import Unwritten
from grpo_jax.update import Updater


def train(
  config: Config,
  workdir: str | pathlib.Path,
  stop: signals.Stop | None = None,
  replay: str | pathlib.Path | None = None,
  profile_steps: tuple[int, int] = (0, 0),
) -> dict[str, float | None]:
  """Trains a model, from where the workdir's newest checkpoint stands.

  Args:
    config: See `config.py`.
    workdir: Where everything goes; see `workdir.py`.
    stop: Once it says True, the run is saved and this returns.
    replay: The completions of every rollout of an earlier run, a directory, to
      train on these instead of sampling.
    profile_steps: First and last rollout to record with the JAX profiler,
      counted from 1.

  Returns:
    `before` and `after`, the held-out greedy accuracies after the warm-up and
    at the end (None without held-out problems), `steps`, the rollouts done,
    and `secs`, the time of this start.

  Raises:
    ValueError: Something that was given cannot be used, or nothing is left to
      learn; the sentence says what, and what to do. The run is saved.
  """
  start, stop = time.monotonic(), stop or signals.Stop()
  draw = functools.partial(replayed.draw, replay) if replay else sampled
  with session_lib.opened(config, workdir, stop, replay is not None) as (
    session,
    progress,
  ):
    progress = progress or begin(session)
    with contextlib.suppress(signals.Stopped):
      while progress:
        progress = conclude(session, progress)
        if progress.step >= config.steps or stop():
          break
        with session_lib.profiled(session, progress.step + 1, profile_steps):
          progress = advance(session, progress, draw)
    if progress:
      session_lib.finish(session, progress)
    accuracy = session.monitor.series('heldout_accuracy') or [None]
    return {
      'before': accuracy[0],
      'after': accuracy[-1],
      'steps': progress.step if progress else 0,
      'secs': time.monotonic() - start,
    }


def begin(session: Session) -> Progress | None:
  """The progress before the first rollout; None if stopped on the way."""
  params = warm_up.run(
    session.run, session.workdir, session.monitor, session.stop
  )
  if params is None:
    return None
  state = session.update.compiled.init(params)
  session.run.engine.load(state.params, version=0)
  return Progress(0, state, Supply(), Unwritten({}, []))


def advance(
  session: Session, progress: Progress, draw: Callable[..., Any]
) -> Progress:
  """One rollout and its updates; its metrics are not written yet."""
  run, config = session.run, session.run.config
  step, state, supply, _ = progress
  with session_lib.saved_if_it_fails(session, progress):
    with session.stop.at_once():
      drawn, sample_secs = timed(draw, run, supply, step)
  rollout, supply, counts = drawn
  (state, measured), learn_secs = timed(
    learn, session.update, state, rollout, step
  )
  run.engine.load(state.params, version=step + 1)
  measured |= measure.of_rollout(rollout, step, config.evaluation.right_reward)
  measured |= counts
  measured |= measure.of_speed(
    rollout,
    sample_secs,
    learn_secs,
    run.model.config,
    run.peak_flops,
    session.update.forward_passes,
    counts.get('tokens_drawn'),
  )
  samples = session_lib.keep_completions(session, rollout, step + 1)
  return Progress(step + 1, state, supply, Unwritten(measured, samples))


def conclude(session: Session, progress: Progress) -> Progress:
  """Evaluates if that is due, writes the metrics, saves if that is due."""
  config, step = session.run.config, progress.step
  if progress.unwritten is None:
    return progress
  measured, samples = progress.unwritten
  due = evaluates_at(config, step)
  if due:
    with session_lib.saved_if_it_fails(session, progress):
      with session.stop.at_once():
        accuracy = heldout_accuracy(session.run, step)
    measured = {**measured, 'heldout_accuracy': accuracy}
  session.saves.check()
  if session.saves.failed:
    measured = {**measured, 'saves_failed': float(session.saves.failed)}
  session.monitor.write(step, measured, samples)
  progress = progress._replace(unwritten=None)
  if due or step % config.checkpoint.every_steps == 0 or session.saves.owed:
    session_lib.save(session, progress, measured)
  return progress


def sampled(run: build.Run, supply: Supply, step: int) -> Drawn:
  """The rollout of one step, by the current policy."""
  config = run.config.sampler

  def collect(records):
    rollout = rollout_lib.collect(
      records,
      run.engine,
      run.tokenizer,
      run.rewards,
      run.sampling,
      config.group,
      step,
      run.config.data.completion_buckets,
    )
    if run.config.shuffle_rewards:
      rng = keys.generator(run.config.seed, 'shuffle rewards', step)
      rollout = shuffle_rewards(rollout, rng)
    return rollout

  return resample.draw(
    supply,
    run.prompts,
    run.epoch,
    config.prompts,
    collect,
    config.resample_rounds,
    config.retire_solved,
    run.config.evaluation.right_reward,
  )


def learn(update: Updater, state: TrainState, rollout: Rollout, step: int):
  """The new state, and plain numbers: waits for the device."""
  state, measured = update(state, rollout, step)
  return state, metrics.to_scalars(measured)


def evaluates_at(config: Config, step: int) -> bool:
  """Whether to evaluate after this many rollouts."""
  every = config.evaluation.every_steps
  return step in (0, config.steps) or bool(every) and step % every == 0


def shuffle_rewards(rollout: Rollout, rng: np.random.Generator) -> Rollout:
  """Rewards permuted over the judged completions: nothing to be learned."""
  reward, valid = rollout.batch.reward.copy(), rollout.batch.valid
  reward[valid] = rng.permutation(reward[valid])
  return rollout._replace(batch=rollout.batch._replace(reward=reward))


def heldout_accuracy(run: build.Run, step: int) -> float | None:
  """Mean of the first reward over greedy answers to held-out problems.

  None if there are none, or none was judged. For a reward of 0 or 1 this is the
  accuracy.
  """
  if run.heldout is None:
    return None
  number = min(run.config.evaluation.examples, len(run.heldout))
  rollout = rollout_lib.collect(
    data.take(run.heldout, 0, number),
    run.engine,
    run.tokenizer,
    run.rewards,
    dataclasses.replace(run.sampling, temperature=0.0),
    1,
    step,
    run.config.data.completion_buckets,
    purpose='evaluate',
  )
  judged = rollout.batch.reward_parts[rollout.batch.valid, 0]
  return float(np.mean(judged)) if len(judged) else None


def timed(function: Callable[..., Any], *args) -> tuple[Any, float]:
  """The result of a call, and its seconds."""
  start = time.monotonic()
  result = function(*args)
  return result, time.monotonic() - start
