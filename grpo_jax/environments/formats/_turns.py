"""Takes a turn apart: what was said, what was thought, and which calls.

A turn comes as pieces: texts, and special tokens. First it becomes one text in
which each mark that counts is a single character, a sign. A mark that is a
special token counts where the token stands, and nowhere else: a text that
spells it stays a text. From there on no reader has to ask again.

All of it takes a time in proportion to the turn: a call is sought up to the
fourth mark behind its first one, and no part is read more often.
"""

from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import itertools
import json
import re
from typing import Any
from typing import NamedTuple

from grpo_jax.config import plain_text
from grpo_jax.environments import base
from grpo_jax.environments import schemas

_FIRST_SIGN = 0xFDD0  # of 32 code points that are no characters
_NO_SIGNS = {code: '\ufffd' for code in range(_FIRST_SIGN, _FIRST_SIGN + 32)}
QUOTES = '\ufdd0\ufdd1'  # the signs of a format's `quotes`, the first of all
_CUT = 'The limit of the turn has cut it, so no call of it runs.'
_MOST_MARKS = 4  # behind the first one of a call, among which its end is sought
_THOUGHT = (('<think>', '</think>'),)


class Piece(NamedTuple):
  """A part of a turn.

  Attributes:
    text: Of some tokens together, or of one special token.
    special: Whether it is one special token.
  """

  text: str
  special: bool = False


class Parsed(NamedTuple):
  """A turn, read. See `base.Reply` for the fields."""

  text: str
  reasoning: str = ''
  calls: tuple[base.ToolCall, ...] = ()
  problems: tuple[str, ...] = ()


class Unreadable(ValueError):
  """What makes a call unreadable: the end of a sentence about the call."""


Call = tuple[str, Mapping[str, Any]]
"""The name of a tool, and the arguments."""


class Bare(NamedTuple):
  """What a text without marks holds.

  Attributes:
    text: Without the calls.
    calls: Each as it was written, with what it says or why it says nothing.
  """

  text: str
  calls: tuple[tuple[str, Call | Unreadable], ...] = ()


class Format(NamedTuple):
  """How a family of models writes calls.

  Attributes:
    name: As a config has it.
    pairs: The marks before and behind calls. A second one that is '' is the end
      of the turn.
    read: Finds the calls between two marks. It raises `Unreadable`.
    bare: Finds calls without marks; None if there are none without.
    ends_itself: Whether the text between two marks says by itself where it
      ends, as JSON does: then a mark in a string of it is a part of the string.
    has_types: Whether arguments have types; otherwise all of them are texts.
    quotes: Marks around a text; `read` finds the signs of `QUOTES`.
    reasoning: The marks around what is thought.
    own: A function of a user, in the place of all the others.
  """

  name: str
  pairs: tuple[tuple[str, str], ...] = ()
  read: Callable[[str], list[Call]] = lambda _: []
  bare: Callable[[str], Bare] | None = None
  ends_itself: bool = True
  has_types: bool = True
  quotes: tuple[str, ...] = ()
  reasoning: tuple[tuple[str, str], ...] = _THOUGHT
  own: Callable[[str], Any] | None = None


class _Part(NamedTuple):
  kind: str  # 'said', 'thought', 'open' (thought without an end), 'call'
  text: str
  found: list[Call] | Unreadable | None = None  # of a call


