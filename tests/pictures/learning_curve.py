"""The learning curve of a run.

python tests/pictures/learning_curve.py runs/arithmetic
python tests/pictures/learning_curve.py runs/smollm2 --name=curve_smollm2

reads the `metrics.jsonl` of a workdir and draws held-out accuracy and reward
against rollouts.
"""

import argparse
import json
import pathlib

import matplotlib

matplotlib.use('svg')

from matplotlib import pyplot as plt  # noqa: E402

HERE = pathlib.Path(__file__).resolve().parent
INK, HELDOUT, REWARD = '#24292f', '#0a6c74', '#d9822b'


def points(workdir: pathlib.Path, name: str) -> tuple[list, list]:
  """The rollouts and the values of a metric, where it was measured."""
  lines = (workdir / 'metrics.jsonl').read_text().splitlines()
  records = [json.loads(line) for line in lines]
  found = [(r['step'], r[name]) for r in records if r.get(name) is not None]
  steps, values = zip(*found, strict=True)
  return list(steps), list(values)


def draw(workdir: pathlib.Path, out: pathlib.Path) -> str:
  """Draws the curves of a workdir, and returns the title."""
  config = json.loads((workdir / 'config.json').read_text())
  method = config['learner']['method'].upper()
  heldout = points(workdir, 'heldout_accuracy')
  reward = points(workdir, 'reward')
  title = (
    f'{method} takes held-out accuracy from {heldout[1][0]:.3g} to '
    f'{heldout[1][-1]:.3g} in {heldout[0][-1]} rollouts'
  )
  size = config['sampler']['prompts'] * config['sampler']['group']
  plt.rcParams.update(  # the same run gives the same file
    {'font.size': 11, 'text.color': INK, 'svg.hashsalt': 'curve'}
  )
  figure, axes = plt.subplots(figsize=(7.2, 3.6), layout='constrained')
  axes.plot(
    *heldout,
    color=HELDOUT,
    lw=2.2,
    marker='o',
    ms=6,
    clip_on=False,
    zorder=3,
    label='held-out accuracy: greedy answers to problems never trained on',
  )
  axes.plot(
    *reward,
    color=REWARD,
    lw=1.3,
    label=f'reward: mean of the {size} completions of a rollout',
  )
  axes.set_title(title, loc='left', fontsize=12.5, fontweight='bold')
  axes.set_xlabel('rollouts')
  axes.set_xlim(0, heldout[0][-1])
  if 0 <= min(heldout[1] + reward[1]) and max(heldout[1] + reward[1]) <= 1:
    axes.set_ylim(0, 1.03)
  axes.grid(axis='y', color='#d0d7de', lw=0.6)
  axes.spines[['top', 'right']].set_visible(False)
  axes.legend(loc='lower right', frameon=False, labelcolor='linecolor')
  figure.savefig(out, facecolor='white', metadata={'Date': None})
  plt.close(figure)
  return title


def main() -> None:
  """Draws the curve of the workdir that was given."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('workdir', type=pathlib.Path)
  parser.add_argument('--out', type=pathlib.Path, default=HERE)
  parser.add_argument('--name', default='learning_curve')
  args = parser.parse_args()
  args.out.mkdir(parents=True, exist_ok=True)
  path = args.out / f'{args.name}.svg'
  print(path, draw(args.workdir, path), sep='\n')


if __name__ == '__main__':
  main()
