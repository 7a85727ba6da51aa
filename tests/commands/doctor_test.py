"""The command: what it prints, its exit codes, and several processes."""

import json
import socket
import subprocess
import sys

import pytest

from grpo_jax.commands import arguments
from grpo_jax.commands import doctor
from grpo_jax.hosts import processes
from grpo_jax.planning import device_checks
from grpo_jax.planning import host_checks
from grpo_jax.planning.doctor import Line
from tests import cli
from tests.planning import doctor_test

KEYS = {
  'check', 'verdict', 'secs', 'compile_secs', 'measured', 'expected', 'values',
  'failures',
}  # fmt: skip


@pytest.fixture
def tiny(monkeypatch):
  monkeypatch.setattr(device_checks, 'ON_CPU', doctor_test.TINY)


@pytest.mark.parametrize(
  'say', [cli.call, pytest.param(cli.command, marks=pytest.mark.long)]
)
def test_the_command_measures_this_machine(tiny, tmp_path, say):
  """With small sizes in this process, and with those of a CPU in its own."""
  done = say('doctor', '--json', f'--workdir={tmp_path}/run')
  assert done.returncode == 0, done.stderr
  assert done.stderr == ''
  report = json.loads(done.stdout)
  assert {*report} == {'failed', 'slow', 'processes', 'checks'}
  assert (report['failed'], report['processes']) == ([], 1)
  names = [check['check'] for check in report['checks']]
  assert names == doctor_test.ORDER
  for check in report['checks']:
    assert {*check} == KEYS and check['failures'] == []
  product = report['checks'][names.index('matrix product')]
  assert product['values'][0]['tflops'][0] > 0
  assert 0 < product['compile_secs'] < product['secs']
  assert not list(tmp_path.iterdir())


def test_a_failure_is_a_line_and_a_sentence_and_code_2(
  tiny, tmp_path, capsys, monkeypatch
):
  monkeypatch.setenv('COLUMNS', '80')
  (tmp_path / 'file').write_text('')
  code = doctor.examine(processes.ALONE, f'{tmp_path}/file', with_traces=True)
  out, err = capsys.readouterr()
  assert code == 2
  lines = out.splitlines()
  (place,) = [n for n, line in enumerate(lines) if line.startswith('failed')]
  assert lines[place].startswith('failed   workdir (')
  said = ' '.join(' '.join(lines[place + 1 :]).split())
  assert said.startswith(f'{tmp_path}/file cannot be written (Not a directory)')
  assert 'NotADirectoryError' in err  # the traceback
  assert err.splitlines()[-1] == (
    'grpo-jax: 1 of 11 checks failed (workdir); do what these checks say, '
    'and run the doctor again.'
  )
  checks = [line for line in lines if line and line[0] != ' ']
  assert len(checks) == 11 and 'ok       versions (' in checks[0]


def test_what_is_slow_is_no_failure(tiny, capsys, monkeypatch):
  monkeypatch.setattr(host_checks, 'LEAST_WRITE_MB_PER_S', 1e9)
  assert doctor.examine(processes.ALONE, '.') == 0
  out, err = capsys.readouterr()
  assert err == '' and '\nslow     workdir (' in out
  assert out.splitlines()[-1] == (
    'No check failed, but 1 of 11 found less than expected (workdir).'
  )


def test_a_line_says_which_process_has_failed():
  line = Line(
    'workdir', 'failed', '16 MB written', '20 MB/s', 1.234, 0.5,
    values=({}, None, {}), failures=((1, 'This disk is full.'),),
  )  # fmt: skip
  assert doctor.text(line) == (
    'failed   workdir (1.23 s, 0.50 s of it compiling)\n'
    '         16 MB written\n'
    '         process 1: This disk is full.\n'
    '         expected: 20 MB/s'
  )
  (found,) = doctor.to_json([line], 3)['checks']
  assert found['values'] == [{}, None, {}]
  assert found['failures'] == [{'process': 1, 'sentence': 'This disk is full.'}]


def test_lines_fit_the_terminal():
  line = Line('a', 'ok', 'word ' * 60, 'word ' * 60, 1.0)
  for columns in 50, 120:
    shown = doctor.text(line, columns).splitlines()
    assert columns - 8 < max(map(len, shown)) <= columns


@pytest.mark.parametrize(
  'given, words',
  [
    (['--config=configs/arithmetic.py'], 'doctor got --config, which it'),
    (['--coordinator=host:1'], '--num_processes and --process_id belong'),
    (['runs'], 'doctor got runs, which it does not read'),
  ],
)
def test_other_flags_are_refused(given, words):
  cli.assert_refused(cli.call('doctor', *given), words)


@pytest.mark.parametrize(
  'workdir', ['', '--workdir=no/run', '--workdir=gs://b']
)
def test_the_workdir_may_be_missing_empty_or_a_bucket(workdir):
  found = arguments.read(['doctor', *workdir.split()])
  assert found.workdir == (workdir.partition('=')[2] or None)


