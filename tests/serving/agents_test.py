"""Agents that play episodes over HTTP, good ones and others."""

import asyncio
import dataclasses
import functools
import http.client
import json
import os
import pathlib
import sys
import threading
import time
import urllib.parse

import numpy as np
import pytest

from grpo_jax import engines
from grpo_jax.environments import sessions
from grpo_jax.episodes import play as play_lib
from grpo_jax.serving import agents
from tests.episodes import chats_test
from tests.episodes import play_test
from tests.fake_engine import FakeEngine

pytest.importorskip('starlette')
pytest.importorskip('uvicorn')

AGENT = pathlib.Path(__file__).parent / 'small_agent.py'
RECORD = {'prompt': 'How many?', 'answer': '3'}
MORE = 'more'


def user(text):
  return {'role': 'user', 'content': text}


def post(base_url, path, body, headers=(), timeout=20):
  """The status and the JSON of an answer."""
  parts = urllib.parse.urlsplit(base_url)
  assert parts.hostname and parts.port
  client = http.client.HTTPConnection(parts.hostname, parts.port, timeout)
  try:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    client.request(
      'POST', f'{parts.path}{path}', data,
      {'Content-Type': 'application/json', **dict(headers)},
    )  # fmt: skip
    answer = client.getresponse()
    return answer.status, json.loads(answer.read())
  finally:
    client.close()


def ask(base_url, messages, headers=(), **more):
  return post(
    base_url, '/chat/completions', {'messages': messages, **more}, headers
  )


def message(found):
  return found[1]['choices'][0]['message']


def hang_up(base_url, messages, secs):
  """Asks, and is gone before the answer comes."""
  parts = urllib.parse.urlsplit(base_url)
  assert parts.hostname and parts.port
  client = http.client.HTTPConnection(parts.hostname, parts.port)
  client.request(
    'POST', f'{parts.path}/chat/completions',
    json.dumps({'messages': messages}).encode(),
    {'Content-Type': 'application/json'},
  )  # fmt: skip
  time.sleep(secs)
  client.close()


def play(
  answer=chats_test.numbered, where='here', group=1, untrusted=('',),
  options=(), made=None, **given,
):  # fmt: skip
  """The engine, and the episodes of one record."""
  engine = FakeEngine(answer, engines.Capabilities(entropy=True, queues=True))
  engine.load(None, 3)
  limits = dataclasses.replace(
    play_test.LIMITS, turns=9, episode_tokens=99, context_tokens=900
  )
  limits = dataclasses.replace(limits, **given.pop('limits', {}))
  places = sessions.Options(where=where, processes=1, **dict(options))
  played = made or (agents.PLAY, given)
  with sessions.Player({'': played}, places) as player:
    _, (group_played,) = play_lib.play(
      [RECORD], [7], engine, play_test.TOKENIZER, player, play_test.HERMES,
      play_test.SAMPLING, limits, group, seed=1, rollout=4,
      untrusted=untrusted,
    )  # fmt: skip
  return engine, group_played


def play_one(agent, answer=chats_test.numbered, **given):
  """The episode of a function that is an agent, and its engine."""
  engine, (one,) = play(answer, function=agent, **given)
  return engine, one


async def native(policy, example):
  said = example['prompt']
  for _ in range(3):
    await policy.say(said)
    said = MORE


@pytest.mark.parametrize('where', ['here', 'workers'])
def test_an_agent_is_trained_on_what_an_environment_would_be(where):
  engine, played = play(
    where=where, group=2, command=f'{sys.executable} {AGENT} {MORE}'
  )
  other, expected = play(made=native, group=2)
  told = lambda made: sorted(
    (tuple(x.ids), x.keys.tolist()) for x in made.requests
  )
  assert told(engine) == told(other)
  for one, wanted in zip(played, expected, strict=True):
    assert one.failure == '' and one.account.turns == 3
    for name in ('ids', 'chosen', 'logp', 'turn'):
      a, b = getattr(one.episode, name), getattr(wanted.episode, name)
      np.testing.assert_array_equal(a, b)
    assert one.account.messages == wanted.account.messages
    assert one.account.counts == {'overridden/temperature': 3}
    assert one.reward is None


