"""A table of chips: memory, speed and network, from the vendors' pages.

The figures are peaks. A program reaches a part of them. NVIDIA quotes matrix
products with sparsity; here they are dense, which is half. Bandwidths of links
are quoted for both directions together; here they are those of one direction.
"""

import dataclasses
import re


@dataclasses.dataclass(frozen=True)
class Chip:
  """One kind of chip. A JAX device is a chip, or one of the parts of a chip.

  Attributes:
    name: As in a topology (`v5p`), or as the vendor calls it (`H100 SXM`).
    kinds: Of TPUs, each `device_kind` that JAX gives to it. Of GPUs, words that
      are all in the `device_kind`.
    memory_gib: Memory of the chip. NVIDIA's pages say GB, and programs see up
      to 6 % less.
    tflops: 10^12 operations per second in a dense matrix product of `dtype`.
    hbm_gb_per_s: 10^9 bytes per second from and to the memory of the chip.
    ici_gb_per_s: 10^9 bytes per second that all links to other chips together
      carry in one direction; None if not known. `link` says what they are.
    dcn_gb_per_s: 10^9 bytes per second to other hosts in one direction: the
      share of one chip in the network of its host; None if it depends on the
      host. Of NVIDIA's chips it is that of NVIDIA's own hosts (DGX).
    source: The pages that the figures are from.
    link: 'ICI', 'NVLink' or 'PCIe'.
    devices_per_chip: As many devices JAX sees in one chip.
    chips_per_host: Chips that share the network of one host; None if hosts
      differ.
    dtype: The 16-bit type of `tflops`. The T4 and the V100 have no bfloat16.
    usable_gib: What the compiler for TPUs leaves to the programs of one JAX
      device, as it says when a program is too large (libtpu 0.0.42.1); None if
      it no longer compiles for them, and of GPUs.
  """

  name: str
  kinds: tuple[str, ...]
  memory_gib: float
  tflops: float
  hbm_gb_per_s: float
  ici_gb_per_s: float | None
  dcn_gb_per_s: float | None
  source: str
  link: str = 'ICI'
  devices_per_chip: int = 1
  chips_per_host: int | None = None
  dtype: str = 'bfloat16'
  usable_gib: float | None = None

  @property
  def device_memory_gib(self) -> float:
    """The memory of one JAX device."""
    return self.memory_gib / self.devices_per_chip

  @property
  def device_tflops(self) -> float:
    """10^12 operations per second of one JAX device."""
    return self.tflops / self.devices_per_chip

  @property
  def device_hbm_gb_per_s(self) -> float:
    """10^9 bytes per second from and to the memory of one JAX device."""
    return self.hbm_gb_per_s / self.devices_per_chip


_TPU = 'https://docs.cloud.google.com/tpu/docs/'
_V4_ICI = 'https://arxiv.org/abs/2304.01433 (6 links of 50 GB/s)'
_V4_DCN = 'https://jax-ml.github.io/scaling-book/tpus (25 GB/s of 4 chips)'
_GPU = 'https://www.nvidia.com/en-us/data-center/'

