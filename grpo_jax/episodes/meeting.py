"""Where the processes of a run meet that play episodes together.

A program of the devices needs all processes. So all of them make the same calls
of the engine, whoever plays the episodes:

- Each process plays the groups of some records, the others' not at all.
- Before each turn of the engine they tell each other what their episodes ask.
  In rounds, and while nothing is drawn, each waits for its own episodes first.
  A process whose episodes are over asks nothing, and goes on drawing for the
  others until all are over.
- The engine gives every process all that it has drawn. A process answers its
  own episodes.
- At the end all learn how each episode has ended, and the prompt of its group;
  the tokens stay where it was played.

Calls are in the order of episodes, so the engine is asked what a process that
plays all of them alone would ask it.
"""

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import numpy as np

from grpo_jax import engines
from grpo_jax.episodes import transcript


class Hosts(NamedTuple):
  """The processes that play together; by default there is one.

  Attributes:
    rank: The number of this process, from 0.
    number: Of processes.
    exchange: Calls a function, which may wait for environments, and returns
      what it has returned in each process. What it raises in one ends all.
  """

  rank: int = 0
  number: int = 1
  exchange: Callable[[Callable[[], Any]], list[Any]] = lambda say: [say()]

  def players(self, groups: int) -> np.ndarray:
    """i64[P], the process that plays each of P groups."""
    return np.arange(groups) * self.number // groups


ALONE = Hosts()


class Call(NamedTuple):
  """A turn that is to be drawn.

  Attributes:
    number: Of the episode, p * G + g.
    context: Of the episode.
    ids: i32[n], what is read.
    key: u32[2], see `engines.Request`.
    limit: The most tokens of it; 0 says that the episode is over.
    is_first: Whether the episode has drawn nothing before.
    follows: The number of the engine for the call before it in its context;
      None if there is none.
    attempt: How often the episode has begun again before.
    stops: Texts that end it, beside those of the run.
  """

  number: int
  context: int
  ids: np.ndarray
  key: np.ndarray
  limit: int
  is_first: bool
  follows: int | None = None
  attempt: int = 0
  stops: tuple[str, ...] = ()


class Meeting:
  """Makes the calls of each process known to all, turn by turn.

  A turn reads all that came before it, which the others know already: it was
  read or drawn in an earlier call. Only what is new is sent.
  """

  def __init__(self, hosts: Hosts):
    self._hosts = hosts
    # What was read and drawn in each episode, without what begins another one.
    self._known: dict[int, list[np.ndarray]] = {}

  def calls(self, asked: Callable[[], list[Call]]) -> list[Call]:
    """The next calls of all processes, by episode; none once all are over.

    Args:
      asked: Says those of this process, sorted by episode.
    """
    if self._hosts.number == 1:
      return asked()
    told = self._hosts.exchange(lambda: self._without_known(asked()))
    # By episode, as `Hosts.players` divides them.
    return [self._whole(*call) for theirs in told for call in theirs]

  def note(self, call: Call, drawn: engines.Sampled) -> None:
    """What was drawn for a call; called for all calls, in their order."""
    if self._hosts.number == 1:
      return
    whole = np.concatenate([call.ids, drawn.ids])
    known = self._known.setdefault(call.number, [])
    known[:] = [x for x in known if transcript.shared(x, whole) < len(x)]
    known.append(whole)

  def _without_known(
    self, calls: Sequence[Call]
  ) -> list[tuple[Call, int, int]]:
    """Calls with the ids that are new, and where the others are known."""
    said = []
    for call in calls:
      lengths = [
        transcript.shared(x, call.ids) for x in self._known.get(call.number, [])
      ]
      length = max(lengths, default=0)
      place = lengths.index(length) if lengths else 0
      said.append((call._replace(ids=call.ids[length:]), place, length))
    return said

  def _whole(self, call: Call, place: int, length: int) -> Call:
    if not length:
      return call
    known = self._known[call.number][place][:length]
    return call._replace(ids=np.concatenate([known, call.ids]))
