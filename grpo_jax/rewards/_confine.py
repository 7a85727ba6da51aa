"""What the guard (`_guard.py`) puts around generated code, on Linux.

Two ways, of which `sandbox.run` takes the first that the system offers:

- 'namespaces': The code sees a file system of its own, with Python and the
  system's libraries in it, read-only, and an empty scratch folder. It sees no
  network and no other process. The user is none that owns anything.
- 'landlock': The kernel refuses to open any file but the same ones. Other
  processes can be seen in part, and not be signalled.

In both, a filter of system calls (seccomp) refuses every socket, every further
namespace, and what has no use in a program that computes.

The process of an agent (`agent_process.py`) has `port` in its order: it may
make sockets of TCP, and reach this port of loopback. Under 'namespaces' a
socket that listens there is made in its network and sent out: the process that
has asked accepts what comes, and none inside holds it. Under 'landlock'
the kernel refuses to connect to another port.
"""

import ctypes
import errno
import fcntl
import os
import platform
import resource
import struct

import _guard  # this runs inside its script, where grpo_jax is not imported

_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_CLONE_NEW_ANY = 0x7E020000
_MS_BIND, _MS_REC, _MS_PRIVATE = 1 << 12, 1 << 14, 1 << 18
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 2, 4, 8
_MNT_DETACH = 2
_READ_ONLY, _NO_SUID, _NO_DEV, _NO_EXEC = 1, 2, 4, 8  # of mount_setattr
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_PR_CAPBSET_DROP, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 24, 22, 38
_USER = 1000  # inside
_NOBODY = 65534  # outside, if root asked
_CAPABILITY_VERSION_3 = 0x20080522
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1
_BACKLOG = 128  # connections that wait to be accepted
_VERSION_OF_PORTS, _VERSION_OF_SIGNALS = 4, 6  # of Landlock
_MOST_FILES = 256  # open at a time: pipes hold memory that no limit counts
_DEVICES = ('/dev/null', '/dev/zero', '/dev/random', '/dev/urandom')


def _syscall(name: str, *arguments) -> int:
  numbers = {**_DENIED, **_CALLED}[name]
  result = _guard.libc().syscall(_number(numbers), *arguments)
  if result < 0:
    number = ctypes.get_errno()
    raise OSError(number, f'{name}: {os.strerror(number)}')
  return result


def _number(numbers: tuple[int, int]) -> int:
  machine = platform.machine()
  if machine not in ('x86_64', 'aarch64'):
    raise OSError(errno.ENOSYS, f'no numbers of system calls for {machine}')
  return numbers[machine == 'aarch64']


def new_user_namespace(flags: int) -> None:
  """Moves this process to a user namespace, and to others by `flags`.

  A helper outside writes which users there are inside: only it may, if root
  asked, map one that owns no file. `_USER` is what the code will run as.
  """
  own = os.readlink('/proc/self')
  asked, ask = os.pipe()
  answered, answer = os.pipe()
  helper = os.fork()
  if helper == 0:
    os.close(ask)
    try:
      if os.read(asked, 1):
        _map_users(own)
        os.write(answer, b'ok')
    except OSError as error:
      os.write(answer, str(error).encode())
    finally:
      os._exit(0)
  os.close(answer)
  try:
    _guard.unshare(_CLONE_NEWUSER | flags)
    os.write(ask, b'x')
    said = os.read(answered, 4096)
  finally:
    for end in (ask, asked, answered):
      os.close(end)
    os.waitpid(helper, 0)
  if said != b'ok':
    raise OSError(errno.EPERM, f'mapping of users: {said.decode()}')


def _map_users(pid: str) -> None:
  user, group = os.geteuid(), os.getegid()
  if user == 0:
    try:
      for name in ('uid_map', 'gid_map'):
        _write(f'/proc/{pid}/{name}', f'0 0 1\n{_USER} {_NOBODY} 1\n')
      return
    except OSError:  # root of a container that has no such user
      pass
  _write(f'/proc/{pid}/setgroups', 'deny')
  _write(f'/proc/{pid}/uid_map', f'{_USER} {user} 1\n')
  _write(f'/proc/{pid}/gid_map', f'{_USER} {group} 1\n')


def _write(path: str, text: str) -> None:
  with open(path, 'w') as file:
    file.write(text)


