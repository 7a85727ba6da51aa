"""Judges in processes of their own, with limits of time and memory.

A judge in the process of the trainer can end it: by a loop, by too much memory,
by a crash of a library, by `sys.exit`. In a worker it ends the worker. The
completion that it was judging gets the outcome 'failed' with the reason, no
other completion loses its outcome, and a new worker takes the place.

Workers are new Python processes and no forks, because a fork of a process that
runs JAX hangs sooner or later. They import what the judge imports, and none of
JAX by themselves; `JAX_PLATFORMS=cpu` keeps a judge that imports JAX off the
accelerators. What a judge prints goes nowhere.

How a worker ends with everything that it started is told in `_guard.py`.

A function that is marked by `rewards.confined` is called in workers of their
own kind, which get no environment but a few harmless variables and make each
call in a confined process; see `_worker.py`.
"""

import collections
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from concurrent import futures
import contextlib
import json
import math
import os
import pickle
import secrets
import selectors
import sys
import time
from typing import Any
from typing import NamedTuple

from grpo_jax.config import plain_text
from grpo_jax.rewards import _base
from grpo_jax.rewards import _guard
from grpo_jax.rewards import _launch
from grpo_jax.rewards import _worker
from grpo_jax.rewards import piped
from grpo_jax.rewards import sandbox
from grpo_jax.rewards._base import Outcome
from grpo_jax.rewards._base import resolve
from grpo_jax.rewards._base import takes_lists

WALL_TIMES = 10  # by default the clock may show so much of the time limit
_GRACE_SECS = 0.5  # a confined worker ends a call before that itself
_LOOK_SECS = 0.5  # between two looks at the processor time of a call
_AT_ONCE = 4096  # bytes that an empty pipe takes whole


