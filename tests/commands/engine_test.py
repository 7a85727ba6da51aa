"""`grpo-jax doctor --engine`: what it prints, and its exit codes."""

import contextlib
import json
import socket

import pytest

from grpo_jax.commands import doctor
from grpo_jax.commands import engine
from grpo_jax.config import http_client
from tests import cli
from tests.engines.http import conformance_test
from tests.serving import served

NAMES = conformance_test.NAMES


ours = pytest.fixture(scope='module')(served.smallest)


@pytest.mark.parametrize('dialect', ['vllm', 'sglang'])
def test_a_sound_server_is_code_0(ours, dialect):
  done = cli.call(
    'doctor', f'--engine={ours.url}', f'--dialect={dialect}',
    f'--model={ours.service.name}' if dialect == 'vllm' else '--dialect=sglang',
  )  # fmt: skip
  assert (done.returncode, done.stderr) == (0, '')
  lines = done.stdout.splitlines()
  assert lines[0] == f'ok      answers: {ours.url}'
  assert [line[8:].partition(':')[0] for line in lines] == [*NAMES]
  assert {line.split()[0] for line in lines} == {'ok'}


def test_json_is_one_line(ours):
  done = cli.call('doctor', f'--engine={ours.url}', '--json')
  assert (done.returncode, done.stderr) == (0, '')
  said = json.loads(done.stdout)
  assert said['ok'] is True
  assert [one['name'] for one in said['checks']] == [*NAMES]
  assert {*said['checks'][0]} == {'name', 'verdict', 'said'}
  assert said['checks'][0]['said'] == ours.url


def test_without_an_address_machines_are_examined(monkeypatch):
  seen = []
  monkeypatch.setattr(engine, 'run', lambda _: seen.append('a server'))
  monkeypatch.setattr(doctor, 'examine', lambda *_: seen.append('all') or 0)
  assert cli.call('doctor').returncode == 0
  assert cli.call('doctor', '--engine=').returncode == 0
  assert seen == ['all', 'all']


@pytest.fixture
def nowhere(monkeypatch):
  """An address at which nothing listens."""

  async def at_once(secs):
    del secs

  monkeypatch.setattr(http_client, '_sleep', at_once)
  with contextlib.closing(socket.socket()) as taken:
    taken.bind(('127.0.0.1', 0))
    yield f'http://127.0.0.1:{taken.getsockname()[1]}'


def test_a_server_that_is_not_there_is_code_2(nowhere):
  done = cli.call('doctor', f'--engine={nowhere}')
  assert done.returncode == 2
  (line,) = done.stdout.splitlines()
  assert line.startswith('FAILED  answers: ')
  assert done.stderr == f'1 of 1 checks have failed: {nowhere}\n'
  done = cli.call('doctor', f'--engine={nowhere}', '--json')
  said = json.loads(done.stdout)
  assert done.returncode == 2 and said['ok'] is False
  assert [one['verdict'] for one in said['checks']] == ['FAILED']
  assert done.stderr == f'1 of 1 checks have failed: {nowhere}\n'


def test_a_server_of_one_thing_is_code_2(ours):
  """The health of a server says nothing of what it answers."""
  app = served.app_lib.app(lambda _: ours.service, hosts=['127.0.0.1'])
  with served.listening.Listening(app, served.listening.bound()) as it:
    done = cli.call('doctor', f'--engine={it.origin}', '--dialect=sglang')
  assert done.returncode == 2
  lines = done.stdout.splitlines()
  assert lines[0].startswith('ok ') and lines[1].startswith('FAILED ')
  number = sum(line.startswith('FAILED') for line in lines)
  assert done.stderr == (
    f'{number} of {len(lines)} checks have failed: {it.origin}\n'
  )


@pytest.mark.parametrize(
  'flags, words',
  [
    (['--engine=127.0.0.1:8000'], 'http://HOST:PORT'),
    (['--engine=no url'], 'http://HOST:PORT'),
    (['--engine=http://127.0.0.1:1/v1'], 'without a path'),
    (['--engine=http://127.0.0.1:1', '--dialect=tgi'], 'vllm'),
    (['--engine=http://127.0.0.1:1', '--key_env=GRPO_NO_KEY'], 'GRPO_NO_KEY'),
  ],
)
def test_what_is_no_server_is_one_sentence(flags, words):
  cli.assert_refused(cli.call('doctor', *flags), words)
