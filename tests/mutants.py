"""Mutation tests: is there a test that fails when a line of losses/ is wrong?

  python -m tests.mutants --workers 2              # the whole run, minutes
  python -m tests.mutants --only _ops --verbose    # one file

Every source file of `PACKAGES` is changed in one place at a time: comparisons
and signs flipped, factors and links dropped, constants and axes moved,
`stop_gradient` removed, and so on (`replacements` has the list). Each mutant is
loaded into this process under the real names, with a fresh copy of its package
and of that package's tests, and the test functions that reach the changed
lines run until one fails. A mutant that none of them notices has survived: it
needs a test, or a reason in `EQUIVALENT`.
"""

import argparse
import ast
import collections
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
import contextlib
import copy
import doctest
import functools
import importlib
import importlib.abc
import importlib.util
import inspect
import itertools
import json
from pathlib import Path
import re
import signal
import subprocess
import sys
import tempfile
import time
from types import CodeType
from typing import NamedTuple

import tests.conftest  # noqa: F401  (fake devices, before jax is imported)

import jax  # isort: skip
import pytest  # isort: skip

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ('losses', 'optim')
REQUIRED = 0.9  # share of mutants that must be killed
LIMIT_SECS = 120  # per mutant; a hang counts as killed

EQUIVALENT = {}
"""(file:function, source line, change) -> why no test can or should see it."""

TRIMMED = {
  'test_equal_rewards_give_exactly_zero': '2|3|8|64',
  'test_micro_batches_split_inside_groups_add_up': '3-(grpo|gmpo.*|stages)',
  'test_compiles_once': 'grpo|kl_cov|stages',
  'test_sharded_over_prompts': '.*-(dapo|kl_cov|stages)',
}
"""Slow tests, run after all others -> the parametrizations that are run."""



# Mutations.

_COMPARE = {
  ast.Gt: (ast.Lt, ast.GtE),
  ast.GtE: (ast.Lt, ast.Gt),
  ast.Lt: (ast.Gt, ast.LtE),
  ast.LtE: (ast.Gt, ast.Lt),
  ast.Eq: (ast.NotEq,),
  ast.NotEq: (ast.Eq,),
  ast.Is: (ast.IsNot,),
  ast.IsNot: (ast.Is,),
  ast.In: (ast.NotIn,),
  ast.NotIn: (ast.In,),
}
_OPERATOR = {
  ast.Add: ast.Sub,
  ast.Sub: ast.Add,
  ast.Mult: ast.Div,
  ast.Div: ast.Mult,
  ast.BitAnd: ast.BitOr,
  ast.BitOr: ast.BitAnd,
  ast.And: ast.Or,
  ast.Or: ast.And,
}
_NAME = {
  'minimum': 'maximum',
  'min': 'max',
  'argmin': 'argmax',
  'floor': 'ceil',
  'any': 'all',
}
_NAME |= {new: old for old, new in _NAME.items()}
_TEXT = {
  'population': 'sample',
  'k3': 'k2',
  'row': 'batch',
  'constant': 'linear',
}
_TEXT |= {new: old for old, new in _TEXT.items()}


