"""The processes of a run: one on each host, which end together.

All of them run the same program, and a program of the devices needs every
process. So none may leave a loop, raise or save alone: the others would wait
for it for ever. Three things prevent that.

- **Exchange**: before what needs all processes, they tell each other how they
  are. `exchange` gives every process what all have said, and `together` makes
  an error, or a stop, of one process one of all.
- **Signals**: one process that gets a signal passes it on, so that all stop.
- **Watch**: a thread in every process writes every second that it is alive. If
  one is silent for `SILENT_SECS`, or has ended with an error, the others end
  too and say which it was. They end with `START_AGAIN` if it died, because a
  new start goes on from the newest checkpoint, and with 2 if it refused its
  input, because a new start would too.

What they say goes through the key-value store of `jax.distributed`, which lies
in the first process, and not over the devices: it works while the devices wait,
and a wait can end. The first process alone reads what all have said in the
watch, and tells the others what follows, so its work grows with the number of
processes, not with the square.
"""

import collections
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
import contextlib
import itertools
import os
import pickle
import signal
import socket
import sys
import threading
import time
from typing import Any
from typing import NamedTuple

from grpo_jax.training import stop_signal

START_AGAIN = 75
"""Exit code: another process was lost, and the same command goes on."""

SILENT_SECS = 30.0  # after which a process counts as dead
FAIL_SECS = 60.0  # after which a process that has failed ends the others
WAITED = 'waited for another process'
ELSEWHERE_SECS = 2.0  # at a barrier, while another waits at another one
BEAT_SECS = 1.0
GRACE_SECS = 10.0  # for processes that end by themselves, for the same reason
_POLL_SECS = 0.5  # a wait that is longer would keep signals from Python


_joins = itertools.count()  # runs of this process, one after another


class _Said(NamedTuple):
  """What a process puts into an exchange."""

  value: Any
  error: str = ''  # of a process that has failed
  stops: bool = False  # whether the error is a stop
  signal: int = 0  # that has asked for it


class PeerError(ValueError):
  """Another process has failed; the message has its number and its error."""


def initialize(
  coordinator: str = '', number: int | None = None, rank: int | None = None
) -> bool:
  """Joins the processes of a run, if it has several; before devices are used.

  Without arguments, JAX finds out on Cloud TPU, Slurm, Kubernetes and Open MPI
  by itself, and what it finds there is taken.

  Args:
    coordinator: `host:port` of the first process, where the port is free.
    number: Of processes.
    rank: The number of this process, from 0.

  Returns:
    Whether this is the first process, which writes for all.

  Raises:
    ValueError: Only some of the arguments are given, they make no sense, or the
      others cannot be reached.
  """
  given = [bool(coordinator), number is not None, rank is not None]
  if any(given) and not all(given):
    raise ValueError(
      '--coordinator, --num_processes and --process_id belong together; give '
      'all three, or none where Cloud TPU, Slurm or Kubernetes tell them.'
    )
  if number is not None and rank is not None:
    if number < 1 or not 0 <= rank < number:
      raise ValueError(
        f'--process_id={rank} with --num_processes={number}; give numbers from '
        '0 to one less than the number of processes.'
      )
  elif not _in_a_cluster():
    return True
  import jax

  # It would swallow SIGTERM, which `stop_signal` handles.
  jax.config.update('jax_enable_preemption_service', False)
  try:
    jax.distributed.initialize(
      coordinator or None, number, rank, initialization_timeout=120
    )
  except Exception as error:  # of many types, some plain Exception
    raise ValueError(
      f'The processes of this run could not join ({_first_line(error)}); start '
      'all of them, with the same --coordinator and --num_processes.'
    ) from error
  return jax.process_index() == 0


def _in_a_cluster() -> bool:
  """Whether the environment speaks of several processes."""
  told = os.environ.get
  several = lambda name: (told(name) or '1').strip() not in ('', '0', '1')
  return (
    ',' in (told('TPU_WORKER_HOSTNAMES') or '')
    or bool(told('JAX_COORDINATOR_ADDRESS'))
    or several('MEGASCALE_NUM_SLICES')
    or (several('SLURM_NTASKS') and bool(told('SLURM_PROCID')))
    or several('OMPI_COMM_WORLD_SIZE')
  )


