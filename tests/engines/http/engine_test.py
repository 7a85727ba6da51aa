"""Tests of HttpEngine over servers that do nothing wrong."""

import contextlib

import numpy as np
import pytest

from grpo_jax.engines import protocol
from grpo_jax.engines.http import engine as engine_lib
from grpo_jax.engines.http.texts import TextScores
from tests.engines.http import engines
from tests.engines.http import fake_server
from tests.engines.http.engines import KIND
from tests.engines.http.engines import LOAD
from tests.engines.http.engines import alone  # noqa: F401
from tests.engines.http.engines import asked
from tests.engines.http.engines import dialects
from tests.engines.http.engines import rooms
from tests.engines.http.engines import staged
from tests.engines.http.fake_server import BASE
from tests.engines.http.fake_server import Fault

pytest.importorskip('httpx2', reason="needs pip install 'grpo_jax[http]'")

TURN_SECS = engine_lib._TURN_SECS  # that of users, and not of tests


def drawn_by(stage, dialect):
  """How many completions each server was asked for."""
  return [len(one.bodies(KIND[dialect])) for one in stage.servers]


def turns_until(turns, number):
  """What comes until so many completions have."""
  found = []
  while len(found) < number:
    found += next(turns)
  return found


@rooms
def test_each_completion_comes_once_and_is_what_the_server_drew(
  tmp_path, dialect, adapters
):
  with staged(tmp_path, dialect, adapters) as stage:
    for version, weights in ((0, 100), (1, 101), (2, 102), (3, 103)):
      stage.engine.load(weights, version)
      engines.complete(stage, asked(), weights, version)
    assert not stage.said
    assert len([*stage.folder.iterdir()]) == 1
    assert drawn_by(stage, dialect) == [4 * 6]
    (server,) = stage.servers
    assert len(server.adapters) == (2 if adapters else 0)
    assert (server.weights == BASE) == adapters
    assert not server.paused


@rooms
def test_three_servers_share_the_work(tmp_path, dialect, adapters):
  with staged(tmp_path, dialect, adapters, [], [], []) as stage:
    stage.engine.load(7, 0)
    for _ in range(2):
      engines.complete(stage, asked(6, 4), 7, 0)
    assert drawn_by(stage, dialect) == [16, 16, 16]


def test_a_server_with_less_to_do_gets_more(tmp_path):
  with staged(tmp_path, 'vllm', False, [], [], concurrency=99) as stage:
    stage.engine.load(7, 0)
    one, other = stage.servers
    one.hold()
    for request in asked(2, 3):
      stage.engine.submit(request)
    with contextlib.closing(stage.engine.completed()) as turns:
      assert len(turns_until(turns, 3)) == 3  # those of the other server
      for _ in range(3):
        stage.engine.submit(asked(1, 1)[0])
        turns_until(turns, 1)
      assert drawn_by(stage, 'vllm') == [3, 6]
      one.release()
      turns_until(turns, 3)
      assert not [*turns]


@rooms
def test_a_request_can_come_while_others_are_drawn(tmp_path, dialect, adapters):
  first, second, third = asked(3)
  with staged(tmp_path, dialect, adapters) as stage:
    stage.engine.load(7, 0)
    (server,) = stage.servers
    server.hold()
    stage.engine.submit(first)
    found = []
    with contextlib.closing(stage.engine.completed()) as turns:
      assert next(turns) == []
      stage.engine.submit(second)
      assert next(turns) == []
      server.wait(lambda server: server.waiting == 4)
      server.release()
      found += turns_until(turns, 4)
      stage.engine.submit(third)
      for turn in turns:
        found += turn
    numbers = [(one.request, one.number) for one in found]
    assert sorted(numbers) == [(r, n) for r in range(3) for n in range(2)]
    for one in found:
      engines.check(one, (first, second, third)[one.request], 7, 0)


