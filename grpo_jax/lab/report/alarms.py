"""The section about alarms: when which began, found again from the metrics."""

from collections.abc import Iterator
from collections.abc import Sequence
from typing import NamedTuple

from grpo_jax import monitor
from grpo_jax.lab.report import meanings
from grpo_jax.lab.report import read
from grpo_jax.lab.report import silence
from grpo_jax.lab.report import words
from grpo_jax.lab.report.groups import Group
from grpo_jax.lab.report.sections import Charts
from grpo_jax.lab.report.types import Part
from grpo_jax.lab.report.types import Section
from grpo_jax.lab.report.types import Table
from grpo_jax.lab.report.types import Text
from grpo_jax.lab.report.types import Timeline
from grpo_jax.run.build import about

_LISTED = 8  # rollouts of one kind
_SILENT = 'no more numbers'
_NOTE = (
  'Found again from metrics.jsonl with the limits of each config. An alarm '
  'speaks when its condition begins, and again only after ten rollouts without '
  'it. A value that was not finite stands there as null, and raises none here; '
  'a metric that has no numbers any more is marked where they end.'
)


class _Alarm(NamedTuple):
  """An alarm of a run."""

  kind: str  # alarms of one kind share a line of the timeline
  step: int
  sentence: str


def section(groups: Sequence[Group], charts: Charts) -> Section:
  """All alarms over the rollouts, and what each said first."""
  rows: dict[str, list[float]] = {}
  # Of each run and kind: the rollouts, and what was said first.
  said: dict[tuple[str, str], tuple[list[int], str]] = {}
  runs = [(group, run) for group in groups for run in group.runs]
  for group, run in runs:
    for kind, step, sentence in (*_begun(run), *_silences(run)):
      row = f'{kind} · {group.name}' if len(groups) > 1 else kind
      rows.setdefault(row, []).append(step)
      said.setdefault((run.name, kind), ([], sentence))[0].append(step)
  unknown = sum(run.config is None for _, run in runs)
  parts: list[Part] = []
  if not said and not unknown:
    parts.append(Text('None: no metric was beyond its limit in config.log.'))
  if unknown:
    left = words.plural(unknown, 'run')
    parts.append(Text(f'The config of {left} cannot be read here.', 'warning'))
  if said:
    number = sum(len(steps) for steps, _ in said.values())
    title = f'{words.plural(number, "alarm")}, by rollout'
    last = max(1, *(run.done for _, run in runs))
    parts.append(Timeline(title, list(rows.items()), 0, last))
    listed = [
      (name, _listed(steps), sentence)
      for (name, _), (steps, sentence) in said.items()
    ]
    head = ('run', 'rollouts', 'alarm')
    parts.append(Table('What each said first', head, listed))
  problems = charts.of(
    [name for name in monitor.GROUPS['problems'] if name in charts.left]
  )
  return Section('Alarms', [*parts, *problems, Text(_NOTE, 'note')])


def _begun(run: read.Run) -> Iterator[_Alarm]:
  """The alarms that the terminal has shown; none without a config."""
  if run.config is None:
    return
  replays = bool(run.starts and run.starts[-1].get('replays'))
  judge = monitor.Alarms(about.monitored(run.config).limits, replays)
  for step, scalars in run.metrics.records():
    for metric, sentence in judge.begun(scalars):
      yield _Alarm(meanings.label(metric), step, sentence)


def _silences(run: read.Run) -> Iterator[_Alarm]:
  """Where metrics stop having numbers, which needs no config to be seen."""
  for one in silence.of_run(run):
    # Each has a sentence of its own, which names its metrics.
    yield _Alarm(_SILENT, one.since, silence.sentence(run, one))


def _listed(steps: Sequence[int]) -> str:
  """The first of some rollouts, and how many more there are."""
  shown = ', '.join(f'{step:,}' for step in steps[:_LISTED])
  more = len(steps) - _LISTED
  return f'{shown} and {more:,} more' if more > 0 else shown
