"""A session: one start of a run, and all that it has open.

A run may take several starts: it is stopped, and the same command continues it.
What one rollout hands to the next is a `Progress`. A checkpoint holds a
`Progress`, and the next start opens its session with the newest one.
"""

from collections.abc import Iterator
import contextlib
import dataclasses
import functools
import pathlib
from typing import Any
from typing import NamedTuple

import jax

from grpo_jax import monitor as monitor_lib
from grpo_jax.config import Config
from grpo_jax.data import hub
from grpo_jax.engines.http.engine import HttpEngine
from grpo_jax.hosts import joining
from grpo_jax.hosts import processes
from grpo_jax.hosts import stop_signal
from grpo_jax.learner import programs
from grpo_jax.learner.updates import Updater
from grpo_jax.monitor import Monitor
from grpo_jax.rollouts import replay as replay_lib
from grpo_jax.run import export
from grpo_jax.run import judging
from grpo_jax.run import progress as progress_lib
from grpo_jax.run import sampling
from grpo_jax.run import watching
from grpo_jax.run.build import about
from grpo_jax.run.build import build
from grpo_jax.run.build import data as build_data
from grpo_jax.run.build import environment as build_environment
from grpo_jax.run.build import identity
from grpo_jax.run.build import learner as build_learner
from grpo_jax.run.build import limits
from grpo_jax.run.build import method as build_method
from grpo_jax.run.build import model as build_model
from grpo_jax.run.build import pins
from grpo_jax.run.build import rewards as build_rewards
from grpo_jax.run.build import teacher as build_teacher
from grpo_jax.run.jobs import learning as learning_jobs
from grpo_jax.run.keep import bucket
from grpo_jax.run.keep import earlier
from grpo_jax.run.keep import fingerprints
from grpo_jax.run.keep import objects as objects_lib
from grpo_jax.run.keep import workdir as workdir_lib
from grpo_jax.run.keep.checkpoint import Checkpoints
from grpo_jax.run.keep.checkpoint import Restored
from grpo_jax.run.progress import OnRollout
from grpo_jax.run.progress import Progress
from grpo_jax.run.progress import Session


class Start(NamedTuple):
  """What a run is started with.

  Attributes:
    config: Says what the run does.
    workdir: As it was typed; in `opened` the directory of this machine.
    stop: Asked by signals.
    replay: The completions of an earlier run, to learn from; None: samples.
    objects: What the run was given in Python.
    on_rollout: Called after every rollout; see `grpo_jax.train`.
    screen: What `monitor.start` returned, to go on with; None starts one.
    peers: The processes of the run; `opened` joins them.
    allowed: The fields of the config that may differ from the run's; see
      `workdir.refuse_another`.
  """

  config: Config
  workdir: str | pathlib.Path
  stop: stop_signal.Stop
  replay: str | pathlib.Path | None = None
  objects: objects_lib.Objects = objects_lib.NOTHING
  on_rollout: OnRollout | None = None
  screen: monitor_lib.Screen | None = None
  peers: processes.Processes = processes.ALONE
  allowed: tuple[str, ...] = ()


@contextlib.contextmanager
def opened(start: Start) -> Iterator[tuple[Session, Progress | None]]:
  """A session, and the progress in its newest checkpoint, if it has one."""
  with contextlib.ExitStack() as stack:
    peers = stack.enter_context(joining.joined())
    replay = None if start.replay is None else replay_lib.folder(start.replay)
    # Absolute from here on: a reward function may change the directory.
    workdir = stack.enter_context(bucket.opened(start.workdir, peers))
    config = pins.pinned(start.config, workdir, peers)
    # Before anything is built: an object that the run was given in Python may
    # be missing now, and this error names the argument that takes it.
    config = workdir_lib.with_widths(workdir, config)
    workdir_lib.refuse_another(
      workdir, config, objects=start.objects, allowed=start.allowed
    )
    screen = stack.enter_context(
      start.screen or about.start(config, workdir, peers.is_first)
    )
    start = start._replace(
      config=config, workdir=workdir, replay=replay, peers=peers
    )
    _fetch(config, screen, peers)
    # Of a replay the answers to held-out problems are drawn here.
    draws = not config.generator.listen or replay is not None
    run, updater = _built(config, start.objects, screen, peers, draws)
    if replay is not None:
      replay_lib.require_fields(replay, [field.name for field in run.fields])
    run, config = _joined(run, start), run.config
    run = _with_processes(run, stack, screen)
    write = export.writer(run, peers)
    push = export.pusher(run.export, write, workdir, screen.line, peers)
    # After building, so that a config that cannot be built leaves no workdir.
    _claim(stack, run, start)
    saves, saved = _restored(stack, screen, run, updater, start)
    updater, found = _with_frozen(run, updater, screen, saved, peers)
    progress = progress_lib.restored(saved, updater.layout) if saved else None
    versions = _recorded(run, start, screen, progress)
    layout, done, ends = updater.layout, 0, False
    if progress is not None:
      layout, done = progress.layout, progress.step
      ends = bool(progress.waiting.reason_to_end(run.early_stop))
    compiling = programs.NOTHING
    if done < run.steps and not ends:
      # XLA compiles in a thread while the warm-up and the first rollout run.
      compiling = programs.compile_ahead(
        updater, layout, build.example(run), done
      )
    monitor = stack.enter_context(_monitor(config, start, screen, progress))
    saves.warn = monitor.warn
    wait = functools.partial(progress_lib.at_once, start.stop, peers)
    jobs = _jobs(stack, run, updater, found['frozen'], start, screen)
    run = learning_jobs.elsewhere(jobs and jobs.desk, run)
    source = sampling.source(run, updater, replay, wait, jobs)
    stack.callback(source.close)
    yield (
      Session(
        run,
        updater,
        source,
        build_learner.instruments(run.measure, updater),
        compiling,
        workdir,
        saves,
        write,
        push,
        {
          'replays': replay is not None,
          'config': dataclasses.asdict(config),
          'versions': versions,
          **found,
        },
        watching.Failures(),
        watching.Compilations(),
        monitor,
        start.on_rollout,
        start.stop,
        peers,
      ),
      progress,
    )


