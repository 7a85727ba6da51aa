"""The live display: a frame at the bottom of the terminal, lines above it."""

from collections.abc import Sequence
import sys
import textwrap
import time
from typing import Any

from rich.console import Console
from rich.console import Group
from rich.live import Live
from rich.text import Text

from grpo_jax.monitor import formatting
from grpo_jax.monitor import table
from grpo_jax.monitor import view as view_lib

_FRAMES_PER_SEC = 2
_WARNINGS = 3  # that stay in the frame
_AFTER = 4  # rows left free below the last frame, for the result and a prompt
_HANGING = 12  # columns by which the continuation of a long line is indented


def console(force: bool) -> Any:
  """A rich console on standard error.

  Args:
    force: Draw even where standard error is no terminal.

  Returns:
    A `rich.console.Console`.
  """

  class Patient(Console):
    """Prints nothing more after a broken pipe; rich would end the process."""

    def on_broken_pipe(self) -> None:
      self.quiet = True

  return Patient(
    stderr=True, highlight=False, force_terminal=True if force else None
  )


class Rich:
  """Draws a frame twice a second, in a thread, until it is closed.

  The thread reads attributes while the training loop sets them. So what it
  reads, except the clock `_pace`, is replaced and never changed in place.

  An error of the thread is raised by the next call.

  Args:
    about: What the config alone says of the run.
    console: A `rich.console.Console`.
  """

  def __init__(self, about: table.About, console: Any):
    self.about, self._console = about, console
    self._error: Exception | None = None  # of the thread, not yet raised
    self._elapsed = lambda: 0.0
    self._curves: dict[str, view_lib.Series] = {}  # by label
    self._live = None
    self._pace = formatting.Pace(about.total_steps)
    self._began: float | None = None  # when what is being done began
    self._free = 0  # rows that the frame leaves free below it
    self._planned: tuple[Any, Any] = (None, None)  # what a plan is for, a plan
    self._scalars: table.Scalars = {}
    self._view = view_lib.View(note=about.note)

  def remember(self, history: table.History) -> None:
    """Begins the curves with what earlier starts of the run have measured."""
    self._elapsed = history.elapsed
    self._curves = {
      label: view_lib.Series().extended(points)
      for label, points in table.curves(history.points).items()
    }

  def begin(self, doing: str, first: bool) -> None:
    """Shows what is being done, with a clock."""
    self._began = time.monotonic()
    self._view = self._view._replace(doing=doing)
    self._start()

  def end(self, doing: str, first: bool, secs: float) -> None:
    """Prints how long it took above the frame, the first time."""
    self._view = self._view._replace(doing='')
    if not self._view.label:
      # Before the first numbers, no frame is drawn between two phases: W&B may
      # ask for a key then.
      self._stop(erase=True)
    if first:
      self._print(formatting.took(doing, formatting.seconds(secs)), 'dim')

  def write(
    self,
    step: int,
    scalars: table.Scalars,
    samples: Sequence[formatting.Sample],
  ) -> None:
    """Shows a rollout's numbers and samples."""
    self._scalars = table.with_last(self._scalars, scalars)
    graded = bool(self._scalars.get('heldout_graded'))
    graded |= table.HELDOUT_REWARD in self._curves  # of an earlier start
    if graded:
      self._curves = table.without_accuracy(self._curves)
    self._show(
      'rollout',
      step,
      self.about.total_steps,
      table.headline(scalars, graded),
      groups=table.groups(self._scalars, self.about.still),
      samples=tuple(samples) or self._view.samples,
    )

  def progress(
    self, label: str, step: int, total: int, scalars: table.Scalars
  ) -> None:
    """Shows the numbers of a step that is no rollout, as in the warm-up."""
    named = {
      table.warm_up_label(name): value
      for name, value in scalars.items()
      if value is not None
    }
    self._show(label, step, total, named)

  def line(self, text: str) -> None:
    """Prints any text above the frame."""
    self._print(text, '')

  def warn(self, step: int | None, text: str) -> None:
    """Prints a warning above the frame; the frame shows the last three."""
    text = formatting.at(step) + text
    kept = (*self._view.warnings, text)[-_WARNINGS:]
    self._view = self._view._replace(warnings=kept)
    self._print(f'warning: {text}', 'yellow')

  def close(self) -> None:
    """Draws the last frame, which stays."""
    self._began, view = None, self._view
    done = view.step >= view.total and view.label == 'rollout'
    self._free = _AFTER
    if view.label:
      self._view = view._replace(doing='done' if done else 'stopped')
    self._stop(erase=not view.label)
    self._raise_error()

  def render(self) -> Any:
    """The frame of this moment, as a rich renderable."""
    view, (width, height) = self._view, self._console.size
    height = max(1, height - self._free)
    # A plan is kept until what it depends on changes, about once a rollout:
    # finding a plan takes several times as long as drawing a frame.
    basis = (
      view.tiles, view.groups, view.samples, view.warnings, width, height,
    )  # fmt: skip
    if self._planned[0] != basis:
      self._planned = basis, view_lib.plan_for(view, width, height)
    view = view._replace(elapsed=self._elapsed(), left=self._pace.left())
    if view.doing and self._began is not None:
      view = view._replace(doing_secs=time.monotonic() - self._began)
    return Group(*view_lib.frame(view, width, height, self._planned[1]))

  def _show(self, label, step, total, headline, **more) -> None:
    """Draws numbers; new curves begin when another label is counted."""
    if label != self._view.label:
      self._pace = formatting.Pace(total)
      # Without a label so far, the curves are the history of a resumed run.
      if self._view.label:
        self._curves = {}
    self._pace.tick(step)
    # A headline that is not measured in every rollout keeps its last value.
    tiles = []
    for name in sorted({**self._curves, **headline}, key=table.order):
      curve = self._curves.get(name, view_lib.Series())
      value = headline.get(name)
      if value is not None:
        curve = curve.added(step, value)
        self._curves = {**self._curves, name: curve}
      elif curve.points:
        value = curve.points[-1][1]
      beside = table.remark(name, curve.best)
      tiles.append(view_lib.Tile(name, value, curve.points, beside))
    self._view = self._view._replace(
      label=label, step=step, total=total, tiles=tuple(tiles), **more
    )
    self._start()

  def _start(self) -> None:
    self._raise_error()
    if self._live is not None:
      return
    keep_error = self._keep_error

    class Safe(Live):
      """Keeps an error of drawing, which would end the thread."""

      def refresh(self) -> None:
        try:
          super().refresh()
        except Exception as error:
          keep_error(error)

    self._live = Safe(
      get_renderable=self.render,
      console=self._console,
      refresh_per_second=_FRAMES_PER_SEC,
      vertical_overflow='crop',
      # If standard output is no terminal, a program reads it, and rich must not
      # send it to the display.
      redirect_stdout=sys.stdout.isatty(),
    )
    self._live.start(refresh=True)
    # Live hides the cursor, and a process that is killed would leave it hidden.
    # Nothing else of the terminal is changed, so there is nothing to restore.
    self._console.show_cursor(True)
    self._raise_error()

  def _keep_error(self, error: Exception) -> None:
    # A terminal that breaks is no fault of the display; the next frame tries it
    # again.
    if not isinstance(error, OSError):
      self._error = error

  def _raise_error(self) -> None:
    """Raises what went wrong in the thread, where `Screen` sees it."""
    error, self._error = self._error, None
    if error is not None:
      raise error

  def _stop(self, erase: bool) -> None:
    """Stops drawing, and erases the last frame or leaves it there."""
    live, self._live = self._live, None
    if live is not None:
      live.transient = erase
      live.stop()

  def _print(self, text: str, style: str) -> None:
    self._raise_error()
    width = self._console.size.width
    wrapped = [
      piece
      for line in text.split('\n')
      for piece in textwrap.wrap(
        line,
        max(_HANGING + 8, width),
        subsequent_indent=' ' * _HANGING,
        break_on_hyphens=False,
      )
      or ['']
    ]
    # As a Text, because rich would read brackets in a str as markup.
    self._console.print(Text('\n'.join(wrapped), style=style))
