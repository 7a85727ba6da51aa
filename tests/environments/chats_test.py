"""Where a chat goes on."""

import random

import pytest

from grpo_jax.environments import chats as chats_lib
from grpo_jax.environments.base import Reply
from grpo_jax.environments.base import ToolCall


def user(text):
  return {'role': 'user', 'content': text}


def assistant(text, *calls):
  return {
    'role': 'assistant',
    'content': text,
    'tool_calls': [
      {'id': number, 'type': 'function', 'function': {'name': name, **more}}
      for number, name, more in calls
    ],
  }


class Episode:
  """Asks and answers at once; contexts have numbers as sessions give them."""

  def __init__(self):
    self.chats, self.contexts, self.turns = chats_lib.Chats(), 1, 0

  def find(self, *messages, tools=()):
    place = self.chats.find(messages, tools)
    self.number = place.context
    if place.turns is not None:
      self.number, self.contexts = self.contexts, self.contexts + 1
    self.chats.ask(self.number, messages, tools)
    return place

  def answer(self, text, *calls):
    return self.answer_in(self.number, text, *calls)

  def answer_in(self, number, text, *calls):
    self.turns += 1
    reply = Reply(text, calls=calls, turn=self.turns - 1)
    return self.chats.answer(number, reply)


def test_a_chat_goes_on_where_it_was_answered():
  one = Episode()
  assert one.find(user('a')) == (0, None, 0, None, 1)
  one.answer('  b\n')
  assert one.find(user('a'), assistant('b'), user('c')) == (0, None, 0, None, 1)
  one.answer('d')
  long = user('a'), assistant('b'), user('c'), assistant('d')
  place = one.find(*long, user('e'), user('f'))
  assert place == (0, None, 0, None, 2)


def test_what_goes_on_from_an_earlier_answer_branches_off_there():
  one = Episode()
  one.find(user('a'))
  one.answer('b')
  one.find(user('a'), assistant('b'), user('c'))
  one.answer('d')
  place = one.find(user('a'), assistant('b'), user('other'))
  assert place[:2] == (0, 1) and place[3:] == (None, 1)
  one.answer('e')
  # The branch goes on by itself.
  place = one.find(
    user('a'), assistant('b'), user('other'), assistant('e'), user('f')
  )
  assert place == (1, None, 0, None, 1)


def test_a_history_that_was_changed_is_read_as_a_whole():
  one = Episode()
  one.find(user('a'), user('x'))
  one.answer('b')
  one.find(user('a'), user('x'), assistant('b'), user('c'))
  one.answer('d')
  for messages, turns, known in (
    ((user('a'), user('x'), assistant('B'), user('c')), 1, 2),
    ((user('a'), user('x'), assistant('b'), user('C'), assistant('d')), 2, 3),
    ((user('a'), assistant('b'), user('c')), 1, 1),
    ((user('a'), user('x'), assistant('b')), 2, 3),
    ((user('A'),), 0, None),
  ):
    place = one.chats.find(messages, ())
    assert (place.context, place.turns, place.known) == (0, turns, known)
    assert place.new == len(messages) - (known or 0)
  # Other tools are another chat, though the messages are the same.
  tools = ({'name': 'add'},)
  place = one.chats.find(
    (user('a'), user('x'), assistant('b'), user('c')), tools
  )
  assert (place.turns, place.known) == (2, 4)


@pytest.mark.parametrize('order', [(0, 1, 2), (2, 0, 1)])
def test_branches_are_named_by_what_they_say_whichever_comes_first(order):
  one = Episode()
  one.find(user('main'))
  said = [user('one'), user('two'), user('three')]
  found = {k: one.chats.find((said[k],), ()) for k in order}
  numbers = [found[k].branch for k in range(3)]
  assert numbers == [
    chats_lib.Chats(is_new=False).find((one,), ()).branch for one in said
  ]
  assert min(numbers) >= 1 << 30 and len({*numbers}) == 3
  again = one.chats.find((said[0],), ())
  assert again.branch not in numbers  # the same once more is another


def test_calls_at_once_are_contexts_of_their_own():
  one = Episode()
  assert one.find(user('a')).turns is None
  assert one.find(user('a')).turns == 0  # is under way: it cannot go on there
  second = one.number
  one.answer_in(0, 'b')
  one.answer_in(second, 'b')
  history = user('a'), assistant('b')
  assert one.find(*history, user('c')).context == 0
  assert one.find(*history, user('c'))[:2] == (second, None)
  third = one.find(*history, user('c'))
  assert third.turns == 1


def test_calls_have_ids_of_their_own_and_environments_see_theirs():
  one = Episode()
  one.find(user('a'))
  call = ToolCall('call_0', 'add', {'a': 1, 'b': 'ü'}, 'raw')
  (said,) = one.answer('Hm.', call).calls
  assert said == call._replace(id='call_0_0')
  arguments = {'arguments': {'b': 'ü', 'a': 1}}  # in another order
  told = assistant(None, ('call_0_0', 'add', arguments))
  told['content'] = ' Hm. '
  result = {'role': 'tool', 'tool_call_id': 'call_0_0', 'content': '3'}
  assert one.find(user('a'), told, result) == (0, None, 0, None, 1)
  native = one.chats.native(result)
  assert [*native.items()] == [
    ('role', 'tool'), ('tool_call_id', 'call_0'), ('name', 'add'),
    ('content', '3'),
  ]  # fmt: skip
  assert one.chats.native(told)['tool_calls'][0]['id'] == 'call_0'
  assert told['tool_calls'][0]['id'] == 'call_0_0'  # is not changed
  (again,) = one.answer('', call).calls
  assert again.id == 'call_1_0'
  for other in (
    assistant('Hm.', ('call_0_0', 'add', {'arguments': {'a': 2, 'b': 'ü'}})),
    assistant('Hm.', ('call_1_0', 'add', arguments)),
    assistant('Hm.', ('call_0_0', 'sub', arguments)),
    assistant('Hm.'),
  ):
    assert one.chats.find((user('a'), other, result), ()).known == 1


def test_a_chat_that_cannot_be_read_leaves_nothing():
  one = Episode()
  one.find(user('a'))
  one.chats.give_up(0)
  assert one.find(user('b')) == (0, None, 0, None, 1)
  one.answer('c')
  one.find(user('b'), assistant('c'), user('d'))
  one.chats.give_up(0)
  place = one.find(user('b'), assistant('c'), user('e'))
  assert place == (0, None, 0, None, 1)


def test_what_was_said_otherwise_is_not_gone_on_from():
  one = chats_lib.Chats(is_new=False)
  place = one.find((user('a'),), ())
  assert (place.context, place.turns, place.known) == (0, 0, None)


def test_random_chats_go_on_exactly_where_they_should():
  """Every chat is an old one up to an answer, and then new messages."""
  rng = random.Random(0)
  for _ in range(50):
    one, histories = Episode(), [((), 0, 0)]
    for step in range(12):
      history, context, turns = rng.choice(histories)
      new = [user(f'{step} {k}') for k in range(rng.randint(1, 2))]
      place = one.find(*history, *new)
      assert (place.known, place.new) == (None, len(new))
      own = sum(one == context for _, one, _ in histories[1:])
      if place.turns is None:
        assert place.context == context and turns == own
      else:
        assert (place.context, place.turns) == (context, turns)
      one.answer(str(step))
      behind = 1 if place.turns is not None else turns + 1
      whole = (*history, *new, assistant(str(step)))
      histories.append((whole, one.number, behind))
