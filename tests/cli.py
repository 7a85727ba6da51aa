"""The real command, for the tests of what it prints and how it ends."""

import contextlib
from importlib import metadata
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time
from unittest import mock

ROOT = pathlib.Path(__file__).parent.parent
CONFIG = '--config=configs/arithmetic.py'
SMALL = '--config=tests/small_config.py'
QUICK = (
  '--xla_backend_optimization_level=0',
  '--xla_llvm_disable_expensive_passes=true',
  # Newer ones have only the newer emitter, and end where they see the flag.
  *(
    ('--xla_cpu_use_fusion_emitters=false',)
    if metadata.version('jaxlib') < '0.11'
    else ()
  ),
  '--xla_cpu_parallel_codegen_split_count=1',
  # See `DEFAULT_SCHEDULER`. Without it learner/experts_test.py ends the process
  # (jaxlib 0.10.2).
  '--xla_cpu_enable_concurrency_optimized_scheduler=false',
)
"""XLA flags with which compiling takes a third of the time."""
DEFAULT_SCHEDULER = {'xla_cpu_enable_concurrency_optimized_scheduler': True}
"""Compiler options of programs whose collectives are many.

Without them a call in a hundred of a program in models/meshed.py gave NaN.
"""
JUDGE = '--config.rewards=({"name":"tests.judges:even","weight":1.0},)'


def environment(quick=True):
  """One device; unless `quick`, compiled as people's runs are."""
  flags = ' '.join(QUICK) if quick else ''
  return {
    **os.environ,
    'XLA_FLAGS': flags,
    'PYTHONPATH': str(ROOT),
    'COLUMNS': '80',
  }


_started = []


def kill_all():
  """Ends what a test that failed has left running."""
  while _started:
    _started.pop().kill()


def ends_with_the_test(process):
  """However the test ends."""
  _started.append(process)


def popen(*arguments, quick=True, **options):
  process = subprocess.Popen(
    [sys.executable, '-m', 'grpo_jax', *arguments],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    env=environment(quick),
    **{'cwd': ROOT, **options},
  )
  ends_with_the_test(process)
  return process


def command(*arguments, given=None, **options):
  process = popen(*arguments, stdin=subprocess.PIPE, **options)
  out, err = process.communicate(given, timeout=300)
  return subprocess.CompletedProcess(arguments, process.returncode, out, err)


def call(*arguments, given=None, cwd=ROOT):
  """As `command`, but in this process, where all is imported already.

  A process of its own takes seconds for its imports alone. What differs: this
  process has eight devices, and a signal would end the tests. What the command
  changes of the process is set back: streams, arguments, environment,
  directory, paths of modules, handlers of signals, logging, settings of JAX.
  """
  from grpo_jax.commands import main

  with (
    tempfile.TemporaryFile('w+') as out,
    tempfile.TemporaryFile('w+') as err,
    tempfile.TemporaryFile('w+') as stdin,
    set_back(),
    contextlib.chdir(cwd),
    mock.patch.object(main, '_prepare_process'),  # once in a process
    # Threads of other tests, beside which a program would not wait.
    mock.patch.object(main, '_IN_XLA', ()),
    mock.patch.object(sys, 'argv', ['grpo-jax', *map(str, arguments)]),
    mock.patch.object(sys, 'stdin', stdin),
    contextlib.redirect_stdout(out),
    contextlib.redirect_stderr(err),
  ):
    stdin.write(given or '')
    stdin.seek(0)
    code = 0
    try:
      main.run()
    except SystemExit as error:
      code = error.code
    texts = []
    for file in (out, err):
      file.seek(0)
      texts.append(file.read())
  return subprocess.CompletedProcess(arguments, code, *texts)


@contextlib.contextmanager
def set_back():
  """Sets back what a command changes of the process that it runs in."""
  from absl import logging
  import jax

  from grpo_jax.commands import together
  from grpo_jax.hosts import stop_signal

  path, hook = list(sys.path), sys.unraisablehook
  of_threads = threading.excepthook
  verbosity, settings = logging.get_verbosity(), dict(jax.config.values)
  handlers = {s: signal.getsignal(s) for s in stop_signal.Stop.SIGNALS}
  # Not `XLA_FLAGS`, which XLA has read: they name the programs that are kept.
  setting = {'PYTHONPATH': str(ROOT), 'COLUMNS': '80'}
  try:
    with (
      mock.patch.dict(os.environ, setting),
      mock.patch.object(together, 'STOP', stop_signal.Stop()),
    ):
      yield
  finally:
    sys.path[:], sys.unraisablehook = path, hook
    threading.excepthook = of_threads
    logging.set_verbosity(verbosity)
    for number, handler in handlers.items():
      signal.signal(number, handler)
    for name, value in settings.items():
      if jax.config.values[name] != value:
        jax.config.update(name, value)


# How the lines of a log begin: facts and phases are indented.
LOGGED = ('  ', 'warm-up ', 'rollout ', 'warning: ')


def assert_refused(done, words):
  assert done.returncode == 2, done.stderr
  lines = [
    line
    for line in done.stderr.splitlines()
    if line and not line.startswith(LOGGED)
  ]
  assert len(lines) == 1 and lines[0].startswith('grpo-jax: '), done.stderr
  assert words in lines[0]
  assert done.stdout == '' and 'Traceback' not in done.stderr


def wait_until(happened, process, limit_secs=120):
  """Until `happened()`; fails if the process ends first, or time is up."""
  end = time.monotonic() + limit_secs
  while not happened():
    time.sleep(0.02)
    late = time.monotonic() > end
    if late:
      process.kill()
    if late or process.poll() is not None:
      said = process.communicate()[1]
      raise AssertionError(f'late: {late}, code {process.returncode}: {said}')


def wait_for(workdir, step, process):
  """Until that many rollouts are done."""

  def done():
    path = workdir / 'metrics.jsonl'
    return path.exists() and len(path.read_text().splitlines()) > step

  wait_until(done, process)
