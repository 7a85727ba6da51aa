"""Checks of the devices: products, memory, collectives, copies from the host.

Of each there is a function that measures in this process, and one that judges
by the measurements of all processes, by their numbers. Programs are compiled
before they are timed, and run once before that. Numbers that come out are
compared with those that must.
"""

from collections.abc import Callable
from collections.abc import Mapping
import dataclasses
import itertools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.mesh import chips
from grpo_jax.planning.host_checks import OK
from grpo_jax.planning.host_checks import SLOW
from grpo_jax.planning.host_checks import Judged
from grpo_jax.planning.host_checks import Measured
from grpo_jax.planning.host_checks import not_in_the_table
from grpo_jax.planning.host_checks import spread

# Below these shares of the vendor's peak a device is called slow. A healthy one
# reaches 60 to 90 % of its products and of its memory bandwidth. A sum over a
# few chips of a torus uses a third of the links of each.
LEAST_PRODUCT, LEAST_BANDWIDTH, LEAST_NETWORK = 0.4, 0.6, 0.2
LEAST_TRANSFER_GB_PER_S = 1.0  # over PCIe it is 3 and more

_MIB = 2**20
_SUMS = 20, 5  # how many small and large sums are timed
# Of one repeat the time would be that of getting memory for the result.
_LEAST_REPEATS, _MOST_REPEATS = 4, 1000


@dataclasses.dataclass(frozen=True)
class Sizes:
  """How much is computed and moved.

  Attributes:
    matrix: Rows and columns of a matrix. Of a power of four, so that the
      products of signs that are divided by its root are exact.
    copy_mib: The array that is read and written.
    sum_mib: The larger array that is summed over all devices.
    transfer_mib: The array that goes to a device and back.
    secs: How long one timing is to last.
  """

  matrix: int
  copy_mib: int
  sum_mib: int
  transfer_mib: int
  secs: float = 0.1


ON_ACCELERATOR = Sizes(4096, copy_mib=512, sum_mib=64, transfer_mib=256)
ON_CPU = Sizes(1024, copy_mib=128, sum_mib=4, transfer_mib=64)


def _usual() -> Sizes:
  is_cpu = jax.local_devices()[0].platform == 'cpu'
  return ON_CPU if is_cpu else ON_ACCELERATOR


