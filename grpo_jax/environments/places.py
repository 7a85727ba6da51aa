"""Where a stage runs: in a thread of this process, or in a worker process."""

from collections.abc import Mapping
import contextlib
import mmap
import os
import pickle
import secrets
import select
import selectors
import tempfile
import threading
from typing import Any
from typing import NamedTuple
from typing import Protocol

from grpo_jax.config import plain_text
from grpo_jax.environments import events
from grpo_jax.environments import stage as stage_lib
from grpo_jax.environments import worker
from grpo_jax.rewards import piped

_JOIN_SECS = 2.0  # until a thread that does not end is left alone
_MOST_BYTES = 1 << 30  # of a message


class Gone(NamedTuple):
  """A place has ended by itself; nothing more will be heard of it."""

  reason: str


class Place(Protocol):
  """A stage, and what is heard of it.

  Attributes:
    file: Can be read from when there is something to hear.
    slots: How many episodes it plays at once.
    is_process: Whether ending it ends whatever runs in it.
    is_ready: Whether its first message has come; before, a process may still
      fail to start.
  """

  file: int
  slots: int
  is_process: bool
  is_ready: bool

  def tell(self, name: str, *arguments: Any) -> None:
    """Calls a method of the stage; never waits."""
    ...

  def hear(self) -> list[events.Word | Gone]:
    """What it has said so far; never waits."""
    ...

  def runs(self, slot: int) -> bool:
    """Whether code of the episode in a slot runs just now."""
    ...

  def close(self) -> None:
    """Tells it to end; `end` comes next."""
    ...

  def end(self) -> str:
    """Ends it, and says how a process ended."""
    ...


class Here:
  """A stage in a thread of this process.

  Args:
    environments: The environments by their names, resolved.
    slots: How many episodes it plays at once.
    tool_secs: The longest that one call of a tool may take.
  """

  is_process = False
  is_ready = True

  def __init__(
    self, environments: Mapping[str, Any], slots: int, tool_secs: float
  ):
    self.slots = slots
    self._running = bytearray(slots)
    self._said: list[events.Word] = []
    self._lock = threading.Lock()
    self.file, self._wake = os.pipe()
    for end in (self.file, self._wake):
      os.set_blocking(end, False)
    self._stage = stage_lib.Stage(
      environments.__getitem__, self._running, tool_secs, self._say
    )
    self._thread = threading.Thread(
      target=self._stage.run, name='environments', daemon=True
    )
    self._thread.start()

  def tell(self, name: str, *arguments: Any) -> None:
    """See `Place`."""
    self._stage.tell(name, *arguments)

  def hear(self) -> list[events.Word | Gone]:
    """See `Place`."""
    with self._lock:
      with contextlib.suppress(BlockingIOError):
        os.read(self.file, 1 << 16)
      said, self._said = self._said, []
    return [*said]

  def runs(self, slot: int) -> bool:
    """See `Place`."""
    return bool(self._running[slot])

  def close(self) -> None:
    """See `Place`."""
    self._stage.tell('close')

  def end(self) -> str:
    """Ends the thread; one that hangs is left alone, and is heard no more."""
    self.close()
    self._thread.join(_JOIN_SECS)
    with self._lock:
      os.close(self.file)
      os.close(self._wake)
      self._wake = -1
    return ''

  def _say(self, words: list[events.Word]) -> None:
    with self._lock:
      if self._wake == -1:
        return
      self._said += words
      with contextlib.suppress(BlockingIOError):  # full: it is told already
        os.write(self._wake, b'x')


