"""Memory: how much a run has taken, and what the host gets back."""

import contextlib
import ctypes
import resource
import sys


def peak_gib() -> float:
  """The most memory that this process has had at once."""
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  # Linux counts it in KiB, macOS in bytes.
  return peak / (2**30 if sys.platform == 'darwin' else 2**20)


def metrics_of_memory() -> dict[str, float]:
  """The most memory that was taken at once since the process began.

  Returns:
    `host_peak_gib`, of this process, and `device_peak_gib`, of the fullest of
    its devices if they tell it, as GPUs and TPUs do.
  """
  # Not at the top of the file: see `workdir._is_first`.
  import jax

  found = [device.memory_stats() or {} for device in jax.local_devices()]
  peaks = [one.get('peak_bytes_in_use', 0) for one in found]
  of_devices = {'device_peak_gib': max(peaks) / 2**30} if any(peaks) else {}
  return {'host_peak_gib': peak_gib(), **of_devices}


def give_back() -> None:
  """Gives freed memory back to the operating system.

  The threads that write a checkpoint copy the arrays first. When they are done,
  glibc keeps that memory for each thread's next request, and a later save uses
  other threads: a run would grow by the size of a state with every save, up to
  several times. A C library other than glibc is left alone.
  """
  # TypeError: on Windows, where no library has the name None.
  with contextlib.suppress(OSError, AttributeError, TypeError):
    ctypes.CDLL(None).malloc_trim(0)