def _fetch(
  config: Config, screen: monitor_lib.Screen, peers: processes.Processes
) -> None:
  """Downloads what the config names on the Hub; the screen says what."""
  if named := pins.names(config):
    with screen.phase('fetching files of the Hub'), hub.telling(screen.line):
      with peers.together():
        pins.fetch(config)
    screen.fact('commits', ', '.join(map(hub.short, named)))


def _built(
  config: Config,
  objects: objects_lib.Objects,
  screen: monitor_lib.Screen,
  peers: processes.Processes = processes.ALONE,
  draws: bool = True,
) -> tuple[build.Run, Updater]:
  """The parts of a run; the screen says what they are."""
  with screen.phase('finding devices'):
    devices = jax.devices()
  screen.fact('devices', f'{len(devices)} x {devices[0].device_kind}')
  with screen.phase('building the model and the data'):
    run = build.run(config, objects, shares=peers.number > 1, draws=draws)
    # Shapes alone: what is beside adapters is read after the checkpoint.
    frozen = build.abstract_params(run).frozen
    teacher = build.abstract_teacher(run, frozen)
    updater = build.updater(run, frozen, teacher=teacher)
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


def _joined(run: build.Run, start: Start) -> build.Run:
  """The run with what several processes do together.

  Raises:
    ValueError: The processes were started differently.
  """
  peers = start.peers
  if start.replay is not None:  # nothing is drawn but answers
    run = dataclasses.replace(
      run, jobs=dataclasses.replace(run.jobs, listen='')
    )
  joining.check_joined(peers)
  if peers.number == 1:
    return run
  peers.pass_on(start.stop)
  alike = {
    '--replay': start.replay is not None,
    'an on_rollout': start.on_rollout is not None,
    '--allow_changed': sorted(start.allowed),
  }
  peers.check_equal(identity.compared(run.config, start.objects) | alike)

  def check():
    if peers.is_stopped():
      raise stop_signal.Stopped

  return dataclasses.replace(
    run,
    check=check,
    judging=judging.shared(peers, start.stop),
    hosts=judging.hosts(peers, start.stop),
  )


def _jobs(
  stack: contextlib.ExitStack,
  run: build.Run,
  updater: Updater,
  frozen: list[int],
  start: Start,
  screen: monitor_lib.Screen,
) -> sampling.Jobs | None:
  """What draws for the run in jobs of its own; None if it draws itself."""
  if not run.jobs.listen:
    return None
  offers = sampling.offers(run, updater)
  workdir = pathlib.Path(start.workdir)
  opened = learning_jobs.opened(
    run, offers, frozen, workdir, screen.line, start.stop, start.peers
  )
  return sampling.Jobs(stack.enter_context(opened), offers)


def _with_processes(
  run: build.Run, stack: contextlib.ExitStack, screen: monitor_lib.Screen
) -> build.Run:
  """The run with what judges and plays for it in processes of their own."""
  stack.enter_context(sampling.closing(run))
  if isinstance(run.engine, HttpEngine):
    run.engine.tell = screen.line
  if run.jobs.listen:  # jobs have processes of their own
    return run
  # Early, so that they import the judges while this process compiles.
  workers = stack.enter_context(build_rewards.workers(run.limits, run.rewards))
  player = stack.enter_context(build_environment.player(run.environment))
  return dataclasses.replace(run, workers=workers, player=player)


def _claim(stack: contextlib.ExitStack, run: build.Run, start: Start) -> None:
  """Claims the workdir, and what earlier starts have left elsewhere."""
  workdir, peers = pathlib.Path(start.workdir), start.peers
  with peers.together():
    stack.enter_context(
      workdir_lib.claimed(workdir, run.config, start.objects, start.allowed)
    )
  workdir_lib.check_shared(workdir, peers)
  if isinstance(run.engine, HttpEngine):
    earlier.recognise(workdir, run.engine.versions)


