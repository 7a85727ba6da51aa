"""A bound on time: what a machine must at least spend on some work.

The bound is the slowest of four: computing, reading and writing memory, sending
to chips of the same slice (ICI, NVLink), and sending to other hosts (DCN). They
are taken to overlap perfectly, and each to run at its peak. So no program is
faster, and most are slower: the bound tells what cannot be reached, and which
of the four is to be looked at first.
"""

import dataclasses
import functools
import math
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax.mesh.chips import Chip

RESOURCES = ('compute', 'memory', 'ici', 'dcn')
_SIZES = 512, 1024, 2048  # of square matrices; caches differ
_SECS = 1.0  # of repeats for each figure
# Read in one repeat: long enough to be timed, and some milliseconds, because a
# longer one is never undisturbed on a machine that others use.
_READ_BYTES = 2**26


class Machine(NamedTuple):
  """What one device can do in a second; None where it is not known."""

  flops: float
  memory_bytes: float
  ici_bytes: float | None = None
  dcn_bytes: float | None = None


@dataclasses.dataclass(frozen=True)
class Work:
  """What one device has to do.

  Attributes:
    flops: Operations of matrix products.
    memory_bytes: Read from its memory and written to it, at least.
    ici_bytes: Sent to other devices of its slice, or of its host.
    dcn_bytes: Sent to other slices, or to other hosts.
  """

  flops: float = 0.0
  memory_bytes: float = 0.0
  ici_bytes: float = 0.0
  dcn_bytes: float = 0.0

  def __add__(self, other: 'Work') -> 'Work':
    pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other))
    return Work(*(one + more for one, more in pairs))

  def __mul__(self, times: float) -> 'Work':
    return Work(*(times * one for one in dataclasses.astuple(self)))

  def secs(self, machine: Machine) -> dict[str, float]:
    """Seconds by resource, of those that the machine tells."""
    pairs = zip(RESOURCES, dataclasses.astuple(self), machine, strict=True)
    return {
      name: amount / speed for name, amount, speed in pairs if speed is not None
    }


def bound(secs: dict[str, float]) -> tuple[float, str]:
  """The least time, and the resource that takes it.

  >>> bound({'compute': 2.0, 'memory': 3.0})
  (3.0, 'memory')
  """
  slowest = max(secs, key=lambda name: secs[name])
  return secs[slowest], slowest


def chip_peaks(chip: Chip) -> Machine:
  """One JAX device of a kind of chip, by its maker's figures."""

  def share(gb_per_s):
    return gb_per_s and gb_per_s * 1e9 / chip.devices_per_chip

  return Machine(
    chip.device_tflops * 1e12,
    chip.device_hbm_gb_per_s * 1e9,
    share(chip.ici_gb_per_s),
    share(chip.dcn_gb_per_s),
  )


def measure_cpu(weight_bytes: int, dtype: str = 'float32') -> Machine:
  """This machine's CPU, measured now; it takes some seconds.

  The best of many repeats counts, because a bound needs the peak, and others
  may use the machine meanwhile. Products are measured in several sizes, in the
  dtype of the run and in float32, in which it computes some of them. Reading is
  measured on an array as large as the weights: if they fit into a cache, they
  are read from there in every step. It is summed, and as a matrix multiplied by
  a vector, and the faster way counts.

  Args:
    weight_bytes: Of the weights that every step reads.
    dtype: The run's compute dtype.
  """
  product, flops = jax.jit(jnp.dot), 0.0
  for size in _SIZES:
    for name in {dtype, 'float32'}:
      matrix = jnp.ones((size, size), name)
      secs = _fastest(functools.partial(product, matrix, matrix))
      flops = max(flops, 2 * size**3 / secs)
  weights = jnp.ones((max(1024, weight_bytes // 4),), jnp.float32)
  again = max(1, _READ_BYTES // weights.nbytes)

  @jax.jit
  def read(x):
    def once(total, _):
      # Multiplied, so that the compiler does not sum once for all.
      return total * 0.5 + jnp.sum(x * total), None

    return jax.lax.scan(once, jnp.float32(1), length=again)[0]

  side = max(32, math.isqrt(weights.size))
  matrix, vector = jnp.ones((side, side), jnp.float32), jnp.ones((side,))

  @jax.jit
  def multiply(matrix, x):
    def once(x, _):
      return jnp.tanh(matrix @ x), None

    return jax.lax.scan(once, x, length=again)[0]

  secs = _fastest(lambda: read(weights))
  faster = _fastest(lambda: multiply(matrix, vector)) / matrix.nbytes
  return Machine(flops, again / min(secs / weights.nbytes, faster))


def _fastest(run) -> float:
  """Seconds of the fastest repeat; the first compiles."""
  run().block_until_ready()
  fastest, until = math.inf, time.perf_counter() + _SECS
  while time.perf_counter() < until or fastest == math.inf:
    start = time.perf_counter()
    run().block_until_ready()
    fastest = min(fastest, time.perf_counter() - start)
  return fastest
