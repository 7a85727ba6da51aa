"""A policy that says what a test has written down."""

import asyncio
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

from grpo_jax.environments import base
from grpo_jax.environments import formats


class Scripted:
  """Policies of one episode: a root and its forks.

  Attributes:
    context: All messages that this policy has read and said.
    rewards: What each turn was given, by its number; several are added.
    replies: Everything that was said in the episode.

  Args:
    replies: Texts or `Reply`s, one for each turn, or a function of the context
      that returns one. When a list is at its end, `Ended` is raised.
    format: Of the calls in texts; '' for none.
    tools: Schemas of the tools; see `formats.parse`.
    delay: Seconds before each reply.
  """

  def __init__(
    self,
    replies: Sequence[Any] | Callable[[list[base.Message]], Any],
    format: str = '',
    tools: Sequence[dict[str, Any]] = (),
    delay: float = 0.0,
    of: 'Scripted | None' = None,
  ):
    self._options = {'format': format, 'tools': tools, 'delay': delay}
    self._source = replies
    self.context = [] if of is None else [*of.context]
    self.replies = [] if of is None else of.replies
    self.rewards = {} if of is None else of.rewards
    self.last = -1 if of is None else of.last

  async def say(self, *new, tools=None, max_tokens=None) -> base.Reply:
    self.context += [
      {'role': 'user', 'content': one} if isinstance(one, str) else one
      for one in new
    ]
    await asyncio.sleep(self._options['delay'])
    reply = self._reply(self._next())
    self.last = len(self.replies)
    self.replies.append(reply)
    self.context.append({'role': 'assistant', 'content': reply.text})
    return reply

  def _next(self):
    if callable(self._source):
      return self._source(self.context)
    if len(self.replies) >= len(self._source):
      raise base.Ended('turns')
    return self._source[len(self.replies)]

  def _reply(self, said) -> base.Reply:
    turn = len(self.replies)
    if isinstance(said, base.Reply):
      return said._replace(turn=turn)
    format, tools = self._options['format'], self._options['tools']
    if not format:
      return base.Reply(said, turn=turn, tokens=len(said))
    read = formats.parse(
      formats.find(format), [formats.Piece(said)], tools=tools
    )
    calls = tuple(one._replace(id=f'{one.id}_{turn}') for one in read.calls)
    return base.Reply(
      read.text, read.reasoning, calls, read.problems, 'end', turn, len(said)
    )

  def fork(self) -> 'Scripted':
    return Scripted(self._source, of=self, **self._options)

  def reward(self, value: float, turn: int | None = None) -> None:
    turn = self.last if turn is None else turn
    if not 0 <= turn < len(self.replies):
      raise ValueError(f'There is no turn {turn}.')
    self.rewards[turn] = self.rewards.get(turn, 0.0) + float(value)


def calls(*written: tuple[str, dict[str, Any]]) -> base.Reply:
  """A turn of calls."""
  return base.Reply(
    '',
    calls=tuple(
      base.ToolCall(f'call_{place}', name, arguments, '')
      for place, (name, arguments) in enumerate(written)
    ),
  )
