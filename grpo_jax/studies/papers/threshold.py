"""E11: when the theory says that normalisation helps, and when it does."""

from typing import Any

import numpy as np

from grpo_jax.studies.claims import GE
from grpo_jax.studies.claims import Claim
from grpo_jax.studies.claims import Experiment
from grpo_jax.studies.claims import Measured
from grpo_jax.studies.papers import _tabular

_ANSWERS, _STEPS = 4, 400
START = tuple(np.round(np.linspace(0.02, 0.98, 49), 4).tolist())

CLAIMS = {
  'always': Claim(
    "GRPO's bound is strictly better than REINFORCE's, C(T) < 1 (largest C).",
    f'{GE}, abstract',
    high=1,
  ),
  'needs': Claim(
    'C(T) < 1 needs a mean deviation below 3/8: the largest mean deviation of '
    'all runs with C(T) < 1.',
    'derived',
    0.37,
    0.375,
  ),
  'start': Claim(
    "At the paper's own start, 0.45 right, C(1) is 1.33: no gain is predicted.",
    f'derived from {GE}, figure 3',
    1.32,
    1.34,
  ),
  'conservative': Claim(
    'Where C(T) > 1 GRPO still has no larger least gradient than REINFORCE '
    '(share of these runs).',
    'derived',
    1,
    1,
  ),
}


def run(full: bool = False) -> dict[str, Any]:
  """Trains one prompt with both methods at the rates of the theorems.

  Args:
    full: Not used: the experiment is exact.

  Returns:
    `c[t][s]`, `mean_deviation[t][s]`, and the least squared gradient of each
    method, for steps 1, 2, 4, ... and starts.
  """
  del full
  plain = _tabular.train(START, _ANSWERS, 1.0, _STEPS, False)[:-1]
  grpo = _tabular.train(START, _ANSWERS, 0.5, _STEPS, True)[:-1]
  at = np.unique(np.geomspace(1, _STEPS, 30).astype(int))
  steps = np.arange(1, _STEPS + 1)[:, None]
  mean = np.cumsum(_tabular.deviation(grpo), axis=0) / steps
  least = lambda path: np.minimum.accumulate(
    _tabular.gradient_squared(path, _ANSWERS)
  )
  found = {
    'c': 8 / 3 * mean,
    'mean_deviation': mean,
    'reinforce': least(plain),
    'grpo': least(grpo),
  }
  answer = {name: value[at - 1].tolist() for name, value in found.items()}
  paper = _tabular.deviation(0.45) * 8 / 3
  return {'start': START, 'at': at.tolist(), **answer, 'paper': float(paper)}


def measure(numbers) -> dict[str, Measured]:
  """See `Experiment`."""
  c = np.array(numbers['c'])
  better = np.array(numbers['grpo']) <= np.array(numbers['reinforce']) + 1e-15
  mean = np.array(numbers['mean_deviation'])
  at = numbers['start'][int(c[0].argmax())]
  example = f'Smallest case: one prompt, success {at:g}, one step.'
  return {
    'always': Measured(float(c.max()), example=example if c.max() > 1 else ''),
    'needs': Measured(float(mean[c < 1].max())),
    'start': Measured(numbers['paper']),
    'conservative': Measured(
      float(better[c > 1].mean()) if (c > 1).any() else float('nan')
    ),
  }


def draw(numbers, figure, colors) -> str:
  """See `Experiment`."""
  from matplotlib.colors import LinearSegmentedColormap

  axes, c = figure.subplots(), np.array(numbers['c'])
  gain = np.log10(np.array(numbers['reinforce']) / np.array(numbers['grpo']))
  shades = LinearSegmentedColormap.from_list(
    'gain', [colors['page'], colors['third']]
  )
  grid = axes.pcolormesh(
    numbers['start'],
    numbers['at'],
    gain,
    cmap=shades,
    vmin=0,
    shading='nearest',
  )
  figure.colorbar(grid, label='log10: least gradient² of REINFORCE / of GRPO')
  line = axes.contour(
    numbers['start'], numbers['at'], c, [1.0], colors=colors['second']
  )
  axes.clabel(line, fmt='C(T) = 1')
  axes.set(yscale='log', ylabel='steps', xlabel='success rate at the start')
  axes.grid(False)
  found = measure(numbers)
  return (
    'Inside the red line theory promises GRPO no gain; there it was no worse '
    f'in {found["conservative"].mean:.0%} of the runs'
  )


EXPERIMENT = Experiment(
  'E11', 'the threshold C(T) = 1', CLAIMS, run, measure, draw
)
