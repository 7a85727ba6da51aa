"""Starts the program of an agent so that it can reach one port alone.

An agent is a program that others wrote, and it may run what a model writes. It
gets its interpreter and its packages, an empty folder as its home, and one TCP
port of loopback; `what_is_open` says what else. How is told in `_confine.py`
and `_guard.py`: as generated code is confined (`sandbox.py`), and by the same
two ways.
"""

from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import functools
import glob
import os
import shutil
import socket
import sys
import tempfile
import threading
from typing import Any
from typing import BinaryIO
from typing import NamedTuple

from grpo_jax.rewards import _launch
from grpo_jax.rewards import _relay
from grpo_jax.rewards import sandbox

CONFINES = ('auto', *sandbox.MEANS, 'no')
_LOOK_SECS = 0.5  # at a scratch folder that has no limit of its own
_TRIAL_SECS = 60.0  # until a way that is tried does not work
_PATH = '/usr/local/bin:/usr/bin:/bin'

# What programs of a network read beside `sandbox.SYSTEM`; no private keys.
_SYSTEM = (
  '/etc/hosts', '/etc/nsswitch.conf', '/etc/mime.types', '/etc/ssl/certs',
  '/etc/ssl/cert.pem', '/etc/ssl/openssl.cnf', '/etc/pki/tls/certs',
  '/etc/pki/ca-trust/extracted', '/etc/ca-certificates',
  '/etc/crypto-policies',
)  # fmt: skip

_OPEN = {
  'namespaces': (
    'An agent sees its own files alone, no other process, and no network but'
    " one port of the run; what stays open to it are the system's libraries,"
    ' read-only, and its share of processors and memory.'
  ),
  'landlock': (
    'An agent opens its own files alone and connects by TCP to one port alone;'
    ' what stays open to it are this port of every address that this machine'
    ' reaches (Landlock limits ports, not addresses), the names, sizes and'
    ' times of the files of others, and which processes there are.'
  ),
  'no': (
    'An agent is not confined: what stays open to it is all that this user may'
    ' do, such as to read files, the memory and the environment of other'
    ' processes and the secrets of other episodes, and to reach any network.'
  ),
}


class Limits(NamedTuple):
  """What the program of an agent may use; its caller ends it in time.

  Attributes:
    memory_bytes: Address space of each process, and memory of all of them.
    processes: Processes at a time.
    threads: Threads of all processes, under 'namespaces'.
    file_bytes: Length of a file.
    scratch_bytes: All files of its folder. Under 'namespaces' they lie in
      memory, and a write beyond fails; else it is ended soon after one.
  """

  memory_bytes: int = 4 << 30
  processes: int = 32
  threads: int = 256
  file_bytes: int = 256 << 20
  scratch_bytes: int = 256 << 20


class Process:
  """A program that was started; `start` makes it.

  Attributes:
    stdin: What to write to it. Unbuffered, as the two others are.
    stdout: What it prints. To be read until its end, which comes with `end` at
      the latest, and to be closed.
    stderr: What it prints there; as `stdout`.
    confine: 'namespaces', 'landlock' or 'no'.
    status: A descriptor that is ready to be read once all of it has ended by
      itself. Not to be read; `end` closes it.
  """

  def __init__(
    self,
    guarded: _launch.Guarded,
    streams: tuple[BinaryIO, BinaryIO, BinaryIO],
    order: Mapping[str, Any],
    channel: socket.socket | None,
  ):
    self.stdin, self.stdout, self.stderr = streams
    self.confine = order['confine'] or 'no'
    self.status = guarded.status
    self._guarded, self._folder = guarded, order['folder']
    self._lock = threading.Lock()  # of the pipe that `close` closes
    self._ended: _launch.Ended | None = None
    if channel is None:
      self._attendant = _Watch(self, self._folder, order['scratch_bytes'])
    else:
      address = '127.0.0.1', order['port']
      self._attendant = _relay.Relay(channel, address)

  @property
  def pid(self) -> int:
    """The process of the guard, from which all others descend."""
    return self._guarded.pid

  def close(self) -> None:
    """Tells it to end, and does not wait; `end` comes next."""
    with self._lock:
      self._guarded.close()

  def end(self, failure: str = '') -> _launch.Ended:
    """Ends the program, if it still runs, and everything that it has started.

    No connection of it is left, and no file of its folder. It may be called
    again, by one thread at a time.

    Args:
      failure: What to call the end of a program that still runs.

    Returns:
      How it ended: `failure` is '' for exit code 0; otherwise 'exit 1',
      'memory', 'processes', 'scratch limit', 'signal SIGSEGV', or 'refused:
      ...' (it could not be confined).
    """
    if self._ended is None:
      self.close()
      self._attendant.end()
      ended = self._guarded.end(failure)
      self.stdin.close()  # who still writes to it has met an error
      if isinstance(self._attendant, _Watch) and self._attendant.is_over:
        ended = _launch.Ended('scratch limit', None)
      shutil.rmtree(self._folder, ignore_errors=True)
      self._ended = ended
    return self._ended

  def __enter__(self) -> 'Process':
    return self

  def __exit__(self, *_) -> None:
    self.end()
    self.stdout.close()
    self.stderr.close()


