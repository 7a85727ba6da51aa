"""Dashboards beside `metrics.jsonl`: TensorBoard and Weights & Biases."""

from collections.abc import Mapping
import contextlib
import math
import pathlib
import secrets
import time
from typing import Any


class TensorBoard:
  """Writes scalars to event files, in this thread.

  tensorboardX's `SummaryWriter` is not used: its thread ends at the first
  failed write, and about ten events later the run waits forever for that
  thread. Here a failed write raises. The next write opens another file, because
  an incomplete record makes the rest of its file unreadable.

  Args:
    directory: Where the event files go; made if there is none.
    first_step: The first rollout that this start writes. TensorBoard hides the
      events of earlier starts from this rollout on.
  """

  def __init__(self, directory: pathlib.Path, first_step: int):
    self._directory = directory
    self._purge_step: int | None = first_step
    self._writer = None

  def write(self, step: int, scalars: Mapping[str, float | None]) -> None:
    """Writes one event with the scalars that are finite.

    Args:
      step: Rollouts done.
      scalars: Numbers by name.

    Raises:
      OSError: The event could not be written.
    """
    from tensorboardX.proto import event_pb2
    from tensorboardX.proto import summary_pb2

    # Protobuf fills these modules at run time, so a type checker knows no name
    # in them.
    events: Any = event_pb2
    summaries: Any = summary_pb2
    values = [
      summaries.Summary.Value(tag=name, simple_value=value)
      for name, value in _finite(scalars).items()
    ]
    event = events.Event(
      wall_time=time.time(),
      step=step,
      summary=summaries.Summary(value=values),
    )
    try:
      writer = self._writer = self._writer or self._open()
      # If this or the next write fails, the next file begins with it again.
      if self._purge_step is not None:
        start = events.SessionLog(status=events.SessionLog.START)
        writer.write_event(
          events.Event(
            wall_time=time.time(), step=self._purge_step, session_log=start
          )
        )
      writer.write_event(event)
      writer.flush()
    except OSError:
      self.close()
      raise
    self._purge_step = None

  def close(self) -> None:
    """Closes the file; every event in it is on disk already."""
    writer, self._writer = self._writer, None
    with contextlib.suppress(OSError):
      if writer is not None:
        writer.close()

  def _open(self):
    from tensorboardX.event_file_writer import EventsWriter

    self._directory.mkdir(parents=True, exist_ok=True)
    # The name holds the time in seconds. The number makes two files of the same
    # second differ.
    number = len(list(self._directory.iterdir())) + 1
    return EventsWriter(str(self._directory / 'events'), f'.{number}')


_LOGIN_TIMEOUT_SECS = 60.0  # that W&B waits for a key to be typed
_FINISH_TIMEOUT_SECS = 300.0  # for the last upload; the workdir keeps the files


class Wandb:
  """One run of a W&B project. A resumed run continues the same W&B run.

  The id of the W&B run is kept in `wandb_run_id.txt`, and its files in
  `wandb/`. The x-axis is the metric `step`, because W&B's own counter cannot go
  back to the checkpoint that a run continues from.

  Args:
    workdir: The directory of the run.
    project: The project's name.
    mode: 'online' or 'offline'. The files of an offline run can be sent later,
      by `wandb sync`.
    resumed: Whether the run goes on from a checkpoint.
    run_config: The config that the dashboard shows.

  Raises:
    Exception: W&B cannot be imported or reached, or refuses the key.
  """

  def __init__(
    self,
    workdir: pathlib.Path,
    project: str,
    mode: str,
    resumed: bool,
    run_config: dict[str, Any],
  ):
    import wandb

    id_file = workdir / 'wandb_run_id.txt'
    known = resumed and id_file.exists()
    run_id = id_file.read_text().strip() if known else secrets.token_hex(4)
    self._run = wandb.init(
      project=project,
      mode=mode,  # pyright: ignore[reportArgumentType]
      dir=workdir,
      id=run_id,
      name=workdir.resolve().name,
      resume='allow' if mode == 'online' else None,
      config=run_config,
      allow_val_change=True,
      # With another value of `console`, W&B would wrap the streams that the
      # display draws on.
      settings=wandb.Settings(
        console='off',
        login_timeout=_LOGIN_TIMEOUT_SECS,
        finish_timeout=_FINISH_TIMEOUT_SECS,
      ),
    )
    try:
      id_file.write_text(run_id + '\n')
      self._run.define_metric('step')
      self._run.define_metric('*', step_metric='step')
    except Exception:
      # Nobody gets this object to close it, and W&B would show the run as
      # running on. The first error is the one to raise.
      with contextlib.suppress(Exception):
        self.close(failed=True)
      raise

  def write(self, step: int, scalars: Mapping[str, float | None]) -> None:
    """Logs the scalars that are finite.

    Args:
      step: Rollouts done.
      scalars: Numbers by name.
    """
    self._run.log({'step': step, **_finite(scalars)})

  def close(self, failed: bool) -> None:
    """Waits until everything is sent, for some minutes at most.

    Args:
      failed: Whether the run ended by an exception.
    """
    self._run.finish(exit_code=int(failed))


def _finite(scalars: Mapping[str, float | None]) -> dict[str, float]:
  return {
    name: float(value)
    for name, value in scalars.items()
    if value is not None and math.isfinite(value)
  }
