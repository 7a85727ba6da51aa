"""How far each family is from transformers, and where it runs.

`python -m tests.models.families_table [NAME ...]` measures rows, and writes
`families_table.json`, of which the table in grpo_jax/models/README.md is made.
Errors are relative to the largest logit, or to the largest entry of a gradient.
"""

import functools
import json
import pathlib
import runpy
import sys
from typing import Any

import jax
import numpy as np

from grpo_jax import config as config_lib
from grpo_jax import engines
from grpo_jax.models import layout
from grpo_jax.models.weights import families
from grpo_jax.planning import plan as plans
from grpo_jax.planning import topologies
from tests import drawing
from tests import tiny
from tests.models import meshed
from tests.models.weights import golden
from tests.models.weights import parity_test
from tests.planning.estimates import SHAPES

FILE = pathlib.Path(__file__).with_suffix('.json')
MACHINES = ('v5p:2x2x4', 'h100-sxm:1x8')
LAYOUTS = {
  'shared': lambda *rollout: layout.shared_prompt(*rollout, 4),
  'packed': lambda *rollout: layout.packed_rows(*rollout, 24),
  'padded': lambda *rollout: layout.padded_rows(*rollout, 12),
}
ROWS = {
  'Llama 2, 3': ('llama', '1B to 70B', 'Llama-3.2-3B'),
  'Mistral': ('mistral', '7B', ''),
  'Qwen 2, 2.5': ('qwen2_window', '0.5B to 72B', 'Qwen2.5-7B'),
  'Qwen 3': ('qwen3', '0.6B to 32B', 'Qwen3-8B'),
  'Qwen 3 with experts': ('qwen3_moe', '30B-A3B', 'Qwen3-30B-A3B'),
  'Qwen 3 VL (text)': ('qwen3_vl', '2B to 32B', 'Qwen3-VL-4B'),
  'Gemma 2': ('gemma2', '2B to 27B', ''),
  'Gemma 3': ('gemma3', '270M to 27B', 'Gemma-3-1B'),
  'SmolLM 3': ('smollm3', '3B', 'SmolLM3-3B'),
  'OLMo 3': ('olmo3', '7B, 32B', 'Olmo-3-7B'),
  'Ministral 3 (text)': ('ministral3', '3B to 14B', 'Ministral-3-8B'),
  'Phi-3, Phi-4': ('phi3', '4B, 14B', 'Phi-4'),
  'Granite 3': ('granite', '2B, 8B', 'Granite-3.3-8B'),
  'GLM-4': ('glm4', '9B, 32B', 'GLM-4-9B'),
  'GLM-4.5, 4.6': ('glm4_moe', '106B-A12B, 355B-A32B', 'GLM-4.5-Air'),
  'Qwen 1.5, 2 with experts': ('qwen2_moe', '14B-A3B, 57B-A14B', ''),
  'gpt-oss': ('gpt_oss', '21B-A4B, 117B-A5B', 'gpt-oss-20b'),
  'LFM 2, 2.5': ('lfm2', '0.2B to 2.6B', 'LFM2-1.2B'),
  'LFM 2 with experts': ('lfm2_moe', '8B-A1B', ''),
  'Qwen 3.5, 3.6 (text)': ('qwen3_5', '0.8B to 27B', 'Qwen3.5-9B'),
  'Qwen 3.5 with experts': (
    'qwen3_5_moe',
    '35B-A3B to 397B-A17B',
    'Qwen3.5-35B-A3B',
  ),
  'Qwen 3 Next': ('qwen3_next', '80B-A3B', 'Qwen3-Next-80B-A3B'),
  'Gemma 4 E (text)': ('gemma4', 'E2B, E4B', 'Gemma-4-E2B'),
  'Gemma 4 (text)': ('gemma4_moe', '12B, 31B, 26B-A4B', 'Gemma-4-26B-A4B'),
}
"""Of each family a golden model, the sizes there are, and a shape."""


