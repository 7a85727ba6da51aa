"""E11: when the theory says that normalisation helps, and when it does."""

from typing import Any

import numpy as np

from grpo_jax.lab.studies.claims import GE
from grpo_jax.lab.studies.claims import Claim
from grpo_jax.lab.studies.claims import Experiment
from grpo_jax.lab.studies.claims import Measured
from grpo_jax.lab.studies.papers import _settings

_ANSWERS, _STEPS = 4, 400
_PROMPTS, _SETS, _ORDERS, _SAMPLED = 8, 40, 10, 800
"""Prompts of a set, sets, random orders of prompts, and steps of each."""
START = tuple(np.round(np.linspace(0.02, 0.98, 49), 4).tolist())

CLAIMS = {
  'always': Claim(
    "GRPO's bound is strictly better than REINFORCE's, C(T) < 1 (largest C).",
    f'{GE}, abstract',
    high=1,
  ),
  'start': Claim(
    "At the paper's own start, 0.45 right, C(1) is 1.33: no gain is predicted.",
    f'derived from {GE}, figure 3',
    1.32,
    1.34,
  ),
  'conservative': Claim(
    'Where C(T) > 1 GRPO still has no larger least gradient than REINFORCE '
    '(one prompt; share of these starts and numbers of steps).',
    'derived',
    1,
    1,
  ),
  'start_decides': Claim(
    'In sets of prompts of mixed difficulty, C(T) < 1 where the mean deviation '
    'at the start is below 3/8, and C(T) > 1 where it is above (share of sets '
    f'for which that is so after {_SAMPLED} steps, {_SAMPLED // _PROMPTS} for '
    'each prompt).',
    f'derived from {GE}, C(T)',
    0.95,
  ),
  'flips': Claim(
    'In such sets the methods change places where their bounds do: GRPO has '
    'the smaller least gradient where C(T) < 1, and REINFORCE where C(T) > 1 '
    '(share of sets and numbers of steps for which that is so).',
    f'{GE}, comparison of theorems 3.1 and 3.2',
    0.95,
  ),
}


def run(full: bool = False) -> dict[str, Any]:
  """Trains with both methods at the rates of the theorems.

  Args:
    full: Not used: the experiment is exact but for the order of prompts.

  Returns:
    For one prompt: `c[t][s]` and the least squared gradient of each method, for
    steps 1, 2, 4, ... and starts. For sets of prompts, under `sets`: the same,
    means over prompts, and the mean `deviation` of each set at the start.
  """
  del full
  plain = _settings.train(START, _ANSWERS, 1.0, _STEPS, False)[:-1]
  grpo = _settings.train(START, _ANSWERS, 0.5, _STEPS, True)[:-1]
  at = np.unique(np.geomspace(1, _STEPS, 30).astype(int))
  steps = np.arange(1, _STEPS + 1)[:, None]
  mean = np.cumsum(_settings.deviation(grpo), axis=0) / steps
  least = lambda path: np.minimum.accumulate(
    _settings.gradient_squared(path, _ANSWERS)
  )
  found = {
    'c': 8 / 3 * mean,
    'reinforce': least(plain),
    'grpo': least(grpo),
  }
  answer = {name: value[at - 1].tolist() for name, value in found.items()}
  paper = _settings.deviation(0.45) * 8 / 3
  return {
    'start': START,
    'at': at.tolist(),
    **answer,
    'paper': float(paper),
    'sets': _sets(),
  }


