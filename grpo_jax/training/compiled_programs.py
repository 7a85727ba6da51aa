"""Compiled programs, kept on the disk from one start of a run to the next."""

import hashlib
import os
import pathlib
import platform

import jax
from jax.experimental.compilation_cache import compilation_cache

_VARIABLE = 'jax_compilation_cache_dir'
_LEAST_SECS = 'jax_persistent_cache_min_compile_time_secs'


def keep(place: str) -> None:
  """Makes JAX read compiled programs from a directory, and write them there.

  A directory that JAX was given already, by the environment variable
  `JAX_COMPILATION_CACHE_DIR` or by the calling program, stays.

  Args:
    place: A directory, `'auto'` for one in the user's cache directory, or
      `''` for none.
  """
  if not place or getattr(jax.config, _VARIABLE):
    return
  directory = default_directory() if place == 'auto' else pathlib.Path(place)
  jax.config.update(_VARIABLE, str(directory))
  # By default JAX keeps programs that took a second or more to compile, which
  # leaves out most of those of a first rollout.
  jax.config.update(_LEAST_SECS, 0.1)
  # JAX decides at its first compilation whether there is a cache. If something
  # has been compiled already, this makes JAX decide anew.
  compilation_cache.reset_cache()


def default_directory() -> pathlib.Path:
  """A directory of this user for the kind of processor that this one is.

  Programs for a CPU use the instructions of the one that compiled them, and end
  with an illegal instruction on one without these. So machines that share a
  home do not share programs unless their processors are alike.
  """
  cache = os.environ.get('XDG_CACHE_HOME') or pathlib.Path.home() / '.cache'
  return pathlib.Path(cache) / 'grpo_jax' / f'compiled-{_processor()}'


def _processor() -> str:
  """A hash of the instructions that this CPU has, 16 hexadecimal digits."""
  told = platform.machine() + platform.processor()
  try:
    lines = pathlib.Path('/proc/cpuinfo').read_text().splitlines()
    # Called 'flags' on x86 and 'Features' on Arm.
    told += next(
      (one for one in lines if one.startswith(('flags', 'Features'))), ''
    )
  except OSError:  # not a Linux
    pass
  return hashlib.sha256(told.encode()).hexdigest()[:16]
