"""The command line: the real command, what it prints and how it ends."""

import json
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests import runs

ROOT = pathlib.Path(__file__).parent.parent
CONFIG = '--config=configs/arithmetic.py'
SMALL = '--config=tests/small_config.py'
JUDGE = '--config.rewards=({"name":"tests.judges:even","weight":1.0},)'


def environment():
  kept = {k: v for k, v in os.environ.items() if k != 'XLA_FLAGS'}
  return {**kept, 'PYTHONPATH': str(ROOT), 'COLUMNS': '80'}


def popen(*arguments, **options):
  return subprocess.Popen(
    [sys.executable, '-m', 'grpo_jax', *arguments],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    cwd=ROOT,
    env=environment(),
    **options,
  )


def command(*arguments, given=None):
  process = popen(*arguments, stdin=subprocess.PIPE)
  out, err = process.communicate(given, timeout=300)
  return subprocess.CompletedProcess(arguments, process.returncode, out, err)


def reward(name):
  return f'--config.rewards=({{"name":"tests.judges:{name}","weight":1.0}},)'


# Quick to the first rollout: no warm-up, nothing held out.
BARE = (SMALL, '--config.warm_up.steps=0', '--config.data.heldout=')

# What is given (WORK is a workdir that is not there), and what is said of it.
BAD_INPUT = {
  'no command': ([], 'the commands are: train, eval, sample'),
  'another command': (['dance'], "'dance'"),
  'no workdir': (['train', CONFIG], 'needs --workdir'),
  'no config': (['train', 'WORK'], 'no config.json'),
  'no such config': (['train', '--config=no/such.py', 'WORK'], 'no/such.py'),
  'flag': (['train', CONFIG, '--wrkdir=w'], 'workdir'),
  'no flag': (['train', CONFIG, 'WORK', 'resume'], "'resume'"),
  'field': (['train', CONFIG, '--config.sed=1', 'WORK'], 'config.seed'),
  "a peer's field": (
    ['train', CONFIG, '--config.num_generations=8', 'WORK'],
    'config.sampler.group',
  ),
  'type': (['train', CONFIG, '--config.seed=x', 'WORK'], 'config.seed'),
  'method': (
    ['train', CONFIG, '--config.learner.method=gspoo', 'WORK'],
    'did you mean gspo',
  ),
  'argument of the method': (
    ['train', CONFIG, '--config.learner.method_kwargs={"lowest":1}', 'WORK'],
    "unexpected keyword argument 'lowest'",
  ),
  'order': (
    ['train', CONFIG, '--config.learner.method=tests.bad_methods:wrong_order']
    + ['--config.learner.method_kwargs={}', 'WORK'],
    'place pool_log_ratio before it',
  ),
  'k1': (
    ['train', CONFIG, '--config.learner.method=tests.bad_methods:k1']
    + ['--config.learner.method_kwargs={}', 'WORK'],
    'expected gradient is zero',
  ),
  'mesh': (['train', CONFIG, '--config.mesh.fsdp=3', 'WORK'], 'fsdp=3'),
  'batches': (
    ['train', CONFIG, '--config.learner.batches=5', 'WORK'],
    'learner.batches=5 with sampler.prompts=32',
  ),
  'rewards': (['train', CONFIG, '--config.rewards=()', 'WORK'], 'no rewards'),
  'no file': (
    ['train', CONFIG, '--config.data.train=missing.jsonl', 'WORK'],
    'missing.jsonl',
  ),
  'malformed line': (
    ['train', CONFIG, '--config.data.train=TMP/bad.jsonl', 'WORK'],
    "Line 2 of 'TMP/bad.jsonl' is not valid JSON",
  ),
  'empty data': (
    ['train', CONFIG, '--config.data.train=TMP/empty.jsonl', 'WORK'],
    "'TMP/empty.jsonl' holds no record",
  ),
  'range': (
    ['train', CONFIG, '--profile_steps=5,3', 'WORK'],
    '--profile_steps=5,3',
  ),
  'read-only': (
    ['train', CONFIG, '--workdir=TMP/file/run'],
    'TMP/file',
  ),
  'eval of nothing': (['eval', CONFIG, 'WORK'], 'There is no checkpoint in'),
  'sample of nothing': (['sample', 'WORK'], 'no config.json'),
}


