"""Checks of the devices: right figures; wrong numbers and slow ones noticed."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.planning import device_checks

pytestmark = pytest.mark.quick

TINY = device_checks.Sizes(
  64, copy_mib=1, sum_mib=1, transfer_mib=1, secs=0.001
)


def test_a_product_is_timed_on_each_device():
  found = device_checks.matrix_product(TINY)
  assert len(found['tflops']) == 8 and min(found['tflops']) > 0
  assert (found['kind'], found['dtype']) == ('cpu', 'float32')
  judged = device_checks.judge_matrix_product({0: found, 1: found})
  assert judged.verdict == 'ok' and judged.expected == 'no figure for a CPU'
  words = 'TFLOP/s of float32, 64 x 64 on each of 16 devices'
  assert words in judged.measured


def test_the_time_is_that_of_one_product(monkeypatch):
  """Of a program that takes 4 ms for each of its repeats, and 8 ms besides."""
  clock, asked = types.SimpleNamespace(now=0.0), []

  def program(repeats):
    asked.append(int(repeats))
    # The first of the long timings is disturbed.
    clock.now += 0.008 + 0.004 * int(repeats) + (len(asked) == 2)
    return np.zeros(1)

  watch = types.SimpleNamespace(perf_counter=lambda: clock.now)
  monkeypatch.setattr(device_checks, 'time', watch)
  secs = device_checks._secs_of_one(program, device_checks.Sizes(1, 1, 1, 1))
  assert asked == [1, 8, 8, 8]  # of 0.1 s
  assert secs == pytest.approx(0.005)
  asked.clear()
  sizes = device_checks.Sizes(1, 1, 1, 1, secs=0.001)
  assert device_checks._secs_of_one(program, sizes) == pytest.approx(0.006)
  assert asked == [1, 4, 4, 4]


right_product = device_checks._products
right_addition = device_checks._additions


def wrong_product(repeats, x, y):
  return right_product(repeats, x, y).at[4, 8].add(1)


def wrong_addition(repeats, x):
  return right_addition(repeats, x).at[-1].add(1)


@pytest.mark.parametrize(
  'name, replaced, measure, words',
  [
    (
      '_products',
      wrong_product,
      device_checks.matrix_product,
      'A matrix product on .* is wrong by 1; do not',
    ),
    (
      '_additions',
      wrong_addition,
      device_checks.bandwidth,
      'does not keep the numbers in its memory',
    ),
  ],
)
def test_wrong_numbers_of_a_device_are_noticed(
  name, replaced, measure, words, monkeypatch
):
  monkeypatch.setattr(device_checks, name, replaced)
  with pytest.raises(ValueError, match=words):
    measure(TINY)


def test_figures_count_what_is_multiplied_read_and_written(monkeypatch):
  monkeypatch.setattr(device_checks, '_secs_of_one', lambda *_: 0.001)
  found = device_checks.matrix_product(TINY)
  assert found['tflops'] == pytest.approx([2 * 64**3 / 0.001 / 1e12] * 8)
  found = device_checks.bandwidth(TINY)
  assert found['gb_per_s'] == pytest.approx([2 * 2**20 / 0.001 / 1e9] * 8)
  judged = device_checks.judge_bandwidth({0: found})
  assert '2.1 GB/s reading and writing 1 MiB on each of 8' in judged.measured


def of(kind, figures, name='tflops'):
  return {
    'kind': kind,
    name: figures,
    'matrix': 4096,
    'mib': 512,
    'dtype': 'bfloat16',
  }


PRODUCT = device_checks.judge_matrix_product
BANDWIDTH = device_checks.judge_bandwidth


@pytest.mark.parametrize(
  'judge, told, verdict, measured, expected',
  [
    (
      PRODUCT,
      [of('NVIDIA H100 80GB HBM3', [700.0])],
      'ok',
      '700 TFLOP/s of bfloat16, 4,096 x 4,096',
      '395.8 TFLOP/s or more: 40% of the peak of a H100 SXM, 989.5',
    ),
    (
      PRODUCT,
      [of('TPU v5 lite', [170.0, 171.0]), of('TPU v5 lite', [172.0, 60.0])],
      'slow',
      '60 to 172 TFLOP/s of bfloat16, 4,096 x 4,096 on each of 4 devices; the '
      'slowest is device 1 of process 1',
      '78.8 TFLOP/s or more: 40% of the peak of a v5e, 197',
    ),
    (
      PRODUCT,
      [of('TPU7x', [1000.0, 1000.0])],
      'ok',
      '1,000 TFLOP/s',
      '40% of the peak of a v7x, 1,153.5',
    ),
    (
      PRODUCT,
      [of('TPU v9', [1.0])],
      'ok',
      '1 TFLOP/s',
      'no figure, because grpo_jax/mesh/chips.py has no TPU v9',
    ),
    (
      BANDWIDTH,
      [of('NVIDIA H200', [4100.0], 'gb_per_s')],
      'ok',
      '4,100 GB/s reading and writing 512 MiB',
      '2880 GB/s or more: 60% of the peak of a H200 SXM, 4,800',
    ),
    (BANDWIDTH, [of('TPU v4', [600.0], 'gb_per_s')], 'slow', '600', '720 GB/s'),
  ],
)
def test_figures_are_beside_those_of_the_chip(
  judge, told, verdict, measured, expected
):
  found = judge(dict(enumerate(told)))
  assert found.verdict == verdict
  assert measured in found.measured and expected in found.expected


def test_a_sum_over_all_devices_is_right():
  found = device_checks.collective(TINY)
  assert (found['devices'], found['hosts']) == (8, 1)
  # A sum of 8 parts sends 2 x 7/8 of an array from each device.
  sent = 2 * 7 / 8 * 2**20 / found['large_secs'] / 1e9
  assert found['sent_gb_per_s'] == pytest.approx(sent)
  judged = device_checks.judge_collective({0: found})
  assert judged.verdict == 'ok' and judged.expected == 'no figure for a CPU'
  assert judged.measured.startswith('sums over 8 devices are right; ')


right_sum = jax.lax.psum


def one_part_is_missing(x, axis):
  return right_sum(jnp.where(jax.lax.axis_index(axis) == 3, 0, x), axis)


def one_device_hears_wrong(x, axis):
  is_fifth = jax.lax.axis_index(axis) == 5
  return right_sum(x, axis) + is_fifth * (jnp.arange(x.size) == 0)


@pytest.mark.parametrize(
  'broken, words',
  [
    (one_part_is_missing, 'is wrong on .*, in 1 of 1 numbers'),
    (one_device_hears_wrong, r'is wrong on .*5.*, in 1 of 1 numbers; look'),
  ],
)
def test_a_wrong_sum_is_noticed(broken, words, monkeypatch):
  monkeypatch.setattr(jax.lax, 'psum', broken)
  with pytest.raises(ValueError, match=words):
    device_checks.collective(TINY)


def sums(kind, secs=0.01, devices=8, hosts=1, slices=1, mib=64):
  return {
    'kind': kind,
    'devices': devices,
    'hosts': hosts,
    'slices': slices,
    'small_secs': 1e-5,
    'large_secs': secs,
    'mib': mib,
    'sent_gb_per_s': 2 * (devices - 1) / devices * mib * 2**20 / secs / 1e9,
  }


H100 = 'NVIDIA H100 80GB HBM3'


@pytest.mark.parametrize(
  'told, verdict, measured, expected',
  [
    (
      sums(H100, 0.0005),
      'ok',
      '0.01 ms for one number, 0.5 ms for 64 MiB (235 GB/s from each device)',
      '90 GB/s or more: 20% of NVLink of a H100 SXM, 450',
    ),
    (sums(H100, 0.01), 'slow', '(11.7 GB/s', '90 GB/s or more'),
    (
      sums(H100, 0.005, devices=16, hosts=2),
      'ok',
      'sums over 16 devices',
      '10 GB/s or more: 20% of the network of the hosts of a H100 SXM, 50',
    ),
    (
      sums('TPU v5p', 0.001, devices=64, hosts=16),
      'ok',
      '64 devices',
      '120 GB/s or more: 20% of ICI of a v5p, 600',
    ),
    (
      sums('TPU v5p', 0.5, devices=64, hosts=16, slices=2),
      'slow',
      '64 devices',
      '1.25 GB/s or more: 20% of the network of the hosts of a v5p, 6.25',
    ),
    (
      sums('NVIDIA L4', devices=2, hosts=2),
      'ok',
      '2 devices',
      'no figure for the network of the hosts of a L4',
    ),
    (
      sums('TPU7x', 0.002),
      'slow',
      '(58.7 GB/s',
      '60 GB/s or more: 20% of ICI of a v7x, 300',
    ),
    (sums('TPU v9'), 'ok', '8 devices', 'chips.py has no TPU v9'),
    (sums('TPU v4', devices=1), 'ok', 'over 1 device are', 'for one device'),
  ],
)
def test_sums_are_beside_the_links(told, verdict, measured, expected):
  found = device_checks.judge_collective({0: told})
  assert found.verdict == verdict
  assert measured in found.measured and expected in found.expected


def test_an_array_goes_there_and_back():
  found = device_checks.transfer(TINY)
  for way in 'to_device_gb_per_s', 'to_host_gb_per_s':
    assert len(found[way]) == 8 and min(found[way]) > 0
  judged = device_checks.judge_transfer({0: found})
  assert judged.verdict == 'ok' and 'a CPU has the memory' in judged.expected
  gpu = found | {'kind': 'Tesla T4', 'to_host_gb_per_s': [0.3, 5.0]}
  judged = device_checks.judge_transfer({0: gpu})
  assert judged.verdict == 'slow' and '0.3 to 5 GB/s back' in judged.measured


def test_an_array_that_comes_back_changed_is_noticed(monkeypatch):
  put = jax.device_put
  monkeypatch.setattr(jax, 'device_put', lambda x, to: put(x, to).at[9].set(0))
  with pytest.raises(ValueError, match='copied to .* and back have changed'):
    device_checks.transfer(TINY)


def test_a_chip_without_bfloat16_multiplies_in_float16():
  class Device:
    platform = 'gpu'

    def __init__(self, kind):
      self.device_kind = kind

  kinds = ['Tesla T4', 'NVIDIA L4', 'AMD Instinct MI300X']
  dtypes = [device_checks._dtype(Device(kind)) for kind in kinds]
  assert dtypes == ['float16', 'bfloat16', 'bfloat16']
