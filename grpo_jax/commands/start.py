"""What a program that computes sets before all else."""

from collections.abc import Mapping
import contextlib
import gc
import os
import sys

from grpo_jax.planning import accelerators

_THRESHOLDS = 100_000, 10, 10  # of Python's collector of garbage
_XLA = 'XLA_FLAGS'
_LEVEL = '--xla_backend_optimization_level'
_GLIBC = 'GLIBC_TUNABLES'
_LARGE_PAGES = 'glibc.malloc.hugetlb'
_LEAST_GLIBC = 2, 35
_KERNEL = '/sys/kernel/mm/transparent_hugepage/enabled'


def prepare() -> None:
  """Sets what Python, XLA and glibc read; may start this program once more.

  Python looks for garbage in cycles after 100,000 new objects: tracing makes
  millions of small ones, and hardly one of them is in a cycle.

  On a CPU there are two things more. tests/bench/README.md has the seconds with
  and without them.

  - LLVM optimizes at level 2 in place of 3, unless `XLA_FLAGS` has a level or
    names a file: it compiles in less time, and what it makes is as fast, and
    equal bit for bit in the benchmark's cases A and C.
  - malloc asks for pages of 2 MiB. The arrays of XLA come from malloc, which
    gives large ones back to the system when they are freed. The next ones are
    new to the process, and the kernel interrupts it at the first write to each
    page, to fill it with zeros: 512 times as often with pages of 4 KiB.

  glibc reads its setting only when a program starts; see "Memory Allocation
  Tunables" in its manual. So the program starts anew, and keeps its number.
  Memory stays as it is where glibc, the kernel or the start of a program fails,
  or where the environment has the setting:
  `GLIBC_TUNABLES=glibc.malloc.hugetlb=0`.
  """
  if _is_cpu(os.environ):
    _prepare_for_cpu()
  gc.set_threshold(*_THRESHOLDS)


def _prepare_for_cpu() -> None:
  """Sets the level of LLVM and the size of pages, as `prepare` says."""
  flags = os.environ.get(_XLA, '').strip()
  if _LEVEL not in flags and flags[:1] in ('', '-'):  # else XLA reads a file
    os.environ[_XLA] = f'{flags} {_LEVEL}=2'.strip()
  if environment := _with_large_pages(os.environ):
    command = [sys.executable, *sys.orig_argv[1:]]
    with contextlib.suppress(OSError):
      os.execve(sys.executable, command, environment)


def _with_large_pages(environment: Mapping[str, str]) -> dict[str, str] | None:
  """The environment with that setting; None if it is set, or has no effect."""
  given = environment.get(_GLIBC, '')
  if _LARGE_PAGES in given or not _can_have_large_pages():
    return None
  both = ':'.join(filter(None, [given, f'{_LARGE_PAGES}=1']))
  return {**environment, _GLIBC: both}


def _is_cpu(environment: Mapping[str, str]) -> bool:
  """Whether JAX will compute on the host, as far as can be told without it."""
  if platforms := environment.get('JAX_PLATFORMS'):
    return platforms == 'cpu'
  return not accelerators.device_files()


def _can_have_large_pages() -> bool:
  """Whether glibc knows the setting, and the kernel leaves the choice to it."""
  try:
    name, version = (os.confstr('CS_GNU_LIBC_VERSION') or '').split()
    known = tuple(map(int, version.split('.'))) >= _LEAST_GLIBC
    return (
      name == 'glibc' and known and '[madvise]' in accelerators.text(_KERNEL)
    )
  except (ValueError, AttributeError):
    return False
