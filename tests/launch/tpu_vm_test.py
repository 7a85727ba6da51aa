"""launch/tpu_vm.sh with a stand-in for gcloud, and worker.sh for real."""

import os
import shutil
import signal
import subprocess
import time

import pytest

from tests import cli
from tests.launch import scripts

# Answers from files, a line for each question; `fails` is no answer.
GCLOUD = """
case $* in
  *'queued-resources list'*) file=$PLACE/states ;;
  *'worker.sh status'*) file=$PLACE/workers ;;
  *'worker.sh revision'*)
    echo "revision: w-0 abc123"
    echo "revision: w-1 ${INSTALLED:-abc123}"
    exit
    ;;
  *)
    echo "$*" >>"$PLACE/called"
    exit
    ;;
esac
line=$(head -n 1 "$file")
sed -i 1d "$file"
[ "$line" != fails ] || exit 1
case $file in
  *states) echo "$line" ;;
  *) tr '|' '\\n' <<<"$line" | sed 's/^/status: /' ;;
esac
"""
ONE = '--name=pod --zone=z'


def watched(place, looks, *options):
  """How a watch ends, and what it has called.

  Args:
    place: an empty folder.
    looks: for each look the state of the machines, and after a colon what the
      workers say, if they are asked.
    options: more of them.
  """
  states, workers = [], []
  for look in looks:
    state, _, told = look.partition(':')
    states += [state] * (1 + told.startswith('bare'))  # setup asks too
    workers += [told] * (1 + told.startswith('bare')) if told else []
  (place / 'states').write_text('\n'.join([*states, '']))
  (place / 'workers').write_text('\n'.join([*workers, '']))
  programs = place / 'bin'
  scripts.stand_in(programs, 'gcloud', GCLOUD)
  scripts.stand_in(programs, 'git', 'echo "$*" >>"$PLACE/git"; echo abc123')
  scripts.stand_in(programs, 'sleep', '')
  done = scripts.run(
    scripts.LAUNCH / 'tpu_vm.sh', 'watch', *ONE.split(), *options, '--',
    'train', '--config=a b', programs=programs, PLACE=place,
  )  # fmt: skip
  assert not (place / 'workers').read_text(), done.stderr
  called = place / 'called'
  lines = called.read_text().splitlines() if called.exists() else []
  return done, [short(line) for line in lines]


def short(line):
  """create, delete, copy, or the words after worker.sh."""
  for word in 'create', 'delete':
    if f'queued-resources {word} pod --zone=z' in line:
      return word
  if 'scp' in line:
    return 'copy'
  if 'tar ' in line or 'mkdir' in line:
    return 'unpack'
  assert '--worker=all' in line
  return line.partition('worker.sh ')[2]


START = "start train '--config=a b'"
ON, LATE = 'ACTIVE:running|running', 'ACTIVE:75|running'
SET_UP = ['copy', 'unpack', 'unpack', 'setup']


