"""Calls of a judge in processes of their own, confined; used by `_worker.py`.

A worker imports a judge once, and forks for each call. The child is confined
(see `_confine.py`) before it sees the completion, and ends with the call. So
whatever it does, the next call finds the worker as it was, and a call that has
to be ended costs no new import.

The answer begins with a word that is drawn for the call, so that nobody answers
who only writes to the pipe. Code that the judge evaluates runs in the same
process, and can find the word there if it looks for it.

A worker has one thread and does not run JAX, so it may fork.
"""

from collections.abc import Callable
import gc
import json
import os
import resource
import secrets
import select
import signal
import sys
import time
from typing import Any

from grpo_jax.config import plain_text
from grpo_jax.rewards import _guard
from grpo_jax.rewards import _marks

_FIRST_FD = 3
_MOST_FDS = 4096
_LOOK_SECS = 0.1  # between two looks at the processor time
_MOST_BYTES = 1 << 26  # of an answer


class Apart:
  """Makes calls in processes of their own.

  Args:
    limit_secs: The most processor time of a call.
    wall_limit_secs: The longest that it may take by the clock.
    readable: The paths that it may read.
  """

  def __init__(
    self, limit_secs: float, wall_limit_secs: float, readable: list[str]
  ):
    # As in the script of the guard, where `_confine` finds it under this name.
    sys.modules.setdefault('_guard', _guard)
    from grpo_jax.rewards import _confine

    self._limit_secs = limit_secs
    self._wall_limit_secs = wall_limit_secs
    _confine.give_up_privileges()
    self._confinement = _confine.Confinement(readable)

  def call(self, function: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a function returns in a child: 'values', or a 'failure'."""
    out, into = os.pipe()
    word = secrets.token_hex(16).encode()
    gc.freeze()  # so that the child does not copy what lives here
    child = os.fork()
    if child == 0:
      self._judge(function, into, word)
    os.close(into)
    try:
      data, failure = self._read(out, child)
    finally:
      os.close(out)
      os.kill(child, signal.SIGKILL)
      _, status = os.waitpid(child, 0)
    if failure:
      return {'failure': failure}
    if data and not data.startswith(word):
      return {'failure': 'wrote to the pipe of answers'}
    try:
      answer = json.loads(data.removeprefix(word))
      if 'failure' in answer:
        return {'failure': str(answer['failure'])[:300]}
      return {'values': list(answer['values'])}
    except (ValueError, TypeError, KeyError, RecursionError):
      if data:
        return {'failure': 'wrote to the pipe of answers'}
      return {'failure': _ending(status)}

  def _judge(
    self, function: Callable[[], dict[str, Any]], into: int, word: bytes
  ) -> None:
    """The child: it never returns."""
    try:
      os.chdir('/')
      secs = int(self._limit_secs) + 1
      resource.setrlimit(resource.RLIMIT_CPU, (secs, secs))
      self._confinement.enter()
      os.dup2(into, _FIRST_FD)  # it may be that of the confinement until here
      into = _FIRST_FD
      os.closerange(_FIRST_FD + 1, _MOST_FDS)
      _marks.is_confined = True
      answer = function()
    except BaseException as error:
      answer = {'failure': f'refused: {plain_text.named(error)}'[:300]}
    try:
      data = word + json.dumps(answer).encode() + b'\n'
      while data:
        data = data[os.write(into, data) :]
    finally:
      os._exit(0)

  def _read(self, out: int, child: int) -> tuple[bytes, str]:
    """The line that a child writes, or why there is none."""
    until = time.monotonic() + self._wall_limit_secs
    poll, data = select.poll(), b''
    poll.register(out, select.POLLIN)
    while not data.endswith(b'\n'):
      used = _cpu_secs(child)
      if used is None:  # the clock then counts
        used = self._wall_limit_secs - (until - time.monotonic())
      left = min(until - time.monotonic(), self._limit_secs - used)
      if left <= 0:
        return b'', 'time limit'
      if not poll.poll(1000 * min(left, _LOOK_SECS)):
        continue
      read = os.read(out, 1 << 16)
      if not read:
        break
      data += read
      if len(data) > _MOST_BYTES:
        return b'', 'wrote to the pipe of answers'
    return data, ''


def _cpu_secs(child: int) -> float | None:
  """The processor time of a child and all below it; None where it is unknown.

  A process that is new counts from its fork.
  """
  try:
    # The clock of another process; see clock_getcpuclockid(3).
    own = time.clock_gettime(~child << 3 | 2)
  except OSError:
    return None
  return own + (_guard.cpu_secs(child) or 0.0)


def _ending(status: int) -> str:
  """How a child ended that has given no answer."""
  code = os.waitstatus_to_exitcode(status)
  if code >= 0:
    return f'exit {code}'
  if code == -signal.SIGXCPU:  # by the kernel, before this process looked
    return 'time limit'
  try:
    return f'signal {signal.Signals(-code).name}'
  except ValueError:  # a real-time signal
    return f'signal {-code}'
