"""Episodes that are played in rounds."""

import asyncio
import dataclasses
import itertools

import numpy as np
import pytest

from grpo_jax import engines
from grpo_jax import rewards
from grpo_jax.environments import events
from grpo_jax.environments import formats
from grpo_jax.environments import sessions
from grpo_jax.environments.base import Unavailable
from grpo_jax.episodes import play as play_lib
from grpo_jax.episodes import playing
from tests.data import continuation_test
from tests.data import trap_templates
from tests.fake_engine import FakeEngine

TOKENIZER = continuation_test._tokenizer(trap_templates.ALL['separator'].source)
SAMPLING = engines.Sampling(eos_ids=TOKENIZER.eos_ids)
LIMITS = play_lib.Limits(
  turns=5, turn_tokens=12, episode_tokens=40, context_tokens=400
)
HERMES = formats.find('hermes')
RECORDS = [{'prompt': 'a', 'answer': '3'}, {'prompt': 'b', 'answer': '5'}]


async def guessing(policy, example, seed):
  """Ends once the answer is said."""
  said = f'Guess, {seed % 7}.'
  while True:
    reply = await policy.say(said)
    if reply.text == example['answer']:
      return 1.0
    policy.reward(-0.25)
    said = 'more' if reply.text < example['answer'] else 'less'


@pytest.fixture(autouse=True, params=[False, True], ids=['rounds', 'at once'])
def queues(request, monkeypatch):
  """Whether the engine is asked at once, or in rounds."""
  told = engines.Capabilities(entropy=True, queues=request.param)
  monkeypatch.setattr(FakeEngine, 'usual', told)
  return request.param


def counting(request, number):
  """Says which turn it is, from 1."""
  ends = int(np.sum(np.asarray(request.ids) == TOKENIZER.eos_ids[0]))
  turns = ends // 2 + 1  # a user's message ends alike
  return [*TOKENIZER.encode(str(turns)), TOKENIZER.eos_ids[0]]


def play(
  environment,
  answer=counting,
  records=RECORDS,
  group=2,
  call_format=HERMES,
  tokenizer=TOKENIZER,
  rollout=4,
  options=(),
  **changes,
):
  engine = FakeEngine(answer, FakeEngine.usual)
  engine.load(None, 3)
  here = sessions.Options(where='here')
  limits = dataclasses.replace(LIMITS, **changes)
  with sessions.Player({'': environment}, here) as player:
    prompts, played = play_lib.play(
      records,
      [7, 9][: len(records)],
      engine,
      tokenizer,
      player,
      call_format,
      SAMPLING,
      limits,
      group,
      seed=1,
      rollout=rollout,
      **dict(options),
    )
  return engine, prompts, played


def test_every_token_that_was_sampled_is_chosen_and_none_beside():
  engine, prompts, played = play(guessing)
  for group, prompt, answer in zip(played, prompts, ('3', '5')):
    assert [one.failure for one in group] == ['', '']
    for one in group:
      episode = one.episode
      text = TOKENIZER.decode_whole([*prompt, *episode.ids])
      assert text.count('more') == int(answer) - 1 and 'Guess' in text
      # Its end tokens are sampled: with what was said, all that was chosen.
      chosen = episode.ids[episode.chosen]
      ends = (chosen == TOKENIZER.eos_ids[0]).sum()
      assert ends == int(answer) and len(chosen) == 2 * ends
      assert (episode.logp[episode.chosen] == -1).all()
      assert not episode.logp[~episode.chosen].any()
      assert episode.version[episode.chosen].tolist() == [3] * len(chosen)
      assert one.reward == pytest.approx(1 - 0.25 * (int(answer) - 1))
      assert len(one.account.turn_rewards or ()) == int(answer)
      assert episode.finish == engines.ENDED and one.account.last_text == answer
      assert episode.holder is None  # there is one process


def test_the_episodes_of_a_record_begin_with_one_seed_and_evaluations_alike():
  def seeds(rollout, **options):
    begun = {}

    async def episode(policy, example, seed):
      begun.setdefault(example['answer'], []).append(seed)
      await policy.say('Guess.')

    play(episode, rollout=rollout, options=options)
    return [*map(sorted, begun.values())]

  for options in ({}, {'purpose': 'evaluate'}, {'purpose': 'x'}):
    first, second = seeds(1, **options)
    assert len({*first}) == len({*second}) == 1 and first != second
  assert all(len({*some}) == 2 for some in seeds(1, alike=False))
  # What is to be compared begins alike, whenever it is played.
  assert seeds(1) != seeds(2) != seeds(2, purpose='evaluate')
  assert seeds(1, purpose='evaluate') == seeds(2, purpose='evaluate')
  assert seeds(1, purpose='evaluate') != seeds(1, purpose='x')


