"""The learner's desk, where generators take parts of rollouts and bring them.

A generator is a job of its own: it asks for a part, draws and judges it, and
brings it. It may die, come back or be added at any time. A part whose generator
has been silent goes to another one. Whoever brings a part first has brought it:
the bits of a part depend on its prompts and on the version that draws it, and
on nothing that a generator does or suffers.

Waits go one way. The learner waits here for parts, and a generator asks again
and again. A generator that fails on a part ends the learner's wait with its own
error. If there is none for too long, the wait ends too.
"""

import collections
from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
import itertools
import queue
import secrets
import threading
import time
from typing import Any
from typing import NamedTuple

from grpo_jax.hosts import processes
from grpo_jax.run import drawing

SILENT_SECS = 30.0
"""After which a generator counts as gone; it beats every ten seconds."""
SLOW_SECS = 60.0
"""After which another generator that has nothing to do draws a part too."""
_SLOWER = 3.0  # than the slowest part so far; only then
_POLL_SECS = 0.2


class Job(NamedTuple):
  """A part of what is to be drawn.

  Attributes:
    purpose: See `drawing.collect_part`.
    step: The number of the rollout.
    part: The number of the part, from 0.
    parts: How many there are.
    records: Of the part.
    version: Of the parameters that draw it.
  """

  purpose: str
  step: int
  part: int
  parts: int
  records: drawing.Records
  version: int


class Gone(processes.StartAgain):
  """No generator has come, or the last is gone."""


class Failed(ValueError):
  """What a generator has raised, which would have ended this process too."""


class FailedInside(RuntimeError):
  """What a generator has raised that is no fault of what was given."""


@dataclasses.dataclass
class _Open:
  """A job that nobody has brought yet."""

  job: Job
  news: queue.SimpleQueue[tuple[str, Any]]
  holder: str = ''  # the generator that draws it; '' if none does
  since: float = 0.0  # when it was taken


@dataclasses.dataclass
class _Generator:
  """What is known of a generator."""

  name: str
  beat: float
  parts: int = 0  # that it has brought
  secs: float = 0.0  # that it has drawn