class Process:
  """A worker. It makes one call at a time, from `begin` to `is_finished`."""

  def __init__(
    self,
    limits: dict[str, Any],
    time_limit_secs: float,
    start_limit_secs: float,
    confined: bool = False,
    wall_limit_secs: float | None = None,
  ):
    if wall_limit_secs is None:
      wall_limit_secs = WALL_TIMES * time_limit_secs
    self.confined = confined
    self._limit_secs, self._wall_limit_secs = time_limit_secs, wall_limit_secs
    self._start_limit_secs = start_limit_secs
    apart, env = None, None
    if confined:
      path = [item or os.getcwd() for item in sys.path]
      packages = [one for one in path if one.endswith('-packages')]
      readable = sandbox.readable(packages)
      apart = {
        'limit_secs': time_limit_secs,
        'wall_limit_secs': wall_limit_secs,
        'readable': readable,
      }
      env = {key: os.environ[key] for key in _HARMLESS if key in os.environ}
      env.update(piped.ENVIRONMENT)
      self._limit_secs += _GRACE_SECS
      self._wall_limit_secs += _GRACE_SECS
    self._piped = piped.start(_worker.__name__, [apart], limits, env)
    self._requests, self._answers, self._guarded = self._piped
    self._ended = self._died = False
    self._served = 0
    self._ready = False
    self.may_go_on = True

  def load(self, requests: Sequence[bytes]) -> None:
    """Tells a new worker to import functions, without an answer."""
    message = b''.join(
      piped.HEADER.pack(piped.READY, len(request)) + request
      for request in requests
    )
    if len(message) <= _AT_ONCE:
      with contextlib.suppress(BrokenPipeError):
        os.write(self._requests, message)

  def begin(self, request: bytes, selector: selectors.BaseSelector) -> None:
    """Sends a request; the time of the judge starts with the first answer."""
    self._nonce = secrets.token_bytes(16)
    self._unsent = memoryview(
      piped.HEADER.pack(self._nonce, len(request)) + request
    )
    self._read = b''
    self._called_at: float | None = None
    self._called_cpu: float | None = None
    self._look_at = math.inf
    self.values: Any = None
    self.failure = ''
    self.secs = 0.0
    self._finished = False
    self.deadline = time.monotonic() + self._start_limit_secs
    self._selector = selector
    # Without its guard a worker is about to be ended, though it may still take
    # the request: then it would look as if the judge had ended it.
    self._was_unguarded = not self._guarded.is_guarded()
    if self._was_unguarded:
      self._answer()  # whether it has started at all
      self._died, self.deadline = True, 0.0
      self._finish('', retire=True)
      return
    selector.register(self._requests, selectors.EVENT_WRITE, self._write)
    selector.register(self._answers, selectors.EVENT_READ, self._answer)
    selector.register(self._guarded.status, selectors.EVENT_READ, self._gone)

  def is_finished(self) -> bool:
    """Whether there is an outcome; ends a worker that is late."""
    if not self._finished and self._is_due():
      # An answer may have come in time, and waited for this thread. If it says
      # that the judge is called, that has a deadline of its own.
      self._answer()
      if not self._finished and self._is_due():
        if self._called_at is None:
          self._finish('start limit', retire=True)
        elif (left := self._left_secs()) <= 0:
          self._finish('time limit', retire=True)
        else:
          self._look_at = time.monotonic() + min(left, _LOOK_SECS)
    return self._finished

  def _is_due(self) -> bool:
    """Whether a limit is over, or the processor time must be looked at."""
    return time.monotonic() >= min(self.deadline, self._look_at)

  def _left_secs(self) -> float:
    """What is left of the limits of a call, the less of both."""
    assert self._called_at is not None
    took = time.monotonic() - self._called_at
    wall = self._wall_limit_secs - took
    if self._limits_itself:
      return wall
    # Where the system does not tell the processor time, it is the clock.
    if self._called_cpu is not None:
      now = _guard.cpu_secs(self._guarded.pid)
      took = 0.0 if now is None else now - self._called_cpu
    return min(wall, self._limit_secs - took)

  def unregister(self, selector: selectors.BaseSelector) -> None:
    """Takes the pipes out of the selector; ends one that must not go on."""
    for end in (self._requests, self._answers, self._guarded.status):
      if end in selector.get_map():
        selector.unregister(end)
    if not self.may_go_on:
      how = self.end()
      if self._died:
        self.failure = how.failure or 'exit 0'
    self._served += 1

  def check_started(self) -> None:
    """Raises if the process has ended before it could take a request."""
    if not self._ready:
      advice = f'see whether {sys.executable} can import grpo_jax.rewards.'
      if self.failure.startswith('refused'):
        advice = 'this system refuses what a worker needs to start.'
      raise ValueError(
        f'A worker process for rewards has not started ({self.failure});'
        f' {advice}'
      )

  @property
  def was_lost(self) -> bool:
    """Whether it ended between two calls, so that the judge has not begun."""
    not_new = self._served > 1 or self._was_unguarded
    return self._died and self._called_at is None and not_new

  def close(self) -> None:
    """Tells the process to end, and does not wait for it."""
    if not self._ended:
      self._guarded.close()

  def end(self) -> _launch.Ended:
    """Ends the process and all that it has started."""
    if self._ended:
      return self._how
    self._ended, self.may_go_on = True, False
    self._how = self._piped.end()
    return self._how

  def _write(self) -> None:
    try:
      self._unsent = self._unsent[os.write(self._requests, self._unsent) :]
    except BlockingIOError:
      return
    except BrokenPipeError:  # `_gone` says why
      self._unsent = self._unsent[:0]
    if not self._unsent:
      self._selector.unregister(self._requests)

  def _answer(self) -> None:
    """Reads what the worker says; whatever is no answer fails the call."""
    try:
      self._read += os.read(self._answers, 1 << 20)
    except BlockingIOError:
      return
    header = piped.HEADER
    while len(self._read) >= header.size and not self._finished:
      nonce, size = header.unpack(self._read[: header.size])
      expected = self._nonce if self._ready else piped.READY
      if nonce != expected or size > 1 << 28:
        self._finish('wrote to the pipe of answers', retire=True)
        return
      if len(self._read) < header.size + size:
        return
      data = self._read[header.size : header.size + size]
      self._read = self._read[header.size + size :]
      if self._ready:
        self._heard(data)
      self._ready = True

  def _heard(self, data: bytes) -> None:
    try:
      answer = json.loads(data)
      if answer.get('called'):
        self._called_at = time.monotonic()
        used = _guard.cpu_secs(self._guarded.pid)
        if used is not None:
          # The kernel may leave out a process of its lists while others end.
          used = max(used, answer.get('cpu_secs', 0.0))
        self._called_cpu = used
        self._limits_itself = bool(answer.get('limits_itself'))
        self.deadline = self._called_at + self._wall_limit_secs
        self._look_at = self._called_at + min(self._left_secs(), _LOOK_SECS)
        return
      self.values = answer.get('values')
      self._finish(answer.get('failure') or '', retire=answer['last'])
    except (ValueError, AttributeError, KeyError):
      self._finish('wrote to the pipe of answers', retire=True)

  def _gone(self) -> None:
    """The process has ended before it answered."""
    self._answer()
    if not self._finished:
      self._died = True
      self._finish('', retire=True)

  def _finish(self, failure: str, retire: bool) -> None:
    self._finished = True
    self.failure = failure
    self.may_go_on = not retire
    if self._called_at is not None:
      self.secs = time.monotonic() - self._called_at