def test_what_is_read_is_what_is_trained():
  """The ids of every request begin an episode behind its prompt."""
  engine, prompts, played = play(guessing)
  whole = [
    tuple([*prompt, *one.episode.ids])
    for prompt, group in zip(prompts, played)
    for one in group
  ]
  for request in engine.requests:
    if request.limit > 1:  # no filling
      ids = tuple(int(x) for x in request.ids)
      assert any(ids == one[: len(ids)] for one in whole)


def test_each_call_follows_the_one_before_it_until_its_episode_is_over(queues):
  engine, _, _ = play(guessing)
  asked = [one for one in engine.requests if one.calls]
  assert len(asked) == (2 * 3 + 2 * 5 if queues else 0)
  for one in asked:
    assert one.calls == 4 and len(one.keys) == 1
    if one.follows is not None:
      number, place = one.follows
      before = engine.requests[number]
      assert place == 0
      assert one.ids[: len(before.ids)] == before.ids
      assert len(one.ids) > len(before.ids) + 2
  assert sum(one.follows is None for one in asked) == (4 if queues else 0)
  kept = range(len(engine.requests)) if queues else []
  assert sorted(engine.forgotten) == [*kept]


def test_the_first_turns_are_asked_as_single_answers_are(queues):
  # With episodes of a single turn so too if others are asked at once.
  engine, prompts, _ = play(guessing, **({'turns': 1} if queues else {}))
  wanted = engines.requests(prompts, [7, 9], 2, SAMPLING, 12, 1, 4)
  for found, one in zip(engine.requests, wanted):
    np.testing.assert_array_equal(found.keys, one.keys)
    assert list(found.ids) == one.ids and found.limit == one.limit
  if queues:
    assert len(engine.requests) == 2
    return
  # Later each is alone, and rounds have one size.
  later = engine.requests[2:]
  assert {len(one.keys) for one in later} == {1} and len(later) == 4 * 4
  keys = [tuple(one.keys[0].tolist()) for one in later if one.limit > 1]
  assert len({*keys}) == len(keys)


@pytest.mark.parametrize(
  'changes, ended, turns',
  [
    ({'turns': 2}, 'turns', 2),
    ({'episode_tokens': 6}, 'tokens', 3),
    ({'context_tokens': 60}, 'context', 3),
    ({'turn_tokens': 1}, 'length', 1),
  ],
)
def test_a_limit_ends_an_episode_which_counts(changes, ended, turns):
  _, _, ((one, _),) = play(guessing, records=RECORDS[1:], **changes)
  assert one.account.ended == ended and not one.failure
  assert one.episode.finish == engines.TRUNCATED
  assert one.episode.turn is not None
  assert one.episode.turn[one.episode.chosen].max() + 1 == turns
  # As it stands: what the turns were given until then.
  rewards = turns - 1 if ended == 'length' else turns
  assert one.reward == -0.25 * rewards


def test_the_end_of_the_whole_text_ends_the_episode():
  other = TOKENIZER.eos_ids[1]

  def answer(request, number):
    return [*TOKENIZER.encode('1'), other]

  _, _, ((one, _),) = play(guessing, answer, RECORDS[1:])
  assert one.account.ended == 'end' and one.episode.finish == engines.ENDED


def test_a_failure_is_no_reward():
  async def failing(policy, example, seed):
    await policy.say('a')
    policy.reward(1.0)
    raise KeyError('no such room')

  async def never(policy, example, seed):
    raise RuntimeError('cannot begin')

  _, _, ((one, other),) = play(failing, records=RECORDS[:1])
  assert one.reward is None and 'no such room' in one.failure
  assert one.episode.chosen.any() and 'no such room' in other.failure
  _, (prompt,), ((one, _),) = play(never, records=RECORDS[:1])
  assert prompt == [TOKENIZER.eos_ids[0]] and not len(one.episode.ids)
  assert 'cannot begin' in one.failure


