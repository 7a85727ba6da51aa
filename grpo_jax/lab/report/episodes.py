"""Transcripts of episodes: who wrote which token, and what each turn earned."""

from collections.abc import Mapping
from collections.abc import Sequence
import itertools
import json
from typing import Any
from typing import NamedTuple

from grpo_jax.lab.report import words
from grpo_jax.lab.report.types import ENVIRONMENT
from grpo_jax.lab.report.types import POLICY
from grpo_jax.lab.report.types import TEMPLATE
from grpo_jax.lab.report.types import Token
from grpo_jax.monitor.formatting import message_text

Message = Mapping[str, Any]
_ENDED = {
  'done': 'ended by the environment',
  'end': 'the policy ended the whole chat',
  'length': 'cut inside a turn, at the limit of its tokens',
  'turns': 'cut at environment.max_turns',
  'tokens': 'cut at environment.episode_tokens',
  'context': 'cut at environment.context_tokens',
}


class Course(NamedTuple):
  """What is known of an episode.

  Attributes:
    messages: See `episodes.types.Account`.
    turn_rewards: Of each turn; None: nothing.
    ended: Why it ended.
    failure: Why it failed; '' if it did not.
    chosen: Of each token behind the prompt, whether the policy wrote it.
    turn: The turn of each that it wrote.
    previous: The place of the token that each follows; None: the one before it.
  """

  messages: Sequence[Message]
  turn_rewards: Sequence[float] | None
  ended: str
  failure: str
  chosen: Sequence[bool]
  turn: Sequence[int]
  previous: Sequence[int] | None

  @property
  def facts(self) -> tuple[str, ...]:
    """How many turns it had, and what ended it."""
    turns = sum(one['by'] == 'policy' for one in self.messages)
    ended = _ENDED.get(self.ended, self.ended)
    if self.failure:
      ended = f'failed: {self.failure}'
    return words.plural(turns, 'turn'), ended


class Piece(NamedTuple):
  """A token as text."""

  text: str
  is_mark: bool  # one that was added to the vocabulary, such as '<|im_end|>'


def from_messages(course: Course) -> list[Token]:
  """An episode where nothing can turn its ids into text: its messages."""
  shown = []
  for one in course.messages:
    mark, writer = str(one.get('role')), ENVIRONMENT
    if one['by'] == 'policy':
      mark, writer = _turn_mark(course, one['turn']), POLICY
    mark += ', in a branch' if one.get('context') else ''
    shown.append(Token(message_text(one), writer=writer, before=mark))
  return shown


def from_tokens(
  course: Course, prompt: Sequence[Piece], pieces: Sequence[Piece]
) -> tuple[list[Token], list[Token]]:
  """An episode as its tokens.

  Args:
    course: Of the episode.
    prompt: What all episodes of its record have read first.
    pieces: What follows, as many as `course.chosen`.

  Returns:
    The tokens of the prompt, and those behind it.
  """
  chosen = [*itertools.repeat(False, len(prompt)), *course.chosen]
  whole = [*prompt, *pieces]
  writers = who_wrote(whole, chosen, course.messages)
  tokens = [
    Token(piece.text, writer=writer) for piece, writer in zip(whole, writers)
  ]
  first = len(prompt)
  for k, is_chosen in enumerate(course.chosen):
    at, mark = first + k, ''
    turn = course.turn[k]
    if is_chosen and (
      not k or not chosen[at - 1] or course.turn[k - 1] != turn
    ):
      mark = _turn_mark(course, turn)
    elif course.previous and course.previous[k] != k - 1:
      behind = course.previous[k]
      where = f'turn {course.turn[behind] + 1}' if behind >= 0 else 'the prompt'
      mark = f'branch behind {where}'
    tokens[at] = tokens[at]._replace(before=mark)
  return tokens[:first], tokens[first:]


def who_wrote(
  pieces: Sequence[Piece], chosen: Sequence[bool], messages: Sequence[Message]
) -> list[str]:
  """The writer of each token.

  What the policy wrote is known of each token. Of the others those whose text
  is found to be that of a message are its environment's, and all else was
  written by the chat template.

  Args:
    pieces: All tokens of an episode, with those of its prompt.
    chosen: Whether the policy wrote them.
    messages: What was said.
  """
  writers = [POLICY if one else TEMPLATE for one in chosen]
  said, start = _before_turns(messages), 0
  for is_chosen, some in itertools.groupby(chosen):
    end = start + sum(1 for _ in some)
    if not is_chosen:
      for k in _told_places(pieces[start:end], next(said, ())):
        writers[start + k] = ENVIRONMENT
    start = end
  return writers


def _before_turns(messages: Sequence[Message]):
  """What the environment said before each turn, one after the other."""
  some: list[str] = []
  for one in messages:
    if one['by'] != 'policy':
      some.append(message_text(one))
      continue
    yield some
    some = []
  yield some


def _told_places(pieces: Sequence[Piece], said: Sequence[str]) -> list[int]:
  """The places of tokens that lie in what was said."""
  # A mark is no text of a message: such text is encoded as letters.
  text = ''.join('\0' * len(x.text) if x.is_mark else x.text for x in pieces)
  ends = [*itertools.accumulate(len(x.text) for x in pieces)]
  places, begin = [], 0
  for one in said:
    start, stop = _find(text, one, begin)
    if start == stop:
      continue
    begin = stop
    for k, end in enumerate(ends):
      first = end - len(pieces[k].text)
      is_empty = first == end and start <= first  # a part of a character
      if not pieces[k].is_mark and first < stop and (end > start or is_empty):
        places.append(k)
  return places


def _find(text: str, said: str, begin: int) -> tuple[int, int]:
  """Where something that was said begins and ends; (0, 0) if nowhere.

  A role, such as 'user', may be what was said too: it follows a mark, and what
  was said mostly follows a space or a line.
  """
  for form in dict.fromkeys((said, said.strip(), json.dumps(said)[1:-1])):
    if not form:
      continue
    found, start = [], text.find(form, begin)
    while start >= 0:
      found.append(start)
      start = text.find(form, start + 1)
    if found:
      best = min(found, key=lambda at: _is_unlikely(text[:at][-1:]))
      return best, best + len(form)
  return 0, 0


def _is_unlikely(before: str) -> int:
  """How little the character before a text looks like its beginning."""
  if before.isspace():
    return 0
  return 1 if before == '\0' else 2


def _turn_mark(course: Course, turn: int) -> str:
  rewards = course.turn_rewards
  earned = ''
  if rewards is not None and turn < len(rewards):
    earned = f', reward {words.number(rewards[turn])}'
  return f'turn {turn + 1}{earned}'
