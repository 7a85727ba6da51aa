"""Starts a program under a guard (`_guard.py`), and reads how it ended."""

from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import json
import os
import pathlib
import secrets
import select
import signal
import subprocess
import sys
import time
from typing import Any
from typing import NamedTuple

from grpo_jax.rewards import _guard

_MARK = 'GRPO_JAX_GUARDED'
_PATIENCE_SECS = 0.5  # until a guard that does not answer is ended itself


class Ended(NamedTuple):
  """How a guarded program ended.

  Attributes:
    failure: '' if it ended by itself with exit code 0; otherwise a few words.
    exit_code: Its exit code; None if something else has ended it.
  """

  failure: str
  exit_code: int | None


class Guarded:
  """A program that ends with all its processes when it is told to.

  It is started by vfork and exec, so a process whose other threads run JAX may
  start one.

  Args:
    argv: The program and its arguments.
    memory_bytes: The most address space of each process, and the most memory of
      all of them.
    processes: The most processes at a time.
    file_bytes: The longest file that it may write.
    pid_namespace: Whether it runs in a PID namespace, where the system offers
      one: then it cannot see or signal any process of others.
    env: Its environment; None for that of this process.
    guard_env: The environment of the guard, which the program gets if `env` is
      None.
    fds: File descriptors that it inherits.
    streams: `stdin`, `stdout` and `stderr` for `subprocess.Popen`.
    more: Further items of the order for the guard.
  """

  def __init__(
    self,
    argv: Sequence[str],
    *,
    memory_bytes: int,
    processes: int,
    file_bytes: int,
    pid_namespace: bool = True,
    env: Mapping[str, str] | None = None,
    guard_env: Mapping[str, str] | None = None,
    fds: Sequence[int] = (),
    streams: Mapping[str, Any] | None = None,
    more: Mapping[str, Any] | None = None,
  ):
    self._mark = secrets.token_hex(16)
    order = {
      'argv': list(argv),
      'memory_bytes': memory_bytes,
      'processes': processes,
      'file_bytes': file_bytes,
      'pid_namespace': pid_namespace,
      'env': None if env is None else {**env, _MARK: self._mark},
      **(more or {}),
    }
    guard_env = dict(os.environ if guard_env is None else guard_env)
    control, self._control = os.pipe()
    try:
      self.status, status = os.pipe()
    except OSError:
      os.close(control)
      os.close(self._control)
      raise
    try:
      self._process = subprocess.Popen(
        [
          sys.executable,
          '-I',
          '-S',
          _guard.__file__,
          str(control),
          str(status),
        ],
        pass_fds=(control, status, *fds),
        start_new_session=True,
        env={**guard_env, _MARK: self._mark},
        **(streams or {}),
      )
    except BaseException:
      os.close(self._control)
      os.close(self.status)
      raise
    finally:
      os.close(control)
      os.close(status)
    line = json.dumps(order).encode() + b'\n'
    try:
      while line:
        line = line[os.write(self._control, line) :]
    except BrokenPipeError:  # it has ended, and `end` says how
      pass
    except BaseException:
      self.end()
      raise

  @property
  def pid(self) -> int:
    """The process of the guard, from which all others descend."""
    return self._process.pid

  def is_guarded(self) -> bool:
    """Whether the guard still runs; without it the program is ended soon."""
    return self._process.poll() is None

  def close(self) -> None:
    """Tells the guard to end all, and does not wait; `end` comes next."""
    if self._control is not None:
      os.close(self._control)
      self._control = None

  def end(self, failure: str = '') -> Ended:
    """Ends the program, if it still runs, and everything that it has started.

    Args:
      failure: What to call the end of a program that still runs.

    Returns:
      How it ended.
    """
    self.close()
    heard = select.poll()  # select(2) takes no descriptor above 1023
    heard.register(self.status, select.POLLIN)
    ready = heard.poll(1000 * _PATIENCE_SECS)
    word = os.read(self.status, 1 << 16) if ready else b''
    os.close(self.status)
    if not word:  # the program has ended or stopped its guard
      self._process.kill()
    self._process.wait()
    if not word:
      _sweep(self._mark)
      return Ended(failure or 'signal SIGKILL', None)
    said = json.loads(word)
    if said['failure'] == 'ended':
      return Ended(failure, None)
    if said['failure']:
      return Ended(said['failure'], None)
    if said['status'] is None:
      return Ended('signal SIGKILL', None)
    code = os.waitstatus_to_exitcode(said['status'])
    if code < 0:
      return Ended(f'signal {_guard.signal_name(-code)}', None)
    return Ended(f'exit {code}' if code else '', code)


def _sweep(mark: str) -> None:
  """Ends processes by their environment, for a guard that was ended itself.

  Only what starts another program with an environment of its own, outside a PID
  namespace and after it ended its guard, is not found.
  """
  proc = pathlib.Path('/proc')
  line = f'{_MARK}={mark}'.encode()
  until = time.monotonic() + _PATIENCE_SECS
  found = proc.is_dir()
  while found and time.monotonic() < until:
    found = False
    for path in proc.glob('[0-9]*/environ'):
      with contextlib.suppress(OSError):
        if line in path.read_bytes().split(b'\0'):
          os.kill(int(path.parent.name), signal.SIGKILL)
          found = True