def test_who_gives_no_reward_has_none():
  async def silent(policy, example, seed):
    await policy.say('a')

  _, _, ((one,),) = play(silent, records=RECORDS[:1], group=1)
  assert one.reward is None and not one.failure


def test_what_was_away_begins_again_with_the_same_keys():
  begun = []

  async def away(policy, example, seed):
    begun.append(seed)
    reply = await policy.say(f'Guess {seed}')
    if len(begun) <= 2:
      raise Unavailable('the server is away')
    return float(len(reply.text))

  engine, _, ((one, _),) = play(away, records=RECORDS[:1])
  # Of the two, one or both have been away twice by then.
  assert one.reward == 1 and len({*begun}) == 1 and 3 <= len(begun) <= 4
  asked = [x for x in engine.requests if x.limit > 1]
  keys = [tuple(key) for x in asked for key in x.keys.tolist()]
  assert len(keys) == len(begun) and len({*keys}) == 2
  assert one.episode.chosen.sum() == 2  # of the last try alone


def forking(delays):
  async def episode(policy, example, seed):
    await policy.say('first')
    forks = [policy.fork() for _ in delays]

    async def go(fork, delay):
      await asyncio.sleep(delay)
      reply = await fork.say(f'branch {delay}')
      fork.reward(float(reply.tokens))

    await asyncio.gather(*map(go, forks, delays))
    return 0.5

  return episode


def test_forks_have_one_order_whatever_their_delays():
  def keyed(request, number):
    return [
      *TOKENIZER.encode(str(request.keys[number][1] % 100)),
      TOKENIZER.eos_ids[0],
    ]

  found = []
  for delays in ((0, 0.05), (0.05, 0)):
    _, _, ((one, _),) = play(forking(delays), keyed, RECORDS[:1])
    assert one.episode.previous is not None
    chosen = one.episode.chosen
    found.append((one.episode.ids[chosen].tolist(), one.reward))
  assert found[0] == found[1]


def read_before(prompt, episode, turn):
  """What a turn of an episode reads, by the places that its tokens follow."""
  ids, place = episode.ids.tolist(), np.flatnonzero(episode.turn == turn)
  place = int(place[episode.chosen[place]][0])
  previous = episode.previous
  found = []
  while True:
    place = place - 1 if previous is None else int(previous[place])
    if place < 0:
      return [*prompt, *found[::-1]]
    found.append(ids[place])


@pytest.mark.parametrize('alike', [True, False])
@pytest.mark.parametrize('says_itself', [True, False])
def test_a_fork_before_anything_was_said_reads_what_it_is_trained_on(
  alike, says_itself
):
  async def best_of(policy, example, seed):
    forks = [policy.fork() for _ in range(3)]
    said = [f'Guess{"" if alike else n}.' for n in range(3)]
    await asyncio.gather(*map(lambda fork, text: fork.say(text), forks, said))
    await forks[0].say('again')
    if says_itself:
      await policy.say('last')

  engine, (prompt,), (played,) = play(
    best_of, records=RECORDS[:1], episode_tokens=90
  )
  asked = {tuple(map(int, x.ids)) for x in engine.requests if x.limit > 1}
  for one in played:
    turns = 5 if says_itself else 4
    assert not one.failure and one.account.turns == turns
    read = [
      tuple(read_before(prompt, one.episode, turn)) for turn in range(turns)
    ]
    assert {*read} == asked, [TOKENIZER.decode_whole(x) for x in read]


async def twice(policy, example, seed):
  await policy.say('a')
  await policy.say('b', max_tokens=4)


def limits_asked(**changes):
  """The limits of the calls of an episode, and how it ended."""
  engine, _, ((one,),) = play(twice, records=RECORDS[:1], group=1, **changes)
  return [request.limit for request in engine.requests], one.account.ended


def test_a_turn_may_be_as_long_as_what_is_left():
  length = len(TOKENIZER.begin_chat('a'))
  assert limits_asked() == ([12, 4], 'done')
  assert limits_asked(episode_tokens=5) == ([5, 3], 'done')
  assert limits_asked(context_tokens=length + 3) == ([3], 'context')
  assert limits_asked(context_tokens=length) == ([], 'context')


