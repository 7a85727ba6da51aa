"""What the program of an agent reaches, and what it must not reach."""

import contextlib
import functools
import http.server
import json
import os
import pathlib
import select
import socket
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from grpo_jax.rewards import _guard
from grpo_jax.rewards import _launch
from grpo_jax.rewards import agent_process
from grpo_jax.rewards import sandbox

HANG_SECS = 120.0  # which only what hangs takes
SHARED = 'landlock, shared pids'
SECRET = 'sesame-0f3a'


def skip_where_missing(means):
  means = means.split(',')[0]
  if means == 'no' or not (reason := agent_process.refusal(means)):
    return
  # Generated code is confined by the same means, but needs no rule for a port.
  is_old = 'rules for ports' in reason
  assert is_old or sandbox.refusal(means), reason
  pytest.skip(f'{means} is not offered here: {reason}')


@pytest.fixture(params=['namespaces', 'landlock', SHARED])
def means(request, monkeypatch):
  """Each way of confining; the last one as where no PID namespace is made."""
  skip_where_missing(request.param)
  if request.param == SHARED:
    monkeypatch.setattr(
      _launch,
      'Guarded',
      functools.partial(_launch.Guarded, pid_namespace=False),
    )
  return request.param


def start(code, port, means='no', *arguments, **options):
  code = textwrap.dedent(code)
  command = [sys.executable, '-c', code, *map(str, arguments)]
  confine = means.split(',')[0]
  return agent_process.start(command, port=port, confine=confine, **options)


def finished(process, stdin=b''):
  """What a program prints, once it has ended by itself."""
  late = threading.Timer(HANG_SECS, process.close)
  late.start()
  with process:
    process.stdin.write(stdin)
    process.stdin.close()
    said = process.stdout.read().decode()
    late.cancel()
    ended = process.end()
    errors = process.stderr.read().decode()
  assert (ended.failure, errors) == ('', ''), (ended, said, errors)
  return said


def run(code, port, means='no', *arguments, **options):
  return finished(start(code, port, means, *arguments, **options))


def run_free(code, *arguments):
  """The same program by itself, to show that it can succeed."""
  return subprocess.run(
    [sys.executable, '-c', textwrap.dedent(code), *map(str, arguments)],
    capture_output=True,
    text=True,
    timeout=HANG_SECS,
  ).stdout


class Echo(http.server.BaseHTTPRequestHandler):
  """Answers with the path, or with the body that was posted."""

  protocol_version = 'HTTP/1.1'

  def do_GET(self):
    self.answer(self.path.encode())

  def do_POST(self):
    self.answer(self.rfile.read(int(self.headers['Content-Length'])))

  def answer(self, data):
    self.send_response(200)
    self.send_header('Content-Length', str(len(data)))
    self.end_headers()
    self.wfile.write(data)

  def log_message(self, *_):
    pass


class Server(http.server.ThreadingHTTPServer):
  daemon_threads = True
  request_queue_size = 128


@pytest.fixture(scope='module')
def port():
  with Server(('127.0.0.1', 0), Echo) as server:
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_address[1]
    server.shutdown()


@contextlib.contextmanager
def serving(serve):
  """The port of a server that calls `serve` with each connection."""
  with socket.create_server(('127.0.0.1', 0), backlog=256) as server:

    def accept():
      with contextlib.suppress(OSError):
        while True:
          serve(server.accept()[0])

    threading.Thread(target=accept, daemon=True).start()
    yield server.getsockname()[1]
    server.shutdown(socket.SHUT_RDWR)


GET = """
import http.client, sys
client = http.client.HTTPConnection('127.0.0.1', int(sys.argv[1]))
for path in '/a', '/b':
  client.request('GET', path)
  print(client.getresponse().read().decode())
"""


def test_it_reaches_its_port(means, port):
  assert run(GET, port, means, port) == '/a\n/b\n'


def test_without_confinement_it_reaches_its_port_too(port):
  assert run(GET, port, 'no', port) == '/a\n/b\n'


