"""What runs have left in their workdirs, as far as it can be read.

A run that is going on, or was stopped, or has left half a line, is a run too.
Only a folder without a run is refused. Runs with the same config but the seed
are one group.

A metric that is measured now and then has pauses all the time. What counts as
silence is longer than any pause before.
"""

import collections
from collections.abc import Sequence
import contextlib
import json
import os
import pathlib
from typing import Any
from typing import NamedTuple

import numpy as np

from grpo_jax import config as config_lib
from grpo_jax.lab.report import curves
from grpo_jax.lab.report import words
from grpo_jax.lab.report.types import Curve
from grpo_jax.run.keep import bucket
from grpo_jax.run.keep import metrics_file
from grpo_jax.run.keep import records
from grpo_jax.run.keep.metrics_file import Metrics


class Run(NamedTuple):
  """One run.

  Attributes:
    name: The end of its address that tells it from the runs read with it.
    path: Its workdir, or a copy of one that is in a bucket.
    saved: Its config, as JSON has it.
    config: The same; None if this version of the package cannot read it.
    metrics: Of each rollout.
    starts: What `versions.json` says of each start.
    troubles: Sentences about what could not be read, or went wrong.
  """

  name: str
  path: pathlib.Path
  saved: dict[str, Any]
  config: config_lib.Config | None
  metrics: Metrics
  starts: list[dict[str, Any]]
  troubles: list[str]

  @property
  def done(self) -> int:
    """Rollouts that have a line."""
    return int(self.metrics.steps[-1]) if len(self.metrics.steps) else 0


def runs(workdirs: Sequence[str]) -> list[Run]:
  """Reads workdirs, each of them once, under names that tell them apart.

  Raises:
    ValueError: One of them holds no run.
  """
  addresses = {_address(workdir): workdir for workdir in workdirs}
  return [
    run(workdir)._replace(name=name)
    for workdir, name in zip(addresses.values(), _names([*addresses]))
  ]


def run(workdir: str) -> Run:
  """Reads a workdir. The name of the run is that of its folder.

  Args:
    workdir: A directory, or the address of one in a bucket.

  Raises:
    ValueError: It holds no run, or its metrics cannot be read.
  """
  (name,) = _names([_address(workdir)])
  path = bucket.read_only(workdir)
  saved, troubles = records.config_of(path), []
  config = None
  try:
    config = config_lib.dataclass_from_dict(config_lib.Config, saved, 'config')
  except ValueError as error:
    troubles.append(
      f'This version of grpo_jax cannot read all of its config ({error}), so '
      'its method and its alarms are left out.'
    )
  found = metrics_file.read(path / 'metrics.jsonl')
  if not len(found.steps):
    troubles.append('It has no line in metrics.jsonl yet.')
  if found.broken:
    lines = 'A line' if found.broken == 1 else f'{found.broken} lines'
    troubles.append(
      f'{lines} of metrics.jsonl could not be read and '
      f'{"is" if found.broken == 1 else "are"} left out.'
    )
  if failure := _failure(path):
    troubles.append(f'A start ended with an error: {failure}')
  return Run(name, path, saved, config, found, _starts(path), troubles)


def _address(workdir: str) -> str:
  """Where a workdir is, from the root of the disk or from a bucket."""
  text = os.fspath(workdir)
  if not text:
    raise ValueError('A workdir is empty; give the workdir of a run.')
  if bucket.is_bucket(text):
    return text.rstrip('/')
  return pathlib.Path(os.path.abspath(text)).as_posix()


def _names(addresses: Sequence[str]) -> list[str]:
  """Of each address the shortest end that no other one has.

  >>> _names(['/runs/e1/seed0', '/runs/e2/seed0', '/runs/e2/seed1'])
  ['e1/seed0', 'e2/seed0', 'seed1']
  """
  ends = []
  for address in addresses:
    parts = address.split('/')
    ends.append(['/'.join(parts[-n:]) for n in range(1, len(parts) + 1)])
  number = collections.Counter(end for some in ends for end in some)
  return [
    next((end for end in some if end and number[end] == 1), address)
    for address, some in zip(addresses, ends)
  ]


def _starts(path: pathlib.Path) -> list[dict[str, Any]]:
  with contextlib.suppress(OSError, ValueError, RecursionError):
    found = json.loads((path / 'versions.json').read_text())
    if isinstance(found, list):
      return [start for start in found if isinstance(start, dict)]
  return []


