"""`grpo-jax generate`: real processes, and how they end."""

import signal
import socket
import time

import pytest

from grpo_jax.hosts import processes
from tests import cli
from tests import runs
from tests.run.jobs import doors


def free_port():
  with socket.socket() as free:
    free.bind(('127.0.0.1', 0))
    return free.getsockname()[1]


def learner(workdir, port, *more):
  return cli.popen(
    'train', cli.SMALL, cli.JUDGE, f'--workdir={workdir}',
    '--config.steps=4', '--config.sampler.ahead=1',
    '--config.generator.parts=2',
    f'--config.generator.listen=127.0.0.1:{port}', *more,
  )  # fmt: skip


def generator(port, *more):
  return cli.popen('generate', f'--learner=127.0.0.1:{port}', *more)


def ended(process, secs=240):
  out, err = process.communicate(timeout=secs)
  return process.returncode, out, err


@pytest.mark.parametrize(
  'words, said',
  [
    ((), 'generate needs --learner, the HOST:PORT at which the run listens'),
    (('--learner=here',), '--learner=here; give HOST:PORT'),
    (('--learner=h:1', '--wait_secs=0'), '--wait_secs=0.0; give more than 0'),
    (('--learner=h:1', '--secret=nowhere'), 'nowhere cannot be used'),
  ],
)
def test_what_cannot_be_done_is_refused(words, said):
  done = cli.command('generate', *words)
  assert done.returncode == 2 and done.stdout == ''
  assert done.stderr.startswith(f'grpo-jax: {said}'), done.stderr
  assert done.stderr.count('\n') == 1


def test_a_secret_must_be_one(tmp_path):
  short = tmp_path / 'short'
  short.write_text('abc\n')
  done = cli.command('generate', '--learner=h:1', f'--secret={short}')
  assert done.returncode == 2
  assert 'holds a secret of 3 bytes; give at least 16' in done.stderr


def test_without_a_learner_it_waits_and_says_to_start_again():
  done = cli.command(
    'generate', f'--learner=127.0.0.1:{free_port()}', '--wait_secs=1'
  )
  assert done.returncode == processes.START_AGAIN
  waits, why = done.stderr.splitlines()
  assert 'waits for the learner at 127.0.0.1:' in waits
  assert why.startswith('grpo-jax: The learner at 127.0.0.1:')
  assert 'It has not for 1 s (--wait_secs); start the generator' in why


@pytest.mark.parametrize(
  'number, code', [(signal.SIGTERM, 143), (signal.SIGINT, 130)]
)
def test_a_signal_ends_its_wait(number, code):
  port = free_port()
  process = generator(port)
  assert process.stderr.readline().endswith(f'127.0.0.1:{port}\n')
  process.send_signal(number)
  assert ended(process, 60)[0] == code


@pytest.mark.long
def test_generators_that_are_killed_stand_still_or_come_late(tmp_path):
  """And the run is the one that draws by itself, bit for bit."""
  secret = tmp_path / 'secret'
  secret.write_text('a' * 32)
  slow = cli.JUDGE.replace('tests.judges:even', 'tests.run.jobs.judges:slow')
  more = f'--config.generator.secret={secret}', slow, '--config.steps=12'
  alone = cli.command(
    'train', cli.SMALL, f'--workdir={tmp_path / "alone"}',
    '--config.sampler.ahead=1', '--config.generator.parts=2', *more[1:],
  )  # fmt: skip
  assert alone.returncode == 0, alone.stderr
  port = free_port()
  run = learner(tmp_path / 'jobs', port, *more)
  first, second = (generator(port, f'--secret={secret}') for _ in range(2))
  intruder = generator(port, '--wait_secs=300')  # has no secret
  steps = lambda: len((tmp_path / 'jobs/metrics.jsonl').read_text().split('\n'))
  end = time.monotonic() + 240
  while not (tmp_path / 'jobs/metrics.jsonl').exists() or steps() < 3:
    assert run.poll() is None and time.monotonic() < end
    time.sleep(0.05)
  first.kill()
  second.send_signal(signal.SIGSTOP)
  third = generator(port, f'--secret={secret}')
  assert ended(run)[0] == 0
  second.send_signal(signal.SIGCONT)
  assert ended(third)[0] == 0
  code, _, said = ended(intruder)
  assert code == 2 and 'has another secret' in said
  second.terminate()
  runs.assert_equal(tmp_path / 'alone', tmp_path / 'jobs')


@pytest.mark.long
def test_a_learner_that_is_killed_is_found_again(tmp_path):
  port = free_port()
  slow = cli.JUDGE.replace('tests.judges:even', 'tests.run.jobs.judges:slow')
  more = slow, '--config.steps=12', '--config.checkpoint.every_steps=1'
  run, one = learner(tmp_path / 'run', port, *more), generator(port)
  end = time.monotonic() + 240
  while not runs.checkpoints(tmp_path / 'run')[1:]:
    assert run.poll() is None and time.monotonic() < end
    time.sleep(0.05)
  run.kill()
  run.wait()
  code, out, said = ended(learner(tmp_path / 'run', port, *more))
  assert code == 0 and '"steps": 12' in out, said
  assert ended(one)[0] == 0
  assert doors.SECRET  # of tests without a model