@pytest.mark.parametrize('name', BAD_INPUT)
def test_bad_input_gets_one_sentence_and_exit_code_2(name, tmp_path):
  (tmp_path / 'bad.jsonl').write_text('{"prompt": "1", "answer": 1}\n{"pro\n')
  (tmp_path / 'empty.jsonl').write_text('')
  (tmp_path / 'file').write_text('in the way')
  given, words = BAD_INPUT[name]
  place = str(tmp_path)
  done = command(
    *(
      a.replace('WORK', '--workdir=TMP/run').replace('TMP', place)
      for a in given
    )
  )
  assert_refused(done, words.replace('TMP', place))
  assert not (tmp_path / 'run').exists()


def assert_refused(done, words):
  assert done.returncode == 2, done.stderr
  lines = [
    line
    for line in done.stderr.splitlines()
    if line and not line.startswith(('warm-up', 'step', 'warning:', '  sample'))
  ]
  assert len(lines) == 1 and lines[0].startswith('grpo-jax: '), done.stderr
  assert words in lines[0]
  assert done.stdout == '' and 'Traceback' not in done.stderr


# What shows when the first rollout is drawn; by then there is a workdir, and
# what was learned so far is in it.
LATE_INPUT = {
  'raises': ([reward('raises')], "tests.judges:raises' (function raises)"),
  'nan': ([reward('nan')], 'returned nan'),
  'too few': ([reward('too_few')], 'returned 1 for 16 completions'),
  'long prompt': (
    ['--config.data.train=TMP/long.jsonl'],
    'prompt needs 8 tokens, but the largest bucket is 6',
  ),
}


@pytest.mark.parametrize('name', LATE_INPUT)
def test_bad_input_of_the_first_rollout_is_said_too(name, tmp_path):
  (tmp_path / 'long.jsonl').write_text('{"prompt": "47+85+1=", "answer": 1}\n')
  given, words = LATE_INPUT[name]
  arguments = (a.replace('TMP', str(tmp_path)) for a in given)
  workdir = tmp_path / 'run'
  done = command('train', *BARE, *arguments, f'--workdir={workdir}')
  assert_refused(done, words)
  assert 'example' in done.stderr
  assert (workdir / 'checkpoints' / '0').is_dir()
  assert 'Traceback' in (workdir / 'traceback.txt').read_text()


def test_verbose_shows_the_traceback(tmp_path):
  done = command(
    'train',
    CONFIG,
    '--config.mesh.fsdp=3',
    f'--workdir={tmp_path}',
    '--verbose',
  )
  assert done.returncode != 0 and 'Traceback' in done.stderr


@pytest.mark.parametrize('name', ['', 'train', 'eval', 'sample'])
def test_help_fits_the_terminal_and_names_units(name):
  done = command(*name.split(), '--help')
  assert done.returncode == 0 and done.stderr == ''
  assert max(map(len, done.stdout.splitlines())) <= 80
  assert '143' in done.stdout
  if name == 'train':
    assert '--config.optim.lr=0.0003' in done.stdout
    assert 'peak learning rate' in done.stdout


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
  """A run of four steps, and what the command said."""
  workdir = tmp_path_factory.mktemp('finished') / 'run'
  done = command('train', SMALL, JUDGE, f'--workdir={workdir}')
  assert done.returncode == 0, done.stderr
  return workdir, done


def test_a_run_ends_with_one_line_of_json(finished):
  workdir, done = finished
  result = json.loads(done.stdout)
  assert result['steps'] == 4 and 0 <= result['after'] <= 1
  assert 'step 4/4' in done.stderr and 'Traceback' not in done.stderr
  versions = json.loads((workdir / 'versions.json').read_text())
  assert versions[0]['packages']['jax'] and versions[0]['git']
  config = json.loads((workdir / 'config.json').read_text())
  assert config['steps'] == 4