def test_contexts_that_ask_at_once_have_what_the_others_leave():
  async def episode(policy, example, seed):
    await policy.say('a')
    forks = [policy.fork() for _ in range(3)]
    await asyncio.gather(*(fork.say('b') for fork in forks))

  def limits_of(**changes):
    engine, _, ((one,),) = play(
      episode, records=RECORDS[:1], group=1, **changes
    )
    return engine, [one.limit for one in engine.requests]

  engine, limits = limits_of()
  assert limits == [12] * 4
  first, second = (len(one.ids) for one in engine.requests[:2])
  assert limits_of(episode_tokens=2 + 12 + 12 + 5)[1] == [12, 12, 12, 5]
  size = second + 12 + (second - first - 2) + 7
  assert limits_of(context_tokens=size, turns=3)[1] == [12, 12, 7]


def test_of_a_long_result_the_middle_is_left_out():
  text = 'zyxwvutsrq'
  assert len(TOKENIZER.encode(text)) == 10

  async def episode(policy, example, seed):
    await policy.say(text)
    await policy.say({'role': 'tool', 'content': text})

  for most, shown in (
    (10, text),
    (9, 'zyxwv\n[1 tokens left out]\ntsrq'),
    (5, 'zyx\n[5 tokens left out]\nrq'),
    (1, 'z\n[9 tokens left out]\n'),
  ):
    engine, _, ((one,),) = play(
      episode, records=RECORDS[:1], group=1, result_tokens=most
    )
    said = [x['content'] for x in one.account.messages]
    assert one.failure == '' and said == [text, '1', shown, '2']
    assert shown in TOKENIZER.decode_whole(engine.requests[1].ids)


def test_whom_a_limit_meets_is_no_matter_of_who_came_first():
  found = []
  for order in ((0, 1), (1, 0)):

    async def episode(policy, example, seed, order=order):
      await policy.say('a')
      forks = policy.fork(), policy.fork()
      await asyncio.gather(*(forks[n].say(f'fork {n}') for n in order))

    _, _, ((one,),) = play(episode, records=RECORDS[:1], group=1, turns=2)
    assert one.account.ended == 'turns' and not one.failure
    found.append(TOKENIZER.decode_whole(one.episode.ids))
  assert found[0] == found[1] and 'fork 0' in found[0]


def test_what_a_fork_still_asks_when_its_episode_is_over_is_not_drawn():
  async def episode(policy, example, seed):
    await policy.say('a')
    task = asyncio.create_task(policy.fork().say('b'))
    await asyncio.sleep(0)
    task.cancel()
    return 1.0

  engine, _, ((one,),) = play(episode, records=RECORDS[:1], group=1)
  assert one.reward == 1 and len(engine.requests) == 1


def test_rewards_of_one_turn_add_up():
  async def episode(policy, example, seed):
    await policy.say('a')
    policy.reward(1.0)
    policy.reward(2.0)

  _, _, ((one,),) = play(episode, records=RECORDS[:1], group=1)
  assert one.reward == 3 and one.account.turn_rewards == (3,)


def test_first_turns_with_limits_of_their_own_are_requests_of_their_own():
  async def short(policy, example, seed):
    await policy.say('Well?', max_tokens=1 + seed % 2)

  engine, _, _ = play(
    short, records=RECORDS[:1], group=8, options={'alike': False}
  )
  limits = [one.limit for one in engine.requests]
  assert {1, 2} == {*limits} and len(limits) == 8
  assert all(len(one.keys) == 1 for one in engine.requests)


def test_a_round_of_groups_and_of_single_calls_has_a_request_per_episode(
  queues,
):
  async def episode(policy, example, seed):
    is_alike = example['answer'] == '3'
    await policy.say('Well?', max_tokens=5 if is_alike else 1 + seed % 2)

  engine, _, _ = play(episode, group=8, options={'alike': False})
  sizes = [len(one.keys) for one in engine.requests]
  assert sizes == ([1] * 16 if queues else [8] + [1] * 15)


def test_episodes_that_begin_with_other_tokens_have_no_prompt():
  bare = '{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}'
  tokenizer = continuation_test._tokenizer(bare)

  async def begins(policy, example, seed):
    await policy.say('ab'[seed % 2])

  with pytest.raises(ValueError, match='record 7 share no first token'):
    play(
      begins,
      records=[{'prompt': 'a', 'index': 7}],
      group=8,
      tokenizer=tokenizer,
      options={'alike': False},
    )


def add(a: int, b: int) -> int:
  """Adds."""
  return a + b


