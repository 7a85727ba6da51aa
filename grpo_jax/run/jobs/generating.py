"""A generator: asks a learner for parts, draws them, and brings them."""

from collections.abc import Callable
import contextlib
import os
import socket
import time
import traceback
from typing import Any
from typing import NamedTuple
from typing import Protocol

from grpo_jax.config import plain_text
from grpo_jax.engines import fetching
from grpo_jax.hosts import processes
from grpo_jax.hosts import stop_signal
from grpo_jax.run import drawing
from grpo_jax.run.jobs import calls
from grpo_jax.run.jobs import learning
from grpo_jax.run.jobs import wire
from grpo_jax.run.jobs.desk import Job

_AGAIN_SECS = 1.0  # until the learner is asked again that did not answer
_MOST_AGAIN_SECS = 30.0
_MOST_LATE = 10  # weights in a row that have not come


def learner_at(address: str, secret: str) -> calls.Learner:
  """The learner at HOST:PORT; the secret is in a file, or ''."""
  return calls.Learner(address, wire.Signer(learning.secret_of(secret)))


def own_name() -> str:
  """What people know a generator by."""
  return f'{socket.gethostname()}:{os.getpid()}'


def hello(
  learner: calls.Learner,
  wait_secs: float,
  stop: stop_signal.Stop,
  peers: processes.Processes,
  tell: Callable[[str], None],
) -> dict[str, Any] | None:
  """What a learner tells of its run, in all processes; None after a signal.

  Raises:
    Ended: It does not answer within the time.
    wire.Refused: It does not want to.
  """
  found, since, told = None, time.monotonic(), False
  while peers.is_first and found is None and not stop():
    try:
      found = learner.hello()
    except calls.Away as error:
      if time.monotonic() - since > wait_secs:
        raise Ended(
          f'{plain_text.said(error)} It has not for {wait_secs:.0f} s '
          '(--wait_secs); start the generator again once the learner runs.'
        ) from error
      if not told:
        tell(f'waits for the learner at {learner.address}')
      told = True
      time.sleep(_AGAIN_SECS)
  found = peers.from_first(found)
  if found is not None:
    learner.run = found['run']
  return found


class Abandoned(KeyboardInterrupt):
  """Nobody waits any more for the part that is drawn.

  It is no `Exception`, so that an `except Exception` in an event loop or a
  reward function does not swallow it.
  """


class Ended(processes.StartAgain):
  """The generator ends, and starting it again may help."""


class Draws(Protocol):
  """What draws and judges parts; the same calls in all processes."""

  def fetch(self, version: int, start: str) -> None:
    """Gets what this process needs of a version.

    Args:
      version: Of the parameters.
      start: Of the learner: another start has other versions.

    Raises:
      OSError: The learner does not answer, or its weights have not come.
      wire.Refused: It has not got that version any more.
    """
    ...

  def load(self, version: int, start: str) -> None:
    """Draws by a version from now on, which all processes have fetched."""
    ...

  def draw(
    self,
    job: Job,
    check: Callable[[], None],
    newest: Callable[[], int | None],
  ) -> drawing.Collected:
    """Draws a part.

    Args:
      job: The part.
      check: Called between two turns; what it raises ends it.
      newest: The version by which the learner has rollouts drawn.
    """
    ...


class _Work(NamedTuple):
  """What all processes of a generator do next.

  Attributes:
    job: They draw it.
    ticket: Of the job.
    code: They end with this exit code.
    error: They end with this error.
  """

  job: Job | None = None
  ticket: str = ''
  code: int | None = None
  error: str = ''