def test_the_caller_has_its_turn_though_nothing_finishes(tmp_path):
  """Twice in a second at least, so that a run can be stopped."""
  assert 0 < TURN_SECS <= 0.5
  with staged(tmp_path, 'sglang', True) as stage:
    stage.engine.load(7, 0)
    stage.servers[0].hold()
    checks = []

    def check():
      checks.append(1)
      if len(checks) == 4:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
      protocol.generate(stage.engine, asked(), check=check)
    stage.servers[0].wait(lambda server: server.left == 6)


@rooms
def test_who_leaves_gives_up_what_is_drawn(tmp_path, dialect, adapters):
  """The servers hear of it, and what comes next has nothing of it."""
  with staged(tmp_path, dialect, adapters, [], []) as stage:
    stage.engine.load(7, 0)
    for server in stage.servers:
      server.hold()
    stage.engine.submit(asked(1, 9)[0])
    turns = stage.engine.completed()
    next(turns)
    stage.servers[0].wait(lambda server: server.waiting == 8)  # as allowed
    turns.close()
    stage.servers[0].wait(lambda server: server.left == 8)
    for server in stage.servers:
      server.release()
    engines.complete(stage, asked(4), 7, 0)
    assert drawn_by(stage, dialect) == [12, 4]


def test_no_more_at_once_than_allowed(tmp_path):
  with staged(tmp_path, 'vllm', True, concurrency=3) as stage:
    stage.engine.load(7, 0)
    (server,) = stage.servers
    server.hold()
    stage.engine.submit(asked(1, 5)[0])
    with contextlib.closing(stage.engine.completed()) as turns:
      next(turns)
      server.wait(lambda server: server.waiting == 3)
      next(turns)
      assert server.waiting == 3
      server.release()
      assert len(turns_until(turns, 5)) == 5


@rooms
def test_what_follows_goes_to_the_same_server(tmp_path, dialect, adapters):
  with staged(tmp_path, dialect, adapters, [], [], []) as stage:
    stage.engine.load(7, 0)
    begun = [stage.engine.submit(one) for one in asked(3, 1, calls=4)]
    assert sum(map(len, stage.engine.completed())) == 3
    assert drawn_by(stage, dialect) == [1, 1, 1]
    for count in range(4):
      (request,) = asked(1, 1, follows=(begun[1], 0))
      stage.engine.submit(request)
      assert sum(map(len, stage.engine.completed())) == 1
      assert drawn_by(stage, dialect) == [1, 2 + count, 1]
    stage.engine.forget(begun[1])
    stage.engine.submit(asked(1, 1, follows=(begun[1], 0))[0])
    assert sum(map(len, stage.engine.completed())) == 1
    assert drawn_by(stage, dialect) == [2, 5, 1]


def test_what_follows_goes_elsewhere_if_its_server_is_dead(tmp_path):
  with staged(tmp_path, 'vllm', False, [], []) as stage:
    stage.engine.load(7, 0)
    before = stage.engine.submit(asked(1, 1, calls=4)[0])
    assert sum(map(len, stage.engine.completed())) == 1
    stage.servers[0].kill()
    (request,) = asked(1, 3, follows=(before, 0))
    stage.engine.submit(request)
    (found,) = [sum(turns, []) for turns in [[*stage.engine.completed()]]]
    for one in found:
      engines.check(one, request, 7, 0)
    assert drawn_by(stage, 'vllm') == [1, 3]


@rooms
def test_what_is_forgotten_never_comes(tmp_path, dialect, adapters):
  kept, gone = asked(2, 3)
  with staged(tmp_path, dialect, adapters) as stage:
    stage.engine.load(7, 0)
    (server,) = stage.servers
    server.hold()
    number = stage.engine.submit(kept)
    other = stage.engine.submit(gone)
    with contextlib.closing(stage.engine.completed()) as turns:
      next(turns)
      server.wait(lambda server: server.waiting == 6)
      stage.engine.forget(other)
      next(turns)
      server.wait(lambda server: server.left == 3)
      server.release()
      found = sum(turns, [])
    assert [one.request for one in found] == [number] * 3
    # It has been given up before it began, too.
    stage.engine.forget(stage.engine.submit(gone))
    assert sum(map(len, stage.engine.completed())) == 0
    engines.complete(stage, asked(1), 7, 0)