def test_a_template_without_tools_gets_them_as_texts():
  said = iter(['```json\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n```'])

  def answer(request, number):
    text = next(said, '3')
    return [*TOKENIZER.encode(text), TOKENIZER.eos_ids[0]]

  records = [{'prompt': 'How much is 1+2?'}]
  _, (prompt,), ((one,),) = play(
    [add],
    answer,
    records,
    1,
    formats.find('json_block'),
    turn_tokens=99,
    episode_tokens=999,
    context_tokens=999,
  )
  text = TOKENIZER.decode_whole([*prompt, *one.episode.ids])
  assert text.count('"name": "add", "description": "Adds."') == 1
  assert '<|im_start|>user\nResult of add:\n3<|im_end|>' in text
  assert one.account.last_text == '3' and one.account.tool_calls == 1


class Scripted:
  """A player that gives its events in rounds, and notes what it is told."""

  def __init__(self, *rounds):
    self.rounds, self.answered, self.begun = [*rounds], [], []

  def begin(self, begin):
    self.begun.append(begin.episode)

  def wait(self):
    return self.rounds.pop(0)

  def news(self, secs=0.0):
    return self.rounds.pop(0) if self.rounds else []

  def answer(self, episode, context, reply):
    self.answered.append((episode, context))

  def cancel(self, episode, reason):
    pass


def scripted(player, group, tokenizer=TOKENIZER, answer=counting):
  engine = FakeEngine(answer, FakeEngine.usual)
  engine.load(None, 3)
  prompts, played = play_lib.play(
    RECORDS[:1], [7], engine, tokenizer, player, HERMES, SAMPLING, LIMITS,
    group, seed=1, rollout=4,
  )  # fmt: skip
  return engine, played[0]


def say(episode, text, context=0, tools=()):
  messages = [{'role': 'user', 'content': text}]
  return events.Say(episode, context, messages, tools, None)


def done(episode):
  return events.Done(episode, 1.0, 0, 0, 0, 0.0)


def test_what_is_drawn_for_a_try_before_is_left_out():
  player = Scripted(
    [say(0, 'first'), say(1, 'other')],
    # Asked at once, the other one is answered by now, and this one not yet.
    [events.Failed(0, 'away', unavailable=True)],
    [],
    [say(0, 'first again')],
    [],
    [done(0), done(1)],
  )
  engine, played = scripted(player, 2)
  for one, text in zip(played, ['first again', 'other']):
    assert [m['content'] for m in one.account.messages] == [text, '1']
    assert one.account.turns == 1
  asked = [n for n, one in enumerate(engine.requests) if one.calls]
  assert sorted(engine.forgotten) == asked


def test_a_call_of_a_try_before_is_not_drawn(queues):
  """One begins again while the call of another one waits."""
  player = Scripted(
    [say(0, 'first'), events.Failed(1, 'away', unavailable=True)],
    # The other one is away too, before anything was drawn for it.
    [events.Failed(0, 'away', unavailable=True), say(1, 'second')],
    [say(0, 'first again')],
    [done(0), done(1)],
  )
  engine, played = scripted(player, 2)
  assert player.begun == [0, 1, 1, 0]
  assert len(player.answered) == (3 if queues else 2)
  for one, text in zip(played, ['first again', 'second']):
    assert [m['content'] for m in one.account.messages][0] == text
    assert one.account.turns == 1


def test_what_no_template_takes_fails_its_episode_alone():
  async def odd(policy, example, seed):
    await policy.say('Well?')
    if seed % 2:
      await policy.say({'role': 'user', 'content': 5})
    return 1.0

  _, _, ((*group,),) = play(
    odd, records=RECORDS[:1], group=8, options={'alike': False}
  )
  failures = [one for one in group if one.failure]
  assert 0 < len(failures) < 8
  for one in failures:
    assert one.reward is None and one.account.ended == 'failed'
  assert all(one.reward == 1.0 for one in group if not one.failure)


def schema(name):
  function = {'name': name, 'description': name, 'parameters': {}}
  return {'type': 'function', 'function': function}


def test_tools_are_those_of_a_context():
  player = Scripted(
    [
      events.Forked(0, 1, 0),
      say(0, 'a', 0, (schema('alpha'),)),
      say(0, 'b', 1, (schema('beta'),)),
    ],
    [done(0)],
  )
  source = trap_templates.ALL['tools_in_system'].source
  engine, _ = scripted(player, 1, continuation_test._tokenizer(source))
  read = [TOKENIZER.decode_whole(one.ids) for one in engine.requests]
  assert ['alpha' in text for text in read] == [True, False]
  assert ['beta' in text for text in read] == [False, True]


