"""The terminal of a run, from the first second on.

A `Display` is drawn on: nothing, plain lines, or the live display of `rich.py`.
`Screen` tells it what happens, and survives its errors.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import math
import os
import sys
import threading
import time
from typing import Protocol

from grpo_jax.config import plain_text
from grpo_jax.monitor import formatting
from grpo_jax.monitor import table


class Display(Protocol):
  """What `Screen` draws on."""

  def remember(self, history: table.History) -> None:
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
    self,
    step: int,
    scalars: table.Scalars,
    samples: Sequence[formatting.Sample],
  ) -> None:
    """One rollout is done."""

  def line(self, text: str) -> None:
    """A line of text, or several."""

  def progress(
    self, label: str, step: int, total: int, scalars: table.Scalars
  ) -> None:
    """One step of something that is not counted in rollouts: the warm-up."""

  def warn(self, step: int | None, text: str) -> None:
    """A warning, after `step` rollouts."""

  def close(self) -> None:
    """Leaves the terminal as it was."""


class Nothing(Display):
  """Shows nothing: every method returns at once."""


_LINES = 200  # of a plain log, about, however long the run is
_PROGRESS_LINES = 10  # of the warm-up
_PROMPT, _COMPLETION = 60, 120  # columns of a sample in a plain log
_ANNOUNCED_SECS = 2.0  # what takes longer is announced before it is done


class Plain(Display):
  """Lines on standard error, for logs.

  A run of up to 200 rollouts has a line for each; a longer one about 200 lines,
  and always the first, the last and those of evaluations. The first, the last
  and evaluations show everything that the live display shows, and samples. The
  history is not shown.

  Args:
    about: What is known of the run.
  """

  def __init__(self, about: table.About):
    self._about, self._total = about, about.total_steps
    self._every = max(1, math.ceil(self._total / _LINES))
    self._pace = formatting.Pace(self._total)
    self._begun = False
    self._known: table.Scalars = {}
    self._tenth = '', 0  # what `progress` was last told: label, tenths done
    self._announcement = threading.Timer(0, lambda: None)

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
      self.line(formatting.took(doing, formatting.seconds(secs)))

  def write(
    self,
    step: int,
    scalars: table.Scalars,
    samples: Sequence[formatting.Sample],
  ) -> None:
    """Prints a rollout's numbers, if this rollout is one of those printed."""
    self._pace.tick(step)
    self._known = table.with_last(self._known, scalars)
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
      prompt = formatting.shorten(sample.prompt, _PROMPT)
      completion = formatting.shorten(sample.completion, _COMPLETION)
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
    self, label: str, step: int, total: int, scalars: table.Scalars
  ) -> None:
    """Prints about ten steps: the first one seen in each tenth of the total."""
    # Tenths that are over, not multiples of a tenth, because only every tenth
    # step may be given.
    tenth = label, _PROGRESS_LINES * step // total if total else _PROGRESS_LINES
    before, self._tenth = self._tenth, tenth
    if tenth[1] and tenth != before:
      named = {table.warm_up_label(k): v for k, v in scalars.items()}
      self.line('  '.join([f'{label} {step}/{total}', *_pairs(named)]))

  def warn(self, step: int | None, text: str) -> None:
    """Prints a warning."""
    self.line(f'warning: {formatting.at(step)}{text}')

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


_WORTH_SECS = 0.1  # a phase that took less gets no line


