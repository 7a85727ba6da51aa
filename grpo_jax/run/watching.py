"""What is counted from rollout to rollout, to say when something is wrong.

Updates that are all refused, a metric that no longer improves, reward functions
that always fail, and programs that are compiled in the midst of a run.
"""

import collections
from collections.abc import Hashable
from collections.abc import Mapping
import functools
import math
from typing import NamedTuple

import jax

from grpo_jax.episodes.types import Rollout
from grpo_jax.run.build.specs import EarlyStopSpec

_EVENT = '/jax/core/compile/backend_compile_duration'
_REARM_ROLLOUTS = 10  # without failures before they may be told again
_SETTLED = 3  # rollouts, in which all programs of a run are compiled
_LEAST_SECS = 1.0  # shorter compilations are not worth a warning
# Shapes that change during a run only if the config has several widths.
_OF_WIDTHS = frozenset(('columns of a row', 'completion positions'))


class Refused(NamedTuple):
  """How many rollouts in a row have had no update that was finite.

  Attributes:
    rollouts: The number.
    part: What was not finite first in most updates of the last of them:
      `'loss'`, `'gradient'` or `'update'`.
    ended: How many of these rollouts there were when the run last ended for
      them; 0 if it has not.
  """

  rollouts: int = 0
  part: str = ''
  ended: int = 0

  def counted(self, measured: Mapping[str, float | None]) -> 'Refused':
    """With one rollout more, of which these are the metrics."""
    parts = 'loss', 'gradient', 'update'
    shares = {part: measured.get(f'nonfinite_{part}') or 0.0 for part in parts}
    # Rounding: thirds may add up to a little less than 1.
    if sum(shares.values()) <= 0.999:
      return Refused()
    part = max(shares, key=shares.__getitem__)
    return self._replace(rollouts=self.rollouts + 1, part=part)

  def reason_to_end(self, most: int) -> str:
    """Why a run ends before its last rollout; `''` if it goes on.

    Args:
      most: The config's `learner.nonfinite_rollouts`. A run that is started
        again after this error gets as many rollouts more.
    """
    if not most or self.rollouts - self.ended < most:
      return ''
    return (
      f'No {self._what()} The run is saved; learner.nonfinite_rollouts says '
      'after how many such rollouts it stops.'
    )

  def for_next_start(self, most: int) -> 'Refused':
    """What a checkpoint holds, so that not every start ends at once."""
    ends = bool(self.reason_to_end(most))
    return self._replace(ended=self.rollouts) if ends else self

  def at_the_end(self, most: int) -> str:
    """Why a run that has done all its rollouts has failed; `''` if it has not.

    Args:
      most: The config's `learner.nonfinite_rollouts`.
    """
    if not most or not self.rollouts:
      return ''
    return (
      f'The run is done, but no {self._what()} The run is saved; '
      'learner.nonfinite_rollouts=0 accepts such an end.'
    )

  def _what(self) -> str:
    """What both sentences say, without the first word."""
    number = f'{self.rollouts} rollouts' if self.rollouts > 1 else 'rollout'
    return (
      f'update of the last {number} was finite (first of all the {self.part}), '
      'so nothing was learned; look at the reward, the method and optim.lr.'
    )


class Waiting(NamedTuple):
  """How long a metric has not improved; a checkpoint keeps it.

  Attributes:
    metric: Its name; '' before it was measured.
    mode: 'max' or 'min', which is better.
    best: Its best value so far.
    step: Rollouts done when that was measured.
    since: How many measurements there were after it.
  """

  metric: str = ''
  mode: str = ''
  best: float = 0.0
  step: int = 0
  since: int = 0

  def counted(
    self, spec: EarlyStopSpec, step: int, measured: Mapping[str, float | None]
  ) -> 'Waiting':
    """With what was measured behind a rollout, if that is a finite number.

    Args:
      spec: Names the metric. Where it names another one than before, or the
        other mode, the count begins anew.
      step: Rollouts done.
      measured: Metrics by name.
    """
    value = measured.get(spec.metric)
    if value is None or not math.isfinite(value):
      return self
    gain = value - self.best if spec.mode == 'max' else self.best - value
    is_first = (self.metric, self.mode) != (spec.metric, spec.mode)
    if is_first or gain > spec.least_improvement:
      return Waiting(spec.metric, spec.mode, float(value), step)
    return self._replace(since=self.since + 1)

  def reason_to_end(self, spec: EarlyStopSpec) -> str:
    """Why a run ends before its last rollout; '' if it goes on."""
    if not spec.metric or (self.metric, self.mode) != (spec.metric, spec.mode):
      return ''
    if self.since < spec.patience:
      return ''
    by = f' by more than {spec.least_improvement:g}' * (
      spec.least_improvement > 0
    )
    none = 'the one measurement since then is not better'
    if self.since > 1:
      none = f'none of the {self.since} measurements since then is better'
    return (
      f'The run has ended early: {self.metric} was {self.best:.6g} after '
      f'rollout {self.step}, and {none}{by}. '
      f'early_stop.patience={self.since + 1} or more goes on.'
    )


