"""The processes of a run: one on each host, which end together.

All of them run the same program, and a program of the devices needs every
process. So none may leave a loop, raise or save alone: the others would wait
for it for ever. Three things prevent that.

- **Exchange**: before what needs all processes, they tell each other how they
  are. `exchange` gives every process what all have said, and `together` makes
  an error, or a stop, of one process one of all.
- **Signals**: one process that gets a signal passes it on, so that all stop.
- **Watch**: if one process is lost, the others end too; see `watch.py`.

What they say goes through a store and not over the devices; see `store.py`.
"""

import atexit
import collections
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
import contextlib
import itertools
import os
import pickle
import re
import signal
import sys
import time
import traceback
from typing import Any
from typing import NamedTuple

from grpo_jax.config import plain_text
from grpo_jax.hosts import stop_signal
from grpo_jax.hosts import watch
from grpo_jax.hosts.store import Store

START_AGAIN = watch.START_AGAIN
WAITED = 'waited for another process'
ELSEWHERE_SECS = 2.0  # at a barrier, while another waits at another one
_POLL_SECS = 0.05
_PART_BYTES = 1 << 20  # of a message through the store, at most

_NOTHING = contextlib.nullcontext()
# In errors of the devices that may be another process's, or the network's.
_NETWORK = re.compile(
  'UNAVAILABLE|ABORTED|DEADLINE_EXCEEDED|Gloo|NCCL|RCCL|[Cc]onnection|[Pp]eer'
)


class _Said(NamedTuple):
  """What a process puts into an exchange."""

  value: Any
  error: str = ''  # of a process that has failed
  trace: str = ''  # its traceback
  stops: bool = False  # whether the error is a stop
  signal: int = 0  # that has asked for it


class StartAgain(ValueError):
  """Ends a run that the same command goes on with, maybe with more luck."""


class PeerError(ValueError):
  """Another process has failed; the message has its number and its error."""


def _leave_if_failed() -> None:
  """Ends a process whose error was its own, once Python has printed it."""
  if _failed_alone:
    for stream in sys.stdout, sys.stderr:
      with contextlib.suppress(Exception):
        stream.flush()
    os._exit(_failed_alone[-1])


_failed_alone: list[int] = []  # exit codes, for errors that not all have


