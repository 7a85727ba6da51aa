"""launch/local.py, with programs that end as they are told."""

import contextlib
import json
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from tests import cli
from tests.launch import scripts

FAKE = pathlib.Path(__file__).with_name('fake_program.py')


def start(place, story, *options):
  """The launcher; the story says how many processes."""
  process = subprocess.Popen(
    [
      sys.executable, 'launch/local.py', '--pause_secs=0', '--stop_secs=600',
      f'--num_processes={story.partition(";")[0].count(",") + 1}',
      f'--program={sys.executable} -S {FAKE} {place}', *options, '--', story,
    ],
    cwd=scripts.ROOT,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )  # fmt: skip
  cli.ends_with_the_test(process)
  return process


def ended(process):
  """The exit code, and what was printed, sooner than `start` would kill."""
  out, err = process.communicate(timeout=300)
  return process.returncode, out, err


def starts(place):
  """How often process 0 was started."""
  return len(list(place.glob('[0-9]*.0')))


def wait_for(place, *names):
  """Until these processes are ready; what they have told."""
  end = time.monotonic() + 120
  while not all((place / name).exists() for name in names):
    assert time.monotonic() < end, names
    time.sleep(0.02)
  return [json.loads((place / name).read_text()) for name in names]


def is_gone(pid):
  """Whether a process has ended; nobody may have asked for its exit code."""
  done = scripts.run('ps', '-o', 'stat=', '-p', pid)
  return done.stdout.strip()[:1] in ('', 'Z')


@pytest.mark.parametrize(
  'story, options, code, times',
  [
    ('0,0,0', (), 0, 1),
    ('75,75;0,0', (), 0, 2),
    ('killed,75;75,killed;0,0', (), 0, 3),
    ('143,143;0,0', (), 0, 2),  # not by the launcher
    ('2,75', (), 2, 1),
    ('75,1', (), 1, 1),
    ('0,2', (), 2, 1),
    ('130,130', (), 130, 1),
    ('2,ignores', ('--stop_secs=1',), 2, 1),
    ('0,ignores;0,0', ('--stop_secs=1',), 0, 2),
    ('ignores,killed;0,0', ('--stop_secs=1',), 0, 2),
    ('75,75;75,75;0,0', ('--max_restarts=1',), 75, 2),
    ('75;75;75;0', ('--max_restarts=1', '--progress_secs=0'), 0, 4),
  ],
)
def test_ends_and_starts_again(tmp_path, story, options, code, times):
  found, _, said = ended(start(tmp_path, story, *options))
  assert (found, starts(tmp_path)) == (code, times), said
  assert ('kills process' in said) == ('ignores' in story)


def test_generators_come_and_go_by_themselves(tmp_path):
  begun = time.monotonic()
  process = start(tmp_path, 'drawn,drawn', '--generators=2')
  code, out, said = ended(process)
  assert (code, starts(tmp_path)) == (0, 1), said
  assert 'has ended with exit code 75: starts it again' in said
  assert '[g0] it draws' in out and '[g1] it draws' in out
  told = [
    json.loads((tmp_path / f'generator.{n}').read_text()) for n in range(3)
  ]
  (flag,) = json.loads((tmp_path / '0.1').read_text())['flags'][:1]
  address = flag.removeprefix('--config.generator.listen=')
  assert address.startswith('127.0.0.1:')
  assert {tuple(one['flags']) for one in told} == {(f'--learner={address}',)}
  assert all(is_gone(one['pid']) for one in told)
  assert not list(tmp_path.glob('generator.3'))
  assert time.monotonic() - begun > 5  # they hear that the run is done


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_passed_on_to_all_once(tmp_path, number):
  process = start(tmp_path, 'waits,waits,waits;0,0,0')
  wait_for(tmp_path, '0.0', '0.1', '0.2')
  process.send_signal(number)
  assert ended(process)[0] == 128 + number
  for rank in range(3):
    told = (tmp_path / f'signals.{rank}').read_text()
    assert told == f'{int(number)}\n'
  assert starts(tmp_path) == 1