def test_a_function_is_an_agent_too():
  async def in_a_loop(example, base_url, api_key, texts):
    assert base_url.endswith(f'/e/{api_key}/v1')
    messages = [user(example['prompt'])]
    for text in texts:
      found = await asyncio.to_thread(ask, base_url, messages)
      messages += [message(found), user(text)]

  _, one = play_one(in_a_loop, kwargs={'texts': ['a', 'b']})
  assert one.failure == '' and one.account.turns == 2

  def fails(example, base_url, api_key):
    raise OSError('no such table')

  _, one = play_one(fails)
  assert one.failure == 'raised OSError: no such table'
  _, one = play_one(in_a_loop, kwargs={'texts': ['a']}, trust_agent=True)
  assert one.failure == ''


class TestFaults:
  """Each by itself; nothing is trained twice, and nothing leaks."""

  def test_what_has_reached_nobody_is_not_learned(self):
    def agent(example, base_url, api_key):
      del api_key
      hang_up(base_url, [user('gone')], 0.05)
      assert ask(base_url, [user(example['prompt'])])[0] == 200

    def slow(request, number):
      time.sleep(0.2)
      return chats_test.numbered(request, number)

    engine, one = play_one(agent, slow)
    assert one.failure == '' and one.account.counts == {'undelivered': 1}
    assert one.account.turns == len(engine.requests) == 2
    chats_test.check([one], len(chats_test.numbered(engine.requests[1], 0)))

  def test_what_is_drawn_behind_the_end_is_not_learned(self):
    def agent(example, base_url, api_key):
      del api_key
      assert ask(base_url, [user(example['prompt'])])[0] == 200
      late = threading.Thread(target=lambda: ask(base_url, [user('late')]))
      late.start()
      time.sleep(0.1)  # it is under way

    def slow(request, number):
      time.sleep(0.3)
      return chats_test.numbered(request, number)

    engine, one = play_one(agent, slow)
    assert one.failure == '' and one.account.turns == len(engine.requests) == 2
    chats_test.check([one], len(chats_test.numbered(engine.requests[0], 0)))

  def test_who_asks_again_gets_what_was_drawn(self):
    def agent(example, base_url, api_key):
      del api_key
      messages = [user(example['prompt'])]
      hang_up(base_url, messages, 0.05)
      # With or without the mark: the first one has gone.
      first = ask(base_url, messages)
      assert first[0] == 200
      body = [*messages, message(first), user('b')]
      threads, found = [], []
      for retry in ('0', '1', '2'):
        headers = {'X-Stainless-Retry-Count': retry}
        run = lambda headers=headers: found.append(ask(base_url, body, headers))
        threads.append(threading.Thread(target=run))
        threads[-1].start()
        time.sleep(0.03)
      for thread in threads:
        thread.join()
      assert len({x[1]['id'] for x in found}) == 1

    def slow(request, number):
      time.sleep(0.3)
      return chats_test.numbered(request, number)

    engine, one = play_one(agent, slow)
    assert one.failure == '' and one.account.counts == {}
    assert one.account.turns == len(engine.requests) == 2

  def test_equal_requests_at_once_are_several(self):
    def agent(example, base_url, api_key):
      del api_key
      found = []
      run = lambda: found.append(ask(base_url, [user(example['prompt'])]))
      threads = [threading.Thread(target=run) for _ in range(4)]
      for thread in threads:
        thread.start()
      for thread in threads:
        thread.join()
      assert len({x[1]['id'] for x in found}) == 4

    engine, one = play_one(agent)
    assert one.failure == '' and one.account.turns == 4
    assert len({tuple(x.keys[0].tolist()) for x in engine.requests}) == 4

  def test_after_the_end_there_is_nobody(self):
    told = []

    def agent(example, base_url, api_key):
      told.append(base_url)
      ask(base_url, [user('a')])

    _, one = play_one(agent)
    assert one.failure == ''
    status, found = ask(told[0], [user('a')])
    assert (status, found['error']['code']) == (410, 'episode_over')
    elsewhere = told[0].rpartition('/e/')[0]
    assert ask(f'{elsewhere}/e/guess/v1', [user('a')])[0] == 404
    assert ask(f'{elsewhere}/v1', [user('a')])[0] == 401
    headers = {'Authorization': f'Bearer {told[0].split("/")[-2]}'}
    assert ask(f'{elsewhere}/v1', [user('a')], headers)[0] == 410

  @pytest.mark.parametrize('stays', [False, True])
  def test_beyond_a_limit_it_is_told_so_and_has_a_while(
    self, monkeypatch, stays
  ):
    monkeypatch.setattr(agents, '_GRACE_SECS', 0.2)
    codes = []

    async def agent(example, base_url, api_key):
      messages = [user('a')]
      while True:
        found = await asyncio.to_thread(ask, base_url, messages)
        if found[0] != 200:
          codes.append((found[0], found[1]['error']['code']))
          if stays:
            await asyncio.sleep(600)
          raise KeyError('it was cut')
        messages += [message(found), user('b')]

    begun = time.monotonic()
    _, one = play_one(agent, limits={'turns': 3})
    assert time.monotonic() - begun < 120
    assert codes == [(400, 'context_length_exceeded')]
    assert one.failure == '' and one.account.ended == 'turns'
    assert one.account.turns == 3 and one.episode.finish == engines.TRUNCATED

  def test_garbage_is_refused_and_the_episode_goes_on(self):
    def agent(example, base_url, api_key):
      del api_key
      for body in (b'{', b'[]', b'\xff', {}, {'messages': []}):
        assert post(base_url, '/chat/completions', body)[0] == 400
      for more in ({'n': 2}, {'logit_bias': {'1': 1}}, {'max_tokens': 0}):
        assert ask(base_url, [user('a')], **more)[0] == 400
      assert post(base_url, '/completions', {'prompt': 'a'})[0] == 400
      assert post(base_url, '/nowhere', {})[0] == 404
      assert (
        ask(base_url, [user('a')], {'Content-Type': 'text/plain'})[0] == 415
      )
      assert ask(base_url, [user('a')], {'Host': 'evil.example'})[0] == 403
      assert ask(base_url, [{'role': 'tool', 'content': 'x'}])[0] == 400
      assert ask(base_url, [user(example['prompt'])])[0] == 200

    engine, one = play_one(agent)
    assert one.failure == '' and len(engine.requests) == 1

  def test_a_template_that_takes_no_such_chat_refuses(self):
    def agent(example, base_url, api_key):
      result = {'role': 'tool', 'tool_call_id': 'x', 'content': 'a'}
      status, found = ask(base_url, [user('a'), result])
      assert status in (200, 400)
      if status == 400:
        assert 'cannot be read' in found['error']['message']

    _, one = play_one(agent)
    assert one.failure == ''