def test_the_same_words_are_read_by_the_tools_of_their_context():
  text = '<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n'
  ids = TOKENIZER.encode(f'{text}</function>\n</tool_call>')
  found = []

  async def episode(policy, example):
    for kind in 'integer', 'string':
      tool = schema('add')
      tool['function']['parameters'] = {'properties': {'a': {'type': kind}}}
      reply = await policy.fork().say('a', tools=[tool])
      found.extend(call.arguments for call in reply.calls)

  _, _, ((one,),) = play(
    episode,
    lambda *_: [*ids, TOKENIZER.eos_ids[0]],
    RECORDS[:1],
    1,
    formats.find('xml'),
    turn_tokens=999,
    episode_tokens=9999,
    context_tokens=9999,
  )
  assert one.failure == '' and found == [{'a': 1}, {'a': '1'}]


def test_the_limit_that_cuts_a_turn_is_named():
  async def long(policy, example):
    await policy.say('Well?')

  for changes, ended in (
    ({'episode_tokens': 3, 'turn_tokens': 5}, 'tokens'),
    ({'episode_tokens': 9, 'turn_tokens': 3}, 'length'),
  ):
    answer = lambda request, number: TOKENIZER.encode('abcdefghijkl')
    _, _, ((one,),) = play(long, answer, RECORDS[:1], 1, **changes)
    assert one.account.ended == ended


def test_rewards_read_what_the_policy_chose():
  _, prompts, played = play(guessing)
  seen = []

  def judge(prompt, completion, example):
    seen.append((completion, example))
    return 1.0

  records = [one | {'index': n} for n, one in enumerate(RECORDS)]
  rollout = playing.collect(
    records,
    lambda records, index: (prompts, played),
    TOKENIZER,
    [rewards.WeightedReward('judge', judge)],
    (400,),
  )
  assert (np.asarray(rollout.batch.reward) == 1).all()
  for (completion, example), one in zip(
    seen, (one for group in played for one in group), strict=True
  ):
    episode = one.episode
    assert completion == one.account.last_text
    assert example['completion_ids'] == episode.ids[episode.chosen].tolist()
    assert example['truncated'] is False
    told = example['episode']
    assert told['turn_rewards'] and told['reward'] == one.reward
    assert told['messages'] == [*one.account.messages]
    assert told['turns'] == len(told['messages']) // 2 == one.account.turns
    assert (told['ended'], told['failure']) == ('done', '')


def test_a_rollout_in_which_all_have_failed_has_no_tokens():
  async def fails(policy, example):
    raise OSError('away')

  _, prompts, played = play(fails)
  records = [one | {'index': n} for n, one in enumerate(RECORDS)]
  rollout = playing.collect(
    records,
    lambda records, index: (prompts, played),
    TOKENIZER,
    [rewards.WeightedReward('environment', rewards.environment)],
    (400,),
  )
  assert not rollout.batch.mask.any() and not rollout.batch.valid.any()


@pytest.mark.parametrize('late', [False, True])
def test_the_last_word_is_that_of_the_first_context(late):
  """Whichever context is answered last."""
  number = itertools.count()

  def answer(request, _):
    return [*TOKENIZER.encode(f'say {next(number)}'), TOKENIZER.eos_ids[0]]

  rounds = [say(0, 'main')], [say(0, 'fork', 1)]
  first, second = rounds[::-1] if late else rounds
  player = Scripted([events.Forked(0, 1, 0), *first], second, [done(0)])
  _, (one,) = scripted(player, 1, answer=answer)
  assert one.account.last_text == f'say {int(late)}'

  def echo(request, _):
    is_b = 'fork b' in TOKENIZER.decode_whole(request.ids)
    return [*TOKENIZER.encode('b' if is_b else 'a'), TOKENIZER.eos_ids[0]]

  # Without a turn there, that of the last in the tree.
  forks = [events.Forked(0, n, 0) for n in (1, 2)]
  said = [say(0, 'fork a', 1), say(0, 'fork b', 2)]
  player = Scripted([*forks, *(said[::-1] if late else said)], [done(0)])
  _, (one,) = scripted(player, 1, answer=echo)
  assert one.account.last_text == 'b'
