"""Mutation tests: is there a test that fails when a line is wrong?

  python -m tests.mutants --workers 2              # losses, optim: minutes
  python -m tests.mutants --only _ops --verbose    # one file of them
  python -m tests.mutants --state mutants.jsonl    # a sample of others: hours

The last is in `mutants_sample`, the others are here: each file of `PACKAGES` is
changed in one place at a time (`replacements` says how) and loaded into this
process under the real names, with a fresh copy of its package and tests. The
test functions that reach the changed lines run until one fails. A mutant that
none of them notices needs a test, or a reason in `EQUIVALENT`.
"""

import argparse
import collections
from collections.abc import Callable
from collections.abc import Iterable
from concurrent import futures
import contextlib
import functools
import importlib
import importlib.abc
import importlib.util
import inspect
import itertools
import multiprocessing
from pathlib import Path
import re
import signal
import sys
import time
from types import CodeType
from typing import NamedTuple

import tests.conftest  # noqa: F401  (fake devices, before jax is imported)

import jax  # isort: skip
import pytest  # isort: skip
from tests import mutants_sample  # isort: skip
from tests.mutants_changes import Mutant  # isort: skip
from tests.mutants_changes import mutants  # isort: skip
from tests.mutants_equivalent import EQUIVALENT  # isort: skip
from tests.mutants_report import REQUIRED  # isort: skip
from tests.mutants_report import Result  # isort: skip
from tests.mutants_report import share_killed  # isort: skip
from tests.mutants_report import survivors  # isort: skip
from tests.mutants_report import table  # isort: skip

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ('losses', 'optim')
LIMIT_SECS = 120  # per mutant; a hang counts as killed

_BARE = (
  '(add|adaptive|best|center_by_batch|clip_adv|drop_trunc|entropy_target|'
  'geometric|mask|stages|subtract|truncate).*'
)  # of no method, so without an oracle
TRIMMED = {
  'test_value_and_gradient': '.*-0|(deepseek.*|grpo_s)-[12]',
  'test_garbage_where_nobody_owns_the_place': '(dapo|gdpo.*|gspo|kl_cov)-inf',
  'test_padding_is_inert': _BARE,
  'test_an_invalid_completion_is_as_if_absent': _BARE,
  'test_autodiff_equals_frozen_differences': _BARE,
  'test_permutations_permute_the_gradient': 'best.*|kl_cov|stages',
  'test_extreme_log_ratios_stay_finite_in_float32':
    f'.*-({_BARE}|dppo.*|gcpo|grpo_s|gspo|sapo|vespo)',
  'test_micro_batches_split_inside_groups_add_up': 'grpo|gmpo.*|stages',
  'test_one_trace_over_sharded_prompts_is_right_for_every_case': 'stages',
  'test_every_method_has_a_gradient_of_its_own': 'none',
  'test_float32_matches_float64': 'none',
  'test_sharded_over_prompts': '.*-kl_cov',
  # `diagnostics` is not loaded anew, and keeps the functions of the first copy.
  'test_the_audits_have_it_under_the_same_names': 'none',
}  # fmt: skip
"""Slow tests, of many parametrizations mostly -> those of them that are run."""


# Loading a mutant, and the tests that bind to it.


class Source(NamedTuple):
  """A module of the packages or of their tests, as it was at the start."""

  path: str
  text: str
  code: CodeType


@functools.cache
def sources() -> dict[str, Source]:
  """Module name -> source, of `PACKAGES` and of their tests."""
  found = {}
  for top, package in itertools.product(('grpo_jax', 'tests'), PACKAGES):
    for file in sorted((ROOT / top / package).rglob('*.py')):
      path, text = str(file.relative_to(ROOT)), file.read_text()
      name = path.removesuffix('.py').removesuffix('/__init__')
      code = compile(text, path, 'exec')
      found[name.replace('/', '.')] = Source(path, text, code)
  return found


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
  """Imports from memory, with some of the code replaced."""

  def __init__(self, mutated):
    self.mutated = mutated

  def find_spec(self, fullname, path=None, target=None):
    if fullname not in sources():
      return None
    package = sources()[fullname].path.endswith('__init__.py')
    return importlib.util.spec_from_loader(fullname, self, is_package=package)

  def exec_module(self, module):
    source = sources()[module.__name__]
    module.__file__ = str(ROOT / source.path)
    exec(self.mutated.get(source.path, source.code), module.__dict__)