def warning_of_metric(spec: EarlyStopSpec, waiting: Waiting, step: int) -> str:
  """What to warn of behind the first rollout; '' if there is nothing.

  A method of the user's may have metrics of any name, so that no start can tell
  a misspelt one. What is measured in evaluations may come later.

  Args:
    spec: Names the metric.
    waiting: With the metrics of this rollout.
    step: Rollouts done.
  """
  if (
    step != 1
    or waiting.metric == spec.metric
    or spec.metric.startswith('heldout_')
  ):
    return ''
  return (
    f'early_stop.metric={spec.metric!r} is none of the metrics of the first '
    'rollout; as long as it is not measured, the run does not end early.'
  )


class Failures:
  """Warns when a reward function fails on all completions, or an environment.

  A reward function is told again only after a rollout on some of which it has
  not failed. Each failed episode counts; they are told again after ten rollouts
  without any.
  """

  def __init__(self):
    self._warned: set[str] = set()
    self._waits = 0  # rollouts until failed episodes may be told again

  def warnings(
    self, rollout: Rollout, measured: Mapping[str, float | None]
  ) -> list[str]:
    """What to warn of after a rollout.

    Args:
      rollout: Trained on.
      measured: Its metrics; `reward/<name>_failed` may count further
        completions, which were drawn and are not trained on.

    Returns:
      A sentence for each function of which all calls have begun to fail, and
      one if episodes have.
    """
    sentences = self._episodes(rollout)
    for place, name in enumerate(rollout.reward_names):
      if measured.get(f'reward/{name}_failed') != 1.0:
        self._warned.discard(name)
      elif name not in self._warned:
        self._warned.add(name)
        assert rollout.failures is not None  # they were counted
        reasons = collections.Counter(rollout.failures[..., place].flat)
        (reason, number), *_ = reasons.most_common(1)
        sentences.append(
          f'The reward {name} has failed on all completions of this rollout, on'
          f' {number} of {rollout.length.size} by: {reason}; look at the reward'
          ' function, and at the limits in config.workers.'
        )
    return sentences

  def _episodes(self, rollout: Rollout) -> list[str]:
    """A sentence if episodes have begun to fail."""
    every = [one.failure for group in rollout.accounts for one in group]
    reasons = collections.Counter(filter(None, every))
    if not reasons:
      self._waits = max(0, self._waits - 1)
      return []
    is_told, self._waits = self._waits > 0, _REARM_ROLLOUTS
    if is_told:
      return []
    (reason, number), *_ = reasons.most_common(1)
    return [
      f'{reasons.total()} of the {len(every)} episodes of this rollout have '
      f'failed, {number} of them by: {reason}; they are left out, and are no '
      'rewards of 0. Look at the environment; the metric env_failed goes on to '
      'count them.'
    ]


@functools.cache
def _total() -> list[float]:
  """The seconds that XLA has compiled in this process, in a list of one."""
  total = [0.0]

  def heard(event: str, duration_secs: float, **_) -> None:
    if event == _EVENT:
      total[0] += duration_secs

  # Once per process: a listener cannot be taken away again.
  jax.monitoring.register_event_duration_secs_listener(heard)
  return total


class Compilations:
  """Watches one start of a run."""

  def __init__(self):
    self._rollouts, self._secs = 0, _total()[0]
    self._seen: dict[str, list[Hashable]] = {}

  def warning(self, shapes: Mapping[str, Hashable]) -> str:
    """What to say after a rollout; `''` if nothing noteworthy was compiled.

    Args:
      shapes: The sizes that the programs of the rollout were compiled for, by
        words for them.
    """
    secs, self._secs = _total()[0] - self._secs, _total()[0]
    self._rollouts += 1
    changes, advice = [], ''
    for name, size in shapes.items():
      seen = self._seen.setdefault(name, [])
      if size not in seen:
        if seen:
          before = ', '.join(str(one) for one in seen)
          changes.append(f'{name} {size} (before: {before})')
          if name in _OF_WIDTHS:
            advice = (
              ' A single width in data.prompt_buckets and '
              'data.completion_buckets needs one compilation.'
            )
        seen.append(size)
    if self._rollouts <= _SETTLED or secs < _LEAST_SECS:
      return ''
    cause = 'in a program other than the update'
    if changes:
      cause = f'because of new shapes: {"; ".join(changes)}'
    return f'This rollout spent {secs:.0f} s on compiling, {cause}.{advice}'
