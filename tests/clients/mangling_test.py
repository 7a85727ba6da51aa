"""Chats that clients mangle at random, and what is trained of them.

Whatever a client does to its history, each token that was drawn lies in one
place, behind the ids that the engine has read before it.
"""

import asyncio
import collections
import copy
import json
import random
import re

import numpy as np
import pytest

from grpo_jax import engines
from grpo_jax.environments import sessions
from grpo_jax.environments import tools
from grpo_jax.environments.base import Ended
from grpo_jax.episodes import play as play_lib
from grpo_jax.serving import wire
from tests import trees
from tests.clients import mangling
from tests.clients import rollouts
from tests.clients import task
from tests.data import continuation_test
from tests.data import trap_templates
from tests.episodes import drawn_episodes_test as drawn_episodes
from tests.episodes import play_test
from tests.fake_engine import FakeEngine

TOOLS = [tools.schema(task.calculator)]
WIDE = play_lib.Limits(
  turns=40, turn_tokens=300, episode_tokens=9000, context_tokens=60_000
)
TIGHT = play_lib.Limits(
  turns=7, turn_tokens=200, episode_tokens=700, context_tokens=2500
)
CALL = '<tool_call>\n%s\n</tool_call>'
CALLS = (
  '{"name": "calculator", "arguments": {"expression":  "1 + 2"}}',
  '{"name": "calculator", "arguments": {"b": 1, "expression": "é", "a": []}}',
  '{"name": "calculator", "arguments": "1 + 2"}',
  '{"name": "calculator", "arguments": {"expression": NaN}}',
  '{"name": "other", "arguments": {}}',
  '{"name": "calculator"}',
  '{"arguments": {"expression": "1"}}',
  '{"name": "calculator", ',
  '7',
)


def tokenizer(trap):
  made = trap_templates.ALL[trap]
  ends = '<|im_end|>', '<|endoftext|>', '<end_of_turn>'
  return continuation_test._tokenizer(
    made.source, ends[2:] if ends[2] in made.source else ends[:2]
  )


WITH_TOOLS = tokenizer('tools_in_system')


class Told(FakeEngine):
  """Says by its log-probabilities which token of which request each is."""

  def sampled(self, number, g):
    found = super().sampled(number, g)
    logp = -(1 + number + np.arange(len(found.ids)) / 1024)
    return found._replace(logp=logp.astype(np.float32))


def saying(words, calling=0.6):
  """Thinks, says, calls, spaces: whatever the key of a request draws.

  Args:
    words: A tokenizer.
    calling: The share of answers with calls.
  """

  def answer(request, number):
    drawn = random.Random(np.asarray(request.keys)[number].tobytes())
    name = f'{drawn.randrange(10**9):09}'  # by which an answer is found
    text = drawn.choice([name, f' {name} is it. \n', f'Hm.\n\n{name}'])
    if drawn.random() < 0.4:
      text = f'<think>\nWell {drawn.randrange(9)}</think>\n{text}'
    if drawn.random() < calling:
      some = drawn.choices(CALLS, (6, 4, 1, 1, 1, 1, 1, 1, 1), k=2)
      calls = [CALL % one for one in some[: drawn.randint(1, 2)]]
      text += '\n'.join(calls)
    return [*words.encode(text), words.eos_ids[0]]

  return answer


def played(
  environment, seed, told, trap='tools_in_system', limits=WIDE, **more
):
  """An engine, a prompt, and an episode.

  Args:
    environment: As `sessions.Player` takes it.
    seed: Of what the policy says.
    told: Capabilities of the engine.
    trap: Of `trap_templates.ALL`.
    limits: Of the episode.
    **more: See `play.play`.
  """
  words = tokenizer(trap)
  engine = Told(saying(words), told)
  engine.load(None, 3)
  options = sessions.Options(where='here')
  with sessions.Player({'': environment}, options) as player:
    (prompt,), ((one,),) = play_lib.play(
      play_test.RECORDS[:1],
      [0],
      engine,
      words,
      player,
      play_test.HERMES,
      engines.Sampling(eos_ids=words.eos_ids),
      limits,
      1,
      seed=seed,
      rollout=4,
      **more,
    )
  return engine, prompt, one