class Processes:
  """What this process knows of the others, and tells them.

  A context manager: in it the watch runs, and an error that leaves it is told
  to the others. With one process it does nothing.

  Attributes:
    number: Of processes.
    rank: The number of this process, from 0.
  """

  def __init__(
    self, store: Store | None = None, number: int = 1, rank: int = 0
  ):
    """Processes that meet in a store; None for one process alone."""
    self._store, self.number, self.rank = store, number, rank
    self._count = 0  # of exchanges
    self._warned = 0  # how often
    self._barriers = collections.Counter[tuple[str, str]]()
    self._passed: dict[str, str] = {}  # the last barrier of each work
    # What was handed out under each name, and what of it is deleted.
    self._handed = collections.Counter[str]()
    self._forgotten = collections.Counter[str]()
    self._agreed: BaseException | None = None  # the error that all know of
    self._watch: watch.Watch | None = None
    self._stop: stop_signal.Stop | None = None

  @property
  def is_first(self) -> bool:
    """Whether this process writes for all."""
    return self.rank == 0

  def exchange(self, value: Any = None) -> list[Any]:
    """What each process has said, by its number.

    Every process must call it equally often. While it waits, the watch ends
    this process if another one is lost.

    Args:
      value: What `pickle` can write.

    Raises:
      PeerError: Another process has called `fail` in place of this.
      stop_signal.Stopped: Another process was asked to stop, and has called
        `fail` with that.
    """
    if self._store is None:
      return [value]
    answers = self._heard(_Said(value))
    self._raise_error(answers)
    if any(said.stops for said in answers):
      self._take(max(said.signal for said in answers))
      self._agreed = stop_signal.Stopped()
      raise self._agreed
    return [said.value for said in answers]

  def from_first(self, value: Any) -> Any:
    """What the first process has given; what the others give is not read."""
    return self.exchange(value if self.is_first else None)[0]

  def all_from_first(self, values: Iterable[Any]) -> Iterator[Any]:
    """What the first process reads, one after another."""
    mine = iter(values)
    while one := self.from_first([*itertools.islice(mine, self.is_first)]):
      yield one[0]

  def fail(self, error: BaseException) -> BaseException:
    """Makes an error of this process one of all, at their next exchange.

    They may be far from it, or wait for this process in a program of the
    devices. So the watch ends them if they do not come within `FAIL_SECS`; for
    a stop nobody is ended.

    Args:
      error: Ends the run in all processes. `Stopped` ends it as a signal does.
        Nothing is done if it came from another process.

    Returns:
      What is to be raised here: the error, or if it is a stop, and another
      process has failed, a `PeerError`.
    """
    if self._store is None or error is self._agreed:
      return error
    if _is_interrupt(error):
      return error  # a second Ctrl-C waits for nobody
    self._wait_if_lost(error)
    self._agreed = error
    problem, stops = _sentence(error), _is_stop(error)
    trace = '' if stops else _trace(error)
    said = _Said(None, problem, trace, stops, self._signal())
    with self.failing('' if stops else problem, trace):
      answers = self._heard(said)
    if stops:
      try:
        self._raise_error(answers)
      except PeerError as another:
        return another
    return error

  def failing(
    self, problem: str, trace: str = ''
  ) -> contextlib.AbstractContextManager[None]:
    """In it the watch ends others that do not come to where this one waits.

    Nothing is done without a problem.
    """
    if not (self._watch and problem):
      return _NOTHING
    return self._watch.failing(problem, trace)

  @contextlib.contextmanager
  def patient(self) -> Iterator[None]:
    """In it others wait for this process, even if they have failed.

    For code of the user's, such as a judge, which may take its time: up to
    `watch.PATIENT_SECS` after another process has failed.
    """
    if self._store is not None:
      self._store.write(f'patient/{self.rank}')
    try:
      yield
    finally:
      if self._store is not None:
        self._store.delete(f'patient/{self.rank}')

  def _wait_if_lost(self, error: BaseException) -> None:
    """Ends this process if another one is gone, which the error may mean.

    A program of the devices fails when a process dies. The watch ends this one
    once it knows which one it was.
    """
    if not is_of_the_runtime(error):
      return
    time.sleep(watch.SILENT_SECS + 5 * watch.BEAT_SECS)
    if _NETWORK.search(plain_text.said(error)):
      trace = ''.join(traceback.format_exception(error))
      print(plain_text.printable(trace), end='', file=sys.stderr, flush=True)
      watch.leave(f'The devices have failed ({first_line(error)}).')

  @contextlib.contextmanager
  def together(self) -> Iterator[None]:
    """An error, or a stop, of the body in one process is one of all.

    Raises:
      PeerError: The body has raised nothing here, but in another process.
      stop_signal.Stopped: A process was asked to stop.
    """
    try:
      yield
    except BaseException as error:
      raise self.fail(error)  # noqa: B904  (nearly always the error itself)
    self.exchange()

  def knows(self, error: BaseException) -> bool:
    """Whether all processes have this error, or the one that it stands for."""
    return self._store is None or error is self._agreed

  def barrier(self, key: str, timeout_ms: int, work: str) -> None:
    """Waits, in any thread, until all processes are here.

    Args:
      key: Of the barrier; the same one may be waited at again.
      timeout_ms: How long to wait.
      work: What all of them do; in it one waits at one barrier at a time.

    Raises:
      TimeoutError: Time is up, or a process cannot come any more: it has left
        the work, or waits at another barrier of it, as after an error.
    """
    self._barriers[work, key] += 1
    store, begun = self._store, time.monotonic()
    assert store is not None  # one process meets nobody
    name = f'{key} {self._barriers[work, key]}'
    store.write(f'barrier/{work}/{name}/{self.rank}')
    while not store.read(f'passed/{work}/{name}'):
      secs = time.monotonic() - begun
      if self.is_first:  # which looks at all, and tells the others
        here = store.read(f'barrier/{work}/{name}')
        # A barrier that is passed is removed first. So another one that is
        # there has somebody who waits at it, for those who are here.
        if len(here) == self.number:
          store.delete(f'barrier/{work}/{name}')
          store.write(f'passed/{work}/{name}/all')
          if earlier := self._passed.get(work):  # all have read it
            store.delete(f'passed/{work}/{earlier}')
          self._passed[work] = name
        elif secs > ELSEWHERE_SECS and store.has_other(f'barrier/{work}', name):
          self.leave(work)
      if store.read(f'left/{work}') or secs > timeout_ms / 1000:
        raise TimeoutError(WAITED)
      time.sleep(min(_POLL_SECS, 0.005 + secs / 8))  # most are passed at once

  def leave(self, work: str) -> None:
    """Ends the waits of the others at a barrier that this one cannot reach."""
    if self._store is not None:
      self._store.write(f'left/{work}/{self.rank}')

  def is_stopped(self) -> bool:
    """Whether any process was asked to stop; the same answer in all."""
    asked = self._stop is not None and self._stop()
    stops = [said for said in self.exchange((asked, self._signal())) if said[0]]
    if stops:
      self._take(max(number for _, number in stops))
    return bool(stops)

  def _signal(self) -> int:
    """The signal that has asked this process to stop; 0 if none has."""
    return int(self._stop.signal or 0) if self._stop else 0

  def _take(self, number: int) -> None:
    """As if this process had got the signal that another one has got."""
    if number and self._stop and not self._stop.signal:
      self._stop.take(number)

  def _raise_error(self, answers: list['_Said']) -> None:
    """Raises the first error, if there is one that is no stop."""
    for rank, said in enumerate(answers):
      if said.error and not said.stops:
        self._agreed = PeerError(f'Process {rank}: {said.error}')
        self._agreed.add_note(f'The traceback of process {rank}:\n{said.trace}')
        raise self._agreed

  def _heard(self, said: '_Said') -> list['_Said']:
    """One exchange, whatever it brings."""
    self._count += 1
    store, folder = self._store, f'exchange/{self._count}'
    assert store is not None  # one process says nothing
    if not self.is_first:
      store.put(f'{folder}/{self.rank}', pickle.dumps(said))
      return pickle.loads(store.wait(f'{folder}/all'))
    # Together, so that the others read one word each and not one of each.
    others = (store.wait(f'{folder}/{rank}') for rank in range(1, self.number))
    answers = [said, *map(pickle.loads, others)]
    store.put(f'{folder}/all', pickle.dumps(answers))
    if self._count > 1:  # all have read it, or they had not said anything
      store.delete(f'exchange/{self._count - 1}')
    return answers

  def hand_out(
    self,
    name: str,
    make: Callable[[], bytes],
    check: Callable[[], None] = lambda: None,
  ) -> bytes:
    """What the first process makes, in all of them; in any thread.

    Each thread has names of its own, under which all processes call it equally
    often.

    Args:
      name: Of what is made.
      make: Called in the first process. If it raises, nothing is handed out.
      check: Called again and again while another one waits.
    """
    if self._store is None:
      return make()
    self._handed[name] += 1
    store, number = self._store, self._handed[name]
    folder = f'handed/{name}'
    if not self.is_first:
      size = int(store.wait(f'{folder}/{number}/size', check))
      parts = range(-(-size // _PART_BYTES))
      data = b''.join(
        store.wait(f'{folder}/{number}/{part}', check) for part in parts
      )
      store.write(f'read/{name}/{self.rank}', str(number))
      return data
    data = make()
    read = store.read(f'read/{name}')
    if len(read) == self.number - 1:  # all have read these
      for old in range(self._forgotten[name] + 1, min(map(int, read.values()))):
        store.delete(f'{folder}/{old}/')
        self._forgotten[name] = old
    for part, begin in enumerate(range(0, len(data), _PART_BYTES)):
      store.put(f'{folder}/{number}/{part}', data[begin : begin + _PART_BYTES])
    store.put(f'{folder}/{number}/size', b'%d' % len(data))
    return data

  def check_equal(self, values: Mapping[str, Any]) -> None:
    """Raises a ValueError in all processes if they were started differently.

    Args:
      values: What must be the same in all of them, by its name.
    """
    answers = self.exchange({name: repr(v) for name, v in values.items()})
    # One may lack a name that others have, such as that of a file.
    for name in dict.fromkeys(name for one in answers for name in one):
      of_each = [one.get(name) for one in answers]
      usual = max(of_each, key=of_each.count)
      odd = [rank for rank, one in enumerate(of_each) if one != usual]
      if odd:
        self._agreed = ValueError(
          f'Process {", ".join(map(str, odd))} has {name}={of_each[odd[0]]}, '
          f'and the others have {usual}; start all of them alike.'
        )
        raise self._agreed

  def warn(self, text: str) -> None:
    """Takes a warning to the first process, which shows what all have seen."""
    if self._store is not None:
      self._warned += 1
      self._store.write(f'warning/{self.rank}.{self._warned}', text)

  def warnings(self) -> list[str]:
    """In the first process, the warnings of the others since the last call."""
    if self._store is None or not self.is_first:
      return []
    warnings = self._store.read('warning')
    for name in warnings:
      self._store.delete(f'warning/{name}')
    of_text: dict[str, set[str]] = {}
    for name, text in warnings.items():
      of_text.setdefault(text, set()).add(name.partition('.')[0])
    return [
      f'process {", ".join(sorted(ranks, key=int))}: {text}'
      for text, ranks in of_text.items()
    ]

  def pass_on(self, stop: stop_signal.Stop) -> None:
    """Has signals of `stop` passed on to the others, and theirs taken."""
    self._stop = stop

  def _deliver(self, number: int) -> None:
    """A signal that another process has got, told by the watch."""
    if self._stop:
      self._stop.deliver(number)

  def __enter__(self) -> 'Processes':
    if self._store is not None:
      atexit.unregister(_leave_if_failed)
      # Called before the handler of JAX, in which one that has failed would
      # wait for the others and then be aborted.
      atexit.register(_leave_if_failed)
      self._watch = watch.Watch(
        self._store, self.number, self.rank, self._signal, self._deliver
      )
    return self

  def __exit__(self, kind, error, traceback) -> None:
    if self._watch is None:
      return
    if error is None or self.knows(error):
      self._watch.end('')
      return
    self._wait_if_lost(error)
    interrupted = _is_interrupt(error)
    _failed_alone.append(128 + signal.SIGINT if interrupted else 2)
    self._watch.end(_sentence(error), _trace(error))
    # The store of the others ends with the first.
    if self.is_first and not interrupted:
      time.sleep(watch.GRACE_SECS + 5 * watch.BEAT_SECS)


ALONE = Processes()


def _is_stop(error: BaseException) -> bool:
  return isinstance(error, stop_signal.Stopped)


def _is_interrupt(error: BaseException) -> bool:
  """Whether it is a second Ctrl-C, and not a stop."""
  return isinstance(error, KeyboardInterrupt) and not _is_stop(error)


def is_of_the_runtime(error: BaseException) -> bool:
  """Whether devices or networks have failed, which may go well another time."""
  import jax

  runtime = isinstance(error, jax.errors.JaxRuntimeError)
  return runtime and 'RESOURCE_EXHAUSTED' not in plain_text.said(error)


def _sentence(error: BaseException) -> str:
  return f'{plain_text.kind(error)}: {first_line(error)}'


def _trace(error: BaseException) -> str:
  return ''.join(traceback.format_exception(error))


def first_line(error: BaseException) -> str:
  """What an error says, at most 300 characters of it."""
  return plain_text.first_line(error)[:300]
