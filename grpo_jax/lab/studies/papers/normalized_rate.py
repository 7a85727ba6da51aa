"""E8: the two forms of the theorem on GRPO's rate of convergence."""

from typing import Any

import numpy as np

from grpo_jax.lab.studies.claims import GE
from grpo_jax.lab.studies.claims import Claim
from grpo_jax.lab.studies.claims import Experiment
from grpo_jax.lab.studies.claims import Measured
from grpo_jax.lab.studies.papers import _settings

START = 0.02, 0.1, 0.25, 0.5, 0.9
_ANSWERS, _STEPS = 4, 5000

CLAIMS = {
  'reinforce': Claim(
    'T3.1: the squared gradients of REINFORCE add up to no more than its bound '
    '(largest sum / bound).',
    f'{GE}, theorem 3.1',
    high=1,
  ),
  'sum_form': Claim(
    'T3.2 as the main text has it: the squared gradients of GRPO add up to no '
    'more than the bound times C(T) (largest sum / bound).',
    f'{GE}, theorem 3.2, main text',
    high=1,
  ),
  'min_form': Claim(
    'T3.2 as the appendix proves it: the least squared gradient is no more '
    'than the bound times C(T) / T (largest ratio).',
    f'{GE}, theorem 3.2, appendix',
    high=1,
  ),
}


def run(full: bool = False) -> dict[str, Any]:
  """Trains one prompt with both methods at the rates of the theorems.

  Args:
    full: Not used: the experiment is exact.

  Returns:
    Success probabilities at every step: `reinforce[t][s]`, `grpo[t][s]`.
  """
  del full
  args = START, _ANSWERS
  return {
    'start': START,
    'reinforce': _settings.train(*args, 1.0, _STEPS, False).tolist(),
    'grpo': _settings.train(*args, 0.5, _STEPS, True).tolist(),
  }


def _ratios(numbers) -> dict[str, np.ndarray]:
  """What each form bounds over its bound, [T, S], for T = 1, 2, ... steps."""
  start, plain, grpo = (
    np.array(numbers[name]) for name in ('start', 'reinforce', 'grpo')
  )
  bound, steps = 2 * (1 - start), np.arange(1, len(grpo))[:, None]
  squares = [
    _settings.gradient_squared(path[:-1], _ANSWERS) for path in (plain, grpo)
  ]
  # C(T) = 8 / (3 T) times the sum of the deviations.
  c = 8 / (3 * steps) * np.cumsum(_settings.deviation(grpo[:-1]), axis=0)
  return {
    'reinforce': np.cumsum(squares[0], axis=0) / bound,
    'sum_form': np.cumsum(squares[1], axis=0) / (bound * c),
    'min_form': np.minimum.accumulate(squares[1]) / (bound * c / steps),
  }


def measure(numbers) -> dict[str, Measured]:
  """See `Experiment`."""
  ratios = _ratios(numbers)
  found = {name: Measured(float(x.max())) for name, x in ratios.items()}
  over = ratios['sum_form'] > 1
  if over.any():
    # The fewest steps, and the start that needs them.
    first = np.where(over.any(0), over.argmax(0) + 1, len(over) + 1)
    at = int(first.argmin())
    found['sum_form'] = found['sum_form']._replace(
      example=f'Smallest case: one prompt, {_ANSWERS} answers, success '
      f'{numbers["start"][at]:g} at the start: broken from step {first[at]} on.'
    )
  return found


def draw(numbers, figure, colors) -> str:
  """See `Experiment`."""
  axes, ratios = figure.subplots(), _ratios(numbers)
  steps = np.arange(1, len(ratios['sum_form']) + 1)
  for name, color, label in (
    ('sum_form', 'second', 'GRPO, sum form (main text)'),
    ('min_form', 'third', 'GRPO, least form (appendix)'),
    ('reinforce', 'first', 'REINFORCE, sum form'),
  ):
    for s, curve in enumerate(ratios[name].T):
      label_of = label if s == 0 else None
      axes.plot(steps, curve, color=colors[color], label=label_of, alpha=0.8)
  axes.axhline(1, color=colors['text'], ls=':', lw=1)
  axes.set(xscale='log', yscale='log', ylim=(1e-4, 100), xlabel='steps')
  axes.set_ylabel('left side / bound (above 1: broken)')
  axes.legend(
    loc='upper left',
    title=f'starts {", ".join(f"{p:g}" for p in numbers["start"])}',
  )
  found = measure(numbers)
  return (
    'Left side / bound of theorem 3.2, at most: '
    f'{found["sum_form"].mean:.0f}-fold in the sum form, '
    f'{found["min_form"].mean:.2g}-fold in the form with the least gradient'
  )


EXPERIMENT = Experiment(
  'E8', 'two forms of the rate of GRPO', CLAIMS, run, measure, draw
)