class TestTrust:
  """An agent cannot pay itself, unless the run says so."""

  @staticmethod
  def agent(example, base_url, api_key, secret=''):
    """Tries all of it; returns what it would like to have."""
    messages = [user(example['prompt'])]
    found = ask(base_url, messages)
    assert found[0] == 200
    assert ask(base_url, [*messages, message(found), user('b')])[0] == 200
    tried = []
    for given in ('', 'guessed', secret):
      headers = {'X-Grpo-Secret': given}
      tried += [
        post(base_url, '/reward', {'value': 0.5}, headers)[0],
        post(base_url, '/discard', {'turn': 0}, headers)[0],
        ask(
          base_url,
          [user('title')],
          {'X-Grpo-Train': '0', **headers},
        )[0],
      ]
    TestTrust.tried = tried
    return 7.0

  def test_by_default_nothing_counts(self):
    _, one = play_one(self.agent)
    assert one.failure == '' and self.tried == [403] * 9
    assert one.reward is None and one.account.turn_rewards is None
    assert one.account.counts == {} and one.account.turns == 2

  def test_the_trainer_does_not_rely_on_the_worker(self):
    """Code of the policy may run in the process that says this."""
    _, one = play_one(self.agent, trust_agent=True)
    assert self.tried[-3:] == [200] * 3
    assert one.reward is None and one.account.turn_rewards is None

  def test_with_the_second_secret_it_counts_if_it_is_trusted(self):
    _, one = play_one(
      functools.partial(self.agent), trust_agent=True, untrusted=()
    )
    assert self.tried == [403] * 6 + [200] * 3
    assert one.reward == pytest.approx(7.5)
    assert one.account.counts['left_out'] == 2

  def test_an_answer_is_named_by_its_id(self):
    def agent(example, base_url, api_key, secret):
      headers, ids, messages = {'X-Grpo-Secret': secret}, [], []
      for text in 'a', 'b', 'c':
        messages.append(user(text))
        found = ask(base_url, messages)
        messages.append(message(found))
        ids.append(found[1]['id'])
      for value, answer in zip((0.25, 0.5), ids[1:]):
        body = {'value': value, 'id': answer}
        assert post(base_url, '/reward', body, headers)[0] == 200
      assert post(base_url, '/discard', {'id': ids[0]}, headers)[0] == 200

    _, one = play_one(agent, trust_agent=True, untrusted=())
    assert one.failure == '' and one.account.counts == {'left_out': 1}
    assert one.account.turn_rewards == (0.0, 0.25, 0.5)

  def test_a_hook_says_what_is_trained(self):
    def agent(example, base_url, api_key):
      ask(base_url, [user('title')])
      ask(base_url, [user('a')])

    engine, one = play_one(agent, trains='tests.serving.agents_test:no_titles')
    assert one.failure == '' and one.account.counts == {'left_out': 1}
    chats_test.check([one], len(chats_test.numbered(engine.requests[1], 0)))
    _, one = play_one(agent, trains='tests.serving.agents_test:breaks')
    assert one.failure == "raised KeyError: 'no such field'"


