"""Servers that die, come back, forget, or were never there."""

import contextlib
import errno

import pytest

from grpo_jax.config import http_client
from grpo_jax.engines.http import servers
from grpo_jax.engines.http.servers import Away
from tests.engines.http import engines
from tests.engines.http import fake_server
from tests.engines.http.engine_test import drawn_by
from tests.engines.http.engine_test import turns_until
from tests.engines.http.engines import KIND
from tests.engines.http.engines import LOAD
from tests.engines.http.engines import alone  # noqa: F401
from tests.engines.http.engines import asked
from tests.engines.http.engines import dialects
from tests.engines.http.engines import rooms
from tests.engines.http.engines import staged
from tests.engines.http.fake_server import FakeServer
from tests.engines.http.fake_server import Fault
from tests.engines.http.faults import answers
from tests.engines.http.faults import spanned
from tests.engines.http.faults import then

pytest.importorskip('httpx2', reason="needs pip install 'grpo_jax[http]'")


def counts_of_loads(server, dialect, adapters):
  kind = 'load_lora_adapter' if adapters else LOAD[dialect]
  return len(server.bodies(kind))


@rooms
def test_a_server_that_forgets_is_told_again_by_one(
  tmp_path, dialect, adapters
):
  """At the third completion, with eight under way: once is enough."""
  fault = Fault(KIND[dialect], then(FakeServer.forget), [2])
  with staged(tmp_path, dialect, adapters, [fault]) as stage:
    stage.engine.load(7, 0)
    engines.complete(stage, asked(4, 4), 7, 0)
    (server,) = stage.servers
    assert counts_of_loads(server, dialect, adapters) == 2
    assert not stage.said


@dialects
def test_a_server_that_draws_by_an_older_version(tmp_path, dialect):
  """Of this run, but not the one that was asked for."""
  with staged(tmp_path, dialect, False) as stage:
    (server,) = stage.servers
    stage.engine.load(7, 0)
    old = server.label
    stage.engine.load(8, 1)
    change = spanned(lambda _, n: [(old, 0, n)])
    server.faults = [Fault(KIND[dialect], change, [2])]
    engines.complete(stage, asked(), 8, 1)
    assert counts_of_loads(server, dialect, False) == 3
    server.faults = [Fault(KIND[dialect], change)]
    with pytest.raises(Away, match=f"completion by '{old}' in place of"):
      engines.complete(stage, asked(1), 8, 1)


@rooms
def test_a_restart_between_two_rollouts(tmp_path, dialect, adapters):
  with staged(tmp_path, dialect, adapters, [], []) as stage:
    stage.engine.load(7, 0)
    engines.complete(stage, asked(), 7, 0)
    stage.servers[0].kill()
    stage.servers[0].forget()
    stage.servers[0].rise()
    engines.complete(stage, asked(), 7, 0)
    assert not stage.said


@rooms
def test_a_server_that_dies_and_comes_back_with_nothing(
  tmp_path, dialect, adapters, monkeypatch
):
  """Its completions wait, and are drawn by the weights that it is told of."""
  sleep, sleeps = http_client._sleep, []

  def dies(server, answer):
    del answer
    server.forget()
    server.die()
    return fake_server.Reply(how='closes')

  fault = Fault(KIND[dialect], dies, [2])
  with staged(tmp_path, dialect, adapters, [fault]) as stage:
    (server,) = stage.servers

    async def wakes(secs):
      sleeps.append(secs)
      if server._listener is None:
        server.rise()
      await sleep(secs)

    stage.engine.load(7, 0)
    monkeypatch.setattr(http_client, '_sleep', wakes)
    engines.complete(stage, asked(), 7, 0)
    assert sleeps
    assert counts_of_loads(server, dialect, adapters) >= 2


@rooms
@pytest.mark.parametrize('dead', [0, 1, 2])
def test_one_of_three_is_dead_from_the_start(tmp_path, dialect, adapters, dead):
  with staged(tmp_path, dialect, adapters, [], [], []) as stage:
    stage.servers[dead].kill()
    stage.engine.load(7, 0)
    (said,) = stage.said
    assert stage.servers[dead].url in said and 'ConnectError' in said
    engines.complete(stage, asked(6), 7, 0)
    drawn = drawn_by(stage, dialect)
    assert drawn[dead] == 0 and sum(drawn) == 12
    # It comes back, is told, and takes its part.
    stage.servers[dead].rise()
    stage.engine.load(8, 1)
    engines.complete(stage, asked(6), 8, 1)
    assert drawn_by(stage, dialect)[dead] == 4
    assert len(stage.said) == 1


@rooms
def test_a_server_that_failed_gets_nothing_until_the_next_version(
  tmp_path, dialect, adapters
):
  fault = Fault(KIND[dialect], answers(500), range(3))
  with staged(tmp_path, dialect, adapters, [fault], []) as stage:
    stage.engine.load(7, 0)
    engines.complete(stage, asked(1, 1), 7, 0)
    assert drawn_by(stage, dialect) == [3, 1]
    engines.complete(stage, asked(4), 7, 0)
    assert drawn_by(stage, dialect) == [3, 9]
    stage.engine.load(8, 1)
    engines.complete(stage, asked(4), 8, 1)
    assert drawn_by(stage, dialect) == [7, 13]
    assert not stage.said


