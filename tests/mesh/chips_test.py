"""The table of chips: complete, with sources, and found by the names of JAX."""

import re

import pytest

from grpo_jax.mesh import chips

pytestmark = pytest.mark.quick


@pytest.mark.parametrize('chip', chips.CHIPS, ids=lambda chip: chip.name)
def test_a_row_has_a_source_and_figures_that_can_be(chip):
  assert re.search(r'https://\S+', chip.source)
  assert chip.link in ('ICI', 'NVLink', 'PCIe')
  assert chip.dtype in ('bfloat16', 'float16')
  assert 8 <= chip.memory_gib <= 512
  # The most bytes per second come from the memory, the fewest over the network.
  bandwidths = chip.hbm_gb_per_s, chip.ici_gb_per_s, chip.dcn_gb_per_s
  known = [figure for figure in bandwidths if figure is not None]
  assert known == sorted(known, reverse=True) and known[-1] > 0
  # Between 30 and 800 operations on a byte keep all of them busy.
  assert 30 <= 1000 * chip.tflops / chip.hbm_gb_per_s <= 800
  assert (chip.dcn_gb_per_s is None) or chip.chips_per_host


def test_names_are_unique_and_each_finds_its_chip():
  names = [chip.name for chip in chips.CHIPS]
  assert len(set(names)) == len(names)
  for chip in chips.CHIPS:
    assert chips.named(chip.name) is chip
    assert chips.named(chip.name.upper().replace(' ', '-')) is chip


@pytest.mark.parametrize(
  'kind, name',
  [
    ('TPU v2', 'v2'),
    ('TPU v4', 'v4'),
    ('TPU v5 lite', 'v5e'),
    ('TPU v5e', 'v5e'),
    ('TPU v5', 'v5p'),
    ('TPU v5p', 'v5p'),
    ('TPU v6 lite', 'v6e'),
    ('TPU7x', 'v7x'),
    ('NVIDIA A100-SXM4-40GB', 'A100 40GB SXM'),
    ('NVIDIA A100-PCIE-40GB', 'A100 40GB PCIe'),
    ('NVIDIA A100-SXM4-80GB', 'A100 80GB SXM'),
    ('NVIDIA A100 80GB PCIe', 'A100 80GB PCIe'),
    ('NVIDIA H100 80GB HBM3', 'H100 SXM'),
    ('NVIDIA H100 PCIe', 'H100 PCIe'),
    ('NVIDIA H100 NVL', 'H100 NVL'),
    ('NVIDIA H200', 'H200 SXM'),
    ('NVIDIA H200 NVL', 'H200 NVL'),
    ('NVIDIA GH200 480GB', 'GH200'),
    ('NVIDIA B200', 'B200'),
    ('NVIDIA GB200', 'GB200'),
    ('NVIDIA L4', 'L4'),
    ('NVIDIA L40S', 'L40S'),
    ('Tesla T4', 'T4'),
    ('Tesla V100-SXM2-16GB', 'V100 16GB'),
    ('Tesla V100-SXM2-32GB', 'V100 32GB'),
    ('NVIDIA L40', None),
    ('NVIDIA H100 80GB HBM3 MIG 1g.10gb', None),
    ('TPU v9', None),
    ('v5p', None),  # a name, and no kind of a device
    ('Example A100', None),
    ('cpu', None),
  ],
)
def test_the_chip_of_a_device(kind, name):
  chip = chips.find(kind)
  assert (chip and chip.name) == name


def test_a_device_may_be_half_of_a_chip():
  whole, half = chips.named('v5p'), chips.named('TPU7x')
  assert whole.device_tflops == whole.tflops == 459
  assert whole.device_memory_gib == 95
  assert half.device_tflops == 1153.5
  assert half.device_memory_gib == 96
  assert half.device_hbm_gb_per_s == 3690


def test_an_unknown_name_is_refused_with_those_that_are_known():
  with pytest.raises(ValueError, match="no chip 'v9' in .* one of v2, v3, v4"):
    chips.named('v9')


@pytest.mark.parametrize(
  'kind, teraflops',
  [
    ('TPU v2', 23),
    ('TPU v3', 61.5),
    ('TPU v4', 275),
    ('TPU v5 lite', 197),
    ('TPU v5e', 197),
    ('TPU v5', 459),
    ('TPU v5p', 459),
    ('TPU v6 lite', 918),
    ('TPU v6e', 918),
    ('TPU7x', 1153.5),
    ('NVIDIA A100-SXM4-80GB', 312),
    ('NVIDIA A100 80GB PCIe', 312),
    ('NVIDIA H100 80GB HBM3', 989.5),
    ('NVIDIA H100 PCIe', 756.5),
    ('NVIDIA H100 NVL', 835.5),
    ('NVIDIA H200', 989.5),
    ('NVIDIA H200 NVL', 835.5),
    ('NVIDIA GH200 480GB', 989.5),
    ('NVIDIA GB200', 2500),
    ('NVIDIA B200', 2250),
    ('NVIDIA L4', 121),
    ('NVIDIA L40S', 362),
    ('NVIDIA A10', 125),
    ('Tesla V100-SXM2-16GB', 125),
    ('Tesla T4', 65),
    ('NVIDIA L40', None),
    ('NVIDIA H100 80GB HBM3 MIG 1g.10gb', None),
    ('TPU v9', None),
    ('Example A100', None),  # of another vendor
    ('cpu', None),
  ],
)
def test_peaks_of_known_devices(kind, teraflops):
  peak = chips.peak_flops(kind)
  assert peak == (teraflops and teraflops * 1e12)
