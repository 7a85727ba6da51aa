"""The sample of mutants: what is chosen, asked, kept, told, and left behind."""

import collections
import contextlib
import os
from pathlib import Path
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests import mutants_changes
from tests import mutants_pytest
from tests import mutants_sample
from tests.mutants_near import Nearness
from tests.mutants_report import Result

SETTINGS = {'paths': ['learner'], 'number': 3, 'seed': 0}
TEXT = 'def f(a):\n  return a > 0\n\ndef g(a):\n  return a + 1\n'


def made(path='grpo_jax/learner/step.py', text=TEXT):
  return mutants_changes.mutants(path, text)


# The text of a mutant.


@pytest.mark.parametrize(
  'text, change, expected',
  [
    ('if a:\n  b\nelif c:\n  d', 'not (c)', 'if a:\n  b\nelif (not c):\n  d'),
    ('x = f(a,\n  b) * é # c\n', 'f(a, b) * é -> é', 'x = (é\n) # c\n'),
    ('é = "é" if a else 0.5', '0.5 -> 0.75', 'é = "é" if a else 0.75'),
    ('f(b, axis=-1)', 'axis=-1 -> axis=0', 'f(b, axis=0)'),
    ('match a:\n  case -2: b', '2 -> 3', 'match a:\n  case -3: b'),
  ],
)
def test_a_mutant_differs_in_one_place_and_no_line_moves(
  text, change, expected
):
  every = {mutant.key[2]: mutant for mutant in made(text=text)}
  assert every[change].applied(text) == expected
  compile(expected, 'a.py', 'exec')


# The sample.


def population(sizes):
  return [
    mutants_changes.Mutant(path, k, (path, '', str(k)), range(0), (0, 0, b''))
    for path, size in sizes.items()
    for k in range(size)
  ]


def test_the_sample_is_stratified_and_the_seed_decides():
  sizes = {'a.py': 100, 'b.py': 55, 'c.py': 3, 'd.py': 42}
  every = population(sizes)
  for seed in range(20):
    chosen = mutants_sample.sample(every, 40, seed)
    assert len(set(chosen)) == 40
    shares = collections.Counter(mutant.path for mutant in chosen)
    for path, size in sizes.items():
      assert abs(shares[path] - 40 * size / 200) < 1, (seed, path)
  assert chosen == mutants_sample.sample(every, 40, seed)
  assert set(chosen) != set(mutants_sample.sample(every, 40, seed + 1))
  # The first ones are not all of the first file.
  assert len({mutant.path for mutant in chosen[:10]}) > 1
  assert set(mutants_sample.sample(every, 999, 0)) == set(every)


def test_every_mutant_is_equally_likely():
  every = population({'a.py': 5, 'b.py': 2})
  drawn = collections.Counter(
    mutant for seed in range(1400)
    for mutant in mutants_sample.sample(every, 2, seed)
  )  # fmt: skip
  for mutant in every:  # 400 each; 5 standard deviations are 85
    assert abs(drawn[mutant] - 400) < 85


@pytest.mark.parametrize(
  'paths, number, words',
  [
    (['nowhere'], 1, 'there is no Python file at or below grpo_jax/nowhere'),
    (['learner/ste'], 1, 'there is no Python file'),
    (['learner'], 0, '--number=0: at least one mutant'),
  ],
)
def test_options_that_make_no_sense(paths, number, words):
  texts = {'grpo_jax/learner/step.py': TEXT}
  with pytest.raises(ValueError, match=words):
    every = mutants_sample.population(texts, paths)
    mutants_sample.sample(every, number, 0)


# Which tests are near.


TREE = {
  'grpo_jax/models/__init__.py': 'from grpo_jax.models._rope import turned',
  'grpo_jax/models/_rope.py': '',
  'grpo_jax/models/layers.py': '"""\n>>> 1\n"""\nfrom grpo_jax import models',
  'grpo_jax/commands/main.py': 'from grpo_jax.models import layers',
  'tests/cli.py': '',
  'tests/commands/main_test.py': 'from tests import cli',
  'tests/commands/other_test.py': 'import numpy',
  'tests/learner/step_test.py': 'from grpo_jax.models import layers',
  'tests/models/a_test.py': 'from grpo_jax.models import layers',
  'tests/models/b_test.py': 'from grpo_jax import models',
  'tests/models/c_test.py': 'import numpy',
  'tests/models/rope_test.py': '',
  'tests/models/tiny.py': 'from grpo_jax import models',
  'tests/mutants_test.py': 'from grpo_jax import models',
}


