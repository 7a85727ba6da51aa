"""Checkpoints of a run: when they are saved, and what if they cannot be."""

from collections.abc import Iterator
import contextlib
import dataclasses
from typing import Any

import jax

from grpo_jax.hosts.stop_signal import Stopped
from grpo_jax.run import warm_up
from grpo_jax.run.keep import bucket
from grpo_jax.run.progress import Progress
from grpo_jax.run.session import Session


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
  metric = measured.get(session.run.config.checkpoint.best_metric)
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
    if isinstance(error, Stopped) or not again:
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
  config = session.run.config
  error = session.watched.refused.at_the_end(config.learner.nonfinite_rollouts)
  # A rollout whose metrics are not written is not counted yet.
  done = progress.step >= config.steps and progress.unwritten is None
  if error and done:
    raise session.peers.fail(ValueError(error))
