"""One worker process, as the pool sees it, and the call that it makes."""

from collections.abc import Sequence
import contextlib
import fcntl
import json
import math
import os
import secrets
import selectors
import sys
import time
from typing import Any

from grpo_jax.rewards import _guard
from grpo_jax.rewards import _launch
from grpo_jax.rewards import _worker
from grpo_jax.rewards import sandbox

WALL_TIMES = 10  # by default the clock may show so much of the time limit
_F_SETPIPE_SZ = 1031
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
    # The worker's sys.path is ours, so that it finds the same modules.
    path = [item or os.getcwd() for item in sys.path]
    apart, env = None, None
    if confined:
      packages = [one for one in path if one.endswith('-packages')]
      readable = sandbox.readable(packages)
      apart = {
        'limit_secs': time_limit_secs,
        'wall_limit_secs': wall_limit_secs,
        'readable': readable,
      }
      env = {key: os.environ[key] for key in _HARMLESS if key in os.environ}
      env.update(_ENVIRONMENT)
      self._limit_secs += _GRACE_SECS
      self._wall_limit_secs += _GRACE_SECS
    with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
      request_out, self._requests = os.pipe()
      theirs.callback(os.close, request_out)
      ours.callback(os.close, self._requests)
      self._answers, answer_in = os.pipe()
      theirs.callback(os.close, answer_in)
      ours.callback(os.close, self._answers)
      null = os.open(os.devnull, os.O_RDWR)
      theirs.callback(os.close, null)
      program = (
        f'import sys; sys.path[:] = {path!r}; from grpo_jax.rewards import'
        f' _worker; _worker.main({request_out}, {answer_in}, {apart!r})'
      )
      self._guarded = _launch.Guarded(
        [sys.executable, '-c', program],
        fds=(request_out, answer_in),
        streams=dict(stdin=null, stdout=null, stderr=null),
        env=env,
        guard_env={**os.environ, **_ENVIRONMENT} if env is None else env,
        **limits,
      )
      ours.callback(self._guarded.end)
      for end in (self._requests, self._answers):
        os.set_blocking(end, False)
      if sys.platform == 'linux':
        # Long texts go faster through a long pipe. A user whose pipes hold
        # much already is refused: generated code may have made them.
        with contextlib.suppress(OSError):
          fcntl.fcntl(self._requests, _F_SETPIPE_SZ, 1 << 20)
      ours.pop_all()  # nothing has failed: all stays as it is
    self._ended = self._died = False
    self._served = 0
    self._ready = False
    self.may_go_on = True

  def load(self, requests: Sequence[bytes]) -> None:
    """Tells a new worker to import functions, without an answer."""
    message = b''.join(
      _worker.HEADER.pack(_worker.READY, len(request)) + request
      for request in requests
    )
    if len(message) <= _AT_ONCE:
      with contextlib.suppress(BrokenPipeError):
        os.write(self._requests, message)

  def begin(self, request: bytes, selector: selectors.BaseSelector) -> None:
    """Sends a request; the time of the judge starts with the first answer."""
    self._nonce = secrets.token_bytes(16)
    self._unsent = memoryview(
      _worker.HEADER.pack(self._nonce, len(request)) + request
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
_ENVIRONMENT = {
  'JAX_PLATFORMS': 'cpu',
  # Threads of these reserve address space, which is limited, and the workers
  # share the cores anyway.
  'OPENBLAS_NUM_THREADS': '1',
  'OMP_NUM_THREADS': '1',
  'MKL_NUM_THREADS': '1',
}
