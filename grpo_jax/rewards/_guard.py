"""Runs one program, and ends it together with everything that it has started.

A script for `python -I -S`, which imports nothing of ours but `_confine`. It
stands between the process that asked (`_launch.Guarded`) and the program:

    asked for by -> guard -> [first process of a namespace] -> program

A program may fork, start sessions of its own and outlive its parent, so its
process group does not hold all of it. Where the kernel lets the guard make a
PID namespace, the program runs in it, and the kernel ends all of a namespace
with its first process. Elsewhere orphans come to the guard, which is their
'subreaper', and it looks for its descendants in /proc until none is left.

The guard reads a JSON object from the pipe `control` (see `_launch.Guarded`).
It ends the program when that pipe closes, by order or because the process that
asked has died, and when the program and its children together hold more memory
or more processes than allowed. Its last word is a JSON object on the pipe
`status`: nothing of the program runs any more when it is there.
"""

import ctypes
import json
import os
import resource
import select
import signal
import sys
import time

_CLONE_NEWNS = 0x20000
_CLONE_NEWUSER = 0x10000000
_CLONE_NEWPID = 0x20000000
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 2, 4, 8
_MS_REC, _MS_PRIVATE = 1 << 14, 1 << 18
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LOOK_SECS = 0.1  # between two looks at the memory of all processes


def libc():
  return ctypes.CDLL(None, use_errno=True)


def prctl(*arguments: int) -> None:
  """Calls prctl(2), and raises an OSError if the kernel refuses."""
  if libc().prctl(*map(ctypes.c_ulong, (*arguments, 0, 0, 0, 0)[:5])) < 0:
    number = ctypes.get_errno()
    raise OSError(number, f'prctl {arguments}: {os.strerror(number)}')


def unshare(flags: int) -> None:
  """Moves this process (its children, for PIDs) to new namespaces."""
  if libc().unshare(flags) < 0:
    number = ctypes.get_errno()
    raise OSError(number, f'unshare: {os.strerror(number)}')


def main(control: int, status: int) -> None:
  """Runs the program of `control` and writes to `status` how it ended."""
  for end in (control, status):
    os.set_inheritable(end, False)
  spec = _spec(control)
  word = {'failure': '', 'status': None, 'isolated': False}
  if spec is not None:
    try:
      word.update(_run(spec, control))
    except OSError as error:
      word['failure'] = f'refused: {error}'
  os.write(status, json.dumps(word).encode())


def _spec(control: int) -> dict | None:
  """The order: one line of JSON. None if the asking process is gone."""
  line = b''
  while not line.endswith(b'\n'):
    read = os.read(control, 1 << 16)
    if not read:
      return None
    line += read
  return json.loads(line)


def _run(spec: dict, control: int) -> dict:
  linux = sys.platform == 'linux'
  if linux:
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
  isolated = linux and _new_pid_namespace(spec)
  woken, wake = os.pipe()
  os.set_blocking(wake, False)
  signal.signal(signal.SIGCHLD, lambda *_: None)
  signal.set_wakeup_fd(wake)
  told, tell = os.pipe()
  child = os.fork()
  if child == 0:
    _child(spec, isolated, tell)
  os.close(tell)
  failure, status = _watch(child, control, woken, spec, int(isolated))
  end_all(child)  # nothing holds `tell` after it
  for line in os.read(told, 1 << 16).decode().splitlines():
    said = json.loads(line)
    failure = said.get('failure', failure)
    status = said.get('status', status)
  return {'failure': failure, 'status': status, 'isolated': isolated}


def _new_pid_namespace(spec: dict) -> bool:
  """Whether children of this process will be in a PID namespace of theirs."""
  if spec.get('confine') == 'namespaces':
    import _confine  # pyright: ignore[reportMissingImports]

    _confine.new_user_namespace(_CLONE_NEWPID)
    return True
  if not spec['pid_namespace']:
    return False
  try:
    unshare(_CLONE_NEWPID)  # allowed to root
    return True
  except OSError:
    pass
  # Some systems let a process make a user namespace, and refuse its map (Ubuntu
  # 24.04 does). That process could not go on, so a child tries it first.
  child = os.fork()
  if child == 0:
    try:
      os._exit(not _new_user_namespace())
    finally:
      os._exit(1)
  _, status = os.waitpid(child, 0)
  return status == 0 and _new_user_namespace()


