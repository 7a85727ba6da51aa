"""The watch: a thread that ends this process when another one is lost.

A program of the devices waits for ever for a process that is gone, and so does
an exchange. So a thread in every process writes every second that it is alive.
If one is silent for `SILENT_SECS`, or has ended with an error, the others end
too, and say which it was: with `START_AGAIN` if it is gone, because the same
command goes on from the newest checkpoint, and with 2 if it has failed, because
a new start would fail too. The first process shows the traceback of that error.

The first process watches all others, and these watch the first. What follows it
tells all, so its work grows with the number of processes, not with the square.
"""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import faulthandler
import os
import socket
import subprocess
import sys
import threading
import time
from typing import NoReturn

from grpo_jax.config import plain_text
from grpo_jax.hosts.store import Store

START_AGAIN = 75
"""Exit code: another process is gone, and the same command goes on."""

SILENT_SECS = 30.0  # after which a process counts as gone
FIRST_SECS = 300.0  # the same before its first beat: it may begin later
FAIL_SECS = 60.0  # after which a process that has failed ends the others
PATIENT_SECS = 1800.0  # the same, if a judge of another one does not return
GRACE_SECS = 10.0  # for processes that end by themselves, for the same reason
BEAT_SECS = 1.0
STUCK_SECS = 15.0  # after a time limit, for what a thread does there
_MOST_TRACE = 20_000  # characters


class Watch:
  """The thread of one process.

  Args:
    store: Where the processes of the run leave words.
    number: Of processes.
    rank: The number of this process.
    asked: The signal that this process was asked to stop by; 0 if none.
    deliver: Called with the signal that another process has got.
  """

  def __init__(
    self,
    store: Store,
    number: int,
    rank: int,
    asked: Callable[[], int],
    deliver: Callable[[int], None] = lambda number: None,
  ):
    self._store, self._number, self._rank = store, number, rank
    self._asked, self._deliver = asked, deliver
    watched = range(1, number) if rank == 0 else [0]
    # The last beat of each process that is watched, and when it changed.
    self._seen: dict[str, tuple[str, float]] = {
      str(rank): ('', time.monotonic()) for rank in watched
    }
    # Since when each has failed, and since when nothing excuses the others.
    self._failed: dict[tuple[str, str], tuple[float, float]] = {}
    self._is_failing = False
    self._host, self._beats, self._passed_on = socket.gethostname(), 0, False
    self._answered = time.monotonic()  # when the store last did
    self._over = threading.Event()
    self._beat()
    self._threads = [
      threading.Thread(target=body, name='watch', daemon=True)
      for body in (self._run, self._guard)
    ]
    for thread in self._threads:
      thread.start()

  def end(self, problem: str, trace: str = '') -> None:
    """Tells that this process ends, and why and where if it has failed.

    One that has not failed waits for the others, and watches them meanwhile.
    Then all leave JAX at the same time, which would abort those that wait there
    for a process that is lost.
    """
    with contextlib.suppress(Exception):  # the first process may be gone
      self._tell_trace(trace)
      self._store.write(f'end/{self._rank}', problem)
      until = time.monotonic() + SILENT_SECS + GRACE_SECS
      while not problem and time.monotonic() < until:
        if len(self._store.read('end')) == self._number:
          break
        time.sleep(BEAT_SECS / 10)
    self._over.set()
    for thread in self._threads:  # a call of the store may not come back
      thread.join(GRACE_SECS)

  @contextlib.contextmanager
  def failing(self, problem: str, trace: str = '') -> Iterator[None]:
    """In this context this process waits for the others to hear of it.

    They may be far from an exchange, or wait for this process in a program of
    the devices. If they do not come within `FAIL_SECS`, the watch ends them; or
    within `PATIENT_SECS`, while code of the user's runs in one of them.
    """
    self._is_failing = True
    self._tell_trace(trace)
    self._store.write(f'failing/{self._rank}', problem)
    try:
      yield
    finally:
      self._is_failing = False
      self._store.delete(f'failing/{self._rank}')

  def _tell_trace(self, trace: str) -> None:
    if trace:  # its end says the most, and a message has a limit
      self._store.write(f'trace/{self._rank}', trace[-_MOST_TRACE:])

  def _run(self) -> None:
    while not self._over.wait(BEAT_SECS):
      # Where the store does not answer: `_guard` sees to it.
      with contextlib.suppress(Exception):
        self._beat()
        self._tell_silent()
        self._hear()
        self._answered = time.monotonic()

  def _guard(self) -> None:
    """Looks whether the store answers, whose calls may not come back."""
    while not self._over.wait(BEAT_SECS):
      if time.monotonic() - self._answered > SILENT_SECS:
        self._leave('Process 0 does not answer', START_AGAIN)

  def _beat(self) -> None:
    self._beats += 1
    self._store.write(f'beat/{self._rank}/now', f'{self._host} {self._beats}')
    if self._asked() and not self._passed_on:
      self._passed_on = True
      self._store.write('told/stop', str(self._asked()))

  def _tell_silent(self) -> None:
    """Tells all which process has been silent for too long."""
    now, ended = time.monotonic(), self._store.read('end')
    for rank, (last, since) in self._seen.items():
      beat = self._store.read(f'beat/{rank}').get('now', '')
      if beat != last:
        self._seen[rank] = beat, now
        continue
      secs = SILENT_SECS if beat else FIRST_SECS
      if rank not in ended and now - since > secs:
        host, verb = beat.rpartition(' ')[0], 'has been silent for'
        who = f'Process {rank} on {host}' if host else f'Process {rank}'
        if not beat:
          verb = 'has not come to the run within'
        self._store.write('told/dead', f'{who} {verb} {secs:.0f} s')

  def _hear(self) -> None:
    """Does what one of the processes has told all."""
    told, now = self._store.read('told'), time.monotonic()
    if dead := told.get('dead'):
      self._leave(dead, START_AGAIN)
    if (number := told.get('stop')) and not self._asked():
      self._deliver(int(number))
    since, self._failed = self._failed, {}
    for folder, secs in ('end', GRACE_SECS), ('failing', FAIL_SECS):
      for rank, problem in self._store.read(folder).items():
        key = folder, rank
        first, last = since.get(key, (now, now))
        if folder == 'failing' and self._store.read('patient'):
          last = now  # they come, in their time
        self._failed[key] = first, last
        if problem and (now - last > secs or now - first > PATIENT_SECS):
          # Also this process itself, if nobody comes to hear of its error.
          if self._rank == 0 and (trace := self._store.read('trace').get(rank)):
            trace = plain_text.printable(trace)
            said = f'The traceback of process {rank}:\n{trace}'
            print(said, file=sys.stderr, flush=True)
          self._leave(f'Process {rank} has failed: {problem}', 2)

  def _leave(self, why: str, code: int) -> None:
    """Ends this process, whose main thread waits for ever."""
    what = 'see there'
    if self._is_failing:
      code = 2  # whatever has become of the others
    if code == START_AGAIN:
      what = 'give the same command again'
    text = f'{why}; this process, {self._rank}, ends too: {what}.'
    if self._rank:
      leave(text, code)
    _say(text)
    time.sleep(3 * BEAT_SECS)  # the store of the others ends with this process
    os._exit(code)