@pytest.mark.parametrize(
  'given, words',
  [
    (['--config.model.width=64'], 'config.model.width=32, and now it is 64'),
    (['--config.optim.lr=1e-6'], 'config.optim.lr=0.0003'),
    (['--config.learner.method_kwargs={"low":0.1}'], 'learner.method_kwargs'),
  ],
)
def test_a_workdir_of_another_config_is_refused(given, words, finished):
  workdir, _ = finished
  before = contents(workdir)
  done = command('train', SMALL, JUDGE, *given, f'--workdir={workdir}')
  assert_refused(done, words)
  changed = contents(workdir)
  changed.pop('traceback.txt', None)
  before.pop('traceback.txt', None)
  assert changed == before


def contents(workdir):
  return {
    str(path.relative_to(workdir)): path.read_bytes()
    for path in workdir.rglob('*')
    if path.is_file()
  }


def test_check_trains_and_writes_nothing(finished, tmp_path):
  done = command(
    'train', SMALL, JUDGE, f'--workdir={tmp_path}/run', '--check', '--json'
  )
  report = json.loads(done.stdout)
  assert report['shapes']['rollout [P, G, T]'] == [4, 4, 5]
  assert report['memory_gib']['train step, peak'] > 0
  assert len(report['first_rollout']['prompts']) == 3
  assert list(tmp_path.iterdir()) == []
  workdir, _ = finished
  before = contents(workdir)
  shown = command('train', f'--workdir={workdir}', '--check')
  assert shown.returncode == 0 and 'goes on' in shown.stdout
  assert '[rows, positions]' in shown.stdout
  assert contents(workdir) == before


def test_eval_gives_pass_at_k_and_leaves_the_run_alone(finished, tmp_path):
  workdir, _ = finished
  before = contents(workdir)
  done = command(
    'eval',
    f'--workdir={workdir}',
    '--samples=4',
    '--k=1,4',
    '--examples=10',
    f'--completions={tmp_path}/all.parquet',
    '--json',
  )
  summary = json.loads(done.stdout)
  assert summary['checkpoint'] == 4 and summary['examples'] == 10
  assert summary['pass@1'] <= summary['pass@4'] <= 1
  low, high = summary['pass@4_interval']
  assert low <= summary['pass@4'] <= high
  assert (tmp_path / 'all.parquet').exists() and contents(workdir) == before
  best = command('eval', f'--workdir={workdir}', '--checkpoint=best')
  assert best.returncode == 0 and 'pass@8' in best.stdout
  for given, words in (
    (['--k=9'], 'k=9'),
    (['--checkpoint=3'], 'no checkpoint of step 3'),
    (['--k=one'], "'one'"),
  ):
    assert_refused(command('eval', f'--workdir={workdir}', *given), words)


def test_sample_reads_flags_files_and_standard_input(finished, tmp_path):
  workdir, _ = finished
  run = f'--workdir={workdir}'
  (tmp_path / 'asked.txt').write_text('01+02=\n\n03+04=\n')
  flag = command('sample', run, '--prompt=01+02=', '--prompt=03+04=')
  file = command('sample', run, f'--prompts={tmp_path}/asked.txt')
  typed = command('sample', run, given='01+02=\n03+04=\n')
  assert flag.stdout == file.stdout == typed.stdout
  assert [line[:6] for line in flag.stdout.splitlines()] == ['01+02=', '03+04=']
  several = command('sample', run, '--prompt=01+02=', '--number=3', '--json')
  answers = [json.loads(line) for line in several.stdout.splitlines()]
  assert len(answers) == 3 and answers[0]['prompt'] == '01+02='
  assert_refused(command('sample', run, '--prompt=x'), "'x'")
  missing = command('sample', run, '--prompts=no/such.txt')
  assert_refused(missing, 'no/such.txt')


@pytest.fixture
def copied(finished, tmp_path):
  """A copy of the run, to be changed."""
  shutil.copytree(finished[0], tmp_path / 'copy')
  return tmp_path / 'copy'


def test_of_a_corrupt_checkpoint_the_one_before_is_used(copied, finished):
  array = max(
    (copied / 'checkpoints' / '4').rglob('*'), key=lambda p: p.stat().st_size
  )
  array.write_bytes(array.read_bytes()[::-1])
  done = command('train', SMALL, JUDGE, f'--workdir={copied}')
  assert done.returncode == 0 and 'Traceback' not in done.stderr
  (said,) = [s for s in done.stderr.splitlines() if s.startswith('warning')]
  assert 'Checkpoint 4' in said and '2, the one before, is used' in said
  runs.assert_equal(copied, finished[0])


