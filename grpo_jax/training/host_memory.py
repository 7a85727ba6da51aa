"""Memory of the host that a run has freed, given back to the system."""

import ctypes
import functools


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
