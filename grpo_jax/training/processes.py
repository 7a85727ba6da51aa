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
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
import contextlib
import itertools
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from typing import Any
from typing import NamedTuple

from grpo_jax.training import stop_signal
from grpo_jax.training import watch
from grpo_jax.training.store import Store

START_AGAIN = watch.START_AGAIN
WAITED = 'waited for another process'
ELSEWHERE_SECS = 2.0  # at a barrier, while another waits at another one
JOIN_SECS = 300.0  # until all processes have been started
_POLL_SECS = 0.05

_NOTHING = contextlib.nullcontext()
_joins = itertools.count()  # runs of this process, one after another


class _Said(NamedTuple):
  """What a process puts into an exchange."""

  value: Any
  error: str = ''  # of a process that has failed
  trace: str = ''  # its traceback
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
  advice = 'start all of them, with the same --coordinator and --num_processes.'
  # At its time limit JAX aborts, with a stack of C++ calls.
  late = threading.Timer(
    JOIN_SECS,
    watch.leave,
    (f'The others have not come within {JOIN_SECS:.0f} s; {advice}',),
  )
  late.daemon = True
  late.start()
  try:
    jax.distributed.initialize(
      coordinator or None,
      number,
      rank,
      initialization_timeout=int(2 * JOIN_SECS),
    )
  except Exception as error:  # of many types, some plain Exception
    raise ValueError(
      f'The processes of this run could not join ({_first_line(error)}); '
      f'{advice}'
    ) from error
  finally:
    late.cancel()
  # Called before the handler of JAX, in which one that has failed would wait
  # for the others and then be aborted.
  atexit.register(_leave_if_failed)
  return jax.process_index() == 0


def _leave_if_failed() -> None:
  """Ends a process whose error was its own, once Python has printed it."""
  if _failed_alone:
    for stream in sys.stdout, sys.stderr:
      with contextlib.suppress(Exception):
        stream.flush()
    os._exit(2)


_failed_alone: list[BaseException] = []  # errors that not all processes have


def _in_a_cluster() -> bool:
  """Whether JAX finds several processes in this machine's surroundings."""
  hints = 'SLURM_JOB_ID', 'KUBERNETES_SERVICE_HOST', 'OMPI_COMM_WORLD_SIZE'
  devices = '/dev/accel0', '/dev/vfio/0'  # of a TPU
  if not (any(map(os.environ.get, hints)) or any(map(os.path.exists, devices))):
    return False  # and JAX, which takes a second, is not imported yet
  from jax._src.clusters import ClusterEnv

  for cluster in ClusterEnv._cluster_types:
    # Such as that a variable is missing in an interactive job of Slurm.
    with contextlib.suppress(Exception):
      if not cluster.opt_in_only_method and cluster.is_env_present():
        return cluster.get_process_count() > 1
  return False


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

  def all_from_first(self, values: Iterable[Any]) -> Iterator[Any]:
    """What the first process reads, one after another."""
    mine = iter(values)
    while told := self.from_first([*itertools.islice(mine, self.is_first)]):
      yield told[0]

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
    if isinstance(error, KeyboardInterrupt) and not _is_stop(error):
      return error  # a second Ctrl-C waits for nobody
    self._agreed = error
    problem, stops = _sentence(error), _is_stop(error)
    trace = '' if stops else ''.join(traceback.format_exception(error))
    said = _Said(None, problem, trace, stops, self._signal())
    with self.failing(problem) if not stops else _NOTHING:
      told = self._told(said)
    if stops:
      try:
        self._raise_error(told)
      except PeerError as another:
        return another
    return error

  def failing(self, problem: str) -> contextlib.AbstractContextManager[None]:
    """In it the watch ends others that do not come to where this one waits."""
    return self._watch.failing(problem) if self._watch else _NOTHING

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
      self._stop.signal = signal.Signals(number)

  def _raise_error(self, told: list['_Said']) -> None:
    """Raises the first error, if there is one that is no stop."""
    for rank, said in enumerate(told):
      if said.error and not said.stops:
        self._agreed = PeerError(f'Process {rank}: {said.error}')
        self._agreed.add_note(f'The traceback of process {rank}:\n{said.trace}')
        raise self._agreed

  def _told(self, said: '_Said') -> list['_Said']:
    """One exchange, whatever it brings."""
    self._count += 1
    store, folder = self._store, f'exchange/{self._count}'
    assert store is not None  # one process says nothing
    if not self.is_first:
      store.put(f'{folder}/{self.rank}', pickle.dumps(said))
      return pickle.loads(store.wait(f'{folder}/all'))
    # Together, so that the others read one word each and not one of each.
    others = (store.wait(f'{folder}/{rank}') for rank in range(1, self.number))
    told = [said, *map(pickle.loads, others)]
    store.put(f'{folder}/all', pickle.dumps(told))
    if self._count > 1:  # all have read it, or they had not said anything
      store.delete(f'exchange/{self._count - 1}')
    return told

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
    told = self._store.read('warning')
    for name in told:
      self._store.delete(f'warning/{name}')
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

  def __enter__(self) -> 'Processes':
    if self._store is not None:
      self._watch = watch.Watch(
        self._store, self.number, self.rank, self._signal
      )
    return self

  def __exit__(self, kind, error, traceback) -> None:
    if self._watch is None:
      return
    if error is not None and _is_of_the_runtime(error):
      # A program of the devices fails when a process dies. Then the watch ends
      # this process, once it knows which one it was.
      time.sleep(watch.SILENT_SECS + 5 * watch.BEAT_SECS)
      watch.leave(f'The devices have failed ({_first_line(error)}).')
    if error is None or self.knows(error):
      self._watch.end('')
      return
    _failed_alone.append(error)
    self._watch.end(_sentence(error))
    if self.is_first:  # the store of the others ends with it
      time.sleep(watch.GRACE_SECS + 5 * watch.BEAT_SECS)


ALONE = Processes()


def are_joined() -> bool:
  """Whether `initialize` has joined several processes."""
  jax: Any = sys.modules.get('jax')
  if not jax:  # importing it would take a second
    return False
  # Not by counting alone, which would begin by looking for devices.
  return jax.distributed.is_initialized() and jax.process_count() > 1


def joined() -> Processes:
  """The processes that `initialize` has joined.

  Raises:
    ValueError: There are several, which something else has joined.
  """
  import jax

  if not are_joined():
    if jax.process_count() > 1:
      raise ValueError(
        f'There are {jax.process_count()} processes, which were not joined by '
        'jax.distributed.initialize(); call it before all else.'
      )
    return ALONE
  from jax._src import distributed

  store = Store(distributed.global_state.client, f'grpo_jax/{next(_joins)}')
  return Processes(store, jax.process_count(), jax.process_index())


def _is_stop(error: BaseException) -> bool:
  return isinstance(error, stop_signal.Stopped)


def _is_of_the_runtime(error: BaseException) -> bool:
  """Whether devices or networks have failed, which may go well another time."""
  import jax

  runtime = isinstance(error, jax.errors.JaxRuntimeError)
  return runtime and 'RESOURCE_EXHAUSTED' not in str(error)


def _sentence(error: BaseException) -> str:
  return f'{type(error).__name__}: {_first_line(error)}'


def _first_line(error: BaseException) -> str:
  return (str(error).strip().splitlines() or [''])[0][:300]
