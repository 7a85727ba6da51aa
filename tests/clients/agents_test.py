"""Agents on five packages that nobody rewrote, against a stand-in.

Each needs a virtual environment of its own: `python tests/clients/venvs.py
FOLDER`, and FOLDER as GRPO_JAX_CLIENTS.
"""

import asyncio
import json
import urllib.error
import urllib.request

import pytest

from grpo_jax.environments import base
from grpo_jax.environments import calculator
from grpo_jax.environments import tools
from tests.clients import recorded
from tests.clients import stub
from tests.clients import task
from tests.clients import venvs
from tests.serving import bodies_test

real = [
  pytest.param(
    name,
    marks=[
      pytest.mark.long,
      pytest.mark.skipif(
        venvs.python(name) is None,
        reason=f'needs {venvs.VARIABLE}, the folder of tests/clients/venvs.py',
      ),
    ],
  )
  for name in venvs.PACKAGES
]


@pytest.mark.parametrize(
  'expression', ['12 * 34 + 5', '1 / 0', 'x', '√', '', '9' * 1001, '2^9999^9']
)
def test_the_tool_says_what_that_of_the_native_environment_says(expression):
  call = base.ToolCall('call_0', 'calculator', {'expression': expression}, '')
  named = {'calculator': calculator.calculator}
  (outcome,) = asyncio.run(tools.run_calls([call], named, 30.0))
  assert task.calculator(expression) == outcome.message['content']


def test_an_agent_ends_well_at_limits_alone(monkeypatch, capsys):
  class Refused(Exception):
    def __init__(self, status_code, code):
      super().__init__()
      self.status_code, self.code = status_code, code

  def play(status, code):
    def function(example):
      assert example == {'prompt': 'a'}
      try:
        raise Refused(status, code)
      except Refused as error:
        raise RuntimeError('as packages do') from error

    return function

  def main(status, code, *misled):
    task.main(play(status, code), misled)

  class Stdin:
    def readline(self):
      return '{"prompt": "a"}\n'

  monkeypatch.setattr('sys.stdin', Stdin())
  main(400, 'context_length_exceeded')
  main(410, 'episode_over')
  main(500, '', RuntimeError)
  assert capsys.readouterr().out == '(RuntimeError)\n' * 3
  for status, code in ((400, 'invalid_value'), (500, ''), (404, None)):
    with pytest.raises(RuntimeError):
      main(status, code)


@pytest.mark.parametrize('name', venvs.PACKAGES)
def test_there_is_an_agent_and_a_body_of_each_package(name):
  assert (recorded.HERE / f'agent_{name}.py').exists()
  assert name in bodies_test.NAMES


def test_a_stand_in_calls_and_answers():
  def post(served, **body):
    request = urllib.request.Request(
      f'{served.address}/chat/completions', json.dumps(body).encode()
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
      return json.load(answer)['choices'][0]

  with stub.serving(refuses=3) as served:
    said = [post(served, tools=[]) for _ in range(3)]
    with pytest.raises(urllib.error.HTTPError, match='400'):
      post(served)
  calls = [one['message'].get('tool_calls', ()) for one in said]
  assert [*map(len, calls)] == [1, 2, 0] and len(served.asked) == 4
  assert [one['finish_reason'] for one in said] == [
    'tool_calls', 'tool_calls', 'stop',
  ]  # fmt: skip


@pytest.mark.parametrize('name', real)
def test_an_agent_plays_until_the_model_answers(name):
  with stub.serving() as served:
    done = recorded.run(name, venvs.python(name), served)
  assert done.returncode == 0, done.stderr
  assert done.stdout.strip() in ('It is 414.', '414')
  assert {one.path for one in served.asked} == {'/e/token/v1/chat/completions'}
  assert len(served.asked) == len(stub.TURNS)
  # What is kept in bodies/ is what this version sends.
  path = bodies_test.FOLDER / f'{name}.json'
  kept = json.loads(path.read_text())
  assert served.asked[-1].fields == kept


@pytest.mark.parametrize('name', real)
@pytest.mark.parametrize('status', stub.REFUSALS)
def test_an_agent_ends_well_when_the_episode_does(name, status):
  with stub.serving(refuses=1, status=status) as served:
    done = recorded.run(name, venvs.python(name), served)
  assert done.returncode == 0, done.stderr
  assert len(served.asked) == 2  # nobody asks again
