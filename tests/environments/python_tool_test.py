"""The tool that runs Python."""

import asyncio

import pytest

from grpo_jax.environments import forms
from grpo_jax.environments import python_tool
from grpo_jax.rewards import sandbox
from tests.environments import scripted


@pytest.fixture
def sandboxed():
  if reason := sandbox.missing():
    pytest.skip(reason)


@pytest.mark.usefixtures('sandboxed')
@pytest.mark.parametrize(
  'code, said',
  [
    ('print(6 * 7)', '42'),
    ('x = 1', '[It printed nothing.]'),
    ('print("x" * 50)', 'x' * 30 + '\n[The rest is cut.]'),
  ],
)
def test_what_a_program_says(code, said):
  assert python_tool.run(code, sandbox.Limits(), 30) == said


@pytest.mark.usefixtures('sandboxed')
def test_a_program_that_raises_says_how_it_has_ended():
  ran = python_tool.run('print("a")\n1 / 0', sandbox.Limits())
  assert ran.startswith('a\n') and 'ZeroDivisionError' in ran
  assert ran.endswith('[It ended by: exit 1]')


@pytest.mark.usefixtures('sandboxed')
def test_the_environment():
  made = forms.resolve('python', {'time_secs': 20.0})
  code = 'import os; print(sorted(os.environ), os.path.exists("/root/.ssh"))'
  policy = scripted.Scripted([scripted.calls(('python', {'code': code})), 'x'])
  asyncio.run(made.make()(policy, {'prompt': 'p'}, 0))
  said = policy.context[2]['content']
  assert 'PATH' in said and 'TOKEN' not in said and said.endswith('False')


@pytest.mark.usefixtures('sandboxed')
@pytest.mark.long
@pytest.mark.parametrize(
  'code, how',
  [
    ('while True: pass', 'time limit'),
    ('x = bytearray(1 << 31)', 'exit 1'),
    ('import os\nwhile True: os.fork()', ''),
    ('import urllib.request as r; r.urlopen("http://127.0.0.1:1")', 'exit 1'),
  ],
)
def test_limits(code, how):
  said = python_tool.run(code, sandbox.Limits(2.0, 256 << 20))
  assert f'[It ended by: {how}' in said


def test_a_system_without_a_sandbox(monkeypatch):
  monkeypatch.setattr(
    python_tool.sandbox, 'missing', lambda: 'this system offers no sandbox'
  )
  with pytest.raises(ValueError, match='would run what a model writes, and'):
    python_tool.Python()
