"""Episodes whose policy is asked whole chats."""

import asyncio
import json

import numpy as np
import pytest

from grpo_jax import engines
from grpo_jax.environments.base import Ended
from tests.data import continuation_test
from tests.data import trap_templates
from tests.episodes import drawn_episodes_test as drawn
from tests.episodes import play_test
from tests.fake_engine import FakeEngine

TOKENIZER = play_test.TOKENIZER
END = TOKENIZER.eos_ids[0]


@pytest.fixture(autouse=True)
def queues(monkeypatch):
  told = engines.Capabilities(entropy=True, queues=True)
  monkeypatch.setattr(FakeEngine, 'usual', told)


def user(text):
  return {'role': 'user', 'content': text}


def said(reply):
  """A reply as a client of an OpenAI server sends it back."""
  calls = [
    {
      'id': call.id,
      'type': 'function',
      'function': {'name': call.name, 'arguments': call.arguments},
    }
    for call in reply.calls
  ]
  message = {'role': 'assistant', 'content': reply.text}
  return {**message, 'tool_calls': calls} if calls else message


def numbered(request, number):
  """Says how many tokens it has read."""
  del number
  return [*TOKENIZER.encode(str(len(request.ids))), END]


def play(environment, answer=numbered, group=1, **changes):
  return play_test.play(
    environment, answer, play_test.RECORDS[:1], group,
    **{'turns': 9, 'episode_tokens': 99, **changes},
  )  # fmt: skip


def check(played, drawn_tokens):
  """What must hold of every episode."""
  for one in played:
    episode = one.episode
    assert one.failure == ''
    assert episode.chosen.sum() == drawn_tokens
    assert not episode.logp[~episode.chosen].any()
    if episode.previous is not None:
      assert (episode.previous < np.arange(len(episode.ids))).all()


def paths(episode, prompt):
  """The ids of each context, from each token that nothing follows."""
  previous = episode.previous
  if previous is None:
    previous = np.arange(-1, len(episode.ids) - 1)
  ends = {*range(len(episode.ids))} - {*previous.tolist()}
  found = []
  for end in sorted(ends):
    way = []
    while end >= 0:
      way.append(int(episode.ids[end]))
      end = previous[end]
    found.append([*prompt, *way[::-1]])
  return found


@pytest.mark.parametrize('renders', [False, True])
def test_a_chat_draws_what_the_same_words_draw_by_turns(renders):
  """Ids and log-probabilities, bit for bit, by an engine with a model."""

  async def by_turns(policy, example, seed):
    del seed
    for turn in range(3):
      await policy.say(f'{example["prompt"]} {turn}')

  async def as_chats(policy, example, seed):
    del seed
    messages = []
    for turn in range(3):
      messages.append(user(f'{example["prompt"]} {turn}'))
      reply = await policy.chat(messages)
      text = f' {reply.text}\n'  # nobody sends back what was sampled
      messages.append({'role': 'assistant', 'content': text})

  results = [
    drawn.play(drawn.engine(), 0, made=made, renders=renders)
    for made in (by_turns, as_chats)
  ]
  (prompts, one), (others, other) = results
  assert prompts == others
  for a, b in zip(sum(one, []), sum(other, []), strict=True):
    assert a.failure == b.failure == '' and a.account.turns == 3
    for name in ('ids', 'chosen', 'logp', 'turn', 'entropy', 'version'):
      x, y = getattr(a.episode, name), getattr(b.episode, name)
      np.testing.assert_array_equal(x, y)
    assert a.episode.previous is None or renders


CALL = (
  '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
)
ADD = {
  'type': 'function',
  'function': {'name': 'add', 'description': 'Adds.', 'parameters': {}},
}


def calling(request, number):
  """Calls a tool, and then says what it heard."""
  del number
  results = TOKENIZER.decode_whole(request.ids).count('it is')
  text = f'Hm.\n{CALL}' if results < 2 else 'done'
  return [*TOKENIZER.encode(text), END]


