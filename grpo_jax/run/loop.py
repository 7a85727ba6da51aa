"""The loop of a run: draw, learn, evaluate, write, save."""

import contextlib
import functools
import pathlib
import time
from typing import Any

from grpo_jax import monitor
from grpo_jax.config import Config
from grpo_jax.hosts import joining
from grpo_jax.hosts import stop_signal
from grpo_jax.learner import speed
from grpo_jax.rollouts import gathering
from grpo_jax.rollouts import replay as replay_lib
from grpo_jax.rollouts import rollout_metrics
from grpo_jax.rollouts.sources import Delivery
from grpo_jax.run import learning
from grpo_jax.run import progress as progress_lib
from grpo_jax.run import reports
from grpo_jax.run import sampling
from grpo_jax.run import session as session_lib
from grpo_jax.run import warm_up
from grpo_jax.run.build import build
from grpo_jax.run.keep import bucket
from grpo_jax.run.keep import host_memory
from grpo_jax.run.keep import objects as objects_lib
from grpo_jax.run.learning import Learned
from grpo_jax.run.progress import Progress
from grpo_jax.run.progress import Session
from grpo_jax.run.progress import Unwritten


def train(
  config: Config,
  workdir: str | pathlib.Path,
  stop: stop_signal.Stop | None = None,
  replay: str | pathlib.Path | None = None,
  profile_steps: tuple[int, int] = (0, 0),
  objects: objects_lib.Objects = objects_lib.NOTHING,
  on_rollout: progress_lib.OnRollout | None = None,
  screen: monitor.Screen | None = None,
) -> dict[str, float | None]:
  """Trains a model, or continues from the newest checkpoint in the workdir.

  Args:
    config: See `grpo_jax.config.Config`.
    workdir: The directory that the run writes to; see `workdir.py`. It may be
      in a bucket; see `bucket.py`.
    stop: Called between the parts of a rollout. Once it returns True, the run
      is saved and this function returns.
    replay: A directory with the completions of every rollout of an earlier run,
      to train on these instead of sampling.
    profile_steps: First and last rollout to record with the JAX profiler,
      counted from 1.
    objects: What the run was given in Python.
    on_rollout: Called after every rollout; see `grpo_jax.train`.
    screen: What `about.start` returned, to go on with; None starts one.

  Returns:
    `before`, the held-out accuracy after the warm-up, before the first rollout
    (the mean of the first reward, which is an accuracy if it is 0 or 1);
    `after`, the last that was measured, and `after_step`, the rollouts done by
    then, fewer than `steps` if the run was stopped between two evaluations.
    Earlier starts are included; all three are None without held-out problems.
    `steps`, the rollouts done, and `secs`, the duration of this start in
    seconds.

  Raises:
    ValueError: Something that was given cannot be used, nothing is left to
      learn, or no update was finite for a while. The message says what, and
      what to do. The run is saved.
  """
  begun, stop = time.monotonic(), stop or stop_signal.Stop()
  peers = joining.joined()
  with (
    peers,
    contextlib.nullcontext(
      None if replay is None else replay_lib.folder(replay)
    ) as folder,
    # Absolute from here on: a reward function may change the directory.
    bucket.opened(workdir, peers) as directory,
    session_lib.opened(
      session_lib.Start(
        config, directory, stop, folder, objects, on_rollout, screen, peers
      )
    ) as (session, progress),
  ):
    progress = progress or begin(session)
    # When `Stopped` is raised, `progress` is still the one that was saved.
    with contextlib.suppress(stop_signal.Stopped):
      while progress:
        # First of all, because a checkpoint may hold a rollout whose metrics
        # wait for its evaluation; and before the first rollout, step 0 is due.
        progress, ends = conclude(session, progress)
        if ends or progress.step >= session.run.steps or session.is_stopped():
          break
        with session_lib.profiled(session, progress.step + 1, profile_steps):
          progress = advance(session, progress)
    if progress:
      progress_lib.finish(session, progress)
      progress_lib.check_end(session, progress)
    reports.show_warnings(session)
    measured = peers.from_first(session.monitor.heldout())
    last_step, last = measured[-1] if measured else (None, None)
    return {
      'before': dict(measured).get(0),
      'after': last,
      'after_step': last_step,
      'steps': progress.step if progress else 0,
      'secs': time.monotonic() - begun,
    }


def begin(session: Session) -> Progress | None:
  """The progress before the first rollout; None if stopped in the warm-up."""
  params = warm_up.run(
    session.run,
    session.kept.workdir,
    session.monitor,
    session.is_stopped,
    session.updater.frozen,
    session.peers,
  )
  if params is None:
    return None
  with session.monitor.phase('handing the parameters to the sampler'):
    state = session.updater.compiled.init(params)
    receipt = session.source.first(state.params)
    layout = session.updater.layout
    progress = Progress(0, state, receipt, Unwritten({}, []), layout)
    session.go_on(progress)
  return progress