def of_logits(name: str) -> float:
  """Against transformers, with padding on either side."""
  one, worst = golden.golden(name), 0.0
  for side in ('right', 'left'):
    rows = golden.padded(one.rows, side)
    with parity_test.EXACT():
      found = parity_test.logits(one.model, one.params, rows)
    expected = one.expected[side]
    error = np.abs(np.asarray(found)[rows.segment > 0] - expected).max()
    worst = max(worst, float(error / np.abs(expected).max()))
  return worst


def of_layouts(name: str) -> float:
  """Log-probabilities against those of transformers, in all three layouts."""
  one = golden.golden(name)
  row, logits = one.rows[0], one.expected['right'][3:11]
  tokens, length = np.stack([row[4:], row[4:]])[None], np.full((1, 2), 8)
  expected = np.asarray(jax.nn.log_softmax(logits))[np.arange(8), row[4:]]
  worst = 0.0
  for make in LAYOUTS.values():
    rows = make([row[:4].tolist()], tokens, length)
    with parity_test.EXACT():
      score = tiny.score(one.model, one.params, rows)
    found = np.asarray(tiny.gather(score.logp, rows, length))[0]
    worst = max(worst, float(np.abs(found - expected[None]).max()))
  return worst / float(np.abs(logits).max())


def of_sampler(model: Any, params: Any) -> float:
  """Log-probabilities of drawn tokens against the learner's, nats."""
  prompts = [[5, 9, 11, 30, 8], [7, 12]]
  made = engines.LocalEngine(model, (8,), (4, 16))
  made.load(params, version=0)
  with parity_test.EXACT():
    drawn = drawing.completions(made, prompts, engines.Sampling(), 12)
    rows = layout.shared_prompt(prompts, drawn.tokens, drawn.length, 8)
    scores = tiny.score(model, params, rows)
  logp = tiny.gather(scores.logp, rows, drawn.length)
  return float(np.abs(drawn.logp - np.asarray(logp)).max())


def measured(name: str) -> dict[str, float]:
  """The errors of one golden model."""
  one = golden.golden(name)
  return {
    'logits': of_logits(name),
    'layouts': of_layouts(name),
    'sampler': of_sampler(one.model, one.params),
    'axes': max(meshed.errors(one.model, one.params)),
  }


@functools.cache
def planned(shape: str, machines: str) -> str:
  """What a device needs for configs/plan.py with this shape, all of it fsdp."""
  path = SHAPES.parent / 'plan.py'
  changed = runpy.run_path(str(path))['get_config'](shape)
  topology = topologies.named(machines)
  changed.mesh.data, changed.mesh.fsdp = 1, int(topology.chips)
  made = plans.plan(config_lib.resolve(changed), topology, estimate=True)
  needed, there = (
    round(x / topologies.GIB) for x in (made.largest.bytes, made.capacity)
  )
  return f'{needed} of {there} GiB' + ('' if made.fits else ' (too much)')


def markdown() -> str:
  """The table."""
  from tests import readmes  # which imports this file

  head = (
    'family', 'sizes', 'logits', 'layouts', 'sampler, nats',
    'tensor, context, expert', 'export', 'GGUF', 'shape',
    *(f'`{one}`' for one in MACHINES),
  )  # fmt: skip
  found, rows = json.loads(FILE.read_text()), []
  for name, (case, sizes, shape) in ROWS.items():
    row = families.family(golden_architecture(case))
    whole = 'as text alone, adapters' if row.inside else 'whole, adapters'
    errors = (f'{found[case][key]:.0e}' for key in found[case])
    plan = [planned(shape, one) if shape else '' for one in MACHINES]
    read = 'read' if row.gguf else ''
    rows.append((name, sizes, *errors, whole, read, shape, *plan))
  return readmes.table(head, rows)


def golden_architecture(case: str) -> str:
  """What the `config.json` of a golden model names."""
  described = json.loads((golden.folder(case) / 'config.json').read_text())
  return described['architectures'][0]


def main() -> None:
  """Writes the file; only the rows that are named, if any are."""
  there = json.loads(FILE.read_text())
  named = sys.argv[1:]
  found = {
    case: there[case] if named and case not in named else measured(case)
    for case, *_ in ROWS.values()
  }
  FILE.write_text(json.dumps(found, indent=1) + '\n')


if __name__ == '__main__':
  main()
