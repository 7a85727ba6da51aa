"""A session: one start of a run, what it writes to, and how it is saved.

What a run carries along is a `Progress`; a checkpoint holds one, and the next
start of the same command opens a session on it.
"""

from collections.abc import Iterator
import contextlib
import dataclasses
import pathlib
from typing import Any
from typing import NamedTuple

import jax

from grpo_jax import build
from grpo_jax import resample
from grpo_jax import transcript
from grpo_jax import warm_up
from grpo_jax import workdir as workdir_lib
from grpo_jax.checkpoint import Checkpoints
from grpo_jax.checkpoint import Restored
from grpo_jax.config import Config
from grpo_jax.learner import TrainState
from grpo_jax.monitor import Monitor
from grpo_jax.monitor import Sample
from grpo_jax.resample import Supply
from grpo_jax.rollout import Rollout
from grpo_jax.signals import Stop
from grpo_jax.signals import Stopped
from grpo_jax.update import Updater


class Unwritten(NamedTuple):
  """What a rollout and its updates said, before it is evaluated and written."""

  measured: dict[str, float | None]
  samples: list[Sample]


class Progress(NamedTuple):
  """What a run carries from one rollout to the next, and a checkpoint holds."""

  step: int  # rollouts done
  state: TrainState
  supply: Supply
  unwritten: Unwritten | None  # of the last rollout, until it is written


class Session(NamedTuple):
  """One start of a run: its parts, and where it writes."""

  run: build.Run
  update: Updater
  workdir: pathlib.Path
  saves: Checkpoints
  monitor: Monitor
  stop: Stop
  replays: bool  # saved rollouts, instead of sampling
  versions: dict[str, Any]  # see `workdir.versions`


@contextlib.contextmanager
def opened(
  config: Config, workdir: str | pathlib.Path, stop: Stop, replays: bool
) -> Iterator[tuple[Session, Progress | None]]:
  """A session, and the progress in its newest checkpoint, if it has one."""
  workdir, run = pathlib.Path(workdir), build.run(config)
  update = build.updater(run)
  with contextlib.ExitStack() as stack:
    stack.enter_context(workdir_lib.claimed(workdir, config))
    saves = stack.enter_context(
      Checkpoints(
        workdir / 'checkpoints',
        config.checkpoint.keep_last,
        bool(config.checkpoint.best_metric),
      )
    )
    saved = saves.restore(update.compiled.abstract)
    if saved is not None:
      _check_restored(saved, config, workdir, replays)
    versions = workdir_lib.record(workdir, config, anew=saved is None)
    progress = _progress(saved) if saved else None
    written = progress and progress.step - bool(progress.unwritten)
    if (progress.step if progress else 0) < config.steps:
      update.compile_ahead(build.example(run))
    monitor = stack.enter_context(
      Monitor(
        config.log, workdir, config.steps, written, dataclasses.asdict(config)
      )
    )
    saves.warn = monitor.warn
    session = Session(
      run, update, workdir, saves, monitor, stop, replays, versions
    )
    if progress is not None:
      warm_up.forget(workdir)
      monitor.line(f'goes on from the checkpoint of rollout {progress.step}')
      run.engine.load(progress.state.params, version=progress.step)
    yield session, progress


def _progress(saved: Restored) -> Progress:
  """The progress that `save` was given."""
  unwritten = saved.host['unwritten']
  if unwritten is not None:
    samples = [Sample(*sample) for sample in unwritten['samples']]
    unwritten = Unwritten(unwritten['measured'], samples)
  supply = resample.from_json(saved.host)
  return Progress(saved.step, saved.state, supply, unwritten)


def _check_restored(
  saved: Restored, config: Config, workdir: pathlib.Path, replays: bool
) -> None:
  """Raises a ValueError if a run cannot go on as it is asked to."""
  if saved.step > config.steps:
    raise ValueError(
      f'The run in {workdir} has done {saved.step} rollouts, and config.steps='
      f'{config.steps}; give at least as many, or another workdir.'
    )
  if saved.host['replays'] != replays:
    did, does = 'sampled', 'replays'
    if not replays:
      did, does = 'replayed', 'samples'
    raise ValueError(
      f'The run in {workdir} has {did} its rollouts, and this command {does} '
      'them; give the same command, or another workdir.'
    )


def keep_completions(
  session: Session, rollout: Rollout, step: int
) -> list[Sample]:
  """Writes all completions if that is due, and returns some to be shown.

  A full disk does not end the run.
  """
  log = session.run.config.log
  every = log.completions_every_steps
  if every and step % every == 0:
    path = transcript.path_of(session.workdir / 'completions', step)
    try:
      transcript.write(path, rollout, step)
    except OSError as error:
      session.monitor.warn(f'{path} could not be written ({error}).')
  shown = zip(
    rollout.prompt_texts, rollout.texts, rollout.batch.reward, strict=True
  )
  return [
    Sample(prompt, texts[0], float(reward[0]))
    for prompt, texts, reward in list(shown)[: log.samples]
  ]


def finish(session: Session, progress: Progress) -> None:
  """Saves what is not saved yet, and tries once more if that fails.

  Raises:
    ValueError: It cannot be saved.
  """
  for _ in range(2):
    save(session, progress, {})
    session.saves.wait()
    if not session.saves.owed:
      return
  raise ValueError(
    f'The checkpoint of rollout {progress.step} could not be saved; make room '
    'and give the same command again, which goes on from the checkpoint of '
    f'rollout {max(session.saves.steps(), default=None)}.'
  )


def save(
  session: Session, progress: Progress, measured: dict[str, float | None]
) -> None:
  """Begins to save a checkpoint."""
  step, state, supply, unwritten = progress
  metric = measured.get(session.run.config.checkpoint.best_metric)
  host = {
    **resample.to_json(supply),
    'unwritten': unwritten and unwritten._asdict(),
    'replays': session.replays,
    'config': dataclasses.asdict(session.run.config),
    'versions': session.versions,
  }
  session.saves.save(step, state, host, metric)
  if step == 0:  # once it is on the disk, the warm-up is over
    session.saves.wait()
    if not session.saves.owed:
      warm_up.forget(session.workdir)


@contextlib.contextmanager
def saved_if_it_fails(session: Session, progress: Progress) -> Iterator[None]:
  """Saves before an error ends the run: a reward that raises, no prompts."""
  try:
    yield
  except (Exception, Stopped):
    save(session, progress, {})
    session.saves.wait()
    raise


@contextlib.contextmanager
def profiled(
  session: Session, step: int, steps: tuple[int, int]
) -> Iterator[None]:
  """Records a step with the JAX profiler, if it is one of `steps`."""
  if steps[0] <= step <= steps[1]:
    with jax.profiler.trace(str(session.workdir / 'profile' / f'step_{step}')):
      yield
  else:
    yield
