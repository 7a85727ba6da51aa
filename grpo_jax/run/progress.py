"""What a run has open, how far it has come, and the checkpoints of both."""

import collections
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
import contextlib
import pathlib
from typing import Any
from typing import NamedTuple

import jax

from grpo_jax.episodes.types import Rollout
from grpo_jax.hosts import processes
from grpo_jax.hosts import stop_signal
from grpo_jax.learner import programs
from grpo_jax.learner.instruments.hook import Instrument
from grpo_jax.learner.types import TrainState
from grpo_jax.learner.updates import Updater
from grpo_jax.models.layout import LayoutSpec
from grpo_jax.monitor import Monitor
from grpo_jax.monitor import Sample
from grpo_jax.rollouts import gathering
from grpo_jax.rollouts import sources
from grpo_jax.run import warm_up
from grpo_jax.run import watching
from grpo_jax.run.build import build
from grpo_jax.run.build import learner as build_learner
from grpo_jax.run.keep import bucket
from grpo_jax.run.keep import checkpoint

# `(step, metrics, rollout) -> whether to end the run`; see `grpo_jax.train`.
OnRollout = Callable[[int, dict[str, float], Rollout | None], Any]

# The arrays of a checkpoint: the fields of `TrainState`, of which `params` come
# first and can be read alone, and the parameters of a `Receipt`.
_Arrays = collections.namedtuple('_Arrays', [*TrainState._fields, 'older'])


class Unwritten(NamedTuple):
  """The metrics of a rollout and its updates that are not yet written.

  They wait for the evaluation, which may be due after the rollout.
  """

  measured: Mapping[str, float | None]
  samples: list[Sample]
  rollout: Rollout | None = None  # None if an earlier start has sampled it


class Saves(NamedTuple):
  """The checkpoints of a run; those of earlier starts are counted too.

  Attributes:
    number: How many there are, without that before the first rollout.
    step: Of the last that is counted.
    export: Whether the policy is to be written as a folder, for which it was
      time at the last one or earlier. It stays until the folder is there: the
      process may be killed before, the checkpoint or the folder may fail.
  """

  number: int = 0
  step: int = 0
  export: bool = False

  def counted(self, step: int, every: int) -> 'Saves':
    """With the checkpoint of a step, which may be counted already.

    Args:
      step: Rollouts done.
      every: The config's `export.every_saves`.
    """
    if step <= self.step:
      return self
    number = self.number + 1
    export = bool(every) and (self.export or number % every == 0)
    return Saves(number, step, export)


class Progress(NamedTuple):
  """How far a run has come: all that a checkpoint saves and restores.

  Attributes:
    step: Rollouts done.
    state: What the learner goes on with.
    receipt: What the next rollouts are drawn from, as it was saved last.
    layout: How completions are laid out, as far as the first rollout has
      decided it.
    unwritten: The last rollout's metrics; None once they are written.
    metric: The value of `checkpoint.best_metric` behind the last rollout; None
      if it was not measured.
    saves: The checkpoints so far.
    refused: The rollouts in a row without a finite update.
    waiting: How long `early_stop.metric` has not improved.
  """

  step: int
  state: TrainState
  receipt: sources.Receipt
  layout: LayoutSpec
  unwritten: Unwritten | None = None
  metric: float | None = None
  saves: Saves = Saves()
  refused: watching.Refused = watching.Refused()
  waiting: watching.Waiting = watching.Waiting()

  @property
  def arrays(self) -> Any:
    """All arrays of it, for a checkpoint."""
    return _Arrays(*self.state, older=self.receipt.params)

  def to_json(
    self, whole: Callable[[Rollout], Rollout], nonfinite_rollouts: int
  ) -> dict[str, Any]:
    """All that is no array, for a checkpoint; see `Receipt.to_json`.

    Args:
      whole: Makes a rollout whole that other processes know a part of.
      nonfinite_rollouts: The field of `config.learner`.
    """
    unwritten = self.unwritten
    return {
      **self.receipt.to_json(whole),
      'unwritten': unwritten
      and {'measured': unwritten.measured, 'samples': unwritten.samples},
      # What the first rollout has decided; see `models.stack.decide`.
      'layout': build_learner.spec_json(self.layout),
      'saves': self.saves._asdict(),
      'refused': self.refused.for_next_start(nonfinite_rollouts)._asdict(),
      'waiting': self.waiting._asdict(),
    }