@contextlib.contextmanager
def loaded(mutated: dict[str, CodeType]):
  """Fresh copies under the real names; what was there before comes back."""
  before = {name: _forget(name) for name in sources()}
  sys.meta_path.insert(0, finder := _Finder(mutated))
  try:
    yield
  finally:
    sys.meta_path.remove(finder)
    for name, module in before.items():
      _forget(name)
      if module is not None:
        sys.modules[name] = module
        parent, _, last = name.rpartition('.')
        setattr(sys.modules[parent], last, module)


def _forget(name):
  parent, _, last = name.rpartition('.')
  if parent in sys.modules:
    vars(sys.modules[parent]).pop(last, None)
  return sys.modules.pop(name, None)


def checks(package: str) -> dict[str, Callable[[], None]]:
  """Test functions with their parameters, freshly imported."""
  made = {}
  for name in sources():
    if name.startswith(f'tests.{package}.') and name.endswith('_test'):
      made |= _functions(name, wide=package == 'losses')
  return made


def _functions(name, wide):
  for key, function in vars(importlib.import_module(name)).items():
    if key.startswith('test_') and callable(function):
      for label, arguments in _parametrizations(function):
        if re.fullmatch(TRIMMED.get(key, '.*'), label):
          run = functools.partial(_call, function, arguments, wide)
          yield f'{name}::{key}[{label}]', run


_PARAM = type(pytest.param())  # a case with marks of its own


def _parametrizations(function):
  """(label, arguments) of each case of a test function."""
  axes = []
  for mark in getattr(function, 'pytestmark', ()):
    if mark.name != 'parametrize':
      continue
    call = dict(zip(('argnames', 'argvalues'), mark.args)) | mark.kwargs
    names, ids, axis = call['argnames'], call.get('ids'), []
    names = re.split(r',\s*', names) if isinstance(names, str) else names
    for place, value in enumerate(call['argvalues']):
      if isinstance(value, _PARAM):
        value = value.values
      elif len(names) == 1:
        value = (value,)
      simple = isinstance(value[0], str | float | int)
      label = value[0] if simple else place
      if callable(ids):
        label = ids(value[0])
      elif ids:
        label = ids[place]
      axis.append((str(label), dict(zip(names, value, strict=True))))
    axes.append(axis)
  for combination in itertools.product(*axes):
    arguments = {k: v for _, some in combination for k, v in some.items()}
    yield '-'.join(label for label, _ in combination), arguments


def _call(function, arguments, wide):
  with contextlib.ExitStack() as stack:
    if wide:  # what tests/losses/conftest.py does
      stack.enter_context(jax.enable_x64(True))
    if 'monkeypatch' in inspect.signature(function).parameters:
      patch = stack.enter_context(pytest.MonkeyPatch.context())
      arguments = {**arguments, 'monkeypatch': patch}
    function(**arguments)


def failure(check: Callable[[], None]) -> BaseException | None:
  """What the check raises, None if it passes."""
  try:
    check()
  except (KeyboardInterrupt, SystemExit):
    raise
  except BaseException as error:  # pytest.fail raises no Exception
    return None if isinstance(error, pytest.skip.Exception) else error
  return None


# The run.


def compiled(mutant: Mutant) -> CodeType:
  """The code of a mutated file."""
  texts = {source.path: source.text for source in sources().values()}
  return compile(mutant.applied(texts[mutant.path]), mutant.path, 'exec')


def _time_is_up(*_):
  raise TimeoutError(f'not done after {LIMIT_SECS} s')


def judge(mutant: Mutant, names: Iterable[str]) -> Result:
  """Runs the named checks on a mutant until one fails."""
  start, killer = time.perf_counter(), ''
  before = signal.signal(signal.SIGALRM, _time_is_up)
  signal.setitimer(signal.ITIMER_REAL, LIMIT_SECS, 5)
  try:
    with loaded({mutant.path: compiled(mutant)}):
      every = checks(mutant.path.split('/')[1])
      killer = next((n for n in names if n in every and failure(every[n])), '')
  except Exception as error:
    killer = f'import: {error!r}'
  finally:
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
  secs = time.perf_counter() - start
  return Result(mutant.path, mutant.lineno, mutant.key, killer, secs)


