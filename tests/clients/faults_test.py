"""Clients that mangle their chats over HTTP, hang up, and ask again."""

import asyncio
import http.client
import json
import random
import types
import urllib.parse

import pytest

from grpo_jax import engines
from grpo_jax.environments.base import Ended
from grpo_jax.serving import agents
from tests.clients import mangling_test

pytest.importorskip('starlette')
pytest.importorskip('uvicorn')

OVER = {(400, 'context_length_exceeded'), (410, 'episode_over')}


class Remote:
  """Asks a server, which it does not treat well; see `mangling_test.Direct`.

  Attributes:
    faults: How many there were.
  """

  def __init__(self, base_url, seed):
    self._parts = urllib.parse.urlsplit(base_url)
    self._drawn, self.faults = random.Random(seed), 0

  async def ask(self, messages):
    """See `mangling_test.Direct`."""
    fields = {'model': 'policy', 'temperature': 0.3, 'messages': messages}
    body = json.dumps({**fields, 'tools': mangling_test.TOOLS}).encode()
    fault = self._drawn.choice(['', '', '', 'gone', 'gone', 'cut', 'late'])
    wait = self._drawn.choice([0, 0.001, 0.01])
    return await asyncio.to_thread(self._asked, body, fault, wait)

  def leave_out(self, reply):
    """An agent that is not trusted cannot."""
    del reply
    return False

  def _asked(self, body, fault, wait):
    self.faults += bool(fault)
    retry = 0
    if fault == 'gone':  # and then it says that it asks again
      self._post(body, retry, wait)
      retry = 1
    elif fault == 'late':  # or does not say so
      self._post(body, retry, wait)
    elif fault == 'cut':
      status, said = self._post(body[:-9], retry)
      assert status == 400, said
    status, said = self._post(body, retry)
    if status == 200:
      message = said['choices'][0]['message']
      text = message['content'] or ''
      return types.SimpleNamespace(text=text), message
    error = said['error']
    if (status, error['code']) in OVER:
      raise Ended(error['message'])
    assert status == 400, said
    raise ValueError(error['message'])

  def _post(self, body, retry, hangs_up=None):
    """The status and what was said; None if it hangs up before."""
    parts = self._parts
    client = http.client.HTTPConnection(parts.hostname, parts.port, timeout=60)
    headers = {
      'Content-Type': 'application/json',
      'X-Stainless-Retry-Count': str(retry),
    }
    try:
      client.request('POST', f'{parts.path}/chat/completions', body, headers)
      if hangs_up is not None:
        return asyncio.run(asyncio.sleep(hangs_up))
      answer = client.getresponse()
      return answer.status, json.load(answer)
    finally:
      client.close()


@pytest.mark.parametrize('limits', ['wide', 'tight'])
@pytest.mark.parametrize('seed', range(6))
def test_clients_with_faults_train_what_they_have_heard_once(seed, limits):
  found, faults = [], []

  async def agent(example, base_url, api_key):
    del example, api_key
    remote = Remote(base_url, seed)
    found[:] = await mangling_test.converse(
      remote, seed, mangling_test.EVERY, 2, 15
    )
    faults.append(remote.faults)

  engine, prompt, one = mangling_test.played(
    (agents.PLAY, {'function': agent}),
    seed,
    engines.Capabilities(entropy=True, queues=True),
    limits=mangling_test.WIDE if limits == 'wide' else mangling_test.TIGHT,
    untrusted=('',),
  )
  answered, _ = found
  trained = mangling_test.check(engine, prompt, one, is_cut=True)
  words = mangling_test.WITH_TOOLS
  heard = mangling_test.check_read(engine, words, answered)
  assert heard <= trained
  lost = len(engine.requests) - len(trained)
  if limits == 'wide':
    assert one.account.ended == 'done' and len(answered) > 9 and faults[0] > 3
    assert lost == one.account.counts.get('undelivered', 0)
    asked = one.account.counts['overridden/temperature']
    assert asked == len(engine.requests)
  else:
    assert one.account.ended in ('turns', 'tokens', 'context', 'length')
    assert trained
