"""Tests of asking several servers from a thread without an event loop."""

import asyncio
import threading

import pytest

from grpo_jax.config import http_client
from grpo_jax.engines.http.dialects import Call
from grpo_jax.engines.http.servers import Away
from grpo_jax.engines.http.servers import Servers
from tests.engines.http.engines import alone  # noqa: F401
from tests.engines.http.fake_server import FakeServer

pytest.importorskip('httpx2', reason="needs pip install 'grpo_jax[http]'")


def servers_of(*urls, concurrency=8):
  limits = http_client.Limits(0, concurrency)
  client = http_client.Client('x', '', 5.0, 1, 0.1, 1.0, limits)
  return Servers(urls, client, concurrency)


def test_who_is_asked_first():
  servers = servers_of('a', 'b/', 'c')
  a, b, c = servers.every
  assert [one.url for one in servers.every] == ['a', 'b', 'c']
  a.drawing, b.drawing = {(0, 0), (0, 1)}, {(1, 0)}
  assert servers.least() is c
  assert servers.least([c]) is b
  c.lose('it was away', c.told)
  assert servers.least() is b  # who was lost comes last
  assert servers.least([a, b]) is c
  assert servers.least([], [b]) is a
  assert servers.least([], [a, b]) is c
  assert servers.least([], [a, b, b, c, c]) is a
  with pytest.raises(Away):
    servers.least([a, b, c])


def test_a_server_is_lost_only_by_whom_nobody_has_overtaken():
  (server,) = servers_of('a').every
  server.has, before = ('v0', 'v1'), server.told
  server.told += 1
  server.lose('of before', before)
  assert server.has == ('v0', 'v1')
  server.lose('of now', server.told)
  assert server.has is None and server.why == 'of now'


def test_loops_of_two_threads_take_turns():
  (server,) = servers_of('a').every
  inside, found = [], []

  async def enter(number):
    async with server.alone() as waited:
      inside.append(number)
      await asyncio.sleep(0)
      assert inside == [number]
      await asyncio.sleep(0)
      inside.pop()
    found.append(waited)

  async def enter_often(number):
    await asyncio.gather(*(enter((number, n)) for n in range(20)))

  threads = [
    threading.Thread(target=asyncio.run, args=(enter_often(n),))
    for n in range(3)
  ]
  for one in threads:
    one.start()
  for one in threads:
    one.join()
  assert len(found) == 60 and not inside and any(found)
  asyncio.run(enter(0))
  assert found[-1] is False


def test_what_is_raised_there_is_raised_here():
  servers = servers_of('a')

  async def fails(opened):
    raise ZeroDivisionError('there')

  with pytest.raises(ZeroDivisionError, match='there'):
    servers.run(fails)

  async def answers(opened):
    return threading.current_thread().name

  assert servers.run(answers) == 'servers'


def test_what_has_not_ended_is_cancelled():
  servers, ended = servers_of('a', concurrency=2), []

  async def waits(opened):
    try:
      await asyncio.Event().wait()
    finally:
      ended.append(1)

  begun = threading.Event()

  async def last(opened):
    begun.set()

  with servers.opened() as start:
    first = start(waits, ended.append)
    start(waits, ended.append)
    start(last, ended.append)  # waits for one of the two places
    assert not begun.wait(0.05)
    first.cancel()
    assert begun.wait(10)
  assert ended == [1, None, 1]


def test_an_answer_may_be_json_or_text():
  server = FakeServer('vllm')
  servers = servers_of(server.url)
  every = servers.every

  async def ask(opened):
    paused = await servers.ask(opened, every[0], Call('/pause', {}))
    return paused, await servers.ask(opened, every[0], Call('/health'))

  try:
    assert servers.run(ask) == ({'status': 'paused'}, '')
    assert server.requests == [('/pause', {}), ('/health', None)]
  finally:
    server.close()
