"""How well an engine was used while episodes were played."""

from collections.abc import Callable
from collections.abc import Mapping
import math
import time

from grpo_jax import engines
from grpo_jax.episodes.meeting import Call

_SUMS = 'wanted_secs', 'busy_secs', 'turns', 'tokens', 'read', 'parked'


class EngineUse:
  """Sums up the turns of a rollout, which may be played in several parts.

  An engine has rows, in each of which it draws a turn. While an episode is not
  over, a row is wanted for it, as far as the engine has so many. The row is
  busy while a turn of the episode is under way, and idle while its environment
  works, or while a round waits for others.

  Args:
    now: Says the time, in seconds.

  Attributes:
    wanted_secs: Of all rows together, how long they were wanted.
    busy_secs: How long they were busy.
    turns: How many were drawn.
    tokens: That stood before them.
    read: How many of these were computed.
    parked: Turns whose cache had been moved to the host before them.
  """

  def __init__(self, now: Callable[[], float] = time.monotonic):
    self._now = now
    self._since, self._rows = 0.0, math.inf
    self._live = self._drawn = 0
    self.wanted_secs = self.busy_secs = 0.0
    self.tokens = self.read = self.turns = self.parked = 0

  def begin(self, engine: engines.Engine, episodes: int) -> None:
    """Episodes begin that this engine will draw."""
    self._rows = engine.capabilities.rows or math.inf
    self.note(episodes, 0)

  def note(self, live: int, drawn: int) -> None:
    """Something has changed.

    Args:
      live: How many episodes are not over from now on.
      drawn: How many turns are under way from now on.
    """
    now = self._now()
    busy = min(self._rows, self._drawn)
    if self._live or busy:
      secs = now - self._since
      self.busy_secs += secs * busy
      # An episode may have several turns under way.
      self.wanted_secs += secs * max(busy, min(self._rows, self._live))
    self._since, self._live, self._drawn = now, live, drawn

  def drew(self, call: Call, read: int | None, parked: bool = False) -> None:
    """A turn was drawn.

    Args:
      call: For it.
      read: How many of its ids were computed for it; None: all.
      parked: See `engines.Sampled`.
    """
    self.tokens += len(call.ids)
    self.read += len(call.ids) if read is None else read
    self.turns += 1
    self.parked += parked

  def sums(self) -> dict[str, float]:
    """All that was summed up, for `add` of another one."""
    return {name: getattr(self, name) for name in _SUMS}

  def add(self, sums: Mapping[str, float]) -> None:
    """Adds what another one has summed up, maybe elsewhere."""
    for name in _SUMS:
      setattr(self, name, getattr(self, name) + sums[name])

  def metrics(self) -> dict[str, float]:
    """Numbers by name; nothing if no turn was drawn.

    - `engine_idle_share`: of the time of rows that episodes wanted, the share
      in which they were idle.
    - `engine_read_share`: of the tokens that stand before turns, the share that
      was computed for them; the others were in a cache.
    - `engine_parked_share`: of the turns, the share whose cache had been moved
      to the host before them.
    """
    if not self.turns:
      return {}
    return {
      'engine_idle_share': 1 - self.busy_secs / max(self.wanted_secs, 1e-9),
      'engine_read_share': self.read / self.tokens,
      'engine_parked_share': self.parked / self.turns,
    }