def parse(
  format: Format,
  pieces: Iterable[tuple[str, bool]],
  opened_reasoning: bool = False,
  cut: bool = False,
  tools: Sequence[Mapping[str, Any]] = (),
  special: Collection[str] = (),
) -> Parsed:
  """Reads a turn. It never raises, whatever the pieces hold.

  No call is read inside reasoning, nor from a turn that was cut: half a call
  must not run. A call that cannot be read is one with a `problem`, beside the
  others. A special token that is no mark of the format, such as the end of the
  turn, is left out of the text.

  Args:
    format: See `find`.
    pieces: Of the turn, in order; see `Piece`. How a text is cut into pieces
      does not matter.
    opened_reasoning: Whether the prompt ends inside reasoning, as with a
      template that opens it.
    cut: Whether the turn has met its limit.
    tools: The schemas of the tools: the xml format writes texts alone, and they
      say which of these are numbers.
    special: The texts of all special tokens of the tokenizer. Such a mark
      counts as a special piece only.

  Returns:
    The turn. The ids of its calls are 'call_0', 'call_1' and so on.
  """
  signs = _signs(format)
  text = _join(pieces, signs, special, keep=format.own is not None)
  parts = _divide(format, text, signs, opened_reasoning, special)
  names = {sign: mark for mark, sign in signs.items()}
  show = lambda text: re.sub(
    f'[{"".join(names)}]', lambda sign: names[sign[0]], text
  )
  said = show(''.join(one.text for one in parts if one.kind == 'said'))
  thought = [show(one.text) for one in parts if one.kind in ('thought', 'open')]
  written = [(show(one.text), one.found) for one in parts if one.kind == 'call']
  if format.own is not None:
    return _own(format.own, said, '\n'.join(map(_without_name, thought)), cut)
  if format.bare is not None and not written:
    said, written = format.bare(said)
    written = [
      (raw, found if isinstance(found, Unreadable) else [found])
      for raw, found in written
    ]
  problems = []
  if parts[-1].kind == 'open' and not cut:
    problems.append('The turn has ended inside its reasoning.')
  if cut and written:
    problems.append(_CUT)
    written = ()
  calls = _numbered(written, () if format.has_types else tools)
  taken = len(parts) > 1 or calls or thought or problems
  return Parsed(
    said.strip() if taken else said,
    '\n'.join(map(_without_name, thought)),
    calls,
    tuple(problems),
  )


def _without_name(thought: str) -> str:
  """Gemma's reasoning begins with the name of its channel."""
  return thought.strip().removeprefix('thought\n')


def _signs(format: Format) -> dict[str, str]:
  """Each mark of a format, and the character that stands for it."""
  pairs = (*format.pairs, *format.reasoning)
  marks = [*format.quotes, *filter(None, itertools.chain(*pairs))]
  return {mark: chr(_FIRST_SIGN + place) for place, mark in enumerate(marks)}


def _join(
  pieces: Iterable[tuple[str, bool]],
  signs: Mapping[str, str],
  special: Collection[str],
  keep: bool,
) -> str:
  """The pieces as one text with signs.

  Args:
    pieces: See `parse`.
    signs: See `_signs`.
    special: See `parse`.
    keep: Whether special tokens that are no marks stay, as texts.
  """
  texts = [re.escape(mark) for mark in signs if mark not in special]
  marks = re.compile('|'.join(sorted(texts, key=len, reverse=True)) or '(?!)')
  joined = []
  for is_special, run in itertools.groupby(pieces, lambda piece: piece[1]):
    run = [text for text, _ in run]
    if is_special:
      joined += [signs.get(text, text if keep else '') for text in run]
    else:
      text = ''.join(run).translate(_NO_SIGNS)
      joined.append(marks.sub(lambda mark: signs[mark[0]], text))
  return ''.join(joined)


def _divide(
  format: Format,
  text: str,
  signs: Mapping[str, str],
  opened: bool,
  special: Collection[str],
) -> list[_Part]:
  """The parts of a text with signs, at least one."""
  thoughts = {signs[start]: signs[end] for start, end in format.reasoning}
  calls = {signs[start]: signs.get(end, '') for start, end in format.pairs}
  opening = re.compile(f'[{"".join((*thoughts, *calls))}]')
  closing = ''.join(thoughts.values()) if opened else ''
  parts, at = [], 0
  while True:
    if closing:
      end = re.compile(f'[{closing}]').search(text, at)
      stop = end.start() if end else len(text)
      parts.append(_Part('thought' if end else 'open', text[at:stop]))
      if not end:
        return parts
      at = end.end()
    start = opening.search(text, at)
    parts.append(_Part('said', text[at : start.start() if start else None]))
    if not start:
      return parts
    at, closing = start.end(), thoughts.get(start[0], '')
    if not closing:
      part, at = _call(format, text, at, start[0], signs, special)
      parts.append(part)


