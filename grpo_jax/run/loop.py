"""The loop of a run: draw, learn, evaluate, write, save."""

import contextlib
import functools
import pathlib
import time
from typing import Any

from grpo_jax import monitor
from grpo_jax.config import Config
from grpo_jax.hosts import stop_signal
from grpo_jax.learner import speed
from grpo_jax.rollouts import gathering
from grpo_jax.rollouts import rollout_metrics
from grpo_jax.rollouts.sources import Delivery
from grpo_jax.rollouts.sources import Receipt
from grpo_jax.run import learning
from grpo_jax.run import progress as progress_lib
from grpo_jax.run import reports
from grpo_jax.run import sampling
from grpo_jax.run import session as session_lib
from grpo_jax.run import warm_up
from grpo_jax.run.build import build
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
  allowed: tuple[str, ...] = (),
) -> dict[str, float | str | None]:
  """Trains a model, or continues from the newest checkpoint in the workdir.

  Args:
    config: Says what the run does.
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
    allowed: The fields of the config that may differ from the run's: what
      `config.check_allowed` returned.

  Returns:
    `before`, the held-out accuracy after the warm-up, before the first rollout
    (the mean of the first reward, which is an accuracy if it is 0 or 1);
    `after`, the last that was measured, and `after_step`, the rollouts done by
    then, fewer than `steps` if the run was stopped between two evaluations.
    Earlier starts are included; all three are None without held-out problems.
    `steps`, the rollouts done, and `secs`, the duration of this start in
    seconds. `ended_early` says why, of a run that `early_stop` has ended, and
    `pushed` is the address of the commit of `export.push_to`.

  Raises:
    ValueError: Something that was given cannot be used, nothing is left to
      learn, or no update was finite for a while. The message says what, and
      what to do. The run is saved.
  """
  begun = time.monotonic()
  start = session_lib.Start(
    config,
    workdir,
    stop or stop_signal.Stop(),
    replay,
    objects,
    on_rollout,
    screen,
    allowed=allowed,
  )
  with session_lib.opened(start) as (session, progress):
    progress = go_on(session, progress) if progress else begin(session)
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
    return finish(session, progress, begun)


def begin(session: Session) -> Progress | None:
  """The progress before the first rollout; None if stopped in the warm-up."""
  params = warm_up.run(
    session.run,
    session.workdir,
    session.monitor,
    session.is_stopped,
    session.updater.frozen,
    session.peers,
  )
  if params is None:
    return None
  with session.monitor.phase('handing the parameters to the sampler'):
    state = session.updater.compiled.init(params)
    layout = session.updater.layout
    progress = Progress(0, state, Receipt(), layout, Unwritten({}, []))
    greet(session, progress)
    progress_lib.hand_over(session, progress)
  return progress


def go_on(session: Session, progress: Progress) -> Progress:
  """Goes on where a checkpoint stopped; ends what a kill may have cut off."""
  warm_up.forget(session.workdir)
  session.monitor.line(
    f'  goes on from the checkpoint of rollout {progress.step}'
  )
  greet(session, progress)
  progress_lib.hand_over(session, progress)
  return progress_lib.export(session, progress)


def greet(session: Session, progress: Progress) -> None:
  """Makes sure that servers which draw have the policy, if any draw."""
  if not sampling.asks_servers(session.run):
    return
  with session.monitor.phase('comparing the servers with the policy'):
    found = sampling.greet(
      session.run, session.updater, progress.state.params, progress.step
    )
  session.monitor.line(
    f'  the log-probabilities of {found.tokens} tokens differ by '
    f'{found.gap:.2g} nats'
  )


def advance(session: Session, progress: Progress) -> Progress:
  """One rollout and its updates; `conclude` evaluates and writes metrics."""
  delivery = draw(session, progress)
  progress_lib.make_room(session)
  learned = learn(session, progress, delivery)
  # The state before is donated: from here on it is this one that is saved.
  progress = progress._replace(
    step=progress.step + 1,
    state=learned.state,
    layout=learned.layouts.spec,
    unwritten=Unwritten(learned.measured | delivery.counts, []),
    metric=None,
  )
  with progress_lib.saved_if_it_fails(session, progress):
    session.source.publish(progress.state.params, progress.step)
    measured = measure(session, delivery, learned)
    rollout, effects = delivery.rollout, learned.findings.tokens
    samples = reports.keep_completions(session, rollout, progress.step, effects)
  return progress._replace(unwritten=Unwritten(measured, samples, rollout))


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
  run = session.run
  measured: dict[str, Any] = learned.measured | delivery.counts
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
    delivery.tokens,
    delivery.waited_secs,
    run.teacher and run.teacher.model,
  )
  measured |= host_memory.metrics_of_memory()
  compiled = session.compilations.warning(learned.layouts.shapes())
  failing = session.failures.warnings(delivery.rollout, measured)
  for warning in [compiled] * bool(compiled) + failing:
    if session.peers.is_first:  # all know the same
      session.monitor.warn(warning)
  return measured


