"""A session: one start of a run, what it writes to, and how it is saved.

What a run carries along is a `Progress`; a checkpoint holds one, and the next
start of the same command opens a session on it.
"""

from collections.abc import Callable
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
from grpo_jax import workdir as workdir_lib
from grpo_jax.checkpoint import Checkpoints
from grpo_jax.config import Config
from grpo_jax.learner import TrainState
from grpo_jax.monitor import Monitor
from grpo_jax.monitor import Sample
from grpo_jax.resample import Supply
from grpo_jax.rollout import Rollout
from grpo_jax.update import Updater


class Progress(NamedTuple):
  """What a run carries from one rollout to the next, and a checkpoint holds."""

  step: int  # rollouts done
  state: TrainState
  supply: Supply


class Session(NamedTuple):
  """One start of a run: its parts, and where it writes."""

  run: build.Run
  update: Updater
  workdir: pathlib.Path
  saves: Checkpoints
  monitor: Monitor
  stop: Callable[[], bool]
  versions: dict[str, Any]  # see `workdir.versions`


@contextlib.contextmanager
def opened(
  config: Config, workdir: str | pathlib.Path, stop: Callable[[], bool]
) -> Iterator[tuple[Session, Progress | None]]:
  """A session, and the progress in its newest checkpoint, if it has one."""
  workdir, run = pathlib.Path(workdir), build.run(config)
  update = build.updater(run)
  with contextlib.ExitStack() as stack:
    versions = stack.enter_context(workdir_lib.claimed(workdir, config))
    saves = stack.enter_context(
      Checkpoints(
        workdir / 'checkpoints',
        config.checkpoint.keep_last,
        bool(config.checkpoint.best_metric),
      )
    )
    saved = saves.restore(update.compiled.abstract)
    monitor = stack.enter_context(
      Monitor(
        config.log,
        workdir,
        config.steps,
        saved.step if saved else None,
        dataclasses.asdict(config),
      )
    )
    saves.warn = monitor.warn
    session = Session(run, update, workdir, saves, monitor, stop, versions)
    if saved is None:
      yield session, None
    else:
      monitor.line(f'goes on from the checkpoint of rollout {saved.step}')
      run.engine.load(saved.state.params, version=saved.step)
      supply = resample.from_json(saved.host)
      yield session, Progress(saved.step, saved.state, supply)


def report(
  session: Session,
  progress: Progress,
  rollout: Rollout,
  measured: dict[str, float | None],
) -> None:
  """Writes the metrics of a step, and its completions if that is due.

  A full disk does not end the run.
  """
  log, step = session.run.config.log, progress.step
  session.saves.check()
  if session.saves.failed:
    measured['saves_failed'] = float(session.saves.failed)
  shown = zip(
    rollout.prompt_texts, rollout.texts, rollout.batch.reward, strict=True
  )
  samples = [
    Sample(prompt, texts[0], float(reward[0]))
    for prompt, texts, reward in list(shown)[: log.samples]
  ]
  session.monitor.write(step, measured, samples)
  every = log.completions_every_steps
  if every and step % every == 0:
    path = transcript.path_of(session.workdir / 'completions', step)
    try:
      transcript.write(path, rollout, step)
    except OSError as error:
      session.monitor.warn(f'{path} could not be written ({error}).')


def finish(session: Session, progress: Progress) -> None:
  """Saves what is not saved yet.

  Raises:
    ValueError: It cannot be saved.
  """
  save(session, progress, {})
  session.saves.wait()
  if session.saves.owed:
    save(session, progress, {})
    session.saves.wait()
  if session.saves.owed:
    raise ValueError(
      f'The checkpoint of rollout {progress.step} could not be saved; make '
      'room and give the same command again, which goes on from the checkpoint '
      f'of rollout {max(session.saves.steps(), default=None)}.'
    )


def save(
  session: Session, progress: Progress, measured: dict[str, float | None]
) -> None:
  """Begins to save a checkpoint."""
  step, state, supply = progress
  metric = measured.get(session.run.config.checkpoint.best_metric)
  host = {
    **resample.to_json(supply),
    'config': dataclasses.asdict(session.run.config),
    'versions': session.versions,
  }
  session.saves.save(step, state, host, metric)


@contextlib.contextmanager
def saved_if_it_fails(session: Session, progress: Progress) -> Iterator[None]:
  """Saves before an error ends the run: a reward that raises, no prompts."""
  try:
    yield
  except Exception:
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
