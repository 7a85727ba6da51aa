"""The live display: a frame at the bottom of the terminal, lines above it."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import sys
from typing import Any

from grpo_jax.monitor import _display
from grpo_jax.monitor import _format
from grpo_jax.monitor import _view
from grpo_jax.monitor._samples import Sample

_FRAMES_PER_SEC = 2
_WARNINGS = 3  # that stay in the frame


def console(force: bool) -> Any:
  """A rich console on standard error.

  Args:
    force: Draw even where standard error is no terminal.

  Returns:
    A `rich.console.Console`.
  """
  from rich.console import Console

  class Patient(Console):
    """Falls silent where rich would end the process."""

    def on_broken_pipe(self) -> None:
      self.quiet = True

  return Patient(
    stderr=True, highlight=False, force_terminal=True if force else None
  )


class Rich:
  """Draws a frame twice a second, in a thread, from the first numbers on.

  Everything that the thread reads is replaced, never changed in place.

  Args:
    total_steps: Rollouts of the whole run.
    elapsed: Seconds of the run so far.
    series: The values of a metric so far.
    console: A `rich.console.Console`.
  """

  def __init__(
    self,
    total_steps: int,
    elapsed: Callable[[], float],
    series: Callable[[str], list[float]],
    console: Any,
  ):
    self._total, self._series = total_steps, series
    self._elapsed, self._console = elapsed, console
    self._live = None
    self._pace = _format.Pace(total_steps)
    self._view = _view.View()

  def write(
    self,
    step: int,
    scalars: Mapping[str, float | None],
    samples: Sequence[Sample],
  ) -> None:
    """Shows a rollout's numbers and samples."""
    self._show(
      'step',
      step,
      self._total,
      scalars,
      samples=tuple(samples) or self._view.samples,
      rewards=self._series('reward'),
      heldout=self._series('heldout_accuracy'),
    )

  def progress(
    self, label: str, step: int, total: int, scalars: Mapping[str, float | None]
  ) -> None:
    """Shows the numbers of something else than rollouts."""
    self._show(label, step, total, scalars)

  def line(self, text: str) -> None:
    """Prints any text above the frame."""
    self._print(text, '')

  def warn(self, step: int | None, text: str) -> None:
    """Prints a warning above the frame, and keeps the last ones in it."""
    text = _display.at(step) + text
    kept = (*self._view.warnings, text)[-_WARNINGS:]
    self._view = self._view._replace(warnings=kept)
    self._print(f'warning: {text}', 'yellow')

  def close(self) -> None:
    """Draws the last frame, which stays."""
    live, self._live = self._live, None
    if live is not None:
      live.stop()

  def render(self) -> Any:
    """The frame of this moment, as something that rich prints."""
    from rich.console import Group

    view = self._view._replace(
      elapsed=self._elapsed(),
      left=self._pace.left(),
      step_secs=self._pace.last(),
    )
    size = self._console.size
    return Group(*_view.frame(view, size.width, size.height))

  def _show(self, label, step, total, scalars, **more) -> None:
    if label != self._view.label:
      self._pace = _format.Pace(total)
    self._pace.tick(step)
    self._view = self._view._replace(
      label=label, step=step, total=total, scalars=dict(scalars), **more
    )
    if self._live is None:
      self._start()

  def _start(self) -> None:
    from rich.live import Live

    self._live = Live(
      get_renderable=self.render,
      console=self._console,
      refresh_per_second=_FRAMES_PER_SEC,
      vertical_overflow='crop',
      # Standard output that goes elsewhere is for a program to read.
      redirect_stdout=sys.stdout.isatty(),
    )
    self._live.start(refresh=True)
    # Live hides the cursor, and a process that is killed would leave it hidden.
    # Nothing else of the terminal is changed, so there is nothing to restore.
    self._console.show_cursor(True)

  def _print(self, text: str, style: str) -> None:
    from rich.text import Text

    # Text and not str: brackets in it are no markup.
    self._console.print(Text(text, style=style))
