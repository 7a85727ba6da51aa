"""The messages between an episode and its player.

An episode says `Say`, `Forked`, `Rewarded` and `LeftOut`, and at its end `Done`
or `Failed`, in the order in which they happened. Between
processes these travel as JSON and never as pickles, so that an environment
cannot make the trainer run anything. So a message holds texts, numbers, lists
and mappings alone, wherever episodes run.
"""

from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import json
from typing import Any
from typing import NamedTuple

from grpo_jax.config import plain_text
from grpo_jax.environments.base import Message
from grpo_jax.rewards import piped

_MOST_CHARACTERS = 1 << 26  # of one text
_LONGEST = 300  # characters of a reason


class Begin(NamedTuple):
  """An episode that is to be played.

  Attributes:
    episode: Its number; no two live ones have the same.
    example: The record.
    seed: What `reset` is given.
    environment: Which one of those that the player knows.
  """

  episode: int
  example: Mapping[str, Any]
  seed: int
  environment: str


class Say(NamedTuple):
  """A context wants an answer of the policy.

  Attributes:
    episode: Of which episode.
    context: Which context; the first one is 0.
    messages: What is new in it.
    tools: The schemas that the policy reads; the same in all turns.
    max_tokens: Of the answer, at most; None: as the run has it.
    is_chat: Whether it is of `Policy.chat`: then an answer that reaches
      `max_tokens` is a reply, and what cannot be read fails no episode.
    known: How many of the messages were said before the context branched off.
      Then they are all of the chat; None: only what is new.
    stops: Texts that end the answer, beside those of the run.
  """

  episode: int
  context: int
  messages: tuple[Message, ...]
  tools: tuple[Mapping[str, Any], ...]
  max_tokens: int | None
  is_chat: bool = False
  known: int | None = None
  stops: tuple[str, ...] = ()


class Forked(NamedTuple):
  """A new context, which begins where the context `of` stands.

  Attributes:
    episode: Of which episode.
    context: The new one.
    of: The old one.
    turns: Behind how many turns of the old one it begins; None: as it stands.
    branch: Its number among those that begin there; None: the next one.
  """

  episode: int
  context: int
  of: int
  turns: int | None = None
  branch: int | None = None


class Rewarded(NamedTuple):
  """A turn was given a reward, beside those that it may have already."""

  episode: int
  turn: int
  value: float


class LeftOut(NamedTuple):
  """A turn is not to be learned from."""

  episode: int
  turn: int


class Done(NamedTuple):
  """An episode is over.

  Attributes:
    episode: Which one.
    reward: Its own; None if it has none beside those of its turns.
    tool_calls: How many calls the environment has made for the policy.
    tool_errors: How many of them went wrong.
    parse_errors: How much of the replies could not be read.
    secs: What the environment took itself; waiting for the policy is left out.
    counts: What else was counted, by names.
    heard: The turns that chats were answered with, or more; see `Policy.chat`.
  """

  episode: int
  reward: float | None
  tool_calls: int = 0
  tool_errors: int = 0
  parse_errors: int = 0
  secs: float = 0.0
  counts: Mapping[str, int] = {}
  heard: Sequence[int] = ()


class Failed(NamedTuple):
  """An episode is over, and is worth nothing: not even 0.

  Attributes:
    episode: Which one.
    reason: One line.
    unavailable: It was not its own fault, and it may begin again, with the same
      `Begin`. The player says this `Options.retries` times of an episode at
      most.
  """

  episode: int
  reason: str
  unavailable: bool = False


class Began(NamedTuple):
  """The environment is there; from now on its time counts."""

  episode: int


class Spoiled(NamedTuple):
  """An episode has left something behind: no other may begin beside it."""

  reason: str


class Stuck(NamedTuple):
  """An episode was told to end, and something of it goes on."""

  episode: int


Event = Say | Forked | Rewarded | LeftOut | Done | Failed
Word = Event | Began | Spoiled | Stuck
_KINDS = {
  kind.__name__: kind
  for kind in (
    Say,
    Forked,
    Rewarded,
    LeftOut,
    Done,
    Failed,
    Began,
    Spoiled,
    Stuck,
  )
}


def encode(words: Iterable[Word]) -> bytes:
  """Words as they travel between processes."""
  return json.dumps([[type(one).__name__, *one] for one in words]).encode()


def decode(data: bytes) -> list[Word]:
  """The words of `encode`.

  Raises:
    ValueError: It is none of them.
  """
  try:
    return [
      _with_tuples(_KINDS[kind](*fields)) for kind, *fields in json.loads(data)
    ]
  except (KeyError, TypeError, RecursionError) as error:
    raise ValueError(f'no words: {plain_text.named(error)}') from error


def _with_tuples(word: Word) -> Word:
  """A word whose lists of JSON are tuples again."""
  match word:
    case Say():
      return word._replace(
        messages=tuple(word.messages),
        tools=tuple(word.tools),
        stops=tuple(word.stops),
      )
    case Done():
      return word._replace(heard=tuple(word.heard))
  return word


def plain(value: Any) -> Any:
  """A value as JSON has it: what is said is the same in every place.

  >>> plain({'role': 'user', 'content': ('a', 1)})
  {'role': 'user', 'content': ['a', 1]}

  Raises:
    TypeError: It holds something that is no text, number, list or mapping.
    ValueError: A text is too long.
  """
  if value is None or isinstance(value, bool):
    return value
  if isinstance(value, str):
    if len(value) > _MOST_CHARACTERS:
      raise ValueError(
        f'A message holds a text of {len(value)} characters, but at most'
        f' {_MOST_CHARACTERS} may be said; cut it.'
      )
    return str(value)
  if isinstance(value, int):
    return int(value)
  if isinstance(value, float):
    return float(value)
  if isinstance(value, Mapping):
    return {str(key): plain(one) for key, one in value.items()}
  if isinstance(value, list | tuple):
    return [plain(one) for one in value]
  if getattr(value, 'ndim', None) == 0:  # a number of NumPy
    return plain(value.item())
  raise TypeError(
    f'A message holds {plain_text.shown(value)} of type'
    f' {plain_text.kind(value)}, but texts, numbers, lists and mappings are'
    ' all that a policy can read; turn it into a text.'
  )


def messages(new: Sequence[Any]) -> tuple[Message, ...]:
  """Messages of `policy.say`; a text is one of the user.

  Raises:
    TypeError: One is no message.
    ValueError: There is none.
  """
  if not new:
    raise ValueError(
      '`policy.say` was given no message, but a policy answers one; pass a'
      ' text, or a message.'
    )
  found = []
  for one in new:
    if isinstance(one, str):
      one = {'role': 'user', 'content': one}
    if not isinstance(one, Mapping) or not isinstance(one.get('role'), str):
      raise TypeError(
        f'`policy.say` was given {plain_text.shown(one)} of type'
        f' {plain_text.kind(one)}, but a text or a mapping with a role is'
        ' required.'
      )
    found.append(plain(one))
  return tuple(found)


def reason(error: BaseException) -> str:
  """One line that says why an episode has failed."""
  if told := piped.ending(error):
    return told[:_LONGEST]
  lines = plain_text.said(error).strip().partition('\n')
  more = ' ...' if lines[2] else ''
  told = f'{plain_text.kind(error)}: {lines[0]}{more}'
  return plain_text.printable(f'raised {told.removesuffix(": ")}')[:_LONGEST]
