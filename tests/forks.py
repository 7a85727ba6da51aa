"""Processes that begin with their imports done: forks of one that has them.

For tests of what several processes do to each other. To import JAX takes each a
second, which is more than all that they do.
"""

import collections
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time

from tests import cli

_FORKS = """
import json, os, select, sys
{imports}

while True:
  if select.select([sys.stdin], [], [], 0.02)[0]:
    line = sys.stdin.readline()
    if not line:
      os._exit(0)
    asked = json.loads(line)
    pid = os.fork()
    if not pid:
      for number, path in enumerate([os.devnull, *asked['files']]):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), number)
      sys.argv[1:] = asked['arguments']
      break
    print(pid, flush=True)
  try:
    pid, status = os.waitpid(-1, os.WNOHANG)
  except ChildProcessError:
    continue
  if pid:
    print(pid, os.waitstatus_to_exitcode(status), flush=True)
exec(asked['program'], {{'__name__': '__main__'}})
"""


class Forks:
  """The process that forks the others."""

  def __init__(self, imports, folder):
    self._folder, self._number, self._text = folder, 0, ''
    self._codes = collections.defaultdict(lambda: None)
    self._process = subprocess.Popen(
      [sys.executable, '-c', _FORKS.format(imports=imports)],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      # A fork has one thread, so there may be no others.
      env=cli.environment()
      | {'JAX_PLATFORMS': 'cpu', 'OPENBLAS_NUM_THREADS': '1'},
    )

  def start(self, program, *arguments):
    """A process that runs the text `program`, as `python -c` would."""
    files = [self._folder / f'{self._number}.{name}' for name in ('out', 'err')]
    self._number += 1
    asked = {
      'program': program,
      'arguments': arguments,
      'files': [str(file) for file in files],
    }
    self._process.stdin.write(json.dumps(asked).encode() + b'\n')
    self._process.stdin.flush()
    end = time.monotonic() + 120
    while (pid := self._heard(end)) is None:
      pass
    started = Fork(pid, files, self)
    cli.ends_with_the_test(started)
    return started

  def code(self, pid, end):
    """The exit code of a process; waits for it."""
    while self._codes[pid] is None:
      self._heard(end)
    return self._codes[pid]

  def _heard(self, end):
    """Reads a line: a code, which is kept, or the process that was started."""
    output = self._process.stdout
    while '\n' not in self._text:
      left = end - time.monotonic()
      if left < 0 or not select.select([output], [], [], left)[0]:
        raise TimeoutError
      found = os.read(output.fileno(), 1024)
      assert found, 'the process that forks others has ended'
      self._text += found.decode()
    line, _, self._text = self._text.partition('\n')
    pid, *code = map(int, line.split())
    if not code:
      return pid
    self._codes[pid] = code[0]
    return None

  def close(self):
    self._process.kill()
    self._process.wait()


class Fork:
  """What the tests need of `subprocess.Popen`."""

  def __init__(self, pid, files, forks):
    self.returncode = None
    self._pid, self._files, self._forks = pid, files, forks

  def kill(self):
    if self.returncode is None:
      with contextlib.suppress(ProcessLookupError):
        os.kill(self._pid, signal.SIGKILL)

  def communicate(self, timeout=120, said=''):
    """What was printed; `said` may come from a process that outlives it."""
    end = time.monotonic() + timeout
    self.returncode = self._forks.code(self._pid, end)
    while said not in self._files[1].read_text() and time.monotonic() < end:
      time.sleep(0.02)
    return [file.read_text() for file in self._files]
