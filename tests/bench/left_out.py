"""Times updates that leave out completions without an advantage.

python tests/bench/left_out.py arithmetic C S

Of every case (those of `cases.py`, or `arithmetic`, the embedded default) one
rollout is drawn. In a share of its groups rewards differ, in the others they
are equal. An update of it is timed in turns with `learner.compute_all` and
without. Prints medians. Nothing else should run on the machine meanwhile.
"""

import dataclasses
import pathlib
import runpy
import statistics
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
if __name__ == '__main__':  # else the folder of this file comes first
  sys.path[0] = str(ROOT)

import jax  # noqa: E402
import numpy as np  # noqa: E402

from grpo_jax import config as config_lib  # noqa: E402
from grpo_jax.learner import metrics  # noqa: E402
from grpo_jax.rollouts.dynamic_sampling import PromptState  # noqa: E402
from grpo_jax.run import sampling  # noqa: E402
from grpo_jax.run.build import build  # noqa: E402
from tests.bench import config as bench_config  # noqa: E402
from tests.learning import learn  # noqa: E402

SHARES = 1, 1 / 2, 1 / 4, 0
TURNS = 5


def main() -> None:
  """Prints a table."""
  print(
    '| case | groups with an advantage | all, s | without the others, s '
    '| micro-batches left out |\n' + '| --- ' * 5 + '|'
  )
  for case in sys.argv[1:] or ('arithmetic', 'C', 'S'):
    for row in rows(case):
      print(f'| {case} | {" | ".join(row)} |', flush=True)


def config_of(case: str) -> config_lib.Config:
  """The config of a case, without a penalty."""
  if case == 'arithmetic':
    file = runpy.run_path(str(ROOT / 'configs/arithmetic.py'))
    config = file['get_config']()
  else:
    config = bench_config.get_config(case)
  config.learner.method_kwargs = {'kl_coefficient': 0.0}
  return config_lib.resolve(config)


def rows(case: str):
  """Yields the cells of a case, for each share of informative groups."""
  config = config_of(case)
  run = build.run(config)
  params = build.initial_params(run)
  run.engine.load(params, version=0)
  drawn, _, _ = sampling.sampled(run, PromptState(), 0)
  made, states = {}, {}
  for everything in (True, False):
    learner = dataclasses.replace(config.learner, compute_all=everything)
    run = build.run(dataclasses.replace(config, learner=learner))
    made[everything] = build.updater(run, None)
    copy = jax.tree.map(jax.numpy.copy, params)
    states[everything] = made[everything].compiled.init(copy)
  for share in SHARES:
    reward = np.zeros_like(drawn.batch.reward)
    reward[: round(share * len(reward)), ::2] = 1
    rollout = drawn._replace(batch=drawn.batch._replace(reward=reward))
    secs = {True: [], False: []}
    left_out = 0.0
    for turn in range(TURNS + 1):
      for everything, updater in made.items():
        start = time.monotonic()
        states[everything], found, _ = learn(
          updater, updater.layout, states[everything], rollout, turn
        )
        left_out = metrics.to_scalars(found)['left_out']
        jax.block_until_ready(states[everything])
        if turn:  # the first one compiles
          secs[everything].append(time.monotonic() - start)
    middle = [f'{statistics.median(secs[key]):.3g}' for key in (True, False)]
    yield f'{share:.0%}', *middle, f'{left_out:.0%}'


if __name__ == '__main__':
  main()
