"""`grpo-jax serve`: what it serves, to whom, and how it ends."""

import contextlib
import dataclasses
import json
import signal
import types
import urllib.error
import urllib.request

import numpy as np
import pytest

from grpo_jax import engines
from grpo_jax.commands import serve
from grpo_jax.run import loop
from grpo_jax.run import policy as policies
from grpo_jax.serving import desk as desk_lib
from grpo_jax.serving import wire
from grpo_jax.serving.app import Client
from tests import cli
from tests import runs
from tests.serving import served


def arguments(**changes):
  usual = dict(config=object(), host='127.0.0.1', port=0, rows=1)
  return types.SimpleNamespace(**usual | changes)


@pytest.mark.parametrize('host', ['0.0.0.0', '::', '10.0.0.1', 'lab.example'])
def test_other_machines_need_a_key(host):
  with pytest.raises(ValueError) as caught:
    serve.check(arguments(host=host), None)
  assert str(caught.value) == (
    f'--host={host} lets other machines ask, so a key is needed; set '
    'GRPO_JAX_SERVE_KEY, or give --key, and let clients give it as their API '
    'key.'
  )
  serve.check(arguments(host=host), 'a key')


@pytest.mark.parametrize(
  'changes, said',
  [
    (
      {'config': None},
      'serve needs the workdir of a run, a model, or --config',
    ),
    ({'port': 70_000}, 'give a number below 65536'),
    ({'rows': 0}, 'give at least 1'),
  ],
)
def test_what_cannot_be_served(changes, said):
  with pytest.raises(ValueError, match=said):
    serve.check(arguments(**changes), None)
  serve.check(arguments(host='localhost'), None)


def ask(url, body, **headers):
  sent = urllib.request.Request(
    url,
    json.dumps(body).encode(),
    {'Content-Type': 'application/json', **headers},
  )
  with urllib.request.urlopen(sent, timeout=120) as answer:
    return json.load(answer)


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_a_policy_is_served_until_a_signal_comes(number):
  key = {} if number == signal.SIGINT else {'GRPO_JAX_SERVE_KEY': 'open'}
  with contextlib.ExitStack() as stack:
    patch = stack.enter_context(pytest.MonkeyPatch.context())
    for name, value in key.items():
      patch.setenv(name, value)
    process = cli.popen('serve', cli.SMALL, '--port=0', '--json')
    told = json.loads(process.stdout.readline())
    assert told['model'] == 'policy@0'
    url = f'{told["base_url"]}/completions'
    body = {'prompt': '4+8=', 'max_tokens': 3, 'temperature': 0}
    headers = {}
    if key:
      with pytest.raises(urllib.error.HTTPError, match='401'):
        ask(url, body)
      headers['Authorization'] = 'Bearer open'
    found = ask(url, body, **headers)
    assert found['usage']['prompt_tokens'] == 4
    assert 1 <= found['usage']['completion_tokens'] <= 3
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, '', '')


def test_an_address_that_is_taken_is_told_before_weights_are_read():
  with contextlib.closing(serve.listening.bound()) as taken:
    taken.listen()
    port = taken.getsockname()[1]
    done = cli.call('serve', cli.SMALL, f'--port={port}')
  assert done.returncode == 2 and 'Nothing can listen' in done.stderr
  assert done.stderr.count('\n') == 1


def test_the_policy_of_a_run_is_served(tmp_path):
  config = runs.small(**{'steps': 1, 'warm_up.steps': 1})
  loop.train(config, tmp_path)
  found = policies.load_to_serve(config, tmp_path)
  usual = max(found.run.config.data.completion_buckets)
  assert found.step == 1 and found.context_tokens == usual
  ids = found.run.tokenizer.encode('4+8=')
  greedy = dataclasses.replace(found.run.sampling, temperature=0.0)
  asked = engines.Request(ids, np.zeros((1, 2), np.uint32), 3, greedy)
  policy = policies.load(config, tmp_path)
  ((one,),) = engines.generate(policy.run.engine, [asked])
  with desk_lib.Desk(found.run.engine, found.scorer, 2) as desk:
    service = serve.service_of(found, desk, config)
    request = wire.Completion(
      (tuple(ids),), 3, sampling={'temperature': 0.0}, return_token_ids=True
    )
    (answer,) = served.run(service.complete(request, Client(), None))
  assert answer.ids == tuple(one.ids.tolist()) and answer.model == 'policy@1'
  wider = policies.load_to_serve(config, tmp_path, context_tokens=300)
  assert wider.context_tokens == 300
  assert wider.run.engine._widths_of_calls == [256, 300]
  with pytest.raises(ValueError, match='--context_tokens=1; give at least 2'):
    policies.load_to_serve(config, tmp_path, context_tokens=1)


def test_a_run_whose_environment_rewards_can_be_served():
  """Nobody judges what is served."""
  config = runs.small(
    **{
      'environment.name': 'tests.run.environments_test:by_turns',
      'rewards': ({'name': 'environment', 'weight': 1.0},),
      'data.chat': True,
    }
  )
  served = policies._to_serve(config, 64)
  assert not served.environment.name
  assert [one.name for one in served.rewards] == ['exact_match']
