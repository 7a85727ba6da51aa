"""In place of a display and of files, where another process has these."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence

from grpo_jax.monitor.display import Nothing
from grpo_jax.monitor.monitor import Monitor
from grpo_jax.monitor.samples import Sample
from grpo_jax.monitor.screen import Screen


class Quiet(Monitor):
  """The `Monitor` of a process that is not the first: it only passes warnings.

  Args:
    warn: Takes them to the first process.
  """

  def __init__(self, warn: Callable[[str], None]):
    self._screen, self._tell = Screen(Nothing()), warn

  def __exit__(self, kind, value, traceback) -> None:
    pass

  def write(
    self,
    step: int,
    scalars: Mapping[str, float | None],
    samples: Sequence[Sample] = (),
  ) -> None:
    """The first process writes the same numbers."""

  def warn(self, text: str) -> None:
    """The first process shows it."""
    self._tell(text)

  def heldout(self) -> list[tuple[int, float]]:
    """Only the first process reads what earlier starts have measured."""
    return []

  def close(self) -> None:
    """Nothing is open."""
