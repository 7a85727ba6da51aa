"""What a worker process does: it runs a stage until its pipe closes.

`places.Worker` starts it. The first request is a pickle of an `Order`; each of
the others has the name of a method of `stage.Stage`, the episode, and a pickle
of the arguments. Answers are words of `events`, as JSON.

The stage runs in the main thread, which libraries with signals need, and
another one reads the requests.
"""

from collections.abc import Mapping
import mmap
import os
import pickle
import threading
from typing import Any
from typing import NamedTuple

from grpo_jax.environments import events
from grpo_jax.environments import forms
from grpo_jax.environments import stage as stage_lib
from grpo_jax.environments import threads
from grpo_jax.rewards import piped
from grpo_jax.rewards import process_state


class Order(NamedTuple):
  """What a worker is started for.

  Attributes:
    environments: Environments and the arguments that make them, by their names.
      Each environment is a name or a pickle, see `piped.portable`.
    tool_secs: The longest that one call of a tool may take.
  """

  environments: Mapping[str, tuple[str | bytes, Mapping[str, Any]]]
  tool_secs: float


def main(requests: int, answers: int, table: int, slots: int) -> None:
  """Runs a stage.

  Args:
    requests: The end of a pipe to read from.
    answers: The end of a pipe to write to.
    table: A file of `slots` bytes, see `session.Session`.
    slots: How many episodes are played at once.
  """
  piped.adopt_orphans()
  running = mmap.mmap(table, slots)
  os.close(table)
  requests, answers = map(piped.hide, (requests, answers))
  piped.send(answers, piped.READY, b'')
  word, data = piped.receive(requests)
  order: Order = pickle.loads(data)
  say = _Answers(answers, word)
  environments = _Environments(order.environments)
  stage = stage_lib.Stage(
    environments.resolved,
    running,
    order.tool_secs,
    say,
    lambda: environments.state.restore(threads.own),
  )
  reader = threading.Thread(
    target=_read, args=(requests, stage, say), daemon=True
  )
  reader.start()
  stage.run()
  os._exit(0)


class _Environments:
  """The environments of an order; each is resolved when it is first needed.

  Attributes:
    state: Of the process, once it has imported the last one.
  """

  def __init__(
    self, ordered: Mapping[str, tuple[str | bytes, Mapping[str, Any]]]
  ):
    self._ordered = ordered
    self._made: dict[str, Any] = {}
    self.state = process_state.State()

  def resolved(self, name: str) -> Any:
    if name not in self._made:
      environment, kwargs = self._ordered[name]
      if isinstance(environment, bytes):
        environment = pickle.loads(environment)
      self._made[name] = forms.resolve(environment, kwargs)
      self.state = process_state.State()  # what an import leaves is no fault
    return self._made[name]


def _read(requests: int, stage: stage_lib.Stage, say: '_Answers') -> None:
  while True:
    _, data = piped.receive(requests)
    name, episode, data = pickle.loads(data)
    try:
      arguments = pickle.loads(data)
    except BaseException as error:  # a class that cannot be imported here
      reason = f'an example cannot be read in a worker: {events.reason(error)}'
      say([events.Failed(episode, reason)])
      continue
    stage.tell(name, *arguments)


class _Answers:
  """Writes words to the pipe of answers."""

  def __init__(self, answers: int, word: bytes):
    self._answers, self._word = answers, word
    self._lock = threading.Lock()
    self._process, self._file = os.getpid(), os.fstat(answers).st_ino

  def __call__(self, words: list[events.Word]) -> None:
    if os.getpid() != self._process:  # an environment has forked
      os._exit(0)
    data = events.encode(words)
    with self._lock:
      try:
        is_there = os.fstat(self._answers).st_ino == self._file
      except OSError:
        is_there = False
      if not is_there:  # an environment has closed all files
        os._exit(1)
      piped.send(self._answers, self._word, data)