_TPUS = (
  # Of v2 and v3 the network is left out: the pages do not tell it.
  Chip(
    'v2', ('TPU v2',), memory_gib=16, tflops=46, hbm_gb_per_s=700,
    ici_gb_per_s=None, dcn_gb_per_s=None, devices_per_chip=2, chips_per_host=4,
    source=f'{_TPU}v2',
  ),
  Chip(
    'v3', ('TPU v3',), memory_gib=32, tflops=123, hbm_gb_per_s=900,
    ici_gb_per_s=None, dcn_gb_per_s=None, devices_per_chip=2, chips_per_host=4,
    source=f'{_TPU}v3',
  ),
  Chip(
    'v4', ('TPU v4',), memory_gib=32, tflops=275, hbm_gb_per_s=1200,
    ici_gb_per_s=300, dcn_gb_per_s=6.25, chips_per_host=4, usable_gib=30.75,
    source=f'{_TPU}v4; ICI: {_V4_ICI}; DCN: {_V4_DCN}',
  ),
  # ICI 400 GB/s in both directions, two NICs of 100 Gbit/s for 8 chips.
  Chip(
    'v5e', ('TPU v5 lite', 'TPU v5e'), memory_gib=16, tflops=197,
    hbm_gb_per_s=819, ici_gb_per_s=200, dcn_gb_per_s=3.125, chips_per_host=8,
    usable_gib=15.75, source=f'{_TPU}v5e',
  ),
  # ICI 1,200 GB/s in both directions, DCN 50 Gbit/s a chip.
  Chip(
    'v5p', ('TPU v5', 'TPU v5p'), memory_gib=95, tflops=459,
    hbm_gb_per_s=2765, ici_gb_per_s=600, dcn_gb_per_s=6.25, chips_per_host=4,
    usable_gib=95.74, source=f'{_TPU}v5p',
  ),
  # ICI 800 GB/s in both directions, four NICs of 200 Gbit/s for 8 chips.
  Chip(
    'v6e', ('TPU v6 lite', 'TPU v6e'), memory_gib=32, tflops=918,
    hbm_gb_per_s=1638, ici_gb_per_s=400, dcn_gb_per_s=12.5, chips_per_host=8,
    usable_gib=31.25, source=f'{_TPU}v6e',
  ),
  # ICI 1,200 GB/s in both directions, DCN 100 Gbit/s a chip.
  Chip(
    'v7x', ('TPU7x',), memory_gib=192, tflops=2307, hbm_gb_per_s=7380,
    ici_gb_per_s=600, dcn_gb_per_s=12.5, devices_per_chip=2, chips_per_host=4,
    usable_gib=94.75, source=f'{_TPU}tpu7x',
  ),
)  # fmt: skip

# A device has the first entry all of whose words are in its name, so 'H200 NVL'
# comes before 'H200'.
_GPUS = (
  Chip(
    'GB200', ('GB200',), memory_gib=186, tflops=2500, hbm_gb_per_s=8000,
    ici_gb_per_s=900, dcn_gb_per_s=None, link='NVLink',
    source=f'{_GPU}gb200-nvl72/',
  ),
  Chip(
    'B200', ('B200',), memory_gib=180, tflops=2250, hbm_gb_per_s=8000,
    ici_gb_per_s=900, dcn_gb_per_s=50, link='NVLink', chips_per_host=8,
    source=f'{_GPU}dgx-b200/',
  ),
  Chip(
    'H200 NVL', ('H200 NVL',), memory_gib=141, tflops=835.5,
    hbm_gb_per_s=4800, ici_gb_per_s=450, dcn_gb_per_s=None, link='NVLink',
    source=f'{_GPU}h200/',
  ),
  Chip(
    'H200 SXM', ('H200',), memory_gib=141, tflops=989.5, hbm_gb_per_s=4800,
    ici_gb_per_s=450, dcn_gb_per_s=50, link='NVLink', chips_per_host=8,
    source=f'{_GPU}h200/ {_GPU}dgx-h200/',
  ),
  Chip(
    'GH200', ('GH200',), memory_gib=96, tflops=989.5, hbm_gb_per_s=4000,
    ici_gb_per_s=450, dcn_gb_per_s=None, link='NVLink',
    source=f'{_GPU}grace-hopper-superchip/',
  ),
  Chip(
    'H100 NVL', ('H100 NVL',), memory_gib=94, tflops=835.5,
    hbm_gb_per_s=3900, ici_gb_per_s=300, dcn_gb_per_s=None, link='NVLink',
    source=f'{_GPU}h100/',
  ),
  # A card of PCIe may have a bridge of NVLink to one other; not all have it.
  Chip(
    'H100 PCIe', ('H100 PCIe',), memory_gib=80, tflops=756.5,
    hbm_gb_per_s=2000, ici_gb_per_s=64, dcn_gb_per_s=None, link='PCIe',
    source=f'{_GPU}h100/',
  ),
  Chip(
    'H100 SXM', ('H100',), memory_gib=80, tflops=989.5, hbm_gb_per_s=3350,
    ici_gb_per_s=450, dcn_gb_per_s=50, link='NVLink', chips_per_host=8,
    source=f'{_GPU}h100/ {_GPU}dgx-h100/',
  ),
  Chip(
    'A100 80GB PCIe', ('A100 80GB PCIe',), memory_gib=80, tflops=312,
    hbm_gb_per_s=1935, ici_gb_per_s=32, dcn_gb_per_s=None, link='PCIe',
    source=f'{_GPU}a100/',
  ),
  Chip(
    'A100 80GB SXM', ('A100 SXM4 80GB', 'A100 80GB'), memory_gib=80,
    tflops=312, hbm_gb_per_s=2039, ici_gb_per_s=300, dcn_gb_per_s=25,
    link='NVLink', chips_per_host=8, source=f'{_GPU}a100/ {_GPU}dgx-a100/',
  ),
  Chip(
    'A100 40GB PCIe', ('A100 PCIE 40GB',), memory_gib=40, tflops=312,
    hbm_gb_per_s=1555, ici_gb_per_s=32, dcn_gb_per_s=None, link='PCIe',
    source=f'{_GPU}a100/',
  ),
  Chip(
    'A100 40GB SXM', ('A100',), memory_gib=40, tflops=312, hbm_gb_per_s=1555,
    ici_gb_per_s=300, dcn_gb_per_s=25, link='NVLink', chips_per_host=8,
    source=f'{_GPU}a100/ {_GPU}dgx-a100/',
  ),
  Chip(
    'L40S', ('L40S',), memory_gib=48, tflops=362, hbm_gb_per_s=864,
    ici_gb_per_s=32, dcn_gb_per_s=None, link='PCIe', source=f'{_GPU}l40s/',
  ),
  Chip(
    'L4', ('L4',), memory_gib=24, tflops=121, hbm_gb_per_s=300,
    ici_gb_per_s=32, dcn_gb_per_s=None, link='PCIe', source=f'{_GPU}l4/',
  ),
  Chip(
    'A10', ('A10',), memory_gib=24, tflops=125, hbm_gb_per_s=600,
    ici_gb_per_s=32, dcn_gb_per_s=None, link='PCIe',
    source=f'{_GPU}products/a10-gpu/',
  ),
  Chip(
    'V100 32GB', ('V100 32GB',), memory_gib=32, tflops=125, hbm_gb_per_s=900,
    ici_gb_per_s=150, dcn_gb_per_s=None, link='NVLink', dtype='float16',
    source=f'{_GPU}v100/',
  ),
  Chip(
    'V100 16GB', ('V100',), memory_gib=16, tflops=125, hbm_gb_per_s=900,
    ici_gb_per_s=150, dcn_gb_per_s=None, link='NVLink', dtype='float16',
    source=f'{_GPU}v100/',
  ),
  Chip(
    'T4', ('T4',), memory_gib=16, tflops=65, hbm_gb_per_s=320,
    ici_gb_per_s=16, dcn_gb_per_s=None, link='PCIe', dtype='float16',
    source=f'{_GPU}tesla-t4/',
  ),
)  # fmt: skip

