"""What every display of a run can do, and the display that shows nothing."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import NamedTuple
from typing import Protocol

from grpo_jax.monitor import table
from grpo_jax.monitor import tiles
from grpo_jax.monitor.samples import Sample

Scalars = Mapping[str, float | None]


class About(NamedTuple):
  """What a display knows of a run from its config alone."""

  total_steps: int = 0  # rollouts of the whole run
  still: Mapping[str, table.Still] = {}  # see `table.still`
  note: str = ''  # what a reader of the samples must know of the data


class History(NamedTuple):
  """What a run has measured so far, earlier starts included."""

  elapsed: Callable[[], float]  # seconds of the run
  points: Callable[[str], tiles.Points]  # of a metric, by rollout


class Display(Protocol):
  """What `Screen` draws on."""

  def remember(self, history: History) -> None:
    """Takes the history of the run, which may be drawn from now on."""

  def begin(self, doing: str, first: bool) -> None:
    """Something that may take long begins.

    Args:
      doing: What is being done.
      first: Whether it is the first time of its kind, which compiles.
    """

  def end(self, doing: str, first: bool, secs: float) -> None:
    """What `begin` announced is done; it took `secs` seconds."""

  def write(
    self, step: int, scalars: Scalars, samples: Sequence[Sample]
  ) -> None:
    """One rollout is done."""

  def line(self, text: str) -> None:
    """A line of text, or several."""

  def progress(
    self, label: str, step: int, total: int, scalars: Scalars
  ) -> None:
    """One step of something that is not counted in rollouts: the warm-up."""

  def warn(self, step: int | None, text: str) -> None:
    """A warning, after `step` rollouts."""

  def close(self) -> None:
    """Leaves the terminal as it was."""


class Nothing:
  """Shows nothing: every method returns at once."""

  def remember(self, history) -> None:  # noqa: D102
    pass

  def begin(self, doing, first) -> None:  # noqa: D102
    pass

  def end(self, doing, first, secs) -> None:  # noqa: D102
    pass

  def write(self, step, scalars, samples) -> None:  # noqa: D102
    pass

  def line(self, text) -> None:  # noqa: D102
    pass

  def progress(self, label, step, total, scalars) -> None:  # noqa: D102
    pass

  def warn(self, step, text) -> None:  # noqa: D102
    pass

  def close(self) -> None:  # noqa: D102
    pass


def at(step: int | None) -> str:
  """The first words of a warning: after which rollout it came."""
  return '' if step is None else f'rollout {step}: '


def took(doing: str, secs_text: str) -> str:
  """The line about something that is done."""
  return f'  {doing:<{_DOING}} {secs_text:>7}'


_DOING = 56  # columns