def _new_user_namespace() -> bool:
  """Moves to a user namespace and its PID namespace; False if none is made.

  Raises:
    OSError: They were made, and this process cannot be mapped into them.
  """
  user, group = os.geteuid(), os.getegid()
  try:
    unshare(_CLONE_NEWUSER | _CLONE_NEWPID)
  except OSError:
    return False
  for name, text in (
    ('setgroups', 'deny'),
    ('uid_map', f'{user} {user} 1'),
    ('gid_map', f'{group} {group} 1'),
  ):
    with open(f'/proc/self/{name}', 'w') as file:
      file.write(text)
  return True


def _child(spec: dict, isolated: bool, tell: int) -> None:
  """The program, or the first process of its namespace. Never returns."""
  try:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if sys.platform == 'linux':
      prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if isolated:
      if spec.get('confine') == 'namespaces':
        import _confine  # pyright: ignore[reportMissingImports]

        _confine.new_root(spec)
      else:
        _own_proc()
      program = os.fork()
      if program:
        _reap_until(program, tell)
    os.setsid()  # a group of its own, and no terminal
    _become(spec)
  except BaseException as error:
    _tell(tell, failure=f'refused: {type(error).__name__}: {error}')
  finally:
    os._exit(127)


def _own_proc() -> None:
  """Shows the processes of this namespace in /proc, where that is allowed."""
  try:
    unshare(_CLONE_NEWNS)
    mount('none', '/', '', _MS_REC | _MS_PRIVATE)
    mount('proc', '/proc', 'proc', _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
  except OSError:
    pass


def mount(source: str, target: str, kind: str, flags: int, data='') -> None:
  """Calls mount(2), and raises an OSError if the kernel refuses."""
  words = (word.encode() or None for word in (source, target, kind))
  if libc().mount(*words, ctypes.c_ulong(flags), data.encode() or None) < 0:
    number = ctypes.get_errno()
    raise OSError(number, f'mount {target}: {os.strerror(number)}')


def _reap_until(program: int, tell: int) -> None:
  """The first process of a namespace: its end is the end of all others."""
  while True:
    pid, status = os.wait()
    if pid == program:
      _tell(tell, status=status)
      os._exit(0)


def _tell(tell: int, **said) -> None:
  os.write(tell, json.dumps(said).encode() + b'\n')


def _become(spec: dict) -> None:
  limits = {
    resource.RLIMIT_CORE: 0,
    resource.RLIMIT_AS: spec['memory_bytes'],
    resource.RLIMIT_FSIZE: spec['file_bytes'],
  }
  if spec.get('cpu_secs'):
    limits[resource.RLIMIT_CPU] = spec['cpu_secs']
  for limit, value in limits.items():
    lower(limit, value)
  if spec.get('confine'):
    import _confine  # pyright: ignore[reportMissingImports]

    _confine.enter(spec)
  for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores
    signal.signal(number, signal.SIG_DFL)
  env = spec['env']
  if env is None:
    env = dict(os.environ)
  os.execve(spec['argv'][0], spec['argv'], env)


def lower(limit: int, value: int) -> None:
  """Sets a limit of this process for good; one that is lower stays.

  One of processor time is soft for a second: a process that reaches the hard
  one gets SIGKILL, which does not say why, and no SIGXCPU before it.
  """
  hard = value + (limit == resource.RLIMIT_CPU)
  _, most = resource.getrlimit(limit)
  if most != resource.RLIM_INFINITY:
    value, hard = min(value, most), min(hard, most)
  resource.setrlimit(limit, (value, hard))


def _watch(
  child: int, control: int, woken: int, spec: dict, own: int
) -> tuple[str, int | None]:
  """Waits for the end: why the child was ended, or its own wait status."""
  looked = select.poll()
  looked.register(control, select.POLLIN)
  looked.register(woken, select.POLLIN)
  pause = _LOOK_SECS
  while True:
    events = dict(looked.poll(1000 * pause))
    if control in events:
      return 'ended', None
    if woken in events:
      os.read(woken, 4096)
      # Orphans that came here are reaped, so that they are not counted.
      while True:
        try:
          pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
          return '', None
        if pid == child:
          return '', status
        if not pid:
          break
    began = time.process_time()
    failure = _over(spec, own)
    if failure:
      return failure, None
    # Where many processes run, a look takes long, and is taken less often.
    pause = max(_LOOK_SECS, 50 * (time.process_time() - began))


def _over(spec: dict, own: int) -> str:
  """What all processes of the program have too much of, or ''."""
  most = spec['processes']
  pids = descendants(most + own)
  if len(pids) > most + own:
    return 'processes'
  if len(pids) <= 1 + own:  # a single process is held by RLIMIT_AS
    return ''
  # Forks share pages, which the resident size counts twice and `Pss` does not.
  # The kernel needs long for `Pss`, so it is asked only where it may matter.
  for what in (_resident, _proportional):
    if sum(map(what, pids)) <= spec['memory_bytes']:
      return ''
  return 'memory'


def _resident(pid: int) -> int:
  try:
    with open(f'/proc/{pid}/statm') as file:
      return int(file.read().split()[1]) * resource.getpagesize()
  except (OSError, IndexError):
    return 0


def _proportional(pid: int) -> int:
  try:
    with open(f'/proc/{pid}/smaps_rollup') as file:
      for line in file:
        if line.startswith('Pss:'):
          return 1024 * int(line.split()[1])
  except OSError:
    pass
  return 0


def _listed(pid: int) -> list[int]:
  """The children of a process, of a kernel that lists them."""
  found = []
  try:
    for task in os.listdir(f'/proc/{pid}/task'):
      with open(f'/proc/{pid}/task/{task}/children') as file:
        found += map(int, file.read().split())
  except OSError:  # it has ended
    pass
  return found


def _scanned() -> dict[int, list[int]]:
  """The children of all processes, for kernels that do not list them."""
  found: dict[int, list[int]] = {}
  for name in filter(str.isdigit, os.listdir('/proc')):
    try:
      with open(f'/proc/{name}/stat') as file:
        parent = int(file.read().rpartition(')')[2].split()[1])
    except OSError:
      continue
    found.setdefault(parent, []).append(int(name))
  return found


def descendants(most: int = 1 << 20, root: int | None = None) -> list[int]:
  """The processes below this one, or below `root`; few beyond `most`."""
  own = os.getpid()
  try:
    if os.readlink('/proc/self') != str(own):  # of another PID namespace
      return []
  except OSError:
    return []
  children = _listed
  if not os.path.exists(f'/proc/{own}/task/{own}/children'):
    scanned = _scanned()
    children = lambda pid: scanned.get(pid, [])
  found, new = [], [own if root is None else root]
  while new and len(found) <= most:
    below = children(new.pop())
    found += below
    new += below
  return found


def cpu_secs(root: int) -> float | None:
  """The processor time of all processes below one, also of those that ended.

  That of `root` itself is not counted. None where the system does not tell.
  """
  ticks, told = 0, False
  for pid in (root, *descendants(root=root)):
    try:
      with open(f'/proc/{pid}/stat') as file:
        own = file.read().rpartition(')')[2].split()[11:15]
    except OSError:  # it has ended, and its parent has its time
      continue
    told = True
    ticks += sum(map(int, own[2 if pid == root else 0 :]))
  return ticks / os.sysconf('SC_CLK_TCK') if told else None


def signal_name(number: int) -> str:
  """'SIGKILL', of 9."""
  try:
    return signal.Signals(number).name
  except ValueError:  # a real-time signal
    return str(number)


def end_all(child: int) -> None:
  """Ends every process below this one, however it was started.

  All are stopped before any is ended: what stands still starts nothing new.
  Where /proc is none of this namespace, only the group of `child` is ended.
  """
  _kill(child, signal.SIGKILL)
  try:
    os.killpg(child, signal.SIGKILL)
  except OSError:
    pass
  while True:
    stopped: set[int] = set()
    while True:
      new = set(descendants()) - stopped
      for pid in new:
        _kill(pid, signal.SIGSTOP)
      if not new:
        break
      stopped |= new
    for pid in stopped:
      _kill(pid, signal.SIGKILL)
    try:
      while os.waitpid(-1, os.WNOHANG)[0]:
        pass
      time.sleep(0.001)
    except ChildProcessError:
      return


def _kill(pid: int, number: int) -> None:
  try:
    os.kill(pid, number)
  except OSError:
    pass


if __name__ == '__main__':
  # Behind the standard library, whose modules must not be shadowed by ours.
  sys.modules['_guard'] = sys.modules['__main__']
  sys.path.append(os.path.dirname(os.path.abspath(__file__)))
  main(int(sys.argv[1]), int(sys.argv[2]))
