"""E9: normalisation changes the exponent of convergence, not a constant."""

from typing import Any

import numpy as np

from grpo_jax.lab.studies.claims import Claim
from grpo_jax.lab.studies.claims import Experiment
from grpo_jax.lab.studies.claims import Measured
from grpo_jax.lab.studies.papers import _settings

START = 1e-4, 3e-4, 1e-3, 3e-3
_ANSWERS, _STEPS = 4, 20_000
_RATES = {'reinforce': 1.0, 'grpo': 0.5}

CLAIMS = {
  'reinforce_tail': Claim(
    'The failure rate (1 - success rate) of REINFORCE falls as 1 / t (slope '
    'of its log against log t).',
    'derived',
    -1.03,
    -0.97,
  ),
  'grpo_tail': Claim(
    'The failure rate of GRPO falls as 1 / t^2 (slope of its log against log '
    't).',
    'derived',
    -2.03,
    -1.97,
  ),
  'reinforce_escape': Claim(
    'REINFORCE leaves a small success rate p after a time ~ 1 / p (slope of '
    'log time against log p).',
    'derived',
    -1.03,
    -0.97,
  ),
  'grpo_escape': Claim(
    'GRPO leaves a small success rate p after a time ~ 1 / sqrt(p) (slope of '
    'log time against log p).',
    'derived',
    -0.53,
    -0.47,
  ),
}


def run(full: bool = False) -> dict[str, Any]:
  """Trains one prompt from several small success rates, with both methods.

  Args:
    full: Not used: the experiment is exact.

  Returns:
    For each method the steps to a success rate of 1/2 from each start, and
    failures from a start of 1/4 at a few steps.
  """
  del full
  at = np.unique(np.geomspace(10, _STEPS, 40).astype(int))
  found = {'start': START, 'at': at.tolist()}
  for name, rate in _RATES.items():
    path = _settings.train(
      (*START, 0.25), _ANSWERS, rate, _STEPS, name == 'grpo'
    )
    found[name] = {
      'escape': np.argmax(path[:, :-1] >= 0.5, axis=0).tolist(),
      'failures': (1 - path[at, -1]).tolist(),
    }
  return found


def _slope(x, y) -> float:
  return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def measure(numbers) -> dict[str, Measured]:
  """See `Experiment`."""
  at, found = np.array(numbers['at']), {}
  late = at >= at[-1] / 10
  for name in _RATES:
    failures = np.array(numbers[name]['failures'])
    escape = numbers[name]['escape']
    found[f'{name}_tail'] = Measured(_slope(at[late], failures[late]))
    found[f'{name}_escape'] = Measured(_slope(numbers['start'], escape))
  return found


def draw(numbers, figure, colors) -> str:
  """See `Experiment`."""
  left, right = figure.subplots(1, 2)
  found = measure(numbers)
  for name, color in (('reinforce', 'first'), ('grpo', 'second')):
    text = {'reinforce': 'REINFORCE', 'grpo': 'GRPO'}[name]
    for axes, x, y, of in (
      (left, numbers['at'], numbers[name]['failures'], 'tail'),
      (right, numbers['start'], numbers[name]['escape'], 'escape'),
    ):
      slope = found[f'{name}_{of}'].mean
      label = f'{text}: slope {slope:.2f}'
      axes.plot(x, y, 'o-', ms=3.5, color=colors[color], label=label)
  left.set(xscale='log', yscale='log', xlabel='steps', ylabel='failure rate')
  right.set(xscale='log', yscale='log', xlabel='success rate at the start')
  right.set_ylabel('steps until half succeed')
  left.legend()
  right.legend()
  return (
    f'Failures fall as t^{found["grpo_tail"].mean:.2f} with a division by the '
    f'deviation, as t^{found["reinforce_tail"].mean:.2f} without'
  )


EXPERIMENT = Experiment(
  'E9', 'exponents of convergence', CLAIMS, run, measure, draw
)