class Desk:
  """Where parts lie until somebody has brought them.

  The threads of the learner take no lock here: a signal may raise in them.

  Args:
    wait_secs: How long to wait for a generator while there is none.
    tell: Called with a line for people, by any thread.
    now: Says the time, in seconds.
    inflight: Whether a part is drawn by the newest version there is.

  Attributes:
    newest: The version by which is drawn now.
  """

  def __init__(
    self,
    wait_secs: float = 600.0,
    tell: Callable[[str], None] = lambda text: None,
    now: Callable[[], float] = time.monotonic,
    inflight: bool = False,
  ):
    self._inflight = inflight
    self._wait_secs, self._tell, self._now = wait_secs, tell, now
    self.newest: int | None = None
    self.is_done = False
    self._start = secrets.token_hex(8)  # tickets of an earlier start are others
    self._numbers = itertools.count()
    self._open: dict[str, _Open] = {}
    self._error: Exception | None = None
    self._laid: queue.SimpleQueue[str] = queue.SimpleQueue()
    # Guarded by it; only threads that answer generators take it.
    self._lock = threading.Lock()
    self._waiting: collections.deque[str] = collections.deque()
    self._generators: dict[str, _Generator] = {}
    self._beat = now()  # the newest of all
    self._longest = 0.0  # seconds that a part took

  # What the learner calls.

  def draw(
    self, jobs: Sequence[Job], check: Callable[[], None] = lambda: None
  ) -> list[drawing.Collected]:
    """What generators have drawn, of each job.

    Args:
      jobs: All of them are there to be taken at once.
      check: Called again and again meanwhile; what it raises ends the wait.

    Raises:
      Failed: A generator has failed on one of them.
      FailedInside: Likewise.
      Gone: There was no generator for too long.
    """
    news: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
    found: dict[str, Any] = {}
    tickets = [f'{self._start}.{next(self._numbers)}' for _ in jobs]
    try:
      for ticket, job in zip(tickets, jobs, strict=True):
        self._open[ticket] = _Open(job, news)
        self._laid.put(ticket)
      begun = self._now()
      while len(found) < len(jobs):
        check()
        if self._error is not None:  # of another wait: the run ends
          raise self._error
        self._check_beats(begun)
        try:
          ticket, brought = news.get(timeout=_POLL_SECS)
        except queue.Empty:
          continue
        if isinstance(brought, Exception):
          raise brought
        found[ticket] = brought
    finally:
      for ticket in tickets:  # nobody waits for them any more
        self._open.pop(ticket, None)
    return [found[ticket] for ticket in tickets]

  def _check_beats(self, begun: float) -> None:
    silent = self._now() - max(self._beat, begun)
    if silent <= self._wait_secs:
      return
    what = 'none has come' if not self._generators else 'the last is gone'
    raise Gone(
      f'No generator has drawn for this run for {silent:.0f} s '
      f'(config.generator.wait_secs): {what}; start `grpo-jax generate`, and '
      'give the same command again.'
    )

  # What generators ask for.

  def join(self, name: str) -> str:
    """Adds a generator, and returns the word by which it is known."""
    word = secrets.token_hex(8)
    with self._lock:
      self._beat = self._now()
      self._generators[word] = _Generator(name, self._beat)
    self._tell(f'the generator {name} has come')
    return word

  def beat(self, word: str) -> bool:
    """A generator is alive; whether it is known here."""
    with self._lock:
      one = self._generators.get(word)
      if one is not None:
        self._beat = one.beat = self._now()
      return one is not None

  def leave(self, word: str, why: str) -> None:
    """A generator ends; what it holds goes to others."""
    with self._lock:
      one = self._generators.pop(word, None)
      self._take_back(word)
    if one is not None:
      self._tell(f'the generator {one.name} has gone ({why})')

  def take(self, word: str) -> tuple[str, Job] | None:
    """A part to draw, and its ticket; None if there is none now."""
    with self._lock:
      now = self._now()
      if word not in self._generators:
        return None
      self._beat = self._generators[word].beat = now
      with_silence = [
        other
        for other, one in self._generators.items()
        if now - one.beat > SILENT_SECS
      ]
      gone = [self._generators.pop(other) for other in with_silence]
      # Who asks draws nothing: what it was given has not reached it.
      for other in [*with_silence, word]:
        self._take_back(other)
      while True:
        try:
          self._waiting.append(self._laid.get_nowait())
        except queue.Empty:
          break
      taken = None
      while self._waiting and taken is None:
        ticket = self._waiting.popleft()
        taken = self._given(ticket, word)
      if taken is None and (ticket := self._slowest(word)):
        taken = self._given(ticket, word)
    for one in gone:
      self._tell(
        f'the generator {one.name} has been silent for {SILENT_SECS:.0f} s; '
        'others draw its part'
      )
    return taken

  def _given(self, ticket: str, word: str) -> tuple[str, Job] | None:
    """A part, from now on with a generator; None if nobody waits for it."""
    entry = self._open.get(ticket)
    if entry is None:
      return None
    entry.holder, entry.since = word, self._now()
    return ticket, self._by_newest(entry.job)

  def _slowest(self, word: str) -> str:
    """A part that another one draws for much longer than any took; or ''.

    Its device may hang, while it beats. Whoever brings it first has brought it.
    """
    least = max(SLOW_SECS, _SLOWER * self._longest)
    late = {
      ticket: entry.since
      for ticket, entry in [*self._open.items()]
      if entry.holder not in ('', word) and self._now() - entry.since > least
    }
    return min(late, key=late.__getitem__, default='')

  def _by_newest(self, job: Job) -> Job:
    version = self.newest if self._inflight else None
    return job if version is None else job._replace(version=version)

  def _take_back(self, word: str) -> None:
    """What a generator holds lies here again, in front."""
    held = [t for t, entry in [*self._open.items()] if entry.holder == word]
    for ticket in reversed(held):
      if (entry := self._open.get(ticket)) is not None:
        entry.holder = ''
        self._waiting.appendleft(ticket)

  def is_open(self, ticket: str) -> bool:
    """Whether somebody still waits for a part."""
    return ticket in self._open

  def bring(
    self, word: str, ticket: str, part: drawing.Collected, secs: float
  ) -> bool:
    """Takes what was drawn; whether anybody has waited for it.

    Raises:
      ValueError: It is not what was asked for.
    """
    entry = self._open.get(ticket)
    if entry is None:
      return False
    wanted = [record.get('index') for record in entry.job.records]
    if part.rollout.index.tolist() != wanted:
      raise ValueError('These are the completions of other prompts.')
    with self._lock:
      if self._open.pop(ticket, None) is None:
        return False
      self._longest = max(self._longest, secs)
      if one := self._generators.get(word):
        one.parts, one.secs = one.parts + 1, one.secs + secs
    entry.news.put((ticket, part))
    return True

  def fail(
    self, word: str, ticket: str, text: str, trace: str, inside: bool
  ) -> bool:
    """Ends all waits with an error; whether anybody has waited for the part.

    Args:
      word: Of the generator.
      ticket: Of the part.
      text: What it has raised, as one sentence.
      trace: Its traceback.
      inside: Whether what was given is not at fault.
    """
    with self._lock:
      entry, one = self._open.pop(ticket, None), self._generators.get(word)
    if entry is None:
      return False
    error = (FailedInside if inside else Failed)(text)
    error.add_note(
      f'The traceback of the generator {one.name if one else ""}:\n{trace}'
    )
    self._error = error
    entry.news.put((ticket, error))
    return True

  def generators(self) -> dict[str, tuple[int, float]]:
    """How many parts each has brought, and in how many seconds; by name."""
    with self._lock:
      every = [*self._generators.values()]
    return {one.name: (one.parts, one.secs) for one in every}
