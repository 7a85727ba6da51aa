"""What sampling on devices of its own gains: `config.generator.devices`.

python tests/bench/apart.py C F --turns 3

Two devices, each of which computes on one core. A run samples on one of them
and learns on the other: first in turn (`sampler.ahead=0`), where each is
measured alone on that core, then at the same time (`sampler.ahead=1`). A line
of the table has the medians of a turn: seconds to draw a rollout and to learn
from it, those of a step, and the last over the longer of the two. Nothing else
should run on the machine meanwhile.
"""

import argparse
import os
import pathlib
import statistics
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
if __name__ == '__main__':  # else the folder of this file comes first
  sys.path[0] = str(ROOT)
  os.environ['JAX_PLATFORMS'] = 'cpu'
  # A program has one core, as if devices were pinned to cores.
  os.environ['XLA_FLAGS'] = ' '.join(
    [
      '--xla_force_host_platform_device_count=2',
      '--xla_cpu_multi_thread_eigen=false',
      'intra_op_parallelism_threads=1',
    ]
  )

from grpo_jax.run import loop  # noqa: E402
from tests import runs  # noqa: E402
from tests.bench import ours  # noqa: E402
from tests.bench import tables  # noqa: E402

HEAD = 'case', 'draw, s', 'learn, s', 'step, s', 'step / longer', 'sum / step'
FIRST = 3  # rollouts that are not timed: programs are compiled in them


def records(case: str, steps: int, ahead: int) -> list[dict[str, float]]:
  """The metrics of the rollouts that are timed."""
  changes = [
    'generator.devices=1',
    f'sampler.ahead={ahead}',
    'learner.anchor="sampler"',
    'log.display="none"',
  ]
  given = ['--case', case, '--steps', str(FIRST + steps)]
  for change in changes:
    given += ['--set', change]
  config = ours.config_of(ours.arguments([*given, '--workdir', 'unused']))
  with tempfile.TemporaryDirectory(prefix='grpo_jax_bench_') as workdir:
    loop.train(config, workdir)
    return runs.records(workdir)[1 + FIRST :]


def main() -> None:
  """Prints the table."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('cases', nargs='*', default=['C'])
  parser.add_argument('--turns', type=int, default=3)
  parser.add_argument('--steps', type=int, default=8)
  args = parser.parse_args()
  lines = [HEAD, ['---'] * len(HEAD)]
  for case in args.cases:
    for _ in range(args.turns):
      alone, both = (records(case, args.steps, ahead) for ahead in (0, 1))
      draw = statistics.median(x['ahead_wait_secs'] for x in alone)
      learn = statistics.median(x['learn_secs'] for x in alone)
      step = statistics.median(x['step_secs'] for x in both)
      ratios = step / max(draw, learn), (draw + learn) / step
      cells = case, *(f'{x:.3f}' for x in (draw, learn, step, *ratios))
      print(*cells, file=sys.stderr, flush=True)
      lines.append(cells)
  print(tables.markdown(lines))


if __name__ == '__main__':
  main()
