"""Which of the displays a run has, and the two simple ones."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import math
import os
import sys
from typing import Protocol

from grpo_jax.monitor import _format
from grpo_jax.monitor._samples import Sample
from grpo_jax.monitor._samples import shorten

Scalars = Mapping[str, float | None]

_LINES = 200  # about as many a plain log has, however long the run
_PROMPT, _COMPLETION = 60, 120  # columns of a sample in a plain log
_SHOWN = {
  'reward': 'reward',
  'accuracy': 'accuracy',
  'heldout_accuracy': 'held-out',
  'kl_old_k3': 'kl',
  'entropy': 'entropy',
  'clipped': 'clip',
  'overshoot': 'overshoot',
  'overshoot_carried': 'carried',
  'overshoot_fresh': 'fresh',
  'sample_tokens_per_sec': 'tokens/s',
}


class Display(Protocol):
  """What `Monitor` draws on."""

  def write(
    self, step: int, scalars: Scalars, samples: Sequence[Sample]
  ) -> None:
    """One rollout is done."""

  def line(self, text: str) -> None:
    """Something to know."""

  def progress(
    self, label: str, step: int, total: int, scalars: Scalars
  ) -> None:
    """One step of something else than rollouts, such as the warm-up."""

  def warn(self, step: int | None, text: str) -> None:
    """A warning, after `step` rollouts."""

  def close(self) -> None:
    """Leaves the terminal as it was."""


class Nothing:
  """Shows nothing."""

  def write(self, step, scalars, samples) -> None:
    """Does nothing, as the other methods."""

  def line(self, text) -> None:  # noqa: D102
    pass

  def progress(self, label, step, total, scalars) -> None:  # noqa: D102
    pass

  def warn(self, step, text) -> None:  # noqa: D102
    pass

  def close(self) -> None:  # noqa: D102
    pass


class Plain:
  """Lines on standard error, for logs.

  A run of up to 200 rollouts has a line for each; a longer one about 200 lines,
  and always the first, the last and those of evaluations, which show samples.

  Args:
    total_steps: Rollouts of the whole run.
  """

  def __init__(self, total_steps: int):
    self._total = total_steps
    self._every = max(1, math.ceil(total_steps / _LINES))
    self._pace = _format.Pace(total_steps)
    self._begun = False

  def write(
    self, step: int, scalars: Scalars, samples: Sequence[Sample]
  ) -> None:
    """Shows a few of a rollout's numbers, if its turn has come."""
    self._pace.tick(step)
    evaluated = 'heldout_accuracy' in scalars
    first, self._begun = not self._begun or step == 1, True
    last = step == self._total
    if not (first or last or evaluated or step % self._every == 0):
      return
    words = [f'step {step}/{self._total}', *_words(scalars, _SHOWN)]
    left = self._pace.left()
    if left is not None:
      words.append(f'left {_format.duration(left)}')
    self.line('  '.join(words))
    for sample in samples if evaluated else ():
      prompt = shorten(sample.prompt, _PROMPT)
      completion = shorten(sample.completion, _COMPLETION)
      self.line(
        f'  sample  reward {sample.reward:.3f}  {prompt} -> {completion}'
      )

  def line(self, text: str) -> None:
    """Prints any text."""
    print(text, file=sys.stderr, flush=True)

  def progress(
    self, label: str, step: int, total: int, scalars: Scalars
  ) -> None:
    """Prints about ten lines from start to end."""
    if step == total or step % max(1, total // 10) == 0:
      names = {name: name for name in scalars}
      self.line('  '.join([f'{label} {step}/{total}', *_words(scalars, names)]))

  def warn(self, step: int | None, text: str) -> None:
    """Prints a warning."""
    self.line(f'warning: {at(step)}{text}')

  def close(self) -> None:
    """Does nothing; every line is out already."""


def _words(scalars: Scalars, shown: Mapping[str, str]) -> list[str]:
  """'label number' of those that are there; 'clipped' is the sum of all."""
  names = ('clipped_high', 'clipped_low', 'clipped_cap')
  sides = [scalars.get(name) for name in names]
  if any(side is not None for side in sides):
    scalars = {**scalars, 'clipped': sum(side or 0.0 for side in sides)}
  return [
    f'{label} {_format.number(value)}'
    for name, label in shown.items()
    if (value := scalars.get(name)) is not None
  ]


def at(step: int | None) -> str:
  """How a warning says when it was."""
  return '' if step is None else f'step {step}: '


def choose(mode: str) -> str:
  """The display that 'auto' means here.

  Args:
    mode: 'rich', 'plain', 'none' or 'auto'.

  Returns:
    'rich', 'plain' or 'none'; 'auto' is rich on a terminal that can move its
    cursor.
  """
  if mode != 'auto':
    return mode
  able = sys.stderr.isatty() and os.environ.get('TERM') != 'dumb'
  return 'rich' if able else 'plain'


def make(
  mode: str,
  total_steps: int,
  elapsed: Callable[[], float],
  series: Callable[[str], list[float]],
) -> Display:
  """The display of a run.

  Args:
    mode: See `choose`.
    total_steps: Rollouts of the whole run.
    elapsed: Seconds of the run so far.
    series: The values of a metric so far.

  Returns:
    A `Display`.
  """
  chosen = choose(mode)
  if chosen == 'none':
    return Nothing()
  if chosen == 'plain':
    return Plain(total_steps)
  from grpo_jax.monitor import _rich

  console = _rich.console(force=mode == 'rich')
  return _rich.Rich(total_steps, elapsed, series, console)
