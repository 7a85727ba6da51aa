"""Metrics that stop having numbers before their run ends.

`metrics.jsonl` has null where a number was not finite and where there was
nothing to measure, so a run that breaks leaves curves that end, and nothing
else. A metric that is measured now and then has such pauses all the time. What
counts as silence is longer than any pause before.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from grpo_jax.lab.report import meanings
from grpo_jax.lab.report import read
from grpo_jax.lab.report import words

_LEAST_NUMBERS = 3  # of a metric: with fewer its pauses are not known
_LEAST_ROLLOUTS = 5  # without a number
_PAUSES = 2  # silence is longer than so many of the longest pause
_MOST_NAMES = 6  # in a sentence
_CLOCK = 'elapsed_secs'


class Silence(NamedTuple):
  """Metrics of a run that have their last number at the same rollout."""

  last: int  # this rollout
  since: int  # the first rollout without a number
  metrics: list[str]


def of_run(run: read.Run) -> list[Silence]:
  """What has fallen silent, by the rollout at which it did."""
  steps = run.metrics.steps.tolist()
  by_last: dict[int, list[str]] = {}
  for name in run.metrics.values:
    last = until(run, name)
    if last is not None and name != _CLOCK:
      by_last.setdefault(last, []).append(name)
  return [
    Silence(last, steps[steps.index(last) + 1], by_last[last])
    for last in sorted(by_last)
  ]


def until(run: read.Run, name: str) -> int | None:
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


def sentence(run: read.Run, silence: Silence) -> str:
  """What is silent, and since when.

  Args:
    run: The run.
    silence: One of `of_run`.
  """
  names = [meanings.label(name) for name in silence.metrics]
  shown, more = names[:_MOST_NAMES], len(names) - _MOST_NAMES
  if more > 0:
    shown.append(f'{words.plural(more, "other metric")}')
  listed = ' and '.join(filter(None, [', '.join(shown[:-1]), shown[-1]]))
  return (
    f'There is no number after rollout {silence.last:,} of {run.done:,} of: '
    f'{listed}. It was not finite, or there was nothing to measure any more.'
  )


def ending(runs: Sequence[read.Run], name: str) -> str:
  """What the title of a chart says of silence; '' without any.

  Args:
    runs: Of the chart.
    name: Of the metric.
  """
  lasts = [last for run in runs if (last := until(run, name)) is not None]
  if not lasts:
    return ''
  first, last = min(lasts), max(lasts)
  when = f'until rollout {first:,}'
  if last > first:
    when = f'until rollouts {first:,} to {last:,}'
  measured = sum(bool(len(run.metrics.points(name)[0])) for run in runs)
  if len(lasts) == measured:
    return f' {when}'
  return f'; {len(lasts):,} of {measured:,} runs {when}'
