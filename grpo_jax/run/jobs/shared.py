"""A desk that several processes of a learner share.

The first process has it. What generators bring there, all get, through the
store of the processes; so does an error, or a stop, that ends the wait.
"""

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

from grpo_jax.config import plain_text
from grpo_jax.hosts import processes
from grpo_jax.hosts import stop_signal
from grpo_jax.run import drawing
from grpo_jax.run.jobs import desk as desk_lib
from grpo_jax.run.jobs import wire

_ERRORS = {
  kind.__name__: kind
  for kind in (
    desk_lib.Failed,
    desk_lib.FailedInside,
    desk_lib.Gone,
    stop_signal.Stopped,
  )
}


class Shared:
  """The desk as one of the processes of a learner sees it.

  Attributes:
    agree: See `sources.Ahead`.

  Args:
    desk: The desk; read in the first process alone.
    peers: The processes.
    stop: Asked by signals.
  """

  def __init__(
    self,
    desk: desk_lib.Desk,
    peers: processes.Processes = processes.ALONE,
    stop: stop_signal.Stop | None = None,
  ):
    self._desk, self._peers = desk, peers
    self._stop = stop or stop_signal.Stop()
    several = peers.number > 1
    self.agree: Callable[[int], int] | None = None
    if several:
      self.agree = peers.from_first

  @property
  def newest(self) -> int | None:
    """The version by which is drawn now."""
    return self._desk.newest

  @newest.setter
  def newest(self, version: int) -> None:
    self._desk.newest = version

  def draw(
    self, jobs: Sequence[desk_lib.Job], check: Callable[[], None]
  ) -> list[drawing.Collected]:
    """See `Desk.draw`; the same in all processes."""
    if self._peers.number == 1:
      return self._desk.draw(jobs, check)

    def stops():
      # One process may not leave alone, but it may tell the others.
      check()
      if self._peers.is_first and self._stop():
        raise stop_signal.Stopped

    def make() -> bytes:
      try:
        found = self._desk.draw(jobs, stops)
      except tuple(_ERRORS.values()) as error:
        notes = getattr(error, '__notes__', [])
        said = [type(error).__name__, plain_text.said(error), notes]
        return wire.pack({'error': said})
      blobs = {
        f'{n}/{name}': blob
        for n, part in enumerate(found)
        for name, blob in wire.collected_to_bytes(part).items()
      }
      return wire.pack({}, blobs)

    # Rollouts are drawn in one thread, and evaluations in another.
    name = jobs[0].purpose
    values, blobs = wire.unpack(self._peers.hand_out(name, make, check))
    if 'error' in values:
      kind, text, notes = values['error']
      error: Any = _ERRORS[kind](text)
      for note in notes:
        error.add_note(note)
      raise error
    return [
      wire.collected_from_bytes(
        {
          name.partition('/')[2]: blob
          for name, blob in blobs.items()
          if name.startswith(f'{n}/')
        }
      )
      for n in range(len(jobs))
    ]
