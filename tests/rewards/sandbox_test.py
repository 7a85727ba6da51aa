"""What generated code tries, and what it must not succeed in."""

import os
import socket
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from grpo_jax.rewards import sandbox
from tests import pace

HANG_SECS = 120.0  # which only what hangs takes
LIMITS = sandbox.Limits(time_secs=HANG_SECS)
SHORT = LIMITS._replace(time_secs=2.0)  # of what never ends by itself


@pytest.fixture(scope='module', params=sandbox.MEANS)
def means(request):
  """Each way of confining, where the system offers it."""
  ran = sandbox.run('print(1)', limits=LIMITS, means=request.param)
  if ran.stdout != '1\n':
    pytest.skip(f'{request.param} are not offered here: {ran}')
  return request.param


def run(code, means, limits=LIMITS, stdin=''):
  return sandbox.run(textwrap.dedent(code), stdin, limits, means=means)


def run_free(code):
  """The same program without a sandbox, to show that it can succeed."""
  return subprocess.run(
    [sys.executable, '-I', '-c', textwrap.dedent(code)],
    capture_output=True,
    text=True,
    timeout=HANG_SECS,
  ).stdout


def test_it_computes(means):
  code = """
    import collections, ctypes, decimal, json, math, os, random, sqlite3
    import asyncio, numpy, subprocess, sys, threading
    thread = threading.Thread(target=lambda: print('thread'))
    thread.start(); thread.join()
    asyncio.run(asyncio.sleep(0))
    open('note', 'w').write('kept')
    print(open('note').read(), numpy.arange(3).sum(), input())
    done = subprocess.run([sys.executable, '-c', 'print("child")'],
                          capture_output=True, text=True)
    print(done.stdout, end='')
    print('told', file=sys.stderr)
    sys.exit(3)
  """
  ran = run(code, means, stdin='given\n')
  assert ran == (3, 'thread\nkept 3 given\nchild\n', 'told\n', 'exit 3')


def test_a_secret_file_cannot_be_read(means, tmp_path):
  secret = tmp_path / 'secret'
  secret.write_text('sesame')
  secret.chmod(0o644)
  link = tmp_path / 'link'
  link.symlink_to(secret)
  code = f"""
    import os, pathlib
    for path in {str(secret)!r}, {str(link)!r}, '/etc/passwd', '/etc/shadow':
      try:
        print(pathlib.Path(path).read_text())
      except OSError as error:
        pass
    here = {os.path.dirname(__file__)!r}
    for folder in {str(tmp_path)!r}, here, '/root/.ssh':
      try:
        print(os.listdir(folder))
      except OSError as error:
        pass
    print('end')
  """
  assert 'sesame' in run_free(code)
  assert run(code, means).stdout == 'end\n'
  shown = LIMITS._replace(readable=(str(tmp_path),))
  for parent in [tmp_path, *tmp_path.parents][:-1]:
    if parent.stat().st_uid != os.geteuid() or len(parent.parts) < 3:
      break
    parent.chmod(parent.stat().st_mode | 0o055)
  assert 'sesame' in run(code, means, shown).stdout


def test_the_environment_is_empty(means, monkeypatch):
  monkeypatch.setenv('MY_SECRET', 'sesame')
  code = """
    import glob, os
    print(dict(os.environ))
    for path in glob.glob('/proc/[0-9]*/environ') + ['/proc/self/environ']:
      try:
        print(open(path, 'rb').read())
      except OSError:
        pass
  """
  assert 'sesame' in run_free(code)
  ran = run(code, means)
  assert 'PATH' in ran.stdout and 'sesame' not in ran.stdout + ran.stderr


class Servers:
  """TCP, UDP and unix sockets that count what reaches them.

  Those of a 'pair' are reached by one of two unix sockets that a program may
  make for its own use.
  """

  def __init__(self, folder):
    self.reached, self.kept = [], []
    abstract = f'\0grpo_jax_{os.getpid()}_{time.monotonic_ns()}'
    self.path = os.path.join(folder, 's')
    kinds = [
      ('tcp', socket.AF_INET, socket.SOCK_STREAM, ('127.0.0.1', 0)),
      ('udp', socket.AF_INET, socket.SOCK_DGRAM, ('127.0.0.1', 0)),
      ('unix', socket.AF_UNIX, socket.SOCK_STREAM, self.path),
      ('abstract', socket.AF_UNIX, socket.SOCK_STREAM, abstract),
      ('pair', socket.AF_UNIX, socket.SOCK_DGRAM, f'{self.path}_pair'),
      ('pair_abstract', socket.AF_UNIX, socket.SOCK_DGRAM, f'{abstract}_pair'),
    ]
    self.names = {name for name, *_ in kinds}
    self.sockets, targets = [], []
    for name, family, kind, address in kinds:
      server = socket.socket(family, kind)
      server.bind(address)
      if kind == socket.SOCK_STREAM:
        server.listen()
      self.sockets.append(server)
      targets.append((name, int(family), int(kind), server.getsockname()))
      threading.Thread(
        target=self.serve, args=(name, server, kind), daemon=True
      ).start()
    self.code = f"""
import socket
for name, family, kind, address in {targets!r}:
  try:
    if 'pair' in name:
      client, other = socket.socketpair(family, kind)
      client.sendto(b'x', address)
    else:
      client = socket.socket(family, kind)
      client.connect(address)
      client.send(b'x')
    print(name, 'sent')
  except OSError as error:
    print(name, type(error).__name__)
"""

  def serve(self, name, server, kind):
    try:
      while True:
        if kind == socket.SOCK_STREAM:
          # Kept open: what is sent meets no closed end.
          self.kept.append(server.accept())
        else:
          server.recv(10)
        self.reached.append(name)
    except OSError:
      pass


