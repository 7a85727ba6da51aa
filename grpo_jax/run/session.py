"""A session: one start of a run, where it writes, and how it is saved.

A run may take several starts: it is stopped, and the same command continues it.
What one rollout hands to the next is a `Progress`. A checkpoint holds a
`Progress`, and the next start opens its session with the newest one.
"""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import dataclasses
import functools
import pathlib
from typing import Any
from typing import NamedTuple

import jax

from grpo_jax import engines
from grpo_jax import monitor as monitor_lib
from grpo_jax.config import Config
from grpo_jax.episodes.types import Rollout
from grpo_jax.hosts import joining
from grpo_jax.hosts.processes import ALONE
from grpo_jax.hosts.processes import Processes
from grpo_jax.hosts.stop_signal import Stop
from grpo_jax.hosts.stop_signal import Stopped
from grpo_jax.learner.instruments.hook import Instrument
from grpo_jax.learner.types import TrainState
from grpo_jax.learner.updates import Updater
from grpo_jax.models.layout import LayoutSpec
from grpo_jax.monitor import Monitor
from grpo_jax.monitor import Sample
from grpo_jax.rollouts import dynamic_sampling
from grpo_jax.rollouts import gathering
from grpo_jax.rollouts.dynamic_sampling import PromptState
from grpo_jax.run import ahead
from grpo_jax.run import compilations
from grpo_jax.run import compile_ahead
from grpo_jax.run import judging
from grpo_jax.run import warm_up
from grpo_jax.run.build import build
from grpo_jax.run.build import data as build_data
from grpo_jax.run.build import identity
from grpo_jax.run.build import learner as build_learner
from grpo_jax.run.build import limits
from grpo_jax.run.build import model as build_model
from grpo_jax.run.build import rewards as build_rewards
from grpo_jax.run.build.objects import Objects
from grpo_jax.run.keep import bucket
from grpo_jax.run.keep import export
from grpo_jax.run.keep import fingerprints
from grpo_jax.run.keep import workdir as workdir_lib
from grpo_jax.run.keep.checkpoint import Checkpoints
from grpo_jax.run.keep.checkpoint import Restored
from grpo_jax.run.refused import Refused

# `(step, metrics, rollout) -> whether to end the run`; see `grpo_jax.train`.
OnRollout = Callable[[int, dict[str, float], Rollout | None], Any]


class Unwritten(NamedTuple):
  """The metrics of a rollout and its updates that are not yet written.

  They wait for the evaluation, which may be due after the rollout.
  """

  measured: dict[str, float | None]
  samples: list[Sample]
  rollout: Rollout | None = None  # None if an earlier start has sampled it


class Progress(NamedTuple):
  """What a run carries from one rollout to the next, and a checkpoint holds."""

  step: int  # rollouts done
  state: TrainState
  prompt_state: PromptState
  unwritten: Unwritten | None  # None once they are written
  layout: LayoutSpec  # as far as the first rollout has decided it


class Session(NamedTuple):
  """One start of a run: its parts, and where it writes."""

  run: build.Run
  updater: Updater
  instruments: list[Instrument]
  compiling: compile_ahead.Compiling
  workdir: pathlib.Path
  saves: Checkpoints
  monitor: Monitor
  stop: Stop
  replays: bool  # whether saved rollouts take the place of sampling
  versions: dict[str, Any]  # see `workdir.versions`
  frozen: list[int]  # fingerprint of the parameters that no update changes
  exports: export.Exports
  on_rollout: OnRollout | None
  refused: Refused
  failures: judging.Failures
  compilations: compilations.Compilations
  peers: Processes

  def is_stopped(self) -> bool:
    """Whether a signal, to any process, has asked to stop."""
    return self.stop() if self.peers is ALONE else self.peers.is_stopped()

  def at_once(self) -> contextlib.AbstractContextManager[None]:
    """In it a signal need not wait; see `Stop.at_once`.

    With several processes none may leave alone: there the engine and the
    judging ask.
    """
    if self.peers.number > 1:
      return contextlib.nullcontext()
    return self.stop.at_once()

  def whole(self, rollout: Rollout) -> Rollout:
    """The rollout with all that other processes know of it; texts in the first.

    All processes must call it.
    """
    run = self.run
    decode = run.tokenizer.decode if self.peers.is_first else None
    return gathering.whole(rollout, run.mesh, decode)


