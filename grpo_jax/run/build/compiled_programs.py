"""Compiled programs, kept on the disk from one start of a run to the next."""

import hashlib
import pathlib
import platform

import jax
from jax.experimental.compilation_cache import compilation_cache

from grpo_jax import data

_DIRECTORY = 'jax_compilation_cache_dir'
_LEAST_SECS = 'jax_persistent_cache_min_compile_time_secs'
_LEAST_SECS_OF_JAX = 1.0  # its default, not told from a user's own 1.0


def keep(place: str) -> None:
  """Makes JAX read compiled programs from a directory, and write them there.

  What JAX was given already, by environment variables or by the calling
  program, stays: its directory (`JAX_COMPILATION_CACHE_DIR`), and which
  programs are worth keeping (`JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS`).

  Args:
    place: A directory, `'auto'` for one in the user's cache directory, or
      `''` for none.
  """
  place_of_jax = getattr(jax.config, _DIRECTORY)
  if not (place or place_of_jax):
    return
  if getattr(jax.config, _LEAST_SECS) == _LEAST_SECS_OF_JAX:
    # Most programs of a first rollout take less than a second to compile.
    jax.config.update(_LEAST_SECS, 0.1)
  if place_of_jax:
    return
  directory = default_directory()
  if place != 'auto':
    directory = pathlib.Path(place).absolute()
  jax.config.update(_DIRECTORY, str(directory))
  # JAX decides at its first compilation whether there is a cache. If something
  # has been compiled already, this makes JAX decide anew.
  compilation_cache.reset_cache()


def default_directory() -> pathlib.Path:
  """A directory of this user for the kind of processor that this one is.

  Programs for a CPU use the instructions of the one that compiled them, and end
  with an illegal instruction on one without these. So machines that share a
  home do not share programs unless their processors are alike.
  """
  return data.cache_directory() / f'compiled-{_processor()}'


def _processor() -> str:
  """A hash of the instructions that this CPU has, 16 hexadecimal digits."""
  words = platform.machine() + platform.processor()
  try:
    lines = pathlib.Path('/proc/cpuinfo').read_text().splitlines()
    # Called 'flags' on x86 and 'Features' on Arm.
    words += next(
      (one for one in lines if one.startswith(('flags', 'Features'))), ''
    )
  except OSError:  # not a Linux
    pass
  return hashlib.sha256(words.encode()).hexdigest()[:16]
