"""Runs whose episodes are played by an agent over HTTP."""

import json
import sys

import numpy as np
import pytest

import grpo_jax
from tests import runs
from tests.run import environments_test
from tests.serving import agents_test

pytest.importorskip('starlette')
pytest.importorskip('uvicorn')
pytestmark = pytest.mark.usefixtures('shared_programs')
words = environments_test.words
SAID = 'guess', 'higher', 'lower'
HERE = 'tests.run.agents_test'


async def by_turns(policy, example):
  for said in SAID:
    await policy.say(said)


def over_http(example, base_url, api_key):
  messages = []
  for said in SAID:
    messages.append(agents_test.user(said))
    status, found = agents_test.ask(base_url, messages)
    if status != 200:  # a limit
      return
    messages.append(agents_test.message((status, found)))


PROGRAM = f"""
import json, os, sys, urllib.request
assert json.loads(sys.stdin.readline())
messages = []
for said in {SAID}:
  messages.append(dict(role='user', content=said))
  request = urllib.request.Request(
    os.environ['OPENAI_BASE_URL'] + '/chat/completions',
    json.dumps(dict(messages=messages)).encode(),
    {{'Content-Type': 'application/json'}})
  try:
    with urllib.request.urlopen(request) as answer:
      messages.append(json.load(answer)['choices'][0]['message'])
  except urllib.error.HTTPError as error:
    assert json.load(error)['error']['code'] == 'context_length_exceeded'
    break
"""


def low(prompt, completion, example):
  """How many of the turns said a 0."""
  del prompt, completion
  messages = example['episode']['messages']
  return float(sum('0' in x['content'] for x in messages))


def config(words, **changes):
  return environments_test.config(
    words, **{'reward': f'{HERE}:low', 'environment.where': 'here', **changes}
  )


@pytest.mark.long
@pytest.mark.parametrize('kind', ['command', 'function'])
def test_a_run_of_an_agent_is_that_of_the_same_words(words, tmp_path, kind):
  """Metrics and parameters, bit for bit; in workers and here."""
  program = tmp_path / 'agent.py'
  program.write_text(PROGRAM)
  agent = {
    'command': f'{sys.executable} {program}',
    'function': f'{HERE}:over_http',
  }
  native = config(words, **{'environment.name': f'{HERE}:by_turns'})
  grpo_jax.train(native, tmp_path / 'a')
  made = config(
    words,
    **{
      'environment.name': 'agent',
      f'agent.{kind}': agent[kind],
      'environment.where': 'workers' if kind == 'command' else 'here',
      'environment.processes': 1,
    },
  )
  grpo_jax.train(made, tmp_path / 'b')
  one, other = (runs.records(tmp_path / name) for name in 'ab')
  assert len(one) == len(other) > 2
  for a, b in zip(one, other, strict=True):
    a, b = runs.without_times(a), runs.without_times(b)
    assert a == b or json.dumps(a) == json.dumps(b)  # NaNs
  arrays, others = (runs.saved(tmp_path / name)[1] for name in 'ab')
  assert arrays.keys() == others.keys()
  for name, array in arrays.items():
    np.testing.assert_array_equal(array, others[name], err_msg=name)


def test_an_agent_that_is_nobody_is_refused_at_the_start(words, tmp_path):
  with pytest.raises(ValueError, match='no program that can be found'):
    made = {'environment.name': 'agent', 'agent.command': 'nobody'}
    grpo_jax.train(config(words, **made), tmp_path)


def test_a_function_is_given_in_python(words, tmp_path):
  """It trains, evaluates and samples, and is asked for again."""
  run, seen = tmp_path / 'run', []
  made = config(words, steps=1)
  grpo_jax.train(
    made,
    run,
    agent=over_http,
    on_rollout=lambda step, metrics, rollout: seen.append(rollout),
  )
  (rollout,) = seen
  assert rollout.reward_names == (f'{HERE}:low',) and rollout.batch.valid.all()
  turns = rollout.batch.extras['turn'].max((1, 2))
  assert turns.max() >= 1  # several turns
  with pytest.raises(ValueError, match='Evaluating .* agent .over_http.'):
    grpo_jax.evaluate(run)
  found = grpo_jax.evaluate(run, agent=over_http, samples=1, ks=(1,))
  assert found['examples'] == 3
  (one,) = grpo_jax.sample(run, [{'prompt': 'a'}], agent=over_http)
  assert one['messages'][0]['content'] == SAID[0] and not one['failure']
  with pytest.raises(ValueError, match='agent lambda given in Python'):
    grpo_jax.train(made, run, agent=lambda example, base_url, api_key: None)