PROGRAM = """
import os, pathlib, signal, sys
from grpo_jax.hosts import watch
watch.SILENT_SECS, watch.BEAT_SECS = 4.0, .2
watch.GRACE_SECS, watch.FAIL_SECS = 1.0, 2.0
from grpo_jax.commands import main
from grpo_jax.planning import device_checks, host_checks
device_checks.ON_CPU = device_checks.Sizes(64, 1, 1, 1, .001)
host_checks.workdirs.SHARED_SECS = .5
case, address, rank, workdir = sys.argv[1:]
measured = device_checks.collective, host_checks.versions, host_checks._where
def of_another_version():
  found = measured[1]()
  found['versions']['optax'] = '0.0.1'
  return found
def without_luck(found):
  raise RuntimeError('no luck here')
def dies(sizes):
  os.kill(os.getpid(), signal.SIGKILL)
def raises(sizes):
  raise ValueError('a cable is loose')
if rank == '1' and case == 'fails':
  host_checks.versions, host_checks.memory = of_another_version, without_luck
  host_checks._where = lambda workdir: pathlib.Path(workdir, 'other')
if case == 'hangs':
  import jax, time
  from grpo_jax.hosts import joining
  joining.DEVICES_SECS = .2
  jax.process_index = lambda: time.sleep(60)
if rank == '1' and case in ('dies', 'raises'):
  device_checks.collective = {'dies': dies, 'raises': raises}[case]
sys.argv = [
  'grpo-jax', 'doctor', f'--workdir={workdir}', f'--coordinator={address}',
  '--num_processes=2', f'--process_id={rank}', '--json',
]
main.run()
"""


def two(case, workdir):
  """Exit codes, and what both have printed, of 2 processes x 2 devices."""
  (workdir / 'other').mkdir()
  with socket.socket() as free:
    free.bind(('localhost', 0))
    address = f'localhost:{free.getsockname()[1]}'
  environment = cli.environment()
  environment['XLA_FLAGS'] += ' --xla_force_host_platform_device_count=2'
  both = []
  for rank in '01':
    one = subprocess.Popen(
      [sys.executable, '-c', PROGRAM, case, address, rank, str(workdir)],
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
      env=environment | {'JAX_PLATFORMS': 'cpu'},
    )
    cli.ends_with_the_test(one)
    both.append(one)
  said = [one.communicate(timeout=300) for one in both]
  return [one.returncode for one in both], said


def verdicts(report):
  return {check['check']: check['verdict'] for check in report['checks']}


@pytest.mark.long
def test_two_processes_measure_together(tmp_path):
  codes, ((out, err), (other_out, _)) = two('goes well', tmp_path)
  assert codes == [0, 0], err
  assert other_out == ''
  report = json.loads(out)
  assert report['processes'] == 2 and report['failed'] == []
  assert 'skipped' not in verdicts(report).values()
  checks = {check['check']: check for check in report['checks']}
  (sums, _) = checks['collective']['values']
  assert (sums['devices'], sums['hosts']) == (4, 2)
  assert '4 x cpu (cpu) in 2 processes' in checks['devices']['measured']
  assert len(checks['matrix product']['values']) == 2
  assert [path.name for path in tmp_path.iterdir()] == ['other']


@pytest.mark.long
def test_what_fails_in_the_other_is_printed_with_its_number(tmp_path):
  codes, ((out, err), (other_out, _)) = two('fails', tmp_path)
  assert codes == [2, 2], err
  report = json.loads(out)
  assert other_out == ''
  assert report['failed'] == ['versions', 'memory', 'shared workdir']
  assert '3 of 11 checks failed (versions, memory, shared' in err
  versions, _, memory = report['checks'][:3]
  assert 'Process 1 has optax 0.0.1' in versions['measured']
  sentence = 'RuntimeError: no luck here.'
  assert memory['failures'] == [{'process': 1, 'sentence': sentence}]
  assert verdicts(report)['collective'] == 'ok'


@pytest.mark.long
@pytest.mark.parametrize(
  'case, code, words',
  [
    ('dies', processes.START_AGAIN, 'Process 1 on '),
    ('raises', 2, 'Process 1 has failed: a cable is loose'),
  ],
)
def test_one_that_does_not_come_to_a_sum_ends_the_other(
  case, code, words, tmp_path
):
  (first, _), ((out, err), _) = two(case, tmp_path)
  assert first == code and words in err and out == ''


@pytest.mark.long
def test_devices_that_do_not_come_end_the_doctor(tmp_path):
  codes, said = two('hangs', tmp_path)
  assert codes == [2, 2]
  for out, err in said:
    assert out == '' and 'JAX has not found the devices of ' in err
