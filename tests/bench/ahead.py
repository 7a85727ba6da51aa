"""What drawing rollouts ahead gains and costs: `config.sampler.ahead`.

python tests/bench/ahead.py speed
python tests/bench/ahead.py bias --seeds 3 --steps 40 --argument mu=4

`speed` times runs of the embedded default in turns, in this process: with a
fast judge, and with one that sleeps for as long as a rollout and its update
take. Prints medians over the turns. Nothing else should run on the machine
meanwhile.

`bias` trains the embedded default with rollouts drawn in turn, and ahead with
each way to correct for the older policy and without any. Each seed has one
warm-up for all. Prints means and standard deviations over seeds.
"""

import argparse
import pathlib
import runpy
import statistics
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
if __name__ == '__main__':  # else the folder of this file comes first
  sys.path[0] = str(ROOT)

import numpy as np  # noqa: E402

from grpo_jax import config as config_lib  # noqa: E402
from grpo_jax import losses  # noqa: E402
from grpo_jax import rewards  # noqa: E402
from grpo_jax.run import loop  # noqa: E402
from tests import runs  # noqa: E402

FIRST = 5  # rollouts that are not timed: programs are compiled in them
IN_TURN, AHEAD = {'sampler.ahead': 0}, {'sampler.ahead': 1}
SAMPLER = {'learner.anchor': 'sampler'}
ARMS = {
  'in turn': IN_TURN,
  "ahead, `anchor='sampler'`": AHEAD | SAMPLER,
  'ahead, truncated importance': AHEAD
  | {
    'learner.method': 'tests.bench.ahead:truncated',
    'learner.method_kwargs': {},
  },
  'ahead, nothing corrects': AHEAD,
}


@rewards.batched
def patient(prompts, completions, examples, secs):
  """Whether ids have an even sum, by a judge that takes some seconds for all.

  Half of them have, so that updates leave out nothing.
  """
  del prompts, completions
  time.sleep(secs)
  return [float(sum(e['completion_ids']) % 2 == 0) for e in examples]


def truncated():
  """GRPO, with truncated importance weights of the sampler."""
  return losses.chain(
    losses.normalize_by_group(),
    losses.truncate_token_importance(2.0),
    losses.mean_over_sequences(),
    losses.ppo_clip(0.2, 0.2),
  )


def config_of(argument='', **changes) -> config_lib.Config:
  """The embedded default without what is neither sampled nor learned."""
  file = runpy.run_path(str(ROOT / 'configs/arithmetic.py'))
  config = file['get_config'](argument)
  config.log.display, config.log.tensorboard = 'none', False
  config.log.completions_every_steps = 0
  config.checkpoint.every_steps = 10_000
  config.evaluation.every_steps = 0
  for name, value in changes.items():
    config.update_from_flattened_dict({name: value})
  return config_lib.resolve(config)


def secs_of(steps: int, changes) -> list[float]:
  """Seconds of each rollout of a run, the first ones left out."""
  ends = []
  changes = {'steps': steps, 'warm_up.steps': 0, 'data.heldout': ''} | changes
  with tempfile.TemporaryDirectory() as workdir:
    loop.train(
      config_of(**changes),
      workdir,
      on_rollout=lambda *_: ends.append(time.perf_counter()),
    )
  return np.diff(ends)[FIRST:].tolist()


def speed(steps: int, turns: int) -> None:
  """Prints a table of seconds per rollout."""

  def judge(secs):
    name = 'tests.bench.ahead:patient'
    return {
      'rewards': ({'name': name, 'kwargs': {'secs': secs}, 'where': 'here'},)
    }

  own = statistics.median(secs_of(steps, judge(0.0) | IN_TURN))
  print('| judge | in turn, s | ahead, s | ratio in each turn |')
  print('| --- ' * 4 + '|')
  for secs in (0.0, own):
    found = []
    for _ in range(turns):
      found.append(
        [
          statistics.median(secs_of(steps, judge(secs) | arm))
          for arm in (IN_TURN, AHEAD | SAMPLER)
        ]
      )
    one, other = map(statistics.median, zip(*found))
    ratios = ', '.join(f'{a / b:.2f}' for a, b in found)
    name = f'sleeps {secs:.3f} s for a rollout' if secs else 'fast'
    print(f'| {name} | {one:.3f} | {other:.3f} | {ratios} |', flush=True)


def bias(steps: int, seeds: int, argument: str, lr: float) -> None:
  """Prints a table of what is learned."""
  found = {name: [] for name in ARMS}
  for seed in range(seeds):
    with tempfile.TemporaryDirectory() as folder:
      warm = f'{folder}/warm'
      loop.train(config_of(seed=seed, steps=0), warm)
      for number, (name, arm) in enumerate(ARMS.items()):
        changes = {
          'seed': seed, 'steps': steps, 'optim.lr': lr, 'model.path': warm,
          'warm_up.steps': 0,
        }  # fmt: skip
        workdir = f'{folder}/{number}'
        done = loop.train(config_of(argument, **changes, **arm), workdir)
        records = runs.records(workdir)[1:]
        accuracy = [record['accuracy'] for record in records]
        found[name].append([
          done['before'], done['after'], np.mean(accuracy),
          np.mean(accuracy[-5:]),
          np.nanmean([record.get('kl_old_k3', np.nan) for record in records]),
        ])  # fmt: skip
        print(seed, name, found[name][-1], file=sys.stderr, flush=True)
  print(f'{argument or "mu=1"}, lr {lr}, {steps} rollouts, {seeds} seeds\n')
  print(
    '| arm | held-out before | held-out after | accuracy, all rollouts | '
    'accuracy, last five | KL to the old policy |\n' + '| --- ' * 6 + '|'
  )
  for name, rows in found.items():
    cells = [
      f'{mean:.4f} ± {std:.4f}'
      for mean, std in zip(np.mean(rows, 0), np.std(rows, 0, ddof=1))
    ]
    print(f'| {name} | {" | ".join(cells)} |', flush=True)


def main() -> None:
  """Prints one of the tables."""
  parser = argparse.ArgumentParser()
  parser.add_argument('what', choices=('speed', 'bias'))
  parser.add_argument('--steps', type=int, default=40)
  parser.add_argument('--turns', type=int, default=5)
  parser.add_argument('--seeds', type=int, default=3)
  parser.add_argument('--argument', default='')
  parser.add_argument('--lr', type=float, default=3e-4)
  given = parser.parse_args()
  if given.what == 'speed':
    speed(given.steps, given.turns)
  else:
    bias(given.steps, given.seeds, given.argument, given.lr)


if __name__ == '__main__':
  main()
