r"""Text of others, for people: of exceptions, completions and records.

What a model or a library has written may hold commands for a terminal, and an
exception may not be able to say what it is. Neither may end a run, or reach a
screen as it is.
"""

from typing import Any
import unicodedata

# Marks that turn the direction of writing.
_TURNS = (
  '\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069'
)
_UNSEEN = {'Cc', 'Cs', 'Zl', 'Zp'}  # control, halves of pairs, line ends
_KEPT = '\n\t'
# What the names of a reward's metrics end in, beside that of its mean.
REWARD_METRICS = ('_std', '_judged', '_failed', '_secs_p50', '_secs_max')


def printable(text: str) -> str:
  r"""A text that tells a terminal nothing but what to show.

  Control characters, which begin its commands, and marks that turn the
  direction of writing are escaped as Python writes them. Line ends and tabs
  stay.

  >>> print(printable('a\x1b[31mb\r'))
  a\x1b[31mb\r

  Args:
    text: Any text.

  Returns:
    The text; the same one where there is nothing to escape.
  """
  if text.isprintable():
    return text
  return ''.join(
    ascii(one)[1:-1]
    if one not in _KEPT
    and (one in _TURNS or unicodedata.category(one) in _UNSEEN)
    else one
    for one in text
  )


def said(error: BaseException) -> str:
  """What an exception says; a sentence where it cannot say anything.

  >>> said(ValueError('no such file'))
  'no such file'

  Args:
    error: An exception of any class.
  """
  try:
    return str(error)
  except BaseException as other:
    return f'its text cannot be shown, because {kind(other)} is raised'


def first_line(error: BaseException) -> str:
  """The first line of what an exception says, which may have a thousand."""
  return said(error).strip().partition('\n')[0]


def kind(value: Any) -> str:
  """The name of the class of a value, whatever the class says of itself.

  >>> kind(ValueError())
  'ValueError'
  """
  return type.__dict__['__name__'].__get__(type(value))


def named(error: BaseException) -> str:
  """The class of an exception and what it says.

  >>> named(KeyError('gold'))
  "KeyError: 'gold'"

  Args:
    error: An exception of any class.
  """
  return f'{kind(error)}: {said(error)}'


def shown(value: Any) -> str:
  """`repr` of a value, at most 80 characters; its class where there is none.

  >>> shown('x'), shown([1])
  ("'x'", '[1]')
  """
  try:
    return f'{repr(value):.80}'
  except BaseException:
    return f'a {kind(value)} that cannot be shown'


def guarded(console: Any) -> Any:
  """A console of rich that prints no text of others as it is.

  Its own commands, for colours say, stay.

  Args:
    console: A `rich.console.Console`.

  Returns:
    The same one.
  """
  from rich import console as rich_console
  from rich import segment

  class Hook(rich_console.RenderHook):
    def process_renderables(self, renderables):
      return [
        segment.Segments(
          [
            one if one.control else one._replace(text=printable(one.text))
            for one in console.render(renderable)
          ]
        )
        for renderable in renderables
      ]

  console.push_render_hook(Hook())
  return console
