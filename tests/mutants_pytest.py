"""Copies of the tree, and pytest processes that run in them.

Mutants of files that need processes, devices and fixtures are judged by pytest
itself. It runs in a copy of the tree, so nothing that is mutated ever lies in
the tree itself, however the tool ends. In the processes this module is a plugin
(`pytest -p tests.mutants_pytest`): they end when the tool ends, also when it is
killed, and they can record which functions they enter.
"""

import compileall
import contextlib
import json
import os
from pathlib import Path
import py_compile
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from typing import NamedTuple

import pytest

MEMORY = 8 << 30  # bytes that a process may hold; an endless loop may ask more
_SLOW = 'time limit'
_FAILED = ('FAILED ', 'ERROR ')
_ENTERED, _ALIVE = 'MUTANTS_ENTERED', 'MUTANTS_ALIVE'
_LEFT_OUT = ('GRPO_JAX_', 'MUTANTS_', 'PYTEST_', 'XDG_', 'XLA_FLAGS')


class Stopped(Exception):
  """The tool was asked to end: what a process did says nothing."""


class Ran(NamedTuple):
  """What came of one pytest process."""

  failure: str  # the test that failed, or why it ended; '' if all passed
  secs: float
  cpu_secs: float  # if recorded; the load of the machine does not change them
  entered: dict | None  # path -> names of functions; None: any, by a process


def tracked(root: Path) -> list[str]:
  """The files of a checkout that git knows or does not ignore.

  Raises:
    ValueError: This is no checkout of git, or there is no git.
  """
  command = ['git', 'ls-files', '-z', '--cached', '--others']
  command.append('--exclude-standard')
  try:
    out = subprocess.run(command, cwd=root, check=True, capture_output=True)
  except (OSError, subprocess.CalledProcessError) as error:
    raise ValueError(
      f'the files to copy are those that git lists, but git failed in {root}: '
      f'{error}; start this in a checkout'
    ) from error
  names = out.stdout.decode().split('\0')
  return sorted({name for name in names if name and (root / name).is_file()})


class Copy:
  """A copy of the tree, in which one pytest process runs at a time."""

  def __init__(self, root: Path, names: list[str], folder: Path):
    # The real path is what Python calls the files of its functions.
    self.folder = Path(os.path.realpath(folder))
    self.tree = self.folder / 'tree'
    for name in names:
      (self.tree / name).parent.mkdir(parents=True, exist_ok=True)
      shutil.copy2(root / name, self.tree / name)
    for name in ('home', 'tmp'):
      (self.folder / name).mkdir()
    # A run writes the revision of the checkout that it stands in.
    git = 'git', '-c', 'user.name=mutants', '-c', 'user.email=mutants@localhost'
    for words in ('init', '-q'), ('add', '-A'), ('commit', '-q', '-m', 'copy'):
      subprocess.run([*git, *words], cwd=self.tree, check=True)
    # By its hash: a change within a second that keeps the size would not be
    # noticed by the usual check of time and size.
    compileall.compile_dir(
      self.tree / 'grpo_jax',
      quiet=1,
      invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH,
    )
    self._stopped, self._process = False, None

  @contextlib.contextmanager
  def changed(self, path: str, text: str):
    """A file has another text."""
    file = self.tree / path
    before = file.read_text()
    file.write_text(text)
    try:
      yield
    finally:
      file.write_text(before)

  def run(self, tests: list[str], limit: float, record=False) -> Ran:
    """Runs test files, or doctests of files, until one test fails.

    Args:
      tests: Paths, in the order in which they run.
      limit: Seconds; a process that takes longer is killed, and has failed.
      record: Whether to say which functions were entered, and the CPU time.

    Raises:
      Stopped: `stop` was called.
    """
    log, entered = self.folder / 'log', self.folder / 'entered'
    entered.unlink(missing_ok=True)
    start = time.perf_counter()
    reader, writer = os.pipe()
    try:
      with log.open('w') as out:
        process = self._process = subprocess.Popen(
          [
            sys.executable, '-m', 'pytest', '-p', __name__, '-n', '0', '-x',
            '-q', '-rfE', '--tb=no', '--no-header', '-p', 'no:cacheprovider',
            f'--basetemp={self.folder / "tmp" / "pytest"}', *tests,
          ],
          cwd=self.tree,
          env=self._environment(reader, entered if record else None),
          stdin=subprocess.DEVNULL,
          stdout=out,
          stderr=subprocess.STDOUT,
          pass_fds=(reader,),
          start_new_session=True,
        )  # fmt: skip
      # `stop` kills what it finds, so it is not missed before this line either.
      code = None if self._stopped else process.wait(limit)
    except subprocess.TimeoutExpired:
      code = None
    finally:
      self._kill()  # also what the tests have started
      os.close(reader)
      os.close(writer)
    if self._stopped:
      raise Stopped
    secs, cpu_secs, functions = time.perf_counter() - start, 0.0, {}
    if entered.exists():
      cpu_secs, functions = json.loads(entered.read_text())
    failure = _failure(code, limit, log.read_text(errors='replace'))
    return Ran(failure, secs, cpu_secs, functions)

  def stop(self):
    """Ends the process that runs, from another thread."""
    self._stopped = True
    self._kill()

  def _kill(self):
    process, self._process = self._process, None
    if process is not None:
      with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
      process.wait()

  def _environment(self, reader, entered):
    kept = {
      key: value
      for key, value in os.environ.items()
      if not key.startswith(_LEFT_OUT)
    }
    given = {
      'PYTHONPATH': self.tree,
      'HOME': self.folder / 'home',  # a mutant may write there
      'TMPDIR': self.folder / 'tmp',
      _ALIVE: reader,
    }
    if entered:
      given[_ENTERED] = entered
    return {**kept, **{key: str(value) for key, value in given.items()}}


