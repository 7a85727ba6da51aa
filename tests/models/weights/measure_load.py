"""Load time and peak memory for a random model of the shape of Llama-3.2-1B.

  python -m tests.models.weights.measure_load /tmp/random_1b

makes the folder (2.5 GB, bfloat16), loads it in fresh processes, and prints
what they held. Remove the folder afterwards.
"""

import json
import pathlib
import subprocess
import sys
import time

import jax
import numpy as np

from grpo_jax.models import weights
from grpo_jax.models.weights import families
from grpo_jax.models.weights import safetensors
from grpo_jax.models.weights import tensors as tensors_lib
from tests.models.weights import real_models

MIB = 2**20


def make(folder: pathlib.Path) -> None:
  """Random tensors, one by one."""
  described = real_models.MODELS['Llama-3.2-1B']
  config = weights.config_from_huggingface(described)
  tensors = families.family(described['architectures'][0]).tensors
  wanted, _ = tensors_lib.parameters(config, tensors)
  names = [(n, p.name_shape) for p in wanted for ns in p.names for n in ns]
  rng = np.random.default_rng(0)
  bfloat16 = np.dtype(jax.numpy.bfloat16)
  arrays = (
    (rng.random(shape, np.float32) - 0.5).astype(bfloat16) for _, shape in names
  )
  folder.mkdir(parents=True)
  safetensors.write(folder, names, arrays, bfloat16, 5_000_000_000)
  (folder / 'config.json').write_text(json.dumps(described))


def resident() -> dict[str, float]:
  """MiB of this process: now, at its peak, and by kind."""
  lines = pathlib.Path('/proc/self/status').read_text().splitlines()
  fields = dict(line.split(':', 1) for line in lines)
  return {
    name: round(int(fields[key].split()[0]) / 1024)
    for name, key in (
      ('now', 'VmRSS'),
      ('peak', 'VmHWM'),
      ('arrays', 'RssAnon'),
      ('files', 'RssFile'),
    )
  }


def load(folder: pathlib.Path, dtype: str) -> None:
  """Loads the folder; compiling is part of the time."""
  source = weights.source(folder)
  config = source.config()
  before = resident()
  start, cpu = time.perf_counter(), time.process_time()
  params = weights.load(source, config, dtype=dtype)
  took, cpu = time.perf_counter() - start, time.process_time() - cpu
  held = sum(x.nbytes for x in jax.tree.leaves(params)) / MIB
  largest = max(
    np.prod(x.shape) * x.dtype.itemsize for x in source.stored.values()
  )
  after = resident()
  print(f'before {before}')
  print(f'after {after}')
  above = after['peak'] - before['now'] - held
  print(
    f'{dtype}: {took:.1f} s, {cpu:.1f} s of one core; arrays of {held:.0f} MiB '
    f'are held; the peak is {above:.0f} MiB above them; the largest tensor has '
    f'{largest / MIB:.0f} MiB as it is stored'
  )


if __name__ == '__main__':
  where = pathlib.Path(sys.argv[1])
  if len(sys.argv) > 2:
    load(where, sys.argv[2])
  else:
    if not where.exists():
      make(where)
    for kind in ('float32', 'bfloat16'):
      command = [sys.executable, '-m', __spec__.name, str(where), kind]
      subprocess.run(command, check=True)
