"""Memory of the host: how much a run has taken, and what it gives back."""

import ctypes
import functools
import resource
import sys


def peak_gib() -> float:
  """The most memory that this process has had at once."""
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  # Linux counts it in KiB, macOS in bytes.
  return peak / (2**30 if sys.platform == 'darwin' else 2**20)


def give_back() -> None:
  """Gives freed memory back to the operating system.

  The threads that write a checkpoint copy the arrays first. When they are done,
  glibc keeps that memory for each thread's next request, and a later save uses
  other threads: a run would grow by the size of a state with every save, up to
  several times. A C library other than glibc is left alone.
  """
  if trim := _trim():
    trim(0)


@functools.cache
def _trim():
  """glibc's `malloc_trim`, or None."""
  try:
    return ctypes.CDLL(None).malloc_trim
  except (OSError, AttributeError, TypeError):  # TypeError: on Windows
    return None