CHIPS = (*_TPUS, *_GPUS)
"""All of them."""


def find(device_kind: str) -> Chip | None:
  """The chip of a device; None if it is not in the table, or part of a GPU.

  Args:
    device_kind: Of a `jax.Device`.

  >>> find('TPU v5 lite').name, find('NVIDIA H100 80GB HBM3').name, find('cpu')
  ('v5e', 'H100 SXM', None)
  """
  for chip in _TPUS:
    if device_kind in chip.kinds:
      return chip
  words = set(re.split('[ -]', device_kind))
  if 'MIG' in words or not words & {'NVIDIA', 'Tesla'}:
    return None
  for chip in _GPUS:
    if any(words >= set(kind.split()) for kind in chip.kinds):
      return chip
  return None


def peak_flops(device_kind: str) -> float | None:
  """Peak FLOP/s of one device: dense, by the vendor.

  Args:
    device_kind: Of a `jax.Device`.

  Returns:
    FLOP/s; None for a kind that is not in the table, and for part of a GPU.

  >>> peak_flops('NVIDIA H100 80GB HBM3')
  989500000000000.0
  """
  chip = find(device_kind)
  return None if chip is None else chip.device_tflops * 1e12


def named(name: str) -> Chip:
  """The chip of a name that a person types, whatever its case.

  Args:
    name: A chip's name, or a `device_kind` of a TPU.

  Raises:
    ValueError: There is no such chip in the table.

  >>> named('V5P').memory_gib, named('h100-sxm').tflops
  (95, 989.5)
  """
  wanted = name.casefold().replace('-', ' ')
  for chip in CHIPS:
    if wanted in [known.casefold() for known in (chip.name, *chip.kinds)]:
      return chip
  known = ', '.join(chip.name for chip in CHIPS)
  raise ValueError(
    f'There is no chip {name!r} in the table; give one of {known}.'
  )
