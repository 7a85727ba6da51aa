"""Engines over fake servers, and what all their tests ask of them."""

from collections.abc import Iterator
from collections.abc import Sequence
import contextlib
import functools
import os
import ssl
import threading
from typing import Any
from typing import NamedTuple

import numpy as np
import pytest

from grpo_jax.config import http_client
from grpo_jax.engines import protocol
from grpo_jax.engines.http import engine as engine_lib
from grpo_jax.engines.http import servers
from grpo_jax.engines.http.dialects import Dialect
from grpo_jax.engines.http.engine import HttpEngine
from grpo_jax.engines.http.servers import Servers
from grpo_jax.engines.http.sglang import Sglang
from grpo_jax.engines.http.versions import Versions
from grpo_jax.engines.http.vllm import Vllm
from tests.engines.http import fake_server
from tests.engines.http.fake_server import FakeServer
from tests.rewards.chat_server import FakeTime

DIALECTS = 'vllm', 'sglang'
# Of policies that are adapters, and of whole weights.
ROOMS = [(d, a) for d in DIALECTS for a in (True, False)]
ROOM_IDS = [f'{d}-{"adapters" if a else "weights"}' for d, a in ROOMS]
dialects = pytest.mark.parametrize('dialect', DIALECTS)
rooms = pytest.mark.parametrize('dialect,adapters', ROOMS, ids=ROOM_IDS)
# Of the requests for completions, and of the first for whole weights.
KIND = {'vllm': 'completions', 'sglang': 'generate'}
LOAD = {'vllm': 'pause', 'sglang': 'update_weights_from_disk'}
SAMPLING = protocol.Sampling(eos_ids=(fake_server.END,))


@functools.cache
def _encryption() -> ssl.SSLContext:
  return ssl.create_default_context()


class Stage(NamedTuple):
  """An engine, its servers, and what it has told people."""

  engine: HttpEngine
  servers: list[FakeServer]
  said: list[str]
  folder: Any


@pytest.fixture(autouse=True)
def alone(monkeypatch):
  """No test hears of proxies, sleeps, or leaves a thread or a socket."""
  for name in ('http_proxy', 'https_proxy', 'all_proxy'):
    monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv(name.upper(), raising=False)
  # It reads a file of a megabyte, and nothing here is encrypted.
  known = _encryption()
  httpcore = pytest.importorskip('httpcore2')
  monkeypatch.setattr(httpcore, 'default_ssl_context', lambda **_: known)
  clock = FakeTime(http_client, monkeypatch)
  monkeypatch.setattr(servers, '_sleep', clock.sleep)
  monkeypatch.setattr(engine_lib, '_TURN_SECS', 0.02)
  threads, files = {*threading.enumerate()}, _files()
  yield clock
  assert {*threading.enumerate()} <= threads
  assert _files() <= files


def _files() -> set[str]:
  """What this process has open of sockets and files."""
  found = set()
  if not os.path.isdir('/proc/self/fd'):
    return found
  for name in os.listdir('/proc/self/fd'):
    with contextlib.suppress(OSError):
      where = os.readlink(f'/proc/self/fd/{name}')
      if where.startswith(('socket:', '/')) and not where.startswith('/dev'):
        found.add(f'{name} {where}')
  return found


def spoken(dialect: str, adapters: bool) -> Dialect:
  """A dialect, to servers that call their model 'policy'."""
  return Vllm('policy', adapters) if dialect == 'vllm' else Sglang(adapters)


def engine_of(
  servers: Sequence[FakeServer],
  dialect: str,
  adapters: bool,
  folder: Any,
  **settings: Any,
) -> HttpEngine:
  """An engine over fake servers.

  Args:
    servers: They draw.
    dialect: Of theirs.
    adapters: Whether policies are adapters.
    folder: Of the versions.
    settings: Of the client, and `concurrency`.
  """
  concurrency = settings.pop('concurrency', 8)
  settings = dict(
    dict(
      who='config.engine',
      api_key_env='',
      timeout_secs=5.0,
      retries=2,
      backoff_secs=0.1,
      longest_wait_secs=2.0,
      limits=http_client.Limits(0, concurrency),
    ),
    **settings,
  )
  urls = [one.url for one in servers]
  return HttpEngine(
    Servers(urls, http_client.Client(**settings), concurrency),
    spoken(dialect, adapters),
    Versions(folder, fake_server.write),
    adapters,
  )


@contextlib.contextmanager
def staged(
  tmp_path: Any,
  dialect: str,
  adapters: bool,
  *faults: Sequence[fake_server.Fault],
  **settings: Any,
) -> Iterator[Stage]:
  """An engine over one server for each list of faults.

  Args:
    settings: See `engine_of`.
  """
  known = [FakeServer(dialect, its) for its in faults or [[]]]
  said: list[str] = []
  folder = tmp_path / 'versions'
  try:
    engine = engine_of(known, dialect, adapters, folder, **settings)
    engine.tell = said.append
    yield Stage(engine, known, said, folder)
    engine.close()
    assert not folder.exists()
  finally:
    for one in known:
      one.close()


def asked(count: int = 3, group: int = 2, **fields: Any) -> list[Any]:
  """Requests, each of another prompt."""
  fields = {'limit': 12, 'sampling': SAMPLING, **fields}
  return [
    protocol.Request(
      [1, 2, 30 + n],
      fake_server.keys(group, n),
      name=f'the prompt with index {n}',
      **fields,
    )
    for n in range(count)
  ]


def check(
  one: protocol.Sampled, request: protocol.Request, weights: int, version: int
) -> None:
  """That a completion is what a healthy server draws, bit for bit."""
  ids, logp, finish = fake_server.drawn(request, one.number, weights)
  assert one.ids.dtype == np.int32 and one.ids.tolist() == ids
  assert one.logp.dtype == np.float32
  np.testing.assert_array_equal(one.logp, np.array(logp, np.float32))
  assert one.finish == finish
  assert one.version.tolist() == [version] * len(ids)
  assert one.log_kept.tolist() == [0.0] * len(ids)


def complete(
  stage: Stage, requests: Sequence[Any], weights: int, version: int
) -> None:
  """Draws, and checks, everything."""
  for request, group in zip(
    requests, protocol.generate(stage.engine, requests), strict=True
  ):
    assert [one.number for one in group] == [*range(len(request.keys))]
    for one in group:
      check(one, request, weights, version)
