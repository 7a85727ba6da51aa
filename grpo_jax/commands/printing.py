"""What is printed: tables and sentences for a person, JSON for a program.

An error becomes one sentence, and so does a standard output that takes no more.
"""

from collections.abc import Iterator
from collections.abc import Sequence
import contextlib
import json
import math
import os
import shutil
import sys
import time
import traceback
from typing import Any

from grpo_jax.config import plain_text

# What to do without enough memory, the least loss first.
_SMALLER = (
  'lower learner.micro_rows, warm_up.micro_rows or sampler.max_rows, or set '
  "model.remat='layer'; else lower sampler.prompts, sampler.group, "
  "sampler.max_tokens, the widths in data.prompt_buckets or the model's size."
)


def columns() -> int:
  """How wide the terminal is; a pipe has 80 columns."""
  return shutil.get_terminal_size((80, 24)).columns


def show(*parts: Any) -> None:
  """Prints parts as wide as the terminal.

  rich pads every line to the full width; the spaces at the end are left out.
  """
  from rich import console

  out = plain_text.guarded(
    console.Console(width=columns(), highlight=False, markup=False)
  )
  with out.capture() as captured:
    for part in parts:
      out.print(part)
  for line in captured.get().splitlines():
    print(line.rstrip())


def say(*texts: str, end: str = '\n', file: Any = None) -> None:
  """Prints texts that may be anybody's, at once."""
  print(plain_text.printable(' '.join(texts)), end=end, file=file, flush=True)


class Beat:
  """Tells when a line is due that says how far something is.

  The first is due two seconds after the beginning, the next ten after each.
  """

  def __init__(self):
    self._next = time.monotonic() + 2.0

  def is_due(self) -> bool:
    """Whether one is due now; then it counts as said."""
    if time.monotonic() < self._next:
      return False
    self._next = time.monotonic() + 10.0
    return True


def show_json(values: Any) -> None:
  """Prints a line of JSON."""
  print(json.dumps(values), flush=True)


def table(names: Sequence[str], left: int = 1, **options: Any) -> Any:
  """A table of rich without lines between its columns.

  Args:
    names: The heads of the columns.
    left: How many of the first columns hold texts; the others hold numbers.
    **options: Arguments of rich's `Table`.
  """
  from rich import box
  from rich import table as tables

  usual = {'box': box.SIMPLE, 'title_justify': 'left', 'pad_edge': False}
  made = tables.Table(**{**usual, **options})
  for place, name in enumerate(names):
    made.add_column(name, justify='left' if place < left else 'right')
  return made


def tables(
  names: Sequence[str], rows: Sequence[Sequence[str]], title: str
) -> list[Any]:
  """A title, and a table that fits the terminal: in parts, if it is too wide.

  Each part has the first column, and about as many others as the next part.

  Args:
    names: The heads of the columns.
    rows: Texts.
    title: Stands above, because rich would break it at the width of the table.
  """
  widths = [max(map(len, column)) + 3 for column in zip(names, *rows)]
  room, parts = columns() - widths[0], 1
  while _widest(widths[1:], parts) > room and parts < len(widths) - 1:
    parts += 1
  size = math.ceil((len(widths) - 1) / parts)
  made: list[Any] = [title]
  for first in range(1, len(widths), size):
    part = [0, *range(first, min(first + size, len(widths)))]
    one = table([names[x] for x in part])
    for row in rows:
      if any(row[x] for x in part[1:]):
        one.add_row(*(row[x] for x in part))
    made.append(one)
  return made


def _widest(widths: Sequence[int], parts: int) -> int:
  """The width of the widest of so many parts."""
  size = math.ceil(len(widths) / parts)
  return max(
    sum(widths[first : first + size]) for first in range(0, len(widths), size)
  )