class _Watch:
  """A thread that ends a program whose folder holds more than allowed."""

  def __init__(self, process: Process, folder: str, most_bytes: int):
    self._process, self._folder = process, folder
    self._most_bytes = most_bytes
    self._end = threading.Event()
    self.is_over = False
    self._thread = threading.Thread(
      target=self._run, name='watch of an agent', daemon=True
    )
    self._thread.start()

  def end(self) -> None:
    self._end.set()
    self._thread.join()

  def _run(self) -> None:
    while not self._end.wait(_LOOK_SECS):
      pid = self._process.pid
      if sandbox.is_over(self._folder, pid, self._most_bytes):
        self.is_over = True
        self._process.close()
        return


def what_is_open(confine: str) -> str:
  """A sentence that names what an agent can reach, for a log.

  Args:
    confine: 'namespaces', 'landlock' or 'no', as `way` gives it.
  """
  return _OPEN[confine]


def way(confine: str = 'auto') -> str:
  """The way by which agents are confined here.

  Args:
    confine: One of `CONFINES`; 'auto' is the first that this system offers.

  Returns:
    'namespaces', 'landlock' or 'no'.

  Raises:
    SandboxError: This system does not offer it, or none for 'auto'.
    ValueError: There is no such way.
  """
  if confine not in CONFINES:
    raise ValueError(
      f'confine is {confine!r}, but one of {CONFINES} is required.'
    )
  if confine == 'no':
    return confine
  reasons = {}
  for means in sandbox.MEANS if confine == 'auto' else (confine,):
    reasons[means] = refusal(means)
    if not reasons[means]:
      return means
  text = '; '.join(f'{means}: {why}' for means, why in reasons.items())
  raise sandbox.SandboxError(
    f'An agent is not started with confine={confine!r}, because this system'
    f' does not offer it ({text}). Allow unprivileged user namespaces or use a'
    ' kernel whose Landlock has rules for ports (Linux 6.7 or newer), or give'
    " confine='no' to let it do all that this user may."
  )


@functools.cache
def refusal(means: str) -> str:
  """Why this system does not offer one of `sandbox.MEANS`; '' if it does."""
  if sys.platform != 'linux':
    return f'it is a part of Linux, and this is {sys.platform}'
  command = [sys.executable, '-I', '-S', '-c', "print('here')"]
  # No program connects to this port.
  process = _start(command, 1, {}, (), Limits(), means)
  late = threading.Timer(_TRIAL_SECS, process.close)
  late.start()
  with process:
    said = process.stdout.read()
    late.cancel()
    failure = process.end().failure
    if said == b'here\n' and not failure:
      return ''
    return f'{failure} {process.stderr.read()[-300:].decode()}'.strip()


def start(
  command: Sequence[str],
  *,
  port: int,
  env: Mapping[str, str] | None = None,
  readable: Sequence[str] = (),
  limits: Limits | None = None,
  confine: str = 'auto',
) -> Process:
  """Starts a program that can reach one TCP port of 127.0.0.1.

  Args:
    command: The program and its arguments. It may read its interpreter, the
      packages of its virtual environment, and arguments that name a file; these
      are taken from the folder of this process.
    port: The port, in this network and in that of the program.
    env: Its environment. PATH, HOME, TMPDIR, USER and LANG are added where they
      are not given; HOME is its folder, in which it starts.
    readable: Further files and folders that it may read.
    limits: What it may use.
    confine: One of `CONFINES`, see `way`.

  Returns:
    The program. That it could not be started, `Process.end` says.

  Raises:
    SandboxError: This system does not offer the way to confine it.
    ValueError: The command is empty, or names no program.
  """
  confine = way(confine)
  return _start(command, port, env or {}, readable, limits or Limits(), confine)