def leave(text: str, code: int = START_AGAIN) -> NoReturn:
  """Ends this process from any thread, with a sentence."""
  _say(text)
  os._exit(code)


def _say(text: str) -> None:
  shown = plain_text.printable(text)
  print(f'grpo-jax: {shown}', file=sys.stderr, flush=True)


@contextlib.contextmanager
def limited(
  secs: float, late: Callable[[], object], text: str
) -> Iterator[None]:
  """A time limit for the body, which may be stuck in a library or a driver.

  A driver that hangs may hold Python's global lock (GIL), as a CUDA driver does
  where JAX counts its GPUs. Then no thread of Python runs, `late` neither. So
  a thread of C ends this process `STUCK_SECS` later, with exit code 1. Such a
  thread can write a traceback, but no sentence. It writes the traceback to
  another process, which says the sentence in its place.

  Args:
    secs: The limit.
    late: Called in another thread once the limit is over. It is to end this
      process.
    text: What is said if it cannot.
  """
  timer = threading.Timer(secs, late)
  timer.daemon = True
  speaker = subprocess.Popen(
    ['sh', '-c', 'read -r _ && echo "$0" >&2', f'grpo-jax: {text}'],
    stdin=subprocess.PIPE,
    start_new_session=True,  # Ctrl-C is not meant for it
  )
  assert speaker.stdin
  faulthandler.dump_traceback_later(
    secs + STUCK_SECS, file=speaker.stdin, exit=True
  )
  timer.start()
  try:
    yield
  finally:
    timer.cancel()
    faulthandler.cancel_dump_traceback_later()
    speaker.kill()
    speaker.wait()
    speaker.stdin.close()