def test_it_holds_its_three_streams_alone(means, port):
  """No end of a pipe or socket by which another process is reached."""
  code = """
    import os
    held = []
    for number in range(256):
      try:
        os.fstat(number)
        held.append(number)
      except OSError:
        pass
    print(held)
  """
  assert run(code, port, means) == '[0, 1, 2]\n'


REACH = """
import ctypes, json, socket, sys
port, other, folder, abstract, own = json.loads(sys.argv[1])
INET, STREAM, DATA = socket.AF_INET, socket.SOCK_STREAM, socket.SOCK_DGRAM

def connect(family, kind, address, protocol=0):
  with socket.socket(family, kind, protocol) as one:
    one.settimeout(5)
    one.connect(address)
    one.send(b'x')

def fast(how, address):
  with socket.socket(INET, STREAM) as one:
    if how == 'sendto':
      one.sendto(b'x', 0x20000000, address)
    else:
      one.sendmsg([b'x'], [], 0x20000000, address)

def pair(address):
  one, _ = socket.socketpair(socket.AF_UNIX, DATA)
  one.sendto(b'x', address)

def made(*arguments):
  socket.socket(*arguments).close()

def listens(address, port):
  with socket.socket(INET, STREAM) as one:
    if address is not None:
      one.bind((address, port))
    one.listen()

def layer(name):
  with socket.socket(INET, STREAM) as one:
    try:
      one.setsockopt(socket.IPPROTO_TCP, 31, name)
    except PermissionError:
      raise
    except OSError:  # it was looked for, and the kernel has none
      pass

LOOPBACK = '127.0.0.1'
TRIED = {
  'port': (connect, INET, STREAM, (LOOPBACK, port)),
  'other port': (connect, INET, STREAM, (LOOPBACK, other)),
  'other port, fast': (fast, 'sendto', (LOOPBACK, other)),
  'other port, fast message': (fast, 'sendmsg', (LOOPBACK, other)),
  'other address': (connect, INET, STREAM, ('127.0.0.2', port)),
  'own address': (connect, INET, STREAM, (own, port)),
  'other port of own address': (connect, INET, STREAM, (own, other)),
  'udp': (connect, INET, DATA, (LOOPBACK, other)),
  'unix': (connect, socket.AF_UNIX, STREAM, folder + '/s'),
  'abstract': (connect, socket.AF_UNIX, STREAM, '\\0' + abstract),
  'pair': (pair, folder + '/d'),
  'inet6': (made, socket.AF_INET6, STREAM),
  'raw': (made, INET, socket.SOCK_RAW, 1),
  'packet': (made, socket.AF_PACKET, socket.SOCK_RAW),
  'netlink': (made, socket.AF_NETLINK, socket.SOCK_RAW),
  'machines': (made, 40, STREAM),
  'algorithms': (made, 38, 5),
  'multipath': (made, INET, STREAM, 262),
  'layer': (layer, b'smc'),
  'listens': (listens, LOOPBACK, 0),
  'listens anywhere': (listens, None, 0),
}
found = []
for name, (call, *arguments) in TRIED.items():
  try:
    call(*arguments)
    found.append(name)
  except OSError:
    pass
print(json.dumps(found))
"""


def own_address(port):
  """An address of this machine beside loopback, and a server there."""
  with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
    try:
      one.connect(('192.0.2.1', 9))  # sends nothing
      return one.getsockname()[0]
    except OSError:
      return '127.0.0.3'


