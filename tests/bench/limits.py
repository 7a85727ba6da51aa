"""What this machine can do: matrix products and memory copies, by JAX.

python tests/bench/limits.py
"""

import json
import os
import time

os.environ.setdefault('JAX_PLATFORMS', 'cpu')

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

SIZES = (512, 1024, 2048)  # of square matrices
COPIED_BYTES = 2**28  # far more than a processor's caches
SECS = 1.0  # of repeats for each figure; the best counts


def matrix_gflops(dtype: str) -> float:
  """10^9 FLOP/s of the fastest of some matrix products."""
  product, speeds = jax.jit(jnp.matmul), []
  for size in SIZES:
    x = jax.random.normal(jax.random.key(0), (size, size), dtype)
    jax.block_until_ready(product(x, x))
    best, until = float('inf'), time.perf_counter() + SECS
    while time.perf_counter() < until:
      start = time.perf_counter()
      jax.block_until_ready(product(x, x))
      best = min(best, time.perf_counter() - start)
    speeds.append(2 * size**3 / best)
  return max(speeds) / 1e9


def copy_gbytes() -> float:
  """10^9 bytes/s of a copy, those read and those written together.

  Onto itself, because fresh memory costs page faults, ten times as much.
  """
  copy = jax.jit(lambda x: x + 1, donate_argnums=0)
  x = jax.block_until_ready(copy(jnp.zeros(COPIED_BYTES // 4, jnp.float32)))
  best, until = float('inf'), time.perf_counter() + SECS
  while time.perf_counter() < until:
    start = time.perf_counter()
    x = jax.block_until_ready(copy(x))
    best = min(best, time.perf_counter() - start)
  return 2 * x.nbytes / best / 1e9


if __name__ == '__main__':
  print(
    json.dumps(
      {
        'float32_gflops': matrix_gflops('float32'),
        'bfloat16_gflops': matrix_gflops('bfloat16'),
        'copy_gbytes': copy_gbytes(),
      }
    )
  )
