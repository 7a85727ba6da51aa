"""Programs that harm, for the sandbox; each stands in a completion.

None passes a test. `MARK` is replaced by a path that none can write, and `PORT`
by a port of this machine that none can reach.
"""

from grpo_jax.rewards import generated_code
from grpo_jax.rewards import sandbox

LIMITS = sandbox.Limits(
  time_secs=1.0, memory_bytes=256 << 20, processes=8, output_bytes=1 << 16
)
EXAMPLE = {'tests': [{'stdin': '7319\n', 'stdout': '7319 is right'}]}
RIGHT = 'print(input(), "is right")'

PROGRAMS = {
  # They do not end.
  'a loop': 'while True: pass',
  'a sleep': 'import time; time.sleep(999)',
  'an endless list': 'list(iter(int, 1))',
  'a sum of a generator': 'import itertools; sum(itertools.count())',
  'a power of powers': 'print(9**9**9**9)',
  'a regular expression': "import re; re.match('(a+)+$', 'a' * 99 + 'b')",
  'a deaf loop': (
    'import signal\n'
    'for n in set(signal.Signals) - {9, 19}: signal.signal(n, signal.SIG_IGN)\n'
    'while True: pass'
  ),
  'a loop at the end': (
    'import atexit\n@atexit.register\ndef f():\n  while True: pass'
  ),
  'a thread that stays': (
    'import threading, time\n'
    'threading.Thread(target=time.sleep, args=(999,)).start()'
  ),
  'a deadlock': (
    'import threading\nl = threading.Lock(); l.acquire(); l.acquire()'
  ),
  'asyncio': (
    'import asyncio\n'
    'async def f():\n  while True: await asyncio.sleep(0)\nasyncio.run(f())'
  ),
  'a destructor': (
    'class A:\n  def __del__(self):\n    while True: pass\nA()'
  ),
  'a comparison': (
    'class A:\n  def __eq__(self, o):\n    while True: pass\nA() == 1'
  ),
  # They start others.
  'forks': 'import os\nwhile True: os.fork()',
  'a fork that stays': (
    'import os, time\nif not os.fork():\n  os.setsid(); time.sleep(999)'
  ),
  'programs': (
    'import subprocess, sys\n'
    'while True: subprocess.Popen([sys.executable, "-c", "input()"])'
  ),
  'multiprocessing': (
    'import multiprocessing as m\n'
    'def f(): m.Process(target=f).start()\nif __name__ == "__main__": f()'
  ),
  'threads': (
    'import threading, time\n'
    'while True: threading.Thread(target=time.sleep, args=(9,)).start()'
  ),
  'a shell': 'import os; os.system("sleep 999 & sleep 999")',
  # They take memory or print.
  'bytes': "x = []\nwhile True: x.append(bytearray(1 << 24))",
  'a long text': "'a' * 10**12",
  'a list of lists': 'x = []\nwhile True: x = [x, x, *x][:10**6] * 2',
  'forks that eat': (
    'import os\nfor _ in range(4): os.fork()\nx = bytearray(b"x") * (200 << 20)'
    '\nwhile True: pass'
  ),
  'mmap': 'import mmap\nx = [mmap.mmap(-1, 1 << 30) for _ in range(99)]',
  'files in memory': (
    'import os\nx = [os.memfd_create("x") for _ in range(9)]\n'
    'for f in x * 40: os.write(f, bytes(1 << 20))'
  ),
  'pipes': 'import os\nx = [os.pipe() for _ in range(9999)]',
  'digits': "import sys; sys.set_int_max_str_digits(0); int('9' * 10**8)",
  'a bomb of zlib': (
    'import zlib; d = zlib.compress(bytes(10**8))\n'
    'x = [zlib.decompress(d) for _ in range(99)]'
  ),
  'prints': "while True: print('x' * 10**5)",
  'errors': "import sys\nwhile True: sys.stderr.write('x' * 10**5)",
  'recursion': (
    'import sys; sys.setrecursionlimit(10**9)\ndef f(): f()\nf()'
  ),
  'nested source': '(' * 5000,
  'nested lists': 'x = ' + '[' * 90 + ']' * 90 + '\n' + 'x = [x]\n' * 20_000,
  'a long line': 'x = ' + '1+' * 20_000 + '1',
  'a null': 'x = "\0"',
  'half a pair': 'x = "\ud800"',
  'an encoding': '# coding: utf-7\n+AAA-',
  # They end, and leave.
  'exit': 'import sys; sys.exit(0)',
  'exit at once': 'import os; os._exit(0)',
  'abort': 'import os; os.abort()',
  'a crash': 'import ctypes; ctypes.string_at(0)',
  'all signals': 'import os, signal\nos.kill(os.getppid(), signal.SIGKILL)',
  'signals to all': 'import os, signal\nos.kill(-1, signal.SIGKILL)',
  'an interrupt': 'raise KeyboardInterrupt',
  'closes all': 'import os; os.closerange(0, 999); print(1)',
  # They write and read where they must not.
  'a file': "open('MARK', 'w').write('x')",
  'a link': "import os; os.symlink('/etc/passwd', 'MARK')",
  'system files': "open('/etc/passwd', 'a').write('x')",
  'removes': "import shutil; shutil.rmtree('/usr', ignore_errors=True)",
  'a large file': (
    "f = open('x', 'wb')\nwhile True: f.write(bytes(1 << 20)); f.flush()"
  ),
  'many files': (
    'import itertools\n'
    "for i in itertools.count(): open(f'x{i}', 'w').write('x')"
  ),
  'the judge': (
    'import os\nfor n in range(3, 99):\n'
    '  try: os.write(n, b\'{"values": [1.0], "last": false}\')\n'
    '  except OSError: pass'
  ),
  'memory of others': "import os; open(f'/proc/{os.getppid()}/mem', 'r+b')",
  'a secret': "print(open('/root/.ssh/id_rsa').read())",
  'another file': 'import os; os.execv("/bin/sh", ["sh", "-c", "yes"])',
  # They call.
  'TCP': (
    "import socket; socket.create_connection(('127.0.0.1', PORT)).send(b'x')"
  ),
  'UDP': (
    'import socket; s = socket.socket(2, 2)\n'
    "s.sendto(b'x', ('127.0.0.1', PORT))"
  ),
  'a server': (
    'import socket; s = socket.socket(); s.bind(("", 0))\n'
    's.listen(); s.accept()'
  ),
  'a name': "import socket; socket.gethostbyname('localhost.invalid')",
  'the web': (
    'import urllib.request; urllib.request.urlopen("http://127.0.0.1:PORT")'
  ),
  # They say that they are right.
  'words': "print('passed'); print('1.0'); print('7319')",
  'equal to all': 'class str(str):\n  __eq__ = lambda *_: True\nprint(str(1))',
  'an empty program': '',
  'no program': 'not Python',
}  # fmt: skip


def completion(program, mark, port):
  """A completion that ends with a program."""
  program = program.replace('MARK', mark).replace('PORT', str(port))
  return f'Here it is:\n```python\n{program}\n```'


def judge(prompt, completion, example):
  """For workers."""
  return generated_code.python_tests(prompt, completion, EXAMPLE, limits=LIMITS)
