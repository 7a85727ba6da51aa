"""A Python process with limits, a pipe of requests and a pipe of answers.

What a worker that judges and a worker that plays episodes have in common: they
are new processes and no forks, they import what their parent could import, what
they print goes nowhere, and they end with all that they have started (see
`_guard.py`). On both pipes every message begins with a `HEADER`.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import fcntl
import os
import struct
import sys
from typing import Any
from typing import NamedTuple

from grpo_jax.config import plain_text
from grpo_jax.rewards import _guard
from grpo_jax.rewards import _launch

HEADER = struct.Struct('<16sQ')
"""Of a message: a word that its answer repeats, and how many bytes follow."""
READY = bytes(16)  # the word of the first messages, before any request
ENVIRONMENT = {
  'JAX_PLATFORMS': 'cpu',
  # Threads of these reserve address space, which is limited, and the workers
  # share the cores anyway.
  'OPENBLAS_NUM_THREADS': '1',
  'OMP_NUM_THREADS': '1',
  'MKL_NUM_THREADS': '1',
}
_F_SETPIPE_SZ = 1031
_FIRST_FD = 400  # out of the way of code that closes the first hundred


class Piped(NamedTuple):
  """A process that was started.

  Attributes:
    requests: The end of a pipe to write to; a write to it never waits.
    answers: The end of a pipe to read from; a read of it never waits.
    guarded: The process, under its guard.
  """

  requests: int
  answers: int
  guarded: _launch.Guarded

  def end(self) -> _launch.Ended:
    """Ends the process and all that it has started, and says how it ended."""
    os.close(self.requests)
    os.close(self.answers)
    return self.guarded.end()


def start(
  module: str,
  arguments: Sequence[Any],
  limits: Mapping[str, Any],
  env: Mapping[str, str] | None = None,
  fds: Sequence[int] = (),
) -> Piped:
  """Starts a process that calls `main(requests, answers, *arguments)`.

  Args:
    module: Of `main`.
    arguments: What it is called with beside the two ends of pipes; values whose
      `repr` is Python.
    limits: Of `_launch.Guarded`.
    env: Its whole environment; None for that of this process.
    fds: Further file descriptors that it inherits.

  Returns:
    The process, of which nothing is known yet.
  """
  # The process's sys.path is ours, so that it finds the same modules.
  path = [item or os.getcwd() for item in sys.path]
  with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
    request_out, requests = os.pipe()
    theirs.callback(os.close, request_out)
    ours.callback(os.close, requests)
    answers, answer_in = os.pipe()
    theirs.callback(os.close, answer_in)
    ours.callback(os.close, answers)
    null = os.open(os.devnull, os.O_RDWR)
    theirs.callback(os.close, null)
    program = (
      f'import sys; sys.path[:] = {path!r}; import {module} as program;'
      f' program.main({request_out}, {answer_in}, *{tuple(arguments)!r})'
    )
    guarded = _launch.Guarded(
      [sys.executable, '-c', program],
      fds=(request_out, answer_in, *fds),
      streams=dict(stdin=null, stdout=null, stderr=null),
      env=env,
      guard_env={**os.environ, **ENVIRONMENT} if env is None else env,
      **limits,
    )
    ours.callback(guarded.end)
    for end in (requests, answers):
      os.set_blocking(end, False)
    if sys.platform == 'linux':
      # Long texts go faster through a long pipe. A user whose pipes hold
      # much already is refused: generated code may have made them.
      with contextlib.suppress(OSError):
        fcntl.fcntl(requests, _F_SETPIPE_SZ, 1 << 20)
    ours.pop_all()  # nothing has failed: all stays as it is
  return Piped(requests, answers, guarded)


def portable(value: Any, subject: str, instead: str) -> str | bytes:
  """A function, class or other object as another process can take it.

  Args:
    value: It, or its name already.
    subject: The first words of an error message.
    instead: Its last words: what else to do.

  Returns:
    'module:name', or a pickle.

  Raises:
    ValueError: It cannot be sent.
  """
  if isinstance(value, str):
    return value
  module, name = (
    getattr(value, key, None) for key in ('__module__', '__qualname__')
  )
  # Of a module that a worker can import, the name is enough. `__main__` of a
  # worker is another one.
  if module in sys.modules and module != '__main__':
    if getattr(sys.modules[module], str(name), None) is value:
      return f'{module}:{name}'
  try:
    import cloudpickle
  except ImportError as error:
    raise ValueError(
      f'{subject} {value!r} is given as an object, and workers'
      ' need cloudpickle to take it; pip install cloudpickle, or name the'
      " function as 'module:function'."
    ) from error
  try:
    return cloudpickle.dumps(value)
  except Exception as error:
    raise ValueError(
      f'{subject} {value!r} cannot be sent to a worker process'
      f' ({plain_text.said(error)}); write it at the top of a module, or'
      f' {instead}.'
    ) from error


def adopt_orphans() -> None:
  """Makes this process the parent of all that its descendants leave behind."""
  if sys.platform == 'linux':
    _guard.prctl(_guard._PR_SET_CHILD_SUBREAPER, 1)


def hide(number: int) -> int:
  """The same pipe under a number that no code of others expects."""
  moved = fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, _FIRST_FD)
  os.close(number)
  return moved


def receive(requests: int) -> tuple[bytes, bytes]:
  """Waits for a request; the process ends where its parent has closed the pipe.

  Returns:
    The word that its answers begin with, and the request.
  """
  word, size = HEADER.unpack(_read(requests, HEADER.size))
  return word, _read(requests, size)


def _read(requests: int, size: int) -> bytes:
  parts = []
  while size:
    part = os.read(requests, min(size, 1 << 20))
    if not part:  # the parent has closed it
      os._exit(0)
    parts.append(part)
    size -= len(part)
  return b''.join(parts)


def send(answers: int, word: bytes, data: bytes) -> None:
  """Writes an answer."""
  data = HEADER.pack(word, len(data)) + data
  while data:
    data = data[os.write(answers, data) :]


def ending(error: BaseException) -> str:
  """How code of others wanted to end the process: 'memory' or 'exit 3'.

  '' for all other errors.
  """
  if isinstance(error, MemoryError):
    return 'memory'
  if isinstance(error, SystemExit):
    code = error.code
    is_plain = isinstance(code, str | int | None)
    return f'exit {code if is_plain else plain_text.shown(code)}'
  return ''