# What a confined worker gets of the environment: where programs and caches lie,
# and nothing in which a person keeps secrets.
_HARMLESS = (
  'PATH', 'HOME', 'LANG', 'LC_ALL', 'TZ', 'TMPDIR', 'LD_LIBRARY_PATH',
  'MPLCONFIGDIR', 'XDG_CACHE_HOME', 'XDG_CONFIG_HOME',
)  # fmt: skip

_ROUND_SECS = 0.2  # between two looks at all workers, and two checks


class Call(NamedTuple):
  """One call of a judge.

  Attributes:
    function: A name for `rewards.resolve`, or a function. One that no worker
      can import, such as a lambda, is sent by cloudpickle.
    arguments: Prompt, completion and example; or three lists, if batched.
    batched: Whether the function takes lists; see `rewards.batched`.
    kwargs: Its keyword arguments.
  """

  function: str | Callable[..., Any]
  arguments: tuple[Any, Any, Any]
  batched: bool = False
  kwargs: Mapping[str, Any] = {}


class Workers:
  """A pool of processes that judge.

  >>> with Workers(1) as workers:
  ...   (outcome,) = workers.judge(
  ...     'exact_match', ['1+1='], ['2'], [{'answer': '2'}]
  ...   )
  >>> outcome.reward
  1.0

  One thread at a time may use it. Workers start when they are first needed, or
  by `start`.

  Args:
    number: How many processes judge at the same time.
    time_limit_secs: The most processor time of one call of a judge and of all
      processes that it starts. What is imported before the call is not counted,
      so a busy machine fails no call. Where the system does not tell the time
      of others, it is time by the clock.
    memory_limit_bytes: The most memory of a worker and all processes that its
      judge has started, Python itself included. For each process it is a limit
      of address space, of which some libraries take much more than they use.
    start_limit_secs: The longest that starting a worker and importing the judge
      may take.
    processes: The most processes of one worker at a time.
    pid_namespace: Whether workers run in PID namespaces where the system offers
      them.
    wall_limit_secs: The longest that one call may take by the clock, for a
      judge that waits or hangs; None: ten times `time_limit_secs`.

  Raises:
    ValueError: A limit is not positive.
  """

  def __init__(
    self,
    number: int = 4,
    time_limit_secs: float = 10.0,
    memory_limit_bytes: int = 4 << 30,
    start_limit_secs: float = 120.0,
    processes: int = 64,
    pid_namespace: bool = True,
    wall_limit_secs: float | None = None,
  ):
    if wall_limit_secs is None:
      wall_limit_secs = WALL_TIMES * time_limit_secs
    for name, value in (
      ('number', number),
      ('time_limit_secs', time_limit_secs),
      ('memory_limit_bytes', memory_limit_bytes),
      ('start_limit_secs', start_limit_secs),
      ('processes', processes),
      ('wall_limit_secs', wall_limit_secs),
    ):
      if not value > 0:
        raise ValueError(
          f'{name} of the workers is {value}, but a positive number is'
          ' required; pass one.'
        )
    self._number = number
    self._time_limit_secs = time_limit_secs
    self._start_limit_secs = start_limit_secs
    self._wall_limit_secs = wall_limit_secs
    self._limits: dict[str, Any] = {
      'memory_bytes': memory_limit_bytes,
      'processes': processes,
      'file_bytes': 1 << 30,
      'pid_namespace': pid_namespace,
    }
    self._idle: list[Process] = []

  def __enter__(self) -> 'Workers':
    return self

  def __exit__(self, *_: Any) -> None:
    self.close()

  def start(self, functions: Sequence[str | Callable[..., Any]] = ()) -> None:
    """Starts the workers, and does not wait for them.

    Args:
      functions: What they import meanwhile. An error of that is left to the
        first call.

    Raises:
      ValueError: A function cannot be sent to another process.
      SandboxError: See `run`.
    """
    marks = list(map(_is_confined, functions))
    for confined in sorted(set(marks)) or [False]:
      loads = [
        pickle.dumps((_portable(function), None, False))
        for function, mark in zip(functions, marks, strict=True)
        if mark == confined
      ]
      missing = self._number - sum(w.confined == confined for w in self._idle)
      for _ in range(missing):
        worker = self._start(confined)
        self._idle.append(worker)
        worker.load(loads)

  def close(self) -> None:
    """Ends all workers. The pool may be used again, with new ones."""
    for worker in self._idle:
      worker.close()  # so that all end at the same time
    while self._idle:
      self._idle.pop().end()

  def judge(
    self,
    function: str | Callable[..., Any],
    prompts: Sequence[str],
    completions: Sequence[str],
    examples: Sequence[dict[str, Any]],
  ) -> list[Outcome]:
    """Judges N completions by one function.

    Args:
      function: As of `Call`.
      prompts: N prompts.
      completions: N completions.
      examples: N examples.

    Returns:
      N outcomes, in the order given. If one call of a batched function fails,
      so do all N.
    """
    named = resolve(function) if isinstance(function, str) else function
    rows = list(zip(prompts, completions, examples, strict=True))
    if takes_lists(named) and rows:
      lists = list(prompts), list(completions), list(examples)
      return self.run([Call(function, lists, batched=True)])[0]
    calls = [Call(function, row) for row in rows]
    return [outcomes[0] for outcomes in self.run(calls)]

  @contextlib.contextmanager
  def stream(self) -> 'Iterator[Stream]':
    """Makes calls as they come, in a thread, while the body does other work.

    Calls that are under way when the body is left are ended.

    Yields:
      What takes the calls, and waits for their outcomes.
    """
    with contextlib.closing(Stream()) as stream:
      # Its end waits for the thread, before the pipe is closed under it.
      with futures.ThreadPoolExecutor(1, 'judging') as thread:
        try:
          stream.made = thread.submit(self._make, stream)
          yield stream
        finally:
          stream.leave()  # also where a signal stops the submission

  def run(self, calls: Sequence[Call]) -> list[list[Outcome]]:
    """Makes all calls, as many at a time as there are workers.

    Args:
      calls: In any order of functions; workers keep what they have imported.

    Returns:
      For each call, one outcome per completion.

    Raises:
      ValueError: A function or an argument cannot be sent to another process,
        or a worker cannot start at all.
      SandboxError: The system cannot confine what must be confined.
    """
    # In this thread: nothing has to be ended in another one after an interrupt.
    with contextlib.closing(Stream()) as stream:
      for call in calls:
        stream.add(call)
      stream.end()
      return self._make(stream)

  def _make(self, stream: 'Stream') -> list[list[Outcome]]:
    """Makes the calls of a stream until its end."""
    outcomes: dict[int, list[Outcome]] = {}
    busy: dict[Process, int] = {}
    with selectors.DefaultSelector() as selector:
      try:
        selector.register(stream.pipe, selectors.EVENT_READ, stream.woken)
        while stream.goes_on() or busy:
          while stream.waiting and len(busy) < self._number:
            index = stream.waiting.popleft()
            worker = self._idle_or_new(stream.confined[index])
            worker.begin(stream.requests[index], selector)
            busy[worker] = index
          until = _ROUND_SECS
          if busy:
            limit = min(worker.deadline for worker in busy) - time.monotonic()
            until = min(until, max(0.0, limit))
          for key, _ in selector.select(until):
            key.data()
          for worker in [worker for worker in busy if worker.is_finished()]:
            index = busy.pop(worker)
            worker.unregister(selector)
            worker.check_started()
            if worker.was_lost:
              stream.waiting.appendleft(index)
              continue
            outcomes[index] = _outcomes(stream.calls[index], worker)
            stream.requests[index] = b''
            if worker.may_go_on:
              self._idle.append(worker)
      finally:  # after an interrupt, what still judges
        for worker in busy:
          worker.close()
        for worker in busy:
          worker.end()
    return [outcomes[index] for index in range(len(outcomes))]

  def _idle_or_new(self, confined: bool) -> Process:
    for place, worker in reversed(list(enumerate(self._idle))):
      if worker.confined == confined:
        return self._idle.pop(place)
    return self._start(confined)

  def _start(self, confined: bool) -> Process:
    return Process(
      self._limits,
      self._time_limit_secs,
      self._start_limit_secs,
      confined,
      self._wall_limit_secs,
    )


