"""The command line: the real command, what it prints and how it ends."""

import json
import shutil
import types

import pytest

import grpo_jax
from grpo_jax.commands import main
from grpo_jax.commands import options
from grpo_jax.commands import report
from grpo_jax.planning import roofline
from grpo_jax.rollouts import parquet
from grpo_jax.run.keep import host_memory
from tests import runs
from tests.cli import JUDGE
from tests.cli import SMALL
from tests.cli import assert_refused
from tests.cli import call
from tests.cli import command
from tests.cli import popen
from tests.cli import wait_for


@pytest.mark.parametrize('name', ['', 'train', 'eval', 'sample', 'convert'])
def test_help_fits_the_terminal_and_names_units(name):
  done = call(*name.split(), '--help')
  assert done.returncode == 0 and done.stderr == ''
  assert max(map(len, done.stdout.splitlines())) <= 80
  assert '143' in done.stdout
  if name == 'train':
    assert '--config.optim.lr=0.0003' in done.stdout
    assert 'Learning rate at the peak' in done.stdout


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
  assert 'rollout 4/4' in done.stderr and 'Traceback' not in done.stderr
  versions = json.loads((workdir / 'versions.json').read_text())
  assert versions[0]['packages']['jax'] and versions[0]['git']
  config = json.loads((workdir / 'config.json').read_text())
  assert config['steps'] == 4


def test_no_run_is_faster_than_its_bound(finished, monkeypatch):
  monkeypatch.setattr(roofline, '_SECS', 0.05)
  done = call('plan', f'--against={finished[0]}', '--json')
  assert done.returncode == 0, done.stderr
  found = json.loads(done.stdout)
  assert found['devices'] == '1 x cpu' and found['rollouts'] == 2
  for part in ('sampling', 'learning'):
    assert 0 < found[part]['bound_secs'] <= found[part]['measured_secs']


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
  done = call('train', SMALL, JUDGE, *given, f'--workdir={workdir}')
  assert_refused(done, words)
  assert contents(workdir) == before


def contents(workdir):
  return {
    str(path.relative_to(workdir)): path.read_bytes()
    for path in workdir.rglob('*')
    if path.is_file()
  }


@pytest.mark.long
def test_check_trains_and_writes_nothing(finished, tmp_path):
  done = call(
    'train', SMALL, JUDGE, f'--workdir={tmp_path}/run', '--check', '--json',
    '--config.data.completion_prefix=10', '--config.data.prompt_buckets=(8,)',
    '--config.learner.method=dapo', '--config.learner.method_kwargs.low=.1',
  )  # fmt: skip
  report = json.loads(done.stdout)
  assert report['config']['learner']['method'] == 'dapo'
  assert report['config']['learner']['method_kwargs'] == {'low': 0.1}
  assert 'left out (kl_coefficient=0.0)' in done.stderr
  assert report['shapes']['rollout [P, G, T]'] == [4, 4, 5]
  assert report['memory_gib']['train step, peak'] > 0
  prompts = report['first_rollout']['prompts']
  assert len(prompts) == 3 and all(text.endswith('=10') for text in prompts)
  assert list(tmp_path.iterdir()) == []
  workdir, _ = finished
  before = contents(workdir)
  shown = call('train', f'--workdir={workdir}', '--check')
  assert shown.returncode == 0 and 'goes on' in shown.stdout
  assert '[rows, positions]' in shown.stdout
  assert contents(workdir) == before


@pytest.mark.long
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
  assert contents(workdir) == before
  written = parquet.read(tmp_path / 'all.parquet')
  assert len(written.answers) == 10 and all(map(str.isdigit, written.answers))
  best = command('eval', f'--workdir={workdir}', '--checkpoint=best')
  assert best.returncode == 0 and 'pass@8' in best.stdout
  for given, words in (
    (['--k=9'], 'k=9'),
    (['--checkpoint=3'], 'no checkpoint of step 3'),
    (['--k=one'], "'one'"),
  ):
    assert_refused(command('eval', f'--workdir={workdir}', *given), words)


@pytest.mark.long
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


@pytest.mark.long
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


@pytest.mark.long
def test_a_killed_run_ends_as_the_one_that_was_not(finished, tmp_path):
  """Once, here; `python -m tests.kills` does it at random moments."""
  given = ('train', SMALL, JUDGE, f'--workdir={tmp_path}')
  process = popen(*given)
  wait_for(tmp_path, 3, process)
  process.kill()
  process.communicate(timeout=60)
  assert command(*given).returncode == 0
  runs.assert_equal(tmp_path, finished[0])


@pytest.mark.long
def test_profiled_steps_leave_a_trace(copied):
  workdir = copied
  done = call(
    'train',
    f'--workdir={workdir}',
    '--config.steps=6',
    '--profile_steps=6,6',  # step 5 compiles, which would be traced too
  )
  assert done.returncode == 0, done.stderr
  assert list((workdir / 'profile' / 'step_6').rglob('*.xplane.pb'))


def test_alone_it_says_what_it_can_do():
  alone, asked = command(), call('--help')
  assert alone.returncode == asked.returncode == 0
  assert alone.stdout == asked.stdout and 'Examples:' in alone.stdout
  assert alone.stderr == ''


@pytest.mark.parametrize(
  'given, words',
  [
    (['train'], 'needs --workdir, and --config for a new run. As in:'),
    (['study'], 'needs a study. As in:'),
  ],
)
def test_the_examples_of_a_refusal_stand_on_their_lines(given, words):
  done = call(*given)
  assert_refused(done, words)
  first, *examples = done.stderr.splitlines()
  assert first.endswith('As in:')
  assert examples == options.EXAMPLES.splitlines() and len(examples) > 3


def test_the_lines_of_another_error_become_one(capsys):
  assert main._refuse(ValueError('a\n  b\n\tc')) == 2
  assert capsys.readouterr().err == 'grpo-jax: a b c\n'


@pytest.mark.parametrize(
  'error',
  [
    MemoryError('Unable to allocate 9 GiB'),
    RuntimeError('RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.\nat'),
  ],
)
def test_without_enough_memory_it_says_what_to_lower(
  error, monkeypatch, capsys
):
  def run(arguments):
    raise error

  monkeypatch.setattr(report, 'run', run)
  assert main.main(['report', 'runs/x']) == 2
  said = capsys.readouterr().err
  assert 'not enough memory' in said and 'lower learner.micro_rows' in said
  assert said.count('\n') == 1


@pytest.mark.parametrize('platform, unit', [('linux', 2**10), ('darwin', 1)])
def test_the_peak_of_memory_has_the_unit_of_its_system(
  monkeypatch, platform, unit
):
  usage = types.SimpleNamespace(ru_maxrss=3 * 2**29 // unit)
  monkeypatch.setattr(host_memory.sys, 'platform', platform)
  monkeypatch.setattr(host_memory.resource, 'getrusage', lambda who: usage)
  assert host_memory.peak_gib() == 1.5


def test_it_says_its_version():
  done = command('--version')
  assert done.returncode == 0 and done.stderr == ''
  assert done.stdout.startswith(f'grpo-jax {grpo_jax.__version__} (jax ')
