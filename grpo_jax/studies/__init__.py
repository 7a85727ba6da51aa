"""Studies: experiments of several runs, whose tables the README shows."""

from grpo_jax.studies._brakes import ARMS
from grpo_jax.studies._brakes import brakes
from grpo_jax.studies._summary import Arm
from grpo_jax.studies._summary import Interval
from grpo_jax.studies._summary import Outcome
from grpo_jax.studies._summary import Summary
from grpo_jax.studies._summary import summarise
from grpo_jax.studies._summary import to_json
from grpo_jax.studies._table import show

STUDIES = {'brakes': brakes}

__all__ = (
  'ARMS',
  'STUDIES',
  'Arm',
  'Interval',
  'Outcome',
  'Summary',
  'brakes',
  'named',
  'show',
  'summarise',
  'to_json',
)


def named(name: str):
  """The study of a name.

  Args:
    name: As typed.

  Returns:
    A function `(config, workdir, seeds, steps, only) -> Summary`.

  Raises:
    ValueError: There is none of this name.
  """
  if name not in STUDIES:
    raise ValueError(
      f'{name!r} is no study; the studies are: {", ".join(STUDIES)}.'
    )
  return STUDIES[name]
