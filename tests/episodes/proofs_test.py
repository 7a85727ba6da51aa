"""What is read and sampled is what is trained: random episodes, played."""

import asyncio
import collections
import random

import numpy as np
import pytest

from grpo_jax import engines
from grpo_jax import rewards
from grpo_jax.environments import formats
from grpo_jax.environments import sessions
from grpo_jax.episodes import play as play_lib
from grpo_jax.episodes import rollout as rollout_lib
from tests.data import continuation_test
from tests.data import trap_templates
from tests.fake_engine import FakeEngine

LIMITS = play_lib.Limits(
  turns=7, turn_tokens=12, episode_tokens=60, context_tokens=2000
)
NO_LIMITS = play_lib.Limits(100, 100, 10_000, 10_000)
GROUP = 2


class Keyed(FakeEngine):
  """What it says depends on a call's key alone.

  Attributes:
    calls: By its key what each call has read, what was said, and its finish.
  """

  def __init__(self, tokenizer, end, is_endless=False):
    super().__init__(self._say)
    self._tokenizer, self._end, self.calls = tokenizer, end, {}
    self._is_endless = is_endless
    self.load(None, 3)

  def _say(self, request, number):
    draw = random.Random(request.keys[number].tobytes())
    size = draw.choice(
      [len(continuation_test.SPECIAL), self._tokenizer.vocab_size]
    )
    ids = draw.choices(range(size), k=draw.randint(1, 8))
    ids += [self._end] * (draw.random() < 0.9)
    if self._is_endless:
      ids = [one for one in ids if one not in self._tokenizer.eos_ids]
      ids += [self._end]
    ends = [n for n, one in enumerate(ids) if one in self._tokenizer.eos_ids]
    return ids[: ends[0] + 1] if ends else ids

  def sampled(self, number, g):
    one, request = super().sampled(number, g), self.requests[number]
    key = tuple(request.keys[g].tolist())
    if one.finish == engines.TRUNCATED and key[0] % 2:
      one = one._replace(finish=engines.STOPPED)
    # Requests that fill a round come first, and have the key of a real one.
    before = self.calls.get(key)
    assert before is None or before[0] == tuple(request.ids)
    self.calls[key] = tuple(request.ids), tuple(one.ids.tolist())
    return one


def scripted(trap, tools, delay=lambda: None):
  """Says random things in contexts that it forks at random."""

  async def go_on(draw, policy):
    if wait := delay():
      await asyncio.sleep(wait)
    reply = await policy.say(*continuation_test._new(draw, trap))
    policy.reward(float(reply.tokens))

  async def episode(policy, example, seed):
    del seed
    draw = random.Random(example['script'])
    asked = {'role': 'user', 'content': continuation_test._text(draw)}
    reply = await policy.say(asked, tools=tools)
    draw = random.Random(f'{example["script"]} {reply.text}')
    contexts = [policy]
    for _ in range(draw.randint(0, 4)):
      contexts += [
        draw.choice(contexts).fork() for _ in range(draw.choice((0, 0, 1, 2)))
      ]
      some = draw.sample(contexts, draw.randint(1, len(contexts)))
      draws = [random.Random(draw.random()) for _ in some]
      await asyncio.gather(*map(go_on, draws, some))
    return 0.5

  return episode


def play(tokenizer, end, environment, scripts, limits=LIMITS, renders=False):
  engine = Keyed(tokenizer, end, is_endless=limits is not LIMITS)
  records = [{'prompt': 'a', 'script': script} for script in scripts]
  options = sessions.Options(where='here')
  with sessions.Player({'': environment}, options) as player:
    prompts, played = play_lib.play(
      records,
      [*scripts],
      engine,
      tokenizer,
      player,
      formats.find('hermes'),
      engines.Sampling(eos_ids=tokenizer.eos_ids),
      limits,
      GROUP,
      seed=1,
      rollout=4,
      renders=renders,
    )
  assert not [one.failure for group in played for one in group if one.failure]
  return engine, prompts, [[one.episode for one in group] for group in played]


def turns_of(prompt, episode):
  """Of each turn what it has read, from the root on, and what was said."""
  previous = episode.previous
  if previous is None:
    previous = np.arange(-1, len(episode.ids) - 1)
  assert episode.turn is not None
  for number in range(int(episode.turn.max()) + 1):
    places = np.flatnonzero(episode.chosen & (episode.turn == number))
    assert (previous[places[1:]] == places[:-1]).all()
    read, at = [], int(previous[places[0]])
    while at >= 0:
      read.append(int(episode.ids[at]))
      at = int(previous[at])
    yield (*prompt, *read[::-1]), tuple(episode.ids[places].tolist())