def advance(session: Session, progress: Progress) -> Progress:
  """One rollout and its updates; `conclude` evaluates and writes metrics."""
  step = progress.step
  delivery = draw(session, progress)
  progress_lib.make_room(session)
  learned = learn(session, progress, delivery)
  session.source.publish(learned.state.params, step + 1)
  measured = measure(session, delivery, learned)
  rollout, effects = delivery.rollout, learned.findings.tokens
  samples = reports.keep_completions(session, rollout, step + 1, effects)
  return Progress(
    step + 1,
    learned.state,
    delivery.receipt,
    Unwritten(measured, samples, rollout),
    learned.layouts.spec,
  )


def draw(session: Session, progress: Progress) -> Delivery:
  """The next rollout of the source."""
  with (
    # Nothing is lost by leaving: the next start draws this rollout again.
    progress_lib.saved_if_it_fails(session, progress),
    session.monitor.phase(
      'sampling and judging', 'compiling, then sampling and judging'
    ),
    session.peers.together(),  # before programs that need all of them
  ):
    return session.source.next(progress.step)


def learn(session: Session, progress: Progress, delivery: Delivery) -> Learned:
  """The updates of a rollout; the state of the progress is donated."""
  run, step, rollout = session.run, progress.step, delivery.rollout

  def meanwhile():  # while the devices compute
    session.source.prepare(step + 1)
    right = run.draw.right_reward
    return rollout_metrics.metrics_of_rollout(rollout, step, right)

  with session.monitor.phase('learning', 'compiling, then learning'):
    gathered = gathering.on_devices(rollout, run.mesh)
    session.compiling.wait()
    return learning.learn(
      session.updater,
      progress.layout,
      progress.state,
      gathered,
      step,
      meanwhile,
      session.instruments,
    )


def measure(
  session: Session, delivery: Delivery, learned: Learned
) -> dict[str, Any]:
  """The metrics of a rollout and its updates; warns of what they show."""
  run, counts = session.run, delivery.counts
  measured: dict[str, Any] = learned.measured | counts
  measured |= learned.findings.numbers
  measured |= speed.metrics_of_speed(
    delivery.rollout,
    delivery.secs,
    learned.secs,
    run.model,
    run.peak_flops,
    session.updater.spec.forward_passes(
      learned.scorings, measured.get('needed_tokens', 1)
    ),
    counts.get('tokens_drawn'),
    counts.get('ahead_wait_secs'),
  )
  measured |= host_memory.metrics_of_memory()
  watched = session.watched
  compiled = watched.compilations.warning(learned.layouts.shapes())
  failing = watched.failures.warnings(delivery.rollout, measured)
  for warning in [compiled] * bool(compiled) + failing:
    if session.peers.is_first:  # all know the same
      session.monitor.warn(warning)
  return measured


def conclude(session: Session, progress: Progress) -> tuple[Progress, bool]:
  """Evaluates if that is due, writes the metrics, saves if that is due.

  Returns:
    The progress, with nothing unwritten, and whether the user's `on_rollout`
    asks to end the run.

  Raises:
    ValueError: All updates of `learner.nonfinite_rollouts` rollouts in a row
      were refused, and rollouts are left. The run is saved.
  """
  run, step = session.run, progress.step
  unwritten, saves = progress.unwritten, session.kept.saves
  if unwritten is None:  # an earlier start has done all this
    return progress, False
  measured, due = unwritten.measured, evaluates_at(run, step)
  if due:
    measured = {**measured, **evaluate(session, progress)}
  # Here, so that a save that failed in the background is counted in these
  # metrics and tried again below.
  saves.check()
  if saves.failed:
    measured = {**measured, 'saves_failed': float(saves.failed)}
  reports.show_warnings(session)
  session.monitor.write(step, measured, unwritten.samples)
  progress = progress._replace(unwritten=None)
  refused = session.watched.refused
  refused.count(measured)
  error = ''
  # Not of a rollout of an earlier start, whose checkpoint stays as it is: every
  # start would end here. The run can end after the next rollout.
  if unwritten.rollout is not None:
    error = refused.midway(run.learn.nonfinite_rollouts)
  # After every evaluation, because only a checkpoint saved with its metric can
  # be kept as the best.
  every = run.keep.every_steps
  if due or step % every == 0 or saves.owed or saves.is_due():
    progress_lib.save(session, progress, measured)
  written = unwritten._replace(measured=measured)
  ends = reports.tell(session, progress, written)
  if error and step < run.steps:
    progress_lib.finish(session, progress)
    raise session.peers.fail(ValueError(error))
  return progress, ends


def evaluates_at(run: build.Run, step: int) -> bool:
  """Whether to evaluate after this many rollouts."""
  every = run.evaluation.every_steps
  return step in (0, run.steps) or bool(every) and step % every == 0


def evaluate(session: Session, progress: Progress) -> dict[str, float | None]:
  """The metrics of answers to held-out problems, by the newest policy."""
  with (
    progress_lib.saved_if_it_fails(session, progress),
    session.at_once(),
    session.monitor.phase(
      'evaluating', 'compiling, then evaluating on held-out problems'
    ),
    session.peers.together(),
    session.source.paused(),
  ):
    keep = functools.partial(reports.keep_answers, session)
    return sampling.evaluated(session.run, progress.step, keep)