class Neighbours:
  """Servers that nothing confined must reach; `reached` has what did."""

  def __init__(self, folder):
    self.reached = set()
    self.folder = str(folder)
    self.abstract = f'grpo_jax_{os.getpid()}_{time.monotonic_ns()}'
    self.sockets = []
    self.port = self.made(socket.AF_INET, ('0.0.0.0', 0), 'port')
    self.other = self.made(socket.AF_INET, ('0.0.0.0', 0), 'other port')
    kind = socket.SOCK_DGRAM
    self.made(socket.AF_INET, ('127.0.0.1', self.other), 'udp', kind)
    self.made(socket.AF_UNIX, f'{folder}/s', 'unix')
    self.made(socket.AF_UNIX, f'{folder}/d', 'pair', kind)
    self.made(socket.AF_UNIX, f'\0{self.abstract}', 'abstract')
    self.given = json.dumps(
      [
        self.port,
        self.other,
        self.folder,
        self.abstract,
        own_address(self.other),
      ]
    )

  def made(self, family, address, name, kind=socket.SOCK_STREAM):
    one = socket.socket(family, kind)
    one.bind(address)
    if kind == socket.SOCK_STREAM:
      one.listen()
    self.sockets.append(one)
    threading.Thread(
      target=self.serve, args=(one, name, kind), daemon=True
    ).start()
    return one.getsockname()[1]

  def serve(self, one, name, kind):
    with contextlib.suppress(OSError):
      while True:
        if kind == socket.SOCK_STREAM:
          client, _ = one.accept()
          with client:
            if client.recv(1):
              self.reached.add(name)
        elif one.recv(1):
          self.reached.add(name)


@pytest.fixture
def neighbours(tmp_path):
  tmp_path.chmod(0o755)
  found = Neighbours(tmp_path)
  yield found
  for one in found.sockets:
    with contextlib.suppress(OSError):
      one.shutdown(socket.SHUT_RDWR)
    one.close()


def test_it_reaches_nothing_else(means, neighbours):
  given, folder = neighbours.given, neighbours.folder
  said = run(REACH, neighbours.port, means, given, readable=[folder])
  open_ = {'port'}
  if means == 'namespaces':  # its network is its own
    open_ |= {'listens', 'listens anywhere', 'layer'}
  else:  # as `what_is_open` says
    open_ |= {'other address', 'own address'}
  assert set(json.loads(said)) == open_
  time.sleep(0.1)
  assert neighbours.reached == {'port'}


def test_without_confinement_all_of_it_is_reached(neighbours):
  said = run(REACH, neighbours.port, 'no', neighbours.given)
  # Not each kernel has these, and not each user may make them.
  may_lack = {'raw', 'packet', 'machines', 'algorithms', 'multipath', 'inet6'}
  assert {*json.loads(said), *may_lack} >= {
    'port', 'other port', 'other port, fast', 'other port, fast message',
    'other address', 'own address', 'other port of own address', 'udp', 'unix',
    'abstract', 'pair', 'netlink', 'layer', 'listens', 'listens anywhere',
    *may_lack,
  }  # fmt: skip
  until = time.monotonic() + HANG_SECS
  while len(neighbours.reached) < 6 and time.monotonic() < until:
    time.sleep(0.05)
  assert len(neighbours.reached) == 6


LOOK = """
import glob, os, re, sys
secret, *pids = sys.argv[1:]
def has(name, data):
  if secret[::-1].encode() in data:
    print(name)
seen = [os.path.basename(one) for one in glob.glob('/proc/[0-9]*')]
for pid in {*pids, *seen}:
  if pid == str(os.getpid()):
    continue
  for name in 'environ', 'cmdline':
    try:
      has(name, open(f'/proc/{pid}/{name}', 'rb').read())
    except OSError:
      pass
  try:
    areas = open(f'/proc/{pid}/maps').read() if pid in pids else ''
    with open(f'/proc/{pid}/mem', 'rb', 0) as memory:
      for area in re.findall(r'(\\w+)-(\\w+) rw.*(?:heap|stack)', areas):
        begin, end = (int(one, 16) for one in area)
        memory.seek(begin)
        has('memory', memory.read(end - begin))
  except OSError:
    pass
print('looked')
"""

KEEPS = """
import os, sys
print(os.environ['KEY'], flush=True)
sys.stdin.read()
"""


def descendants(pid):
  return _guard.descendants(root=pid)