def test_who_draws_for_nobody_gets_the_next(tmp_path):
  (gone,), (other,) = asked(1, 3), asked(1, 2)
  with staged(tmp_path, 'vllm', False, [], []) as stage:
    stage.engine.load(7, 0)
    for server in stage.servers:
      server.hold()
    number = stage.engine.submit(gone)
    stage.engine.submit(other)
    with contextlib.closing(stage.engine.completed()) as turns:
      next(turns)
      stage.servers[0].wait(lambda server: server.waiting == 3)
      stage.servers[1].wait(lambda server: server.waiting == 2)
      stage.engine.forget(number)
      next(turns)
      stage.servers[0].wait(lambda server: server.left == 3)
      stage.engine.submit(asked(1, 1)[0])
      next(turns)
      stage.servers[0].wait(lambda server: server.waiting == 1)
      assert drawn_by(stage, 'vllm') == [4, 2]
      for server in stage.servers:
        server.release()
      assert len(turns_until(turns, 3)) == 3


def test_an_error_of_what_is_forgotten_is_nobodys(tmp_path, monkeypatch):
  fault = Fault('generate', lambda *_: fake_server.Reply(401))
  with staged(tmp_path, 'sglang', True, [fault]) as stage:
    stage.engine.load(7, 0)
    number = stage.engine.submit(asked(1)[0])
    # It has failed before the next turn, in which it is forgotten.
    heard, comes = engine_lib._heard, []

    def late(found):
      comes.extend(heard(found))
      while len(comes) < 2:
        comes.extend(heard(found))
      stage.engine.forget(number)
      return []

    monkeypatch.setattr(engine_lib, '_heard', late)
    turns = stage.engine.completed()
    assert next(turns) == []
    assert all(isinstance(one, OSError) for _, one in comes)
    monkeypatch.setattr(engine_lib, '_heard', lambda found: comes)
    assert [*turns] == [[]]


@dialects
def test_what_is_being_drawn_goes_on_with_new_weights(tmp_path, dialect):
  """Each token has the version that the server names for it."""
  (request,) = asked(1, 4)
  with staged(tmp_path, dialect, False) as stage:
    stage.engine.load(7, 3)
    (server,) = stage.servers
    server.hold()
    stage.engine.submit(request)
    with contextlib.closing(stage.engine.completed()) as turns:
      next(turns)
      server.wait(lambda server: server.waiting == 4)
      before = server.label
      stage.engine.load(8, 4)

      def late(reply):
        body = reply.body
        told = body['choices'][0] if dialect == 'vllm' else body['meta_info']
        (span,) = told['weight_versions']
        cut = span['end'] // 2
        told['weight_versions'] = [
          {'version': before, 'start': 0, 'end': 0},
          {'version': before, 'start': 0, 'end': cut},
          {'version': server.label, 'start': cut, 'end': span['end']},
        ]
        return reply

      server.late = late
      server.release()
      found = turns_until(turns, 4)
      assert not [*turns]
    for one in found:
      ids, _, _ = fake_server.drawn(request, one.number, 7)
      assert one.ids.tolist() == ids
      cut = len(ids) // 2
      assert one.version.tolist() == [3] * cut + [4] * (len(ids) - cut)
    server.late = lambda reply: reply
    engines.complete(stage, asked(), 8, 4)


@dialects
def test_an_adapter_draws_to_the_end_what_it_has_begun(tmp_path, dialect):
  old, new = asked(2, 2)
  with staged(tmp_path, dialect, True) as stage:
    stage.engine.load(7, 3)
    (server,) = stage.servers
    server.hold()
    stage.engine.submit(old)
    with contextlib.closing(stage.engine.completed()) as turns:
      next(turns)
      server.wait(lambda server: server.waiting == 2)
      stage.engine.load(8, 4)
      number = stage.engine.submit(new)
      next(turns)
      server.wait(lambda server: server.waiting == 4)
      server.release()
      found = turns_until(turns, 4)
    for one in found:
      if one.request == number:
        engines.check(one, new, 8, 4)
      else:
        engines.check(one, old, 7, 3)


