"""A generator: asks a learner for parts, draws them, and brings them."""

from collections.abc import Callable
import time
import traceback
from typing import Any
from typing import NamedTuple
from typing import Protocol

from grpo_jax.config import plain_text
from grpo_jax.hosts import processes
from grpo_jax.hosts import stop_signal
from grpo_jax.run import drawing
from grpo_jax.run.jobs import calls
from grpo_jax.run.jobs import wire
from grpo_jax.run.jobs.desk import Job

_AGAIN_SECS = 1.0  # until the learner is asked again that did not answer


class Abandoned(KeyboardInterrupt):
  """Nobody waits any more for the part that is drawn.

  It is no `Exception`, so that an `except Exception` in an event loop or a
  reward function does not swallow it.
  """


class Ended(ValueError):
  """The generator ends, and starting it again may help."""


class Draws(Protocol):
  """What draws and judges parts; the same calls in all processes."""

  def load(self, version: int) -> None:
    """Draws by a version from now on.

    Raises:
      calls.Away: The learner does not answer.
      calls.Refused: It has not got that version any more.
    """
    ...

  def draw(self, job: Job, check: Callable[[], None]) -> drawing.Collected:
    """Draws a part; what `check` raises ends it."""
    ...


class _Work(NamedTuple):
  """What all processes of a generator do next.

  Attributes:
    job: They draw it.
    code: They end with this exit code.
    error: They end with this error.
  """

  job: Job | None = None
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
    self._ticket = ''
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
      except calls.Refused as error:
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
        self._ticket = heard['ticket']
        return _Work(Job(**heard['job']))

  def _stop_or_sleep(self, secs: float) -> None:
    until = time.monotonic() + secs
    while time.monotonic() < until and not self._stop():
      time.sleep(0.05)

  def _ask(self) -> dict[str, Any]:
    """Joins, if the learner does not know this generator; asks for a part."""
    if self._word is None:
      self._word = self._learner.ask('/join', self._join)['word']
      self._beats = calls.Beats(self._learner, self._word)
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
      self._draws.load(job.version)
      loaded = time.monotonic() - begun
      part = self._draws.draw(job, self._check)
    except (Abandoned, calls.Away) as error:
      self._tell(
        f'{_named(job)} is given up ({plain_text.first_line(error)})'
        if isinstance(error, calls.Away)
        else f'{_named(job)} is given up: nobody waits for it'
      )
      return
    except calls.Refused as error:
      if error.status != 410:  # it is learned from already
        raise
      return
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
      self._bring(job, part, secs)
      tokens = int(part.rollout.drawn.sum())
      self._tell(
        f'{_named(job)}, version {job.version}: {tokens} tokens in {secs:.1f} s'
        + (f', of which {loaded:.1f} s for weights' if loaded > 0.05 else '')
      )

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

  def _bring(self, job: Job, part: drawing.Collected, secs: float) -> None:
    """Brings a part; the learner may be away for a while, or for good."""
    del job
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
    except (calls.Away, calls.Refused):
      return

  def _leave(self, why: str) -> None:
    """Tells the learner that this generator ends, if it can be told."""
    if self._word is None or not self._peers.is_first:
      return
    try:
      self._learner.ask('/leave', {'word': self._word, 'why': why})
    except (calls.Away, calls.Refused):
      return


def _named(job: Job) -> str:
  what = 'evaluation' if job.purpose == 'evaluate' else 'rollout'
  part = f', part {job.part + 1} of {job.parts}' if job.parts > 1 else ''
  return f'{what} {job.step}{part}'
