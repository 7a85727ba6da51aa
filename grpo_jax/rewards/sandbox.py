"""Runs generated code that nobody has read.

The code gets Python, a scratch folder and its input. It gets no network, no
file but Python's and the system's libraries, no environment, and no other
process to see or signal; it ends, with all that it has started, at its limit.
How is told in `_confine.py` and `_guard.py`. Where the system offers neither
way, `run` refuses, unless the caller insists on limits alone.

It protects from what a policy under training writes. It is no protection from
an attacker who knows a hole of the kernel: for that, use a virtual machine.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import functools
import os
import pathlib
import selectors
import shutil
import stat
import sys
import tempfile
import time
from typing import Any
from typing import NamedTuple

from grpo_jax.rewards import _guard
from grpo_jax.rewards import _launch

_LEAST_BYTES = 4096  # that a file or folder counts: an empty one takes room too
MEANS = ('namespaces', 'landlock')
_LOOK_SECS = 0.1  # at a scratch folder that has no limit of its own

# What a program needs of the system, beside Python itself.
SYSTEM = (
  '/usr', '/lib', '/lib32', '/lib64', '/bin', '/sbin', '/etc/ld.so.cache',
  '/etc/alternatives', '/etc/localtime',
)  # fmt: skip


class SandboxError(RuntimeError):
  """This system offers no sandbox; the message says why."""


class Limits(NamedTuple):
  """What a program of generated code may use.

  Attributes:
    time_secs: Seconds by the clock until it is ended.
    memory_bytes: Address space of each process, and memory of all of them.
    processes: Processes at a time. Under 'namespaces' threads count too.
    file_bytes: Length of a file.
    scratch_bytes: All files of the scratch folder. Under 'namespaces' a write
      beyond fails. Otherwise the folder is looked at ten times a second and at
      the end: a program can hold more for that time, and is ended then.
    output_bytes: Length of stdout, and of stderr.
    readable: Further paths that it may read, such as a folder of data.
  """

  time_secs: float = 10.0
  memory_bytes: int = 1 << 30
  processes: int = 16
  file_bytes: int = 64 << 20
  scratch_bytes: int = 64 << 20
  output_bytes: int = 1 << 20
  readable: tuple[str, ...] = ()


class Ran(NamedTuple):
  """What came of a program.

  Attributes:
    exit_code: Its exit code; None if it was ended.
    stdout: What it printed, up to the limit.
    stderr: What it printed there, up to the limit.
    failure: '' if it ended by itself with exit code 0; otherwise 'exit 1',
      'time limit', 'memory', 'processes', 'output limit', 'scratch limit',
      'signal SIGSEGV' or 'refused: ...' (the sandbox could not be made).
  """

  exit_code: int | None
  stdout: str
  stderr: str
  failure: str


class Available(NamedTuple):
  """What this system offers.

  Attributes:
    means: The way that `run` takes: 'namespaces', 'landlock', or '' for none.
    reasons: For each way that is not offered, why.
  """

  means: str
  reasons: Mapping[str, str]


@functools.cache
def available() -> Available:
  """The first way of confining that works here; each is tried by a program."""
  reasons = {}
  for means in MEANS:
    reason = refusal(means)
    if not reason:
      return Available(means, reasons)
    reasons[means] = reason
  return Available('', reasons)


@functools.cache
def refusal(means: str) -> str:
  """Why this system does not offer one of `MEANS`; '' if it does."""
  if sys.platform != 'linux':
    return f'it is a part of Linux, and this is {sys.platform}'
  ran = _run("print('here')", '', Limits(time_secs=60.0), means)
  if ran.stdout == 'here\n':
    return ''
  return f'{ran.failure} {ran.stderr[-300:]}'.strip()


def missing() -> str:
  """Half a sentence: that this system offers no sandbox, and why; or ''."""
  found = available()
  if found.means:
    return ''
  reasons = '; '.join(f'{key}: {why}' for key, why in found.reasons.items())
  return f'this system offers no sandbox ({reasons})'


def run(
  code: str,
  stdin: str = '',
  limits: Limits | None = None,
  insist: bool = False,
  means: str | None = None,
) -> Ran:
  """Runs a program of Python by itself, and waits for its end.

  >>> run('print(input() * 2)', stdin='ab').stdout
  'abab\\n'

  Args:
    code: The program.
    stdin: What it reads.
    limits: What it may use.
    insist: Whether to run it with limits alone where the system offers no
      sandbox. It may then read and write what this user may.
    means: 'namespaces' or 'landlock', to take this way; None for the first that
      works.

  Returns:
    What it printed, and how it ended.

  Raises:
    SandboxError: The system offers no sandbox, and `insist` is False.
    ValueError: There is no such `means`.
  """
  if means is not None and means not in MEANS:
    raise ValueError(f'means is {means!r}, but one of {MEANS} is required.')
  if means is None:
    means = available().means
    if not means and not insist:
      raise SandboxError(
        f'Generated code is not run, because {missing()}. Allow unprivileged'
        ' user namespaces or use a kernel with Landlock (5.13 or newer), or'
        ' pass insist=True to run it with limits alone, as this user.'
      )
  return _run(code, stdin, limits or Limits(), means)


def _run(code: str, stdin: str, limits: Limits, means: str) -> Ran:
  # Half of a surrogate pair is in no file; with a '?' it is the code's error.
  code = code.encode(errors='replace').decode()
  folder = tempfile.mkdtemp(prefix='grpo_jax_sandbox_')
  own_root = means == 'namespaces'
  scratch = '/scratch' if own_root else folder
  files = {'main.py': code}
  try:
    with tempfile.NamedTemporaryFile() as written:
      written.write(stdin.encode(errors='replace'))
      written.flush()
      given = open(written.name, 'rb')  # so that the program cannot write it
    with given:
      if not own_root:
        path = pathlib.Path(folder, 'main.py')
        path.write_text(code, encoding='utf-8')
      return _guarded(given, limits, means, scratch, folder, files)
  finally:
    shutil.rmtree(folder, ignore_errors=True)


def _guarded(
  given: Any,
  limits: Limits,
  means: str,
  scratch: str,
  folder: str,
  files: dict[str, str],
) -> Ran:
  pipes = [os.pipe(), os.pipe()]
  try:
    guarded = _launch.Guarded(
      [sys.executable, '-I', '-B', f'{scratch}/main.py'],
      memory_bytes=limits.memory_bytes,
      processes=limits.processes,
      file_bytes=limits.file_bytes,
      env={
        'PATH': '/usr/local/bin:/usr/bin:/bin',
        'HOME': scratch,
        'TMPDIR': scratch,
        'LANG': 'C.UTF-8',
        'OPENBLAS_NUM_THREADS': '1',
        'OMP_NUM_THREADS': '1',
      },
      guard_env={},
      streams=dict(stdin=given, stdout=pipes[0][1], stderr=pipes[1][1]),
      more={
        'confine': means,
        'cpu_secs': int(limits.time_secs) + 1,
        'folder': folder,
        'scratch': scratch,
        'scratch_bytes': limits.scratch_bytes,
        'files': files if means == 'namespaces' else {},
        'readable': readable(limits.readable),
        'links': links(sys.executable),
      },
    )
  finally:
    for _, end in pipes:
      os.close(end)
  outs = [out for out, _ in pipes]

  def is_full() -> bool:
    if means == 'namespaces':  # the scratch folder has a limit of its own
      return False
    return is_over(folder, guarded.pid, limits.scratch_bytes)

  try:
    late, texts = '', {out: bytearray() for out in outs}
    try:
      late = _collect(guarded.status, texts, limits, is_full)
    finally:
      ended = guarded.end(late)
      _drain(texts, limits.output_bytes)
  finally:
    for out in outs:
      os.close(out)
  failure = ended.failure
  if failure == 'signal SIGXCPU':
    failure = 'time limit'
  if is_full():  # it has filled the folder since the last look
    failure = 'scratch limit'
  stdout, stderr = (texts[out].decode(errors='replace') for out in outs)
  return Ran(ended.exit_code, stdout, stderr, failure)


def _collect(
  status: int,
  texts: dict[int, bytearray],
  limits: Limits,
  is_full: Callable[[], bool],
) -> str:
  """Reads until the end, or until a limit, which it returns."""
  until = time.monotonic() + limits.time_secs
  look = time.monotonic() + _LOOK_SECS
  with selectors.DefaultSelector() as selector:
    selector.register(status, selectors.EVENT_READ)
    for out in texts:
      os.set_blocking(out, False)
      selector.register(out, selectors.EVENT_READ)
    while True:
      left = until - time.monotonic()
      if left <= 0:
        return 'time limit'
      wait = max(0.0, min(until, look) - time.monotonic())
      ready = [key.fd for key, _ in selector.select(wait)]
      if status in ready:
        return ''
      if time.monotonic() >= look:
        if is_full():
          return 'scratch limit'
        look = time.monotonic() + _LOOK_SECS
      for out in ready:
        read = os.read(out, 1 << 16)
        if not read:
          selector.unregister(out)
        texts[out] += read[: limits.output_bytes - len(texts[out])]
        if read and len(texts[out]) >= limits.output_bytes:
          return 'output limit'


def _drain(texts: dict[int, bytearray], most: int) -> None:
  """What was written before the end, and not read yet."""
  for out, text in texts.items():
    try:
      while len(text) < most:
        read = os.read(out, most - len(text))
        if not read:
          break
        text += read
    except BlockingIOError:  # of a process that lives on: none should
      pass


def readable(more: Sequence[str] = ()) -> list[str]:
  """The paths that a program may read: the system's, Python's, and `more`."""
  found = {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix}
  executable = os.path.realpath(sys.executable)
  found.add(executable)
  above = os.path.dirname(os.path.dirname(executable))
  name = f'python{sys.version_info.major}.{sys.version_info.minor}'
  if os.path.exists(os.path.join(above, 'lib', name, 'os.py')):
    found.add(above)
  found |= {os.path.realpath(path) for path in found}
  found = set(without_home(found))
  return sorted({*SYSTEM, *found, *map(os.path.abspath, more)})


def without_home(paths: Iterable[str]) -> Iterator[str]:
  """Paths but for / and those that would show all of a home folder."""
  home = os.path.realpath(os.path.expanduser('~'))
  for path in map(os.path.normpath, paths):
    if os.path.commonpath([path, home]) != path:
      yield path


def links(path: str) -> dict[str, str]:
  """The links from a program's path to the program itself, by their paths.

  The folder of such a link is not shown: `~/.local/bin` may have one, and the
  keyrings of a person lie in `~/.local` too.
  """
  found: dict[str, str] = {}
  path = os.path.abspath(path)
  while True:
    folder, name = os.path.split(path)
    place = os.path.join(os.path.realpath(folder), name)
    if path != place:  # a folder of the path is a link
      found[path] = place
    if not os.path.islink(place) or place in found:
      return found
    found[place] = os.readlink(place)
    path = os.path.join(os.path.dirname(place), found[place])
    path = os.path.normpath(path)


def is_over(folder: str, process: int, most_bytes: int) -> bool:
  """Whether files take more than is allowed, removed ones that are open too.

  Landlock has no limit for a folder, so this looks from outside.

  Args:
    folder: All that lies in it counts.
    process: What this process and its descendants have open on the same file
      system counts too if it has no name any more.
    most_bytes: The limit.
  """
  total, seen = 0, set()
  device = os.stat(folder).st_dev
  for found in _files(folder, process):
    if found.st_dev != device or found.st_ino in seen:
      continue
    seen.add(found.st_ino)
    total += max(_LEAST_BYTES, found.st_blocks * 512)
    if total > most_bytes:  # it need not count a million files
      return True
  return False


def _files(folder: str, process: int) -> Iterator[os.stat_result]:
  """Each may have gone while it is looked at."""
  waiting = [folder]
  while waiting:
    with contextlib.suppress(OSError), os.scandir(waiting.pop()) as inside:
      for entry in inside:
        with contextlib.suppress(OSError):
          yield entry.stat(follow_symlinks=False)
          if entry.is_dir(follow_symlinks=False):
            waiting.append(entry.path)
  for one in (process, *_guard.descendants(root=process)):
    with contextlib.suppress(OSError):
      for number in os.listdir(f'/proc/{one}/fd'):
        with contextlib.suppress(OSError):
          found = os.stat(f'/proc/{one}/fd/{number}')
          if not found.st_nlink and stat.S_ISREG(found.st_mode):
            yield found