def new_root(spec: dict) -> None:
  """Replaces the file system by one with `spec['readable']` and a scratch.

  Args:
    spec: The order of the guard. `folder` is an empty folder outside, on which
      the new root is mounted; `readable` are the paths to show, and `links` the
      targets of links to make; `files` are the names and texts of what lies in
      the scratch folder `scratch`. With a `port`, a socket that listens there
      is sent over the unix socket `channel`.
  """
  _guard.unshare(_CLONE_NEWNS | _CLONE_NEWNET | _CLONE_NEWIPC | _CLONE_NEWUTS)
  if spec.get('port'):  # while Python's own modules can still be read
    _listen(spec['port'], spec['channel'])
  root, plain = spec['folder'], _MS_NOSUID | _MS_NODEV
  _guard.mount('none', '/', '', _MS_REC | _MS_PRIVATE)
  _guard.mount('tmpfs', root, 'tmpfs', plain, 'mode=755,size=4m')
  shown: list[str] = []
  for path in sorted(spec['readable']):
    if not any(path.startswith(one + '/') for one in shown):
      shown += [path] * _show(root, path, _READ_ONLY | _NO_SUID | _NO_DEV)
  for path, target in spec['links'].items():
    if not os.path.lexists(root + path):
      os.makedirs(os.path.dirname(root + path), exist_ok=True)
      os.symlink(target, root + path)
  for path in _DEVICES:
    _show(root, path, _READ_ONLY | _NO_SUID | _NO_EXEC)
  os.mkdir(root + '/proc')
  try:
    _guard.mount('proc', root + '/proc', 'proc', plain | _MS_NOEXEC)
  except OSError:  # a container that hides parts of its own; Python needs none
    pass
  scratch = root + spec['scratch']
  os.makedirs(scratch, exist_ok=True)
  size = f'mode=1777,size={spec["scratch_bytes"]},nr_inodes=10000'
  _guard.mount('tmpfs', scratch, 'tmpfs', plain, size)
  for name, text in spec['files'].items():
    _write(f'{scratch}/{name}', text)
    os.chmod(f'{scratch}/{name}', 0o644)
  links = ['/tmp', '/dev/shm'] if spec.get('port') else ['/tmp']
  for path in links:  # semaphores of several processes lie in /dev/shm
    if not os.path.lexists(root + path):
      os.symlink(spec['scratch'], root + path)
  os.chdir(root)
  _syscall('pivot_root', b'.', b'.')
  if _guard.libc().umount2(b'.', _MNT_DETACH) < 0:
    raise OSError(ctypes.get_errno(), 'umount of the old root')
  os.chdir('/')
  _set_attributes('/', _READ_ONLY, 0)


def _listen(port: int, channel: int) -> None:
  """Sends out a socket that listens in this network, of loopback alone.

  Args:
    port: The port of 127.0.0.1.
    channel: A unix socket, on which the one that listens is sent. It is closed.
  """
  import socket  # generated code, which has no network, starts without it

  with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_one:
    given = struct.pack('16sH22x', b'lo', _IFF_UP)
    fcntl.ioctl(any_one, _SIOCSIFFLAGS, given)
  with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
    listener.bind(('127.0.0.1', port))
    listener.listen(_BACKLOG)
    with socket.socket(fileno=channel) as sender:
      socket.send_fds(sender, [b'x'], [listener.fileno()])


def _show(root: str, path: str, attributes: int) -> bool:
  """Makes a path of the system visible at the same place below `root`."""
  place = root + path
  if not os.path.lexists(path) or os.path.lexists(place):
    return False
  os.makedirs(os.path.dirname(place), exist_ok=True)
  if os.path.islink(path) and os.path.dirname(path) == '/':  # as /lib
    os.symlink(os.readlink(path), place)
    return False
  if os.path.isdir(path):
    os.mkdir(place)
  else:
    _write(place, '')
  _guard.mount(path, place, '', _MS_BIND | _MS_REC)
  _set_attributes(place, attributes, _AT_RECURSIVE)
  return True


def _set_attributes(path: str, attributes: int, flags: int) -> None:
  given = struct.pack('QQQQ', attributes, 0, 0, 0)
  _syscall(
    'mount_setattr', _AT_FDCWD, path.encode(), flags, given,
    ctypes.c_size_t(len(given)),
  )  # fmt: skip


