"""Eight fake CPU devices, set before jax is imported; strict broadcasting.

Most of the suite is compilation. So the tests in this process compile without
LLVM's optimizations and with the older, simpler emitter of fused loops, in one
piece: a third of the time that the defaults take. What they compile, down to
single operations, is kept for the time of one test run and shared by workers.
"""

import atexit
import contextlib
import gc
import importlib
import importlib.util
import os
import pathlib
import shutil
import tempfile
import threading

from tests import cli

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ['HF_HUB_OFFLINE'] = '1'  # a test that asks, asks a stand-in
# Otherwise each of the hundreds of processes that the tests start would compile
# what it imports.
os.environ.pop('PYTHONDONTWRITEBYTECODE', None)
os.environ['XLA_FLAGS'] = ' '.join(
  [
    os.environ.get('XLA_FLAGS', ''),
    '--xla_force_host_platform_device_count=8',
    *cli.QUICK,
  ]
)
if 'JAX_COMPILATION_CACHE_DIR' not in os.environ:  # workers inherit it
  _cache = tempfile.mkdtemp(prefix='grpo_jax_tests_')
  os.environ['JAX_COMPILATION_CACHE_DIR'] = _cache
  os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0'
  atexit.register(shutil.rmtree, _cache, ignore_errors=True)

import jax  # noqa: E402
from jax._src.interpreters import mlir  # noqa: E402
import pytest  # noqa: E402

jax.config.update('jax_numpy_rank_promotion', 'raise')

TESTS = pathlib.Path(__file__).parent
_MOST_MAPS = 20_000
_MOST_PROGRAMS = 200  # of a context, which keeps the constants of all of them

# Tracing makes millions of small objects, and hardly one of them in a cycle: a
# twentieth of the time went into looking.
gc.set_threshold(100_000, 50, 100)


def _share_contexts(make):
  """Makes one context of MLIR for many programs, which JAX makes for each.

  That takes 4 ms, a tenth of the time of the losses' tests, most of whose
  programs are a single operation. Other threads lower beside this one, each
  program in a context of its own.
  """
  kept, uses = None, 0

  def shared():
    nonlocal kept, uses
    if threading.current_thread() is not threading.main_thread():
      return make()
    if uses % _MOST_PROGRAMS == 0:
      kept = make()
    uses += 1
    return kept

  mlir.make_ir_context = shared


if hasattr(mlir, 'make_ir_context'):  # it is JAX's own, and may go
  _share_contexts(mlir.make_ir_context)


# The packages that some doctests need, and not everyone has.
_DOCTESTS_NEED = {
  'math_equivalence': 'math_verify',
  'json_schema': 'jsonschema',
  'ReasoningGymSource': 'reasoning_gym',
}


def pytest_sessionstart(session):
  """Workers share the reading of the tests.

  What a process is the first to import, it compiles, and pytest rewrites the
  asserts of tests: twenty seconds, which all workers would spend on one file
  after the other at the same time. So each begins with files of its own.
  """
  workers = int(os.environ.get('PYTEST_XDIST_WORKER_COUNT', 1))
  if workers == 1 or session.config.option.file_or_dir:
    return
  own = int(os.environ['PYTEST_XDIST_WORKER'].removeprefix('gw'))
  files = sorted(TESTS.rglob('*_test.py'))
  for first in range(workers):
    for path in files[(own + first) % workers :: workers]:
      names = path.relative_to(TESTS.parent).with_suffix('').parts
      with contextlib.suppress(Exception, pytest.skip.Exception):
        importlib.import_module('.'.join(names))  # who collects it says why not


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path):
  """Tests have no doctests: only those of the package are looked for."""
  found = yield
  if file_path.is_relative_to(TESTS):
    return [module for module in found if type(module) is pytest.Module]
  return found


def pytest_collection_modifyitems(items):
  """Marks the doctests, which have no line for it, as `quick`."""
  for item in items:
    if isinstance(item, pytest.DoctestItem):
      item.add_marker('quick')
      package = _DOCTESTS_NEED.get(item.name.rpartition('.')[2])
      if package and importlib.util.find_spec(package) is None:
        item.add_marker(pytest.mark.skip(f'{package} is not installed'))


@pytest.fixture(autouse=True, scope='module')
def programs_are_dropped():
  """Before a worker holds more programs than Linux maps for one process.

  Every compiled program takes some of the 65,530 memory maps that a process may
  have. Without them XLA ends the process. What is dropped here is read from the
  directory of compiled programs when it is needed again.
  """
  yield
  maps = pathlib.Path('/proc/self/maps')
  if maps.exists() and maps.read_bytes().count(b'\n') > _MOST_MAPS:
    jax.clear_caches()
    gc.collect()


@pytest.fixture(autouse=True)
def no_process_is_left():
  """What a test has started ends with it."""
  yield
  cli.kill_all()
