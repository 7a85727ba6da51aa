"""How much the files in a scratch folder take, removed ones that are open too.

Landlock has no limit for a folder, so `sandbox.run` looks from outside.
"""

from collections.abc import Iterator
import contextlib
import os
import stat

_LEAST_BYTES = 4096  # that a file or folder counts: an empty one takes room too


def is_over(folder: str, process: int, most_bytes: int) -> bool:
  """Whether files take more than is allowed.

  Args:
    folder: All that lies in it counts.
    process: What this process and its descendants have open on the same file
      system counts too if it has no name any more.
    most_bytes: The limit.
  """
  total, seen = 0, set()
  device = os.stat(folder).st_dev
  for found in _files(folder, process):
    if found.st_dev != device or found.st_ino in seen:
      continue
    seen.add(found.st_ino)
    total += max(_LEAST_BYTES, found.st_blocks * 512)
    if total > most_bytes:  # it need not count a million files
      return True
  return False


def _files(folder: str, process: int) -> Iterator[os.stat_result]:
  """Each may have gone while it is looked at."""
  waiting = [folder]
  while waiting:
    with contextlib.suppress(OSError), os.scandir(waiting.pop()) as inside:
      for entry in inside:
        with contextlib.suppress(OSError):
          yield entry.stat(follow_symlinks=False)
          if entry.is_dir(follow_symlinks=False):
            waiting.append(entry.path)
  for one in _descendants(process):
    with contextlib.suppress(OSError):
      for number in os.listdir(f'/proc/{one}/fd'):
        with contextlib.suppress(OSError):
          found = os.stat(f'/proc/{one}/fd/{number}')
          if not found.st_nlink and stat.S_ISREG(found.st_mode):
            yield found


def _descendants(process: int) -> Iterator[int]:
  """A process and all that it has started; its guard adopts orphans."""
  waiting = [process]
  while waiting:
    one = waiting.pop()
    yield one
    with contextlib.suppress(OSError):
      for thread in os.listdir(f'/proc/{one}/task'):
        with contextlib.suppress(OSError):
          with open(f'/proc/{one}/task/{thread}/children') as file:
            waiting += map(int, file.read().split())