def conclude(session: Session, progress: Progress) -> tuple[Progress, bool]:
  """Evaluates, writes and saves, each if it is due, and calls `on_rollout`.

  Returns:
    The progress, with nothing unwritten, and whether the run ends before its
    last rollout: for `early_stop`, or the user's `on_rollout` asks for it.

  Raises:
    ValueError: All updates of `learner.nonfinite_rollouts` rollouts in a row
      were refused, and rollouts are left. The run is saved.
  """
  unwritten, reason_to_end = progress.unwritten, progress_lib.reason_to_end
  if unwritten is None:  # an earlier start has done all this
    return progress, bool(reason_to_end(session, progress))
  # Without those of an evaluation: whether one is due depends on it.
  waiting = progress_lib.waited(session, progress, unwritten.measured)
  is_last = bool(reason_to_end(session, progress._replace(waiting=waiting)))
  report = write(session, progress, evaluate(session, progress, is_last))
  progress = progress._replace(
    unwritten=None,
    metric=report.measured.get(session.run.keep.best_metric),
    refused=progress.refused.counted(report.measured),
    waiting=progress_lib.waited(session, progress, report.measured),
  )
  progress_lib.warn_of_metric(session, progress)
  if is_save_due(session, progress):
    progress = progress_lib.save(session, progress)
  ends = reports.call_on_rollout(session, progress, report)
  ends |= bool(reason_to_end(session, progress))
  most = session.run.learn.nonfinite_rollouts
  error = progress.refused.reason_to_end(most)
  if error and progress.step < session.run.steps:
    progress_lib.finish(session, progress)
    raise session.peers.fail(ValueError(error))
  return progress, ends


def is_evaluation_due(run: build.Run, step: int) -> bool:
  """Whether to evaluate after this many rollouts."""
  every = run.evaluation.every_steps
  return step in (0, run.steps) or bool(every) and step % every == 0


def is_save_due(session: Session, progress: Progress) -> bool:
  """Whether to save a checkpoint behind a rollout."""
  run, saves, step = session.run, session.saves, progress.step
  return (
    # Only a checkpoint that is saved with its metric can be the best.
    is_evaluation_due(run, step)
    or step % run.keep.every_steps == 0
    or saves.owed
    or saves.is_due()
  )


def finish(
  session: Session, progress: Progress | None, begun: float
) -> dict[str, float | str | None]:
  """The last save; what `train` returns or, of a run that failed, raises.

  Args:
    session: Still open.
    progress: None if the run was stopped in the warm-up.
    begun: When `train` was called, by the monotonic clock.
  """
  reason = pushed = ''
  if progress:
    progress_lib.finish(session, progress)
    progress_lib.check_end(session, progress)
    reason = progress_lib.reason_to_end(session, progress)
    if reason or progress.step == session.run.steps:
      pushed = progress_lib.push(session, progress)
  reports.show_warnings(session)
  if reason:
    session.monitor.line(reason)
  measured = session.peers.from_first(session.monitor.heldout())
  last_step, last = measured[-1] if measured else (None, None)
  return {
    'before': dict(measured).get(0),
    'after': last,
    'after_step': last_step,
    'steps': progress.step if progress else 0,
    'secs': time.monotonic() - begun,
    **({'ended_early': reason} if reason else {}),
    **({'pushed': pushed} if pushed else {}),
  }


def evaluate(
  session: Session, progress: Progress, is_last: bool = False
) -> dict[str, float | None]:
  """The metrics of answers to held-out problems, by the newest policy.

  There are none if no evaluation is due.

  Args:
    session: Answers them.
    progress: Behind a rollout.
    is_last: Whether the run ends behind it, so that one is due.
  """
  if not (is_last or is_evaluation_due(session.run, progress.step)):
    return {}
  with (
    progress_lib.saved_if_it_fails(session, progress),
    progress_lib.at_once(session.stop, session.peers),
    session.monitor.phase(
      'evaluating', 'compiling, then evaluating on held-out problems'
    ),
    session.peers.together(),
    contextlib.nullcontext()
    if session.run.heldout is None
    else session.source.paused(),
  ):
    keep = functools.partial(reports.keep_answers, session)
    return sampling.evaluated(session.run, progress.step, keep)


def write(
  session: Session, progress: Progress, evaluated: dict[str, float | None]
) -> Unwritten:
  """Writes the metrics of a rollout and its evaluation, and returns them."""
  report = progress.unwritten
  assert report is not None
  # Here, so that a save that failed in the background is counted in these
  # metrics and tried again below.
  session.saves.check()
  failed = session.saves.failed
  some = {'saves_failed': float(failed)} if failed else {}
  measured = {**report.measured, **evaluated, **some}
  reports.show_warnings(session)
  session.monitor.write(progress.step, measured, report.samples)
  return report._replace(measured=measured)
