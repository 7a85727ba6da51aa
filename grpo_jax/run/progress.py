"""What a run has open, how far it has come, and the checkpoints of both."""

import collections
from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import dataclasses
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
from grpo_jax.run import export
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

  measured: dict[str, float | None]
  samples: list[Sample]
  rollout: Rollout | None = None  # None if an earlier start has sampled it


class Progress(NamedTuple):
  """How far a run has come."""

  step: int  # rollouts done
  state: TrainState
  receipt: sources.Receipt  # what the next rollouts are drawn from
  unwritten: Unwritten | None  # None once they are written
  layout: LayoutSpec  # as far as the first rollout has decided it

  @property
  def arrays(self) -> Any:
    """All arrays of it, for a checkpoint."""
    return _Arrays(*self.state, older=self.receipt.params)

  def to_json(self, whole: Callable[[Rollout], Rollout]) -> dict[str, Any]:
    """All that is no array, for a checkpoint; see `Receipt.to_json`."""
    unwritten = self.unwritten
    return {
      **self.receipt.to_json(whole),
      'unwritten': unwritten
      and {'measured': unwritten.measured, 'samples': unwritten.samples},
      # What the first rollout has decided; see `models.stack.decided`.
      'layout': build_learner.spec_json(self.layout),
    }


def abstract(state: TrainState, host: dict[str, Any]) -> Any:
  """The arrays of a checkpoint as shapes, dtypes and shardings.

  Args:
    state: As shapes, dtypes and shardings.
    host: What lies beside the arrays.

  Raises:
    ValueError: An earlier version of this package has saved it.
  """
  if 'older' not in host:
    packages = host.get('versions', {}).get('packages', {})
    raise ValueError(
      f'it was saved by grpo_jax {packages.get("grpo_jax")}, an earlier '
      'version, which alone reads it'
    )
  return _Arrays(*state, older=(state.params,) * host['older'])


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
    unwritten,
    build_learner.decided(layout, saved.host['layout']),
  )


class Kept(NamedTuple):
  """What is kept of a run, and where."""

  workdir: pathlib.Path
  saves: checkpoint.Checkpoints
  exports: export.Exports
  replays: bool  # whether saved rollouts take the place of sampling
  versions: dict[str, Any]  # see `records.versions`
  frozen: list[int]  # fingerprint of the parameters that no update changes


class Session(NamedTuple):
  """One start of a run.

  Attributes:
    run: The parts that do not change.
    updater: Turns rollouts into updates.
    source: Gives the rollouts.
    instruments: Measure what updates do.
    compiling: The programs of an update, before the first.
    kept: What is kept, and where.
    watched: What is counted from rollout to rollout.
    monitor: What people see.
    on_rollout: See `Start`.
    stop: See `Start`.
    peers: See `Start`.
  """

  run: build.Run
  updater: Updater
  source: sources.Source
  instruments: list[Instrument]
  compiling: programs.Compiling
  kept: Kept
  watched: watching.Watched
  monitor: Monitor
  on_rollout: OnRollout | None
  stop: stop_signal.Stop
  peers: processes.Processes

  def is_stopped(self) -> bool:
    """Whether a signal, to any process, has asked to stop."""
    return (
      self.stop() if self.peers is processes.ALONE else self.peers.is_stopped()
    )

  def at_once(self) -> contextlib.AbstractContextManager[None]:
    """In it a signal need not wait; see `Stop.at_once`."""
    return at_once(self.stop, self.peers)

  def whole(self, rollout: Rollout) -> Rollout:
    """The rollout with all that other processes know of it; texts in the first.

    All processes must call it.
    """
    run = self.run
    decode = run.tokenizer.decode if self.peers.is_first else None
    return gathering.whole(rollout, run.mesh, decode)

  def go_on(self, progress: Progress) -> None:
    """Puts the source where a progress has left it."""
    self.source.receipt = progress.receipt
    self.source.publish(progress.state.params, progress.step)


def at_once(
  stop: stop_signal.Stop, peers: processes.Processes
) -> contextlib.AbstractContextManager[None]:
  """`Stop.at_once`, where a process may leave alone.

  With several processes none may: there the engine and the judging ask.
  """
  return contextlib.nullcontext() if peers.number > 1 else stop.at_once()


def finish(session: Session, progress: Progress) -> None:
  """Saves the last checkpoint and waits for it; tries twice.

  Raises:
    ValueError: The checkpoint cannot be saved; in all processes.
  """
  for _ in range(2):
    save(session, progress, {})
    with session.monitor.phase('waiting for the checkpoint to be written'):
      session.kept.saves.wait()
    if not session.kept.saves.owed:
      return
  error = ValueError(
    f'The checkpoint of rollout {progress.step} could not be saved; make room '
    'and give the same command again, which goes on from the checkpoint of '
    f'rollout {max(session.kept.saves.steps(), default=None)}.'
  )
  raise session.peers.fail(error)  # all know of it, and none has failed alone


def save(
  session: Session, progress: Progress, measured: dict[str, float | None]
) -> None:
  """Begins to save a checkpoint, and returns while it is being written."""
  kept, step = session.kept, progress.step
  metric = measured.get(session.run.keep.best_metric)
  exports = kept.exports.count(step)
  host = {
    **progress.to_json(session.whole),
    'replays': kept.replays,
    'config': dataclasses.asdict(session.run.config),
    'versions': kept.versions,
    'frozen': kept.frozen,
    'saves': kept.exports.saves,
    'refused': dataclasses.asdict(session.watched.refused),
  }
  with session.monitor.phase('saving a checkpoint'):
    bucket.push(kept.workdir)
    kept.saves.save(step, progress.arrays, host, metric)
  if step == 0:
    # The checkpoints of the warm-up are removed only once this one is on the
    # disk: if the process is killed before, the next start needs them.
    kept.saves.wait()
    if not kept.saves.owed:
      warm_up.forget(kept.workdir)
  if exports:
    _export(session, step, progress.state.params)


def make_room(session: Session) -> None:
  """Frees the memory that checkpoints take, where the next update needs it.

  A checkpoint that is being written is a copy of the state in the memory of the
  host, which on a CPU is the memory of updates too. There it is written first.
  """
  if jax.default_backend() == 'cpu':
    session.kept.saves.wait()


def _export(session: Session, step: int, params: Any) -> None:
  """Writes the policy as a Hugging Face folder, once its checkpoint is there.

  If the disk is full, a warning is shown and the run goes on.
  """
  with session.monitor.phase('writing the model as a Hugging Face folder'):
    session.kept.saves.wait()
    if session.kept.saves.owed:
      return
    try:
      session.kept.exports.write(step, session.updater.joined(params))
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
    if isinstance(error, stop_signal.Stopped) or not again:
      error = session.peers.fail(error)
      save(session, progress, {})
      session.kept.saves.wait()
    raise error


def check_end(session: Session, progress: Progress) -> None:
  """Makes an error of an end at which no update was finite.

  Without it a run that broke down a few rollouts before its end would report
  success.

  Raises:
    ValueError: The run is done, and all updates of its last rollout were
      refused. It is said by every start of such a run.
  """
  run, refused = session.run, session.watched.refused
  error = refused.at_the_end(run.learn.nonfinite_rollouts)
  # A rollout whose metrics are not written is not counted yet.
  done = progress.step >= run.steps and progress.unwritten is None
  if error and done:
    raise session.peers.fail(ValueError(error))
