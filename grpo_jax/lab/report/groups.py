"""Runs with the same config but the seed, as one group; and what differs."""

from collections.abc import Sequence
import json
from typing import Any
from typing import NamedTuple

from grpo_jax import config as config_lib
from grpo_jax.lab.report import curves
from grpo_jax.lab.report import read
from grpo_jax.lab.report.types import Curve
from grpo_jax.run.keep import records

_MOST_FIELDS = 2  # that differ, in a name
_MOST_NAMES = 4  # of runs
_LONGEST = 28  # of a value in a name


class Group(NamedTuple):
  """Runs that differ in their seeds alone.

  Attributes:
    name: By what the group differs from others; of a single one, its run's.
    runs: One for each seed.
  """

  name: str
  runs: list[read.Run]

  def curve(self, metric: str, most_points: int) -> Curve | None:
    """The curve of a metric; None if no run has a number."""
    points = [run.metrics.points(metric) for run in self.runs]
    return curves.of_runs(self.name, points, most_points)

  @property
  def first(self) -> read.Run:
    """The run that stands for all, where one is shown."""
    return self.runs[0]


def of_runs(runs: Sequence[read.Run]) -> tuple[list[Group], list[str]]:
  """Groups in the order of their first runs.

  Args:
    runs: At least one.

  Returns:
    The groups, and sentences about runs that are left out: of two with one seed
    and one config the longer counts, because they are not independent.
  """
  found: dict[str, dict[str, read.Run]] = {}
  said = []
  for run in runs:
    key = json.dumps(learned(run), sort_keys=True, default=str)
    seeds = found.setdefault(key, {})
    # As text, because a config may hold anything.
    seed = json.dumps(run.saved.get('seed'))
    if seed in seeds:
      pair = sorted((seeds[seed], run), key=lambda one: one.done)
      run = pair[1]
      said.append(
        f'{pair[0].name} and {run.name} have the same config and the same seed '
        f'({seed}), so only {run.name} counts.'
      )
    seeds[seed] = run
  of_each = [
    sorted(seeds.values(), key=lambda run: str(run.saved.get('seed')))
    for seeds in found.values()
  ]
  names = _names(of_each)
  return [Group(*pair) for pair in zip(names, of_each)], said


def learned(run: read.Run) -> dict[str, Any]:
  """The fields of a run's config that change what is learned, but the seed."""
  # With the defaults of fields that an earlier version did not have.
  config = run.config or config_lib.Config()
  flat = config_lib.flat(run.saved)
  if run.config:
    flat = records.flat(run.config)
  return {
    name: value
    for name, value in flat.items()
    if name != 'seed' and not config_lib.is_free(name, config)
  }


def differing(runs: Sequence[read.Run]) -> list[str]:
  """The fields that are not the same in all runs, those of `learned` alone."""
  fields = [learned(run) for run in runs]
  names = dict.fromkeys(name for one in fields for name in one)
  return [
    name
    for name in names
    if any(one.get(name) != fields[0].get(name) for one in fields)
  ]


def _names(groups: Sequence[Sequence[read.Run]]) -> list[str]:
  """A short name for each group: what all runs of a single one are called.

  Several are told apart by their first runs.
  """
  if len(groups) == 1:
    more = ', ...' if len(groups[0]) > _MOST_NAMES else ''
    return [', '.join(run.name for run in groups[0][:_MOST_NAMES]) + more]
  runs = [group[0] for group in groups]
  fields = differing(runs)
  # The arguments of a method differ with the method, which says enough.
  if 'learner.method' in fields:
    fields = [x for x in fields if not x.startswith('learner.method_kwargs')]
  names = [
    ', '.join(
      f'{field.rpartition(".")[2]}={learned(run).get(field)}'
      for field in fields
    )
    for run in runs
  ]
  short = all(len(name) <= _LONGEST * len(fields) for name in names)
  if len(fields) <= _MOST_FIELDS and short and len({*names}) == len(names):
    return names
  return [run.name for run in runs]