def test_nobody_reads_the_secrets_of_its_neighbours(means, port):
  """In environments and memory: of a process as ours, and of another agent."""
  own = subprocess.Popen(
    [sys.executable, '-c', 'import os; print(1, flush=True); input()'],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    env={'KEY': SECRET},
  )
  own.stdout.readline()
  try:
    with start(KEEPS, port, means, env={'KEY': SECRET}) as other:
      other.stdout.readline()
      agent = descendants(other.pid)[-1]
      environ = pathlib.Path(f'/proc/{agent}/environ').read_bytes()
      assert SECRET.encode() in environ
      guard = pathlib.Path(f'/proc/{other.pid}/environ').read_bytes()
      assert SECRET.encode() not in guard
      pids = own.pid, other.pid, agent
      arguments = SECRET[::-1], *pids
      assert run(LOOK, port, means, *arguments) == 'looked\n'
      said = run_free(LOOK, *arguments).split()
      assert {'environ', 'looked'} <= set(said)
      if os.geteuid() == 0:
        assert 'memory' in said
  finally:
    own.communicate(b'\n')


TOUCH = """
import ctypes, os, signal, subprocess, sys
libc = ctypes.CDLL(None, use_errno=True)
def attempt(name, call, *arguments):
  try:
    call(*arguments)
    print(name)
  except OSError:
    pass
def traced(pid):
  if libc.ptrace(16, pid, None, None) < 0:
    raise OSError
def opened(pid):
  signal.pidfd_send_signal(os.pidfd_open(pid), 0)
def copied(pid):
  vector = (ctypes.c_size_t * 2)(0, 8)
  if libc.process_vm_readv(pid, vector, 1, vector, 1, 0) < 0:
    if ctypes.get_errno() != 14:  # of the address
      raise OSError
for pid in map(int, sys.argv[1:]):
  attempt('signal', os.kill, pid, 0)
  attempt('pidfd', opened, pid)
  attempt('trace', traced, pid)
  attempt('copy', copied, pid)
  attempt('priority', os.setpriority, 0, pid, 5)
child = subprocess.Popen(['sleep', '1000'])
child.kill()
print(child.wait())
"""


def test_it_touches_no_process_but_its_own(means, port):
  victim = subprocess.Popen(['sleep', '1000'])
  try:
    with start(KEEPS, port, means, env={'KEY': 'x'}) as other:
      other.stdout.readline()
      pids = [victim.pid, os.getpid(), other.pid, *descendants(other.pid)]
      pids = [pid for pid in pids if pid > 40]  # no number of its own namespace
      assert run(TOUCH, port, means, *pids) == '-9\n'
      said = run_free(TOUCH, victim.pid).split()
      assert {'signal', 'pidfd', 'trace', 'priority'} <= set(said)
  finally:
    victim.kill()
    victim.wait()


def test_its_first_process_is_out_of_its_reach(port):
  """The one of ours, in its namespace; its pid is 1."""
  skip_where_missing('namespaces')
  code = TOUCH + textwrap.dedent("""
    os.kill(os.getpid(), 0)
    try:
      os.kill(1, 9)
    except OSError:
      pass
    for name in 'mem', 'environ', 'fd/0', 'maps':
      attempt(name, open, f'/proc/1/{name}', 'rb')
  """)
  said = run(code, port, 'namespaces', 1)
  # A signal to it is ignored where both have the same user.
  assert set(said.split()) <= {'-9', 'signal', 'pidfd', 'priority'}


DAEMON = """
import os, subprocess, sys, time
if os.fork() == 0:
  os.setsid()
  if os.fork() == 0:
    print('daemon', flush=True)
    os.execve(sys.executable, [sys.executable, '-I', '-S', '-c',
              'import time\\nwhile True: time.sleep(1)'], {})
  os._exit(0)
os.wait()
"""


@pytest.mark.parametrize('waits', [True, False])
def test_all_that_it_has_started_ends_with_it(means, port, waits):
  """A daemon holds the pipe of its output for as long as it lives."""
  code = DAEMON + ('time.sleep(1000)' if waits else 'time.sleep(0.5)')
  with start(code, port, means) as process:
    assert process.stdout.readline() == b'daemon\n'
    deep = descendants(process.pid)
    assert len(deep) >= 2
    if waits:
      assert process.end('late').failure == 'late'
    else:
      select.select([process.status], [], [], HANG_SECS)
    assert select.select([process.stdout], [], [], HANG_SECS)[0]
    assert process.stdout.read() == b''
    assert process.end('late').failure == ('late' if waits else '')
  assert not any(os.path.exists(f'/proc/{pid}') for pid in deep)


