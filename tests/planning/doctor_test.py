"""The report: what it says when checks pass, fail, hang or are left out."""

import time

import pytest

from grpo_jax.hosts import processes
from grpo_jax.planning import device_checks
from grpo_jax.planning import doctor
from grpo_jax.planning import host_checks
from grpo_jax.planning.doctor import Check
from grpo_jax.planning.host_checks import Judged
from grpo_jax.run.jobs import desk as desk_lib
from grpo_jax.run.jobs import learning
from tests.hosts import processes_test
from tests.run.jobs import doors

pytestmark = pytest.mark.quick

TINY = device_checks.Sizes(
  64, copy_mib=1, sum_mib=1, transfer_mib=1, secs=0.001
)
ORDER = [
  'versions', 'devices', 'memory', 'matrix product', 'memory bandwidth',
  'collective', 'host to device', 'workdir', 'shared workdir', 'clocks',
  'compiled programs',
]  # fmt: skip


@pytest.fixture(scope='module')
def once():
  """What the devices of this process have measured, by the name of a check."""
  names = 'matrix_product', 'bandwidth', 'collective', 'transfer'
  return {name: getattr(device_checks, name)(TINY) for name in names}


@pytest.fixture
def measured_once(once, monkeypatch):
  for name, found in once.items():
    replaced = lambda sizes, found=found: found
    monkeypatch.setattr(device_checks, name, replaced)


def examine(peers=processes.ALONE, workdir=None, sizes=TINY, give_up=None):
  told = []
  lines = doctor.examine(peers, workdir, told.append, give_up, sizes)
  assert told == lines
  return {line.name: line for line in lines}


def verdicts(lines):
  return {line.name: line.verdict for line in lines.values()}


def test_a_learner_is_asked_whether_this_machine_could_draw(
  measured_once, monkeypatch
):
  config = json.loads(json.dumps(dataclasses.asdict(config_lib.Config())))
  same = learning.needed(config_lib.Config())
  hello = {
    'run': 'a run',
    'config': config,
    'same': same,
    'doors': ['here'],
    'weights': {'way': 'files'},
  }
  desk = desk_lib.Desk()
  asked = lambda address: doctor.examine(
    processes.ALONE, None, lambda line: None, None, TINY, None, (address, '')
  )[-1]
  with doors.opened(desk, secret=b'', hello=hello) as address:
    line = asked(address)
    assert (line.name, line.verdict) == ('learner', 'ok'), line
    assert line.measured.startswith('answers within ')
    assert line.measured.endswith('weights by files')
    same['the version of jax'] = "'0.1'"
    line = asked(address)
    assert line.verdict == 'failed'
    assert "the version of jax: '" in line.measured and '0.1' in line.measured
  line = asked(address)
  assert line.verdict == 'failed'
  assert 'does not answer' in line.failures[0][1]
  with doors.opened(desk, hello=hello) as address:  # with a secret
    assert 'has another secret' in asked(address).failures[0][1]


def test_on_a_sound_machine_nothing_fails(tmp_path):
  lines = examine(workdir=str(tmp_path / 'run' / 'below'))
  assert list(lines) == ORDER
  left_out = {'shared workdir', 'clocks'}
  assert verdicts(lines) == {
    name: 'skipped' if name in left_out else 'ok' for name in ORDER
  }
  assert 'one process' in lines['clocks'].measured
  assert lines['devices'].measured.startswith('8 x cpu (cpu) in 1 process')
  assert lines['matrix product'].expected == 'no figure for a CPU'
  for name in 'matrix product', 'memory bandwidth', 'collective':
    assert 0 < lines[name].compile_secs < lines[name].secs
  assert not list(tmp_path.iterdir())  # the file is gone, no folder was made
  assert str(tmp_path) in lines['workdir'].measured


def test_without_a_workdir_nothing_is_written(measured_once):
  lines = examine()
  assert (
    lines['workdir'].verdict == lines['shared workdir'].verdict == 'skipped'
  )
  assert 'no --workdir was given' in lines['workdir'].measured


def fails(*_):
  raise OSError(13, 'Permission denied', '/somewhere')


@pytest.mark.parametrize(
  'module, name, check',
  [
    (host_checks, 'versions', 'versions'),
    (host_checks, 'memory', 'memory'),
    (device_checks, 'matrix_product', 'matrix product'),
    (device_checks, 'bandwidth', 'memory bandwidth'),
    (device_checks, 'collective', 'collective'),
    (device_checks, 'transfer', 'host to device'),
    (host_checks, 'written', 'workdir'),
    (host_checks, 'compiled', 'compiled programs'),
    (host_checks, 'judge_versions', 'versions'),
  ],
)
def test_a_check_that_raises_fails_and_the_others_go_on(
  module, name, check, measured_once, monkeypatch, tmp_path
):
  monkeypatch.setattr(module, name, fails)
  lines = examine(workdir=str(tmp_path))
  bad = {name for name, line in lines.items() if line.verdict == 'failed'}
  assert bad == {check} and list(lines) == ORDER
  line = lines[check]
  said = line.measured or line.failures[0][1]
  assert said == '/somewhere cannot be used (Permission denied).'
  assert 'Permission denied' in line.trace