class Direct:
  """Asks a policy what a client sends, without a server."""

  def __init__(self, policy):
    self._policy = policy

  async def ask(self, messages):
    """The reply, and the message that a client reads."""
    body = {'model': 'policy', 'messages': messages, 'tools': TOOLS}
    request = wire.chat(json.dumps(body).encode(), True)
    reply = await self._policy.chat(request.messages, request.tools)
    finish = 'tool_calls' if reply.calls else 'stop'
    answer = wire.Answer(reply.text, reply.reasoning, reply.calls, finish)
    said = json.loads(json.dumps(wire.chat_json(answer, 1)))
    return reply, said['choices'][0]['message']

  def leave_out(self, reply):
    """It is not learned from."""
    self._policy.leave_out(reply.turn)
    return True


def results(message, drawn):
  """What an agent says to an answer: results, or the user's next words."""
  calls = message.get('tool_calls') or ()
  if not calls:
    return [{'role': 'user', 'content': f'And {drawn.randrange(99)}?'}]
  return [
    {
      'role': 'tool',
      'tool_call_id': call['id'],
      'content': f'{drawn.randrange(999)}',
    }
    for call in calls
  ]


async def converse(talk, seed, ways, most=3, requests=12):
  """A client that mangles, forks, repeats itself and leaves out.

  Args:
    talk: Such as `Direct`.
    seed: Of all that it does.
    ways: How it mangles.
    most: Of them at once.
    requests: After so many it ends, or twice as many at most.

  Returns:
    What it has sent, each with its reply, and the replies that it left out.
  """
  drawn = random.Random(seed)
  histories = [[{'role': 'user', 'content': 'How many pens?'}]]
  told, left = [], []
  for _ in range(requests):
    history = histories[-1]
    if drawn.random() < 0.25:  # an older one goes on, or the same once more
      history = drawn.choice(histories)
    at_once = drawn.choice([1, 1, 1, 2, 3]) if ways is not KIND else 1
    sent = [mangling.mangled(history, drawn, ways, most)] * at_once
    if drawn.random() < 0.5:
      sent = [mangling.mangled(history, drawn, ways, most) for _ in sent]
    answers = await asyncio.gather(
      *(talk.ask(one) for one in sent), return_exceptions=True
    )
    for chat, answer in zip(sent, answers):
      if isinstance(answer, ValueError):
        assert 'cannot be read' in str(answer)  # no template takes it
        continue
      if isinstance(answer, Ended):
        return told, left
      if isinstance(answer, BaseException):
        raise answer
      reply, message = answer
      told.append((chat, reply))
      histories.append([*chat, message, *results(message, drawn)])
      if drawn.random() < 0.1 and talk.leave_out(reply):
        left.append(reply)
  return told, left


KIND = mangling.KINDLY
EVERY = (*mangling.KINDLY, *mangling.EDITS)


def check(engine, prompt, one, left=(), is_cut=False):
  """What must hold of each episode.

  Args:
    engine: That has drawn it, a `Told`.
    prompt: The ids that it begins with.
    one: The episode, as it was played.
    left: How many turns of it were left out.
    is_cut: Whether what was drawn may have reached nobody.

  Returns:
    The numbers of the requests whose answers are trained.
  """
  assert one.failure == ''
  episode = one.episode
  previous = episode.previous
  if previous is None:
    previous = np.arange(-1, len(episode.ids) - 1)
  assert (previous < np.arange(len(previous))).all()
  places = np.flatnonzero(episode.chosen)
  assert not episode.logp[~episode.chosen].any()
  # By its log-probability each chosen token tells which one it is.
  said = -episode.logp[places].astype(np.float64) - 1
  number = np.floor(said).astype(int)
  offset = np.round((said - number) * 1024).astype(int)
  assert len({*zip(number, offset)}) == len(places)  # each in one place
  trained = collections.defaultdict(list)
  for request, within, place in zip(number, offset, places):
    trained[request].append((within, place))
  for request, some in trained.items():
    asked = engine.requests[request]
    ids = [int(x) for x in engine.sampled(request, 0).ids]
    some = [place for _, place in sorted(some)]
    assert [int(episode.ids[place]) for place in some] == ids  # and whole
    way = trees.path(previous, some[-1])
    assert way[-len(ids) :] == some  # one behind the other
    read = [*prompt, *episode.ids[way[: -len(ids)]].tolist()]
    assert read == [int(x) for x in asked.ids]  # behind what it has read
  lost = len(engine.requests) - len(trained) - len(left)
  assert lost >= 0 if is_cut else lost == 0
  return {*trained}