class Stream:
  """Calls for workers, of which more may come; see `Workers.stream`.

  One thread adds calls, and another makes them.

  Attributes:
    calls: All that were added.
    requests: Each call as a worker reads it; empty once it is made.
    confined: For each call, whether its function is marked by `confined`.
    waiting: The numbers of the calls that nobody has begun.
    pipe: What is written to it wakes the thread that makes calls.
    made: All outcomes, once they are there.
  """

  made: futures.Future[list[list[Outcome]]]

  def __init__(self):
    self.calls: list[Call] = []
    self.requests: list[bytes] = []
    self.confined: list[bool] = []
    self.waiting: collections.deque[int] = collections.deque()
    self.pipe, self._wake = os.pipe()
    for end in (self.pipe, self._wake):
      os.set_blocking(end, False)
    self._sent: dict[int, tuple[str | bytes, bool]] = {}
    self._is_ended = self._is_left = False

  def add(self, call: Call) -> int:
    """Adds a call.

    Returns:
      Its number, from 0 on.

    Raises:
      ValueError: The function or an argument cannot be sent to another process.
      SandboxError: The system cannot confine what must be confined.
    """
    key = id(call.function)  # `calls` keeps the function alive
    if key in self._sent:
      sent, confined = self._sent[key]
    else:
      sent, confined = _portable(call.function), _is_confined(call.function)
    try:
      arguments = pickle.dumps((call.arguments, dict(call.kwargs)))
    except Exception as error:
      raise ValueError(
        f'An example cannot be sent to a worker process'
        f' ({plain_text.said(error)}); keep plain'
        ' values in it, or judge in the process of the trainer.'
      ) from error
    self._sent[key] = sent, confined
    self.confined.append(confined)
    self.requests.append(pickle.dumps((sent, arguments, call.batched)))
    self.calls.append(call)
    self.waiting.append(len(self.calls) - 1)
    self._tell()
    return len(self.calls) - 1

  def end(self) -> None:
    """No more calls will come."""
    self._is_ended = True
    self._tell()

  def wait(
    self, check: Callable[[], None] = lambda: None
  ) -> list[list[Outcome]]:
    """Waits for all calls; see `Workers.run` for what it returns and raises.

    Args:
      check: Called several times a second; what it raises ends the waiting.
    """
    self.end()
    while not futures.wait([self.made], _ROUND_SECS).done:
      check()
    return self.made.result()

  def leave(self) -> None:
    """Nobody waits any more: what is under way is ended."""
    self._is_left = True
    self.end()

  def goes_on(self) -> bool:
    """Whether calls are still to be made.

    Raises:
      InterruptedError: Nobody waits for them.
    """
    if self._is_left:
      raise InterruptedError('Nobody waits for these calls any more.')
    # In this order: another thread may add the last call in between.
    is_ended = self._is_ended
    return bool(self.waiting) or not is_ended

  def woken(self) -> None:
    """Empties the pipe."""
    with contextlib.suppress(BlockingIOError):
      os.read(self.pipe, 1 << 16)

  def close(self) -> None:
    """Closes the pipe."""
    os.close(self.pipe)
    os.close(self._wake)

  def _tell(self) -> None:
    with contextlib.suppress(BlockingIOError):  # full: it is told already
      os.write(self._wake, b'x')


