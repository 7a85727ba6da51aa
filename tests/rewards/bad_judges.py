"""Judges that do what none should; each returns 1 if it comes to its end."""

import ctypes
import fcntl
import os
import resource
import signal
import subprocess
import sys
import threading
import time

from grpo_jax import rewards


def loop(prompt, completion, example):
  while True:
    pass


def children_loop(prompt, completion, example):
  """Waits for a process that never ends, as does one that outlives it."""
  if os.fork() == 0:
    if os.fork() == 0:
      loop(prompt, completion, example)
    loop(prompt, completion, example)
  time.sleep(1000)


def children_come_and_go(prompt, completion, example):
  """No process of it takes long."""
  while True:
    if os.fork() == 0:
      sum(range(1_000_000))
      os._exit(0)
    os.wait()


def waits(prompt, completion, example):
  time.sleep(float(completion))
  return 1.0


def burn(secs):
  end = time.process_time() + secs
  while time.process_time() < end:
    pass


_imported = []


def imports_once():
  if not _imported:
    burn(1.5)
    _imported.append(1)


@rewards.imports(imports_once)
def imports_for_long(prompt, completion, example):
  imports_once()
  return 1.0


def deaf(prompt, completion, example):
  """Sleeps, and hears no signal that can be ignored."""
  for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_IGN)
  while True:
    time.sleep(1)


def forks(prompt, completion, example):
  """Starts processes that start processes, 200 at most."""
  for _ in range(200):
    if os.fork() == 0:
      os.setsid()
      time.sleep(1000)
      os._exit(0)
  time.sleep(1000)


def forks_and_loops(prompt, completion, example):
  for _ in range(5):
    if os.fork() == 0:
      time.sleep(1000)
      os._exit(0)
  time.sleep(1000)


def forks_and_returns(prompt, completion, example):
  """Both processes come back to the worker; one of them may answer."""
  return 1.0 if os.fork() else 2.0


def eats(prompt, completion, example):
  held = []
  while True:
    held.append(bytearray(50 << 20))


def children_eat(prompt, completion, example):
  """Each process is within the limit; together they are not."""
  for _ in range(4):
    if os.fork() == 0:
      held = bytearray(b'x') * (200 << 20)
      time.sleep(1000)
      os._exit(len(held) % 2)
  time.sleep(1000)


def segfaults(prompt, completion, example):
  ctypes.string_at(0)


def exits(prompt, completion, example):
  sys.exit(0)


def exits_at_once(prompt, completion, example):
  os._exit(0)


def ends_its_parent(prompt, completion, example):
  os.kill(os.getppid(), signal.SIGKILL)
  time.sleep(1000)


def stops_its_parent(prompt, completion, example):
  os.kill(os.getppid(), signal.SIGSTOP)
  time.sleep(1000)


def ends_itself(prompt, completion, example):
  os.kill(os.getpid(), signal.SIGTERM)
  time.sleep(1000)


def closes_all(prompt, completion, example):
  os.closerange(0, 1024)
  return 1.0


def closes_standard(prompt, completion, example):
  os.closerange(0, 3)
  return 1.0


def moves(prompt, completion, example):
  os.chdir('/')
  os.umask(0o777)
  os.environ.clear()
  os.environ['MOVED'] = '1'
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  signal.setitimer(signal.ITIMER_REAL, 0.2)
  signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
  sys.setrecursionlimit(100)
  sys.path.clear()
  sys.stdout = None
  return 1.0


def state(prompt, completion, example):
  """1 if the process is as a new one, but for what `moves` may not move."""
  umask = os.umask(0)
  os.umask(umask)
  time.sleep(0.3)
  # A process that a shell has started in the background ignores it from birth.
  interrupted = signal.default_int_handler
  if example['ignores']:
    interrupted = signal.SIG_IGN
  clean = (
    os.getcwd() == example['folder']
    and umask == example['umask']
    and 'MOVED' not in os.environ
    and 'PATH' in os.environ
    and not signal.pthread_sigmask(signal.SIG_BLOCK, [])
    and signal.getsignal(signal.SIGINT) is interrupted
    and sys.getrecursionlimit() > 100
    and sys.path
    and sys.stdout is not None
    and threading.active_count() == 1
    and resource.getrlimit(resource.RLIMIT_CPU)[0] != 90
    and signal.getitimer(signal.ITIMER_PROF) == (0, 0)
  )
  return float(bool(clean))


def prints(prompt, completion, example):
  line = 'x' * (1 << 16)
  while True:
    print(line)
    print(line, file=sys.stderr)


def writes_everywhere(prompt, completion, example):
  """Garbage to every file that is open, the pipe of answers among them."""
  for number in range(1024):
    try:
      fcntl.fcntl(number, fcntl.F_GETFD)
      os.write(number, b'{"values": [5.0], "last": false}' * 100)
    except OSError:
      pass
  return 1.0


def leaves_a_thread(prompt, completion, example):
  threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
  return 1.0


def limits_itself(prompt, completion, example):
  for number in (resource.RLIMIT_CPU, resource.RLIMIT_NOFILE):
    resource.setrlimit(number, (90, 90))
  signal.setitimer(signal.ITIMER_PROF, 1000)
  return 1.0


def leaves_a_daemon(prompt, completion, example):
  """A process of a session of its own, whose parent has ended."""
  file = example['file']
  program = (
    'import os, sys, time\n'
    'if os.fork(): os._exit(0)\n'
    'os.setsid()\n'
    'if os.fork(): os._exit(0)\n'
    'while True:\n'
    "  open(sys.argv[1], 'a').write('x')\n"
    '  time.sleep(0.02)\n'
  )
  subprocess.run(
    [sys.executable, '-I', '-S', '-c', program, file],
    env={} if example.get('env', True) else None,
  )
  while not (os.path.exists(file) and os.path.getsize(file)):
    time.sleep(0.01)
  if example.get('ends_parent'):
    ends_its_parent(prompt, completion, example)
  if example['loops']:
    loop(prompt, completion, example)
  return 1.0


def raises(prompt, completion, example):
  raise KeyError('gold')


class Unprintable(Exception):
  def __str__(self):
    sys.exit(1)


def raises_what_cannot_be_printed(prompt, completion, example):
  raise Unprintable


def returns_nan(prompt, completion, example):
  return float('nan')


def returns_text(prompt, completion, example):
  return '1.0'


def good(prompt, completion, example):
  return float(completion)


def none(prompt, completion, example):
  return None


async def async_good(prompt, completion, example):
  return float(completion)


@rewards.batched
def batched_good(prompts, completions, examples):
  return [float(completion) for completion in completions]


@rewards.batched
def batched_loop(prompts, completions, examples):
  while True:
    pass


def imported(prompt, completion, example):
  return float(any(name in sys.modules for name in example['modules']))


def touches(prompt, completion, path):
  open(path, 'w').close()
  return 1.0


def touches_path(prompt, completion, example, path):
  return touches(prompt, completion, path)