def enter(spec: dict) -> None:
  """Gives up, for good, what the program must not have. Just before exec."""
  _guard.lower(resource.RLIMIT_NOFILE, _MOST_FILES)
  port = spec.get('port')
  if spec['confine'] == 'namespaces':
    threads = spec.get('threads', spec['processes'])
    resource.setrlimit(resource.RLIMIT_NPROC, (threads,) * 2)
    try:
      os.setgroups([])
    except OSError:  # a user who is not root may not
      pass
    os.setresgid(_USER, _USER, _USER)
    os.setresuid(_USER, _USER, _USER)
  elif spec['confine'] == 'landlock':
    _drop_bounding_set()
  os.chdir(spec['scratch'])
  _guard.prctl(_PR_SET_NO_NEW_PRIVS, 1)
  landlock = spec['confine'] == 'landlock'
  if landlock:
    rules = _landlock(spec['readable'], spec['scratch'], port)
    _syscall('landlock_restrict_self', rules, 0)
    os.close(rules)
  _install(_filter(landlock, bool(port)))


def give_up_privileges() -> None:
  """Leaves this process and all that it starts without any of root's rights.

  The user stays the same. Unlike `enter`, it needs no exec to take effect.
  """
  _drop_bounding_set()
  _guard.prctl(_PR_SET_NO_NEW_PRIVS, 1)
  header = struct.pack('=Ii', _CAPABILITY_VERSION_3, 0)
  _syscall('capset', header, bytes(24))


class Confinement:
  """Confines processes without an exec: those that this process forks.

  Args:
    readable: The only paths that they may read. They may write nothing but the
      files that they have open.
  """

  def __init__(self, readable: list[str]):
    self._rules = _landlock(readable, None)
    self._filter = _filter(landlock=True)

  def enter(self) -> None:
    """Confines this process, for good; it must have one thread."""
    _guard.lower(resource.RLIMIT_NOFILE, _MOST_FILES)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # files without a name
    _syscall('landlock_restrict_self', self._rules, 0)
    _install(self._filter)


def _drop_bounding_set() -> None:
  if os.geteuid() != 0:
    return
  for capability in range(64):
    try:
      _guard.prctl(_PR_CAPBSET_DROP, capability)
    except OSError:  # beyond the last one
      break


def _landlock_version() -> int:
  return _syscall('landlock_create_ruleset', None, ctypes.c_size_t(0), 1)


def _landlock(
  readable: list[str], scratch: str | None, port: int | None = None
) -> int:
  """Rules that refuse all files but these; see `man 7 landlock` for the bits.

  Only what lies in `scratch` may be written, and only to `port` may a TCP
  socket connect. Returns a file descriptor.
  """
  version = _landlock_version()
  if port and version < _VERSION_OF_PORTS:
    raise OSError(
      errno.ENOSYS,
      f'Landlock of this kernel has version {version}, and rules for ports came'
      f' with version {_VERSION_OF_PORTS} (Linux 6.7)',
    )
  bits = 13 + (version >= 2) + (version >= 3) + (version >= 5)
  handled = (1 << bits) - 1
  net = 3 if version >= 4 else 0
  scoped = 3 if version >= 6 else 0
  size = 24 if version >= 6 else 16 if version >= 4 else 8
  given = struct.pack('QQQ', handled, net, scoped)[:size]
  rules = _syscall('landlock_create_ruleset', given, ctypes.c_size_t(size), 0)
  read_file, read_all, write = 0b101, 0b1101, 0b10
  special = 1 << 6 | 1 << 9 | 1 << 11  # devices and sockets
  allowed = [(path, read_all) for path in readable]
  allowed += [(path, read_file | write) for path in _DEVICES]
  if scratch is not None:
    allowed += [(scratch, handled & ~special)]
  for path, access in allowed:
    try:
      file = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
      continue
    if not os.path.isdir(path):
      access &= read_file | write
    rule = struct.pack('=Qi', access, file)
    _syscall('landlock_add_rule', rules, 1, rule, 0)
    os.close(file)
  if port:
    connect = 2
    rule = struct.pack('=QQ', connect, port)
    _syscall('landlock_add_rule', rules, 2, rule, 0)
  return rules