@pytest.mark.parametrize(
  'looks, called, code',
  [
    (['ACTIVE:running|running', 'ACTIVE:0|running', 'ACTIVE:0|0'], [], 0),
    (['ACTIVE:none|none', 'ACTIVE:0|0'], [START], 0),
    ([ON, 'ACTIVE:75|137', 'ACTIVE:0|0'], [START], 0),
    ([ON, 'ACTIVE:143|143', 'ACTIVE:0|0'], [START], 0),
    ([ON, 'ACTIVE:75|none', 'ACTIVE:0|0'], [START], 0),
    # The codes of an earlier run do not end a new watch.
    (['ACTIVE:2|2', ON, 'ACTIVE:0|0'], [START], 0),
    (['ACTIVE:143 asked|143 asked', 'ACTIVE:0|0'], [START], 0),
    (['ACTIVE:2|running', 'ACTIVE:2|running'], ['stop 90'], 2),
    (
      ['', 'WAITING_FOR_RESOURCES', 'ACTIVE:bare|bare', 'ACTIVE:0|0'],
      ['create', *SET_UP, START],
      0,
    ),
    (
      ['SUSPENDING', 'SUSPENDED', 'ACTIVE:bare', 'ACTIVE:0'],
      ['delete', 'create', *SET_UP, START],
      0,
    ),
    (
      [ON, 'FAILED', 'ACTIVE:bare', 'ACTIVE:0'],
      ['delete', 'create', *SET_UP, START],
      0,
    ),
    # The cloud calls a machine well that does not answer any more.
    (
      [ON, *21 * ['ACTIVE:fails'], 'ACTIVE:bare', 'ACTIVE:0'],
      ['delete', 'create', *SET_UP, START],
      0,
    ),
    ([ON, ''], [], 2),  # somebody has deleted the machines
    ([ON, 'fails', 'ACTIVE:fails', 'ACTIVE:0'], [], 0),
    ([ON, 'ACTIVE:2|running|running'], ['stop 90'], 2),
    ([ON, 'ACTIVE:75|1'], ['stop 90'], 1),
    ([ON, 'ACTIVE:255|running'], ['stop 90'], 255),
    ([ON, 'ACTIVE:143 asked|143 asked'], ['stop 90'], 143),
    ([ON, *2 * [LATE], 'ACTIVE:75|75', 'ACTIVE:0|0'], [START], 0),
    # A machine was made anew while the others ran on.
    (
      [ON, *4 * ['ACTIVE:running|bare'], 'ACTIVE:bare|137', 'ACTIVE:0|0'],
      ['kill', *SET_UP, START],
      0,
    ),
    ([ON, *4 * [LATE], 'ACTIVE:75|137', 'ACTIVE:0|0'], ['kill', START], 0),
  ],
)
def test_what_a_watch_does(tmp_path, looks, called, code):
  done, found = watched(tmp_path, looks)
  assert (found, done.returncode) == (called, code), done.stderr


def test_new_starts_are_limited(tmp_path):
  looks = [ON, *3 * ['ACTIVE:75|75']]
  done, called = watched(tmp_path, looks, '--max_restarts=2')
  assert done.returncode == 2 and called == [START, START, 'stop 90']
  assert 'has ended again, after 2 new starts' in done.stderr


def test_machines_are_deleted_at_the_end_if_asked(tmp_path):
  done, called = watched(tmp_path, [ON, 'ACTIVE:2'], '--delete_after')
  assert done.returncode == 2 and called == ['stop 90', 'delete']
  (place := tmp_path / 'limited').mkdir()
  looks = [ON, *2 * ['ACTIVE:75|75']]
  done, called = watched(place, looks, '--delete_after', '--max_restarts=1')
  assert done.returncode == 2
  assert called == [START, 'stop 90', 'delete']


def test_machines_made_anew_get_the_same_commit(tmp_path):
  watched(tmp_path, ['ACTIVE:bare', 'ACTIVE:0'], '--revision=v1')
  first, *_, last = (tmp_path / 'git').read_text().splitlines()
  assert first == 'rev-parse --verify --quiet v1^{commit}'
  assert last.startswith('archive ') and last.endswith(' abc123')


def set_up(place, workers, *options, **variables):
  """How `setup` ends, and what it has called, with such workers."""
  (place / 'states').write_text('ACTIVE\n')
  (place / 'workers').write_text(f'{workers}\n')
  programs = place / 'bin'
  scripts.stand_in(programs, 'gcloud', GCLOUD)
  scripts.stand_in(programs, 'git', GIT)
  done = scripts.run(
    scripts.LAUNCH / 'tpu_vm.sh', 'setup', *ONE.split(), *options,
    programs=programs, PLACE=place, **variables,
  )  # fmt: skip
  called = place / 'called'
  lines = called.read_text().splitlines() if called.exists() else []
  return done, [short(line) for line in lines]


GIT = """
case $1 in
  rev-parse) [[ $* != *v9* ]] && echo abc123 ;;
esac
"""


@pytest.mark.parametrize('workers', ['running|running', 'running asked|0'])
def test_nothing_is_installed_under_a_run(tmp_path, workers):
  done, called = set_up(tmp_path, workers)
  assert done.returncode == 2 and not called
  assert done.stderr.endswith(
    'tpu_vm.sh: a run is going on, and would lose its files; stop it first.\n'
  )


