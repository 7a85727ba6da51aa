"""Studies: experiments of several runs, started by `grpo-jax study NAME`.

There are two kinds of study:

- `brakes` and `normalization` train runs, and continue them where they were;
- `papers`: small experiments on the claims of two papers, each with a verdict.

What they share lies beside them:

- `sweeps`: every arm with every seed, and on where it stopped;
- `claims`: a claim, what was measured of it, and the verdict;
- `figures`, `pages`: experiments as pictures, and as text and files.
"""

from collections.abc import Callable
import functools
import importlib
from typing import Any
from typing import NamedTuple


class Study(NamedTuple):
  """What the command line needs of a study that trains runs.

  Attributes:
    run: `(config, workdir, seeds, steps, only) -> summary`. Does the runs that
      are not done yet; see `brakes.run`.
    show: Prints a summary for a person.
    to_json: A summary as a dict that JSON can hold.
  """

  run: Callable[..., Any]
  show: Callable[[Any], None]
  to_json: Callable[[Any], dict[str, Any]]


STUDIES = (
  'brakes',
  'brakes_updates',
  'brakes_smollm2',
  'normalization',
  'normalization_smollm2',
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
}
"""By name, in the order of their labels: the module of `papers` that has it."""

__all__ = ('EXPERIMENTS', 'STUDIES', 'Study', 'is_experiment', 'named')


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


def named(name: str) -> Study:
  """The study of this name, one of `STUDIES`.

  >>> named('brakes_updates').run.keywords
  {'name': 'brakes_updates'}
  """
  # Only now: a study that trains imports all of the training.
  folder, _, _ = name.partition('_')
  study = importlib.import_module(f'grpo_jax.lab.studies.{folder}')
  run = functools.partial(study.run, name=name)
  return Study(run, study.show, study.to_json)
