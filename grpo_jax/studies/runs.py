"""What the runs of a study share: the warm-up and the compiled programs."""

from collections.abc import Iterator
import contextlib
import pathlib
import tempfile
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from grpo_jax import monitor
from grpo_jax.config import Config
from grpo_jax.config import Log
from grpo_jax.training import build
from grpo_jax.training import warm_up


def warmed_up(config: Config, workdir: pathlib.Path) -> Any:
  """The parameters after the supervised warm-up of one seed.

  Args:
    config: What to warm up, for how long, and with which seed.
    workdir: Of the study. The warm-up of each seed has a directory in it, from
      which it continues if it was interrupted.

  Returns:
    Parameters that every run of this seed may begin with.
  """
  place = workdir / f'seed_{config.seed}'
  silent = Log(display='none', tensorboard=False)
  with monitor.Monitor(silent, place, 0, None, {}) as shown:
    return warm_up.run(build.run(config), place, shown, lambda: False)


@contextlib.contextmanager
def compiled_once() -> Iterator[None]:
  """Inside this context a program is compiled once for all runs.

  Every run builds its own functions, and `jax.jit` compiles each new function.
  JAX's cache on disk compares what functions compute, so it finds equal ones.
  It lies in a temporary directory unless JAX has been given another. Runs that
  differ in the seed alone have the same programs; the learning rate is a
  constant in a program, so another one means another program.
  """
  before = {
    name: getattr(jax.config, name)
    for name in (
      'jax_compilation_cache_dir',
      'jax_persistent_cache_min_compile_time_secs',
    )
  }
  if before['jax_compilation_cache_dir']:
    yield
    return
  with tempfile.TemporaryDirectory() as directory:
    for name, value in zip(before, (directory, 0), strict=True):
      jax.config.update(name, value)
    # JAX looks for its cache only once, when it first compiles a program;
    # without this, the new directory might be ignored.
    compilation_cache.reset_cache()
    try:
      yield
    finally:
      for name, value in before.items():
        jax.config.update(name, value)
      compilation_cache.reset_cache()