def matrix_product(sizes: Sizes | None = None) -> Measured:
  """The speed of a matrix product on each device of this process.

  Raises:
    ValueError: Its numbers are wrong.
  """
  n = (sizes or _usual()).matrix
  rng = np.random.default_rng(0)
  signs, others = rng.integers(0, 2, (2, n, n), np.int8) * 2 - 1
  some = np.arange(0, n, max(1, n // 16))
  expected = signs[some].astype(np.float32) @ others[:, some] / n**0.5
  figures, compile_secs, dtype = [], 0.0, ''
  for device in jax.local_devices():
    dtype = _dtype(device)
    # Divided by the root, the products of a chain neither grow nor vanish.
    x, y = (
      jax.device_put(matrix.astype(jnp.dtype(dtype)), device)
      for matrix in (signs / n**0.5, others)
    )
    program, secs = _compiled(_products, np.int32(1), x, y)
    compile_secs += secs
    got = np.asarray(program(np.int32(1), x, y), np.float32)[np.ix_(some, some)]
    if not np.allclose(got, expected, rtol=0.01, atol=1e-3):
      raise ValueError(
        f'A matrix product on {device} is wrong by '
        f'{np.max(np.abs(got - expected)):.3g}; do not use this device.'
      )
    secs = _secs_of_one(program, sizes, x, y)
    figures.append(2 * n**3 / secs / 1e12)
  return {
    'kind': jax.local_devices()[0].device_kind,
    'tflops': figures,
    'matrix': n,
    'dtype': dtype,
    'compile_secs': compile_secs,
  }


def _products(repeats, x, y):
  """A chain of products, which no compiler can shorten."""
  return jax.lax.fori_loop(0, repeats, lambda _, y: x @ y, y)


def _dtype(device: Any) -> str:
  if device.platform == 'cpu':
    return 'float32'
  chip = chips.find(device.device_kind)
  return chip.dtype if chip else 'bfloat16'


def judge_matrix_product(told: Mapping[int, Measured]) -> Judged:
  """Beside the peak of the chip."""
  first = told[min(told)]
  what = f' of {first["dtype"]}, {first["matrix"]:,} x {first["matrix"]:,}'
  peak = 'device_tflops'
  return _beside(told, 'tflops', 'TFLOP/s', what, peak, LEAST_PRODUCT)


def bandwidth(sizes: Sizes | None = None) -> Measured:
  """How fast each device of this process reads and writes its memory.

  Raises:
    ValueError: Its numbers are wrong.
  """
  mib = (sizes or _usual()).copy_mib
  number = mib * _MIB // 4
  figures, compile_secs = [], 0.0
  for device in jax.local_devices():
    x = jnp.zeros(number, jnp.float32, device=device)
    program, secs = _compiled(_additions, np.int32(1), x)
    compile_secs += secs
    got = program(np.int32(3), x)
    if not jnp.all(got == 3):
      raise ValueError(
        f'{device} does not keep the numbers in its memory; do not use it.'
      )
    del got
    secs = _secs_of_one(program, sizes, x)
    figures.append(2 * mib * _MIB / secs / 1e9)  # read, and written
  return {
    'kind': jax.local_devices()[0].device_kind,
    'gb_per_s': figures,
    'mib': mib,
    'compile_secs': compile_secs,
  }


def _additions(repeats, x):
  """Passes over an array; how many is not known to the compiler."""
  return jax.lax.fori_loop(0, repeats, lambda _, x: x + 1, x)


def judge_bandwidth(told: Mapping[int, Measured]) -> Judged:
  """Beside the peak of the chip."""
  what = f' reading and writing {told[min(told)]["mib"]:,} MiB'
  peak = 'device_hbm_gb_per_s'
  return _beside(told, 'gb_per_s', 'GB/s', what, peak, LEAST_BANDWIDTH)


def _beside(
  told: Mapping[int, Measured],
  name: str,
  unit: str,
  what: str,
  peak_of_chip: str,
  least: float,
) -> Judged:
  """Figures of all devices beside the peak of their chip."""
  of_all = [
    (figure, rank, place)
    for rank, one in told.items()
    for place, figure in enumerate(one[name])
  ]
  each = f' on each of {len(of_all)} devices' if len(of_all) > 1 else ''
  measured = f'{spread([one[0] for one in of_all])} {unit}{what}{each}'
  kind = told[min(told)]['kind']
  chip = chips.find(kind)
  if chip is None:
    return Judged(measured, not_in_the_table(kind))
  peak = getattr(chip, peak_of_chip)
  expected = (
    f'{least * peak:.4g} {unit} or more: {least:.0%} of the peak of a '
    f'{chip.name}, {peak:,.6g}'
  )
  slowest, rank, place = min(of_all)
  if slowest >= least * peak:
    return Judged(measured, expected)
  if len(of_all) > 1:
    measured += f'; the slowest is device {place} of process {rank}'
  return Judged(measured, expected, SLOW)


def collective(sizes: Sizes | None = None) -> Measured:
  """Sums over all devices of all processes: are they right, and how fast.

  Raises:
    ValueError: A sum is wrong on a device of this process.
  """
  mib = (sizes or _usual()).sum_mib
  devices = jax.devices()
  figures, compile_secs = [], 0.0
  for number, repeats in zip((1, mib * _MIB // 4), _SUMS):
    program, secs = _compiled(_sums(devices, number), np.int32(1))
    compile_secs += secs
    _refuse_wrong(program(np.int32(1)), number)
    began = time.perf_counter()
    wrong = jax.block_until_ready(program(np.int32(repeats)))
    figures.append((time.perf_counter() - began) / repeats)
    _refuse_wrong(wrong, number)
  small, large = figures
  # Each device must send as much, however the sum is organised.
  sent = 2 * (len(devices) - 1) / len(devices) * mib * _MIB
  slices = {getattr(device, 'slice_index', None) for device in devices}
  return {
    'kind': devices[0].device_kind,
    'devices': len(devices),
    'hosts': len({device.process_index for device in devices}),
    'slices': len(slices) if devices[0].platform == 'tpu' else 1,
    'small_secs': small,
    'large_secs': large,
    'mib': mib,
    'sent_gb_per_s': sent / large / 1e9,
    'compile_secs': compile_secs,
  }


def _sums(devices: list[Any], number: int) -> Callable[[Any], jax.Array]:
  """A program that sums known numbers over all devices, some times.

  Device i has the numbers i + 1, i + 2, ... i + 7, and again. The program gives
  how many numbers are not as they must be, for each device.
  """
  over = jax.sharding.Mesh(np.array(devices), ('all',))
  count = len(devices)
  split = jax.sharding.PartitionSpec('all')

  def body(repeats):
    place = jnp.arange(number, dtype=jnp.int32) % 7
    mine = jax.lax.axis_index('all') + 1 + place
    total = count * (count + 1) // 2 + count * place

    # A right sum leaves the numbers as they are, and a wrong one stays.
    def add(_, x):
      return x + (jax.lax.psum(x, 'all') - total)

    ended = jax.lax.fori_loop(0, repeats, add, mine)
    return jnp.sum(ended != mine, dtype=jnp.int32)[None]

  return jax.shard_map(
    body, mesh=over, in_specs=jax.sharding.PartitionSpec(), out_specs=split
  )


def _refuse_wrong(wrong: jax.Array, number: int) -> None:
  """Raises a ValueError if a device of this process has wrong sums."""
  for part in wrong.addressable_shards:
    if count := int(np.asarray(part.data)[0]):
      raise ValueError(
        f'A sum over all devices is wrong on {part.device}, in {count:,} of '
        f'{number:,} numbers; look at that device and its links.'
      )


def judge_collective(told: Mapping[int, Measured]) -> Judged:
  """Beside the bandwidth of the links."""
  slowest = max(told.values(), key=lambda one: one['large_secs'])
  small = max(one['small_secs'] for one in told.values())
  devices, kind = slowest['devices'], slowest['kind']
  sent = slowest['sent_gb_per_s']
  measured = (
    f'sums over {devices} device{"s" * (devices > 1)} are right; '
    f'{_millis(small)} for one number, {_millis(slowest["large_secs"])} for '
    f'{slowest["mib"]:g} MiB'
  )
  if devices == 1:
    return Judged(measured, 'no figure for one device')
  measured += f' ({sent:.3g} GB/s from each device)'
  chip = chips.find(kind)
  if chip is None:
    return Judged(measured, not_in_the_table(kind))
  # NVLink ends at the host, and ICI at the slice.
  parts = slowest['slices'] if chip.link == 'ICI' else slowest['hosts']
  link = 'the network of the hosts' if parts > 1 else chip.link
  peak = chip.dcn_gb_per_s if parts > 1 else chip.ici_gb_per_s
  if peak is None:
    return Judged(measured, f'no figure for {link} of a {chip.name}')
  peak /= chip.devices_per_chip
  expected = (
    f'{LEAST_NETWORK * peak:.3g} GB/s or more: {LEAST_NETWORK:.0%} of {link} '
    f'of a {chip.name}, {peak:g}'
  )
  return Judged(
    measured, expected, OK if sent >= LEAST_NETWORK * peak else SLOW
  )


def _millis(secs: float) -> str:
  return f'{1000 * secs:.3g} ms'


def transfer(sizes: Sizes | None = None) -> Measured:
  """How fast an array goes to each device of this process, and back.

  Raises:
    ValueError: The numbers that come back have changed.
  """
  mib = (sizes or _usual()).transfer_mib
  there, back = [], []
  for device in jax.local_devices():
    secs = []
    for first in range(3):  # of which the first one allocates memory
      data = np.arange(first, first + mib * _MIB // 4, dtype=np.int32)
      began = time.perf_counter()
      moved = jax.block_until_ready(jax.device_put(data, device))
      arrived = time.perf_counter()
      returned = np.array(moved)
      secs.append((arrived - began, time.perf_counter() - arrived))
      if not np.array_equal(returned, data):
        raise ValueError(
          f'Numbers that were copied to {device} and back have changed; do not '
          'use it.'
        )
    for figures, of_way in zip((there, back), zip(*secs)):
      figures.append(mib * _MIB / min(of_way) / 1e9)
  return {
    'kind': jax.local_devices()[0].device_kind,
    'to_device_gb_per_s': there,
    'to_host_gb_per_s': back,
    'mib': mib,
  }


def judge_transfer(told: Mapping[int, Measured]) -> Judged:
  """Whether copies to an accelerator are fast enough."""
  there, back = (
    [*itertools.chain(*(one[name] for one in told.values()))]
    for name in ('to_device_gb_per_s', 'to_host_gb_per_s')
  )
  first = told[min(told)]
  measured = (
    f'{spread(there)} GB/s to each device, {spread(back)} GB/s back, for '
    f'{first["mib"]:,} MiB, which come back unchanged'
  )
  if first['kind'] == 'cpu':
    return Judged(
      measured, 'no figure, because a CPU has the memory of its host'
    )
  expected = f'{LEAST_TRANSFER_GB_PER_S:g} GB/s or more'
  is_slow = min(*there, *back) < LEAST_TRANSFER_GB_PER_S
  return Judged(measured, expected, SLOW if is_slow else OK)


def _compiled(function: Callable[..., Any], *args: Any) -> tuple[Any, float]:
  """A compiled program, and how many seconds it took."""
  began = time.perf_counter()
  program = jax.jit(function).lower(*args).compile()
  return program, time.perf_counter() - began


def _secs_of_one(program: Any, sizes: Sizes | None, *args: Any) -> float:
  """Seconds of one of the repeats of a program: the best of three timings."""

  def secs(repeats: int) -> float:
    began = time.perf_counter()
    jax.block_until_ready(program(np.int32(repeats), *args))
    return time.perf_counter() - began

  wanted = (sizes or _usual()).secs / max(secs(1), 1e-9)
  repeats = int(min(max(wanted, _LEAST_REPEATS), _MOST_REPEATS))
  return min(secs(repeats) for _ in range(3)) / repeats