def test_a_client_that_spells_calls_its_own_way_changes_no_id():
  source = trap_templates.ALL['tools_in_system'].source
  tokenizer = continuation_test._tokenizer(source)

  async def by_turns(policy, example):
    reply = await policy.say(example['prompt'], tools=[ADD])
    while reply.calls:
      (call,) = reply.calls
      result = {'role': 'tool', 'tool_call_id': call.id, 'name': call.name}
      reply = await policy.say({**result, 'content': 'it is 3'})

  async def as_chats(policy, example):
    messages = [user(example['prompt'])]
    ids = []
    while (reply := await policy.chat(messages, [ADD])).calls:
      (call,) = reply.calls
      ids.append(call.id)
      arguments = json.loads(json.dumps({'b': 2, 'a': 1}))
      function = {'name': 'add', 'arguments': arguments}
      told = {'id': call.id, 'type': 'function', 'function': function}
      messages += [
        {'role': 'assistant', 'content': ' Hm. ', 'tool_calls': [told]},
        {'role': 'tool', 'tool_call_id': call.id, 'content': 'it is 3'},
      ]
    assert len({*ids}) == 2

  found = [
    play_test.play(
      made, calling, play_test.RECORDS[:1], 1, tokenizer=tokenizer,
      turn_tokens=200, episode_tokens=600, context_tokens=2000,
    )
    for made in (by_turns, as_chats)
  ]  # fmt: skip
  (one, prompt, ((a,),)), (other, others, ((b,),)) = found
  assert a.failure == b.failure == '' and prompt == others
  assert [x.ids for x in one.requests] == [x.ids for x in other.requests]
  assert [x.follows for x in one.requests] == [
    x.follows for x in other.requests
  ]
  np.testing.assert_array_equal(a.episode.ids, b.episode.ids)
  assert a.account.messages == b.account.messages


@pytest.mark.parametrize('renders', [False, True])
def test_an_edited_history_is_a_branch_with_every_token_once(renders):
  async def edited(policy, example):
    first = [user('one'), user('two')]
    reply = await policy.chat(first)
    more = [*first, said(reply), user('three')]
    last = await policy.chat(more)
    # What it said is gone, then what it heard is another.
    branch = [*first, user('three')]
    reply_there = await policy.chat(branch)
    await policy.chat([*branch, said(reply_there), user('more')])
    await policy.chat(
      [*first, said(reply), user('four'), said(last), user('!')]
    )
    del example

  options = {'renders': renders}
  engine, (prompt,), ((one,),) = play(edited, options=options)
  read = [TOKENIZER.decode_whole(x.ids) for x in engine.requests]
  assert [text.count('assistant\n') for text in read] == [1, 2, 1, 2, 3]
  drawn_tokens = sum(len(numbered(x, 0)) for x in engine.requests)
  check([one], drawn_tokens)
  whole = [[*map(int, x.ids), *numbered(x, 0)] for x in engine.requests]
  whole = [whole[k] for k in (1, 3, 4)]  # which nobody goes on from
  assert sorted(paths(one.episode, prompt)) == sorted(whole)
  # A branch reads anew from where it differs only.
  assert len(one.episode.ids) < len(prompt) + sum(map(len, whole))
  told = [(x['by'], x['content']) for x in one.account.messages]
  # A client may also write what the policy has said elsewhere.
  quoted = TOKENIZER.decode(numbered(engine.requests[1], 0))
  assert sorted(text for by, text in told if by == 'environment') == sorted(
    ['one', 'two', 'three', 'three', 'more', 'four', quoted, '!']
  )
  assert len(told) == 8 + 5


def test_chats_at_once_are_one_set_whoever_comes_first():
  """Sub-agents, whose names are what they were told."""

  def environment(delays):
    async def episode(policy, example, seed):
      del seed
      await policy.chat([user(example['prompt'])])

      async def sub(name, delay):
        await asyncio.sleep(delay)
        messages = [user(name)]
        for word in 'xy':
          reply = await policy.chat(messages)
          messages += [said(reply), user(word)]

      await asyncio.gather(*map(sub, ('one', 'two', 'three'), delays))

    return episode

  found = []
  for delays in ((0, 0, 0), (0.03, 0.015, 0), (0.01, 0.03, 0.02)):
    _, played = drawn.play(drawn.engine(), 0, made=environment(delays))
    found.append([one.episode for one in sum(played, [])])
    assert all(one.failure == '' for one in sum(played, []))
  for others in found[1:]:
    for a, b in zip(found[0], others, strict=True):
      for name in ('ids', 'chosen', 'logp', 'turn', 'previous'):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name))


def test_equal_chats_at_once_draw_different_words():
  async def consistent(policy, example, seed):
    del seed
    first = [user(example['prompt'])]
    replies = await asyncio.gather(*(policy.chat(first) for _ in range(4)))
    assert len({reply.turn for reply in replies}) == 4
    await policy.chat([*first, said(replies[2]), user('so')])

  _, ((*played,), _) = drawn.play(drawn.engine(), 0, made=consistent)
  for one in played:
    assert one.failure == '' and one.account.turns == 5
    texts = [x['content'] for x in one.account.messages if x['by'] == 'policy']
    assert len({*texts}) > 2


