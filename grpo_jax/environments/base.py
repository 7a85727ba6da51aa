"""What a user writes, and what it is given."""

from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple
from typing import Protocol

Message = Mapping[str, Any]
"""A message of a chat: 'role', 'content', and what templates read beside them,
such as 'tool_calls' and 'tool_call_id'."""


class ToolCall(NamedTuple):
  """A call that a policy has written.

  Attributes:
    id: Names it among those of its episode.
    name: Of the tool.
    arguments: By their names; None if they could not be read.
    raw: As it was written.
    problem: Why it cannot be run; '' if it can.
  """

  id: str
  name: str
  arguments: Mapping[str, Any] | None
  raw: str
  problem: str = ''


class Reply(NamedTuple):
  """What a policy has said in one turn.

  Attributes:
    text: Without reasoning and calls.
    reasoning: What it has thought, where the format tells it apart.
    calls: In the order in which they were written.
    problems: What could not be read, in sentences.
    finish: 'end', or 'stop' if a stop string has ended it, or 'length' if
      `Policy.chat` was given fewer `max_tokens` than the run has. A turn that a
      limit of the run cuts ends the episode, and is no reply.
    turn: The number of the turn in its episode, from 0.
    tokens: How many it has.
    read: How many tokens the policy has read before it, those of its context.
  """

  text: str
  reasoning: str = ''
  calls: tuple[ToolCall, ...] = ()
  problems: tuple[str, ...] = ()
  finish: str = 'end'
  turn: int = 0
  tokens: int = 0
  read: int = 0


class Action(NamedTuple):
  """What an environment's `step` is given of a reply."""

  text: str
  calls: tuple[ToolCall, ...] = ()
  reasoning: str = ''
  finish: str = 'end'


class Step(NamedTuple):
  """What an environment's `step` returns.

  Attributes:
    observation: A text, a message, or several; read by the next turn.
    reward: Of the turn that was acted on.
    done: Whether the episode is over.
    info: For your own tests and logs; nothing here reads it.
  """

  observation: str | Message | Sequence[Message]
  reward: float = 0.0
  done: bool = False
  info: Mapping[str, Any] = {}


class Policy(Protocol):
  """The only way to the model; one for each episode."""

  async def say(
    self,
    *new: Message | str,
    tools: Sequence[Mapping[str, Any]] | None = None,
    max_tokens: int | None = None,
  ) -> Reply:
    """Appends messages to the context, and lets the policy answer.

    Args:
      *new: Messages; a text is a message of the user.
      tools: Schemas of the tools that may be called; None: those of the
        environment. They are those of the first turn ever after.
      max_tokens: Of the answer, at most; None: as the run has it. An answer
        that reaches it is the last of the episode.

    Raises:
      Ended: A limit of the episode has been met.
    """
    ...

  async def chat(
    self,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    max_tokens: int | None = None,
    stop: Sequence[str] = (),
  ) -> Reply:
    """Lets the policy answer a whole chat, as servers are asked.

    A chat that begins as a context of the episode does, up to an answer, goes
    on there, and what was sampled is read as it was. Any other one is a branch,
    which shares with a context what both begin with. Several may be asked at
    once. What was said by `say` is not found again.

    Args:
      messages: All of the chat.
      tools: Schemas of the tools that may be called; None: those of the
        environment.
      max_tokens: Of the answer, at most. One that reaches it is a reply, and
        the episode goes on.
      stop: Texts that end the answer, beside those of the run.

    Raises:
      Ended: A limit of the episode has been met.
      ValueError: No chat template takes the chat.
    """
    ...

  def fork(self) -> 'Policy':
    """Another context that begins as this one stands now."""
    ...

  def reward(self, value: float, turn: int | None = None) -> None:
    """Rewards a turn; None: the last one of this context."""
    ...

  def leave_out(self, turn: int) -> None:
    """A turn is not learned from; others may have read it."""
    ...

  def count(self, name: str, number: int = 1) -> None:
    """Adds to a count of the episode, which metrics tell by its name."""
    ...


class Unavailable(Exception):
  """What an episode needs is away; it begins again, but not for ever."""


class Ended(Exception):
  """A limit has ended the episode; what it says is why."""


OVER = 'The episode is over.'  # said by `Ended` behind the end