class Worker:
  """A stage in a process of its own; see `worker`.

  Args:
    order: What the worker begins with: a pickle of `worker.Order`.
    slots: How many episodes it plays at once.
    limits: See `rewards.piped.start`.
    selector: Where it registers what it waits for.
  """

  is_process = True

  def __init__(
    self,
    order: bytes,
    slots: int,
    limits: Mapping[str, Any],
    selector: selectors.BaseSelector,
  ):
    self.slots, self.is_ready = slots, False
    self._selector, self._is_ended, self._how = selector, False, ''
    self._word = secrets.token_bytes(16)
    self._unsent, self._read = bytearray(), bytearray()
    with tempfile.TemporaryFile() as table:
      table.truncate(slots)
      self._running = mmap.mmap(table.fileno(), slots)
      try:
        self._piped = piped.start(
          worker.__name__,
          [table.fileno(), slots],
          limits,
          fds=[table.fileno()],
        )
      except BaseException:
        self._running.close()
        raise
    self.file = self._piped.answers
    selector.register(self._piped.guarded.status, selectors.EVENT_READ, self)
    self._send(order)

  def tell(self, name: str, *arguments: Any) -> None:
    """See `Place`.

    Raises:
      ValueError: An argument cannot be sent.
    """
    try:
      data = pickle.dumps(arguments)
    except Exception as error:
      raise ValueError(
        'cannot be sent to a worker process'
        f' ({plain_text.named(error)}); keep plain values in it'
      ) from error
    first = arguments[0] if arguments else None
    episode = getattr(first, 'episode', first)
    self._send(pickle.dumps((name, episode, data)))

  def hear(self) -> list[events.Word | Gone]:
    """See `Place`."""
    self._write()
    ended = select.poll()
    ended.register(self._piped.guarded.status, select.POLLIN)
    is_gone = bool(ended.poll(0))  # before its last words are read
    is_closed = False
    with contextlib.suppress(BlockingIOError):
      while not is_closed:
        data = os.read(self.file, 1 << 20)
        is_closed = not data
        self._read += data
        if not is_gone:
          break
    try:
      heard: list[events.Word | Gone] = [*self._messages()]
    except ValueError:
      return [Gone('it wrote to the pipe of answers')]
    if is_gone:
      heard.append(Gone(self.end() or 'exit 0'))
    elif is_closed:
      heard.append(Gone('it closed the pipe of answers'))
    return heard

  def runs(self, slot: int) -> bool:
    """See `Place`."""
    return bool(self._last[slot] if self._is_ended else self._running[slot])

  def close(self) -> None:
    """See `Place`."""
    if not self._is_ended:
      self._piped.guarded.close()

  def end(self) -> str:
    """See `Place`."""
    if not self._is_ended:
      self._is_ended = True
      for one in (
        self._piped.requests,
        self._piped.answers,
        self._piped.guarded.status,
      ):
        if one in self._selector.get_map():
          self._selector.unregister(one)
      self._how = self._piped.end().failure
      self._last = bytes(self._running)
      self._running.close()
    return self._how

  def _send(self, data: bytes) -> None:
    if self._is_ended:
      return
    self._unsent += piped.HEADER.pack(self._word, len(data)) + data
    self._write()

  def _write(self) -> None:
    requests = self._piped.requests
    try:
      while self._unsent:
        del self._unsent[: os.write(requests, self._unsent[: 1 << 20])]
    except BlockingIOError:
      if requests not in self._selector.get_map():
        self._selector.register(requests, selectors.EVENT_WRITE, self)
      return
    except BrokenPipeError:  # `hear` will say why
      self._unsent.clear()
    if requests in self._selector.get_map():
      self._selector.unregister(requests)

  def _messages(self) -> list[events.Word]:
    """Takes whole messages from what was read.

    Raises:
      ValueError: Something else was written to the pipe.
    """
    heard: list[events.Word] = []
    header = piped.HEADER
    while len(self._read) >= header.size:
      word, size = header.unpack_from(self._read)
      expected = self._word if self.is_ready else piped.READY
      if word != expected or size > _MOST_BYTES:
        raise ValueError('wrote to the pipe of answers')
      if len(self._read) < header.size + size:
        break
      data = bytes(self._read[header.size : header.size + size])
      del self._read[: header.size + size]
      if self.is_ready:
        heard += events.decode(data)
      self.is_ready = True
    return heard
