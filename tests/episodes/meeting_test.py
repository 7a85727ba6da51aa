"""Several processes, here threads, that play episodes together."""

import dataclasses
import time

import numpy as np
import pytest

from grpo_jax import engines
from grpo_jax.environments import formats
from grpo_jax.environments import sessions
from grpo_jax.environments.base import Unavailable
from grpo_jax.episodes import meeting
from grpo_jax.hosts import processes
from grpo_jax.hosts import stop_signal
from grpo_jax.run import judging
from grpo_jax.run.build import environment as build_environment
from grpo_jax.run.build.specs import EnvironmentSpec
from tests.data import continuation_test
from tests.data import trap_templates
from tests.episodes import play_test
from tests.episodes.play_test import LIMITS
from tests.episodes.play_test import SAMPLING
from tests.episodes.play_test import TOKENIZER
from tests.fake_engine import FakeEngine
from tests.hosts import processes_test

GROUP = 2
# The last ones are played longest, all by the last process.
RECORDS = [{'prompt': x, 'answer': y} for x, y in zip('abcde', '12145')]
SPEC = EnvironmentSpec(
  ('', {}),
  formats.find('hermes'),
  sessions.Options(),
  dataclasses.replace(LIMITS, turns=9),
  False,
  True,
  0.5,
)


async def forking(policy, example, seed):
  """Ends at a turn that its record says; asks something aside in between."""
  said, fork = f'Guess {example["prompt"]}, {seed % 7}.', None
  while True:
    reply = await policy.say(said)
    if fork is not None:
      await fork.say('aside again')
    if reply.text == '2':
      fork = policy.fork()
      fork.reward(float((await fork.say('aside')).tokens))
    if reply.text >= example['answer']:
      return 1.0
    policy.reward(-0.25)
    said = 'more'


THINKING = continuation_test._tokenizer(trap_templates.THINKING.source)


def thinking(request, number):
  """Says which turn it is, behind a thought that the template leaves out."""
  thought = THINKING.encode('<think>7</think>')
  return [*thought, *play_test.counting(request, number)]


def play(environment, hosts=meeting.ALONE, renders=False):
  """The requests, the prompts and the episodes, as one process knows them."""
  answer = thinking if renders else play_test.counting
  engine = FakeEngine(answer, engines.Capabilities(entropy=True))
  engine.load(None, 3)
  options = sessions.Options(where='here')
  with sessions.Player({'': environment}, options) as player:
    prompts, played = build_environment.play(
      dataclasses.replace(SPEC, renders=renders),
      player,
      engine,
      THINKING if renders else TOKENIZER,
      SAMPLING,
      SPEC.limits.turn_tokens,
      RECORDS,
      [*range(3, 3 + len(RECORDS))],
      group=GROUP,
      seed=1,
      rollout=4,
      hosts=hosts,
    )
  return engine.requests, prompts, played


def together(environment, number=3, renders=False):
  """What `play` returns, or raises, in each of several processes.

  Args:
    environment: `(rank) -> environment`.
    number: Of processes.
    renders: See `play.play`.
  """

  def body(peers):
    hosts = judging.hosts(peers, stop_signal.Stop())
    return play(environment(peers.rank), hosts, renders)

  return processes_test.run(body, number)[0]


def assert_requests_equal(found, wanted):
  assert len(found) == len(wanted)
  for one, other in zip(found, wanted):
    np.testing.assert_array_equal(one.ids, other.ids)
    np.testing.assert_array_equal(one.keys, other.keys)
    assert one.limit == other.limit


def untimed(played):
  return played.account._replace(secs=0)


def assert_episodes_equal(found, wanted):
  for name in found._fields:
    if name not in ('holder', 'account'):
      one, other = getattr(found, name), getattr(wanted, name)
      np.testing.assert_array_equal(one, other, err_msg=name)


def test_a_run_that_writes_chats_anew_leaves_out_thoughts():
  requests, _, _ = play(forking, renders=True)
  (thought,) = THINKING.encode('<think>')
  text = [TOKENIZER.decode_whole(one.ids) for one in requests]
  assert any('1<|im_end|>' in one and 'more' in one for one in text)
  assert not any(thought in one.ids for one in requests)


