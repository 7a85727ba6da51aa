"""Whole chats, as clients of servers send them, found again in an episode.

A client sends all messages each time. What begins as a context of the episode
does, up to an answer, and then says something new, goes on there: the policy
reads what it has read and sampled before, whatever the client has made of it.
Anything else is a branch.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import hashlib
import json
from typing import Any
from typing import NamedTuple

from grpo_jax.environments.base import Message
from grpo_jax.environments.base import Reply

Tools = tuple[Mapping[str, Any], ...]
Key = tuple[str, ...]
_NAMED = 1 << 30  # branches of chats have numbers from here on


class Place(NamedTuple):
  """Where a chat goes on.

  Attributes:
    context: Of the episode.
    turns: Behind how many turns of the context it branches off; None: it goes
      on in the context itself.
    branch: The number of the branch among those that begin there. It is that of
      the chat, so that it does not depend on which of several comes first.
    known: How many of the messages stand before the branch; None: the branch
      begins as the context stood there, and only what is new is read.
    new: How many messages are not in the context.
  """

  context: int
  turns: int | None
  branch: int
  known: int | None
  new: int


@dataclasses.dataclass
class _Chat:
  """What was said in a context.

  Attributes:
    keys: Of its messages.
    ends: How many those were behind each of its own turns.
    tools: That the policy reads in it.
    is_asked: Whether an answer is under way.
    asked: The keys up to that.
  """

  tools: Tools
  keys: list[Key] = dataclasses.field(default_factory=list)
  ends: list[int] = dataclasses.field(default_factory=list)
  is_asked: bool = False
  asked: list[Key] = dataclasses.field(default_factory=list)


class Chats:
  """The chats of one episode, by the numbers of its contexts.

  Args:
    is_new: Whether nothing was said in the first context, beside chats.
  """

  def __init__(self, is_new: bool = True):
    self._is_new = is_new
    self._chats: dict[int, _Chat] = {}
    self._taken: set[tuple[int, int, int]] = set()
    self._calls: dict[str, tuple[str, str]] = {}  # by ids: in the turn, name

  def find(self, messages: Sequence[Message], tools: Tools) -> Place:
    """Where a chat goes on.

    Args:
      messages: All of it.
      tools: Schemas of those that the policy may call.
    """
    keys = [key(message) for message in messages]
    if not self._chats and self._is_new:
      return Place(0, None, 0, None, len(keys))
    if (found := self._continued(keys, tools)) is not None:
      context, turns = found
      chat = self._chats[context]
      new = len(keys) - chat.ends[turns - 1]
      if turns == len(chat.ends) and not chat.is_asked:
        return Place(context, None, 0, None, new)
      return self._branch(context, turns, keys, tools, None, new)
    common, context = max(
      (
        (_common(chat.keys, keys), -number)
        for number, chat in self._chats.items()
      ),
      default=(0, 0),
    )
    context = -context
    if not common:
      return self._branch(0, 0, keys, tools, None, len(keys))
    ends = self._chats[context].ends
    # What follows the last turn that both have may begin alike, too.
    turns = min(sum(end <= common for end in ends) + 1, len(ends))
    is_empty = not context and not turns
    known = None if is_empty else common
    new = len(keys) - (0 if is_empty else common)
    return self._branch(context, turns, keys, tools, known, new)

  def ask(
    self,
    context: int,
    messages: Sequence[Message],
    tools: Tools,
  ) -> None:
    """A context is asked to answer a chat."""
    chat = self._chats.setdefault(context, _Chat(tools))
    chat.is_asked, chat.asked = True, [key(message) for message in messages]

  def answer(self, context: int, reply: Reply) -> Reply:
    """What was answered, with ids of calls that no other turn has."""
    chat = self._chats[context]
    calls = tuple(
      call._replace(id=f'call_{reply.turn}_{n}')
      for n, call in enumerate(reply.calls)
    )
    for one, call in zip(reply.calls, calls, strict=True):
      self._calls[call.id] = one.id, call.name
    said = 'assistant', reply.text.strip(), _calls_key(calls)
    chat.keys, chat.is_asked = [*chat.asked, said], False
    chat.ends.append(len(chat.keys))
    return reply._replace(calls=calls)

  def give_up(self, context: int) -> None:
    """The chat that a context was asked to answer cannot be read."""
    chat = self._chats[context]
    chat.is_asked = False
    if not chat.ends:
      del self._chats[context]

  def native(self, message: Message) -> Message:
    """A message with the ids of calls as environments have them."""
    found = dict(message)
    if calls := message.get('tool_calls'):
      found['tool_calls'] = [
        {**call, 'id': self._calls.get(call.get('id'), [call.get('id')])[0]}
        for call in calls
      ]
    if message.get('tool_call_id') in self._calls:
      number, name = self._calls[message['tool_call_id']]
      # In the order of `tools.run_calls`.
      role, content = found.pop('role'), found.pop('content')
      found |= {'tool_call_id': number, 'name': name}
      found = {'role': role, **found, 'content': content}
    return found

  def _continued(
    self, keys: Sequence[Key], tools: Tools
  ) -> tuple[int, int] | None:
    """The context and its turn whose answer a chat goes on from."""
    found = []
    for number, chat in self._chats.items():
      common = _common(chat.keys, keys)
      for turns, end in enumerate(chat.ends, 1):
        rest = keys[end:]
        if (
          end <= common
          and rest
          and chat.tools == tools
          and all(one[0] != 'assistant' for one in rest)
        ):
          # The newest turn of its context first, if it is free.
          is_free = turns == len(chat.ends) and not chat.is_asked
          found.append((end, is_free, -number, turns))
    if not found:
      return None
    *_, number, turns = max(found)
    return -number, turns

  def _branch(
    self,
    context: int,
    turns: int,
    keys: Sequence[Key],
    tools: Tools,
    known: int | None,
    new: int,
  ) -> Place:
    said = json.dumps([keys, tools], sort_keys=True).encode()
    words = hashlib.sha256(said).digest()[:4]
    branch = _NAMED + int.from_bytes(words) % _NAMED
    while (context, turns, branch) in self._taken:
      branch = _NAMED + (branch + 1) % _NAMED  # the same chat once more
    self._taken.add((context, turns, branch))
    return Place(context, turns, branch, known, new)


def key(message: Message) -> Key:
  """What a message is known by, whatever a client has made of it.

  Reasoning is no part of it, nor the white space around a text, nor in which
  order calls stand, nor how their arguments are written.

  >>> call = {'name': 'add', 'arguments': {'b': 2, 'a': 1}}
  >>> key({'role': 'assistant', 'content': ' Hm. ',
  ...      'tool_calls': [{'id': 'call_0_0', 'function': call}]})
  ('assistant', 'Hm.', '[["call_0_0", "add", {"a": 1, "b": 2}]]')
  """
  role, content = message['role'], message.get('content') or ''
  text = content.strip() if isinstance(content, str) else json.dumps(content)
  if role == 'assistant':
    calls = message.get('tool_calls') or ()
    functions = [(one.get('id'), one.get('function', one)) for one in calls]
    return (
      role,
      text,
      _calls_text(
        (number, one.get('name'), one.get('arguments'))
        for number, one in functions
      ),
    )
  if role == 'tool':
    return role, text, str(message.get('tool_call_id') or '')
  return role, text


def _calls_key(calls: Sequence[Any]) -> str:
  return _calls_text(
    (one.id, one.name, one.raw if one.arguments is None else one.arguments)
    for one in calls
  )


def _calls_text(calls: Any) -> str:
  """Calls of a turn, each with its id first; clients may reorder them."""
  ordered = sorted(calls, key=lambda call: str(call[0]))
  return json.dumps(ordered, sort_keys=True)


def _common(one: Sequence[Key], other: Sequence[Key]) -> int:
  """With how many equal messages two chats begin."""
  pairs = zip(one, other)
  return next(
    (n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other))
  )