def replacements(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
  """Yields what may stand in the place of one node, and what to call it."""
  match node:
    case ast.Compare():
      for place, operator in enumerate(node.ops):
        for other in _COMPARE[type(operator)]:
          new = copy.copy(node)
          new.ops = [*node.ops[:place], other(), *node.ops[place + 1 :]]
          yield new, ''
    case ast.BinOp(left, operator, right):
      if type(operator) in _OPERATOR:
        yield ast.BinOp(left, _OPERATOR[type(operator)](), right), ''
      if isinstance(operator, ast.Mult | ast.Div | ast.BitAnd):
        yield left, ''
      if isinstance(operator, ast.Mult | ast.BitAnd):
        yield right, ''
    case ast.BoolOp(operator, values):
      yield ast.BoolOp(_OPERATOR[type(operator)](), values), ''
    case ast.UnaryOp(ast.USub() | ast.Invert() | ast.Not(), operand):
      yield operand, ''
    case ast.keyword(arg='axis', value=ast.Constant(int(axis))):
      yield ast.keyword('axis', ast.Constant(0 if axis else 1)), ''
    case ast.keyword(arg='axis', value=ast.UnaryOp()):
      yield ast.keyword('axis', ast.Constant(0)), ''
    case ast.Constant(bool(value)):
      yield ast.Constant(not value), ''
    case ast.Constant(int(value) | float(value)):
      moved = value + 1 if isinstance(value, int) else 1.5 * value
      moved = {0: 1, 1: 0}.get(value, moved)
      yield ast.Constant(type(value)(moved)), ''
    case ast.Constant(str(value)) if value in _TEXT:
      yield ast.Constant(_TEXT[value]), ''
    case ast.Attribute(value, name) if name in _NAME:
      yield ast.Attribute(value, _NAME[name], node.ctx), ''
    case ast.Name(name) if name in _NAME:
      yield ast.Name(_NAME[name], node.ctx), ''
    case ast.Call(ast.Attribute(_, 'stop_gradient'), [argument]):
      yield argument, ''
    case ast.Call(ast.Attribute(_, 'where'), [condition, one, other]):
      swapped = [condition, other, one]
      yield ast.Call(node.func, swapped, node.keywords), 'branches swapped'
    case ast.Call(ast.Name('chain'), [_, _, *_] as links):
      for place, link in enumerate(links):
        rest = [*links[:place], *links[place + 1 :]]
        yield ast.Call(node.func, rest, []), f'without {ast.unparse(link)}'
    case ast.If(test, body, orelse):
      yield ast.If(_negated(test), body, orelse), f'not {_short(test)}'
    case ast.IfExp(test, body, orelse):
      yield ast.IfExp(_negated(test), body, orelse), f'not {_short(test)}'
    case ast.comprehension(target, iterator, [_, *_] as tests):
      new = [_negated(tests[0]), *tests[1:]]
      change = f'not {_short(tests[0])}'
      yield ast.comprehension(target, iterator, new, node.is_async), change


def _negated(test):
  return ast.UnaryOp(ast.Not(), test)


def _short(node):
  text = ' '.join(ast.unparse(node).split())
  return text if len(text) <= 40 else f'{text[:20]}...{text[-17:]}'


_SKIPPED = (ast.Import, ast.ImportFrom, ast.Raise, ast.Assert, ast.JoinedStr)
_SKIPPED_FIELDS = ('annotation', 'returns', 'decorator_list')


def _children(node):
  """(field, place in it or None, child) of what may be mutated in `node`."""
  for field, value in ast.iter_fields(node):
    if field in _SKIPPED_FIELDS:
      continue
    for place, child in enumerate(
      value if isinstance(value, list) else [value]
    ):
      docstring = isinstance(node, ast.Expr) and isinstance(child, ast.Constant)
      types = field == 'args' and place == 1 and _calls(node, 'isinstance')
      if isinstance(child, ast.AST) and not (docstring or types):
        yield field, place if isinstance(value, list) else None, child


def _calls(node, name):
  return isinstance(node, ast.Call) and getattr(node.func, 'id', '') == name


class Mutant(NamedTuple):
  """One change of one file."""

  path: str  # relative to the root
  function: str  # dotted, '' at module level
  lineno: int
  line: str  # the source line, stripped
  change: str
  reach: range  # the lines that run when the change matters
  code: CodeType

  @property
  def key(self):
    """The key of `EQUIVALENT`: it outlives edits elsewhere in the file."""
    where = self.path.removeprefix('grpo_jax/') + ':' + self.function
    return where, self.line, self.change


def mutants(path: str, text: str) -> list[Mutant]:
  """Every mutant of a file."""
  tree, lines = ast.parse(text), text.splitlines()
  made, seen = [], {}

  def mutate(parent, field, place, old, new, change, function, reach):
    values = getattr(parent, field)
    change = change or f'{_short(old)} -> {_short(new)}'
    if place is None:
      setattr(parent, field, new)
    else:
      values[place] = new
    ast.copy_location(new, old)
    code = compile(ast.fix_missing_locations(tree), path, 'exec')
    if place is None:
      setattr(parent, field, old)
    else:
      values[place] = old
    lineno = (
      old.target.lineno if isinstance(old, ast.comprehension) else old.lineno
    )
    line = lines[lineno - 1].strip()
    number = seen[function, line, change] = (
      seen.get((function, line, change), 0) + 1
    )
    change += f' #{number}' if number > 1 else ''
    made.append(Mutant(path, function, lineno, line, change, reach, code))

  def visit(parent, function, reach):
    for field, place, child in _children(parent):
      inner, inside = function, reach
      if isinstance(child, _SKIPPED) or _is_all(child):
        continue
      if isinstance(child, ast.FunctionDef | ast.ClassDef):
        inner = f'{function}.{child.name}'.lstrip('.')
        inside = range(child.body[0].lineno, child.end_lineno + 1)
      elif isinstance(child, ast.stmt):
        header = getattr(child, 'test', child)
        inside = range(child.lineno, header.end_lineno + 1)
      at = reach if isinstance(child, ast.comprehension) else inside
      for new, change in replacements(child):
        mutate(parent, field, place, child, new, change, inner, at)
      if not (isinstance(child, ast.keyword) and child.arg == 'axis'):
        visit(child, inner, inside)

  visit(tree, '', range(0))
  return made


def _is_all(node):
  return isinstance(node, ast.Assign) and '__all__' in ast.unparse(node.targets)


# Loading a mutant, and the tests that bind to it.


class Source(NamedTuple):
  """A module of the packages or of their tests, as it was at the start."""

  path: str
  code: CodeType
  text: str


def sources() -> dict[str, Source]:
  """Module name -> source, of `PACKAGES` and of their tests."""
  found = {}
  for top, package in itertools.product(('grpo_jax', 'tests'), PACKAGES):
    for file in sorted((ROOT / top / package).rglob('*.py')):
      path, text = str(file.relative_to(ROOT)), file.read_text()
      name = path.removesuffix('.py').removesuffix('/__init__')
      code = compile(text, path, 'exec')
      found[name.replace('/', '.')] = Source(path, code, text)
  return found


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
  """Imports from memory, with some of the code replaced."""

  def __init__(self, found, mutated):
    self.found, self.mutated = found, mutated

  def find_spec(self, fullname, path=None, target=None):
    if fullname not in self.found:
      return None
    path = self.found[fullname].path
    return importlib.util.spec_from_loader(
      fullname, self, origin=path, is_package=path.endswith('__init__.py')
    )

  def exec_module(self, module):
    source = self.found[module.__name__]
    code = self.mutated.get(source.path, source.code)
    module.__file__ = str(ROOT / source.path)
    exec(code, module.__dict__)


@contextlib.contextmanager
def loaded(found, mutated: dict[str, CodeType]):
  """Fresh copies under the real names; what was there before comes back."""
  before = {name: sys.modules.pop(name, None) for name in found}
  sys.meta_path.insert(0, finder := _Finder(found, mutated))
  try:
    yield
  finally:
    sys.meta_path.remove(finder)
    for name, module in before.items():
      sys.modules.pop(name, None)
      parent, _, last = name.rpartition('.')
      if module is not None:
        sys.modules[name] = module
        if parent in sys.modules:
          setattr(sys.modules[parent], last, module)
      elif hasattr(sys.modules.get(parent), last):
        delattr(sys.modules[parent], last)


_FIXTURES = {'monkeypatch': pytest.MonkeyPatch.context}


class Check(NamedTuple):
  """A test function with its parameters, or a module's doctests."""

  name: str
  run: Callable[[], None]


def _parametrizations(function):
  """(label, arguments) of each case of a test function."""
  axes = []
  for mark in getattr(function, 'pytestmark', ()):
    if mark.name != 'parametrize':
      continue
    call = dict(zip(('argnames', 'argvalues'), mark.args)) | mark.kwargs
    names, ids = call['argnames'], call.get('ids')
    names = names.split(',') if isinstance(names, str) else names
    names, axis = [name.strip() for name in names], []
    for place, value in enumerate(call['argvalues']):
      if isinstance(value, type(pytest.param())):
        value = value.values
      elif len(names) == 1:
        value = (value,)
      simple = isinstance(value[0], str | float | int)
      label = ids[place] if ids else value[0] if simple else place
      axis.append((str(label), dict(zip(names, value, strict=True))))
    axes.append(axis)
  for combination in itertools.product(*axes):
    arguments = {k: v for _, some in combination for k, v in some.items()}
    yield '-'.join(label for label, _ in combination), arguments


def _call(function, arguments, wide):
  with contextlib.ExitStack() as stack:
    if wide:  # what tests/losses/conftest.py does
      stack.enter_context(jax.enable_x64(True))
    for name in inspect.signature(function).parameters:
      if name not in arguments:
        fixture = stack.enter_context(_FIXTURES[name]())
        arguments = {**arguments, name: fixture}
    function(**arguments)


def _doctests(module):
  for test in doctest.DocTestFinder().find(module, module.__name__):
    runner = doctest.DocTestRunner(verbose=False)
    if runner.run(test, out=lambda text: None).failed:
      raise AssertionError(f'doctest of {test.name}')


def checks(found, package: str) -> list[Check]:
  """The test functions of a package from fresh imports, the slow ones last."""
  made = []
  for name in sorted(found):
    module = importlib.import_module(name)
    if name.startswith(f'tests.{package}.') and name.endswith('_test'):
      made += _functions(name, module, wide=package == 'losses')
    elif name.startswith(f'grpo_jax.{package}') and '>>>' in found[name].text:
      run = functools.partial(_doctests, module)
      made.append(Check(f'doctest of {name}', run))
  return sorted(made, key=lambda check: _is_slow(check.name))


def _functions(name, module, wide):
  for key, function in vars(module).items():
    if key.startswith('test_') and callable(function):
      for label, arguments in _parametrizations(function):
        if re.fullmatch(TRIMMED.get(key, '.*'), label):
          run = functools.partial(_call, function, arguments, wide)
          yield Check(f'{name}::{key}[{label}]', run)


def _is_slow(name):
  return any(key in name for key in TRIMMED)


# Running the checks.


class Result(NamedTuple):
  """What became of a mutant."""

  path: str
  lineno: int
  key: tuple[str, str, str]
  killer: str  # the check that failed; '' if the mutant survived
  secs: float


def failure(check: Check) -> BaseException | None:
  """What the check raises, None if it passes."""
  try:
    check.run()
  except (KeyboardInterrupt, SystemExit):
    raise
  except pytest.skip.Exception:
    return None
  except BaseException as error:  # pytest.fail raises no Exception
    return error
  return None


@contextlib.contextmanager
def _time_limit(secs):
  def stop(*_):
    raise TimeoutError(f'not done after {secs} s')

  before = signal.signal(signal.SIGALRM, stop)
  signal.setitimer(signal.ITIMER_REAL, secs, 5)
  try:
    yield
  finally:
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def judge(found, mutant: Mutant, names: Iterable[str]) -> Result:
  """Runs the named checks on a mutant until one fails."""
  start, killer = time.perf_counter(), ''
  package = mutant.path.split('/')[1]
  try:
    with _time_limit(LIMIT_SECS), loaded(found, {mutant.path: mutant.code}):
      every = {check.name: check for check in checks(found, package)}
      killed = (
        name for name in names if name in every and failure(every[name])
      )
      killer = next(killed, '')
  except Exception as error:
    killer = f'import: {error!r}'
  secs = time.perf_counter() - start
  return Result(mutant.path, mutant.lineno, mutant.key, killer, secs)


def reach(found, package: str) -> dict[str, set]:
  """Runs every check on the code as it is; returns the lines that each visits.

  The key `''` has the lines that run at import, on which every check depends.

  Raises:
    RuntimeError: A check fails without a mutant, so it says nothing.
  """
  visited, lines = {}, set()
  files = {source.path for source in found.values()}

  def trace(frame, event, arg):
    if frame.f_code.co_filename not in files:
      return None
    lines.add((frame.f_code.co_filename, frame.f_lineno))
    return trace

  with loaded(found, {}):
    sys.settrace(trace)
    try:
      every = checks(found, package)
      visited[''] = set(lines)
      for check in every:
        lines.clear()
        if error := failure(check):
          raise RuntimeError(f'{check.name} fails without a mutant: {error!r}')
        visited[check.name] = set(lines)
    finally:
      sys.settrace(None)
  return visited


def run(shard=0, shards=1, only='', verbose=False) -> list[Result]:
  """Judges every `shards`-th mutant of the files whose path has `only`."""
  found, results = sources(), []
  for package in PACKAGES:
    chosen = [
      mutant
      for source in found.values()
      if source.path.startswith(f'grpo_jax/{package}/') and only in source.path
      for mutant in mutants(source.path, source.text)
    ]
    if not chosen[shard::shards]:
      continue
    visited, kills = reach(found, package), collections.Counter()
    for mutant in chosen[shard::shards]:
      lines = {(mutant.path, lineno) for lineno in mutant.reach}
      at_import = not lines or lines & visited['']
      names = [n for n in visited if n and (at_import or lines & visited[n])]
      names.sort(key=lambda n: (_is_slow(n), -kills[mutant.path, n]))  # noqa: B023
      results.append(judge(found, mutant, names))
      kills[mutant.path, results[-1].killer] += 1
      if verbose:
        print(*results[-1], len(names), flush=True)
  return results


def run_in_workers(workers: int, only='', verbose=False) -> list[Result]:
  """`run`, sharded over processes."""
  if workers == 1:
    return run(only=only, verbose=verbose)
  results = []
  with tempfile.TemporaryDirectory() as folder:
    started = []
    for shard in range(workers):
      file = Path(folder) / f'{shard}.json'
      command = [sys.executable, '-m', 'tests.mutants', '--only', only]
      command += ['--shard', f'{shard}/{workers}', '--json', str(file)]
      command += ['--verbose'] * verbose
      started.append((subprocess.Popen(command, cwd=ROOT), file))
    for process, file in started:
      if process.wait():
        raise RuntimeError(f'{process.args} failed')
      for *rest, key, killer, secs in json.loads(file.read_text()):
        results.append(Result(*rest, tuple(key), killer, secs))
  return results


def report(results: list[Result], only='') -> tuple[str, bool]:
  """The table, and whether all is well."""
  survivors = [result for result in results if not result.killer]
  lines = [f'{"file":42}{"mutants":>8}{"killed":>8}{"share":>8}']
  rows = [
    (path, [r for r in results if r.path == path])
    for path in sorted({r.path for r in results})
  ]
  for path, some in [*rows, ('total', results)]:
    killed = sum(bool(result.killer) for result in some)
    share = killed / max(1, len(some))
    lines.append(f'{path:42}{len(some):8}{killed:8}{share:8.1%}')
  unexplained = [r for r in survivors if r.key not in EQUIVALENT]
  for title, group in (
    ('accepted', [r for r in survivors if r.key in EQUIVALENT]),
    ('SURVIVED, without a reason', unexplained),
  ):
    lines += [f'{title}: {len(group)}'] if group else []
    for result in sorted(group):
      place, line, change = result.key
      lines.append(f'  {result.path}:{result.lineno}  {line}\n    {change}')
      lines.append(f'    {EQUIVALENT.get(result.key, f"key: {result.key}")}')
  stale = set(EQUIVALENT) - {result.key for result in survivors}
  stale = [key for key in stale if only in 'grpo_jax/' + key[0]]
  lines += [
    f'listed as a survivor, but is none: {key}' for key in sorted(stale)
  ]
  return '\n'.join(lines), share >= REQUIRED and not unexplained and not stale


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--workers', type=int, default=1, help='processes')
  parser.add_argument('--only', default='', help='part of a file name')
  parser.add_argument(
    '--verbose', action='store_true', help='a line per mutant'
  )
  parser.add_argument('--shard', help='i/n: judge every n-th mutant from i')
  parser.add_argument('--json', help='write the results there, print no table')
  args = parser.parse_args()
  if args.json:
    shard, shards = map(int, args.shard.split('/'))
    results = run(shard, shards, args.only, args.verbose)
    Path(args.json).write_text(json.dumps(results))
    return 0
  start = time.perf_counter()
  results = run_in_workers(args.workers, args.only, args.verbose)
  text, good = report(results, args.only)
  print(f'{text}\n{time.perf_counter() - start:.0f} s')
  return 0 if good else 1


if __name__ == '__main__':
  sys.exit(main())
