"""Times steps of growing size, and fits how they grow.

python tests/bench/growth.py
python tests/bench/growth.py layers width

One size at a time is doubled, four times. Each run is a process of its own.
Prints two tables, of seconds and of memory: what was measured, the exponent p
of size**p by least squares on logarithms, and that of what arithmetic says
(operations of a forward pass; bytes of the largest program of `plan`). Nothing
else should run on the machine meanwhile.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import sys

if __name__ == '__main__':  # else the folder of this file comes first
  sys.path[0] = str(pathlib.Path(__file__).resolve().parents[2])
  os.environ.setdefault('JAX_PLATFORMS', 'cpu')

import numpy as np  # noqa: E402

from grpo_jax import config as config_lib  # noqa: E402
from grpo_jax.mesh import sharding  # noqa: E402
from grpo_jax.planning import plan  # noqa: E402
from grpo_jax.planning.arithmetic import Arithmetic  # noqa: E402
from grpo_jax.run.build import build  # noqa: E402
from grpo_jax.run.keep import host_memory  # noqa: E402
from tests.bench import cases  # noqa: E402
from tests.bench import ours  # noqa: E402
from tests.bench import tables  # noqa: E402
from tests.bench import work  # noqa: E402

STEPS = 5
# Wide enough that most of a step is work that grows with every size.
BASE = cases.Case('growth', 'growth', 4, 128, 512, 8, 8, 64, 64)
SIZES = {
  'prompts': (4, 8, 16, 32, 64),
  'group': (4, 8, 16, 32, 64),
  'prompt_tokens': (64, 128, 256, 512, 1024),
  'max_tokens': (32, 64, 128, 256, 512),
  'layers': (4, 8, 16, 32, 64),
  'width': (64, 128, 256, 512, 1024),
}


def main() -> None:
  """Prints the tables; or, with `--size`, the line of one run."""
  field, *more = sys.argv[1:] or ('',)
  if more[:1] == ['--size']:
    print(json.dumps(one(case_of(field, int(more[1])))))
    return
  found = {
    name: [measured(name, size) for size in SIZES[name]]
    for name in sys.argv[1:] or SIZES
  }
  for title, key, needed in (
    ('Seconds of a step', 'secs', 'flops'),
    ('MiB of a run, beyond those of importing it', 'mib', 'needed_mib'),
  ):
    print(f'**{title}**\n\n{table(found, key, needed)}\n')


def case_of(field: str, size: int) -> cases.Case:
  """The base with one other size."""
  # `mlp_width` and `low_ids` follow from the others anew.
  return dataclasses.replace(
    BASE, **{'mlp_width': 0, 'low_ids': 0, field: size}
  )


def measured(field: str, size: int) -> dict[str, float]:
  """What `one` finds, in a process of its own."""
  done = subprocess.run(
    [sys.executable, __file__, field, '--size', str(size)],
    capture_output=True,
    text=True,
  )
  if done.returncode:
    sys.exit(f'{field} of {size} failed:\n{done.stderr[-2000:]}')
  print(field, size, done.stdout.splitlines()[-1], file=sys.stderr, flush=True)
  return json.loads(done.stdout.splitlines()[-1])


def one(case: cases.Case) -> dict[str, float]:
  """Trains, and says what a step took and what it needs by arithmetic."""
  cases.CASES[case.name] = case
  args = ours.arguments(['--case', case.name, '--steps', str(STEPS)])
  imported = host_memory.peak_gib() * 1024
  told = json.loads(ours.run(args))
  tokens = statistics.mean(told['tokens'])
  return {
    'secs': tables.steady(told, 'step_secs'),
    'mib': told['peak_rss_mib'] - imported,
    'flops': work.forward_flops(case, tokens),
    'needed_mib': most_bytes(ours.config_of(args)) / 2**20,
  }


def most_bytes(config: config_lib.Config) -> float:
  """What the largest program of a run needs, by arithmetic."""
  parts = build.abstract(config, sharding.make_mesh())
  counted = Arithmetic(parts)
  return max(
    plan.plan_program(counted, name, calls, None).bytes
    for name, calls in plan.count_calls(counted).items()
  )


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
  """The p of size**p that is nearest to the values, on logarithmic axes.

  >>> round(exponent((1, 2, 4), (3, 12, 48)), 6)
  2.0
  """
  return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


def table(
  found: Mapping[str, Sequence[Mapping[str, float]]], ours: str, needed: str
) -> str:
  """A row for each size that grows.

  Args:
    found: By the name in `SIZES`, what `one` found for each size.
    ours: What was measured.
    needed: What arithmetic says of the same.

  Returns:
    Lines of Markdown. The exponent of the last doubling stands beside that of
    all, because what does not grow hides in small sizes.
  """
  lines = [
    ['grows', 'sizes', 'measured', 'exponent', 'of the last doubling',
     'by arithmetic', 'of the last doubling'],
  ]  # fmt: skip
  lines.append(['---'] * len(lines[0]))
  for name, results in found.items():
    sizes = SIZES[name]
    cells = [name, ', '.join(map(str, sizes))]
    cells.append(', '.join(tables.number(r[ours]) for r in results))
    for key in (ours, needed):
      values = [result[key] for result in results]
      cells.append(f'{exponent(sizes, values):.2f}')
      cells.append(f'{exponent(sizes[-2:], values[-2:]):.2f}')
    lines.append(cells)
  return tables.markdown(lines)


if __name__ == '__main__':
  main()