def test_an_answer_as_short_as_its_client_wants_goes_on():
  async def short(policy, example):
    del example
    reply = await policy.chat([user('Well?')], max_tokens=2)
    assert (reply.text, reply.finish, reply.tokens) == ('ab', 'length', 2)
    assert reply.read > 10
    again = await policy.chat([user('Well?'), said(reply), user('go on')])
    assert again.finish == 'end'

  def answer(request, number):
    del number
    return [*TOKENIZER.encode('abcdef'), END]

  engine, _, ((one,),) = play(short, answer)
  assert one.failure == '' and one.account.ended == 'done'
  assert [x.limit for x in engine.requests] == [2, 12]
  # The turn is ended for it, which nobody has chosen.
  assert engine.requests[1].ids.count(END) == 3
  check([one], 2 + len(answer(None, 0)))
  # The limit of the run ends the episode, as it does without a client.
  for limit in (None, 12, 40):

    async def long(policy, example, limit=limit):
      del example
      with pytest.raises(Ended):
        await policy.chat([user('Well?')], max_tokens=limit)

    _, _, ((one,),) = play(long, lambda *_: TOKENIZER.encode('abcdefghijklmn'))
    assert one.account.ended == 'length'


@pytest.mark.parametrize('text, is_open', [('<think>a', True), ('ab', False)])
def test_reasoning_is_closed_where_an_answer_is_cut_inside_it(text, is_open):
  source = trap_templates.ALL['thinking'].source
  tokenizer = continuation_test._tokenizer(source)
  ids = tokenizer.encode(text)

  async def short(policy, example):
    del example
    reply = await policy.chat([user('a')], max_tokens=len(ids))
    await policy.chat([user('a'), said(reply), user('b')])

  engine, _, ((one,),) = play(
    short, lambda *_: [*ids, END], tokenizer=tokenizer
  )
  assert one.failure == '' and one.episode.previous is None
  first, second = (one.ids for one in engine.requests)
  assert second[: len(first) + len(ids)] == [*first, *ids]
  new = tokenizer.decode_whole(second[len(first) + len(ids) :])
  assert ('</think>' in new) == is_open


def test_stop_strings_are_those_of_a_call():
  async def stopping(policy, example):
    del example
    await policy.chat([user('a')], stop=['\n', 'x'])
    await policy.chat([user('b')])

  engine, _, _ = play(stopping)
  stops = [one.sampling.stop_strings for one in engine.requests]
  assert stops == [('\n', 'x'), ()]


def test_a_chat_that_no_template_takes_is_refused_and_nothing_else():
  async def odd(policy, example):
    del example
    with pytest.raises(ValueError, match='cannot be read'):
      await policy.chat([{'role': 'user', 'content': 5}])
    reply = await policy.chat([user('a')])
    with pytest.raises(ValueError, match='cannot be read'):
      await policy.chat(
        [user('a'), said(reply), {'role': 'user', 'content': 5}]
      )
    with pytest.raises(ValueError, match='max_tokens=0'):
      await policy.chat([user('a')], max_tokens=0)
    await policy.chat([user('a'), said(reply), user('b')])
    return 1.0

  engine, _, ((one,),) = play(odd)
  assert one.failure == '' and one.reward == 1 and one.account.turns == 2
  assert len(engine.requests) == 2
  assert not any('context' in x for x in one.account.messages)  # no branch


def test_tools_are_those_of_a_chat():
  source = trap_templates.ALL['tools_in_system'].source
  tokenizer = continuation_test._tokenizer(source)

  async def changing(policy, example):
    del example
    for tools in ([ADD], []), ([], [ADD]):
      reply = await policy.chat([user('a')], tools[0])
      await policy.chat([user('a'), said(reply), user('b')], tools[1])

  engine, _, ((one,),) = play_test.play(
    changing, numbered, play_test.RECORDS[:1], 1, tokenizer=tokenizer,
  )  # fmt: skip
  assert one.failure == ''
  read = [tokenizer.decode_whole(x.ids) for x in engine.requests]
  assert ['Adds' in text for text in read] == [True, False, False, True]


def test_what_is_left_out_is_read_and_not_learned():
  async def leaving(policy, example):
    del example
    reply = await policy.chat([user('a')])
    policy.leave_out(reply.turn)
    with pytest.raises(ValueError, match='Turn 7'):
      policy.leave_out(7)
    await policy.chat([user('a'), said(reply), user('b')])
    policy.count('seen')
    policy.count('seen', 2)

  engine, (prompt,), ((one,),) = play(leaving)
  last = numbered(engine.requests[1], 0)
  check([one], len(last))
  ids = engine.requests[1].ids
  assert [*prompt, *one.episode.ids] == [*ids, *last]
  assert one.account.counts == {'seen': 3} and one.account.turns == 2

  async def all_out(policy, example):
    del example
    policy.leave_out((await policy.chat([user('a')])).turn)

  _, _, ((one,),) = play(all_out)
  assert 'left out all' in one.failure and one.account.ended == 'failed'


def test_threads_ask_chats_too():
  def blocking(policy, example):
    messages = [user(example['prompt'])]
    reply = policy.chat(messages)
    policy.count('calls')
    policy.chat([*messages, said(reply), user('b')])
    policy.leave_out(reply.turn)

  _, _, ((one,),) = play(blocking)
  assert one.failure == '' and one.account.turns == 2