@rooms
def test_a_version_is_told_once_and_can_be_gone_back_to(
  tmp_path, dialect, adapters
):
  kind = 'load_lora_adapter' if adapters else LOAD[dialect]
  with staged(tmp_path, dialect, adapters) as stage:
    for version, loads in (
      (0, 1), (0, 1), (1, 2), (1, 2), (0, 2 if adapters else 3), (2, None),
      (1, None), (0, None),
    ):  # fmt: skip
      stage.engine.load(10 + version, version)
      engines.complete(stage, asked(1), 10 + version, version)
      if loads is not None:
        assert len(stage.servers[0].bodies(kind)) == loads
    assert len(stage.servers[0].adapters) == (2 if adapters else 0)


@rooms
def test_it_ends_by_a_stop_string(tmp_path, dialect, adapters):
  sampling = protocol.Sampling(
    eos_ids=(fake_server.END,), stop_strings=(fake_server.STOP,)
  )
  requests = asked(4, 4, sampling=sampling, limit=5)
  with staged(tmp_path, dialect, adapters) as stage:
    stage.engine.load(7, 0)
    engines.complete(stage, requests, 7, 0)
    finishes = {
      one.finish
      for group in protocol.generate(stage.engine, requests)
      for one in group
    }
    assert finishes == {
      protocol.ENDED, protocol.TRUNCATED, protocol.STOPPED
    }  # fmt: skip


def test_nothing_is_drawn_before_it_has_parameters(tmp_path):
  with staged(tmp_path, 'vllm', True) as stage:
    stage.engine.submit(asked(1)[0])
    with pytest.raises(ValueError, match='no parameters before `load`'):
      next(stage.engine.completed())


def test_filters_are_refused(tmp_path):
  sampling = protocol.Sampling(top_p=0.5)
  with staged(tmp_path, 'vllm', True) as stage:
    stage.engine.load(7, 0)
    with pytest.raises(ValueError, match='does not know what filters leave'):
      protocol.generate(stage.engine, asked(1, sampling=sampling))


def test_vllm_is_paused_while_its_weights_change(tmp_path):
  with staged(tmp_path, 'vllm', False) as stage:
    stage.engine.load(7, 5)
    (server,) = stage.servers
    paths = [path for path, _ in server.requests]
    assert paths == [
      '/pause?mode=wait', '/collective_rpc', '/reset_prefix_cache',
      '/update_weight_version', '/resume',
    ]  # fmt: skip
    ((rpc),) = server.bodies('collective_rpc')
    assert rpc['kwargs'] == {'weights_path': str(*stage.folder.iterdir())}
    (named,) = server.bodies('update_weight_version')
    assert named['new_version'].endswith('-5')


def test_sglang_empties_its_cache_and_aborts_nothing(tmp_path):
  with staged(tmp_path, 'sglang', False) as stage:
    stage.engine.load(7, 5)
    (body,) = stage.servers[0].bodies('update_weights_from_disk')
    assert body['flush_cache'] is True
    assert body['abort_all_requests'] is False
    assert body['model_path'] == str(*stage.folder.iterdir())


@rooms
def test_texts_are_scored(tmp_path, dialect, adapters):
  texts = [[5, 6, 7], [8], [1, 2, 3, 4, 5, 6]]
  with staged(tmp_path, dialect, adapters, [], []) as stage:
    stage.engine.load(7, 0)
    policy = stage.engine._newest[0] if adapters else ''
    servers, spoken = stage.engine._servers, stage.engine._dialect
    score = TextScores(servers, spoken, policy)
    for ids, known in zip(texts, score(texts), strict=True):
      want = [fake_server.score_of(one) for one in ids[1:]]
      np.testing.assert_array_equal(known.logp, np.array(want, np.float32))
    assert drawn_by(stage, dialect) == [2, 1]
    for server in stage.servers:
      server.faults = [
        Fault(KIND[dialect], lambda *_: fake_server.Reply(500, b'why'))
      ]
    with pytest.raises(OSError, match='scores of a text.*HTTP 500.*why'):
      score(texts)
