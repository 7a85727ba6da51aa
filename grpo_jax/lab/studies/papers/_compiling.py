"""Programs that run for seconds and would be compiled for longer."""

from collections.abc import Callable
from typing import Any

import jax


def jit(function: Callable[..., Any]) -> Callable[..., Any]:
  """`jax.jit` without most optimizations, with which compiling takes longer."""
  options = {'xla_backend_optimization_level': 0}
  return jax.jit(function, compiler_options=options)