FILES = """
import os, sys
secret, folder = sys.argv[1:]
def attempt(name, call):
  try:
    call()
    print(name)
  except OSError:
    pass
def write(path):
  open(path, 'w').close()
attempt('secret', lambda: open(secret).read())
attempt('folder', lambda: os.listdir(os.path.dirname(secret)))
attempt('users', lambda: open('/etc/passwd').read())
attempt('mode', lambda: os.chmod(secret, 0o777))
attempt('remove', lambda: os.remove(secret))
for path in [secret, folder + '/note', '/etc/note', '/dev/shm/../note',
             '/var/tmp/note', sys.prefix + '/note', sys.base_prefix + '/note']:
  attempt('write ' + path, lambda: write(path))
attempt('shown', lambda: open(folder + '/shown').read())
attempt('home', lambda: write(os.path.expanduser('~/note')))
attempt('temporary', lambda: write(os.environ['TMPDIR'] + '/other'))
"""


def test_it_reads_what_it_is_shown_and_writes_its_folder(means, port, tmp_path):
  secret = tmp_path / 'own' / 'secret'
  shown = tmp_path / 'shown'
  for path in secret, shown / 'shown':
    path.parent.mkdir()
    path.write_text('x')
    path.chmod(0o666)
    path.parent.chmod(0o777)
  arguments = secret, shown
  # A file among the arguments would be shown to it.
  code = FILES.replace('sys.argv[1:]', repr(tuple(map(str, arguments))))
  said = run(code, port, means, readable=[str(shown)])
  assert said == 'shown\nhome\ntemporary\n'
  assert secret.exists() and os.listdir(shown) == ['shown']
  folders = pathlib.Path(os.environ.get('TMPDIR', '/tmp'))
  assert not list(folders.glob('grpo_jax_agent_*/note'))


def test_programs_are_found_with_what_they_need(means, port, tmp_path):
  """A script by a relative path, and one whose first line is its Python."""
  tmp_path.chmod(0o755)
  code = 'import absl, sys; print(absl.__name__, sys.argv[1:])\n'
  script = tmp_path / 'script.py'
  script.write_text(code)
  entry = tmp_path / 'entry'
  entry.write_text(f'#!{sys.executable}\n{code}')
  entry.chmod(0o755)
  by_name = tmp_path / 'by_name'
  by_name.write_text(f'#!/usr/bin/env python\n{code}')
  by_name.chmod(0o755)
  confine = means.split(',')[0]
  path = f'{os.path.dirname(sys.executable)}:/usr/bin:/bin'
  with contextlib.chdir(tmp_path):
    for command in (
      [sys.executable, 'script.py', 'x'],
      ['./entry', 'x'],
      ['by_name', 'x'],
    ):
      process = agent_process.start(
        command,
        port=port,
        confine=confine,
        env={'PATH': f'{tmp_path}:{path}'},
      )
      assert finished(process) == "absl ['x']\n", command


def test_a_program_is_found_behind_links(means, port, tmp_path):
  """Of whose folders nothing else is shown."""
  (tmp_path / 'bin').mkdir()
  (tmp_path / 'bin' / 'first').symlink_to('second')
  (tmp_path / 'bin' / 'second').symlink_to(sys.executable)
  (tmp_path / 'link').symlink_to('bin')
  process = agent_process.start(
    [str(tmp_path / 'link' / 'first'), '-I', '-S', '-c', 'print(1)'],
    port=port,
    confine=means.split(',')[0],
  )
  assert finished(process) == '1\n'