def test_nothing_is_installed_if_a_worker_does_not_answer(tmp_path):
  done, called = set_up(tmp_path, 'fails')
  assert done.returncode == 2 and not called
  assert 'a worker does not answer' in done.stderr


@pytest.mark.parametrize('workers', ['bare|bare', '143 asked|0', 'none|none'])
def test_every_worker_has_the_commit_that_was_asked_for(tmp_path, workers):
  done, called = set_up(tmp_path, workers)
  assert done.returncode == 0 and called == SET_UP, done.stderr
  assert done.stdout == 'abc123 is installed on w-0, w-1\n'


def test_a_worker_with_another_commit_is_named(tmp_path):
  done, _ = set_up(tmp_path, 'bare|bare', INSTALLED='def456')
  assert done.returncode == 2
  assert 'w-1 has def456, and not abc123; set up again' in done.stderr
  assert 'w-0 has' not in done.stderr and not done.stdout


def test_a_revision_that_is_not_there_is_refused(tmp_path):
  done, called = set_up(tmp_path, 'bare', '--revision=v9')
  assert done.returncode == 2 and not called
  assert '--revision=v9 is no commit of this checkout' in done.stderr


def test_variables_come_in_a_file_and_in_no_command(tmp_path):
  programs, value = tmp_path / 'bin', 'it\'s "hidden" $HOME\nand more'
  scripts.stand_in(programs, 'gcloud', SENT)
  done = scripts.run(
    scripts.LAUNCH / 'tpu_vm.sh', 'once', *ONE.split(), '--env=A_TOKEN', '--',
    'doctor', programs=programs, PLACE=tmp_path, TMPDIR=tmp_path, A_TOKEN=value,
  )  # fmt: skip
  assert done.returncode == 0, done.stderr
  words = (tmp_path / 'called').read_text()
  assert 'scp' in words and 'worker.sh once doctor' in words
  assert 'hidden' not in words + done.stdout + done.stderr
  assert not [*tmp_path.glob('grpo_jax-pod*')]  # the file is gone here
  sent = tmp_path / 'sent'
  assert sent.stat().st_mode & 0o077 == 0
  # A worker reads it once.
  (tmp_path / 'venv').mkdir()
  scripts.stand_in(
    tmp_path / 'venv' / 'bin', 'grpo-jax', 'printf %s "$A_TOKEN"'
  )
  done = scripts.run(
    scripts.LAUNCH / 'worker.sh', 'once', 'doctor',
    GRPO_JAX_PLACE=tmp_path / 'run', GRPO_JAX_VENV=tmp_path / 'venv',
    GRPO_JAX_ENV=sent,
  )  # fmt: skip
  assert done.stdout == value and not sent.exists(), done.stderr


SENT = """
echo "$*" >>"$PLACE/called"
if [ "$4" = scp ]; then cp -p "$5" "$PLACE/sent"; fi
"""


# worker.sh
PROGRAM = """
trap 'exit 143' TERM
echo "it is $*"
case $1 in
  waits) while true; do sleep 0.02; done ;;
  leaves)
    sleep 20 &
    echo $! >"$GRPO_JAX_PLACE/left"
    setsid sleep 20 & # which no signal to the group reaches
    ;;
  ignores)
    trap '' TERM
    echo ready
    while true; do sleep 0.02; done
    ;;
  saves)
    trap 'sleep 1; echo saved; exit 143' TERM
    echo ready
    while true; do sleep 0.02; done
    ;;
  *) exit "$1" ;;
esac
"""