def _restored(
  stack: contextlib.ExitStack,
  screen: monitor_lib.Screen,
  run: build.Run,
  updater: Updater,
  start: Start,
) -> tuple[Checkpoints, Restored | None]:
  """The checkpoints, and the newest.

  Raises:
    ValueError: It does not fit this start.
  """
  workdir = pathlib.Path(start.workdir)
  directory = bucket.arrays(workdir) / 'checkpoints'
  goes_on = any(directory.glob('[0-9]*'))
  restoring = 'restoring the newest checkpoint'
  with screen.phase(restoring if goes_on else 'preparing the checkpoints'):
    saves = stack.enter_context(
      Checkpoints(
        directory,
        run.keep.keep_last,
        run.keep.best_metric,
        every_minutes=run.keep.every_minutes,
        peers=start.peers,
      )
    )
    state = updater.compiled.abstract
    snapshot = functools.partial(sampling.abstract_snapshot, run, updater)
    saved = saves.restore(
      functools.partial(progress_lib.abstract, state, snapshot)
    )
  if saved is not None:
    with start.peers.together():  # all raise it, and none has failed alone
      _check_fits(saved, run.steps, start)
  return saves, saved


def _check_fits(saved: Restored, steps: int, start: Start) -> None:
  """Raises a ValueError if a checkpoint is of a run that this start is not."""
  if saved.step > steps:
    raise ValueError(
      f'The run in {start.workdir} has done {saved.step} rollouts, and '
      f'config.steps={steps}; give at least as many, or another workdir.'
    )
  replays = start.replay is not None
  if saved.host['replays'] != replays:
    did, does = 'sampled', 'replays'
    if not replays:
      did, does = 'replayed', 'samples'
    raise ValueError(
      f'The run in {start.workdir} has {did} its rollouts, and this command '
      f'{does} them; give the same command, or another workdir.'
    )


def _with_frozen(
  run: build.Run,
  updater: Updater,
  screen: monitor_lib.Screen,
  saved: Restored | None,
  peers: processes.Processes,
) -> tuple[Updater, dict[str, list[int]]]:
  """The updater with what no update changes, and fingerprints of that.

  They are those of 'frozen' and of 'teacher'; [] of what there is not.
  """
  if updater.frozen is not None:
    with screen.phase('reading the weights that are not trained'):
      frozen = build.frozen_params(run)
    updater = dataclasses.replace(updater, frozen=frozen)
  if run.teacher is not None:
    with screen.phase('reading the teacher'):
      teacher = build.teacher_params(run, updater.frozen)
    updater = dataclasses.replace(updater, teacher=teacher)
  found = {
    'frozen': fingerprints.compute(updater.frozen),
    'teacher': fingerprints.compute(updater.teacher),
  }
  if saved is not None:
    path = run.config.teacher.path
    with peers.together():
      build_model.check_frozen(saved, found['frozen'], run.weights.path)
      build_teacher.check_unchanged(saved, found['teacher'], path)
  return updater, found


def _recorded(
  run: build.Run,
  start: Start,
  screen: monitor_lib.Screen,
  progress: Progress | None,
) -> dict[str, Any]:
  """Records this start in the workdir; what warns before the first rollout."""
  warn = functools.partial(screen.warn, None)
  for warning in [
    *build_rewards.warnings(run.rewards),
    *build_method.warnings_of_age(run.learn, run.draw, len(run.rewards)),
  ]:
    warn(warning)
  with start.peers.together():
    contents = {}
    if start.peers.is_first:  # which writes for all
      contents = workdir_lib.contents(run.sources)
    done = progress.step if progress else 0
    versions = workdir_lib.record(
      pathlib.Path(start.workdir),
      run.config,
      progress is None,
      start.objects,
      warn,
      contents,
      after_step=done,
      replays=bool(start.replay),
    )
  for name, (before, now) in versions.get('changed', {}).items():
    text = f'config.{name} from {before!r} to {now!r}, after rollout {done}'
    screen.fact('changed', text)
  return versions


def _monitor(
  config: Config,
  start: Start,
  screen: monitor_lib.Screen,
  progress: Progress | None,
) -> Monitor | monitor_lib.Quiet:
  """What the first process shows and writes, and the others do not."""
  if not start.peers.is_first:
    return monitor_lib.Quiet(start.peers.warn)
  # The last rollout with a line in metrics.jsonl; see `Unwritten`.
  written = progress and progress.step - bool(progress.unwritten)
  return Monitor(
    about.monitored(config),
    pathlib.Path(start.workdir),
    config.steps,
    written,
    dataclasses.asdict(config),
    screen,
    bool(start.replay),
  )


@contextlib.contextmanager
def profiled(
  session: Session, step: int, steps: tuple[int, int]
) -> Iterator[None]:
  """Records rollout `step` with the JAX profiler, if it is in a range.

  Args:
    session: Has the workdir, which gets the profile.
    step: Number of the rollout, counted from 1.
    steps: The first and the last rollout of the range; (0, 0): none.
  """
  if steps[0] <= step <= steps[1]:
    folder = session.workdir / 'profile' / f'step_{step}'
    with jax.profiler.trace(str(folder)):
      yield
    bucket.push_folder(session.workdir, folder)
  else:
    yield