def check_read(engine, words, told):
  """What a client has sent is what the policy has read, in that order.

  Returns:
    The numbers of the requests that it has heard the answers of.
  """
  read = {}
  for number, request in enumerate(engine.requests):
    said = words.decode_whole(engine.sampled(number, 0).ids)
    for name in re.findall(r'\d{9}', said):  # none if it was cut before
      read[name] = number, words.decode_whole(request.ids)
  heard = set()
  for chat, reply in told:
    (name,) = re.findall(r'\d{9}', reply.text)
    place, (number, text) = 0, read[name]
    heard.add(number)
    for message in chat:
      said = mangling.text(message).strip()
      assert said in text[place:], (said, text[place:])
      place = text.index(said, place) + len(said)
  return heard


@pytest.fixture(params=[True, False], ids=['at once', 'rounds'])
def told(request):
  return engines.Capabilities(entropy=True, queues=request.param)


@pytest.mark.parametrize('seed', range(12))
def test_no_way_changes_what_it_is_given(seed):
  drawn = random.Random(seed)
  call = {
    'id': 'call_0_0',
    'type': 'function',
    'function': {'name': 'calculator', 'arguments': '{"expression":  "1"}'},
  }
  chat = [
    {'role': 'system', 'content': 'a'},
    {'role': 'user', 'content': 'b'},
    {
      'role': 'assistant', 'content': ' c ', 'reasoning_content': 'd',
      'tool_calls': [call, {**call, 'id': 'call_0_1'}],
    },
    {'role': 'tool', 'tool_call_id': 'call_0_0', 'content': '2'},
    {'role': 'tool', 'tool_call_id': 'call_0_1', 'content': '3'},
    {'role': 'assistant', 'content': 'e'},
    {'role': 'user', 'content': 'f'},
  ]  # fmt: skip
  before = copy.deepcopy(chat)
  keys = wire_keys(before)
  for way in (*mangling.KINDLY, *mangling.EDITS):
    found = way(chat, drawn)
    assert chat == before
    assert wire_keys(found) == keys or way not in mangling.KINDLY
    assert found[-1]['role'] != 'assistant'
  again = [
    mangling.mangled(chat, random.Random(seed), most=9) for _ in range(2)
  ]
  assert again[0] == again[1] and chat == before
  # Each way but one that may draw what there is does something.
  for way in (*mangling.KINDLY, *mangling.EDITS):
    assert any(way(chat, random.Random(k)) != chat for k in range(9)), way


def wire_keys(messages):
  """By what the messages of a request are known."""
  from grpo_jax.environments import chats

  body = json.dumps({'model': 'policy', 'messages': messages}).encode()
  return [chats.key(one) for one in wire.chat(body, True).messages]