def abstract(
  state: TrainState, snapshot: Callable[[], Any], host: dict[str, Any]
) -> Any:
  """The arrays of a checkpoint as shapes, dtypes and shardings.

  Args:
    state: As shapes, dtypes and shardings.
    snapshot: Returns those of an earlier version, by which others draw.
    host: What lies beside the arrays.

  Raises:
    ValueError: An earlier version of this package has saved it.
  """
  receipt = host.get('receipt')
  if receipt is None:
    packages = host.get('versions', {}).get('packages', {})
    raise ValueError(
      f'it was saved by grpo_jax {packages.get("grpo_jax")}, an earlier '
      'version, which alone reads it'
    )
  number = len(receipt['versions'])
  older = (snapshot(),) * number if number else ()
  return _Arrays(*state, older=older)


def restored(saved: checkpoint.Restored, layout: LayoutSpec) -> Progress:
  """The progress that a checkpoint holds.

  Args:
    saved: The checkpoint.
    layout: Of this start, which may differ from that of the one before.
  """
  *state, older = saved.state
  unwritten = saved.host['unwritten']
  if unwritten is not None:
    samples = [Sample(*sample) for sample in unwritten['samples']]
    unwritten = Unwritten(unwritten['measured'], samples)
  return Progress(
    saved.step,
    TrainState(*state),
    sources.receipt_from_json(saved.host, older),
    build_learner.decided(layout, saved.host['layout']),
    unwritten,
    saves=Saves(**saved.host['saves']),
    refused=watching.Refused(**saved.host['refused']),
    waiting=watching.Waiting(**saved.host['waiting']),
  )


class Session(NamedTuple):
  """One start of a run.

  Attributes:
    run: The parts that do not change.
    updater: Turns rollouts into updates.
    source: Gives the rollouts.
    instruments: Measure what updates do.
    compiling: The programs of an update, before the first.
    workdir: What the run writes to, on this machine.
    saves: The checkpoints.
    export: Writes parameters as a folder; None if the run writes none.
    push: Sends parameters to the Hub; None if the run sends none.
    origin: What each checkpoint says of this start: config, versions, whether
      rollouts are replayed, and the fingerprint of weights beside adapters.
    failures: Warns of reward functions that always fail.
    compilations: Warns of programs that are compiled in the midst of a run.
    monitor: What people see.
    on_rollout: Called after every rollout; see `grpo_jax.train`.
    stop: Asked by signals.
    peers: The processes of the run.
  """

  run: build.Run
  updater: Updater
  source: sources.Source
  instruments: list[Instrument]
  compiling: programs.Compiling
  workdir: pathlib.Path
  saves: checkpoint.Checkpoints
  export: Callable[[pathlib.Path, Any], None] | None
  push: Callable[[int, Any], str] | None
  origin: dict[str, Any]
  failures: watching.Failures
  compilations: watching.Compilations
  monitor: Monitor
  on_rollout: OnRollout | None
  stop: stop_signal.Stop
  peers: processes.Processes

  def is_stopped(self) -> bool:
    """Whether a signal, to any process, has asked to stop."""
    return (
      self.stop() if self.peers is processes.ALONE else self.peers.is_stopped()
    )

  def whole(self, rollout: Rollout) -> Rollout:
    """The rollout with all that other processes know of it; texts in the first.

    All processes must call it.
    """
    run = self.run
    decode = run.tokenizer.decode if self.peers.is_first else None
    return gathering.whole(rollout, run.mesh, decode)


def at_once(
  stop: stop_signal.Stop, peers: processes.Processes
) -> contextlib.AbstractContextManager[None]:
  """`Stop.at_once`, where a process may leave alone.

  With several processes none may: there the engine and the judging ask.
  """
  return contextlib.nullcontext() if peers.number > 1 else stop.at_once()


def hand_over(session: Session, progress: Progress) -> None:
  """Puts the source where a progress has left it."""
  session.source.restore(progress.receipt, progress.step)
  session.source.publish(progress.state.params, progress.step)


