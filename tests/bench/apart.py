"""What sampling in a job of its own gains: `config.generator.listen`.

python tests/bench/apart.py C --turns 3

The learner has one core, and a generator has another one. They work first in
turn (`sampler.ahead=0`), where each is measured alone on its core, then at the
same time (`sampler.ahead=1`). A line of the table has the medians of a turn:
seconds to have a rollout drawn, weights and wire included, and to learn from
it, those of a step, and the last over the longer of the two. Nothing else
should run on the machine meanwhile.

Flags of XLA do not keep a program on one core (jax 0.10.2), so both are
processes, which the operating system keeps there.
"""

import argparse
import contextlib
import os
import pathlib
import socket
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
if __name__ == '__main__':  # else the folder of this file comes first
  sys.path[0] = str(ROOT)

from tests import runs  # noqa: E402
from tests.bench import tables  # noqa: E402

HEAD = 'case', 'draw, s', 'learn, s', 'step, s', 'step / longer', 'sum / step'
FIRST = 3  # rollouts that are not timed: programs are compiled in them
# On one core they are the same, which `main` refuses.
CORES = sorted(os.sched_getaffinity(0))
LEARNER, GENERATOR = CORES[0], CORES[-1]


def pinned(core: int, *words: str, **more) -> subprocess.Popen:
  """A Python program on one core."""
  env = {k: v for k, v in os.environ.items() if k != 'XLA_FLAGS'}
  env |= {'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(ROOT)}
  return subprocess.Popen(
    [sys.executable, *words],
    cwd=ROOT,
    env=env,
    preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    **more,
  )


def records(case: str, steps: int, ahead: int) -> list[dict[str, float]]:
  """The metrics of the rollouts that are timed."""
  with socket.socket() as free:
    free.bind(('127.0.0.1', 0))
    address = f'127.0.0.1:{free.getsockname()[1]}'
  changes = [
    f'generator.listen="{address}"',
    f'sampler.ahead={ahead}',
    'learner.anchor="sampler"',
    'log.display="none"',
  ]
  given = ['--case', case, '--steps', str(FIRST + steps)]
  for change in changes:
    given += ['--set', change]
  with tempfile.TemporaryDirectory(prefix='grpo_jax_bench_') as folder:
    workdir = f'{folder}/run'
    given += ['--workdir', workdir]
    quiet = {'stdout': subprocess.DEVNULL}
    learner = pinned(LEARNER, 'tests/bench/ours.py', *given, **quiet)
    generate = ['-m', 'grpo_jax', 'generate', f'--learner={address}']
    log = open(f'{folder}/generator', 'w')
    with contextlib.closing(log):
      generator = pinned(GENERATOR, *generate, stderr=log, **quiet)
      codes = learner.wait(), generator.wait()
    if any(codes):
      raise RuntimeError(pathlib.Path(log.name).read_text()[-2000:])
    return runs.records(pathlib.Path(workdir))[1 + FIRST :]


def main() -> None:
  """Prints the table."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('cases', nargs='*', default=['C'])
  parser.add_argument('--turns', type=int, default=3)
  parser.add_argument('--steps', type=int, default=8)
  args = parser.parse_args()
  if LEARNER == GENERATOR:
    parser.error('there is one core, and two are needed')
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