def _sets() -> dict[str, Any]:
  """Trains sets of prompts, of which every step draws one; see `run`.

  No two prompts share a parameter, so how often a prompt was drawn tells its
  policy.
  """
  random = np.random.default_rng(0)
  # From nearly all prompts at 0 or 1, to nearly all of them at a half.
  shape = np.geomspace(0.1, 5, _SETS)[:, None]
  start = np.clip(random.beta(shape, shape, (_SETS, _PROMPTS)), 0.02, 0.98)
  drawn = random.integers(0, _PROMPTS, (_ORDERS, _SAMPLED, 1))
  drawn = drawn == np.arange(_PROMPTS)
  before = np.cumsum(drawn, axis=1) - drawn  # i64[O,T,P], how often by then
  prompt = np.arange(_PROMPTS)
  at = np.unique(np.geomspace(_PROMPTS, _SAMPLED, 20).astype(int))
  count = np.arange(1, _SAMPLED + 1)[:, None]

  def over_orders(values):  # f64[N,P] by draws -> f64[T,P]
    return values[before, prompt].mean(axis=0)

  found = {'c': [], 'reinforce': [], 'grpo': []}
  for of_set in start:
    for name, rate in (('reinforce', 1.0), ('grpo', 0.5)):
      normalized = name == 'grpo'
      path = _settings.train(of_set, _ANSWERS, rate, before.max(), normalized)
      square = over_orders(_settings.gradient_squared(path, _ANSWERS))
      least = np.minimum.accumulate(square).mean(axis=1)
      found[name].append(least[at - 1].tolist())
      if normalized:
        deviation = over_orders(_settings.deviation(path))
        c = 8 / 3 * (np.cumsum(deviation, axis=0) / count).mean(axis=1)
        found['c'].append(c[at - 1].tolist())
  deviation = _settings.deviation(start).mean(axis=1)
  return {'at': at.tolist(), 'deviation': deviation.tolist(), **found}


def measure(numbers) -> dict[str, Measured]:
  """See `Experiment`."""
  c = np.array(numbers['c'])
  better = np.array(numbers['grpo']) <= np.array(numbers['reinforce']) + 1e-15
  at = numbers['start'][int(c[0].argmax())]
  example = f'Smallest case: one prompt, success {at:g}, one step.'
  sets = {name: np.array(x) for name, x in numbers['sets'].items()}
  promised = sets['c'] < 1
  smaller = sets['grpo'] < sets['reinforce']
  early = int(np.sum(promised[:, 0] != smaller[:, 0]))
  return {
    'always': Measured(float(c.max()), example=example if c.max() > 1 else ''),
    'start': Measured(numbers['paper']),
    'conservative': Measured(
      float(better[c > 1].mean()) if (c > 1).any() else float('nan')
    ),
    'start_decides': Measured(
      float(np.mean((sets['deviation'] < 3 / 8) == promised[:, -1]))
    ),
    'flips': Measured(
      float(np.mean(promised == smaller)),
      example=f'Smallest case: {sets["at"][0]} steps, where {early} of '
      f'{len(smaller)} sets have another order; in all cases together GRPO has '
      f'the smaller least gradient in {smaller.mean():.0%}, and C(T) < 1 in '
      f'{promised.mean():.0%}.',
    ),
  }


def draw(numbers, figure, colors) -> str:
  """See `Experiment`."""
  from matplotlib.colors import LinearSegmentedColormap

  (axes, right), c = figure.subplots(1, 2), np.array(numbers['c'])
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
  figure.colorbar(
    grid, ax=axes, label='log10: least gradient² of REINFORCE / of GRPO'
  )
  line = axes.contour(
    numbers['start'], numbers['at'], c, [1.0], colors=colors['second']
  )
  axes.clabel(line, fmt='C(T) = 1')
  axes.set(yscale='log', ylabel='steps', xlabel='success rate at the start')
  axes.set(title='one prompt')
  axes.grid(False)
  sets = {name: np.array(x) for name, x in numbers['sets'].items()}
  right.plot(
    sets['c'], sets['reinforce'] / sets['grpo'], '.', color=colors['first']
  )
  right.axvline(1, color=colors['second'], lw=1)
  right.axhline(1, color=colors['text'], lw=1, ls=':')
  right.set(yscale='log', xlabel='C(T)', title='sets of prompts')
  right.set_ylabel('least gradient² of REINFORCE / of GRPO')
  found = measure(numbers)
  return (
    'Where C(T) > 1 theory promises GRPO no gain; there it was no worse in '
    f'{found["conservative"].mean:.0%} of the cases with one prompt'
  )


EXPERIMENT = Experiment(
  'E11', 'the threshold C(T) = 1', CLAIMS, run, measure, draw
)
