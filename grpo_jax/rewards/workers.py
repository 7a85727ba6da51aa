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
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from concurrent import futures
import contextlib
import os
import pickle
import selectors
import sys
import time
from typing import Any
from typing import NamedTuple

from grpo_jax.rewards import _marks
from grpo_jax.rewards import sandbox
from grpo_jax.rewards._base import resolve
from grpo_jax.rewards._base import takes_lists
from grpo_jax.rewards._process import Process


def own_cores() -> int:
  """How many cores this process may use."""
  if hasattr(os, 'sched_getaffinity'):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


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
    marks = _confined(functions)
    for confined in sorted(set(marks)) or [False]:
      loads = [
        pickle.dumps((_sent(function), None, False))
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
  def running(
    self, calls: Sequence[Call]
  ) -> Iterator[Callable[[], list[list[Outcome]]]]:
    """Makes calls as `run` does, in a thread, while the body does other work.

    If the body raises, the calls are ended.

    Args:
      calls: See `run`.

    Yields:
      A function that waits for the calls, and returns and raises what `run`
      does.
    """
    left, leave = os.pipe()
    try:
      with futures.ThreadPoolExecutor(1, 'judging') as thread:
        try:
          yield thread.submit(self.run, calls, left).result
        finally:
          os.close(leave)
    finally:
      os.close(left)

  def run(
    self, calls: Sequence[Call], left: int | None = None
  ) -> list[list[Outcome]]:
    """Makes all calls, as many at a time as there are workers.

    Args:
      calls: In any order of functions; workers keep what they have imported.
      left: A pipe, whose closing ends the calls.

    Returns:
      For each call, one outcome per completion.

    Raises:
      ValueError: A function or an argument cannot be sent to another process,
        or a worker cannot start at all.
      InterruptedError: The pipe was closed.
      SandboxError: The system cannot confine what must be confined.
    """
    requests = _requests(calls)
    confined = _confined([call.function for call in calls])
    waiting = list(reversed(range(len(calls))))
    outcomes: list[Any] = [None] * len(calls)
    busy: dict[Process, int] = {}
    with selectors.DefaultSelector() as selector:
      try:
        if left is not None:
          selector.register(left, selectors.EVENT_READ, _interrupt)
        while waiting or busy:
          while waiting and len(busy) < self._number:
            index = waiting.pop()
            worker = self._idle_or_new(confined[index])
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
          worker.close()
        for worker in busy:
          worker.end()
    return outcomes

  def _idle_or_new(self, confined: bool) -> Process:
    for place, worker in reversed(list(enumerate(self._idle))):
      if worker.confined == confined:
        return self._idle.pop(place)
    return self._start(confined)

  def _start(self, confined: bool) -> Process:
    return Process(
      self._limits, self._time_limit_secs, self._start_limit_secs, confined
    )


def _interrupt() -> None:
  raise InterruptedError('Nobody waits for these calls any more.')


def _confined(functions: Sequence[str | Callable[..., Any]]) -> list[bool]:
  """For each function, whether it is marked by `rewards.confined`."""
  marked = {}
  for function in functions:
    if id(function) not in marked:
      named = function
      if isinstance(function, str):
        with contextlib.suppress(ValueError):  # which the worker will say
          named = resolve(function)
      marked[id(function)] = _marks.prepare_of(named) is not None
  if any(marked.values()) and (reason := sandbox.refusal('landlock')):
    raise sandbox.SandboxError(
      'A reward that needs confined workers cannot be called, because this'
      f' system does not offer Landlock ({reason}); use a Linux kernel of 5.13'
      ' or newer that has it switched on.'
    )
  return [marked[id(function)] for function in functions]


def _requests(calls: Sequence[Call]) -> list[bytes]:
  functions = {id(call.function): call.function for call in calls}
  sent = {key: _sent(function) for key, function in functions.items()}
  requests = []
  for call in calls:
    try:
      arguments = pickle.dumps((call.arguments, dict(call.kwargs)))
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


def _outcomes(call: Call, worker: Process) -> list[Outcome]:
  rows = len(call.arguments[0]) if call.batched else 1
  values, failure = worker.values, worker.failure
  if not failure and (not isinstance(values, list) or len(values) != rows):
    failure = 'no answer'
  return [
    Outcome(None if failure else values[row], failure, worker.secs)
    for row in range(rows)
  ]
