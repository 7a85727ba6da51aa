"""A sample of mutants, judged by pytest; `tests.mutants --state FILE` runs it.

The files of `PATHS` need devices, processes and fixtures, and one mutant of
theirs takes a minute. So a random sample of their mutants is judged. It tells
which share of all of them the tests would kill, with a confidence interval. All
that is found is written into a file at once, so a run that was stopped or
killed goes on from there.

Test files are asked from the nearest to the farthest (`mutants_near`), in
processes of one, two, four and so on of them, until a test fails. Each test
file runs once without a mutant before that. If it fails then, it is left out.
Its tests that enter the changed function then are asked. A survivor that is
judged again is also shown to the other tests of these files.
"""

import argparse
import collections
from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from concurrent import futures
import hashlib
import itertools
import json
import os
from pathlib import Path
import queue
import random
import signal
import statistics
import tempfile
import threading
import time

from tests.mutants_changes import Mutant
from tests.mutants_changes import mutants
from tests.mutants_equivalent import EQUIVALENT
from tests.mutants_near import Nearness
from tests.mutants_pytest import Copy
from tests.mutants_pytest import Ran
from tests.mutants_pytest import Stopped
from tests.mutants_pytest import is_slow
from tests.mutants_pytest import tracked
from tests.mutants_report import REQUIRED
from tests.mutants_report import Result
from tests.mutants_report import interval
from tests.mutants_report import share_killed
from tests.mutants_report import survivors
from tests.mutants_report import table

ROOT = Path(__file__).resolve().parents[1]
PATHS = ('learner', 'models', 'engines', 'episodes', 'rollouts', 'run', 'hosts')
MEASURE_SECS = 1800.0  # for one test file without a mutant

Key = tuple[str, str, str]


def add_options(parser: argparse.ArgumentParser) -> None:
  group = parser.add_argument_group('a sample of mutants, judged by pytest')
  group.add_argument(
    '--state',
    default='',
    metavar='FILE',
    help='judge a sample; the file keeps what is done, and the same command '
    'goes on after a stop',
  )
  group.add_argument(
    '--paths',
    nargs='+',
    default=PATHS,
    metavar='PATH',
    help=f'folders or files of grpo_jax/; default: {" ".join(PATHS)}',
  )
  group.add_argument('--number', type=int, default=300, help='of mutants')
  group.add_argument('--seed', type=int, default=0, help='of the sample')
  group.add_argument(
    '--budget',
    type=float,
    default=300,
    metavar='SECS',
    help='ask tests about a mutant until those asked take this much CPU time '
    'without it; then it counts as survived',
  )
  group.add_argument(
    '--again',
    action='store_true',
    help='judge the survivors anew, as after a test was added, and more '
    'thoroughly: tests that do not enter the changed function themselves are '
    'asked too',
  )


def sources(root: Path) -> dict[str, str]:
  """Path -> text of the package and its tests."""
  return {
    str(file.relative_to(root)): file.read_text()
    for top in ('grpo_jax', 'tests')
    for file in sorted((root / top).rglob('*.py'))
  }


def population(texts: Mapping[str, str], paths: Iterable[str]) -> list[Mutant]:
  """Every mutant of the files at or below the paths, sorted by file.

  Raises:
    ValueError: There is no file at or below one of the paths.
  """
  chosen = set()
  for path in paths:
    full = f'grpo_jax/{path.strip("/")}'
    found = {p for p in texts if p == full or p.startswith(f'{full}/')}
    if not found:
      raise ValueError(
        f'--paths: there is no Python file at or below {full}; paths are '
        'relative to grpo_jax/, as in learner or run/loop.py'
      )
    chosen |= found
  return [m for path in sorted(chosen) for m in mutants(path, texts[path])]