@pytest.fixture
def servers(tmp_path):
  found = Servers(str(tmp_path))
  yield found
  for one in found.sockets:
    one.close()


def test_no_socket_reaches_anything(means, servers):
  assert run_free(servers.code).count('sent') == 6
  until = time.monotonic() + HANG_SECS
  while len(servers.reached) < 6 and time.monotonic() < until:
    time.sleep(0.05)
  assert set(servers.reached) == servers.names
  servers.reached.clear()
  limits = LIMITS._replace(readable=(os.path.dirname(servers.path),))
  for given in (LIMITS, limits):
    ran = run(servers.code, means, given)
    assert ran.stdout.split()[1::2] == ['PermissionError'] * 6
  time.sleep(0.2)
  assert not servers.reached


def test_no_file_is_written_outside_the_scratch(means, tmp_path):
  tmp_path.chmod(0o777)
  target = tmp_path / 'target'
  target.write_text('old')
  target.chmod(0o666)
  code = f"""
    import os, sys
    def attempt(name, function, *arguments):
      try:
        function(*arguments)
        print(name)
      except OSError:
        pass
    def write(path):
      open(path, 'w').write('new')
    target = {str(target)!r}
    attempt('mode', os.chmod, target, 0o777)
    attempt('time', os.utime, target, (1, 1))
    attempt('truncate', os.truncate, target, 0)
    attempt('write', write, target)
    attempt('link', os.link, target, 'linked')
    attempt('remove', os.remove, target)
    attempt('folder', os.mkdir, {str(tmp_path / 'made')!r})
    for folder in sys.argv[1:] or ['/', '/usr', '/var/tmp', '/dev/shm', '/etc',
                                   sys.prefix, sys.base_prefix]:
      attempt(folder, write, folder + '/grpo_jax_wrote')
    attempt('scratch', write, 'wrote')
  """
  ran = run(code, means, LIMITS._replace(readable=(str(tmp_path),)))
  assert ran.stdout == 'scratch\n', ran
  assert target.read_text() == 'old'
  assert sorted(os.listdir(tmp_path)) == ['target']
  assert target.stat().st_mode & 0o777 == 0o666 and target.stat().st_mtime > 1
  # Outside, all that is tried at the target succeeds.
  free = code.replace('sys.argv[1:] or', '[] and')
  free = free.replace("'linked'", repr(str(tmp_path / 'linked')))
  free = free.replace("'wrote')", repr(str(tmp_path / 'wrote')) + ')')
  words = ['mode', 'time', 'truncate', 'write', 'link', 'remove', 'folder']
  assert run_free(free).split() == [*words, 'scratch']


def test_no_file_outside_is_watched_or_marked(means, tmp_path):
  """By calls that Landlock does not guard, and newer kernels have."""
  code = f"""
    import ctypes, os
    libc = ctypes.CDLL(None, use_errno=True)
    path = {str(tmp_path)!r}.encode()
    def told(name, result):
      print(name, 'done' if result >= 0 else os.strerror(ctypes.get_errno()))
    told('watch', libc.inotify_add_watch(libc.inotify_init(), path, 0xFFF))
    size = ctypes.c_size_t(24)
    told('mark', libc.syscall(469, -100, path, bytes(24), size, 0))
  """
  assert 'watch done' in run_free(code)
  ran = run(code, means)
  assert ran.failure == '' and 'done' not in ran.stdout, ran


def test_its_input_cannot_be_written(means):
  ran = run("import os; print(input()); os.write(0, b'x')", means, stdin='a')
  assert ran.stdout == 'a\n' and 'Bad file descriptor' in ran.stderr