def test_the_nearest_tests_come_first():
  near = Nearness(TREE)
  models = [f'tests/models/{name}_test.py' for name in ('b', 'a', 'c')]
  wide = ['tests/learner/step_test.py', 'tests/commands/main_test.py']
  assert near.tests('grpo_jax/models/_rope.py') == [
    'tests/models/rope_test.py', *models, *wide,
  ]  # fmt: skip
  layers = near.tests('grpo_jax/models/layers.py')
  assert layers[:2] == ['grpo_jax/models/layers.py', 'tests/models/a_test.py']
  assert layers[-2:] == wide


# What is kept.


def state(path, settings=SETTINGS):
  return mutants_sample.State(path, settings, made())


def result(mutant, killer='tests/a_test.py::test_a', secs=2.0):
  return Result(mutant.path, mutant.lineno, mutant.key, killer, secs)


def test_a_second_start_has_what_the_first_found(tmp_path):
  file, (one, two, *_) = tmp_path / 'state', made()
  first = state(file)
  first.add_result(result(one, ''), [])
  first.add_result(result(two), ['tests/a_test.py'])
  ran = mutants_pytest.Ran('', 1.0, 1.0, [], {'a.py': {'f': None}}, [])
  first.add_test('tests/a_test.py', '12', ran)
  first.add_test('tests/b_test.py', '12', ran._replace(failure='x'))
  with file.open('a') as broken:
    broken.write('{"mutant": ["grpo')  # killed while it wrote
  second = state(file)
  assert second.results == {one.key: result(one, ''), two.key: result(two)}
  # What failed without a mutant may have been unlucky: it is asked again.
  assert list(second.tests) == ['tests/a_test.py']
  second.add_result(result(one), [])
  third = state(file)
  assert third.keys == [mutant.key for mutant in made()]
  assert third.results == {one.key: result(one), two.key: result(two)}


def test_a_file_of_another_sample_is_refused(tmp_path):
  state(tmp_path / 'state')
  with pytest.raises(ValueError, match='--seed=0, and .*--seed=1 was asked'):
    state(tmp_path / 'state', {**SETTINGS, 'seed': 1})
  for text in ('[]\n', '{"a": 1}\n', 'a\n'):
    (tmp_path / 'notes').write_text(text)
    with pytest.raises(ValueError, match='not one that this command has'):
      state(tmp_path / 'notes')
    assert (tmp_path / 'notes').read_text() == text


# Which tests are asked.


class FakeCopy:
  """Notes what is run; `killers` fail while something is changed.

  Each file has the tests `one`, which takes longer, and `two`.
  """

  def __init__(self, entered=(), killers=(), broken=(), lost=(), started=()):
    self.entered, self.killers = dict(entered), killers
    self.broken, self.lost, self.started = broken, lost, started
    self.measured, self.shown, self.limits, self.text = [], [], [], ''

  @contextlib.contextmanager
  def changed(self, path, text):
    self.text = text
    yield
    self.text = ''

  def run(self, files, limit, record=False, only=None):
    tests = [f'{file}::{name}' for file in files for name in ('one', 'two')]
    if record:
      self.measured += files
      entered = self.entered.get(files[0], {'f': None})
      entered = {'grpo_jax/models/_rope.py': entered}
      failure = 'x' if files[0] in self.broken else ''
      secs = list(zip(tests, (4.0, 3.0)))
      started = [0] if files[0] in self.started else []
      return mutants_pytest.Ran(failure, 10.0, 10.0, secs, entered, started)
    asked = tests if only is None else only
    self.shown.append(asked)
    self.limits.append(limit)
    # What is `lost` fails too where `one` did not run before.
    failed = self.killers if self.text else ()
    if not any(test.endswith('one') for test in asked):
      failed = [*failed, *self.lost]
    failure = next((test for test in asked if test in failed), '')
    return mutants_pytest.Ran(failure, 1.0, 0.0, [], {}, [])


