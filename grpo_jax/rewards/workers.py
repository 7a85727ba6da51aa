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
call in a confined process; see `_apart.py`.
"""

from collections.abc import Callable
from collections.abc import Sequence
import fcntl
import json
import os
import pickle
import secrets
import selectors
import sys
import time
from typing import Any
from typing import NamedTuple

from grpo_jax.rewards import _launch
from grpo_jax.rewards import _marks
from grpo_jax.rewards import _worker
from grpo_jax.rewards import sandbox
from grpo_jax.rewards._base import BATCHED_MARK
from grpo_jax.rewards._base import resolve

_F_SETPIPE_SZ = 1031
_GRACE_SECS = 0.5


class Outcome(NamedTuple):
  """What came of judging one completion.

  Attributes:
    reward: What the judge returned: a number, or None for 'not judged'. None
      too if the judge failed.
    failure: '' if the judge returned; otherwise why not: 'time limit',
      'memory', 'processes', 'exit 1', 'signal SIGSEGV', 'raised ValueError:
      ...', 'returned nan, ...' or 'start limit' (importing it took too long).
    secs: How long the judge took.
  """

  reward: float | None
  failure: str
  secs: float


class Call(NamedTuple):
  """One call of a judge.

  Attributes:
    function: A name for `rewards.resolve`, or a function. One that no worker
      can import, such as a lambda, is sent by cloudpickle.
    arguments: Prompt, completion and example; or three lists, if batched.
    batched: Whether the function takes lists; see `rewards.batched`.
  """

  function: str | Callable[..., Any]
  arguments: tuple[Any, Any, Any]
  batched: bool = False


class Workers:
  """A pool of processes that judge.

  >>> with Workers(1) as workers:
  ...   (outcome,) = workers.judge(
  ...     'exact_match', ['1+1='], ['2'], [{'answer': '2'}]
  ...   )
  >>> outcome.reward
  1.0

  One thread at a time may use it. Workers start when they are first needed.

  Args:
    number: How many processes judge at the same time.
    time_limit_secs: The longest that one call of a judge may take.
    memory_limit_bytes: The most memory of a worker and all processes that its
      judge has started, Python itself included. For each process it is a limit
      of address space, of which some libraries take much more than they use.
    start_limit_secs: The longest that starting a worker and importing the judge
      may take.
    processes: The most processes of one worker at a time.
    pid_namespace: Whether workers run in PID namespaces where the system offers
      them.

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
  ):
    for name, value in (
      ('number', number),
      ('time_limit_secs', time_limit_secs),
      ('memory_limit_bytes', memory_limit_bytes),
      ('start_limit_secs', start_limit_secs),
      ('processes', processes),
    ):
      if not value > 0:
        raise ValueError(
          f'{name} of the workers is {value}, but a positive number is'
          ' required; pass one.'
        )
    self._number = number
    self._time_limit_secs = time_limit_secs
    self._start_limit_secs = start_limit_secs
    self._limits: dict[str, Any] = {
      'memory_bytes': memory_limit_bytes,
      'processes': processes,
      'file_bytes': 1 << 30,
      'pid_namespace': pid_namespace,
    }
    self._idle: list[_Worker] = []

  def __enter__(self) -> 'Workers':
    return self

  def __exit__(self, *_: Any) -> None:
    self.close()

  def close(self) -> None:
    """Ends all workers. The pool may be used again, with new ones."""
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
    if getattr(named, BATCHED_MARK, False) and rows:
      lists = list(prompts), list(completions), list(examples)
      return self.run([Call(function, lists, batched=True)])[0]
    calls = [Call(function, row) for row in rows]
    return [outcomes[0] for outcomes in self.run(calls)]

  def run(self, calls: Sequence[Call]) -> list[list[Outcome]]:
    """Makes all calls, as many at a time as there are workers.

    Args:
      calls: In any order of functions; workers keep what they have imported.

    Returns:
      For each call, one outcome per completion.

    Raises:
      ValueError: A function or an argument cannot be sent to another process.
      RuntimeError: A worker cannot start at all, or the system cannot confine
        what must be confined (`sandbox.SandboxError`).
    """
    requests = _requests(calls)
    confined = _confined(calls)
    waiting = list(reversed(range(len(calls))))
    outcomes: list[Any] = [None] * len(calls)
    busy: dict[_Worker, int] = {}
    with selectors.DefaultSelector() as selector:
      try:
        while waiting or busy:
          while waiting and len(busy) < self._number:
            index = waiting.pop()
            worker = self._idle_one(confined[index])
            worker.begin(requests[index], selector)
            busy[worker] = index
          until = min(worker.deadline for worker in busy) - time.monotonic()
          for key, _ in selector.select(max(0.0, until)):
            key.data()
          for worker in [worker for worker in busy if worker.is_finished()]:
            index = busy.pop(worker)
            worker.unregister(selector)
            worker.check_started()
            if worker.was_lost:
              waiting.append(index)
              continue
            outcomes[index] = _outcomes(calls[index], worker)
            if worker.may_go_on:
              self._idle.append(worker)
      finally:  # after an interrupt, what still judges
        for worker in busy:
          worker.end()
    return outcomes

  def _idle_one(self, confined: bool) -> '_Worker':
    for place, worker in reversed(list(enumerate(self._idle))):
      if worker.confined == confined:
        return self._idle.pop(place)
    return _Worker(
      self._limits, self._time_limit_secs, self._start_limit_secs, confined
    )