def test_it_is_ended_at_its_limit(means):
  def call():
    assert run('while True: pass', means, SHORT).failure == 'time limit'

  pace.assert_ends_at(SHORT.time_secs, call)


def test_it_is_ended_with_all_it_has_started(means):
  """A daemon holds a pipe of the test open for as long as it lives."""
  code = """
    import os, subprocess, sys, time
    if os.fork() == 0:
      os.setsid()
      if os.fork() == 0:
        os.execve(sys.executable, [sys.executable, '-I', '-S', '-c',
                  'import time\\nwhile True: time.sleep(1)'], {})
      os._exit(0)
    print('started', flush=True)
    while True:
      pass
  """
  before = time.monotonic()
  for secs in (2.0, 10.0, 50.0):  # until the machine was fast enough
    ran = run(code, means, LIMITS._replace(time_secs=secs))
    if ran.stdout:
      break
  assert ran.failure == 'time limit' and ran.exit_code is None
  assert ran.stdout == 'started\n'
  assert time.monotonic() - before < HANG_SECS
  assert not left_over()


def left_over():
  """Processes of guards of this process that still run."""
  found = subprocess.run(
    ['ps', '-eo', 'pid,args'], capture_output=True, text=True
  ).stdout.splitlines()
  return [line for line in found if 'while True: time.sleep(1)' in line]


@pytest.mark.parametrize(
  'code, failure',
  [
    ('x = bytearray(2 << 30)', 'exit 1'),
    ('import os\nos.kill(os.getpid(), 11)', 'signal SIGSEGV'),
    ('import ctypes\nctypes.string_at(0)', 'signal SIGSEGV'),
    ("while True: print('x' * 1000)", 'output limit'),
    ('import os\nos._exit(7)', 'exit 7'),
    ('import time\ntime.sleep(1000)', 'time limit'),
    ("f = open('f', 'wb')\nwhile True: f.write(bytes(1 << 20))", 'exit 1'),
    ('while True', 'exit 1'),
  ],
)
def test_limits(means, code, failure):
  if means == 'landlock' and 'os.kill' in code:
    failure = 'exit 1'  # it cannot signal even itself
  limits = SHORT if 'time' in failure else LIMITS
  # Below the limit of all files together.
  ran = run(code, means, limits._replace(file_bytes=8 << 20))
  assert ran.failure == failure, ran
  assert len(ran.stdout) <= LIMITS.output_bytes


FILES = """
import os, tempfile, time
def write(file):
  with file:
    for _ in range(50):
      file.write(bytes(1 << 20))
"""


@pytest.mark.parametrize(
  'code',
  [
    FILES + 'for n in range(4): write(open(str(n), "wb"))',
    FILES + 'for n in range(4): write(open(str(n), "wb"))\ntime.sleep(1000)',
    FILES
    + 'os.makedirs("a/b")\nfor n in range(4): write(open(f"a/b/{n}", "wb"))'
    '\ntime.sleep(1000)',
    # Without names, as temporary files are.
    FILES + 'kept = [tempfile.TemporaryFile() for _ in range(4)]\n'
    'for one in kept: write(open(one.fileno(), "wb", closefd=False))\n'
    'time.sleep(1000)',
    pytest.param(
      'import time\nfor n in range(50_000): open(str(n), "wb")\n'
      'time.sleep(1000)',
      marks=pytest.mark.long,
    ),
  ],
)
def test_the_files_of_a_program_have_a_limit_together(
  means, code, tmp_path, monkeypatch
):
  monkeypatch.setattr('tempfile.tempdir', str(tmp_path))
  start = time.monotonic()
  ran = run(code, means)
  expected = 'exit 1' if means == 'namespaces' else 'scratch limit'
  assert ran.failure == expected, ran
  assert time.monotonic() - start < LIMITS.time_secs
  assert not os.listdir(tmp_path)


def test_files_within_the_limit_may_come_and_go(means):
  code = FILES + 'for n in range(4):\n  write(open("x", "wb"))\n'
  assert run(code + '  os.remove("x")', means).failure == ''
  assert run(code, means, LIMITS._replace(scratch_bytes=51 << 20)).failure == ''


def test_a_fork_bomb_is_held(means):
  code = """
    import os, time
    made = 0
    try:
      for _ in range(100):
        if os.fork() == 0:
          time.sleep(1000)
          os._exit(0)
        made += 1
    except OSError:
      print('refused', made, flush=True)
      os._exit(5)
    time.sleep(1000)
  """
  ran = run(code, means)
  assert ran.failure in ('processes', 'exit 5'), ran
  if ran.failure == 'exit 5':
    assert int(ran.stdout.split()[1]) <= LIMITS.processes