# System calls by their numbers on x86_64 and aarch64; -1 where there is none.
_CALLED = {
  'landlock_create_ruleset': (444, 444),
  'landlock_add_rule': (445, 445),
  'landlock_restrict_self': (446, 446),
  'capset': (126, 91),
}
_DENIED = {
  'socket': (41, 198), 'connect': (42, 203), 'bind': (49, 200),
  'io_uring_setup': (425, 425), 'ptrace': (101, 117),
  'mount': (165, 40), 'umount2': (166, 39), 'pivot_root': (155, 41),
  'chroot': (161, 51), 'unshare': (272, 97), 'setns': (308, 268),
  'open_tree': (428, 428), 'move_mount': (429, 429), 'fsopen': (430, 430),
  'fsmount': (432, 432), 'fspick': (433, 433), 'mount_setattr': (442, 442),
  'bpf': (321, 280), 'perf_event_open': (298, 241), 'keyctl': (250, 219),
  'add_key': (248, 217), 'request_key': (249, 218), 'userfaultfd': (323, 282),
  'process_vm_readv': (310, 270), 'process_vm_writev': (311, 271),
  'pidfd_getfd': (438, 438), 'open_by_handle_at': (304, 265),
  'shmget': (29, 194), 'msgget': (68, 186), 'semget': (64, 190),
  'mq_open': (240, 180), 'syslog': (103, 116), 'quotactl': (179, 60),
  # No limit of memory counts the pages of these files.
  'memfd_create': (319, 279), 'memfd_secret': (447, 447),
}  # fmt: skip
# Landlock guards these since its version 6.
_SIGNALS = {
  'kill': (62, 129), 'tkill': (200, 130), 'tgkill': (234, 131),
  'rt_sigqueueinfo': (129, 138), 'rt_tgsigqueueinfo': (297, 240),
  'pidfd_send_signal': (424, 424),
}  # fmt: skip
# Landlock does not guard these.
_DENIED_BESIDE_LANDLOCK = {
  'truncate': (76, 45), 'chmod': (90, -1), 'fchmod': (91, 52),
  'fchmodat': (268, 53), 'fchmodat2': (452, 452),
  'chown': (92, -1), 'fchown': (93, 55), 'lchown': (94, -1),
  'fchownat': (260, 54), 'utime': (132, -1), 'utimes': (235, -1),
  'futimesat': (261, -1), 'utimensat': (280, 88), 'setxattr': (188, 5),
  'lsetxattr': (189, 6), 'fsetxattr': (190, 7), 'removexattr': (197, 14),
  'lremovexattr': (198, 15), 'fremovexattr': (199, 16),
  'setxattrat': (463, 463), 'removexattrat': (466, 466),
  'setpriority': (141, 140), 'ioprio_set': (251, 30),
  'sched_setaffinity': (203, 122), 'sched_setscheduler': (144, 119),
  'sched_setparam': (142, 118), 'sched_setattr': (314, 274),
  'process_madvise': (440, 440), 'migrate_pages': (256, 238),
  'move_pages': (279, 239), 'inotify_add_watch': (254, 27),
  'file_setattr': (469, 469),
}  # fmt: skip
# Requests to send a signal to another process once a file is ready. Landlock
# guards these since its version 6 only.
_DENIED_REQUESTS = {
  (72, 25): (8, 10, 15),  # fcntl: F_SETOWN, F_SETSIG, F_SETOWN_EX
  (16, 29): (0x8901, 0x8902),  # ioctl: FIOSETOWN, SIOCSPGRP
}
_CLONE, _CLONE3, _PRLIMIT = (56, 220), (435, 435), (302, 261)
_SOCKET_PAIR, _STREAM = (53, 199), 1
_INTERNET, _TCP = 2, 6  # AF_INET, IPPROTO_TCP
# Sends that connect by themselves, which Landlock does not see: the offset of
# their flags.
_SENDS = {(44, 206): 40, (46, 211): 32, (307, 269): 40}
_FAST_OPEN = 0x20000000
_LISTEN = (50, 201)
# A protocol on top of TCP (SMC) that takes its place.
_SET_OPTION, _UPPER_PROTOCOL = (54, 208), 31

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_AND = 0x54
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000


