"""Times what the record of moments, overshoot and brakes add to an update.

python tests/bench/moments.py
python tests/bench/moments.py moments project

On the embedded default with eight updates per rollout. Every variant updates on
the same rollout, in turns, in one process; prints medians of the ratios to the
update without any of it. Names restrict it to some variants. Nothing else
should run on the machine meanwhile.
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

from grpo_jax import config as config_lib  # noqa: E402
from grpo_jax.rollouts.dynamic_sampling import PromptState  # noqa: E402
from grpo_jax.run import sampling  # noqa: E402
from grpo_jax.run.build import build  # noqa: E402
from tests.learning import learn  # noqa: E402

UPDATES, TURNS = 8, 25
VARIANTS = {  # fields of config.optim
  'plain': {},
  'moments': {'moments': True},
  'overshoot': {'overshoot_every_steps': 1},
  'reset': {'brake': 'reset'},
  'decay': {'brake': 'decay'},
  'project': {'brake': 'project'},
}


def main() -> None:
  """Prints a line for each variant."""
  get_config = runpy.run_path(str(ROOT / 'configs/arithmetic.py'))['get_config']
  config = config_lib.resolve(get_config(f'mu={UPDATES}'))
  run = build.run(config)
  params = jax.jit(run.model.init)(jax.random.key(0))
  run.engine.load(params, version=0)
  rollout, _, _ = sampling.sampled(run, PromptState(), 0)
  reward = rollout.batch.reward.copy()
  reward[:, ::2] = 1.0  # a policy that knows nothing has nothing to learn
  rollout = rollout._replace(batch=rollout.batch._replace(reward=reward))
  chosen = ['plain', *(sys.argv[1:] or list(VARIANTS)[1:])]
  secs = {name: [] for name in chosen}
  states, updaters = {}, {}
  for name in chosen:
    fields = VARIANTS[name]
    optim = dataclasses.replace(config.optim, **fields)
    changed = build.run(dataclasses.replace(config, optim=optim))
    updaters[name] = build.updater(changed, None)
    states[name] = updaters[name].compiled.init(
      jax.tree.map(jax.numpy.copy, params)
    )
  for turn in range(TURNS + 2):
    for name, updater in updaters.items():
      start = time.monotonic()
      states[name], _, _ = learn(
        updater, updater.layout, states[name], rollout, turn
      )
      jax.block_until_ready(states[name])
      if turn > 1:  # the first ones compile
        secs[name].append((time.monotonic() - start) / UPDATES)
  print(f'plain: {1000 * statistics.median(secs["plain"]):.1f} ms per update')
  for name in chosen[1:]:
    ratios = [x / y for x, y in zip(secs[name], secs['plain'], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(f'{name}: {middle:.3f} times that ({low:.3f} to {high:.3f})')


if __name__ == '__main__':
  main()
