"""The terminal of a run, from the first second on."""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
import contextlib
import os
import sys
import time

from grpo_jax.config import plain_text
from grpo_jax.monitor import display as plain
from grpo_jax.monitor import rich
from grpo_jax.monitor.display import About
from grpo_jax.monitor.display import Display
from grpo_jax.monitor.display import History
from grpo_jax.monitor.display import Nothing
from grpo_jax.monitor.display import Scalars
from grpo_jax.monitor.formatting import Sample
from grpo_jax.monitor.formatting import escape

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
    said = escape(first if new and first else doing)
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
    escaped = '\n'.join(map(escape, text.split('\n')))
    self._show(lambda display: display.line(escaped))

  def fact(self, name: str, text: str) -> None:
    """Shows a fact about the run that the config alone does not say."""
    self.line(fact_line(name, text))

  def warn(self, step: int | None, text: str) -> None:
    """Shows a warning, made into one line, which stays visible."""
    escaped = escape(' '.join(text.split()))
    self._show(lambda display: display.warn(step, escaped))

  def write(
    self, step: int, scalars: Scalars, samples: Sequence[Sample]
  ) -> None:
    """Shows one rollout; see `Monitor.write`."""
    named = _escaped(scalars)
    self._show(lambda display: display.write(step, named, samples))

  def progress(
    self, label: str, step: int, total: int, scalars: Scalars
  ) -> None:
    """Shows one step that is no rollout; see `Monitor.progress`."""
    named = _escaped(scalars)
    self._show(lambda display: display.progress(label, step, total, named))

  def remember(self, history: History) -> None:
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
    failed = self._display
    if isinstance(failed, rich.Rich):
      self._display = plain.Plain(failed.about)
      then = 'shows plain lines'
    else:
      self._display = Nothing()
      then = 'shows nothing more; metrics.jsonl has its numbers'
    # Closed first, because standard error may go through the live display.
    with contextlib.suppress(Exception):
      failed.close()
    said = escape(' '.join(plain_text.named(error).split()))
    with contextlib.suppress(Exception):
      print(
        f'warning: the display failed ({said}); the run goes on and {then}.',
        file=sys.stderr,
        flush=True,
      )


def _escaped(scalars: Scalars) -> Scalars:
  """Scalars whose names, as those of rewards, tell a terminal nothing."""
  return {escape(name): value for name, value in scalars.items()}


def quiet(*_) -> Screen:
  """A screen that shows nothing, where another process has one."""
  return Screen(Nothing())


def fact_line(name: str, text: str) -> str:
  """One fact, as a line of a table."""
  return f'  {name:9} {text}'


def of_mode(mode: str, about: About) -> Display:
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
    return plain.Plain(about)
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