def _start(
  command: Sequence[str],
  port: int,
  env: Mapping[str, str],
  readable: Sequence[str],
  limits: Limits,
  confine: str,
) -> Process:
  argv, shown, links = _resolved(command, env)
  folder = tempfile.mkdtemp(prefix='grpo_jax_agent_')
  own_root = confine == 'namespaces'
  scratch = '/scratch' if own_root else folder
  order = {
    'confine': '' if confine == 'no' else confine,
    'port': port,
    'threads': limits.threads,
    'folder': folder,
    'scratch': scratch,
    'scratch_bytes': limits.scratch_bytes,
    'files': {},
    'readable': sorted({*shown, *map(os.path.abspath, readable)}),
    'links': links,
  }
  with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
    ours.callback(shutil.rmtree, folder, ignore_errors=True)
    (given, stdin), (stdout, out), (stderr, errors) = (
      _pipe() for _ in range(3)
    )
    for stack, files in (
      (theirs, (given, out, errors)),
      (ours, (stdin, stdout, stderr)),
    ):
      for file in files:
        stack.enter_context(file)
    channel = None
    if own_root:
      channel, sent = socket.socketpair()
      ours.enter_context(channel)
      theirs.enter_context(sent)
      order['channel'] = sent.fileno()
    guarded = _launch.Guarded(
      argv,
      memory_bytes=limits.memory_bytes,
      processes=limits.processes,
      file_bytes=limits.file_bytes,
      env=_environment(argv, env, scratch),
      guard_env={},
      fds=[order['channel']] if own_root else [],
      streams=dict(stdin=given, stdout=out, stderr=errors, cwd=folder),
      more=order,
    )
    ours.callback(guarded.end)
    streams = stdin, stdout, stderr
    process = Process(guarded, streams, order, channel)
    ours.pop_all()  # nothing has failed: all stays as it is
  return process


def _pipe() -> tuple[BinaryIO, BinaryIO]:
  out, into = os.pipe()
  return open(out, 'rb', 0), open(into, 'wb', 0)


def _environment(
  argv: Sequence[str], env: Mapping[str, str], scratch: str
) -> dict[str, str]:
  return {
    'PATH': f'{os.path.dirname(argv[0])}:{_PATH}',
    'HOME': scratch,
    'TMPDIR': scratch,
    'USER': 'agent',
    'LANG': 'C.UTF-8',
    **env,
  }


def _resolved(
  command: Sequence[str], env: Mapping[str, str]
) -> tuple[list[str], set[str], dict[str, str]]:
  """A command with absolute paths, what it reads, and the links to that."""
  if not command:
    raise ValueError('An agent needs a command, and an empty one was given.')
  path = env.get('PATH') or os.environ.get('PATH') or _PATH
  program = _found(command[0], path)
  shown, links = {*sandbox.SYSTEM, *_SYSTEM}, {}
  argv = [program]
  for argument in command[1:]:
    if os.path.isfile(argument):
      argument = os.path.abspath(argument)
      shown.add(os.path.realpath(argument))
      links |= sandbox.links(argument)
    argv.append(argument)
  for one in _programs(program, path):
    links |= sandbox.links(one)
    shown |= set(sandbox.without_home(_needed(one)))
  return argv, shown, links


def _found(program: str, path: str) -> str:
  found = shutil.which(program, path=path)
  if found is None:
    raise ValueError(
      f'The command of an agent begins with {program!r}, and there is no such'
      ' program; give its path.'
    )
  return os.path.abspath(found)


def _programs(program: str, path: str) -> Iterator[str]:
  """A program, and the interpreter that its first line names."""
  while True:
    yield program
    with open(program, 'rb') as file:
      first = file.readline(256)
    if not first.startswith(b'#!'):
      return
    words = first[2:].decode(errors='replace').split()
    if words and os.path.basename(words[0]) == 'env':
      words = [one for one in words[1:] if one[0] != '-' and '=' not in one]
    if not words:
      return
    program = _found(words[0], path)


def _needed(program: str) -> Iterator[str]:
  """The paths that a program needs; of Python, with its packages."""
  real = os.path.realpath(program)
  yield real
  for place in {program, *sandbox.links(program), real}:
    above = os.path.dirname(os.path.dirname(place))
    settings = os.path.join(above, 'pyvenv.cfg')
    found = [above]
    if os.path.isfile(settings):  # its program may be a copy, and no link
      yield above
      yield os.path.realpath(above)
      with open(settings) as file:
        for line in file:
          name, _, value = line.partition('=')
          if name.strip() == 'home':
            found.append(os.path.dirname(value.strip()))
    for one in found:
      pattern = os.path.join(glob.escape(one), 'lib', 'python3*', 'os.py')
      if glob.glob(pattern):
        yield one
        yield os.path.realpath(one)
