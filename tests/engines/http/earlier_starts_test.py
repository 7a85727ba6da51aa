"""Servers that still have what a start of the run before has given them."""

import pytest

from grpo_jax.engines import protocol
from tests.engines.http import engines
from tests.engines.http import fake_server
from tests.engines.http.engines import LOAD
from tests.engines.http.engines import alone  # noqa: F401
from tests.engines.http.engines import asked
from tests.engines.http.engines import dialects
from tests.engines.http.engines import rooms
from tests.engines.http.engines import staged
from tests.engines.http.fake_server import Fault
from tests.engines.http.fake_server import Reply
from tests.engines.http.faults import answers

pytest.importorskip('httpx2', reason="needs pip install 'grpo_jax[http]'")


def killed(stage, dialect, adapters, *versions, run=None):
  """An engine of an earlier start of the run, of which nothing was closed."""
  before = engines.engine_of(stage.servers, dialect, adapters, stage.folder)
  before.versions.run = run or stage.engine.versions.run
  for version in versions:
    before.load(50 + version, version)
  return before


@rooms
def test_what_a_killed_start_has_left_is_not_drawn_by(
  tmp_path, dialect, adapters
):
  """Nor the version of the same number, nor newer ones than the checkpoint."""
  with staged(tmp_path, dialect, adapters, [], []) as stage:
    before = killed(stage, dialect, adapters, 1, 2, 3)
    for server in stage.servers:
      assert len(server.adapters) == (2 if adapters else 0)
    stage.engine.load(7, 2)
    engines.complete(stage, asked(), 7, 2)
    for server in stage.servers:
      assert [*server.adapters.values()] == ([7] if adapters else [])
    for version in (3, 4, 5):
      stage.engine.load(version, version)
      engines.complete(stage, asked(), version, version)
      for server in stage.servers:
        assert len(server.adapters) == (2 if adapters else 0)
    assert not stage.said
    before.versions.close()


@dialects
def test_adapters_of_other_runs_stay(tmp_path, dialect):
  with staged(tmp_path, dialect, True) as stage:
    other = killed(stage, dialect, True, 4, 5, run='feedbeef')
    own = stage.engine.versions.run
    (server,) = stage.servers
    # Nor are these of the run, though they begin alike.
    server.adapters |= {own: 1, f'{own}x-0': 1, f'my-{own}-0': 1}
    stage.engine.load(7, 0)
    assert len(server.adapters) == 2 + 3 + 1
    other.versions.close()


@dialects
def test_they_are_forgotten_before_a_new_one_needs_their_room(
  tmp_path, dialect
):
  with staged(tmp_path, dialect, True) as stage:
    before = killed(stage, dialect, True, 1, 2)
    (server,) = stage.servers

    def full(server, answer):
      if len(server.adapters) >= 2:
        return Reply(400, {'error': {'message': 'no room for more'}})
      return answer()

    server.faults = [Fault('load_lora_adapter', full)]
    stage.engine.load(7, 1)
    engines.complete(stage, asked(), 7, 1)
    before.versions.close()


@dialects
@pytest.mark.parametrize(
  'fault',
  [
    Fault('models', answers(404, {'detail': 'Not Found'})),
    Fault('models', answers(200, b'nonsense')),
    Fault('models', answers(200, {'data': 7})),
    Fault('models', answers(200, {'data': [{'name': 'a'}]})),
    Fault('unload_lora_adapter', answers(500, b'busy')),
    Fault('unload_lora_adapter', answers(400, b'no')),
  ],
  ids=['404', 'nonsense', 'a number', 'no ids', 'busy', 'refused'],
)
def test_a_server_that_tells_nothing_or_keeps_all_is_drawn_by(
  tmp_path, dialect, fault
):
  with staged(tmp_path, dialect, True) as stage:
    before = killed(stage, dialect, True, 1, 2)
    stage.servers[0].faults = [fault]
    stage.engine.load(7, 2)
    engines.complete(stage, asked(), 7, 2)
    assert not stage.said
    before.versions.close()


@dialects
def test_a_server_that_does_not_answer_is_lost(tmp_path, dialect):
  fault = Fault('models', answers(500, b'starting'), range(3))
  with staged(tmp_path, dialect, True, [fault], []) as stage:
    stage.engine.load(7, 0)
    assert len(stage.said) == 1 and 'starting' in stage.said[0]
    engines.complete(stage, asked(), 7, 0)