@pytest.mark.parametrize(
  'number, renders',
  [
    *((number, False) for number in (2, 3, 7)),
    pytest.param(3, True, marks=pytest.mark.long),
  ],
)
def test_several_play_what_one_plays(number, renders):
  """Some of seven have no record at all."""
  requests, prompts, played = play(forking, renders=renders)
  ends = together(lambda rank: forking, number, renders)
  owner = np.arange(len(RECORDS)) * number // len(RECORDS)
  assert len({*owner}) == min(number, len(RECORDS))
  for rank, end in enumerate(ends):
    asked, its_prompts, its_played = end
    assert_requests_equal(asked, requests)
    assert its_prompts == prompts
    for p, holder in enumerate(owner):
      for one, other in zip(its_played[p], played[p], strict=True):
        assert one.episode.holder == holder
        assert one.reward == other.reward
        assert untimed(one) == untimed(other)
        if holder == rank:
          assert_episodes_equal(one.episode, other.episode)
        else:
          assert not len(one.episode.ids)
          assert one.episode.ids.dtype == np.int32
  assert len({len(one.episode.ids) for row in played for one in row}) > 2


@pytest.mark.parametrize('environment', [play_test.guessing, forking])
def test_only_what_is_new_is_told(environment):
  sent = []

  def body(peers):
    hosts = judging.hosts(peers, stop_signal.Stop())

    def exchange(say):
      told = hosts.exchange(say)
      if peers.is_first:
        sent.append(told)
      return told

    return play(environment, hosts._replace(exchange=exchange))

  (_, prompts, _), *_ = processes_test.run(body, 2)[0]
  _, _, played = play(environment)
  *rounds, _ = sent
  ids = [one.ids for told in rounds for some in told for one, *_ in some]
  read = [~one.episode.chosen for group in played for one in group]
  firsts = GROUP * sum(map(len, prompts))
  most = firsts + sum(x.sum() for x in read)
  if environment is forking:  # two branches may begin alike
    assert sum(map(len, ids)) < most
  else:
    assert sum(map(len, ids)) == most


def test_what_was_away_in_one_begins_again_there():
  def environment(rank=0):
    begun = []

    async def away(policy, example, seed):
      begun.append(example['prompt'])
      await policy.say('Guess')
      if example['prompt'] == 'e' and begun.count('e') <= GROUP:
        raise Unavailable('the server is away')
      return float((await policy.say('more')).text)

    return away

  requests, *_ = play(environment())
  for asked, _, played in together(environment):
    assert_requests_equal(asked, requests)
    assert [[one.reward for one in row] for row in played] == [[2.0] * 2] * 5
  # Five groups; then the fifth anew beside second turns; then its second turns.
  begins = [x.limit > 1 and x.ids == requests[0].ids for x in requests]
  assert [*np.flatnonzero(begins)] == [0, 1, 2, 3, 4, 13]


def test_one_whose_environments_are_slow_is_waited_for():
  def environment(rank):
    async def slow(policy, example, seed):
      await policy.say('Guess')
      if rank == 0:
        time.sleep(0.3)
      return float((await policy.say('more')).text)

    return slow

  begun = time.monotonic()
  first, *others = together(environment)
  assert time.monotonic() - begun > 0.3
  for end in others:
    assert_requests_equal(end[0], first[0])


def test_a_player_that_raises_in_one_ends_all_with_its_error(monkeypatch):
  real, calls = sessions.Player.wait, []

  def wait(self):
    if calls and self is calls[0] and len(calls) > 1:
      raise RuntimeError('a worker cannot start')
    calls.append(self)
    return real(self)

  monkeypatch.setattr(sessions.Player, 'wait', wait)
  ends = together(lambda rank: forking)
  (own,) = [x for x in ends if isinstance(x, RuntimeError)]
  rank = ends.index(own)
  for end in ends:
    if end is not own:
      assert isinstance(end, processes.PeerError)
      assert str(end) == f'Process {rank}: RuntimeError: a worker cannot start'


@pytest.mark.parametrize('failing, ends_all', [((2,), False), ((1, 2), True)])
def test_failures_are_counted_over_all(failing, ends_all):
  """Each process has five of ten, two or four; half of all may fail."""

  def environment(rank):
    async def fails(policy, example, seed):
      await policy.say('Guess')
      if rank in failing:
        raise KeyError('no such room')
      return 1.0

    return fails

  ends = together(environment)
  for end in ends:
    if not ends_all:
      _, _, played = end
      assert sum(bool(x.failure) for row in played for x in row) == 2
    else:
      assert isinstance(end, ValueError), end
      assert '6 of 10 episodes have failed' in str(end)