def test_other_processes_cannot_be_signalled(means):
  victim = subprocess.Popen(['sleep', '1000'])
  code = f"""
    import os, signal
    for pid in ({victim.pid}, {os.getpid()}, os.getppid()):
      try:
        os.kill(pid, signal.SIGTERM if pid == {victim.pid} else 0)
        print('signalled', pid)
      except OSError:
        pass
  """
  out = run(code, means).stdout
  assert f'signalled {victim.pid}' not in out
  assert f'signalled {os.getpid()}' not in out
  assert victim.poll() is None
  run_free(code)
  assert victim.wait(HANG_SECS) == -15


def test_no_signal_is_ordered_for_another_process(means):
  """By the owner of a file, which gets a signal once the file is ready."""
  if means != 'landlock':
    pytest.skip('no process but its own has a number there')
  code = """
    import fcntl, os, socket, struct
    file, _ = socket.socketpair()
    own = os.getpid()
    for name, function, order, argument in (
      ('F_SETOWN', fcntl.fcntl, 8, own),
      ('F_SETSIG', fcntl.fcntl, 10, 9),
      ('F_SETOWN_EX', fcntl.fcntl, 15, struct.pack('ii', 1, own)),
      ('FIOSETOWN', fcntl.ioctl, 0x8901, struct.pack('i', own)),
      ('SIOCSPGRP', fcntl.ioctl, 0x8902, struct.pack('i', own)),
      ('F_SETFD', fcntl.fcntl, 2, 1),
      ('FIONREAD', fcntl.ioctl, 0x541b, bytes(4)),
    ):
      try:
        function(file, order, argument)
        print(name)
      except PermissionError:
        pass
  """
  assert len(run_free(code).split()) == 7
  assert run(code, means).stdout.split() == ['F_SETFD', 'FIONREAD']


def test_no_memory_is_held_beside_its_limit(means):
  """The pages of such files are in no process, so no limit counts them."""
  code = """
    import ctypes, os
    try:
      print(os.write(os.memfd_create('x'), bytes(1 << 20)))
    except PermissionError:
      pass
    if ctypes.CDLL(None).syscall(447, 0) >= 0:
      print('memfd_secret')
    files = []
    try:
      while len(files) < 1000:
        files += os.pipe()
    except OSError:
      pass
    print(len(files))
  """
  assert run_free(code).startswith(f'{1 << 20}\n')
  (files,) = run(code, means).stdout.split()
  assert 200 < int(files) < 256


def test_links_to_the_interpreter_show_no_folder(means, tmp_path):
  """As with a virtual environment of a Python in ~/.local/bin."""
  version = f'python{sys.version_info.major}.{sys.version_info.minor}'
  local, venv = tmp_path / 'home' / '.local', tmp_path / 'venv'
  for folder in (local / 'bin', local / 'share', venv / 'bin'):
    folder.mkdir(parents=True)
  (local / 'bin' / version).symlink_to(os.path.realpath(sys.executable))
  (venv / 'bin' / 'python').symlink_to(local / 'bin' / version)
  (venv / 'pyvenv.cfg').write_text(f'home = {local / "bin"}\n')
  secret = local / 'share' / 'secret'
  secret.write_text('sesame')
  code = f"import json; print('runs'); print(open({str(secret)!r}).read())"
  program = (
    f'import sys; sys.path[:] = {sys.path!r}\n'
    'from grpo_jax.rewards import sandbox\n'
    f'print(sandbox.run({code!r}, means={means!r}))'
  )
  ran = subprocess.run(
    [venv / 'bin' / 'python', '-c', program], capture_output=True, text=True
  )
  assert 'runs' in ran.stdout, ran
  assert 'sesame' not in ran.stdout and 'Error' in ran.stdout


def test_nothing_is_run_where_nothing_is_offered(monkeypatch):
  missing = sandbox.Available('', {'landlock': 'the kernel has none'})
  monkeypatch.setattr(sandbox, 'available', lambda: missing)
  with pytest.raises(sandbox.SandboxError, match='the kernel has none'):
    sandbox.run('print(1)')
  ran = sandbox.run('print(1)', insist=True, limits=LIMITS)
  assert ran == (0, '1\n', '', '')
  ran = sandbox.run('import time\ntime.sleep(99)', insist=True, limits=SHORT)
  assert ran.failure == 'time limit'


def test_a_way_that_is_none_is_refused():
  with pytest.raises(ValueError, match="means is 'jail'"):
    sandbox.run('', means='jail')


def test_scratch_folders_do_not_stay(means, tmp_path, monkeypatch):
  monkeypatch.setattr('tempfile.tempdir', str(tmp_path))
  assert run("open('f', 'w').write('x')", means).failure == ''
  assert not os.listdir(tmp_path)