def _is_confined(function: str | Callable[..., Any]) -> bool:
  """Whether a function is marked by `rewards.confined`.

  Raises:
    SandboxError: It is, and the system cannot confine it.
  """
  named = function
  if isinstance(function, str):
    with contextlib.suppress(ValueError):  # which the worker will say
      named = resolve(function)
  if _base.mark_of(named, _base.CONFINED) is None:
    return False
  if reason := sandbox.refusal('landlock'):
    raise sandbox.SandboxError(
      'A reward that needs confined workers cannot be called, because this'
      f' system does not offer Landlock ({reason}); use a Linux kernel of 5.13'
      ' or newer that has it switched on.'
    )
  return True


def _portable(function: str | Callable[..., Any]) -> str | bytes:
  """A function as a worker can take it."""
  judge = 'judge in the process of the trainer'
  return piped.portable(function, 'The reward function', judge)


def _outcomes(call: Call, worker: Process) -> list[Outcome]:
  rows = len(call.arguments[0]) if call.batched else 1
  values, failure = worker.values, worker.failure
  if not failure and (not isinstance(values, list) or len(values) != rows):
    failure = 'no answer'
  if failure:
    return [Outcome(None, failure, worker.secs)] * rows
  return [
    # A text is the reason of a failure.
    Outcome(None, value, worker.secs)
    if isinstance(value, str)
    else Outcome(value, '', worker.secs)
    for value in values
  ]
