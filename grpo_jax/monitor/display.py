"""What a display of a run can do, and two of them: nothing, and plain lines."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import math
import sys
import threading
from typing import NamedTuple
from typing import Protocol

from grpo_jax.monitor import formatting
from grpo_jax.monitor import table
from grpo_jax.monitor import view
from grpo_jax.monitor.formatting import Sample
from grpo_jax.monitor.formatting import shorten

Scalars = Mapping[str, float | None]


class About(NamedTuple):
  """What a display knows of a run from its config alone."""

  total_steps: int = 0  # rollouts of the whole run
  still: Mapping[str, table.Still] = {}  # see `table.still`
  note: str = ''  # what a reader of the samples must know of the data


class History(NamedTuple):
  """What a run has measured so far, earlier starts included."""

  elapsed: Callable[[], float]  # seconds of the run
  points: Callable[[str], view.Points]  # of a metric, by rollout


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


class Nothing(Display):
  """Shows nothing: every method returns at once."""


def at(step: int | None) -> str:
  """The first words of a warning: after which rollout it came."""
  return '' if step is None else f'rollout {step}: '


def took(doing: str, secs_text: str) -> str:
  """The line about something that is done."""
  return f'  {doing:<{_DOING}} {secs_text:>7}'


_DOING = 56  # columns


_LINES = 200  # of a plain log, about, however long the run is
_PROGRESS_LINES = 10  # of the warm-up
_PROMPT, _COMPLETION = 60, 120  # columns of a sample in a plain log
_ANNOUNCED_SECS = 2.0  # what takes longer is announced before it is done


class Plain:
  """Lines on standard error, for logs.

  A run of up to 200 rollouts has a line for each; a longer one about 200 lines,
  and always the first, the last and those of evaluations. The first, the last
  and evaluations show everything that the live display shows, and samples.

  Args:
    about: What is known of the run.
  """

  def __init__(self, about: About):
    self._about, self._total = about, about.total_steps
    self._every = max(1, math.ceil(self._total / _LINES))
    self._pace = formatting.Pace(self._total)
    self._begun = False
    self._known: Scalars = {}
    self._tenth = '', 0  # what `progress` was last told: label, tenths done
    self._announcement = threading.Timer(0, lambda: None)

  def remember(self, history: History) -> None:
    """Does nothing, because a line shows one rollout and no history."""

  def begin(self, doing: str, first: bool) -> None:
    """Announces what is being done, the first time, if it takes two seconds."""
    self._announcement.cancel()
    if first:
      # By a timer, because only time shows whether it takes long.
      say = threading.Timer(_ANNOUNCED_SECS, self._announce, [doing])
      say.daemon = True  # it must not hold up the end of the process
      say.start()
      self._announcement = say

  def end(self, doing: str, first: bool, secs: float) -> None:
    """Prints how long it took, the first time."""
    self._announcement.cancel()
    if first:
      self.line(took(doing, formatting.seconds(secs)))

  def write(
    self, step: int, scalars: Scalars, samples: Sequence[Sample]
  ) -> None:
    """Prints a rollout's numbers, if this rollout is one of those printed."""
    self._pace.tick(step)
    self._known = table.kept(self._known, scalars)
    evaluated = 'heldout_accuracy' in scalars
    first, self._begun = not self._begun or step == 1, True
    last = step == self._total
    if not (first or last or evaluated or step % self._every == 0):
      return
    groups = table.groups(self._known, self._about.still)
    words = [f'rollout {step}/{self._total}']
    graded = bool(self._known.get('heldout_graded'))
    words += _pairs(table.headline(scalars, graded))
    words += [_fact(row) for row in groups.get('policy', ()) if not row.rank]
    left = self._pace.left()
    if left is not None:
      words.append(f'left {formatting.duration(left)}')
    self.line('  '.join(words))
    if not (first or last or evaluated):
      return
    for heading, rows in groups.items():
      self.line(f'  {heading}: {", ".join(map(_fact, rows))}')
    for sample in samples if evaluated else ():
      prompt = shorten(sample.prompt, _PROMPT)
      completion = shorten(sample.completion, _COMPLETION)
      self.line(
        f'  sample  reward {sample.reward:.3f}  {prompt} -> {completion}'
      )

  def line(self, text: str) -> None:
    """Prints any text."""
    # Flushed, so that a log shows it while the run goes on.
    print(text, file=sys.stderr, flush=True)

  def _announce(self, doing: str) -> None:
    # In a thread of its own, where an error would print a traceback. The next
    # line meets the same error where `Screen` sees it.
    with contextlib.suppress(Exception):
      self.line(f'  {doing} ...')

  def progress(
    self, label: str, step: int, total: int, scalars: Scalars
  ) -> None:
    """Prints about ten steps: the first one seen in each tenth of the total."""
    # Tenths that are over, not multiples of a tenth, because only every tenth
    # step may be given.
    tenth = label, _PROGRESS_LINES * step // total if total else _PROGRESS_LINES
    before, self._tenth = self._tenth, tenth
    if tenth[1] and tenth != before:
      named = {table.demonstrated(k): v for k, v in scalars.items()}
      self.line('  '.join([f'{label} {step}/{total}', *_pairs(named)]))

  def warn(self, step: int | None, text: str) -> None:
    """Prints a warning."""
    self.line(f'warning: {at(step)}{text}')

  def close(self) -> None:
    """Cancels what is to be announced; every line is printed already."""
    self._announcement.cancel()


def _fact(row: table.Shown) -> str:
  """'label number unit'."""
  return f'{row.label} {row.value} {row.unit}'.rstrip()


def _pairs(named: Mapping[str, float | None]) -> list[str]:
  """'label number' of what was measured."""
  return [
    f'{label} {formatting.number(value)}'
    for label, value in named.items()
    if value is not None
  ]