def sentence(error: Exception) -> str | None:
  """What is wrong with what was given; None if `error` is of another kind.

  >>> sentence(FileNotFoundError(2, 'No such file or directory', 'x.txt'))
  'x.txt cannot be used (No such file or directory); give another path.'
  >>> sentence(FileNotFoundError(2, 'No such file or directory', ''))
  "'' cannot be used (No such file or directory); give another path."
  >>> sentence(OSError(9, 'Bad file descriptor', 3))
  'Bad file descriptor, says the operating system; correct that.'
  >>> sentence(MemoryError('Unable to allocate 9 GiB'))[:26]
  'There is not enough memory'
  >>> sentence(ValueError())
  'ValueError was raised'
  >>> sentence(RuntimeError('of another kind'))
  """
  text = plain_text.said(error) or _unsaid(error)
  if isinstance(error, MemoryError) or (
    # JAX has no type of its own for it.
    isinstance(error, RuntimeError) and 'ut of memory' in text
  ):
    first = text.partition('\n')[0]
    return f'There is not enough memory ({first}); {_SMALLER}'
  if isinstance(error, OSError):
    return _system_sentence(error)
  return text if isinstance(error, ValueError) else None


def _unsaid(error: Exception) -> str:
  """What can be said of an error without a text."""
  places = traceback.extract_tb(error.__traceback__)[-1:]
  where = [f' in line {place.lineno} of {place.filename}' for place in places]
  return f'{plain_text.kind(error)} was raised{"".join(where)}'


def _system_sentence(error: OSError) -> str:
  """What the operating system said, without its number."""
  if error.strerror is None:
    return plain_text.said(error) or _unsaid(error)
  # A number is of a file that is open already.
  if error.filename is None or isinstance(error.filename, int):
    return f'{error.strerror}, says the operating system; correct that.'
  path = os.fsdecode(error.filename)
  shown = path if path.strip() else repr(path)
  return f'{shown} cannot be used ({error.strerror}); give another path.'


class Unwritten(ValueError):
  """Standard output takes no more, because a disk is full for example."""


class Output:
  """Standard output, with a sentence of its own where it cannot be written.

  Another error of the operating system is about what a command was given. By
  its type and text alone, one cannot be told from the other.
  """

  def __init__(self, stream: Any):
    self._stream = stream

  def write(self, text: str) -> int:
    """Writes a text; returns the number of its characters."""
    with self._said():
      return self._stream.write(text)

  def flush(self) -> None:
    """Hands on what is left in the buffer."""
    with self._said():
      self._stream.flush()

  def __getattr__(self, name: str) -> Any:
    return getattr(self._stream, name)

  @contextlib.contextmanager
  def _said(self) -> Iterator[None]:
    try:
      yield
    except BrokenPipeError:  # the reader has seen enough, as `| head` has
      raise
    except OSError as error:
      # Python writes what is left at its end, and would fail once more.
      to_nowhere(self._stream.fileno())
      raise Unwritten(
        f'Standard output cannot be written ({error.strerror}), so the answer '
        'is lost; give the same command with an output that can.'
      ) from error


def to_nowhere(descriptor: int) -> None:
  """Lets everything that is written to a file descriptor vanish."""
  nowhere = os.open(os.devnull, os.O_RDWR)
  if nowhere != descriptor:  # it is, if this was the lowest that is closed
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def prepare_streams() -> None:
  """Makes standard output an `Output`, and opens streams that are closed.

  They are closed after `>&-` in a shell. The next file that is opened, perhaps
  a checkpoint, would be taken for such a stream, and get what libraries print.
  """
  # `sys.stdin` stays None, which says that no prompts come from there.
  streams = ((0, sys.stdin, ''), (1, sys.stdout, 'stdout'))
  for number, stream, name in (*streams, (2, sys.stderr, 'stderr')):
    if stream is None:
      to_nowhere(number)
      if name:
        setattr(sys, name, open(number, 'w', closefd=False))
  sys.stdout = Output(sys.stdout)


def keep_stdout() -> None:
  """Leaves standard output to Python; what C++ prints there goes to stderr.

  Gloo, which joins processes without accelerators, says there whom it has met.
  """
  sys.stdout.flush()
  sys.stdout = Output(open(os.dup(1), 'w'))
  os.dup2(2, 1)