@contextlib.contextmanager
def opened(
  config: Config,
  workdir: str | pathlib.Path,
  stop: Stop,
  replays: bool,
  objects: Objects,
  on_rollout: OnRollout | None,
  screen: monitor_lib.Screen | None = None,
  peers: Processes = ALONE,
) -> Iterator[tuple[Session, Progress | None]]:
  """A session, and the progress in its newest checkpoint, if it has one."""
  workdir = pathlib.Path(workdir)
  # Before anything is built: an object that the run was given in Python may be
  # missing now, and this error names the argument that takes it.
  config = workdir_lib.with_widths(workdir, config)
  workdir_lib.refuse_another(workdir, config, objects=objects)
  with contextlib.ExitStack() as stack:
    begin = monitor_lib.start if peers.is_first else monitor_lib.quiet
    screen = stack.enter_context(screen or begin(config, workdir))
    run, updater = _built(config, objects, screen, peers)
    alike = {'--replay': replays, 'an on_rollout': on_rollout is not None}
    run, config = _joined(run, peers, stop, objects, alike), run.config
    # Early, so that they import the judges while this process compiles.
    pool = stack.enter_context(build_rewards.workers(run.limits, run.rewards))
    run = run._replace(workers=pool)
    exports = export.Exports(run, workdir, peers)
    # After building, so that a config that cannot be built leaves no workdir.
    with peers.together():
      stack.enter_context(workdir_lib.claimed(workdir, config))
    workdir_lib.check_shared(workdir, peers)
    saves, saved = _restored(stack, screen, run, workdir, updater, peers)
    if saved is not None:
      _check_restored(saved, run, workdir, replays)
    if run.weights.has_adapters:
      with screen.phase('reading the weights beside the adapters'):
        weights = build.frozen_params(run)
      updater = dataclasses.replace(updater, frozen=weights)
    frozen = fingerprints.of(updater.frozen)
    if saved is not None:
      build_model.check_frozen(saved, frozen, run.weights.path)
    warn = functools.partial(screen.warn, None)  # before the first rollout
    for warning in build_rewards.warnings(run.rewards) + ahead.warnings(run):
      warn(warning)
    progress = _progress(saved, updater.layout) if saved else None
    # The last rollout with a line in metrics.jsonl; see `Unwritten`.
    written = progress and progress.step - bool(progress.unwritten)
    done = progress.step if progress else 0
    more = {'after_step': done, 'replays': replays}
    with peers.together():
      contents = {}
      if peers.is_first:  # which writes for all
        contents = workdir_lib.contents(run.sources)
      versions = workdir_lib.record(
        workdir, config, saved is None, objects, warn, contents, **more
      )
    compiling = compile_ahead.NOTHING
    if done < run.steps:
      # XLA compiles in a thread while the warm-up and the first rollout run.
      layout = progress.layout if progress else updater.layout
      compiling = compile_ahead.start(updater, layout, build.example(run), done)
    monitor = stack.enter_context(
      _monitor(config, workdir, written, screen, replays, peers)
    )
    saves.warn = monitor.warn
    session = Session(
      run, updater, build_learner.instruments(run.measure, updater), compiling,
      workdir, saves, monitor, stop, replays, versions, frozen, exports,
      on_rollout,
      Refused(**saved.host.get('refused', {})) if saved else Refused(),
      judging.Failures(), compilations.Compilations(), peers,
    )  # fmt: skip
    if saved is not None:
      _go_on(session, saved)
    yield session, progress


def _monitor(
  config: Config,
  workdir: pathlib.Path,
  written: int | None,
  screen: monitor_lib.Screen,
  replays: bool,
  peers: Processes,
) -> Monitor | monitor_lib.Quiet:
  """What the first process shows and writes, and the others do not."""
  if not peers.is_first:
    return monitor_lib.Quiet(peers.warn)
  return Monitor(
    config.log,
    workdir,
    config.steps,
    written,
    dataclasses.asdict(config),
    screen,
    config.model,
    replays,
  )