@rooms
def test_who_refuses_while_it_is_told_is_asked_again(
  tmp_path, dialect, adapters
):
  """VLLM answers 503 to what comes while its weights change."""
  told = []

  def refuse(server, answer):
    del server, answer
    told[0].told += 1
    return fake_server.Reply(503)

  fault = Fault(KIND[dialect], refuse, range(3))
  with staged(tmp_path, dialect, adapters, [fault]) as stage:
    stage.engine.load(7, 0)
    told.append(stage.engine._servers.every[0])
    engines.complete(stage, asked(1, 1), 7, 0)
    assert drawn_by(stage, dialect) == [4]


@rooms
def test_four_of_five_give_nonsense(tmp_path, dialect, adapters):
  fault = Fault(KIND[dialect], answers(200, b'nonsense'))
  bad = [[fault] for _ in range(4)]
  with staged(tmp_path, dialect, adapters, *bad, []) as stage:
    stage.engine.load(7, 0)
    engines.complete(stage, asked(1, 1), 7, 0)
    assert drawn_by(stage, dialect) == [1] * 5


@rooms
def test_one_of_three_dies_in_the_middle(tmp_path, dialect, adapters):
  with staged(tmp_path, dialect, adapters, [], [], []) as stage:
    stage.engine.load(7, 0)
    for server in stage.servers:
      server.hold()
    requests = asked(3, 2)
    for one in requests:
      stage.engine.submit(one)
    with contextlib.closing(stage.engine.completed()) as turns:
      next(turns)
      for server in stage.servers:
        server.wait(lambda server: server.waiting == 2)
      stage.servers[1].kill()
      for server in stage.servers:
        server.release()
      for one in turns_until(turns, 6):
        engines.check(one, requests[one.request], 7, 0)
      assert not [*turns]
    # Who was lost comes last, until it has taken the next version.
    stage.engine.load(8, 1)
    assert len(stage.said) == 1
    engines.complete(stage, requests, 8, 1)


@rooms
def test_all_are_dead(tmp_path, dialect, adapters):
  with staged(tmp_path, dialect, adapters, [], []) as stage:
    for server in stage.servers:
      server.kill()
    with pytest.raises(Away, match='No server has taken version 0') as error:
      stage.engine.load(7, 0)
    for server in stage.servers:
      assert server.url in str(error.value)


@rooms
def test_all_die(tmp_path, dialect, adapters):
  with staged(tmp_path, dialect, adapters, [], []) as stage:
    stage.engine.load(7, 0)
    for server in stage.servers:
      server.kill()
    with pytest.raises(Away, match='the prompt with index 0') as error:
      engines.complete(stage, asked(1), 7, 0)
    for server in stage.servers:
      assert server.url in str(error.value)
    for server in stage.servers:
      server.rise()
    engines.complete(stage, asked(), 7, 0)


@dialects
def test_one_that_hangs_is_late(tmp_path, dialect):
  """The limit is long for those that answer, if the machine is busy."""
  fault = Fault(KIND[dialect], answers(how='hangs'))
  with staged(tmp_path, dialect, True, timeout_secs=0.2) as stage:
    stage.engine.load(7, 0)
    stage.servers[0].faults = [fault]
    with pytest.raises(Away, match='no answer in 0.2 s, 3 times'):
      engines.complete(stage, asked(1), 7, 0)
    stage.servers[0].wait(lambda server: server.left == 6)
  with staged(tmp_path, dialect, True, [fault], [], timeout_secs=0.2) as stage:
    stage.engine.load(7, 0)
    engines.complete(stage, asked(2), 7, 0)
    stage.servers[0].wait(lambda server: server.left == 6)


@rooms
def test_a_policy_that_was_dropped_is_not_asked_for(
  tmp_path, dialect, adapters
):
  """A completion of an old policy is lost, and drawn by the new one."""
  (request,) = asked(1, 2)
  with staged(tmp_path, dialect, adapters) as stage:
    stage.engine.load(7, 0)
    (server,) = stage.servers
    server.hold()
    stage.engine.submit(request)
    with contextlib.closing(stage.engine.completed()) as turns:
      next(turns)
      server.wait(lambda server: server.waiting == 2)
      stage.engine.load(8, 1)  # the folder of version 0 is gone
      server.forget()
      server.late = lambda reply: reply._replace(how='breaks')
      server.release()
      for one in turns_until(turns, 2):
        engines.check(one, request, 8, 1)