def _filter(landlock: bool, port: bool = False) -> bytes:
  """A filter of system calls: these fail with 'not permitted'.

  Args:
    landlock: Whether Landlock confines the process, and no namespaces.
    port: Whether it may make sockets of TCP.
  """
  denied = dict(_DENIED)
  if landlock:
    denied |= _DENIED_BESIDE_LANDLOCK
    # A program that others have written ends what it starts.
    if not port or _landlock_version() < _VERSION_OF_SIGNALS:
      denied |= _SIGNALS
  if port:
    del denied['socket'], denied['connect']
    if landlock:  # a socket that only listens needs no `bind`
      denied['listen'] = _LISTEN
    else:
      del denied['bind']
  arch = _number((0xC000003E, 0xC00000B7))
  refuse = (_RETURN, 0, 0, _ERRNO | errno.EPERM)
  program = [
    (_LOAD, 0, 0, 4),  # the architecture: no calls of 32 bits
    (_EQUAL, 1, 0, arch),
    (_RETURN, 0, 0, _KILL),
    (_LOAD, 0, 0, 0),  # the number of the call: none of x32
    (_AT_LEAST, 0, 1, 0x40000000),
    refuse,
  ]
  for numbers in denied.values():
    if _number(numbers) >= 0:
      program += [(_EQUAL, 0, 1, _number(numbers)), refuse]
  if port:
    program += _tcp_alone(landlock)
  # A pair of streams reaches nothing else. One of datagrams sends to any unix
  # socket that is named with a message, where no filter can read the name.
  program += [
    (_EQUAL, 0, 5, _number(_SOCKET_PAIR)),
    (_LOAD, 0, 0, 24),
    (_AND, 0, 0, 0xF),
    (_EQUAL, 1, 0, _STREAM),
    refuse,
    (_RETURN, 0, 0, _ALLOW),
  ]
  # glibc falls back to clone(2), whose flags a filter can read.
  program += [
    (_EQUAL, 0, 1, _number(_CLONE3)),
    (_RETURN, 0, 0, _ERRNO | errno.ENOSYS),
    (_EQUAL, 0, 4, _number(_CLONE)),
    (_LOAD, 0, 0, 16),
    (_ANY_BIT, 0, 1, _CLONE_NEW_ANY),
    refuse,
    (_RETURN, 0, 0, _ALLOW),
  ]
  if landlock:
    for numbers, requests in _DENIED_REQUESTS.items():
      checks = [(_LOAD, 0, 0, 24)]  # the kernel reads 32 bits of it, as we do
      for request in requests:
        checks += [(_EQUAL, 0, 1, request), refuse]
      checks.append((_RETURN, 0, 0, _ALLOW))
      program += [(_EQUAL, 0, len(checks), _number(numbers)), *checks]
    program += [  # limits of its own process only
      (_EQUAL, 0, 3, _number(_PRLIMIT)),
      (_LOAD, 0, 0, 16),
      (_EQUAL, 1, 0, 0),
      refuse,
    ]
  program.append((_RETURN, 0, 0, _ALLOW))
  return b''.join(struct.pack('=HBBI', *one) for one in program)


def _tcp_alone(landlock: bool) -> list[tuple[int, int, int, int]]:
  """The part of a filter that refuses all sockets but those of TCP.

  Other protocols of streams (MPTCP, SCTP) are none of those that Landlock
  guards, and sockets of virtual machines are in no namespace.
  """
  refuse = (_RETURN, 0, 0, _ERRNO | errno.EPERM)
  program = [
    (_EQUAL, 0, 10, _number(_DENIED['socket'])),
    (_LOAD, 0, 0, 16),
    (_EQUAL, 0, 6, _INTERNET),
    (_LOAD, 0, 0, 24),
    (_AND, 0, 0, 0xF),
    (_EQUAL, 0, 3, _STREAM),
    (_LOAD, 0, 0, 32),
    (_EQUAL, 2, 0, 0),
    (_EQUAL, 1, 0, _TCP),
    refuse,
    (_RETURN, 0, 0, _ALLOW),
  ]
  if landlock:
    for numbers, flags in _SENDS.items():
      program += [
        (_EQUAL, 0, 4, _number(numbers)),
        (_LOAD, 0, 0, flags),
        (_ANY_BIT, 0, 1, _FAST_OPEN),
        refuse,
        (_RETURN, 0, 0, _ALLOW),
      ]
    program += [
      (_EQUAL, 0, 6, _number(_SET_OPTION)),
      (_LOAD, 0, 0, 24),
      (_EQUAL, 0, 3, _TCP),
      (_LOAD, 0, 0, 32),
      (_EQUAL, 0, 1, _UPPER_PROTOCOL),
      refuse,
      (_RETURN, 0, 0, _ALLOW),
    ]
  return program


def _install(program: bytes) -> None:
  held = ctypes.create_string_buffer(program)
  filter_ = ctypes.create_string_buffer(
    struct.pack('@HP', len(program) // 8, ctypes.addressof(held))
  )
  _guard.prctl(_PR_SET_SECCOMP, 2, ctypes.addressof(filter_))