@pytest.mark.parametrize('seed', range(6))
def test_a_client_that_spells_otherwise_changes_nothing(seed, told):
  """Ids, log-probabilities and messages are those of a client that does not."""

  def environment(ways):
    async def episode(policy, example):
      del example
      talk = Direct(policy)
      drawn, mangles = random.Random(seed), random.Random(seed)
      history, new = [], [{'role': 'user', 'content': 'How many?'}]
      for _ in range(8):
        known = mangling.mangled(history, mangles, ways, len(ways))
        _, message = await talk.ask([*known, *new])
        history = [*known, *new, message]
        new = results(message, drawn)

    return episode

  (engine, prompt, one), (other, others, two) = (
    played(environment(ways), seed, told) for ways in ((), KIND)
  )
  assert prompt == others and len(engine.requests) == 8
  for a, b in zip(engine.requests, other.requests, strict=True):
    assert [*a.ids] == [*b.ids] and a.follows == b.follows
  for name in ('ids', 'chosen', 'logp', 'turn'):
    x, y = getattr(one.episode, name), getattr(two.episode, name)
    np.testing.assert_array_equal(x, y)
  assert one.episode.previous is two.episode.previous is None
  assert one.account.messages == two.account.messages
  assert len(check(other, prompt, two)) == 8


@pytest.mark.parametrize('renders', [False, True])
@pytest.mark.parametrize(
  'trap', ['tools_in_system', 'merges_results', 'results_as_user', 'strips']
)
@pytest.mark.parametrize('seed', range(4))
def test_every_token_lies_in_one_place_behind_what_was_read(
  seed, trap, renders, told
):
  found = []

  async def episode(policy, example):
    del example
    found[:] = await converse(Direct(policy), seed, EVERY)

  engine, prompt, one = played(episode, seed, told, trap, renders=renders)
  answered, left = found
  assert one.account.ended == 'done' and one.episode.previous is not None
  assert len(check(engine, prompt, one, left)) + len(left) == len(answered)
  assert one.account.turns == len(engine.requests) == len(answered) > 4
  check_read(engine, tokenizer(trap), answered)


@pytest.mark.parametrize('seed', range(12))
def test_limits_cut_a_mangled_episode_and_nothing_is_trained_twice(seed, told):
  found = []

  async def episode(policy, example):
    del example
    found[:] = await converse(Direct(policy), seed, EVERY, 1, 20)

  engine, prompt, one = played(episode, seed, told, limits=TIGHT)
  answered, left = found
  assert one.account.ended in ('turns', 'tokens', 'context', 'length')
  trained = check(engine, prompt, one, left, is_cut=True)
  assert len(trained) >= len(answered) - len(left)  # one may be cut
  assert len(engine.requests) > 2
  check_read(engine, WITH_TOOLS, answered)


class Recording(engines.LocalEngine):
  """Keeps what it was asked, and what it has drawn."""

  def __init__(self, *args, **kwargs):
    super().__init__(*args, **kwargs)
    self.asked, self.drawn = {}, {}

  def submit(self, request):
    number = super().submit(request)
    self.asked[number] = request
    return number

  def completed(self, every_tokens=None):
    for group in super().completed(every_tokens):
      self.drawn.update({(one.request, one.number): one for one in group})
      yield group


def test_what_an_engine_with_a_model_has_drawn_is_trained_as_it_was_read():
  """Bit for bit, and nothing that was read is sampled text encoded anew."""
  drawing = Recording(
    drawn_episodes.MODEL, prompt_buckets=(64, 512), completion_buckets=(16,)
  )
  drawing.load(drawn_episodes.PARAMS, version=3)
  kept = []

  async def episode(policy, example, seed):
    del seed
    name = ord(example['prompt'][-1])
    told, left = await converse(Direct(policy), name, EVERY, 2, 5)
    kept.append(len(told) - len(left))

  limits = play_lib.Limits(30, 16, 400, 512)
  prompts, played = drawn_episodes.play(drawing, 0, made=episode, limits=limits)
  found = collections.Counter()
  for prompt, group in zip(prompts, played):
    for one in group:
      assert one.failure == ''
      found.update(rollouts.turns(prompt, one.episode))
  drawn = collections.Counter(
    (
      tuple(map(int, drawing.asked[number].ids)),
      tuple(map(int, one.ids)),
      one.logp.tobytes(),
    )
    for (number, _), one in drawing.drawn.items()
  )
  assert found.total() >= sum(kept) > 12 and found <= drawn