def test_what_ignores_a_signal_is_killed_after_the_bound(tmp_path):
  process = start(tmp_path, 'waits,ignores;0,0', '--stop_secs=5')
  wait_for(tmp_path, '0.0', '0.1')
  process.send_signal(signal.SIGTERM)
  code, _, said = ended(process)
  assert code == 128 + signal.SIGKILL and 'kills process [1]' in said
  assert starts(tmp_path) == 1


def test_a_second_signal_kills_at_once(tmp_path):
  process = start(tmp_path, 'ignores,ignores', '--stop_secs=60')
  wait_for(tmp_path, '0.0', '0.1')
  process.send_signal(signal.SIGINT)
  wait_for_text(tmp_path / 'signals.0')
  process.send_signal(signal.SIGINT)
  assert ended(process)[0] == 130


def wait_for_text(path):
  end = time.monotonic() + 120
  while not (path.exists() and path.read_text()):
    assert time.monotonic() < end
    time.sleep(0.02)


def test_a_signal_between_two_starts_ends_it(tmp_path):
  process = start(tmp_path, '75;0', '--pause_secs=60')
  while 'starts all again' not in process.stderr.readline():
    assert process.poll() is None
  process.send_signal(signal.SIGTERM)
  assert ended(process)[0] == 143 and starts(tmp_path) == 1


@pytest.mark.parametrize('story, kills', [('waits,waits', True), ('leaves', 0)])
def test_nothing_is_left_behind(tmp_path, story, kills):
  """If the launcher is killed; and of a process that has left one behind."""
  process = start(tmp_path, story)
  names = [f'0.{rank}' for rank in range(story.count(',') + 1)]
  pids = [told.get('left', told['pid']) for told in wait_for(tmp_path, *names)]
  if kills:
    process.kill()
  ended(process)
  end = time.monotonic() + 120
  while not all(map(is_gone, pids)):
    assert time.monotonic() < end, pids
    time.sleep(0.05)


def test_each_line_has_its_process_and_its_stream(tmp_path):
  code, out, err = ended(start(tmp_path, '0,0,0'))
  assert code == 0
  assert sorted(out.splitlines()) == [f'[{rank}] it is 0' for rank in range(3)]
  errors = [line for line in err.splitlines() if not line.startswith('local')]
  assert sorted(errors) == [f'[{rank}] an error' for rank in range(3)]


def test_each_process_has_a_number_a_place_to_meet_and_devices(
  tmp_path, monkeypatch
):
  monkeypatch.setenv(
    'XLA_FLAGS', '--xla_one=1 --xla_force_host_platform_device_count=8'
  )
  monkeypatch.delenv('JAX_PLATFORMS', raising=False)
  ended(start(tmp_path, '75,75;0,0', '--devices_per_process=3'))
  told = wait_for(tmp_path, '0.0', '0.1', '1.0', '1.1')
  for number, one in enumerate(told):
    address, *others = one['flags']
    assert address.startswith('--coordinator=localhost:')
    assert others == ['--num_processes=2', f'--process_id={number % 2}']
    flags = one['env']['XLA_FLAGS'].split()
    assert flags == ['--xla_one=1', '--xla_force_host_platform_device_count=3']
    assert one['env']['JAX_PLATFORMS'] == 'cpu'
  addresses = [one['flags'][0] for one in told]
  assert addresses[0] == addresses[1] and addresses[2] == addresses[3]


@pytest.mark.parametrize(
  'arguments, words',
  [
    (['--num_processes=2'], 'give the command of grpo-jax after --'),
    (['--num_processes=0', '--', 'train'], '--num_processes=0; give 1 or more'),
    (['--', 'train'], '--num_processes'),
    (['--num_processes=1', '--program=/no/such', '--', 'train'], '/no/such'),
  ],
)
def test_what_cannot_be_used_is_refused(arguments, words):
  done = scripts.run(sys.executable, 'launch/local.py', *arguments)
  assert done.returncode == 2 and words in done.stderr
  assert 'Traceback' not in done.stderr


def test_a_reader_that_leaves_does_not_stop_the_processes(tmp_path):
  process = start(tmp_path, '75,75;0,0')
  with contextlib.suppress(OSError):
    process.stdout.close()
  assert process.wait(120) == 0 and starts(tmp_path) == 2