class Worker:
  """worker.sh on a machine of its own."""

  def __init__(self, place):
    self.place = place

  def install(self):
    scripts.stand_in(self.place / 'venv' / 'bin', 'grpo-jax', PROGRAM)

  def __call__(self, *words):
    return scripts.run(
      scripts.LAUNCH / 'worker.sh',
      *words,
      GRPO_JAX_PLACE=self.place / 'run',
      GRPO_JAX_VENV=self.place / 'venv',
    )

  def status(self):
    return self('status').stdout.strip().removeprefix('status: ')

  def becomes(self, word):
    end = time.monotonic() + 120
    while self.status() != word:
      assert time.monotonic() < end, self.status()
      time.sleep(0.02)

  def is_ready(self):
    """Once its trap is set."""
    log, end = self.place / 'run' / 'log', time.monotonic() + 120
    while not (log.exists() and 'ready\n' in log.read_text()):
      assert time.monotonic() < end
      time.sleep(0.02)


@pytest.fixture
def worker(tmp_path):
  (tmp_path / 'venv' / 'bin').mkdir(parents=True)
  worker = Worker(tmp_path)
  yield worker
  worker('kill')


def test_a_worker_tells_how_it_is(worker):
  assert worker.status() == 'bare'
  worker.install()
  assert worker.status() == 'none'
  for code in '0', '75', '2':
    assert worker('start', code).returncode == 0
    worker.becomes(code)
  worker('start', 'leaves')
  worker.becomes('0')
  left = (worker.place / 'run' / 'left').read_text().strip()
  state = scripts.run('ps', '-o', 'stat=', '-p', left).stdout.strip()
  assert state[:1] in ('', 'Z')
  log = (worker.place / 'run' / 'log').read_text()
  assert 'grpo-jax 75\nit is 75\n' in log and 'it is 2' in log


def test_a_worker_starts_one_run_at_a_time_and_stops_it(worker):
  worker.install()
  assert worker('start', 'waits').returncode == 0
  assert worker.status() == 'running'
  refused = worker('start', '0')
  assert refused.returncode == 2 and 'stop it first' in refused.stderr
  stopped = worker('stop')
  assert stopped.returncode == 0
  assert 'the run has ended, with exit code 143' in stopped.stdout
  assert worker.status() == '143 asked'
  assert 'no run is going on' in worker('stop').stdout
  assert worker('start', '0').returncode == 0  # which was not asked to stop
  worker.becomes('0')


def test_a_worker_kills_what_does_not_end(worker):
  worker.install()
  worker('start', 'ignores')
  worker.becomes('running')
  worker.is_ready()
  stopped = worker('stop', '1')
  assert 'had not ended 1 s after it was asked to, and was' in stopped.stdout
  assert worker.status() == '137 asked'  # at once: it was waited for
  assert worker('start', 'waits').returncode == 0
  worker('kill')  # as the machine, at a reboot
  worker.becomes('137')


def test_stop_returns_when_the_run_has_saved(worker):
  worker.install()
  worker('start', 'saves')
  worker.is_ready()
  stopped = worker('stop')
  assert 'has ended, with exit code 143' in stopped.stdout
  assert (worker.place / 'run' / 'log').read_text().endswith('saved\n')


def test_nothing_begins_beside_a_run_that_is_ending(worker):
  """Also if what waits for it was killed, as when memory is short."""
  worker.install()
  worker('start', 'ignores')
  worker.is_ready()
  run = worker.place / 'run'
  os.kill(int((run / 'group').read_text()), signal.SIGKILL)
  assert worker.status() == 'running'
  for words in ('start', '0'), ('once', '0'), ('setup',):
    refused = worker(*words)
    assert refused.returncode == 2 and 'stop it first' in refused.stderr
  (run / 'asked').touch()
  assert 'has not ended yet' in worker('start', '0').stderr
  worker('stop', '1')
  worker.becomes('137 asked')
  assert worker('start', '0').returncode == 0


def test_a_process_that_has_its_number_by_now_is_not_the_run(worker):
  worker.install()
  worker('start', 'waits')
  worker('kill')
  run = worker.place / 'run'
  (run / 'pid').write_text(f'{os.getpid()}\n')
  assert worker.status() == '137'
  assert 'no run is going on' in worker('stop').stdout