def test_what_a_usual_program_does(means, port):
  code = """
    import asyncio, concurrent.futures, os, subprocess, sys, tempfile, threading
    import urllib.request, ssl, sqlite3, json
    example = json.loads(input())
    ssl.create_default_context()
    with concurrent.futures.ThreadPoolExecutor(40) as pool:
      print(sum(pool.map(len, ['ab'] * 40)))
    async def main():
      child = await asyncio.create_subprocess_exec(
          sys.executable, '-c', 'print(5)', stdout=subprocess.PIPE)
      out, _ = await child.communicate()
      print(out.decode().strip())
      reader, writer = await asyncio.open_connection(
          '127.0.0.1', example['port'])
      writer.write(b'GET /x HTTP/1.0\\r\\n\\r\\n')
      print((await reader.read())[-2:].decode())
      writer.close()
    asyncio.run(main())
    with tempfile.TemporaryDirectory() as folder:
      sqlite3.connect(folder + '/x.db').execute('create table t (x)')
    try:
      subprocess.run(['sleep', '1000'], timeout=0.01)
    except subprocess.TimeoutExpired:
      print('timeout')
    url = f'http://localhost:{example["port"]}/y'
    print(urllib.request.urlopen(url).read().decode())
    print(os.getcwd() == os.path.expanduser('~') == os.environ['TMPDIR'])
  """
  given = json.dumps({'port': port}).encode() + b'\n'
  said = finished(start(code, port, means), given)
  assert said == '80\n5\n/x\ntimeout\n/y\nTrue\n'


def test_a_program_need_not_be_python(means, port):
  """Its signals are as a shell expects them."""
  confine = means.split(',')[0]
  code = 'read name; yes $name | head -n 2; : > $HOME/x; ls'
  process = agent_process.start(
    ['bash', '-c', code], port=port, confine=confine
  )
  assert finished(process, b'agent\n') == 'agent\nagent\nx\n'


def test_its_processes_may_share_a_lock(port):
  skip_where_missing('namespaces')
  code = """
    import multiprocessing
    with multiprocessing.Lock():
      print('held')
  """
  assert run(code, port, 'namespaces') == 'held\n'


def test_processes_are_seen_as_it_is_said(means, port):
  code = """
    import os
    try:
      os.stat('/proc/' + os.environ['PID'])
      print('seen')
    except OSError:
      print('hidden')
  """
  said = run(code, port, means, env={'PID': str(os.getpid())})
  assert said == ('seen\n' if means == SHARED else 'hidden\n')


LOAD = """
import concurrent.futures, hashlib, http.client, os, sys, threading
port, count, size = map(int, sys.argv[1:])
gate = threading.Barrier(count)
def call(number):
  client = http.client.HTTPConnection('127.0.0.1', port)
  client.connect()
  gate.wait()  # all are connected at once
  body = bytes([number]) * size
  for _ in range(3):
    client.request('POST', '/', body)
    assert client.getresponse().read() == body
  return number
with concurrent.futures.ThreadPoolExecutor(count) as pool:
  print(sum(pool.map(call, range(count))))
"""


@pytest.mark.parametrize('count, size', [(50, 2000), (2, 5 << 20)])
def test_requests_pass_at_the_same_time_and_in_any_size(port, count, size):
  skip_where_missing('namespaces')
  said = run(LOAD, port, 'namespaces', port, count, size)
  assert said == f'{sum(range(count))}\n'


HALVES = """
import socket, struct, sys, time
port = int(sys.argv[1])
one = socket.create_connection(('127.0.0.1', port))
one.sendall(b'x' * 300_000)
one.shutdown(socket.SHUT_WR)
time.sleep(0.3)  # what was sent before the end waits for its reader
said = b''
while data := one.recv(1 << 16):
  said += data
print(len(said), said[:11].decode())
for number in (1, 2):  # a reset, and an end
  one = socket.create_connection(('127.0.0.1', port))
  one.sendall(b'r%d' % number)
  if number == 1:
    one.recv(1)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0))
  one.close()
one = socket.create_connection(('127.0.0.1', port))
one.sendall(b'q')  # reset by the server
try:
  one.recv(1)
  print('end')
except ConnectionResetError:
  print('reset')
for _ in range(5):
  one = socket.create_connection(('127.0.0.1', port))
  try:
    one.sendall(b'e' * 50_000_000)  # of which the server reads one byte
  except OSError:
    print('refused')
  said = b''
  try:
    while data := one.recv(1 << 16):
      said += data
  except OSError:
    pass
  print(said.decode())
"""