def test_without_devices_what_needs_them_is_left_out(monkeypatch):
  def none(found):
    raise RuntimeError('Unable to initialize backend\nand more')

  monkeypatch.setattr(host_checks, 'devices', none)
  lines = examine()
  assert lines['devices'].failures == (
    (0, 'RuntimeError: Unable to initialize backend.'),
  )
  for name in ORDER[2:7]:
    assert lines[name].verdict == 'skipped'
    assert lines[name].measured == 'JAX has no devices'
  assert lines['compiled programs'].verdict == 'ok'


def test_a_check_that_does_not_come_back_is_given_up(monkeypatch):
  monkeypatch.setattr(doctor, 'LIMIT_SECS', 0.05)
  hangs = Check('hangs', lambda: time.sleep(0.5) or {}, lambda _: Judged(''))
  monkeypatch.setattr(doctor, 'checks', lambda *_: [hangs])
  given_up = []
  examine(give_up=given_up.append)
  (line,) = given_up
  assert (line.name, line.verdict) == ('hangs', 'failed')
  assert 'not come back within 0 s' in line.measured


@pytest.mark.parametrize(
  'name, check, words',
  [
    ('devices', 'devices', 'and whether the driver answers'),
    ('written', 'workdir', 'A file system or a bucket does not answer'),
  ],
)
def test_what_was_waited_for_is_said(name, check, words, monkeypatch, tmp_path):
  of_check = [
    one for one in doctor.checks(processes.ALONE) if one.name == check
  ]
  monkeypatch.setattr(doctor, 'LIMIT_SECS', 0.05)
  hangs = of_check[0]._replace(
    measure=lambda: time.sleep(0.3) or {}, left_out=lambda lines: ''
  )
  monkeypatch.setattr(doctor, 'checks', lambda *_: [hangs])
  given_up = []
  examine(give_up=given_up.append)
  assert [line.name for line in given_up] == [check]
  assert words in given_up[0].measured


def together(checks_of, monkeypatch, number=3):
  """The reports of several processes, which are threads here."""
  monkeypatch.setattr(doctor, 'checks', lambda peers, *_: checks_of(peers))

  def body(peers):
    return doctor.examine(peers, None, lambda line: None, lambda line: None)

  reports, _ = processes_test.run(body, number)
  without_times = [
    [line._replace(secs=0, trace='') for line in report] for report in reports
  ]
  assert all(report == without_times[0] for report in without_times)
  return reports


def test_a_failure_of_one_process_is_in_the_report_of_all(monkeypatch):
  def checks_of(peers):
    def measure():
      if peers.rank == 1:
        raise ValueError('This disk is full.')
      return {'mb': peers.rank}

    def judge(told):
      return Judged(f'measured in {sorted(told)}: {told[2]["mb"]}', 'no less')

    yes = Check('next', lambda: {'rank': peers.rank}, lambda t: Judged(str(t)))
    return [Check('disk', measure, judge, is_joint=True), yes]

  (first, after), own, _ = together(checks_of, monkeypatch)
  assert first.verdict == 'failed'
  assert first.failures == ((1, 'This disk is full.'),)
  assert first.measured == 'measured in [0, 2]: 2'
  assert first.values == ({'mb': 0}, None, {'mb': 2})
  assert first.trace == '' and 'This disk is full.' in own[0].trace
  assert after.verdict == 'ok' and str({2: {'rank': 2}})[1:-1] in after.measured


def test_what_only_one_process_finds_is_judged_by_all(monkeypatch, tmp_path):
  """Versions of one process differ, and it sees another directory."""
  (tmp_path / 'other').mkdir()
  monkeypatch.setattr(host_checks.workdirs, 'SHARED_SECS', 0.3)

  def checks_of(peers):
    where = tmp_path / 'other' if peers.rank == 1 else tmp_path
    found = {'versions': {'jax': f'0.{peers.rank == 1:d}'}, 'git': 'abc'}
    return [
      Check('versions', lambda: found, host_checks.judge_versions),
      Check(
        'shared workdir',
        lambda: host_checks.shared(str(where), peers),
        lambda told: host_checks.judge_shared(3, told),
        is_joint=True,
      ),
      Check(
        'clocks',
        lambda: host_checks.clocks(peers),
        host_checks.judge_clocks,
        is_joint=True,
      ),
    ]

  (versions, shared, clocks), *_ = together(checks_of, monkeypatch)
  assert versions.verdict == 'failed' and not versions.failures
  assert versions.measured.startswith('Process 1 has jax 0.1, and the others')
  assert [rank for rank, _ in shared.failures] == [1]
  assert 'does not see in' in shared.failures[0][1]
  assert clocks.verdict == 'ok' and 'apart' in clocks.measured


def test_devices_that_differ_are_not_summed_over(measured_once):
  """In threads, each of which has all the devices of this process."""

  def body(peers):
    return examine(peers)

  (report, other), _ = processes_test.run(body, 2)
  assert report['devices'].verdict == 'failed'
  assert '16 x cpu (cpu) in 2 processes, but JAX' in report['devices'].measured
  assert report['collective'].verdict == 'skipped'
  assert report['matrix product'].verdict == 'ok'
  assert ' on each of 16 devices' in report['matrix product'].measured
  assert verdicts(report) == verdicts(other)