def _built(
  config: Config, objects: Objects, screen: monitor_lib.Screen, peers: Processes
) -> tuple[build.Run, Updater]:
  """The parts of a run; the screen says what they are."""
  with screen.phase('finding devices'):
    devices = jax.devices()
  screen.fact('devices', f'{len(devices)} x {devices[0].device_kind}')
  with screen.phase('building the model and the data'):
    run = build.run(config, objects, shares=peers.number > 1)
    updater = build.updater(run)
  leaves = jax.tree.leaves(updater.compiled.abstract.params)
  screen.fact(
    'size',
    f'{sum(leaf.size for leaf in leaves):,} parameters, vocabulary of '
    f'{run.tokenizer.vocab_size:,}',
  )
  if note := build_data.turn_end_note(config, run.tokenizer):
    screen.fact('ends', note)
  for name, text in limits.facts(run, len(devices)).items():
    screen.fact(name, text)
  return run, updater


def _joined(
  run: build.Run,
  peers: Processes,
  stop: Stop,
  objects: Objects,
  alike: dict[str, Any],
) -> build.Run:
  """The run with what several processes do together.

  Args:
    run: Of this process.
    peers: All of them.
    stop: Asked by signals.
    objects: What the run was given in Python.
    alike: What must be the same in all processes, beside all that.

  Raises:
    ValueError: The processes were started differently.
  """
  joining.check_joined(peers)
  if peers.number == 1:
    return run
  peers.pass_on(stop)
  peers.check_equal(identity.compared(run.config, objects) | alike)

  def between():
    if peers.is_stopped():
      raise Stopped

  return run._replace(
    engine=engines.Interruptible(run.engine, between),
    judging=judging.shared(peers, stop),
  )


def _go_on(session: Session, saved: Restored) -> None:
  """Puts the parts of a session where the checkpoint has left them."""
  session.exports.resume(saved.step, saved.host.get('saves', 0))
  # An earlier start may have been killed before it removed these.
  warm_up.forget(session.workdir)
  said = f'  goes on from the checkpoint of rollout {saved.step}'
  session.monitor.line(said)
  params = session.updater.joined(saved.state.params)
  session.run.engine.load(params, version=saved.step)


def _restored(
  stack: contextlib.ExitStack,
  screen: monitor_lib.Screen,
  run: build.Run,
  workdir: pathlib.Path,
  updater: Updater,
  peers: Processes,
) -> tuple[Checkpoints, Restored | None]:
  """The checkpoints, and the newest."""
  directory = bucket.arrays(workdir) / 'checkpoints'
  goes_on = any(directory.glob('[0-9]*'))
  restoring = 'restoring the newest checkpoint'
  with screen.phase(restoring if goes_on else 'preparing the checkpoints'):
    saves = stack.enter_context(
      Checkpoints(
        directory,
        run.keep.keep_last,
        bool(run.keep.best_metric),
        every_minutes=run.keep.every_minutes,
        peers=peers,
      )
    )
    abstract = ahead.with_older(
      run, updater.compiled.abstract, copy=lambda x: x
    )
    return saves, saves.restore(abstract)


def _progress(saved: Restored, layout: LayoutSpec) -> Progress:
  """The progress that `save` was called with.

  Args:
    saved: The newest checkpoint.
    layout: Of this start, which may differ from that of the one before.
  """
  unwritten = saved.host['unwritten']
  if unwritten is not None:
    samples = [Sample(*sample) for sample in unwritten['samples']]
    unwritten = Unwritten(unwritten['measured'], samples)
  prompt_state = dynamic_sampling.from_json(saved.host)
  layout = build_learner.decided(layout, saved.host['layout'])
  return Progress(saved.step, saved.state, prompt_state, unwritten, layout)


def _check_restored(
  saved: Restored, run: build.Run, workdir: pathlib.Path, replays: bool
) -> None:
  """Raises a ValueError if a start does not fit the checkpoint of its run."""
  if saved.step > run.steps:
    raise ValueError(
      f'The run in {workdir} has done {saved.step} rollouts, and config.steps='
      f'{run.steps}; give at least as many, or another workdir.'
    )
  if saved.host['replays'] != replays:
    did, does = 'sampled', 'replays'
    if not replays:
      did, does = 'replayed', 'samples'
    raise ValueError(
      f'The run in {workdir} has {did} its rollouts, and this command {does} '
      'them; give the same command, or another workdir.'
    )