def _failure(path: pathlib.Path) -> str:
  """The last line of a traceback that is newer than the last rollout; or ''."""
  with contextlib.suppress(OSError, ValueError):
    trace = path / 'traceback.txt'
    lines = path / 'metrics.jsonl'
    if lines.exists() and lines.stat().st_mtime > trace.stat().st_mtime:
      return ''
    said = trace.read_text().strip().splitlines()
    return said[-1] if said else ''
  return ''


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
  runs: list[Run]

  def curve(self, metric: str, most_points: int) -> Curve | None:
    """The curve of a metric; None if no run has a number."""
    points = [run.metrics.points(metric) for run in self.runs]
    return curves.make_curve(self.name, points, most_points)

  @property
  def first(self) -> Run:
    """The run that stands for all, where one is shown."""
    return self.runs[0]


def group_runs(runs: Sequence[Run]) -> tuple[list[Group], list[str]]:
  """Groups in the order of their first runs.

  Args:
    runs: At least one.

  Returns:
    The groups, and sentences about runs that are left out: of two with one seed
    and one config the longer counts, because they are not independent.
  """
  found: dict[str, dict[str, Run]] = {}
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
  groups = [
    sorted(seeds.values(), key=lambda run: str(run.saved.get('seed')))
    for seeds in found.values()
  ]
  return list(map(Group, _group_names(groups), groups)), said


def learned(run: Run) -> dict[str, Any]:
  """The fields of a run's config that change what is learned, but the seed."""
  # With the defaults of fields that an earlier version did not have.
  config = run.config or config_lib.Config()
  flat = records.flat(run.config) if run.config else config_lib.flat(run.saved)
  return {
    name: value
    for name, value in flat.items()
    if name != 'seed' and not config_lib.is_free(name, config)
  }


def differing(runs: Sequence[Run]) -> list[str]:
  """The fields that are not the same in all runs, those of `learned` alone."""
  fields = [learned(run) for run in runs]
  names = dict.fromkeys(name for one in fields for name in one)
  return [
    name
    for name in names
    if any(one.get(name) != fields[0].get(name) for one in fields)
  ]


def _group_names(groups: Sequence[Sequence[Run]]) -> list[str]:
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


_LEAST_NUMBERS = 3  # of a metric: with fewer its pauses are not known
_LEAST_ROLLOUTS = 5  # without a number
_PAUSES = 2  # silence is longer than so many of the longest pause
_MOST_SILENT = 6  # metrics in a sentence
_CLOCK = 'elapsed_secs'


class Silence(NamedTuple):
  """Metrics of a run that have their last number at the same rollout."""

  last: int  # this rollout
  since: int  # the first rollout without a number
  metrics: list[str]


def find_silences(run: Run) -> list[Silence]:
  """What has fallen silent, by the rollout at which it did."""
  steps = run.metrics.steps.tolist()
  by_last: dict[int, list[str]] = {}
  for name in run.metrics.values:
    last = silent_after(run, name)
    if last is not None and name != _CLOCK:
      by_last.setdefault(last, []).append(name)
  return [
    Silence(last, steps[steps.index(last) + 1], by_last[last])
    for last in sorted(by_last)
  ]


def silent_after(run: Run, name: str) -> int | None:
  """The last rollout with a number of a metric; None unless it fell silent."""
  steps, values = run.metrics.steps, run.metrics.values.get(name, np.empty(0))
  known = np.flatnonzero(np.isfinite(values))
  if len(known) < _LEAST_NUMBERS:
    return None
  silent = len(steps) - 1 - int(known[-1])
  pause = int(np.max(np.diff(known)))
  if silent < _LEAST_ROLLOUTS or silent <= _PAUSES * pause:
    return None
  return int(steps[known[-1]])


def silence_sentence(run: Run, silence: Silence) -> str:
  """What is silent, and since when.

  Args:
    run: The run.
    silence: One of `find_silences`.
  """
  names = [words.label(name) for name in silence.metrics]
  shown, more = names[:_MOST_SILENT], len(names) - _MOST_SILENT
  if more > 0:
    shown.append(words.plural(more, 'other metric'))
  listed = ' and '.join(filter(None, [', '.join(shown[:-1]), shown[-1]]))
  return (
    f'There is no number after rollout {silence.last:,} of {run.done:,} of: '
    f'{listed}. It was not finite, or there was nothing to measure any more.'
  )


def silence_ending(runs: Sequence[Run], name: str) -> str:
  """What the title of a chart says of silence; '' without any.

  Args:
    runs: Of the chart.
    name: Of the metric.
  """
  lasts = [
    last for run in runs if (last := silent_after(run, name)) is not None
  ]
  if not lasts:
    return ''
  when = f'until rollout {min(lasts):,}'
  if len({*lasts}) > 1:
    when = f'until rollouts {min(lasts):,} to {max(lasts):,}'
  measured = sum(bool(len(run.metrics.points(name)[0])) for run in runs)
  if len(lasts) == measured:
    return f' {when}'
  return f'; {len(lasts):,} of {measured:,} runs {when}'
