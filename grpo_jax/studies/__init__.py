"""Studies: experiments of several runs, started by `grpo-jax study NAME`.

A study is a folder beside this file. What two studies share lies here:

- `runs`: the warm-up that runs of one seed share, and their compiled programs;
- `tables`: numbers, intervals and tables as text.
"""

from collections.abc import Callable
from typing import Any
from typing import NamedTuple

from grpo_jax.studies import brakes


class Study(NamedTuple):
  """What the command line needs of a study.

  Attributes:
    run: `(config, workdir, seeds, steps, only) -> summary`. Does the runs that
      are not done yet; see `brakes.run`.
    show: Prints a summary for a person.
    to_json: A summary as a dict that JSON can hold.
  """

  run: Callable[..., Any]
  show: Callable[[Any], None]
  to_json: Callable[[Any], dict[str, Any]]


STUDIES = {'brakes': Study(brakes.run, brakes.show, brakes.to_json)}

__all__ = ('STUDIES', 'Study', 'brakes', 'named')


def named(name: str) -> Study:
  """The study of this name.

  Args:
    name: A key of `STUDIES`.

  Returns:
    A `Study`.

  Raises:
    ValueError: There is no study of this name.

  >>> named('brakes').run.__name__
  'run'
  """
  if name not in STUDIES:
    raise ValueError(
      f'{name!r} is no study; the studies are: {", ".join(STUDIES)}.'
    )
  return STUDIES[name]