def _call(
  format: Format,
  text: str,
  at: int,
  start: str,
  signs: Mapping[str, str],
  special: Collection[str],
) -> tuple[_Part, int]:
  """The call behind a first mark, and where the text goes on."""
  names = {sign: mark for mark, sign in signs.items()}
  first, last = names[start], dict(format.pairs)[names[start]]
  both = start + signs.get(last, '')
  bodies = re.compile(f'[{both}]').finditer(text, at)
  if format.quotes:  # which `read` finds as signs
    names = {sign: names[sign] for sign in names if sign not in QUOTES}
  reach = _MOST_MARKS if format.ends_itself and last not in special else 1
  problem, stop, end = None, len(text), len(text)
  for place, mark in enumerate(itertools.islice(bodies, reach)):
    if not place:
      stop, end = mark.start(), mark.start()
    if names[mark[0]] == first:
      continue
    if not place:
      end = mark.end()
    found = _read(format, text[at : mark.start()], names)
    if not isinstance(found, Unreadable):
      return _Part('call', start + text[at : mark.end()], found), mark.end()
    problem = problem or found
  if not last:
    problem = _read(format, text[at:stop], names)
  elif end == stop:  # no last mark
    problem = Unreadable(f'is not closed by {last}')
  return _Part('call', start + text[at:end], problem), end


def _read(
  format: Format, body: str, names: Mapping[str, str]
) -> list[Call] | Unreadable:
  """The calls between two marks, or why there are none."""
  body = re.sub('[\ufdd0-\ufdef]', lambda s: names.get(s[0], s[0]), body)
  try:
    return format.read(body)
  except Unreadable as error:
    return error


def _numbered(
  written: Iterable[tuple[str, list[Call] | Unreadable | None]],
  tools: Sequence[Mapping[str, Any]],
) -> tuple[base.ToolCall, ...]:
  """The calls with their numbers, and texts turned to what a schema wants."""
  calls = []
  for raw, found in written:
    if not isinstance(found, list):
      calls.append(base.ToolCall('', '', None, raw, f'The call {found}.'))
      continue
    for name, arguments in found:
      if problem := _problem(name, arguments):
        calls.append(base.ToolCall('', '', None, raw, f'The call {problem}.'))
      else:
        arguments = schemas.typed(name, arguments, tools)
        calls.append(base.ToolCall('', name, arguments, raw))
  return tuple(one._replace(id=f'call_{k}') for k, one in enumerate(calls))


def _problem(name: str, arguments: Mapping[str, Any]) -> str:
  """Why no tool can be given this; '' if it can."""
  try:
    json.dumps([name, arguments], ensure_ascii=False).encode()
  except UnicodeEncodeError:
    return 'holds half of a surrogate pair, which is no character'
  except RecursionError:
    return 'is nested too deeply'
  return '' if name else 'names no tool'


def _own(
  function: Callable[[str], Any], said: str, thought: str, cut: bool
) -> Parsed:
  """What a user's function makes of a turn, whatever it does."""
  try:
    text, reasoning, calls, problems = function(said)
    parsed = Parsed(
      str(text),
      '\n'.join(filter(None, (thought, str(reasoning)))),
      tuple(base.ToolCall(*one) for one in calls),
      tuple(map(str, problems)),
    )
  except (Exception, SystemExit) as error:
    problem = f'The format could not read the turn: {plain_text.named(error)}'
    return Parsed(said, thought, (), (problem.partition('\n')[0],))
  if cut and parsed.calls:
    parsed = parsed._replace(calls=(), problems=(*parsed.problems, _CUT))
  return parsed