def test_a_killed_run_ends_as_the_one_that_was_not(finished, tmp_path):
  """Once, here; `python -m tests.kills` does it at random moments."""
  given = ('train', SMALL, JUDGE, f'--workdir={tmp_path}')
  process = popen(*given)
  wait_for(tmp_path, 3, process)
  process.kill()
  process.communicate()
  assert command(*given).returncode == 0
  runs.assert_equal(tmp_path, finished[0])


def test_profiled_steps_leave_a_trace(copied):
  workdir = copied
  done = command(
    'train',
    f'--workdir={workdir}',
    '--config.steps=5',
    '--profile_steps=5,5',
  )
  assert done.returncode == 0, done.stderr
  assert list((workdir / 'profile' / 'step_5').rglob('*.xplane.pb'))


def wait_for(workdir, step, process):
  """Until that many rollouts are done."""
  while process.poll() is None:
    time.sleep(0.02)
    path = workdir / 'metrics.jsonl'
    if path.exists() and len(path.read_text().splitlines()) > step:
      return
  raise AssertionError(process.stderr.read())


LONG = (SMALL, JUDGE, '--config.steps=100000', '--config.data.heldout=')


@pytest.mark.parametrize(
  'number, code', [(signal.SIGTERM, 143), (signal.SIGINT, 130)]
)
def test_a_signal_saves_and_the_next_start_goes_on(number, code, tmp_path):
  process = popen('train', *LONG, f'--workdir={tmp_path}')
  wait_for(tmp_path, 3, process)
  process.send_signal(number)
  asked = time.monotonic()
  _, err = process.communicate(timeout=60)
  assert process.returncode == code and 'Traceback' not in err
  assert time.monotonic() - asked < 10
  done = len(runs.records(tmp_path)) - 1
  assert runs.saved(tmp_path)[0] == done
  again = popen('train', *LONG, f'--workdir={tmp_path}')
  wait_for(tmp_path, done + 1, again)
  again.kill()
  _, err = again.communicate()
  assert f'goes on from the checkpoint of rollout {done}' in err


def test_two_ctrl_c_end_at_once(tmp_path):
  process = popen(
    'train', *LONG, '--config.rewards=({"name":"tests.judges:slow"},)',
    f'--workdir={tmp_path}',
  )  # fmt: skip
  while not (tmp_path / 'checkpoints' / '0').exists():
    time.sleep(0.05)
    assert process.poll() is None, process.stderr.read()
  time.sleep(1)
  process.send_signal(signal.SIGINT)
  time.sleep(1)
  assert process.poll() is None  # it waits for the reward
  process.send_signal(signal.SIGINT)
  _, err = process.communicate(timeout=30)
  assert process.returncode == 130 and 'Traceback' not in err


def test_two_processes_do_not_share_a_workdir(tmp_path):
  process = popen('train', *LONG, f'--workdir={tmp_path}')
  wait_for(tmp_path, 1, process)
  done = command('train', *LONG, f'--workdir={tmp_path}')
  process.kill()
  process.communicate()
  assert_refused(done, 'Another process is running')


def test_a_run_survives_a_full_disk(tmp_path):
  """Files may not grow beyond 16 KiB, for a while."""

  def small_disk():
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, limits[1]))

  process = popen(
    'train', *LONG, f'--workdir={tmp_path}', preexec_fn=small_disk
  )
  wait_for(tmp_path, 5, process)
  assert not list((tmp_path / 'checkpoints').glob('[0-9]*'))
  _, hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
  resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (hard, hard))
  while not list((tmp_path / 'checkpoints').glob('[0-9]*')):
    time.sleep(0.05)
    assert process.poll() is None, process.stderr.read()
  process.send_signal(signal.SIGTERM)
  _, err = process.communicate(timeout=60)
  assert process.returncode == 143 and 'tries again' in err
  written = runs.records(tmp_path)
  assert [r['step'] for r in written] == list(range(len(written)))
  assert written[-1]['saves_failed'] >= 1
