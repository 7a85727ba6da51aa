"""Copies of the tree, and pytest processes that run in them.

Mutants of files that need processes, devices and fixtures are judged by pytest
itself. It runs in a copy of the tree, so nothing that is mutated ever lies in
the tree itself, however the tool ends. In the processes this module is a plugin
(`pytest -p tests.mutants_pytest`): they end when the tool ends, also when it is
killed, and they can record which functions each test enters.
"""

import collections
import compileall
import contextlib
import gc
import importlib
import inspect
import json
import os
from pathlib import Path
import py_compile
import resource
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from typing import NamedTuple

import pytest

MEMORY = 8 << 30  # bytes that a process may hold; an endless loop may ask more
_SLOW = 'time limit'
_FAILED = ('FAILED ', 'ERROR ')
_ENTERED, _ALIVE = 'MUTANTS_ENTERED', 'MUTANTS_ALIVE'
_ONLY = 'MUTANTS_ONLY'
_LIBRARIES = ('jax', 'flax.nnx', 'optax', 'orbax.checkpoint')
_LEFT_OUT = ('GRPO_JAX_', 'MUTANTS_', 'PYTEST_', 'XDG_', 'XLA_FLAGS')


class Stopped(Exception):
  """The tool was asked to end: what a process did says nothing."""


class Ran(NamedTuple):
  """What came of one pytest process."""

  failure: str  # the test that failed, or why it ended; '' if all passed
  secs: float
  # What follows is empty if it was not recorded.
  cpu_secs: float  # the load of the machine does not change them
  tests: list  # [id, CPU seconds] of each test
  # path -> name of a function -> numbers of the tests that enter it; None: all
  entered: dict
  started: list  # numbers of the tests that start another Python


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
    self._stopped, self._server, self._pid = False, None, None

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

  def run(
    self,
    files: list[str],
    limit: float,
    record: bool = False,
    only: list[str] | None = None,
  ) -> Ran:
    """Runs test files, or doctests of files, until one test fails.

    Args:
      files: Paths, in the order in which they run.
      limit: Seconds; a process that takes longer is killed, and has failed.
      record: Whether to say which functions were entered, and the CPU time.
      only: Ids of the tests that run, in their order; None: all of the files.

    Raises:
      Stopped: `stop` was called.
    """
    log, entered = self.folder / 'log', self.folder / 'entered'
    entered.unlink(missing_ok=True)
    environment = self._environment()
    if record:
      environment[_ENTERED] = str(entered)
    if only is not None:
      (self.folder / 'only').write_text(json.dumps(only))
      environment[_ONLY] = str(self.folder / 'only')
    start = time.perf_counter()
    options = [
      '-p', __name__, '-n', '0', '-x', '-q', '-rfE', '--tb=no', '--no-header',
      '-p', 'no:cacheprovider', f'--basetemp={self.folder / "tmp" / "pytest"}',
    ]  # fmt: skip
    try:
      self._pid = int(self._ask([[*options, *files], environment, str(log)]))
      server = self._server
      # `stop` kills what it finds, so it is not missed before this line either.
      if self._stopped or not select.select([server.stdout], [], [], limit)[0]:
        code = None
      else:
        code = int(self._answer())
    finally:
      self._kill()  # also what the tests have started
    if code is None and not self._stopped:
      self._answer()
    if self._stopped:
      raise Stopped
    secs, recorded = time.perf_counter() - start, (0.0, [], {}, [])
    if entered.exists():
      recorded = json.loads(entered.read_text())
    if only is not None and code == pytest.ExitCode.NO_TESTS_COLLECTED:
      code = 0  # a mutant may change the ids of tests
    failure = _failure(code, limit, log.read_text(errors='replace'))
    return Ran(failure, secs, *recorded)

  def stop(self):
    """Ends the process that runs, from another thread."""
    self._stopped = True
    self._kill()
    if self._server is not None:
      self._server.kill()

  def _kill(self):
    pid, self._pid = self._pid, None
    if pid is not None:
      with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)

  def _ask(self, request):
    """Has the server, which is started for the first, fork a process."""
    if self._server is None:
      self._server = subprocess.Popen(
        [sys.executable, '-m', __name__],
        cwd=self.tree,
        env=self._environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
        start_new_session=True,
      )
    self._server.stdin.write(json.dumps(request).encode() + b'\n')
    return self._answer()

  def _answer(self):
    answer = self._server.stdout.readline()
    if not answer:
      if self._stopped:
        raise Stopped
      raise ValueError(
        'the process that forks those of pytest has ended; the same command '
        'goes on'
      )
    return answer

  def _environment(self):
    kept = {
      key: value
      for key, value in os.environ.items()
      if not key.startswith(_LEFT_OUT)
    }
    given = {
      'PYTHONPATH': self.tree,
      'HOME': self.folder / 'home',  # a mutant may write there
      'TMPDIR': self.folder / 'tmp',
      'OPENBLAS_NUM_THREADS': '1',  # a process with threads must not fork
      'JAX_PLATFORMS': kept.get('JAX_PLATFORMS', 'cpu'),
    }
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


# What follows runs in a server of a copy, and in its pytest processes.


