"""Tests of HttpEngine over servers that do nothing wrong."""

import contextlib
import threading
import time

import numpy as np
import pytest

from grpo_jax.engines import protocol
from tests.engines.http import engines
from tests.engines.http import fake_server
from tests.engines.http.engines import alone  # noqa: F401
from tests.engines.http.engines import asked
from tests.engines.http.engines import staged

pytest.importorskip('httpx2', reason="needs pip install 'grpo_jax[http]'")

rooms = pytest.mark.parametrize(
  'dialect,adapters', engines.ROOMS, ids=engines.ROOM_IDS
)


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


@rooms
def test_three_servers_share_the_work(tmp_path, dialect, adapters):
  with staged(tmp_path, dialect, adapters, [], [], []) as stage:
    stage.engine.load(7, 0)
    engines.complete(stage, asked(6, 4), 7, 0)
    kind = 'completions' if dialect == 'vllm' else 'generate'
    assert [len(one.bodies(kind)) for one in stage.servers] == [8, 8, 8]