def judged(copy, tmp_path, budget=1000.0, times=1, thorough=False):
  path = 'grpo_jax/models/_rope.py'
  texts = {**TREE, path: TEXT}
  chosen = mutants_changes.mutants(path, TEXT)[:times]  # of `f`
  kept = mutants_sample.State(tmp_path / 'state', SETTINGS, chosen)
  judge = mutants_sample.Judge(texts, kept, budget, thorough)
  return [judge(mutant, copy) for mutant in chosen]


def both(*files):
  return [f'{file}::{name}' for file in files for name in ('two', 'one')]


ROPE, B, A, C = (f'tests/models/{name}_test.py' for name in ('rope', *'bac'))
STEP, MAIN = 'tests/learner/step_test.py', 'tests/commands/main_test.py'


def test_wider_tests_are_asked_until_one_fails(tmp_path):
  copy = FakeCopy(killers=[f'{A}::two'])
  [(found, asked)] = judged(copy, tmp_path)
  assert found.killer == f'{A}::two' and asked == [ROPE, B, A]
  again = [*both(B), f'{A}::two']  # without the mutant
  assert copy.shown == [both(ROPE), both(B, A), again]
  assert copy.limits == [90, 120, 120]
  assert copy.measured == asked


def test_tests_that_cannot_notice_it_are_not_asked(tmp_path):
  entered = {ROPE: {'g': None}, A: {'f': [1]}, C: {}}
  copy = FakeCopy(entered, broken=[B], started=[C])
  [(found, asked)] = judged(copy, tmp_path)
  assert found.killer == '' and asked == [A, STEP, MAIN]
  assert copy.shown == [[f'{A}::two'], both(STEP, MAIN)]
  assert copy.measured == [ROPE, B, A, C, STEP, MAIN]


def test_thorough_judging_asks_what_does_not_enter_it_itself(tmp_path):
  entered = {ROPE: {'g': None}, A: {'f': [1]}, C: {}}
  copy = FakeCopy(entered, [f'{C}::one'], [B], started=[C])
  [(found, asked)] = judged(copy, tmp_path, thorough=True)
  assert found.killer == f'{C}::one' and asked == [A, STEP, MAIN, C]
  assert copy.shown[2:4] == [[f'{A}::one'], [f'{C}::one']]


def test_the_budget_ends_the_asking(tmp_path):
  [(found, asked)] = judged(FakeCopy(), tmp_path, budget=15)
  assert found.killer == '' and asked == [ROPE, B]


def test_what_has_killed_comes_first_and_nothing_is_measured_twice(tmp_path):
  copy = FakeCopy(killers=[f'{A}::one'])
  judged(copy, tmp_path, times=2)
  first = [both(ROPE), both(B, A), both(B, A)]
  assert copy.shown == [*first, both(ROPE), [*both(B), *both(A)[::-1]]]
  assert copy.measured == [ROPE, B, A]


def test_what_fails_for_lack_of_other_tests_is_no_kill(tmp_path):
  entered = {ROPE: {'f': [1]}, B: {'f': [1]}}
  copy = FakeCopy(entered, broken=[A, C, STEP, MAIN], lost=[f'{ROPE}::two'])
  [(found, asked)] = judged(copy, tmp_path)
  assert found.killer == '' and asked == [ROPE, B]
  files = both(ROPE)[::-1]
  assert copy.shown == [both(ROPE)[:1]] * 2 + [files, both(B)[:1]]


class DeadCopy(FakeCopy):
  """No process lives for long, with a mutant or without one."""

  def run(self, files, limit, record=False, only=None):
    ran = super().run(files, limit, record, only)
    # Each time with the mutant first, then without it.
    why = 'died of SIGKILL' if len(self.shown) % 2 else 'disk full'
    return ran if record else ran._replace(failure=why)


