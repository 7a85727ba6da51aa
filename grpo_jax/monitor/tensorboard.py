"""TensorBoard event files."""

from collections.abc import Mapping
import contextlib
import math
import pathlib
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
      summaries.Summary.Value(tag=name, simple_value=float(value))
      for name, value in scalars.items()
      if value is not None and math.isfinite(value)
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
