"""configs/agent_openai_agents.py: what it says, without the package."""

import json
import pathlib
import shlex
import subprocess
import sys
import textwrap

import pytest

import grpo_jax
from grpo_jax import config as config_lib
from tests import cli

CONFIG = str(cli.ROOT / 'configs' / 'agent_openai_agents.py')
SCRIPT = cli.ROOT / 'configs' / 'calculating' / 'agent.py'
FAKE = """
  class AgentsException(Exception):
    pass

  def set_default_openai_api(api):
    assert api == 'chat_completions'

  def function_tool(function):
    return function

  class Agent:
    def __init__(self, name, model, tools):
      (self.tool,) = tools

  class Runner:
    def run_sync(agent, asked):
      if asked[-1]['content'] == 'nonsense':
        raise AgentsException('Tool nowhere not found')
      return type('', (), {'final_output': agent.tool(asked[-1]['content'])})
"""


def test_it_names_the_script_and_its_python():
  config = config_lib.resolve(grpo_jax.load_config(f'{CONFIG}:/other/python'))
  python, script = shlex.split(config.agent.command)
  assert python == '/other/python'
  assert pathlib.Path(script).samefile(SCRIPT)
  own = config_lib.resolve(grpo_jax.load_config(CONFIG))
  assert shlex.split(own.agent.command)[0] == sys.executable
  assert not own.agent.trust_agent
  assert [one.name for one in own.rewards] == ['exact_match', 'calculator:used']


@pytest.mark.parametrize(
  'asked, said, code',
  [
    ('12 * (34 + 5) - 1', '467', 0),
    ('nonsense', 'Tool nowhere not found', 0),
    ('__import__("os")', 'ValueError: only whole numbers', 1),
    ('2 ** 9', 'ValueError: only whole numbers', 1),
    ('1.5 + 1', 'ValueError: only whole numbers', 1),
  ],
)
def test_the_script_is_an_agent_of_its_package(tmp_path, asked, said, code):
  """The package as the script uses it; tests/clients has the real one."""
  (tmp_path / 'agents.py').write_text(textwrap.dedent(FAKE))
  record = {'prompt': [{'role': 'user', 'content': asked}], 'answer': '7'}
  done = subprocess.run(
    [sys.executable, SCRIPT], input=json.dumps(record) + '\n', text=True,
    env={'PYTHONPATH': str(tmp_path)}, capture_output=True, check=False,
  )  # fmt: skip
  assert done.returncode == code, done.stderr
  last = (done.stderr if code else done.stdout).strip().splitlines()[-1]
  assert last.startswith(said)