@rooms
def test_a_server_is_changed_by_one_at_a_time(tmp_path, dialect, adapters):
  """Though many find it lost: vLLM must not resume in another's reload."""
  busy, most = [], []

  def enter(server):
    busy.append(1)
    most.append(len(busy))

  def leave(server):
    busy.pop()

  first, last = {
    ('vllm', True): ('load_lora_adapter', 'load_lora_adapter'),
    ('vllm', False): ('pause', 'resume'),
    ('sglang', True): ('load_lora_adapter', 'load_lora_adapter'),
    ('sglang', False): ('update_weights_from_disk',) * 2,
  }[dialect, adapters]
  forgotten = []

  def forget(server):
    # Not while it is told: a server that starts anew then answers nothing; and
    # the second time only once it has been told again.
    told = first == last or len(most) > len(forgotten)
    if not server.paused and told and len(forgotten) < 2:
      forgotten.append(1)
      server.forget()

  rules = [Fault(KIND[dialect], then(forget), [*range(40)])]
  if first != last:
    rules += [Fault(first, then(enter)), Fault(last, then(leave))]
  with staged(tmp_path, dialect, adapters, rules) as stage:
    stage.engine.load(7, 0)
    engines.complete(stage, asked(4, 4), 7, 0)
    assert not busy and max(most, default=1) == 1
    if first != last:
      assert len(most) > 2


@rooms
def test_one_tries_to_bring_a_server_back_for_all(tmp_path, dialect, adapters):
  """Eight that wait for one after the other would wait for very long."""
  with staged(tmp_path, dialect, adapters, [], []) as stage:
    stage.engine.load(7, 0)
    before = stage.engine.submit(asked(1, 1, calls=9)[0])
    assert sum(map(len, stage.engine.completed())) == 1
    assert drawn_by(stage, dialect) == [1, 0]
    (server, _), lost = stage.servers, stage.engine._servers.every[0]
    lost.lose('it was away', lost.told)
    kind = 'load_lora_adapter' if adapters else LOAD[dialect]
    server.faults = [Fault(kind, answers(500))]
    (request,) = asked(1, 8, follows=(before, 0))
    stage.engine.submit(request)
    found = sum(stage.engine.completed(), [])
    for one in found:
      engines.check(one, request, 7, 0)
    assert drawn_by(stage, dialect) == [1, 8]
    assert counts_of_loads(server, dialect, adapters) == 1 + 3


def test_a_key_that_is_not_set_is_missed_at_the_start(tmp_path, monkeypatch):
  monkeypatch.delenv('THE_KEY', raising=False)
  with pytest.raises(ValueError, match='THE_KEY.*which is not set'):
    with staged(tmp_path, 'vllm', True, api_key_env='THE_KEY'):
      pass


@rooms
def test_a_key_is_sent_and_never_shown(
  tmp_path, dialect, adapters, monkeypatch
):
  monkeypatch.setenv('THE_KEY', 'hunter2')
  fault = Fault(KIND[dialect], answers(401, {'error': 'no hunter2 here'}))
  with staged(
    tmp_path, dialect, adapters, [fault], api_key_env='THE_KEY'
  ) as stage:
    stage.engine.load(7, 0)
    with pytest.raises(Away, match='it was sent the key of THE_KEY') as error:
      engines.complete(stage, asked(1), 7, 0)
    assert 'hunter2' not in str(error.value) and '***' in str(error.value)


@rooms
def test_a_disk_that_is_full(tmp_path, dialect, adapters, monkeypatch):
  """What was there is drawn by, and nothing half is left."""
  with staged(tmp_path, dialect, adapters) as stage:
    stage.engine.load(7, 0)

    def full(folder, params):
      fake_server.write(folder, params)
      raise OSError(errno.ENOSPC, 'No space left on device')

    monkeypatch.setattr(stage.engine.versions, '_write', full)
    with pytest.raises(OSError, match='Version 1 cannot be.*No space.*room'):
      stage.engine.load(8, 1)
    assert len([*stage.folder.iterdir()]) == 1
    engines.complete(stage, asked(), 7, 0)
    monkeypatch.setattr(stage.engine.versions, '_write', fake_server.write)
    stage.engine.load(8, 1)
    engines.complete(stage, asked(), 8, 1)


def test_a_cache_that_is_not_empty_yet_is_waited_for(tmp_path, alone):  # noqa: F811
  full = answers(200, {'success': False})
  fault = Fault('reset_prefix_cache', full, [0, 1])
  with staged(tmp_path, 'vllm', False, [fault]) as stage:
    stage.engine.load(7, 0)
    assert alone.sleeps == [servers._AGAIN_SECS] * 2
    assert 0.1 <= servers._AGAIN_SECS <= 5
    kinds = [path.rpartition('/')[2] for path, _ in stage.servers[0].requests]
    assert kinds == [
      'pause?mode=wait', 'collective_rpc', *['reset_prefix_cache'] * 3,
      'update_weight_version', 'resume',
    ]  # fmt: skip


def test_an_adapter_that_cannot_be_forgotten(tmp_path):
  fault = Fault('unload_lora_adapter', answers(500, b'busy'))
  with staged(tmp_path, 'vllm', True, [fault], []) as stage:
    for version in range(4):
      stage.engine.load(10 + version, version)
      engines.complete(stage, asked(), 10 + version, version)
    assert all('busy' in one for one in stage.said) and stage.said