def sample(every: Collection[Mutant], number: int, seed: int) -> list[Mutant]:
  """Some of the mutants, stratified by file, in random order.

  Every mutant is chosen with the same probability. A file's share of the sample
  is its share of all mutants, up to one mutant. The first of the sample are a
  random sample too, so also a stopped run tells a share without bias.

  Raises:
    ValueError: The number is not positive.
  """
  if number < 1:
    raise ValueError(f'--number={number}: at least one mutant must be judged')
  rng = random.Random(seed)
  by_file = collections.defaultdict(list)
  for mutant in every:
    by_file[mutant.path].append(mutant)
  row = []
  for path in sorted(by_file):
    rng.shuffle(by_file[path])
    row += by_file[path]
  number = min(number, len(row))
  # One of each stretch of the row, at the same random place in all of them.
  place = rng.random()
  chosen = [row[int((k + place) * len(row) / number)] for k in range(number)]
  rng.shuffle(chosen)
  return chosen


class State:
  """What is known so far, in a file of JSON lines to which lines are added."""

  def __init__(self, file: Path, settings: dict, chosen: Collection[Mutant]):
    """Reads the file, or begins it with the settings and the sample.

    Raises:
      ValueError: The file holds a sample of other settings, or something else.
    """
    self.file, self._lock = file, threading.Lock()
    self.results: dict[Key, Result] = {}
    self.tests: dict[str, dict] = {}
    text = file.read_text() if file.exists() else ''
    whole = text[: text.rfind('\n') + 1]  # a killed tool may leave half a line
    try:
      records = [json.loads(line) for line in whole.splitlines()]
      head = records[0]['sample'] if records else None
    except (ValueError, KeyError, TypeError):
      raise ValueError(
        f'--state={file}: this file is not one that this command has written; '
        'name another, or one that does not exist yet'
      ) from None
    if head is None:
      self.keys = [mutant.key for mutant in chosen]
      file.write_text('')
      self._add(sample=settings, keys=self.keys)
      return
    if head != settings:
      raise ValueError(
        f'--state={file}: this file has a sample of {_told(head)}, and '
        f'{_told(settings)} was asked for; ask for the same, or name another '
        'file'
      )
    if whole != text:
      file.write_text(whole)
    self.keys = [tuple(key) for key in records[0]['keys']]
    for record in records[1:]:
      if 'test' in record and not record['failure']:
        self.tests[record['test']] = record
      elif 'mutant' in record:
        self._take(record)

  def _take(self, record):
    path, lineno, key, killer, secs = record['mutant']
    result = Result(path, lineno, tuple(key), killer, secs)
    self.results[result.key] = result

  def _add(self, **record):
    with self._lock, self.file.open('a') as file:
      file.write(json.dumps(record) + '\n')

  def add_result(self, result: Result, asked: list[str]) -> None:
    self._add(mutant=result, asked=asked)
    with self._lock:
      self.results[result.key] = result

  def add_test(self, test: str, digest: str, ran: Ran) -> dict:
    record = {'test': test, 'digest': digest, **ran._asdict()}
    self._add(**record)
    self.tests[test] = record
    return record


def _told(settings):
  return ', '.join(f'--{key}={value}' for key, value in settings.items())