def _confined(calls: Sequence[Call]) -> list[bool]:
  """For each call, whether its function is marked by `rewards.confined`."""
  marked = {}
  for call in calls:
    function = call.function
    if id(function) not in marked:
      if isinstance(function, str):
        try:
          function = resolve(function)
        except ValueError:  # which the worker will say
          pass
      marked[id(call.function)] = _marks.prepare_of(function) is not None
  if any(marked.values()) and (reason := sandbox.refusal('landlock')):
    raise sandbox.SandboxError(
      'A reward that needs confined workers cannot be called, because this'
      f' system does not offer Landlock ({reason}); use a Linux kernel of 5.13'
      ' or newer that has it switched on.'
    )
  return [marked[id(call.function)] for call in calls]


def _requests(calls: Sequence[Call]) -> list[bytes]:
  functions = {id(call.function): call.function for call in calls}
  sent = {key: _sent(function) for key, function in functions.items()}
  requests = []
  for call in calls:
    try:
      arguments = pickle.dumps(call.arguments)
    except Exception as error:
      raise ValueError(
        f'An example cannot be sent to a worker process ({error}); keep plain'
        ' values in it, or judge in the process of the trainer.'
      ) from error
    request = (sent[id(call.function)], arguments, call.batched)
    requests.append(pickle.dumps(request))
  return requests


def _sent(function: str | Callable[..., Any]) -> str | bytes:
  """A function as a worker can take it."""
  if isinstance(function, str):
    return function
  module, name = (
    getattr(function, key, None) for key in ('__module__', '__qualname__')
  )
  # Of a module that a worker can import, the name is enough. `__main__` of a
  # worker is another one.
  if module in sys.modules and module != '__main__':
    if getattr(sys.modules[module], str(name), None) is function:
      return f'{module}:{name}'
  try:
    import cloudpickle
  except ImportError as error:
    raise ValueError(
      f'The reward function {function!r} is given as an object, and workers'
      ' need cloudpickle to take it; pip install cloudpickle, or name the'
      " function as 'module:function'."
    ) from error
  try:
    return cloudpickle.dumps(function)
  except Exception as error:
    raise ValueError(
      f'The reward function {function!r} cannot be sent to a worker process'
      f' ({error}); write it at the top of a module, or judge in the process of'
      ' the trainer.'
    ) from error


def _outcomes(call: Call, worker: '_Worker') -> list[Outcome]:
  rows = len(call.arguments[0]) if call.batched else 1
  values, failure = worker.values, worker.failure
  if not failure and (not isinstance(values, list) or len(values) != rows):
    failure = 'no answer'
  return [
    Outcome(None if failure else values[row], failure, worker.secs)
    for row in range(rows)
  ]