def visits(package: str) -> dict[str, tuple[set, float]]:
  """Lines that each check visits, and its seconds once all is compiled.

  The key `''` has the lines that run at import, on which every check depends.

  Raises:
    RuntimeError: A check fails without a mutant, so it says nothing.
  """
  visited, lines = {}, set()
  files = {source.path for source in sources().values()}

  def trace(frame, event, arg):
    if frame.f_code.co_filename not in files:
      return None
    lines.add((frame.f_code.co_filename, frame.f_lineno))
    return trace

  @contextlib.contextmanager
  def traced():
    lines.clear()
    before = sys.gettrace()
    sys.settrace(trace)
    try:
      yield
    finally:
      sys.settrace(before)

  with loaded({}):
    with traced():
      every = checks(package)
    visited[''] = set(lines), 0.0
    forget = importlib.import_module('tests.losses.evaluated').forget
    for name, check in every.items():
      must_pass(name, check)  # and compiles: untraced that is much faster
      forget()  # what it shares with others, it would neither visit nor pay
      start = time.perf_counter()
      with traced():
        failure(check)
      visited[name] = set(lines), time.perf_counter() - start
  return visited


def must_pass(name: str, check: Callable[[], None]) -> None:
  """Raises a RuntimeError if the check fails."""
  if error := failure(check):
    raise RuntimeError(f'{name} fails without a mutant: {error!r}')


def run(shard=0, shards=1, only='', verbose=False) -> list[Result]:
  """Judges every `shards`-th mutant of the files whose path has `only`."""
  results = []
  for package in PACKAGES:
    chosen = [
      mutant
      for source in sources().values()
      if source.path.startswith(f'grpo_jax/{package}/') and only in source.path
      for mutant in mutants(source.path, source.text)
    ][shard::shards]
    visited = visits(package) if chosen else {}
    kills = collections.Counter()
    for mutant in chosen:
      lines = {(mutant.path, lineno) for lineno in mutant.reach}
      names = [n for n in visited if n and lines & visited[n][0]]
      if not names and (not lines or lines & visited[''][0]):
        names = [name for name in visited if name]
      # Cheap ones first, and those that have killed in this file before.
      rank = {n: visited[n][1] / (1 + kills[mutant.path, n]) for n in names}
      results.append(judge(mutant, sorted(names, key=rank.get)))
      kills[mutant.path, results[-1].killer] += 1
      if verbose:
        print(*results[-1], flush=True)
    if chosen:
      with loaded({}):
        for name, check in checks(package).items():
          must_pass(name, check)  # still: no mutant left anything behind
  return results


def report(results: list[Result], only='') -> tuple[str, bool]:
  """The table, and whether all is well."""
  keys = {result.key for result in results if not result.killer}
  stale = {
    key
    for key in set(EQUIVALENT) - keys
    if key[0].startswith(PACKAGES) and only in f'grpo_jax/{key[0]}'
  }
  lines = [*table(results), *survivors(results, EQUIVALENT)]
  lines += [f'listed, but no survivor: {key}' for key in sorted(stale)]
  enough = share_killed(results) >= REQUIRED
  return '\n'.join(lines), enough and keys <= set(EQUIVALENT) and not stale


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--workers', type=int, default=1, help='processes')
  parser.add_argument('--only', default='', help='part of a file name')
  parser.add_argument('--verbose', action='store_true', help='report each')
  mutants_sample.add_options(parser)
  args, start = parser.parse_args(), time.perf_counter()
  given = {
    key for key in vars(args) if parser.get_default(key) != getattr(args, key)
  }
  if args.state and given & {'only', 'verbose'}:
    parser.error('--only and --verbose are not for a sample; --paths is')
  if not args.state and given & {'paths', 'number', 'seed', 'budget', 'again'}:
    parser.error(
      '--paths, --number, --seed, --budget and --again are for a sample: add '
      '--state=FILE'
    )
  try:
    text, good = (mutants_sample.run if args.state else every)(args)
  except ValueError as error:
    parser.error(str(error))
  print(f'{text}\n{time.perf_counter() - start:.0f} s')
  return 0 if good else 1


def every(args: argparse.Namespace) -> tuple[str, bool]:
  """Judges every mutant of `PACKAGES`."""
  spawn = multiprocessing.get_context('spawn')
  with futures.ProcessPoolExecutor(args.workers, mp_context=spawn) as pool:
    shards = [
      pool.submit(run, shard, args.workers, args.only, args.verbose)
      for shard in range(args.workers)
    ]
    results = [result for shard in shards for result in shard.result()]
  return report(results, args.only)


if __name__ == '__main__':
  sys.exit(main())