def serve():
  """Forks a pytest process for each line of the standard input.

  They need not import what takes most of the time: libraries that never change.
  Nothing here starts a thread, or what computes.
  """
  for name in _LIBRARIES:
    with contextlib.suppress(ImportError):
      importlib.import_module(name)
  gc.freeze()
  for line in sys.stdin:
    pid = os.fork()
    if not pid:
      os._exit(_child(*json.loads(line)))
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.write(1, b'%d\n' % code)


def _child(options, environment, log):
  os.setsid()
  os.write(1, b'%d\n' % os.getpid())
  alive = os.dup(0)  # the tool holds the other end
  with open(os.devnull) as nothing, open(log, 'w') as out:
    os.dup2(nothing.fileno(), 0)
    os.dup2(out.fileno(), 1)
    os.dup2(out.fileno(), 2)
  os.environ.clear()
  os.environ.update(environment)
  os.environ[_ALIVE] = str(alive)
  try:
    return int(pytest.main(options))
  except BaseException:
    traceback.print_exc()
    return 1
  finally:
    for stream in sys.stdout, sys.stderr:
      stream.flush()


def pytest_configure(config):
  """Called by pytest, before it imports any test."""
  if _ALIVE not in os.environ:
    return
  resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
  alive = int(os.environ.pop(_ALIVE))
  watch = threading.Thread(target=_end_with_the_tool, args=(alive,))
  watch.daemon = True
  watch.start()
  if _ENTERED in os.environ:
    recorder = Recorder(os.getcwd(), Path(os.environ.pop(_ENTERED)))
    config.pluginmanager.register(recorder)
    recorder.start()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
  """Keeps the tests that are asked for, in the order given."""
  if _ONLY not in os.environ:
    return
  order = json.loads(Path(os.environ.pop(_ONLY)).read_text())
  place = {name: number for number, name in enumerate(order)}
  kept = [item for item in items if item.nodeid in place]
  config.hook.pytest_deselected(items=[i for i in items if i not in kept])
  items[:] = sorted(kept, key=lambda item: place[item.nodeid])


def _end_with_the_tool(alive):
  poll = select.poll()
  poll.register(alive, select.POLLHUP)
  poll.poll()  # until nobody can write: the tool is gone
  os.killpg(0, signal.SIGKILL)


class Recorder:
  """A plugin that notes which functions of the package each test enters.

  What is entered outside the body of a test (in a fixture, or at import), or in
  a function that keeps its result for later calls, counts for all tests.
  """

  def __init__(self, root: str, path: Path):
    self._path = path
    self._root, self._package = f'{root}/', f'{root}/grpo_jax/'
    self._all, self._tests = (set(), []), []
    self._current = self._all  # (functions, whether another Python started)
    self._keeping, self._inside = set(), 0

  def start(self):
    """Records from now on."""
    sys.addaudithook(self._audit)
    threading.settrace(self._trace)
    sys.settrace(self._trace)

  def _trace(self, frame, event, argument):
    code = frame.f_code
    file = code.co_filename
    if not file.startswith(self._root):
      return None
    if file.startswith(self._package):
      here = self._all if self._inside else self._current
      here[0].add((file, code.co_qualname))
    if id(code) not in self._keeping and code.co_name != '<module>':
      return None
    self._inside += 1
    frame.f_trace_lines = False
    return self._leave

  def _leave(self, frame, event, argument):
    if event == 'return':
      self._inside -= 1
    return self._leave

  def _audit(self, event, arguments):
    # What another Python enters is not seen here.
    if event == 'subprocess.Popen' and sys.executable in arguments[1]:
      (self._all if self._inside else self._current)[1].append(event)

  def pytest_collection_finish(self):
    """Finds the functions that keep their results."""
    for name, module in list(sys.modules.items()):
      if name.split('.')[0] in ('grpo_jax', 'tests'):
        for value in list(vars(module).values()):
          if hasattr(value, 'cache_info') or hasattr(value, 'clear_cache'):
            code = getattr(inspect.unwrap(value), '__code__', None)
            self._keeping.add(id(code))

  @pytest.hookimpl(wrapper=True)
  def pytest_runtest_call(self, item):
    """Notes what one test enters."""
    before, self._current = sum(os.times()[:4]), (set(), [])
    try:
      return (yield)
    finally:
      secs = sum(os.times()[:4]) - before
      self._tests.append((item.nodeid, secs, self._current))
      self._current = self._all

  def pytest_unconfigure(self):
    """Writes what was found."""
    self._path.write_text(json.dumps(self.recorded()))

  def recorded(self):
    """The last fields of `Ran`."""
    entered = collections.defaultdict(lambda: collections.defaultdict(list))

    def functions(found):
      for file, name in sorted(found[0]):
        path = file.removeprefix(self._root)
        yield path, name.replace('.<locals>', '')

    for number, (*_, found) in enumerate(self._tests):
      for path, name in functions(found):
        entered[path][name].append(number)
    for path, name in functions(self._all):
      entered[path][name] = None
    started = [
      number
      for number, (*_, found) in enumerate(self._tests)
      if found[1] or self._all[1]
    ]
    cpu_secs = sum(os.times()[:4])  # of this process and of what it started
    tests = [(name, secs) for name, secs, _ in self._tests]
    return cpu_secs, tests, entered, started


if __name__ == '__main__':
  serve()
