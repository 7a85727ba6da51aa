"""What clients, and those who write agents, make of a chat between two turns.

Messages here are those of OpenAI's API: the arguments of a call are a text of
JSON. Nothing that is given is changed.
"""

from collections.abc import Callable
from collections.abc import Sequence
import copy
import json
import random as random_lib
from typing import Any

Message = dict[str, Any]
Messages = list[Message]
Mangling = Callable[[Messages, random_lib.Random], Messages]


def drop_reasoning(messages: Messages, random: random_lib.Random) -> Messages:
  """Most clients do not know the field."""
  del random
  return [
    {name: x for name, x in one.items() if name != 'reasoning_content'}
    for one in messages
  ]


def invent_reasoning(messages: Messages, random: random_lib.Random) -> Messages:
  """Some write it into fields of their own, or sum it up."""
  return [
    {**one, 'reasoning_content': f'So it is {random.randrange(9)}.'}
    if one['role'] == 'assistant'
    else one
    for one in messages
  ]


def respell_arguments(
  messages: Messages, random: random_lib.Random
) -> Messages:
  """They read the JSON, and write it by their own serializer."""
  return _each_call(messages, lambda said: _respelled(said, random))


def _respelled(said: str, random: random_lib.Random) -> str:
  try:
    found = json.loads(said)
  except ValueError:
    return said
  if isinstance(found, dict):
    found = dict(random.sample([*found.items()], len(found)))
  return json.dumps(
    found,
    ensure_ascii=random.random() < 0.5,
    indent=random.choice([None, None, 2]),
    separators=random.choice([None, (',', ':'), (' ,  ', ' : ')]),
  )


def reorder_calls(messages: Messages, random: random_lib.Random) -> Messages:
  """Calls that could not be read come last, say."""
  return [
    {**one, 'tool_calls': random.sample(calls, len(calls))}
    if (calls := one.get('tool_calls'))
    else one
    for one in messages
  ]


def strip_texts(messages: Messages, random: random_lib.Random) -> Messages:
  """White space around texts goes, or there is more of it."""
  return _each_text(
    messages, lambda said: random.choice(['', ' ', '\n\n']) + said.strip()
  )


def wrap_texts(messages: Messages, random: random_lib.Random) -> Messages:
  """A text becomes a list of one part, and no text becomes null."""
  del random
  return [
    {**one, 'content': [{'type': 'text', 'text': one['content']}]}
    if isinstance(one.get('content'), str) and one['content']
    else {**one, 'content': None if one['role'] == 'assistant' else ''}
    if not one.get('content')
    else one
    for one in messages
  ]


def add_fields(messages: Messages, random: random_lib.Random) -> Messages:
  """What OpenAI's own answers have comes back."""
  del random
  more = {'refusal': None, 'annotations': [], 'audio': None}
  return [
    {**one, **more} if one['role'] == 'assistant' else one for one in messages
  ]


def reorder_results(messages: Messages, random: random_lib.Random) -> Messages:
  """Tools that run side by side are done in any order."""
  found: Messages = []
  results: Messages = []
  for one in [*messages, {}]:
    if one.get('role') == 'tool':
      results.append(one)
    else:
      found += random.sample(results, len(results))
      results = []
      found.append(one)
  return found[:-1]


def change_result(messages: Messages, random: random_lib.Random) -> Messages:
  """An old result is cut, because it was long."""
  return _one(
    messages,
    random,
    ('tool',),
    lambda one: [{**one, 'content': f'(cut {random.randrange(99)})'}],
  )


def change_question(messages: Messages, random: random_lib.Random) -> Messages:
  """What was asked is put in other words."""
  return _one(
    messages,
    random,
    ('user', 'system'),
    lambda one: [{**one, 'content': f'Well, {random.randrange(99)}?'}],
  )


def change_answer(messages: Messages, random: random_lib.Random) -> Messages:
  """Somebody corrects what the model has said."""
  return _one(
    messages,
    random,
    ('assistant',),
    lambda one: [{**one, 'content': f'No: {random.randrange(99)}.'}],
  )


def change_arguments(messages: Messages, random: random_lib.Random) -> Messages:
  """Somebody corrects what the model has called."""
  return _each_call(
    messages,
    lambda said: json.dumps({'expression': str(random.randrange(99))}),
  )