UV = """
case $1 in
  venv)
    mkdir -p "${@: -1}/bin"
    printf '#!/usr/bin/env bash\\necho "$HOME/installed"' >"${@: -1}/bin/python"
    chmod +x "${@: -1}/bin/python"
    ;;
  pip)
    rm -rf "$HOME/installed"
    cp -r grpo_jax "$HOME/installed"
    echo "$*" >>"$HOME/pip"
    [ -z "${OLD:-}" ] || echo 'old = 1' >"$HOME/installed/__init__.py"
    ;;
esac
"""


@pytest.fixture
def machine(tmp_path):
  """A home where a commit was unpacked, its hash, and a caller of worker.sh."""
  source, home = tmp_path / 'source', tmp_path / 'home'
  (source / 'grpo_jax').mkdir(parents=True)
  (source / 'grpo_jax' / '__init__.py').write_text('new = 1\n')
  shutil.copytree(scripts.LAUNCH, source / 'launch')
  (home / 'grpo_jax').mkdir(parents=True)
  archive = home / 'grpo_jax.tar.gz'
  made = scripts.run(
    'bash', '-euc',
    'cd "$0"; git init -q; git add .; '
    'git -c user.name=a -c user.email=b commit -qm c; git rev-parse HEAD; '
    'git archive --format=tar.gz --output="$1" HEAD; tar -xzf "$1" -C "$2"',
    source, archive, home / 'grpo_jax',
  )  # fmt: skip
  assert made.returncode == 0, made.stderr
  programs = tmp_path / 'bin'
  scripts.stand_in(programs, 'python3', 'exit 0')
  (home / '.local').mkdir()
  scripts.stand_in(home / '.local' / 'bin', 'uv', UV)

  def call(*words, **variables):
    return scripts.run(
      home / 'grpo_jax' / 'launch' / 'worker.sh', *words,
      programs=programs, HOME=home, **variables,
    )  # fmt: skip

  return made.stdout.strip(), call, archive


def test_a_worker_says_which_commit_it_has_installed(machine):
  commit, call, archive = machine
  host = scripts.run('hostname').stdout.strip()
  assert call('revision').stdout == f'revision: {host} nothing\n'
  done = call('setup')
  assert done.returncode == 0, done.stderr
  assert call('revision').stdout == f'revision: {host} {commit}\n'
  archive.unlink()
  assert call('setup').returncode == 0
  assert call('revision').stdout == f'revision: {host} unknown\n'


def test_extras_and_requirements_are_installed(machine):
  _, call, archive = machine
  home = archive.parent
  (home / 'grpo_jax' / 'lab').mkdir()
  (home / 'grpo_jax' / 'lab' / 'requirements.txt').write_text('sympy')
  done = call('setup', 'wandb,math', 'lab')
  assert done.returncode == 0, done.stderr
  first, second = (home / 'pip').read_text().splitlines()
  assert first.endswith('/grpo_jax[tpu,gcs,wandb,math]')
  assert second.endswith('--requirement=lab/requirements.txt')


def test_an_old_package_in_the_place_of_the_new_is_refused(machine):
  _, call, _ = machine
  done = call('setup', OLD=1)
  assert done.returncode == 2 and 'differs from what was copied' in done.stderr
  assert call('revision').stdout.endswith(' nothing\n')


def test_a_run_outlives_the_ssh_that_has_started_it(worker):
  worker.install()
  ssh = subprocess.Popen(
    ['bash', '-c', 'launch/worker.sh start waits; sleep 60'],
    cwd=scripts.ROOT,
    env={
      **os.environ,
      'GRPO_JAX_PLACE': str(worker.place / 'run'),
      'GRPO_JAX_VENV': str(worker.place / 'venv'),
    },
    start_new_session=True,
  )
  cli.ends_with_the_test(ssh)
  end = time.monotonic() + 120
  while not (worker.place / 'run' / 'pid').exists():  # then `start` returns
    assert time.monotonic() < end
    time.sleep(0.02)
  worker.becomes('running')
  os.killpg(ssh.pid, signal.SIGHUP)
  os.killpg(ssh.pid, signal.SIGKILL)
  ssh.wait()
  time.sleep(0.3)
  assert worker.status() == 'running'
