"""Memory in pages of 2 MiB, for programs that compute on the host."""

from collections.abc import Mapping
import contextlib
import os
import sys

from grpo_jax.planning import accelerators

_VARIABLE = 'GLIBC_TUNABLES'
_SETTING = 'glibc.malloc.hugetlb'
_LEAST_GLIBC = 2, 35
_KERNEL = '/sys/kernel/mm/transparent_hugepage/enabled'


def ask() -> None:
  """Starts this program once more, with malloc asking for pages of 2 MiB.

  On a CPU the arrays of XLA come from malloc, which gives large ones back to
  the system when they are freed. The next ones are new to the process, and the
  kernel interrupts it at the first write to each page, to fill it with zeros:
  512 times as often with pages of 4 KiB. tests/bench/README.md has the seconds
  of a step with both.

  glibc reads the setting only when a program starts; see "Memory Allocation
  Tunables" in its manual. The process keeps its number. Nothing is done beside
  an accelerator, where glibc, the kernel or the start of a program fails, or
  where the environment has the setting: `GLIBC_TUNABLES=glibc.malloc.hugetlb=0`
  leaves memory as it is.
  """
  if environment := asking(os.environ):
    command = [sys.executable, *sys.orig_argv[1:]]
    with contextlib.suppress(OSError):
      os.execve(sys.executable, command, environment)


def asking(environment: Mapping[str, str]) -> dict[str, str] | None:
  """The environment of a program that asks for large pages; None: no need."""
  given = environment.get(_VARIABLE, '')
  if _SETTING in given or not _is_cpu(environment) or not _can():
    return None
  both = ':'.join(filter(None, [given, f'{_SETTING}=1']))
  return {**environment, _VARIABLE: both}


def _is_cpu(environment: Mapping[str, str]) -> bool:
  """Whether JAX will compute on the host, as far as can be told without it."""
  if platforms := environment.get('JAX_PLATFORMS'):
    return platforms == 'cpu'
  return not accelerators.device_files()


def _can() -> bool:
  """Whether glibc knows the setting, and the kernel leaves the choice to it."""
  try:
    name, version = (os.confstr('CS_GNU_LIBC_VERSION') or '').split()
    known = tuple(map(int, version.split('.'))) >= _LEAST_GLIBC
    return (
      name == 'glibc' and known and '[madvise]' in accelerators.text(_KERNEL)
    )
  except (ValueError, AttributeError):
    return False
