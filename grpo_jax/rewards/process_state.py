"""What a judge or an environment may change in its process."""

from collections.abc import Iterable
import os
import resource
import signal
import sys
import threading


class State:
  """What code of others may change in its process, as it is now."""

  def __init__(self):
    self.folder = os.getcwd()
    self.environment = dict(os.environ)
    self.umask = os.umask(0)
    os.umask(self.umask)
    self.blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    self.handlers = {number: signal.getsignal(number) for number in _HANDLED}
    self.streams = sys.stdin, sys.stdout, sys.stderr
    self.depth = sys.getrecursionlimit()
    self.path = list(sys.path)
    self.threads = set(threading.enumerate())
    self.files = _standard_files()
    self.limits = _resource_limits()

  def restore(self, own: Iterable[threading.Thread] = ()) -> bool:
    """Whether all is as it was; what can be set back, is.

    Args:
      own: Threads that may stay, although they were started since.
    """
    try:
      os.chdir(self.folder)
      if dict(os.environ) != self.environment:
        os.environ.clear()
        os.environ.update(self.environment)
      os.umask(self.umask)
      for timer in _TIMERS:
        signal.setitimer(timer, 0)
      signal.pthread_sigmask(signal.SIG_SETMASK, self.blocked)
      for number, handler in self.handlers.items():
        if signal.getsignal(number) != handler:
          signal.signal(number, handler)
      sys.stdin, sys.stdout, sys.stderr = self.streams
      sys.setrecursionlimit(self.depth)
      sys.path[:] = self.path
      new_threads = set(threading.enumerate()) - self.threads - {*own}
      return (
        not new_threads
        and not _has_children()
        and _standard_files() == self.files
        and _resource_limits() == self.limits
      )
    except BaseException:  # then another process goes on
      return False


_HANDLED = (
  signal.SIGINT,
  signal.SIGTERM,
  signal.SIGALRM,
  signal.SIGCHLD,
  signal.SIGPIPE,
)


_TIMERS = signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF
_RESOURCES = sorted(
  {value for name, value in vars(resource).items() if name[:7] == 'RLIMIT_'}
)


def _resource_limits() -> list[tuple[int, int]]:
  return [resource.getrlimit(number) for number in _RESOURCES]


def _standard_files() -> list[tuple[int, int]]:
  return [(found.st_rdev, found.st_ino) for found in map(os.fstat, range(3))]


def _has_children() -> bool:
  """Whether a process is left over; this process inherits all orphans."""
  try:
    while os.waitpid(-1, os.WNOHANG)[0]:
      pass
    return True
  except ChildProcessError:
    return False
