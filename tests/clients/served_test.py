"""Agents on five packages that nobody rewrote, and what is trained of them.

See `agents_test` for what they need. The server is that of a run, and the
policy says what a test wants.
"""

import random

import numpy as np
import pytest

from grpo_jax import engines
from grpo_jax.environments import sessions
from grpo_jax.episodes import play as play_lib
from grpo_jax.serving import agents
from tests.clients import agents_test
from tests.clients import mangling_test
from tests.clients import recorded
from tests.clients import rollouts
from tests.clients import venvs
from tests.episodes import play_test

pytest.importorskip('starlette')
pytest.importorskip('uvicorn')

GROUP = 4
LIMITS = play_lib.Limits(
  turns=8, turn_tokens=400, episode_tokens=3000, context_tokens=60_000
)
CALL = mangling_test.CALL
ONE = '{"name": "calculator", "arguments": {"expression": "%d * 34 + 5"}}'
FINAL = '{"name": "final_answer", "arguments": {"answer": "%d"}}'


def tidy(request, number):
  """Thinks and calls, calls twice at once, and answers."""
  drawn = random.Random(np.asarray(request.keys)[number].tobytes())
  words = mangling_test.WITH_TOOLS
  read = words.decode_whole(request.ids)
  asked = read.rsplit('New task:')[-1]  # smolagents shows others before it
  results = asked.count('Observation:') or read.count('</think>')
  value = drawn.randrange(12, 99)
  if results == 0:
    said = f'<think>\nHm.</think>\n Let me see.\n{CALL % (ONE % value)}'
  elif results == 1:
    calls = [CALL % (ONE % (value + k)) for k in range(2)]
    said = '\n'.join(['<think>\nSo.</think>', *calls])
  else:
    said = f'It is {value}.'
    if 'final_answer' in read:
      said = CALL % (FINAL % value)
  return [*words.encode(said), words.eos_ids[0]]


WILD = mangling_test.saying(mangling_test.WITH_TOOLS, 0.9)


def played(name, answer):
  """An engine, a prompt, and a group of episodes of an agent."""
  told = engines.Capabilities(entropy=True, queues=True)
  engine = mangling_test.Told(answer, told)
  engine.load(None, 3)
  command = f'{venvs.python(name)} {recorded.HERE / f"agent_{name}.py"}'
  environment = (agents.PLAY, {'command': command})
  words = mangling_test.WITH_TOOLS
  with sessions.Player(
    {'': environment}, sessions.Options(where='here')
  ) as player:
    (prompt,), (group,) = play_lib.play(
      [recorded.EXAMPLE],
      [0],
      engine,
      words,
      player,
      play_test.HERMES,
      engines.Sampling(eos_ids=words.eos_ids),
      LIMITS,
      GROUP,
      seed=1,
      rollout=4,
      untrusted=('',),
    )
  return engine, prompt, group


def check(engine, prompt, group):
  """Every token that was drawn is trained once, behind what was read."""
  trained = [
    len(mangling_test.check(engine, prompt, one, is_cut=True)) for one in group
  ]
  assert sum(trained) == len(engine.requests)
  assert [one.account.turns for one in group] == trained
  return trained


@pytest.mark.parametrize('name', agents_test.real)
def test_an_agent_is_trained_on_each_token_once(name):
  engine, prompt, group = played(name, tidy)
  assert check(engine, prompt, group) == [3] * GROUP
  turns = [len(rollouts.leaves(one.episode)) for one in group]
  # smolagents writes what was said in words of its own, so each turn branches.
  assert turns == [3 if name == 'smolagents' else 1] * GROUP
  required = {'overridden/tool_choice': 3} if name == 'smolagents' else {}
  for one in group:
    assert one.account.ended == 'done' and one.reward is None
    assert one.account.counts == required


@pytest.mark.parametrize('name', agents_test.real)
def test_a_model_that_calls_badly_is_trained_all_the_same(name):
  engine, prompt, group = played(name, WILD)
  trained = check(engine, prompt, group)
  assert {one.account.ended for one in group} <= {'done', 'turns'}
  assert min(trained) >= 1 and max(trained) > 1