@dialects
def test_who_was_away_for_a_moment_forgets_what_is_old(tmp_path, dialect):
  """It has not been started anew, and still has what it was told of."""
  with staged(tmp_path, dialect, True) as stage:
    (server,), (known,) = stage.servers, stage.engine._servers.every
    for version in range(3):
      stage.engine.load(version, version)
    known.lose('it was away', known.told)
    stage.engine.load(7, 3)
    # The newest and the one before.
    assert [*server.adapters.values()] == [2, 7]
    known.lose('it was away', known.told)
    engines.complete(stage, asked(), 7, 3)
    assert [*server.adapters.values()] == [2, 7]
    stage.engine.load(8, 4)  # what it still had is known
    assert [*server.adapters.values()] == [7, 8]


@dialects
def test_an_older_version_that_is_taken_again_is_the_newest(tmp_path, dialect):
  """An evaluation may lie between two rollouts by an older version."""
  with staged(tmp_path, dialect, True) as stage:
    (server,), (known,) = stage.servers, stage.engine._servers.every
    for version in range(3):
      stage.engine.versions.publish(version, version)
      stage.engine.take(stage.engine.versions.fetch(version), version)
    stage.engine.take(stage.engine.versions.fetch(0), 0)
    assert {*server.adapters.values()} == {0, 2}
    number = len(server.bodies('unload_lora_adapter'))
    known.lose('it was away', known.told)
    engines.complete(stage, asked(), 0, 0)
    assert {*server.adapters.values()} == {0, 2}
    assert len(server.bodies('unload_lora_adapter')) == number


@rooms
def test_an_engine_that_ends_leaves_nothing(tmp_path, dialect, adapters):
  with staged(tmp_path, dialect, adapters, [], []) as stage:
    other = killed(stage, dialect, adapters, 0, run='feedbeef')
    for version in range(3):
      stage.engine.load(7, version)
    stage.servers[1].kill()
    stage.engine.close()
    assert len(stage.servers[0].adapters) == (1 if adapters else 0)
    assert [*stage.folder.iterdir()]
    other.versions.close()
    stage.engine.close()  # again, which does nothing


@dialects
def test_a_server_that_was_away_at_the_end_forgets_all(tmp_path, dialect):
  """And what another start of the run has there by then stays."""
  with staged(tmp_path, dialect, True) as stage:
    (server,), (known,) = stage.servers, stage.engine._servers.every
    for version in range(2):
      stage.engine.load(7, version)
    later = killed(stage, dialect, True, 3)
    server.adapters |= {x: 7 for x in stage.engine._named}
    known.lose('it was away', known.told)
    stage.engine.close()
    assert [*server.adapters.values()] == [53]
    later.versions.close()


@dialects
def test_an_adapter_that_stays_keeps_no_other(tmp_path, dialect):
  with staged(tmp_path, dialect, True) as stage:
    for version in range(2):
      stage.engine.load(7 + version, version)
    (server,) = stage.servers
    server.faults = [Fault('unload_lora_adapter', answers(400, b'no'), [0])]
    stage.engine.close()
    assert [*server.adapters.values()] == [7]


@dialects
def test_an_end_does_not_wait_for_a_server_that_hangs(
  tmp_path, dialect, monkeypatch
):
  from grpo_jax.engines.http import engine as engine_lib

  monkeypatch.setattr(engine_lib, '_END_SECS', 0.05)
  fault = Fault('unload_lora_adapter', answers(how='hangs'))
  with staged(tmp_path, dialect, True) as stage:
    stage.engine.load(7, 0)
    stage.servers[0].faults = [fault]
    stage.engine.close()
    stage.servers[0].wait(lambda server: server.left == 1)


@dialects
def test_weights_are_named_by_who_began_them(tmp_path, dialect):
  """A server whose weights an earlier start has replaced draws by those."""
  with staged(tmp_path, dialect, False) as stage:
    before = killed(stage, dialect, False, 2)
    (server,) = stage.servers
    stale = server.label
    stage.engine.load(7, 2)
    assert server.label != stale and server.weights == 7
    server.label, server.weights = stale, 52
    engines.complete(stage, asked(1), 7, 2)  # it is told again
    assert len(server.bodies(LOAD[dialect])) == 3
    before.versions.close()


def test_the_requests_of_a_start_have_its_names(tmp_path):
  with staged(tmp_path, 'vllm', True) as stage:
    stage.engine.load(7, 4)
    protocol.generate(stage.engine, asked(1, 1))
    (folder,) = stage.folder.iterdir()
    (body,) = stage.servers[0].bodies('completions')
    assert body['model'] == folder.name
    assert folder.name.startswith(f'{stage.engine.versions.run}-')
    assert folder.name.endswith('-4')
    assert fake_server.BASE not in stage.servers[0].adapters.values()
