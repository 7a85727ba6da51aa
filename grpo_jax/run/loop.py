"""The outer loop of a run: sample, judge, learn, evaluate, save, repeat."""

from collections.abc import Callable
from collections.abc import Sequence
import contextlib
import dataclasses
import functools
import pathlib
import time
from typing import Any
from typing import NamedTuple

import jax
import numpy as np

from grpo_jax import metrics
from grpo_jax import monitor
from grpo_jax import random_keys
from grpo_jax.config import Config
from grpo_jax.episodes import rollout as rollout_lib
from grpo_jax.episodes.types import Rollout
from grpo_jax.hosts import joining
from grpo_jax.hosts import stop_signal
from grpo_jax.learner import updates
from grpo_jax.learner.instruments import hook
from grpo_jax.learner.instruments.hook import Findings
from grpo_jax.learner.instruments.hook import Instrument
from grpo_jax.learner.layouts import Layouts
from grpo_jax.learner.types import TrainState
from grpo_jax.learner.updates import Updater
from grpo_jax.models.layout import LayoutSpec
from grpo_jax.rollouts import dynamic_sampling
from grpo_jax.rollouts import gathering
from grpo_jax.rollouts import pass_at_k
from grpo_jax.rollouts import rollout_metrics
from grpo_jax.rollouts.dynamic_sampling import Drawn
from grpo_jax.rollouts.dynamic_sampling import PromptState
from grpo_jax.run import ahead as ahead_lib
from grpo_jax.run import replay as replay_lib
from grpo_jax.run import reports
from grpo_jax.run import session as session_lib
from grpo_jax.run import speed
from grpo_jax.run import warm_up
from grpo_jax.run.ahead import Ahead
from grpo_jax.run.build import build
from grpo_jax.run.build import data as build_data
from grpo_jax.run.build.objects import NOTHING
from grpo_jax.run.build.objects import Objects
from grpo_jax.run.keep import bucket
from grpo_jax.run.session import Progress
from grpo_jax.run.session import Session
from grpo_jax.run.session import Unwritten