def check(tokenizer, end, trap, tools, scripts, renders=False):
  """Plays, and compares what is trained with what the engine was asked."""
  engine, prompts, episodes = play(
    tokenizer, end, scripted(trap, tools), scripts, renders=renders
  )
  trained = collections.Counter(
    turn
    for prompt, group in zip(prompts, episodes, strict=True)
    for one in group
    for turn in turns_of(prompt, one)
  )
  assert trained == collections.Counter(engine.calls.values())
  drawn = sum(len(said) for _, said in engine.calls.values())
  number = len(scripts) * GROUP
  scores = rewards.Scores(
    np.zeros(number, np.float32),
    np.zeros((number, 1), np.float32),
    np.ones(number, bool),
  )
  batch = rollout_lib.make_rollout(
    episodes,
    scores,
    (8192,),
    prompts=prompts,
    prompt_texts=[''] * len(scripts),
    texts=[[''] * GROUP] * len(scripts),
    index=np.arange(len(scripts)),
  ).batch
  assert batch.mask.sum() == drawn
  assert batch.logp_sampler is not None
  assert (batch.logp_sampler[batch.mask] == -0.75).all()
  assert not batch.logp_sampler[~batch.mask].any()
  assert set(batch.version[batch.mask].tolist()) == {3}
  return episodes


def trap_of(name):
  trap = trap_templates.ALL[name]
  tokenizer = continuation_test._made(trap)
  (end,) = tokenizer.encode(trap.end)
  tools = trap_templates.TOOLS if name in continuation_test.WITH_TOOLS else ()
  return tokenizer, end, trap, tools


# Eleven of the twelve: one is refused before anything is played.
@pytest.mark.parametrize(
  'number, renders',
  [
    (14, False),
    pytest.param(455, False, marks=pytest.mark.long),
    pytest.param(98, True, marks=pytest.mark.long),
  ],
)
@pytest.mark.parametrize('name', continuation_test.TAKEN)
def test_the_ids_of_every_call_are_those_that_are_trained(
  name, number, renders
):
  forked = several = 0
  for first in range(0, number, 14):
    scripts = range(first, min(first + 14, number))
    for group in check(*trap_of(name), scripts, renders):
      for one in group:
        assert one.turn is not None
        assert one.turn.max() < LIMITS.turns
        forked += one.previous is not None
        several += one.turn.max() > 1
  assert forked > number / 8 and several > number / 4


def test_random_delays_change_no_bit():
  tokenizer, end, trap, tools = trap_of('results_as_user')
  found = []
  for seed in (None, 1, 2):
    delays = random.Random(seed)

    def delay(draw=delays, is_slow=seed is not None):
      return draw.random() / 100 if is_slow else None

    made = scripted(trap, tools, delay)
    found.append(play(tokenizer, end, made, range(4), NO_LIMITS))
  for engine, prompts, episodes in found[1:]:
    assert engine.calls == found[0][0].calls and prompts == found[0][1]
    for group, others in zip(episodes, found[0][2], strict=True):
      for one, other in zip(group, others, strict=True):
        told, others_told = one.account, other.account
        assert told._replace(secs=0) == others_told._replace(secs=0)
        for name in ('ids', 'chosen', 'turn', 'previous', 'logp'):
          np.testing.assert_array_equal(
            getattr(one, name), getattr(other, name)
          )


@pytest.mark.parametrize('name', ['separator', 'thinking', 'opener'])
@pytest.mark.parametrize('finish', [engines.ENDED, engines.STOPPED])
def test_a_turn_that_a_stop_string_ended_is_closed(name, finish):
  tokenizer, end, trap, _ = trap_of(name)
  ended = finish == engines.ENDED
  said = [*tokenizer.encode('7'), *([end] if ended else [])]

  class Stops(FakeEngine):
    def sampled(self, number, g):
      return super().sampled(number, g)._replace(finish=finish)

  engine = Stops(lambda request, number: said)
  engine.load(None, 3)

  async def twice(policy, example, seed):
    await policy.say('a')
    await policy.say('b')

  options = sessions.Options(where='here')
  with sessions.Player({'': twice}, options) as player:
    _, ((one,),) = play_lib.play(
      [{'prompt': 'a'}],
      [0],
      engine,
      tokenizer,
      player,
      formats.find('hermes'),
      engines.Sampling(eos_ids=tokenizer.eos_ids),
      LIMITS,
      1,
      seed=1,
      rollout=0,
    )
  episode = one.episode
  read = tokenizer.decode_whole(episode.ids[~episode.chosen])
  closing = '\n</think>\n\n' + trap.end if name == 'opener' else trap.end
  new = [{'role': 'user', 'content': 'b'}]
  assert read == ('' if ended else closing) + trap.between(new)


@pytest.mark.reference
@pytest.mark.parametrize(
  'path', continuation_test._others() or [None], ids=lambda p: p and p.stem
)
def test_the_same_with_the_templates_of_trl(path):
  if path is None:
    pytest.skip('trl is not installed; its wheel has the templates')
  tokenizer = continuation_test._other(path)
  if tokenizer is None:
    pytest.skip('the template takes no texts')
  trap = trap_templates.SEPARATOR  # random messages without results of tools
  end = tokenizer.turn_end_ids()[0]
  check(tokenizer, end, trap, (), range(20))
