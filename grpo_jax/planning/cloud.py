"""Machines by the names under which clouds rent them out.

The number behind a TPU is of TensorCores (v4 and v5p, two in each chip) or of
chips (v5e and v6e): 'v5p-64' has 32 chips, and 'v6e-64' has 64. The shapes are
those of Cloud TPU's documentation; another shape is given as such, as in
v5p:4x4x12.
"""

from typing import NamedTuple


class _Family(NamedTuple):
  """TPUs of one kind, as Cloud TPU names them."""

  chip: str
  counted: int  # how many of its number are in one chip
  shapes: tuple[str, ...]


_CUBES = (
  '2x2x1', '2x2x2', '2x2x4', '2x4x4', '4x4x4', '4x4x8', '4x8x8', '8x8x8',
  '8x8x16', '8x16x16',
)  # fmt: skip
_SQUARES = '1x1', '2x2', '2x4', '4x4', '4x8', '8x8', '8x16', '16x16'
_TPUS = {
  'v4': _Family('v4', 2, _CUBES),
  'v5p': _Family('v5p', 2, (*_CUBES, '16x16x16', '16x16x24')),
  'v5litepod': _Family('v5e', 1, _SQUARES),
  'v5e': _Family('v5e', 1, _SQUARES),  # as people say it
  'v6e': _Family('v6e', 1, _SQUARES),
}

# Chips of one machine.
_GPUS = {
  **{f'a2-highgpu-{n}g': f'a100-40gb-sxm:{n}' for n in (1, 2, 4, 8)},
  'a2-megagpu-16g': 'a100-40gb-sxm:16',
  **{f'a2-ultragpu-{n}g': f'a100-80gb-sxm:{n}' for n in (1, 2, 4, 8)},
  **{f'a3-highgpu-{n}g': f'h100-sxm:{n}' for n in (1, 2, 4, 8)},
  'a3-edgegpu-8g': 'h100-sxm:8',
  'a3-megagpu-8g': 'h100-sxm:8',
  'a3-ultragpu-8g': 'h200-sxm:8',
  'a4-highgpu-8g': 'b200:8',
  # Of Amazon.
  'p4d.24xlarge': 'a100-40gb-sxm:8',
  'p4de.24xlarge': 'a100-80gb-sxm:8',
  'p5.48xlarge': 'h100-sxm:8',
  'p5e.48xlarge': 'h200-sxm:8',
  'p5en.48xlarge': 'h200-sxm:8',
  'p6-b200.48xlarge': 'b200:8',
  # Of Microsoft.
  'standard_nd96asr_v4': 'a100-40gb-sxm:8',
  'standard_nd96amsr_a100_v4': 'a100-80gb-sxm:8',
  'standard_nd96isr_h100_v5': 'h100-sxm:8',
  'standard_nd96isr_h200_v5': 'h200-sxm:8',
}


def topology(name: str) -> str | None:
  """What `--topology` calls the machines that a cloud calls so.

  >>> topology('v5p-64'), topology('v5litepod-16'), topology('v6e-8')
  ('v5p:2x4x4', 'v5e:4x4', 'v6e:2x4')
  >>> topology('a3-highgpu-8g:4'), topology('v5p:4x4x4')
  ('h100-sxm:4x8', None)

  Args:
    name: An accelerator type of Cloud TPU, or a machine type with GPUs; of
      these a number of machines may follow a colon.

  Returns:
    A name that is none of a cloud is None.

  Raises:
    ValueError: There is no such size of the TPU, or no such number of machines.
  """
  kind, _, number = name.casefold().partition('-')
  if kind in _TPUS and number:
    return _tpu(name, _TPUS[kind], number)
  machine, colon, count = name.casefold().partition(':')
  if machine not in _GPUS:
    return None
  if colon and not (count.isdecimal() and int(count)):
    raise ValueError(
      f'--topology={name} needs a number of machines behind the colon, '
      f'as in {machine}:2.'
    )
  chip, _, gpus = _GPUS[machine].partition(':')
  return f'{chip}:{int(count or 1)}x{gpus}'


def _tpu(name: str, family: _Family, number: str) -> str:
  sizes = {}
  for shape in family.shapes:
    chips = 1
    for size in shape.split('x'):
      chips *= int(size)
    sizes[str(chips * family.counted)] = shape
  if number not in sizes:
    counts = 'TensorCores' if family.counted == 2 else 'chips'
    raise ValueError(
      f'--topology={name}: {family.chip} comes with {", ".join(sizes)} '
      f'{counts} under such names; give one of these, or a shape, as in '
      f'{family.chip}:{family.shapes[3]}.'
    )
  return f'{family.chip}:{sizes[number]}'