class Screen:
  """What a person sees of a run; a context manager.

  No error of the display ends a run. If the terminal breaks (an OSError), what
  cannot be drawn is left out. Any other error is a fault of the display itself:
  one line on standard error reports it, and a simpler display takes its place,
  lines for the live display and nothing for lines. Texts are escaped, because
  they may come from a file or from a model.

  Args:
    display: What to draw on.
  """

  def __init__(self, display: Display):
    self._display = display
    self._seen: set[str] = set()

  def __enter__(self) -> 'Screen':
    return self

  def __exit__(self, *_) -> None:
    self.close()

  @contextlib.contextmanager
  def phase(self, doing: str, first: str = '') -> Iterator[None]:
    """Says what is being done, and for how long, while the context lasts.

    Args:
      doing: What is being done, such as 'sampling'.
      first: What to call it the first time, when it compiles; `doing` if empty.
        The duration of the first time is printed, if it is 0.1 s or more.
    """
    new = doing not in self._seen
    self._seen.add(doing)
    said = formatting.escape(first if new and first else doing)
    start = time.monotonic()
    self._show(lambda display: display.begin(said, new))
    yield
    # Not in a `finally`: a phase that failed must not be reported as done.
    secs = time.monotonic() - start
    worth = new and secs >= _WORTH_SECS
    self._show(lambda display: display.end(said, worth, secs))

  def line(self, text: str) -> None:
    """Shows something to know, in one line or several."""
    # Line by line, because `escape` would show a line break as \n.
    escaped = '\n'.join(map(formatting.escape, text.split('\n')))
    self._show(lambda display: display.line(escaped))

  def fact(self, name: str, text: str) -> None:
    """Shows a fact about the run that the config alone does not say."""
    self.line(fact_line(name, text))

  def warn(self, step: int | None, text: str) -> None:
    """Shows a warning, made into one line, which stays visible."""
    escaped = formatting.escape(' '.join(text.split()))
    self._show(lambda display: display.warn(step, escaped))

  def write(
    self,
    step: int,
    scalars: table.Scalars,
    samples: Sequence[formatting.Sample],
  ) -> None:
    """Shows one rollout; see `Monitor.write`."""
    named = _escaped(scalars)
    self._show(lambda display: display.write(step, named, samples))

  def progress(
    self, label: str, step: int, total: int, scalars: table.Scalars
  ) -> None:
    """Shows one step that is no rollout; see `Monitor.progress`."""
    named = _escaped(scalars)
    self._show(lambda display: display.progress(label, step, total, named))

  def remember(self, history: table.History) -> None:
    """Gives the display the history of the run."""
    self._show(lambda display: display.remember(history))

  def close(self) -> None:
    """Ends the display, and leaves the terminal as it was."""
    self._show(lambda display: display.close())

  def _show(self, call: Callable[[Display], None]) -> None:
    """Calls the display, and after an error the one that takes its place."""
    while True:
      try:
        call(self._display)
      except OSError:
        return
      except Exception as error:  # of any kind: no display is worth a run
        if isinstance(self._display, Nothing):
          return
        self._replace(error)
      else:
        return

  def _replace(self, error: Exception) -> None:
    """Puts a simpler display in the place of one that has failed."""
    from grpo_jax.monitor import rich

    failed = self._display
    if isinstance(failed, rich.Rich):
      self._display = Plain(failed.about)
      then = 'shows plain lines'
    else:
      self._display = Nothing()
      then = 'shows nothing more; metrics.jsonl has its numbers'
    # Closed first, because standard error may go through the live display.
    with contextlib.suppress(Exception):
      failed.close()
    said = formatting.escape(' '.join(plain_text.named(error).split()))
    with contextlib.suppress(Exception):
      print(
        f'warning: the display failed ({said}); the run goes on and {then}.',
        file=sys.stderr,
        flush=True,
      )


def _escaped(scalars: table.Scalars) -> table.Scalars:
  """Scalars whose names, as those of rewards, tell a terminal nothing."""
  return {formatting.escape(name): value for name, value in scalars.items()}


def quiet() -> Screen:
  """A screen that shows nothing, where another process has one."""
  return Screen(Nothing())


def fact_line(name: str, text: str) -> str:
  """One fact, as a line of a table."""
  return f'  {name:9} {text}'


def display_for(mode: str, about: table.About) -> Display:
  """The display that a config asks for.

  Args:
    mode: 'rich', 'plain', 'none' or 'auto'; see `choose`.
    about: What is known of the run.

  Returns:
    A `Display`.
  """
  chosen = choose(mode)
  if chosen == 'none':
    return Nothing()
  if chosen == 'plain':
    return Plain(about)
  from grpo_jax.monitor import rich  # which takes time

  # 'auto' comes here on a terminal only; 'rich' must draw anywhere.
  return rich.Rich(about, rich.console(force=mode == 'rich'))


def choose(mode: str) -> str:
  """The display for a mode; 'auto' depends on standard error.

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