@pytest.mark.parametrize('means', ['namespaces', 'no'])
def test_ends_and_resets_pass(means):
  """As they do without a relay."""
  skip_where_missing(means)
  heard, done = [], threading.Semaphore(0)

  def serve(client):
    with client:
      first = client.recv(1)
      if first == b'x':
        count = 1
        while data := client.recv(1 << 16):
          count += len(data)
        client.sendall(f'{count} '.encode())
        time.sleep(0.05)
        client.sendall(b'read' + bytes(3_000_000))
      elif first == b'r':
        number = client.recv(1)
        if number == b'1':
          client.sendall(b'y')
        try:
          heard.append(client.recv(1))
        except ConnectionResetError:
          heard.append('reset')
        done.release()
      elif first == b'q':
        one = (1).to_bytes(4, 'little') + bytes(4)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, one)
      elif first == b'e':
        client.sendall(b'too long')

  with serving(serve) as port:
    said = run(HALVES, port, means, port)
  refused = 'refused\ntoo long\n'
  assert said == '3000011 300000 read\nreset\n' + 5 * refused
  assert done.acquire(timeout=HANG_SECS) and done.acquire(timeout=HANG_SECS)
  assert heard == ['reset', b'']


def test_a_port_where_nobody_listens_is_reset(means):
  with socket.create_server(('127.0.0.1', 0)) as server:
    free = server.getsockname()[1]
  code = """
    import socket, sys
    try:
      one = socket.create_connection(('127.0.0.1', int(sys.argv[1])))
      print(one.recv(1))
    except ConnectionError as error:
      print('failed')
  """
  assert run(code, free, means, free) == 'failed\n'


def test_more_connections_than_it_may_have_wait():
  """Counted by answers: a server hears later that a connection is over."""
  skip_where_missing('namespaces')
  code = """
    import socket, sys
    kept = []
    for _ in range(200):
      kept.append(socket.create_connection(('127.0.0.1', int(sys.argv[1]))))
      kept[-1].sendall(b'x')
      kept[-1].settimeout(100)
    print({one.recv(1) for one in kept[:128]})
    kept[128].settimeout(1)
    try:
      kept[128].recv(1)
    except TimeoutError:
      print('waits')
    for one in kept[:150]:
      one.close()
    print(kept[-1].recv(1))
  """

  def serve(client):
    threading.Thread(target=answer, args=(client,), daemon=True).start()

  def answer(client):
    with client, contextlib.suppress(OSError):
      client.sendall(client.recv(1))
      client.recv(1)

  with serving(serve) as port:
    said = run(code, port, 'namespaces', port)
  assert said == "{b'x'}\nwaits\nb'x'\n"


def test_its_connections_end_with_it(means):
  """However it ends: the server is told."""
  accepted, over = threading.Event(), threading.Event()

  def serve(client):
    client.recv(1)
    accepted.set()
    with client, contextlib.suppress(ConnectionError):
      client.recv(1)
    over.set()

  code = """
    import socket, sys, time
    one = socket.create_connection(('127.0.0.1', int(sys.argv[1])))
    one.sendall(b'x')
    time.sleep(1000)
  """
  with serving(serve) as port:
    with start(code, port, means, port) as process:
      assert accepted.wait(HANG_SECS) and not over.is_set()
      assert process.end('late').failure == 'late'
      assert over.wait(HANG_SECS)