def no_titles(messages, tools):
  return messages[-1]['content'] != 'title'


def breaks(messages, tools):
  raise KeyError('no such field')


class TestCommands:
  """Processes that do not behave."""

  def play(self, code, **given):
    command = f"{sys.executable} -c '{code}'"
    return play(command=command, **given)[1][0]

  def test_it_finds_its_record_and_no_secret(self):
    one = self.play(
      'import json,os,sys; lines=sys.stdin.read().splitlines();'
      ' assert json.loads(lines[0])["answer"]=="3";'
      ' assert len(lines)==1, lines;'
      ' assert not [x for x in os.environ if "SECRET" in x]; print(9)'
    )
    assert one.failure == '' and one.reward is None

  def test_the_last_line_is_a_reward_of_one_that_is_trusted(self):
    code = 'import sys; print(len(sys.stdin.readlines())); print(0.25)'
    one = self.play(code, trust_agent=True, untrusted=())
    assert one.reward == 0.25

  @pytest.mark.parametrize(
    'code, reason',
    [
      ('import sys; sys.exit(3)', 'exited with 3'),
      ('raise OSError("no disk")', 'exited with 1: OSError: no disk'),
      (
        'import os,signal; os.kill(os.getpid(), 9)',
        'was ended by signal SIGKILL',
      ),
      (
        'import sys; sys.stdout.write("x" * 10**8); sys.exit("full")',
        'exited with 1: full',
      ),
    ],
  )
  def test_one_that_ends_badly_fails_its_episode(self, code, reason):
    assert reason in self.play(code).failure

  def test_one_that_is_not_there_fails_its_episode(self):
    _, (one,) = play(command='/nowhere/agent')
    assert 'cannot start' in one.failure and '/nowhere/agent' in one.failure

  @pytest.mark.parametrize(
    'code',
    [
      'import time; time.sleep(600)',
      'import os,sys,time; os.close(0); os.close(1); os.close(2);'
      ' time.sleep(600)',
      'import signal,time; signal.signal(15, signal.SIG_IGN); time.sleep(600)',
      'import os,time; os.fork() or time.sleep(600); time.sleep(600)',
    ],
  )
  def test_one_that_never_ends_is_ended(self, code, tmp_path):
    mark = str(tmp_path)  # in its command line
    one = self.play(f'"{mark}"; {code}', options={'episode_secs': 1.5})
    assert 'time limit' in one.failure
    until = time.monotonic() + 5
    while _running(mark) and time.monotonic() < until:
      time.sleep(0.01)  # it was killed, and is about to go
    assert not _running(mark)


def _running(word):
  """The processes whose command line has a word."""
  found = []
  for path in pathlib.Path('/proc').glob('[0-9]*/cmdline'):
    try:
      line = path.read_bytes().decode(errors='replace')
    except OSError:
      continue
    if word in line and path.parent.name != str(os.getpid()):
      found.append(line)
  return found
