"""Memory of the host: how much a run has taken, and what it gives back."""

import ctypes
import functools
import glob
import os
import resource
import sys

import jax

# Files of accelerators: of TPUs, of NVIDIA's GPUs, of AMD's.
_DEVICES = (
  '/dev/accel[0-9]*',
  '/dev/vfio/[0-9]*',
  '/dev/nvidia[0-9]*',
  '/dev/kfd',
)

_PLATFORMS = 'jax_platforms'  # by this name, because pyright knows none of them

# Parameters of glibc's `mallopt`; see its manual page.
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8


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


def keep() -> bool:
  """Makes this process keep freed memory, where XLA computes in it: on a CPU.

  glibc gives each large array back to the operating system as soon as it is
  freed, and the pages of the next one are new, and filled with zeros first: of
  an update with 32,768 ids that takes half the time. Here the memory of one
  update is there for the next, and `give_back` is what gives back.

  It acts on threads that begin later; XLA's do when JAX is first used. Nothing
  is done if the environment has settings for malloc, nor beside an accelerator.

  Returns:
    Whether memory is kept.
  """
  own = any(name.startswith('MALLOC_') for name in os.environ)
  if own or 'malloc' in os.environ.get('GLIBC_TUNABLES', ''):
    return False
  platforms = getattr(jax.config, _PLATFORMS)
  beside = bool(platforms) or any(map(glob.glob, _DEVICES))
  is_cpu = platforms == 'cpu' or not beside
  set_option = _of_glibc('mallopt')
  if not is_cpu or set_option is None:
    return False
  # One arena, because in the others each array above 64 MiB is mapped anew.
  options = (_ARENA_MAX, 1), (_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1)
  return all([set_option(*option) for option in options])


def _trim():
  """glibc's `malloc_trim`, or None."""
  return _of_glibc('malloc_trim')


@functools.cache
def _of_glibc(name: str):
  """A function of glibc, or None."""
  try:
    return getattr(ctypes.CDLL(None), name)
  except (OSError, AttributeError, TypeError):  # TypeError: on Windows
    return None