def change_ids(messages: Messages, random: random_lib.Random) -> Messages:
  """A client has names of its own for calls."""
  named: dict[str, str] = {}

  def name(number: str) -> str:
    return named.setdefault(number, f'fc_{random.randrange(10**9)}')

  found = copy.deepcopy(messages)
  for one in found:
    for call in one.get('tool_calls') or ():
      call['id'] = name(call['id'])
    if 'tool_call_id' in one:
      one['tool_call_id'] = name(one['tool_call_id'])
  return found


def write_calls_as_texts(
  messages: Messages, random: random_lib.Random
) -> Messages:
  """As smolagents does."""
  del random
  found = []
  for one in messages:
    if one['role'] == 'tool':
      one = {'role': 'user', 'content': f'Observation:\n{one["content"]}'}
    elif calls := one.get('tool_calls'):
      said = f'{text(one)}\nCalling tools:\n{json.dumps(calls)}'
      one = {'role': 'assistant', 'content': said.strip()}
    found.append(one)
  return found


def delete_turn(messages: Messages, random: random_lib.Random) -> Messages:
  """A turn in the middle is left out, with the results of its calls."""
  places = [
    n for n, one in enumerate(messages[:-1]) if one['role'] == 'assistant'
  ]
  if not places:
    return messages
  first = random.choice(places)
  end = first + 1
  while end < len(messages) and messages[end]['role'] == 'tool':
    end += 1
  if end == len(messages):  # nothing would be left to answer
    return messages
  return [*messages[:first], *messages[end:]]


def rewrite_system(messages: Messages, random: random_lib.Random) -> Messages:
  """The system says what the time is."""
  told = {'role': 'system', 'content': f'It is {random.randrange(24)}:00.'}
  rest = [one for one in messages if one['role'] != 'system']
  return [told, *rest]


def duplicate(messages: Messages, random: random_lib.Random) -> Messages:
  """A message is said twice."""
  return _one(messages, random, ('user',), lambda one: [one, dict(one)])


def compact(messages: Messages, random: random_lib.Random) -> Messages:
  """All but the last messages become a summary."""
  places = [n for n, one in enumerate(messages) if one['role'] == 'user']
  if not places:
    return messages
  kept = messages[random.choice(places) :]
  told = {'role': 'user', 'content': f'So far: {len(messages) - len(kept)}.'}
  return [told, *kept]


KINDLY: tuple[Mangling, ...] = (
  drop_reasoning, invent_reasoning, respell_arguments, reorder_calls,
  strip_texts, wrap_texts, add_fields,
)  # fmt: skip
"""What changes nothing of what a policy has read and said."""

EDITS: tuple[Mangling, ...] = (
  reorder_results, change_result, change_question, change_answer,
  change_arguments, change_ids, write_calls_as_texts, delete_turn,
  rewrite_system, duplicate, compact,
)  # fmt: skip
"""What makes another chat of it, or may."""


def mangled(
  messages: Sequence[Message],
  random: random_lib.Random,
  ways: Sequence[Mangling] = (*KINDLY, *EDITS),
  most: int = 3,
) -> Messages:
  """The messages after some of these ways, in a random order.

  Args:
    messages: Not changed.
    random: All that is random comes from it.
    ways: Of which some are taken, each at most once.
    most: How many, at most.
  """
  found = copy.deepcopy([*messages])
  for way in random.sample([*ways], random.randint(0, min(most, len(ways)))):
    found = way(found, random)
  return copy.deepcopy(found)


def text(message: Message) -> str:
  """The text of a message, whose content may be a list of parts."""
  content = message.get('content') or ''
  if isinstance(content, str):
    return content
  return '\n'.join(part['text'] for part in content)


def _each_text(messages: Messages, change: Callable[[str], str]) -> Messages:
  return [
    {**one, 'content': change(text(one))} if text(one) else one
    for one in messages
  ]


def _each_call(messages: Messages, change: Callable[[str], str]) -> Messages:
  found = copy.deepcopy(messages)
  for one in found:
    for call in one.get('tool_calls') or ():
      function = call['function']
      function['arguments'] = change(function['arguments'])
  return found


def _one(
  messages: Messages,
  random: random_lib.Random,
  roles: Sequence[str],
  change: Callable[[Message], Messages],
) -> Messages:
  """Changes one message of these roles, if there is any."""
  places = [n for n, one in enumerate(messages) if one['role'] in roles]
  if not places:
    return messages
  place = random.choice(places)
  new = change(messages[place])
  return [*messages[:place], *new, *messages[place + 1 :]]