class Judge:
  """Judges mutants: which tests are asked, and what they say."""

  def __init__(
    self,
    texts: Mapping[str, str],
    state: State,
    budget: float,
    thorough: bool = True,
  ):
    self._texts, self._state, self._budget = texts, state, budget
    self._thorough = thorough
    self._near = Nearness(texts)
    self._locks = collections.defaultdict(threading.Lock)
    whole = ''.join(t for p, t in texts.items() if p.startswith('grpo_jax/'))
    self._package = hashlib.sha256(whole.encode())
    self._sound = set()  # what has killed, and passes without a mutant

  def measured(self, test: str, copy: Copy) -> dict:
    """The fields of `Ran` for a test file without a mutant."""
    digest = self._package.copy()
    digest.update(self._texts[test].encode())
    name = digest.hexdigest()[:16]
    with self._locks[test]:
      known = self._state.tests.get(test)
      if known is None or known['digest'] != name:
        ran = copy.run([test], MEASURE_SECS, record=True)
        known = self._state.add_test(test, name, ran)
    return known

  def __call__(self, mutant: Mutant, copy: Copy) -> tuple[Result, list[str]]:
    """What became of a mutant, and the test files that were asked."""
    start, killer, asked = time.perf_counter(), '', []
    for direct in (True, False) if self._thorough else (True,):
      parts = self._parts(mutant, copy, direct)
      number = 1
      while not killer and (batch := list(itertools.islice(parts, number))):
        killer = self._failure(mutant, copy, batch)
        asked += [file for file, _ in batch if file not in asked]
        number *= 2
    secs = time.perf_counter() - start
    result = Result(mutant.path, mutant.lineno, mutant.key, killer, secs)
    self._state.add_result(result, asked)
    return result, asked

  def _parts(self, mutant, copy, direct) -> Iterator[tuple[str, list]]:
    """Test files within the budget, and those of their tests to ask.

    Args:
      mutant: Is to be judged.
      copy: Is where test files are measured.
      direct: Whether to ask the tests that enter the changed function, or the
        other ones of these files: another test may have entered it for them,
        as when it has compiled what they call, or another Python may.
    """
    spent = 0.0
    for file in self._near.tests(mutant.path):
      if spent >= self._budget:
        return
      known = self.measured(file, copy)
      numbers = enter(known, mutant)
      others = set(range(len(known['tests']))) - set(numbers)
      if not numbers:
        others = set(known['started'])
      if not known['failure'] and (numbers or others):
        asked = [
          known['tests'][k] for k in sorted(numbers if direct else others)
        ]
        spent += known['cpu_secs'] if numbers else sum(t for _, t in asked)
        if asked:
          yield file, asked

  def _failure(self, mutant: Mutant, copy: Copy, batch: list) -> str:
    """What fails with the mutant in these tests, '' if they pass.

    Tests that take three times as long as without it, and a minute more, count
    as failed: it hangs. So do tests whose process dies. But the machine may
    have become slow, or its disk full, so they must pass without the mutant
    right after, or they are asked again, with twice the time. A test that has
    never killed in this run must also pass without the mutant, after the same
    tests as before; if it does not, the whole files are asked.

    Raises:
      ValueError: They do not pass without it any more.
    """
    rank, files = self._rank(mutant.path), [file for file, _ in batch]
    only = [name for _, some in batch for name, _ in sorted(some, key=rank)]
    limit = 3 * sum(self._state.tests[file]['secs'] for file in files) + 60
    text, without = mutant.applied(self._texts[mutant.path]), ''
    for _ in range(6):
      with copy.changed(mutant.path, text):
        failure = copy.run(files, limit, only=only).failure
      if not failure or failure in self._sound or failure in files:
        return failure
      upto = only
      if only and failure in only:
        upto = only[: only.index(failure) + 1]
      without = copy.run(files, limit, only=upto).failure
      if not without:
        if '::' in failure:
          self._sound.add(failure)
        return failure
      if '::' in without:  # it needs tests that ran before it
        only = None
      limit *= 2
    raise ValueError(
      f'{", ".join(files)}: these tests do not pass without a mutant any more '
      f'({without}); make room on the disk, or look at them.'
    )

  def _rank(self, path: str) -> Callable:
    """Cheap tests come first, and those that have killed in this file."""
    kills = collections.Counter(
      result.killer
      for result in list(self._state.results.values())
      if result.path == path
    )
    return lambda test: (test[1] + 0.1) / (1 + 3 * kills[test[0]])


def enter(known: Mapping, mutant: Mutant) -> Collection[int]:
  """The numbers of the tests of a file that enter the changed function.

  Args:
    known: The fields of `Ran` for the file.
    mutant: What is changed may also run at import, `<module>`.
  """
  function = mutant.key[0].split(':')[1]
  if not (function and mutant.reach):  # at import, or defaults of arguments
    function = '<module>'
  numbers = known['entered'].get(mutant.path, {}).get(function, ())
  return range(len(known['tests'])) if numbers is None else numbers


