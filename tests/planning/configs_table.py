"""What configs with models of the Hub download, need, and cost at least.

`python -m tests.planning.configs_table --price=4.2` prints the table of
configs/README.md, with the price of a run at so much for a chip and hour.
Shapes are those of configs/shapes, memory and time the estimates of `grpo-jax
plan`: bounds, and nothing that was measured.
"""

import argparse
import math
import pathlib
import runpy
from typing import Any

import jax

from grpo_jax import config as config_lib
from grpo_jax import models
from grpo_jax.models import weights
from grpo_jax.planning import plan as plans
from grpo_jax.planning import topologies
from tests.planning.estimates import SHAPES

_CONFIGS = SHAPES.parent
_STORED_BYTES = 2  # for a parameter: the Hub has these weights in bfloat16

RUNS = {
  'gsm8k_qwen2p5_0p5b': ('Qwen2.5-0.5B', ('v5e:2x4', 'h100-sxm:1x1')),
  'gsm8k_gemma3_1b': ('Gemma-3-1B', ('v6e:2x2', 'h100-sxm:1x4')),
  'gsm8k_qwen3_1p7b': ('Qwen3-1.7B', ('v6e:2x2', 'h100-sxm:1x4')),
  'normalization_qwen2p5_math_1p5b': (
    'Qwen2.5-Math-1.5B',
    ('v6e:2x4', 'h100-sxm:1x1'),
  ),
  'math_llama3p2_3b': ('Llama-3.2-3B', ('v6e:4x4', 'h100-sxm:1x8')),
  'math_qwen3_30b_a3b': ('Qwen3-30B-A3B', ('v6e:8x8', 'h100-sxm:8x8')),
}
"""Of each config the shape of its model, and the machines that it names."""


def planned(name: str, machines: str) -> plans.Plan:
  """The estimates for a config of configs/."""
  path = _CONFIGS / f'{name}.py'
  changed = runpy.run_path(str(path))['get_config']()
  changed.model.path = str(SHAPES / RUNS[name][0])
  config = config_lib.resolve(changed)
  return plans.plan(config, topologies.named(machines), estimate=True)


def download_gb(shape: pathlib.Path) -> float:
  """GB of weights of a model on the Hub, from its shape."""
  model = models.Transformer(weights.source(shape, False).config())
  leaves = jax.tree.leaves(model.abstract())
  return sum(math.prod(x.shape) for x in leaves) * _STORED_BYTES / 1e9


def rows(price: float = 0.0) -> list[tuple[str, ...]]:
  """The lines of the table."""
  found = []
  for name, (shape, machines) in RUNS.items():
    download = f'{download_gb(SHAPES / shape):.1f} GB'
    for one in machines:
      made = planned(name, one)
      hours = made.run_hours * made.topology.chips
      cost = (f'{hours * price:,.0f}',) * bool(price)
      fits = '' if made.fits else ' (does not fit)'
      found.append(
        (
          f'`{name}.py`',
          download,
          f'`{one}`',
          f'{made.largest.bytes / topologies.GIB:.1f} of '
          f'{made.capacity / topologies.GIB:.1f} GiB{fits}',
          f'{made.run_hours:.1f}',
          f'{hours:.0f}',
          *cost,
        )
      )
  return found


def markdown(price: float = 0.0) -> str:
  """The table."""
  from tests import readmes  # which imports this file

  head: tuple[Any, ...] = (
    'config', 'downloads', 'machines', 'memory of a device', 'hours, at least',
    'chip-hours, at least',
  )  # fmt: skip
  head += (f'price at {price:g}',) * bool(price)
  return readmes.table(head, rows(price))


if __name__ == '__main__':
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--price', type=float, default=0.0)
  print(markdown(parser.parse_args().price))
