"""Studies: experiments of several runs, started by `grpo-jax study NAME`.

There are two kinds of study:

- `brakes`, `normalization`, `turns`, `staleness` and `phases` train runs, and
  continue them where they were;
- `papers`: small experiments on the claims of two papers, each with a verdict.

What they share lies beside them:

- `sweeps`: every arm with every seed, and on where it stopped;
- `claims`: a claim, what was measured of it, and the verdict;
- `figures`, `evidence`: an experiment as pictures, and its numbers as tables;
- `story`: the chapters of the page for readers;
- `pages`: text, tables and pages of all that;
- `trained`: what studies that train have measured, read for these pages.
"""

import importlib
from typing import Any

STUDIES = (
  'brakes',
  'brakes_updates',
  'brakes_smollm2',
  'normalization',
  'normalization_smollm2',
  'turns',
  'staleness',
  'phases',
)
EXPERIMENTS = {
  'coasting_ratio': 'coasting',
  'coasting_distance': 'coasting',
  'momentum_split': 'coasting',
  'reward_scale': 'scales',
  'transformer_scale': 'transformer',
  'reward_jump': 'scales',
  'transformer_jump': 'transformer',
  'shared_prefix': 'coefficients',
  'transformer_prefix': 'transformer',
  'surrogate_value': 'coefficients',
  'normalized_rate': 'convergence',
  'curvature': 'geometry',
  'rate_exponents': 'convergence',
  'normalized_optimizer': 'normalized_optimizer',
  'threshold': 'convergence',
  'finite_group': 'coefficients',
  'interaction': 'geometry',
  'fisher': 'geometry',
  'other_optimizers': 'other_optimizers',
}
"""By name, in the order of their labels: the module of `papers` that has it."""

__all__ = ('EXPERIMENTS', 'STUDIES', 'is_experiment', 'study')


def is_experiment(name: str) -> bool:
  """Whether a name means one or `all` of the experiments of `papers`.

  Args:
    name: One of `STUDIES` or `EXPERIMENTS`, or 'all'.

  Raises:
    ValueError: There is no study of this name.
  """
  if name in STUDIES:
    return False
  if name not in (*EXPERIMENTS, 'all'):
    known = ', '.join((*STUDIES, *EXPERIMENTS, 'all'))
    raise ValueError(f'{name!r} is no study; the studies are: {known}.')
  return True


def study(name: str) -> Any:
  """A study that trains runs.

  Args:
    name: One of `STUDIES`.

  Returns:
    A `sweeps.Study`.

  >>> study('brakes_updates').experiment.label
  'E3b'
  """
  # Only now: a study that trains imports all of the training.
  module = importlib.import_module(f'{__name__}.{name.partition("_")[0]}')
  return module.study(name)