def is_slow(failure: str) -> bool:
  """Whether a process failed by taking too long."""
  return failure.startswith(_SLOW)


def _failure(code, limit, log):
  """Why a process of that exit code (None: killed) has failed, or ''."""
  if code == 0:
    return ''
  if code is None:
    return f'{_SLOW} of {limit:.3g} s'
  if code < 0:
    return f'died of {signal.Signals(-code).name}'
  for line in log.splitlines():
    if line.startswith(_FAILED):
      return line.split(' - ')[0].split(' ', 1)[1]
  last = log.strip().splitlines()[-1:] or ['nothing printed']
  if code == pytest.ExitCode.NO_TESTS_COLLECTED:
    return f'no test runs here: {last[0]}'
  return f'pytest ended with exit code {code}: {last[0]}'


# What follows runs in the pytest processes.


def pytest_configure(config):
  """Called by pytest, before it imports any test."""
  del config
  if _ALIVE not in os.environ:
    return
  resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
  reader = int(os.environ.pop(_ALIVE))
  watch = threading.Thread(target=_end_with_the_tool, args=(reader,))
  watch.daemon = True
  watch.start()
  if _ENTERED in os.environ:
    _record(Path(os.environ.pop(_ENTERED)))


def _end_with_the_tool(reader):
  os.read(reader, 1)  # until nobody can write: the tool is gone
  os.killpg(0, signal.SIGKILL)


def _record(path):
  """Writes which functions of the package were entered, when Python ends."""
  import atexit

  root = os.getcwd()
  prefix, found, started = f'{root}/grpo_jax/', set(), []

  def trace(frame, event, argument):
    code = frame.f_code
    if code.co_filename.startswith(prefix):
      found.add((code.co_filename, code.co_qualname))

  def audit(event, arguments):
    # What another Python enters is not seen here.
    if event == 'subprocess.Popen' and sys.executable in arguments[1]:
      started.append(event)

  def write():
    entered = {}
    for file, name in sorted(found):
      name = name.replace('.<locals>', '')
      entered.setdefault(file.removeprefix(f'{root}/'), []).append(name)
    cpu_secs = sum(os.times()[:4])  # of this process and of what it started
    path.write_text(json.dumps([cpu_secs, None if started else entered]))

  atexit.register(write)
  sys.addaudithook(audit)
  threading.settrace(trace)
  sys.settrace(trace)