class Generator:
  """Draws part after part, until the run is done.

  Args:
    learner: Has said hello.
    draws: Draws.
    join: What it says of itself when it joins; has 'name' and 'about'.
    tell: Called with lines for people.
    stop: Asked by signals.
    wait_secs: How long to wait for a learner that does not answer.
    peers: The processes of this generator; the first alone talks.
  """

  def __init__(
    self,
    learner: calls.Learner,
    draws: Draws,
    join: dict[str, Any],
    tell: Callable[[str], None],
    stop: stop_signal.Stop,
    wait_secs: float,
    peers: processes.Processes = processes.ALONE,
  ):
    self._learner, self._draws, self._join = learner, draws, join
    self._tell, self._stop, self._wait_secs = tell, stop, wait_secs
    self._peers = peers
    self._word: str | None = None
    self._beats: calls.Beats | None = None
    self._ticket, self._late = '', 0
    self.parts = 0  # that it has brought

  def run(self) -> int:
    """Draws until the run is done, or a signal comes; the exit code.

    Raises:
      Ended: The learner is away for too long, or the device has failed.
      ValueError: The learner refuses this generator, or a part has failed for
        which the run ends too.
    """
    try:
      while True:
        work = self._peers.from_first(self._next())
        if work.error:
          raise Ended(work.error)
        if work.code is not None:
          return work.code
        if work.job is not None:
          self._ticket = work.ticket
          self._do(work.job)
    except BaseException as error:
      self._leave(plain_text.first_line(error))
      raise
    finally:
      self._forget()

  def _next(self) -> _Work:
    """What is to be done, as the first process hears from the learner."""
    if not self._peers.is_first:
      return _Work()
    since = time.monotonic()
    while True:
      if self._stop():
        self._leave('it was asked to end')
        return _Work(code=128 + int(self._stop.signal or 0))
      try:
        heard = self._ask()
      except calls.Away as error:
        if time.monotonic() - since > self._wait_secs:
          return _Work(
            error=f'{plain_text.said(error)} It has not for '
            f'{self._wait_secs:.0f} s (--wait_secs); start the generator again '
            'once the learner runs.'
          )
        self._stop_or_sleep(_AGAIN_SECS)
        continue
      except wire.Refused as error:
        if error.status == 409 and self._word is not None:
          # The learner was started again, with another config.
          return _Work(error=plain_text.said(error))
        raise
      since = time.monotonic()
      if heard.get('done'):
        self._leave('the run is done')
        return _Work(code=0)
      if not heard.get('known'):
        self._forget()
      elif 'job' in heard:
        return _Work(Job(**heard['job']), heard['ticket'])

  def _stop_or_sleep(self, secs: float) -> None:
    until = time.monotonic() + secs
    while time.monotonic() < until and not self._stop():
      time.sleep(0.05)

  def _ask(self) -> dict[str, Any]:
    """Joins, if the learner does not know this generator; asks for a part."""
    if self._word is None:
      word: str = self._learner.ask('/join', self._join)['word']
      self._word, self._beats = word, calls.Beats(self._learner, word)
    return self._learner.ask('/take', {'word': self._word})

  def _forget(self) -> None:
    """The learner does not know this generator any more."""
    if self._beats is not None:
      self._beats.close()
    self._word = self._beats = None

  def _do(self, job: Job) -> None:
    """Draws a part and brings it."""
    begun = time.monotonic()
    if self._beats is not None:
      self._beats.draws(self._ticket)
    try:
      if not self._loads(job):
        return
      loaded = time.monotonic() - begun
      part = self._draws.draw(job, self._check, self._newest)
    except Abandoned:
      self._tell(f'{_named(job)} is given up: nobody waits for it')
      return
    except Ended:
      raise
    except Exception as error:
      if processes.is_of_the_runtime(error):
        raise Ended(
          f'The devices have failed ({processes.first_line(error)}); start the '
          'generator again.'
        ) from error
      self._fail(error)
      raise
    finally:
      if self._beats is not None:
        self._beats.draws(None)
    if self._peers.is_first:
      secs = time.monotonic() - begun
      self._bring(part, secs)
      tokens = int(part.rollout.drawn.sum())
      self._tell(
        f'{_named(job)}, version {job.version}: {tokens} tokens in {secs:.1f} s'
        + (f', of which {loaded:.1f} s for weights' if loaded > 0.05 else '')
      )

  def _loads(self, job: Job) -> bool:
    """Gets the weights for a part; whether all processes have them."""
    why, start = '', self._ticket.partition('.')[0]
    try:
      self._draws.fetch(job.version, start)
    except (fetching.Late, calls.Away) as error:
      why = plain_text.first_line(error)
    except wire.Refused as error:
      if error.status not in (410, 507):  # nobody needs it; the disk is full
        raise
      why = plain_text.first_line(error)
    found = [text for text in self._peers.exchange(why) if text]
    if found:
      self._tell(f'{_named(job)} is given up: {found[0]}')
      self._late += 1
      if self._late > _MOST_LATE:
        raise Ended(f'{found[0]} Start the generator again.')
      self._tell_learner('/release')
      # Longer and longer, so that others get the part.
      secs = _AGAIN_SECS * 2 ** (self._late - 1)
      self._stop_or_sleep(min(secs, _MOST_AGAIN_SECS))
      return False
    self._late = 0
    self._draws.load(job.version, start)
    return True

  def _newest(self) -> int | None:
    return None if self._beats is None else self._beats.newest

  def _check(self) -> None:
    """Raises once nobody waits for the part that is drawn, or this is to end.

    Several processes must agree on it; see `Processes.is_stopped`.
    """
    over = self._beats is not None and not self._beats.is_open
    if self._peers.number > 1:
      stops = self._peers.is_stopped()
      over = self._peers.from_first(over)
    else:
      stops = self._stop()
    if over or stops:
      raise Abandoned

  def _bring(self, part: drawing.Collected, secs: float) -> None:
    """Brings a part; the learner may be away for a while, or for good."""
    values = {'word': self._word, 'ticket': self._ticket, 'secs': secs}
    blobs, since = wire.collected_to_bytes(part), time.monotonic()
    while True:
      try:
        heard = self._learner.ask('/bring', values, blobs)
      except calls.Away:
        # It does not know the ticket once it was started again.
        if self._stop() or time.monotonic() - since > self._wait_secs:
          return
        self._stop_or_sleep(_AGAIN_SECS)
        continue
      self.parts += bool(heard.get('taken'))
      return

  def _fail(self, error: Exception) -> None:
    """Tells the learner what would have ended it, had it drawn the part."""
    if not self._peers.is_first or self._word is None:
      return
    given = isinstance(error, (ValueError, OSError, MemoryError))
    text = plain_text.said(error) or plain_text.kind(error)
    trace = ''.join(traceback.format_exception(error))
    values = {
      'word': self._word, 'ticket': self._ticket,
      'text': text if given else f'{plain_text.kind(error)}: {text}',
      'trace': trace[-20_000:], 'inside': not given,
    }  # fmt: skip
    try:
      self._learner.ask('/fail', values)
    except (calls.Away, wire.Refused):
      return

  def _leave(self, why: str) -> None:
    """Tells the learner that this generator ends, if it can be told."""
    self._tell_learner('/leave', why=why)

  def _tell_learner(self, path: str, **values: Any) -> None:
    if self._word is None or not self._peers.is_first:
      return
    with contextlib.suppress(calls.Away, wire.Refused):
      self._learner.ask(path, {'word': self._word, **values})


def _named(job: Job) -> str:
  what = 'evaluation' if job.purpose == 'evaluate' else 'rollout'
  part = f', part {job.part + 1} of {job.parts}' if job.parts > 1 else ''
  return f'{what} {job.step}{part}'