def test_nothing_is_left_of_many(means, port, tmp_path, monkeypatch):
  monkeypatch.setattr('tempfile.tempdir', str(tmp_path))
  command = [sys.executable, '-I', '-S', '-c', '']
  confine = means.split(',')[0]

  def once(ends_itself):
    with agent_process.start(command, port=port, confine=confine) as process:
      if ends_itself:
        process.stdout.read()

  once(True)
  files, threads = len(os.listdir('/proc/self/fd')), threading.active_count()
  for number in range(50 if means == 'namespaces' else 10):
    once(number % 2)
  assert len(os.listdir('/proc/self/fd')) == files
  assert threading.active_count() == threads
  assert not os.listdir(tmp_path)
  assert not descendants(os.getpid())


@pytest.mark.parametrize(
  'code, failure',
  [
    ('import sys; sys.exit(3)', 'exit 3'),
    ('import os; os.abort()', 'signal SIGABRT'),
    (
      'import os, time\n'
      'for _ in range(40):\n'
      '  if os.fork() == 0: time.sleep(1000)\n'
      'time.sleep(1000)',
      'processes',
    ),
  ],
)
def test_how_it_ends(means, port, code, failure):
  with start(code, port, means) as process:
    process.stdout.read()
    assert process.end().failure == failure


@pytest.mark.parametrize('confine', ['namespaces', 'landlock', 'no'])
def test_its_folder_has_a_limit(port, confine):
  skip_where_missing(confine)
  code = """
    import time
    with open('x', 'wb') as file:
      for _ in range(20):
        file.write(bytes(1 << 20))
    time.sleep(1000)
  """
  limits = agent_process.Limits(scratch_bytes=4 << 20)
  with start(code, port, confine, limits=limits) as process:
    assert select.select([process.status], [], [], HANG_SECS)[0]
    failure = 'exit 1' if confine == 'namespaces' else 'scratch limit'
    assert process.end().failure == failure


def test_threads_have_a_limit(port):
  skip_where_missing('namespaces')
  code = """
    import threading
    gate, made = threading.Event(), []
    try:
      for _ in range(100):
        made.append(threading.Thread(target=gate.wait))
        made[-1].start()
    except RuntimeError:
      print(50 < len(made) <= 60)
    gate.set()
  """
  limits = agent_process.Limits(threads=60)
  assert run(code, port, 'namespaces', limits=limits) == 'True\n'


def test_the_first_way_that_is_offered_is_taken(monkeypatch):
  offered = {'landlock': ''}
  monkeypatch.setattr(
    agent_process, 'refusal', lambda means: offered.get(means, 'not allowed')
  )
  assert agent_process.way() == agent_process.way('landlock') == 'landlock'
  assert agent_process.way('no') == 'no'
  with pytest.raises(sandbox.SandboxError, match='namespaces: not allowed'):
    agent_process.way('namespaces')
  offered.clear()
  with pytest.raises(sandbox.SandboxError, match='; landlock: not allowed'):
    agent_process.start(['python'], port=1)
  with pytest.raises(ValueError, match="'yes', but one of"):
    agent_process.way('yes')


@pytest.mark.parametrize('confine', agent_process.CONFINES[1:])
def test_what_stays_open_is_named(confine):
  text = agent_process.what_is_open(confine)
  assert 'stays open' in text and text.endswith('.')
  if confine == 'landlock':
    assert 'ports, not addresses' in text


def test_an_older_landlock_is_refused(monkeypatch):
  """One without rules for ports, which would leave all of them open."""
  monkeypatch.setitem(sys.modules, '_guard', _guard)
  from grpo_jax.rewards import _confine

  monkeypatch.setattr(_confine, '_landlock_version', lambda: 3)
  with pytest.raises(OSError, match=r'has version 3, .* version 4 \(Linux 6.7'):
    _confine._landlock([], None, 80)


@pytest.mark.parametrize(
  'command, message',
  [
    ([], 'an empty one was given'),
    (['no-such-agent', 'x'], "'no-such-agent', and there is no such program"),
    (['./missing'], 'there is no such program; give its path'),
  ],
)
def test_a_command_that_names_no_program(command, message):
  with pytest.raises(ValueError, match=message):
    agent_process.start(command, port=80, confine='no')