def report(
  state: State,
  there: Collection[Key],
  reasons: Mapping[Key, str] = EQUIVALENT,
) -> tuple[str, bool]:
  """The table, the interval and the survivors; whether all is well.

  Args:
    state: What is known.
    there: The mutants of the sample that the files still have.
    reasons: Why some mutants need not be killed.
  """
  results = [state.results[key] for key in there if key in state.results]
  killed = [result for result in results if result.killer]
  left, gone = len(there) - len(results), len(state.keys) - len(there)
  lines = table(results)
  if results:
    low, high = interval(len(killed), len(results))
    secs = [result.secs for result in results]
    lines += [
      f'{len(killed)} of {len(results)} mutants killed: '
      f'{share_killed(results):.1%}, 95 % interval (Wilson) {low:.1%} to '
      f'{high:.1%}; {REQUIRED:.0%} are needed',
      f'{statistics.mean(secs):.0f} s for a mutant in the mean, '
      f'{statistics.median(secs):.0f} s in the median',
    ]
  slow = [r for r in killed if is_slow(r.killer)]
  lines += [f'killed by the time limit: {r.path}:{r.lineno}' for r in slow]
  if gone:
    lines.append(f'{gone} of the sample: their lines are gone from the files')
  lines += survivors(results, reasons)
  lines += [
    f'left out, it does not pass without a mutant: {test} ({record["failure"]})'
    for test, record in sorted(state.tests.items())
    if record['failure']
  ]
  stale = [r.key for r in killed if r.key in reasons]
  lines += [f'listed, but killed: {key}' for key in sorted(stale)]
  if left:
    lines.append(f'{left} not judged yet: the same command goes on with them')
  listed = {r.key for r in results if not r.killer} <= set(reasons)
  enough = share_killed(results) >= REQUIRED
  return '\n'.join(lines), enough and listed and not stale and not left


def run(args: argparse.Namespace, root: Path = ROOT) -> tuple[str, bool]:
  """Judges what is not judged yet, and reports.

  Raises:
    ValueError: An option makes no sense.
  """
  if args.workers < 1:
    raise ValueError(f'--workers={args.workers}: at least one is needed')
  texts, names = sources(root), tracked(root)
  every = {m.key: m for m in population(texts, args.paths)}
  settings = {name: getattr(args, name) for name in ('paths', 'number', 'seed')}
  settings['paths'] = list(settings['paths'])
  chosen = sample(every.values(), args.number, args.seed)
  state = State(Path(args.state), settings, chosen)
  there = [key for key in state.keys if key in every]
  todo = [
    every[key]
    for key in there
    if key not in state.results
    or (args.again and not state.results[key].killer)
  ]
  signal.signal(signal.SIGTERM, signal.default_int_handler)
  with tempfile.TemporaryDirectory(
    prefix='grpo_jax_mutants_', ignore_cleanup_errors=True
  ) as folder:
    if 'JAX_COMPILATION_CACHE_DIR' not in os.environ:
      os.environ['JAX_COMPILATION_CACHE_DIR'] = f'{folder}/compiled'
      os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0'
    copies = [
      Copy(root, names, Path(folder) / str(worker))
      for worker in range(min(args.workers, len(todo)))
    ]
    _judge_all(todo, copies, Judge(texts, state, args.budget, args.again))
  return report(state, there)


def _judge_all(todo, copies, judge):
  """A line for each mutant; Ctrl-C and SIGTERM end it."""
  free = queue.SimpleQueue()
  for copy in copies:
    free.put(copy)

  def one(mutant):
    copy = free.get()
    try:
      return judge(mutant, copy)
    finally:
      free.put(copy)

  pool = futures.ThreadPoolExecutor(max(1, len(copies)))
  try:
    jobs = [pool.submit(one, mutant) for mutant in todo]
    for done, job in enumerate(futures.as_completed(jobs), 1):
      result, asked = job.result()
      end = result.killer or f'SURVIVED {len(asked)} test files'
      print(
        f'{done}/{len(todo)} {result.path}:{result.lineno} {result.key[2]}: '
        f'{end} ({result.secs:.0f} s)',
        flush=True,
      )
  except (KeyboardInterrupt, Stopped):
    print('stopped', flush=True)
  finally:
    for copy in copies:
      copy.stop()
    pool.shutdown(cancel_futures=True)