def finish(session: Session, progress: Progress) -> None:
  """Saves the last checkpoint and waits for it; tries twice.

  Raises:
    ValueError: The checkpoint cannot be saved; in all processes.
  """
  session.saves.insist(
    lambda: save(session, progress),
    'rollout',
    progress.step,
    session.monitor.phase,
  )


def save(session: Session, progress: Progress) -> Progress:
  """Begins to save a checkpoint, and returns while it is being written.

  Returns:
    The progress, in which this checkpoint is counted.
  """
  saves, step = session.saves, progress.step
  counted = progress.saves.counted(step, session.run.export.every_saves)
  receipt = session.source.receipt()
  progress = progress._replace(saves=counted, receipt=receipt)
  most = session.run.learn.nonfinite_rollouts
  host = {**session.origin, **progress.to_json(session.whole, most)}
  with session.monitor.phase('saving a checkpoint'):
    bucket.push(session.workdir)
    saves.save(step, progress.arrays, host, progress.metric)
  if step == 0:
    # The checkpoints of the warm-up are removed only once this one is on the
    # disk: if the process is killed before, the next start needs them.
    saves.wait()
    if not saves.owed:
      warm_up.forget(session.workdir)
  return export(session, progress)


def make_room(session: Session) -> None:
  """Frees the memory that checkpoints take, where the next update needs it.

  A checkpoint that is being written is a copy of the state in the memory of the
  host, which on a CPU is the memory of updates too. There it is written first.
  """
  if jax.default_backend() == 'cpu':
    session.saves.wait()


def export(session: Session, progress: Progress) -> Progress:
  """Writes the policy as a Hugging Face folder, if that is due.

  Its checkpoint is there first. If the disk is full, a warning is shown, the
  run goes on, and the next checkpoint is written as a folder.
  """
  write, step = session.export, progress.step
  if not progress.saves.export or write is None:
    return progress
  done = progress._replace(saves=progress.saves._replace(export=False))
  place = pathlib.PurePath('exports', str(step))
  # The file that makes a model of a folder comes last.
  last = 'adapter_config.json' if session.run.export.adapter else 'config.json'
  there = bucket.arrays(session.workdir) / place.as_posix() / last
  if session.peers.from_first(there.exists()):
    return done
  with session.monitor.phase('writing the model as a Hugging Face folder'):
    session.saves.wait()
    if session.saves.owed:
      return progress
    try:
      params = session.updater.joined(progress.state.params)
      write(session.workdir / place, params)
    except ValueError as error:
      session.monitor.warn(f'{error} Training goes on.')
      return progress
  return done


def push(session: Session, progress: Progress) -> str:
  """Pushes the last policy of a run that is over, once; the address, or ''."""
  if session.push is None:
    return ''
  params = session.updater.joined(progress.state.params)
  with session.monitor.phase('pushing the model to the Hub'):
    return session.push(progress.step, params)


def waited(
  session: Session, progress: Progress, measured: Mapping[str, float | None]
) -> watching.Waiting:
  """`Progress.waiting` with what was measured, as the first process counts it.

  Args:
    session: Says what ends the run early.
    progress: Done so far.
    measured: Metrics behind its last rollout. Those of speed and memory differ
      from process to process.
  """
  spec = session.run.early_stop
  if not spec.metric:
    return progress.waiting
  counted = progress.waiting.counted(spec, progress.step, measured)
  return session.peers.from_first(counted)


def warn_of_metric(session: Session, progress: Progress) -> None:
  """Warns if the first rollout lacks the metric that may end the run."""
  spec = session.run.early_stop
  warning = watching.warning_of_metric(spec, progress.waiting, progress.step)
  if warning and session.peers.is_first:
    session.monitor.warn(warning)


def reason_to_end(session: Session, progress: Progress) -> str:
  """Why the run ends before its last rollout; '' if it does not."""
  is_done = progress.step >= session.run.steps
  spec = session.run.early_stop
  return '' if is_done else progress.waiting.reason_to_end(spec)


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
    if isinstance(error, stop_signal.Stopped) or not again:
      error = session.peers.fail(error)
      save(session, progress)
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
  error = progress.refused.at_the_end(run.learn.nonfinite_rollouts)
  # A rollout whose metrics are not written is not counted yet.
  ends = progress.step >= run.steps or reason_to_end(session, progress)
  done = ends and progress.unwritten is None
  if error and done:
    raise session.peers.fail(ValueError(error))
