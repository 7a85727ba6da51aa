"""Compilations in the midst of a run, and what changed before them."""

from collections.abc import Hashable
from collections.abc import Mapping
import functools

import jax

_EVENT = '/jax/core/compile/backend_compile_duration'
_SETTLED = 3  # rollouts, in which all programs of a run are compiled
_LEAST_SECS = 1.0  # shorter compilations are not worth a warning
# Shapes that change during a run only if the config has several widths.
_OF_WIDTHS = frozenset(('columns of a row', 'completion positions'))


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