def finish(session: Session, progress: Progress) -> None:
  """Saves the last checkpoint and waits for it; tries twice.

  Raises:
    ValueError: The checkpoint cannot be saved; in all processes.
  """
  for _ in range(2):
    save(session, progress, {})
    with session.monitor.phase('waiting for the checkpoint to be written'):
      session.saves.wait()
    if not session.saves.owed:
      return
  error = ValueError(
    f'The checkpoint of rollout {progress.step} could not be saved; make room '
    'and give the same command again, which goes on from the checkpoint of '
    f'rollout {max(session.saves.steps(), default=None)}.'
  )
  raise session.peers.fail(error)  # all know of it, and none has failed alone


def save(
  session: Session, progress: Progress, measured: dict[str, float | None]
) -> None:
  """Begins to save a checkpoint, and returns while it is being written."""
  step, state, prompt_state, unwritten, layout = progress
  if prompt_state.surplus:
    surplus = session.whole(prompt_state.surplus)
    prompt_state = prompt_state._replace(surplus=surplus)
  metric = measured.get(session.run.keep.best_metric)
  exports = session.exports.count(step)
  host = {
    **dynamic_sampling.to_json(prompt_state),
    'unwritten': unwritten
    and {'measured': unwritten.measured, 'samples': unwritten.samples},
    'replays': session.replays,
    'config': dataclasses.asdict(session.run.config),
    'versions': session.versions,
    'frozen': session.frozen,
    # What the first rollout has decided; see `models.stack.decided`.
    'layout': build_learner.spec_json(layout),
    'saves': session.exports.saves,
    'refused': dataclasses.asdict(session.refused),
  }
  with session.monitor.phase('saving a checkpoint'):
    bucket.push(session.workdir)
    session.saves.save(step, state, host, metric)
  if step == 0:
    # The checkpoints of the warm-up are removed only once this one is on the
    # disk: if the process is killed before, the next start needs them.
    session.saves.wait()
    if not session.saves.owed:
      warm_up.forget(session.workdir)
  if exports:
    _export(session, step, state)


def make_room(session: Session) -> None:
  """Frees the memory that checkpoints take, where the next update needs it.

  A checkpoint that is being written is a copy of the state in the memory of the
  host, which on a CPU is the memory of updates too. There it is written first.
  """
  if jax.default_backend() == 'cpu':
    session.saves.wait()


def _export(session: Session, step: int, state: TrainState) -> None:
  """Writes the policy as a Hugging Face folder, once its checkpoint is there.

  If the disk is full, a warning is shown and the run goes on.
  """
  with session.monitor.phase('writing the model as a Hugging Face folder'):
    session.saves.wait()
    if session.saves.owed:
      return
    try:
      session.exports.write(step, session.updater.joined(state.params))
    except ValueError as error:
      session.monitor.warn(f'{error} Training goes on.')


@contextlib.contextmanager
def saved_if_it_fails(session: Session, progress: Progress) -> Iterator[None]:
  """Saves the progress if the body raises, and lets the error pass.

  A reward function may raise anything, `SystemExit` too.
  """
  try:
    yield
  except BaseException as error:
    # After a second Ctrl-C nothing is saved.
    again = isinstance(error, KeyboardInterrupt) and session.stop.signal
    if isinstance(error, Stopped) or not again:
      error = session.peers.fail(error)
      save(session, progress, {})
      session.saves.wait()
    raise error


def check_end(session: Session, progress: Progress) -> None:
  """Makes an error of an end at which no update was finite.

  Without it a run that broke down a few rollouts before its end would report
  success.

  Raises:
    ValueError: The run is done, and all updates of its last rollout were
      refused. It is said by every start of such a run.
  """
  run = session.run
  error = session.refused.at_the_end(run.learn.nonfinite_rollouts)
  # A rollout whose metrics are not written is not counted yet.
  done = progress.step >= run.steps and progress.unwritten is None
  if error and done:
    raise session.peers.fail(ValueError(error))


@contextlib.contextmanager
def profiled(
  session: Session, step: int, steps: tuple[int, int]
) -> Iterator[None]:
  """Records rollout `step` with the JAX profiler, if it is in a range.

  Args:
    session: See `Session`.
    step: Number of the rollout, counted from 1.
    steps: The first and the last rollout of the range; (0, 0): none.
  """
  if steps[0] <= step <= steps[1]:
    with jax.profiler.trace(str(session.workdir / 'profile' / f'step_{step}')):
      yield
  else:
    yield