def test_tests_that_fail_without_a_mutant_too_are_no_kill(tmp_path):
  with pytest.raises(ValueError, match=f'{ROPE}: .*any more .disk full'):
    judged(DeadCopy(), tmp_path)


class SlowCopy(FakeCopy):
  """Tests take 200 s, and an hour with the mutant if it hangs."""

  def __init__(self, hangs):
    super().__init__()
    self.hangs = hangs

  def run(self, files, limit, record=False, only=None):
    ran = super().run(files, limit, record, only)
    secs = 3600 if self.text and self.hangs else 200
    late = not record and secs > limit
    return ran._replace(failure='time limit of x s' if late else '')


@pytest.mark.parametrize(
  'hangs, limits', [(True, [90, 90, 180, 180, 360, 360]), (False, None)]
)
def test_a_slow_machine_is_no_hang(hangs, limits, tmp_path):
  copy = SlowCopy(hangs)
  [(found, asked)] = judged(copy, tmp_path, budget=5)
  assert asked == [ROPE]
  assert mutants_pytest.is_slow(found.killer) == hangs
  assert copy.limits == (limits or [90, 90, 180, 180, 360])


@pytest.mark.parametrize(
  'text, entered, reached',
  [
    ('def f(a):\n  return -a', ['f'], True),
    ('def f(a):\n  return -a', ['g', '<module>'], False),
    ('def f():\n  def g(a):\n    return -a', ['f.g'], True),
    ('def f(a=-b): pass', ['f'], False),  # when it is defined
    ('def f(a=-b): pass', ['<module>'], True),
    ('A = -b', ['<module>'], True),
    ('class A:\n  a = -b', ['A'], True),
  ],
)
def test_which_tests_enter_what_is_changed(text, entered, reached):
  mutant = made('grpo_jax/a.py', text)[0]
  known = {'tests': [0, 1, 2], 'entered': {}}
  assert not mutants_sample.enter(known, mutant)
  for numbers, expected in ([1], [1]), (None, [0, 1, 2]):
    known['entered'] = {'grpo_jax/a.py': dict.fromkeys(entered, numbers)}
    assert list(mutants_sample.enter(known, mutant)) == expected * reached


# What is told.


@pytest.mark.parametrize(
  'killed, listed, judged_of, good',
  [
    (19, [19], 20, True),
    (19, [], 20, False),  # a survivor without a reason
    (20, [3], 20, False),  # a reason for what is killed
    (17, [17, 18, 19], 20, False),  # 85 %
    (20, [], 21, False),  # one is not judged yet
  ],
)
def test_the_verdict(killed, listed, judged_of, good, tmp_path):
  every = population({'a.py': judged_of})
  kept = mutants_sample.State(tmp_path / 'state', SETTINGS, every)
  for k, mutant in enumerate(every[:20]):
    kept.add_result(result(mutant, 'x' if k < killed else ''), [])
  reasons = {every[k].key: 'no effect' for k in listed}
  text, verdict = mutants_sample.report(kept, kept.keys, reasons)
  assert verdict == good
  low, high = {
    17: ('64.0%', '94.8%'), 19: ('76.4%', '99.1%'), 20: ('83.9%', '100.0%'),
  }[killed]  # fmt: skip
  assert f'{killed} of 20 mutants killed' in text
  assert f'interval (Wilson) {low} to {high}' in text
  assert ('NO REASON GIVEN' in text) == (killed == 19 and not listed)
  assert ('1 not judged yet' in text) == (judged_of == 21)


# Processes.


FILES = {
  'grpo_jax/__init__.py': '',
  'grpo_jax/a.py': 'def f(a):\n  return a > 0\n\ndef g(a):\n  return a\n\n'
  'def h(a):\n  return a\n',
  'tests/__init__.py': '',
  'tests/a_test.py': 'from grpo_jax import a\n\n'
  'def test_f():\n  assert a.f(1) and not a.f(-1)\n',
  'tests/slow_test.py': 'import os, pathlib, time\n\n'
  'def test_slow():\n  pathlib.Path("pid").write_text(str(os.getpid()))\n'
  '  time.sleep(60)\n',
}