def train(
  config: Config,
  workdir: str | pathlib.Path,
  stop: stop_signal.Stop | None = None,
  replay: str | pathlib.Path | None = None,
  profile_steps: tuple[int, int] = (0, 0),
  objects: Objects = NOTHING,
  on_rollout: session_lib.OnRollout | None = None,
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
    objects: What the run is given in Python; see `objects.py`.
    on_rollout: Called after every rollout; see `grpo_jax.train`.
    screen: What `monitor.start` returned, to go on with; None starts one.

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
  start, stop = time.monotonic(), stop or stop_signal.Stop()
  peers = joining.joined()
  with (
    peers,
    contextlib.nullcontext(drawing(replay)) as draw,
    # Absolute from here on: a reward function may change the directory.
    bucket.opened(workdir, peers) as directory,
    session_lib.opened(
      config,
      directory,
      stop,
      replay is not None,
      objects,
      on_rollout,
      screen,
      peers,
    ) as (session, progress),
    ahead_lib.Ahead(session.run, session.updater, draw) as ahead,
  ):
    progress = progress or begin(session)
    # When `Stopped` is raised, `progress` is still the one that was saved.
    with contextlib.suppress(stop_signal.Stopped):
      while progress:
        # First of all, because a checkpoint may hold a rollout whose metrics
        # wait for its evaluation; and before the first rollout, step 0 is due.
        progress, ends = conclude(session, progress, ahead)
        if ends or progress.step >= session.run.steps or session.is_stopped():
          break
        with session_lib.profiled(session, progress.step + 1, profile_steps):
          progress = advance(session, progress, ahead)
    if progress:
      session_lib.finish(session, progress)
      session_lib.check_end(session, progress)
    show_warnings(session)
    measured = peers.from_first(session.monitor.heldout())
    last_step, last = measured[-1] if measured else (None, None)
    return {
      'before': dict(measured).get(0),
      'after': last,
      'after_step': last_step,
      'steps': progress.step if progress else 0,
      'secs': time.monotonic() - start,
    }


def drawing(replay: str | pathlib.Path | None) -> Callable[..., Drawn]:
  """What gives the next rollout: sampling, or the folder of an earlier run."""
  if replay is None:
    return sampled
  return functools.partial(replay_lib.draw, replay_lib.folder(replay))


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
    state = ahead_lib.with_older(session.run, state)
    params = session.updater.joined(state.params)
    session.run.engine.load(params, version=0)
  layout = session.updater.layout
  return Progress(0, state, PromptState(), Unwritten({}, []), layout)


def advance(session: Session, progress: Progress, ahead: Ahead) -> Progress:
  """One rollout and its updates; `conclude` evaluates and writes metrics."""
  run = session.run
  step, state, prompt_state, _, layout = progress
  with session_lib.saved_if_it_fails(session, progress):
    with (
      # Nothing is lost by leaving: the next start draws this rollout again.
      session.at_once(),
      session.monitor.phase(
        'sampling and judging', 'compiling, then sampling and judging'
      ),
      session.peers.together(),  # before programs that need all of them
    ):
      drawn, sample_secs = ahead.take(state, prompt_state, step)
  rollout, prompt_state, counts = drawn
  state, older = ahead.before_updates(state, prompt_state, step)
  session_lib.make_room(session)
  with session.monitor.phase('learning', 'compiling, then learning'):
    known = gathering.on_devices(rollout, run.mesh)
    # No prompts are wanted after the last rollout, nor where the next one is
    # read from a file; where it is drawn ahead, it has its prompts already.
    last = session.replays or step + 1 == run.steps or run.draw.ahead

    def meanwhile():  # while the devices compute
      if not last:
        run.prompts.fill()
      right = run.draw.right_reward
      return rollout_metrics.of_rollout(rollout, step, right)

    session.compiling.wait()
    updater, instruments = session.updater, session.instruments
    learned = learn(updater, layout, state, known, step, meanwhile, instruments)
  warning = session.compilations.warning(learned.layouts.shapes())
  if warning and session.peers.is_first:
    session.monitor.warn(warning)
  state = ahead.after_updates(learned.state, older, step + 1)
  measured: dict[str, Any] = learned.measured | counts
  measured |= learned.findings.numbers
  measured |= speed.of_speed(
    rollout,
    sample_secs,
    learned.secs,
    run.model.config,
    run.peak_flops,
    updater.spec.forward_passes(
      learned.scorings, measured.get('needed_tokens', 1)
    ),
    counts.get('tokens_drawn'),
    counts.get('ahead_wait_secs'),
  )
  measured |= speed.of_memory()
  for failing in session.failures.warnings(rollout, measured):
    if session.peers.is_first:  # all know the same
      session.monitor.warn(failing)
  samples = reports.keep_completions(
    session, rollout, step + 1, learned.findings.tokens
  )
  unwritten = Unwritten(measured, samples, rollout)
  layout = learned.layouts.spec
  return Progress(step + 1, state, prompt_state, unwritten, layout)


def conclude(
  session: Session, progress: Progress, ahead: Ahead
) -> tuple[Progress, bool]:
  """Evaluates if that is due, writes the metrics, saves if that is due.

  Returns:
    The progress, with nothing unwritten, and whether the user's `on_rollout`
    asks to end the run.

  Raises:
    ValueError: All updates of `learner.nonfinite_rollouts` rollouts in a row
      were refused, and rollouts are left. The run is saved.
  """
  run, step, unwritten = session.run, progress.step, progress.unwritten
  if unwritten is None:  # an earlier start has done all this
    return progress, False
  measured, samples, _ = unwritten
  due = evaluates_at(run, step)
  if due:
    with session_lib.saved_if_it_fails(session, progress):
      with (
        session.at_once(),
        session.monitor.phase(
          'evaluating', 'compiling, then evaluating on held-out problems'
        ),
        session.peers.together(),
      ):
        ahead.give_newest(progress.state, step)
        keep = functools.partial(reports.keep_answers, session)
        heldout = evaluated(run, step, keep)
    measured = {**measured, **heldout}
  # Here, so that a save that failed in the background is counted in these
  # metrics and tried again below.
  session.saves.check()
  if session.saves.failed:
    measured = {**measured, 'saves_failed': float(session.saves.failed)}
  show_warnings(session)
  session.monitor.write(step, measured, samples)
  progress = progress._replace(unwritten=None)
  session.refused.count(measured)
  error = ''
  # Not of a rollout of an earlier start, whose checkpoint stays as it is: every
  # start would end here. The run can end after the next rollout.
  if unwritten.rollout is not None:
    error = session.refused.midway(run.learn.nonfinite_rollouts)
  # After every evaluation, because only a checkpoint saved with its metric can
  # be kept as the best.
  saves, every = session.saves, run.keep.every_steps
  if due or step % every == 0 or saves.owed or saves.is_due():
    session_lib.save(session, progress, measured)
  told = unwritten._replace(measured=measured)
  ends = reports.tell(session, progress, told)
  if error and step < run.steps:
    session_lib.finish(session, progress)
    raise session.peers.fail(ValueError(error))
  return progress, ends


def show_warnings(session: Session) -> None:
  """Shows what other processes have warned of since the last time."""
  for warning in session.peers.warnings():
    session.monitor.warn(warning)


def sampled(run: build.Run, prompt_state: PromptState, step: int) -> Drawn:
  """The next rollout, sampled by the current policy and judged."""
  spec, waited, secs, number = run.draw, 0.0, 0.0, 0

  def judging(judge, completions):
    nonlocal waited, secs, number
    judged, took = speed.timed(run.judging, judge, completions)
    now = time.monotonic()
    # Workers may have begun while others were still being sampled.
    waited, secs = waited + took, secs + now - min(judge.began, now - took)
    number += completions.length.size
    return judged

  def collect(records):
    rollout = rollout_lib.collect(
      records,
      run.engine,
      run.tokenizer,
      run.rewards,
      run.sampling,
      spec.max_tokens,
      spec.group,
      spec.seed,
      step,
      run.data.completion_buckets,
      judging=judging,
      workers=run.workers,
    )
    # Here, so that dynamic sampling chooses groups by the shuffled rewards too.
    if spec.shuffles:
      rng = random_keys.generator(spec.seed, 'shuffle rewards', step)
      rollout = rollout_lib.shuffle_rewards(rollout, rng)
    return rollout

  rollout, prompt_state, counts = dynamic_sampling.draw(
    prompt_state,
    run.prompts,
    run.epoch,
    spec.prompts,
    collect,
    spec.resample_rounds,
    spec.retire_solved,
    spec.right_reward,
    build_data.fits(run.data, run.tokenizer),
  )
  if secs:  # a rollout may consist of what was drawn before
    counts |= {'judge_secs': waited, 'judged_per_sec': number / secs}
  return rollout, prompt_state, counts


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
    updater: See `updates.Updater`.
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


def evaluates_at(run: build.Run, step: int) -> bool:
  """Whether to evaluate after this many rollouts."""
  every = run.evaluation.every_steps
  return step in (0, run.steps) or bool(every) and step % every == 0


def evaluated(
  run: build.Run,
  step: int,
  keep: Callable[[Rollout, int], None] = lambda rollout, step: None,
) -> dict[str, float | None]:
  """The metrics of greedy answers to held-out problems.

  Args:
    run: Its engine has the policy.
    step: Rollouts done.
    keep: Called with the answers and `step`.

  Returns:
    `heldout_accuracy`, the mean of the first reward, which for a reward of 0 or
    1 is the accuracy. It is None if the run has no held-out problems, if no
    answer was judged, or if all problems are too long and dropped; an answer on
    which it failed counts as 0. If any reward has failed on some,
    `heldout_failed` is the number of these; if any problem is too long and
    dropped, `heldout_too_long` is the number of those. If any reward is neither
    0 nor 1, `heldout_graded` is the share of those, and people are told a mean
    reward instead of an accuracy.
  """
  nothing: dict[str, float | None] = {'heldout_accuracy': None}
  if run.heldout is None:
    return nothing
  records, too_long = build_data.heldout_records(
    run.data, run.tokenizer, run.heldout, run.evaluation.examples
  )
  if not records:
    return nothing | too_long
  rollout = rollout_lib.collect(
    records,
    run.engine,
    run.tokenizer,
    run.rewards,
    dataclasses.replace(run.sampling, temperature=0.0),
    run.draw.max_tokens,
    1,
    run.draw.seed,
    step,
    run.data.completion_buckets,
    purpose='evaluate',
    judging=run.judging,
    workers=run.workers,
  )
  keep(rollout, step)
  reward, counts = pass_at_k.first_rewards(rollout)
  accuracy = float(np.mean(reward[counts])) if counts.any() else None
  failed = float(rollout.failed.any(-1).sum())
  some = {'heldout_failed': failed} if failed else {}
  graded = (reward != 0) & (reward != 1) & counts
  if graded.any():
    some['heldout_graded'] = float(np.mean(graded[counts]))
  return {'heldout_accuracy': accuracy, **some, **too_long}