class _Worker:
  """One process, and the call that it makes."""

  def __init__(
    self,
    limits: dict[str, Any],
    time_limit_secs: float,
    start_limit_secs: float,
    confined: bool = False,
  ):
    self.confined = confined
    self._limit_secs = time_limit_secs
    self._start_limit_secs = start_limit_secs
    request_out, self._requests = os.pipe()
    self._answers, answer_in = os.pipe()
    # The worker's sys.path is ours, so that it finds the same modules.
    path = [item or os.getcwd() for item in sys.path]
    apart, env = None, None
    if confined:
      packages = [one for one in path if one.endswith('-packages')]
      readable = sandbox.readable(packages)
      apart = {'limit_secs': time_limit_secs, 'readable': readable}
      env = {key: os.environ[key] for key in _HARMLESS if key in os.environ}
      env.update(_ENVIRONMENT)
      self._limit_secs += _GRACE_SECS  # the worker ends the call before that
    program = (
      f'import sys; sys.path[:] = {path!r}; from grpo_jax.rewards import'
      f' _worker; _worker.main({request_out}, {answer_in}, {apart!r})'
    )
    null = os.open(os.devnull, os.O_RDWR)
    try:
      self._guarded = _launch.Guarded(
        [sys.executable, '-c', program],
        fds=(request_out, answer_in),
        streams=dict(stdin=null, stdout=null, stderr=null),
        env=env,
        guard_env={**os.environ, **_ENVIRONMENT} if env is None else env,
        **limits,
      )
    finally:
      for end in (request_out, answer_in, null):
        os.close(end)
    for end in (self._requests, self._answers):
      os.set_blocking(end, False)
    if sys.platform == 'linux':
      fcntl.fcntl(self._requests, _F_SETPIPE_SZ, 1 << 20)
    self._ended = self._died = False
    self._served = 0
    self._ready = False
    self.may_go_on = True

  def begin(self, request: bytes, selector: selectors.BaseSelector) -> None:
    """Sends a request; the time of the judge starts with the first answer."""
    self._nonce = secrets.token_bytes(16)
    self._unsent = memoryview(
      _worker.HEADER.pack(self._nonce, len(request)) + request
    )
    self._read = b''
    self._called_at: float | None = None
    self.values: Any = None
    self.failure = ''
    self.secs = 0.0
    self._finished = False
    self.deadline = time.monotonic() + self._start_limit_secs
    self._selector = selector
    selector.register(self._requests, selectors.EVENT_WRITE, self._write)
    selector.register(self._answers, selectors.EVENT_READ, self._answer)
    selector.register(self._guarded.status, selectors.EVENT_READ, self._gone)

  def is_finished(self) -> bool:
    """Whether there is an outcome; ends a worker that is late."""
    if not self._finished and time.monotonic() >= self.deadline:
      self._answer()  # it may have come in time, and waited for this thread
      if not self._finished:
        late = 'start limit' if self._called_at is None else 'time limit'
        self._finish(late, retire=True)
    return self._finished

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
      raise RuntimeError(
        f'A worker process for rewards has not started ({self.failure});'
        f' see whether {sys.executable} can import grpo_jax.rewards.'
      )

  @property
  def was_lost(self) -> bool:
    """Whether it ended between two calls, so that the judge has not begun."""
    return self._died and self._called_at is None and self._served > 1

  def end(self) -> _launch.Ended:
    """Ends the process and all that it has started."""
    if self._ended:
      return self._how
    self._ended, self.may_go_on = True, False
    os.close(self._requests)
    os.close(self._answers)
    self._how = self._guarded.end()
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
    header = _worker.HEADER
    while len(self._read) >= header.size and not self._finished:
      nonce, size = header.unpack(self._read[: header.size])
      expected = self._nonce if self._ready else _worker.READY
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
        self.deadline = self._called_at + self._limit_secs
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
_ENVIRONMENT = {
  'JAX_PLATFORMS': 'cpu',
  # Threads of these reserve address space, which is limited, and the workers
  # share the cores anyway.
  'OPENBLAS_NUM_THREADS': '1',
  'OMP_NUM_THREADS': '1',
  'MKL_NUM_THREADS': '1',
}