ENTERS = """
import functools, subprocess, sys, pytest
from grpo_jax import a

@functools.cache
def kept():
  return a.g(1)

@pytest.fixture(scope='module')
def made():
  return a.f(1)

def test_one(made):
  assert a.h(2)

def test_two():
  assert kept()

def test_three():
  subprocess.run([sys.executable, '-c', ''], check=True)
  assert kept()

def test_four():
  assert a.h(1)
"""


def tree(folder):
  for name, text in FILES.items():
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
  shutil.copy(mutants_pytest.__file__, folder / 'tests')
  return [*FILES, 'tests/mutants_pytest.py']


@pytest.mark.long
def test_a_real_mutant_in_a_copy(tmp_path):
  names = tree(tmp_path / 'root')
  copy = mutants_pytest.Copy(tmp_path / 'root', names, tmp_path / 'copy')
  ran = copy.run(['tests/a_test.py'], 60, record=True)
  assert ran.failure == '' and ran.cpu_secs > 0.05
  assert [name for name, _ in ran.tests] == ['tests/a_test.py::test_f']
  assert ran.entered == {
    'grpo_jax/a.py': {'<module>': None, 'f': [0]},
    'grpo_jax/__init__.py': {'<module>': None},
  }
  assert ran.started == []
  path, text = 'grpo_jax/a.py', FILES['grpo_jax/a.py']
  # As long as before and of the same time, as within a second.
  file = copy.tree / path
  before = file.stat().st_mtime
  with copy.changed(path, text.replace('a > 0', 'a < 0')):
    os.utime(file, (before, before))
    ran = copy.run(['tests/a_test.py'], 60)
  assert ran.failure == 'tests/a_test.py::test_f'
  ran = copy.run(['tests/slow_test.py'], 0.5)
  assert ran.failure == 'time limit of 0.5 s'
  for folder in ('root', 'copy/tree'):
    assert (tmp_path / folder / path).read_text() == text
  copy.stop()
  with pytest.raises(mutants_pytest.Stopped):
    copy.run(['tests/slow_test.py'], 60)


@pytest.mark.long
def test_who_enters_what(tmp_path):
  names = tree(tmp_path)
  (tmp_path / 'tests/a_test.py').write_text(ENTERS)
  copy = mutants_pytest.Copy(tmp_path, names, tmp_path / 'copy')
  ran = copy.run(['tests/a_test.py'], 60, record=True)
  assert ran.failure == '' and ran.started == [2]
  found = ran.entered['grpo_jax/a.py']
  # What a fixture and a kept result need counts for all tests.
  assert found == {'<module>': None, 'f': None, 'g': None, 'h': [0, 3]}
  two, three = 'tests/a_test.py::test_two', 'tests/a_test.py::test_three'
  ran = copy.run(['tests/a_test.py'], 60, record=True, only=[three, two])
  assert [name for name, _ in ran.tests] == [three, two]
  assert copy.run(['tests/a_test.py'], 60, only=['gone']).failure == ''
  copy.stop()


@pytest.mark.long
def test_a_killed_tool_leaves_no_process(tmp_path):
  names, pid = tree(tmp_path / 'root'), tmp_path / 'copy/tree/pid'
  code = (
    'from pathlib import Path; from tests import mutants_pytest\n'
    f'copy = mutants_pytest.Copy(Path("root"), {names}, Path("copy"))\n'
    'copy.run(["tests/slow_test.py"], 60)'
  )
  environment = {**os.environ, 'PYTHONPATH': str(mutants_sample.ROOT)}
  tool = subprocess.Popen(
    [sys.executable, '-c', code], cwd=tmp_path, env=environment
  )
  until(lambda: pid.exists() and pid.read_text())
  tool.send_signal(signal.SIGKILL)
  tool.wait()
  until(lambda: not alive(int(pid.read_text())))


def alive(pid):
  try:
    return 'Z' not in Path(f'/proc/{pid}/stat').read_text().split()[2]
  except FileNotFoundError:
    return False


def until(condition):
  end = time.monotonic() + 120
  while not condition():
    assert time.monotonic() < end
    time.sleep(0.01)