class Processes:
  """What this process knows of the others, and tells them.

  A context manager: in it the watch runs, and an error that leaves it is told
  to the others. With one process it does nothing.

  Attributes:
    number: Of processes.
    rank: The number of this process, from 0.
  """

  def __init__(
    self, client: Any = None, number: int = 1, rank: int = 0, name: str = 'run'
  ):
    """Processes that meet in a store.

    Args:
      client: The store of `jax.distributed`, or one like it; None for one
        process.
      number: Of processes.
      rank: The number of this process.
      name: Of the run: a folder in the store, where nothing is yet.
    """
    self._client, self.number, self.rank = client, number, rank
    self._folder = f'grpo_jax/{name}'
    self._count = 0  # of exchanges
    self._warned = 0  # how often
    self._barriers = collections.Counter[tuple[str, str]]()
    self._agreed: BaseException | None = None  # the error that all know of
    self._failed: dict[tuple[str, str], float] = {}  # and since when
    self._over = threading.Event()
    self._watch: threading.Thread | None = None
    self._stop: stop_signal.Stop | None = None
    self.say: Callable[[str], None] = lambda text: print(
      f'grpo-jax: {text}', file=sys.stderr, flush=True
    )

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
    if self._client is None:
      return [value]
    told = self._told(_Said(value))
    self._raise_error(told)
    if any(said.stops for said in told):
      self._take(max(said.signal for said in told))
      self._agreed = stop_signal.Stopped()
      raise self._agreed
    return [said.value for said in told]

  def from_first(self, value: Any) -> Any:
    """What the first process has given; what the others give is not read."""
    return self.exchange(value if self.is_first else None)[0]

  def fail(self, error: BaseException) -> BaseException:
    """Makes an error of this process one of all, at their next exchange.

    They may be far from it, or wait for this process in a program of the
    devices. So the watch ends them if they do not come within `FAIL_SECS`.

    Args:
      error: Ends the run in all processes. `Stopped` ends it as a signal does.
        Nothing is done if it came from another process.

    Returns:
      What is to be raised here: the error, or if it is a stop, and another
      process has failed, a `PeerError`.
    """
    if self._client is None or error is self._agreed:
      return error
    self._agreed = error
    self._set(f'failing/{self.rank}', _sentence(error))
    stops = _is_stop(error)
    told = self._told(_Said(None, _sentence(error), stops, self._signal()))
    self._client.key_value_delete(f'{self._folder}/watch/failing/{self.rank}')
    if stops:
      try:
        self._raise_error(told)
      except PeerError as another:
        return another
    return error

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
    return self._client is None or error is self._agreed

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
    name = f'{key} {self._barriers[work, key]}'
    begun, limit = time.monotonic(), timeout_ms / 1000
    store, folder = self._client, f'{self._folder}/barrier/{work}/{name}/'
    own = f'{self._folder}/barrier/{work}/at/{self.rank}'
    store.key_value_set(f'{folder}{self.rank}', '', allow_overwrite=True)
    store.key_value_set(own, name, allow_overwrite=True)
    try:
      while len(store.key_value_dir_get(folder)) < self.number:
        waited = time.monotonic() - begun
        at = dict(store.key_value_dir_get(f'{self._folder}/barrier/{work}/at/'))
        if waited > ELSEWHERE_SECS and set(at.values()) != {name}:
          raise TimeoutError(f'{WAITED} that waits elsewhere')
        if (
          store.key_value_dir_get(f'{self._folder}/left/{work}/')
          or waited > limit
        ):
          raise TimeoutError(WAITED)
        time.sleep(0.05)
    finally:
      store.key_value_delete(own)

  def leave(self, work: str) -> None:
    """Ends the waits of the others at a barrier that this one cannot reach."""
    if self._client is not None:
      self._client.key_value_set(
        f'{self._folder}/left/{work}/{self.rank}', '', allow_overwrite=True
      )

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
      self._stop.signal = signal.Signals(number)

  def _raise_error(self, told: list['_Said']) -> None:
    """Raises the first error, if there is one that is no stop."""
    for rank, said in enumerate(told):
      if said.error and not said.stops:
        self._agreed = PeerError(f'Process {rank}: {said.error}')
        raise self._agreed

  def _told(self, said: '_Said') -> list['_Said']:
    """One exchange, whatever it brings."""
    self._count += 1
    folder, own = f'{self._folder}/exchange/{self._count}', pickle.dumps(said)
    put = self._client.key_value_set_bytes
    if not self.is_first:
      put(f'{folder}/{self.rank}', own)
      return pickle.loads(self._waited_for(f'{folder}/all'))
    # Together, so that the others read one key each and not one of each.
    others = (
      self._waited_for(f'{folder}/{rank}') for rank in range(1, self.number)
    )
    told = [said, *map(pickle.loads, others)]
    put(f'{folder}/all', pickle.dumps(told))
    if self._count > 1:  # all have read it, or they had not said anything
      self._client.key_value_delete(
        f'{self._folder}/exchange/{self._count - 1}'
      )
    return told

  def _waited_for(self, key: str) -> bytes:
    while True:
      try:
        return self._client.blocking_key_value_get_bytes(
          key, int(1000 * _POLL_SECS)
        )
      except Exception as error:
        if 'DEADLINE_EXCEEDED' not in str(error):
          raise

  def check_equal(self, values: Mapping[str, Any]) -> None:
    """Raises a ValueError in all processes if they were started differently.

    Args:
      values: What must be the same in all of them, by its name.
    """
    told = self.exchange({name: repr(v) for name, v in values.items()})
    for name in values:
      of_each = [one.get(name) for one in told]
      usual = max(of_each, key=of_each.count)
      odd = [rank for rank, one in enumerate(of_each) if one != usual]
      if odd:
        raise ValueError(
          f'Process {", ".join(map(str, odd))} has {name}={of_each[odd[0]]}, '
          f'and the others have {usual}; start all of them alike.'
        )

  def warn(self, text: str) -> None:
    """Takes a warning to the first process, which shows what all have seen."""
    self._warned += 1
    self._set(f'warning/{self.rank}.{self._warned}', text)

  def warnings(self) -> list[str]:
    """In the first process, the warnings of the others since the last call."""
    if self._client is None or not self.is_first:
      return []
    told = self._all('warning')
    for name in told:
      self._client.key_value_delete(f'{self._folder}/watch/warning/{name}')
    of_text: dict[str, set[str]] = {}
    for name, text in told.items():
      of_text.setdefault(text, set()).add(name.partition('.')[0])
    return [
      f'process {", ".join(sorted(ranks, key=int))}: {text}'
      for text, ranks in of_text.items()
    ]

  def pass_on(self, stop: stop_signal.Stop) -> None:
    """Has signals of `stop` passed on to the others, and theirs taken."""
    self._stop = stop

  # The watch.

  def __enter__(self) -> 'Processes':
    if self._client is not None:
      self._watch = threading.Thread(
        target=self._watches, name='watch', daemon=True
      )
      self._watch.start()
    return self

  def __exit__(self, kind, error, traceback) -> None:
    if self._client is None:
      return
    if error is not None and _is_of_the_runtime(error):
      # A program of the devices fails when a process dies. Then the watch ends
      # this process, once it knows which one it was.
      time.sleep(SILENT_SECS + 5 * BEAT_SECS)
    with contextlib.suppress(Exception):  # the first process may be gone
      self._set(f'end/{self.rank}', _sentence(error) if error else '')
    self._over.set()
    assert self._watch is not None  # `__enter__` made it
    self._watch.join()

  def _set(self, name: str, value: str) -> None:
    self._client.key_value_set(
      f'{self._folder}/watch/{name}', value, allow_overwrite=True
    )

  def _all(self, folder: str) -> dict[str, str]:
    """The last part of each key in a folder, and its value."""
    found = self._client.key_value_dir_get(f'{self._folder}/watch/{folder}/')
    return {key.rpartition('/')[2]: value for key, value in found}

  def _watches(self) -> None:
    """The thread: one beat after another until this process ends."""
    host, beat, passed = socket.gethostname(), 0, False
    # The first process watches all others, and these watch the first.
    watched = range(1, self.number) if self.is_first else [0]
    now = time.monotonic()
    seen = {str(rank): ('', now) for rank in watched}
    lost_since = None
    while not self._over.wait(BEAT_SECS):
      beat += 1
      try:
        self._set(f'beat/{self.rank}', f'{host} {beat}')
        if self._signal() and not passed:
          passed = True
          self._set('told/stop', str(self._signal()))
        self._tell_silent(seen)
        self._hear()
        lost_since = None
      except Exception as error:  # the store does not answer
        lost_since = lost_since or time.monotonic()
        if time.monotonic() - lost_since > SILENT_SECS / 2:
          self._leave(
            f'Process 0 does not answer any more ({_first_line(error)})',
            START_AGAIN,
          )

  def _tell_silent(self, seen: dict[str, tuple[str, float]]) -> None:
    """Tells all which process has been silent for too long.

    Args:
      seen: The last beat of each process that is watched, and when it changed.
    """
    now, ended = time.monotonic(), self._all('end')
    beats = self._all('beat') if self.is_first else self._beat_of_first()
    for rank, (last, since) in seen.items():
      beat = beats.get(rank, '')
      if beat != last:
        seen[rank] = beat, now
      elif rank not in ended and now - since > SILENT_SECS:
        host = beat.rpartition(' ')[0] or 'an unknown host'
        self._set('told/dead', f'{rank} {host}')

  def _beat_of_first(self) -> dict[str, str]:
    """Read alone, because reading all beats is the work of the first."""
    return {'0': self._client.key_value_try_get(f'{self._folder}/watch/beat/0')}

  def _hear(self) -> None:
    """Does what one of the processes has told all."""
    told = self._all('told')
    if dead := told.get('dead'):
      rank, _, host = dead.partition(' ')
      self._leave(
        f'Process {rank} on {host} has been silent for {SILENT_SECS:.0f} s',
        START_AGAIN,
      )
    if (number := told.get('stop')) and not self._signal():
      main = threading.main_thread().ident
      assert main is not None  # it runs
      signal.pthread_kill(main, int(number))
    now = time.monotonic()
    for folder, secs in ('end', GRACE_SECS), ('failing', FAIL_SECS):
      for rank, text in self._all(folder).items():
        since = self._failed.setdefault((folder, rank), now)
        if text and rank != str(self.rank) and now - since > secs:
          self._leave(f'Process {rank} has failed: {text}', 2)

  def _leave(self, why: str, code: int) -> None:
    """Ends this process, whose main thread waits for ever."""
    what = 'give the same command again' if code == START_AGAIN else 'see there'
    self.say(f'{why}; this process, {self.rank}, ends too: {what}.')
    sys.stderr.flush()
    os._exit(code)


ALONE = Processes()


def joined() -> Processes:
  """The processes that `initialize` has joined."""
  import jax

  if jax.process_count() == 1:
    return ALONE
  from jax._src import distributed

  return Processes(
    distributed.global_state.client,
    jax.process_count(),
    jax.process_index(),
    f'run {next(_joins)}',
  )


def _is_stop(error: BaseException) -> bool:
  return isinstance(error, KeyboardInterrupt)


def _is_of_the_runtime(error: BaseException) -> bool:
  import jax

  return isinstance(error, jax.errors.JaxRuntimeError)


def _sentence(error: BaseException) -> str:
  return f'{type(error).__name__}: {_first_line(error)}'


def _first_line(error: BaseException) -> str:
  return (str(error).strip().splitlines() or [''])[0][:300]
