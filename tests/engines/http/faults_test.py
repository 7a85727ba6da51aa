"""Faults of servers: nothing is learned from, and one sentence or none.

Each fault is played at one request, at all requests of the only server, and at
all requests of one of two servers. The completions that come are those of a
healthy server, bit for bit.
"""

import re

import pytest

from grpo_jax.engines.http.servers import Away
from tests.engines.http import engines
from tests.engines.http import faults
from tests.engines.http.engines import KIND
from tests.engines.http.engines import alone  # noqa: F401
from tests.engines.http.engines import asked
from tests.engines.http.engines import staged
from tests.engines.http.fake_server import Fault

pytest.importorskip('httpx2', reason="needs pip install 'grpo_jax[http]'")


def over(rows):
  found = faults.cases(rows)
  names = [
    f'{row.name}-{dialect}-{"adapters" if adapters else "weights"}'
    for row, dialect, adapters in found
  ]
  return pytest.mark.parametrize('row,dialect,adapters', found, ids=names)


def refused(stage, row, what):
  """The sentence in which everybody refuses."""
  with pytest.raises(Away) as error:
    stage.engine.load(5, 0)
    engines.complete(stage, asked(), 5, 0)
  said = str(error.value)
  assert said.startswith(what) and said.endswith('.')
  assert re.search(row.says, said), said
  for server in stage.servers:
    assert server.url in said
  assert 'See that they run' in said
  return said


@over(faults.ANSWERS)
def test_an_answer_that_is_bad_once(tmp_path, row, dialect, adapters):
  fault = Fault(KIND[dialect], row.change, [2])
  with staged(tmp_path, dialect, adapters, [fault]) as stage:
    if not row.heals:
      refused(stage, row, 'No server completes the prompt with index')
      return
    stage.engine.load(5, 0)
    engines.complete(stage, asked(), 5, 0)
    assert not stage.said
    assert len(stage.servers[0].bodies(KIND[dialect])) > 6


@over(faults.ANSWERS)
def test_answers_that_are_all_bad(tmp_path, row, dialect, adapters):
  fault = Fault(KIND[dialect], row.change)
  with staged(tmp_path, dialect, adapters, [fault]) as stage:
    said = refused(stage, row, 'No server completes the prompt with index')
    assert said.count(stage.servers[0].url) <= 4
    assert len(said) < 1500


@over(faults.ANSWERS)
def test_one_of_two_servers_gives_bad_answers(tmp_path, row, dialect, adapters):
  fault = Fault(KIND[dialect], row.change)
  with staged(tmp_path, dialect, adapters, [fault], []) as stage:
    stage.engine.load(5, 0)
    engines.complete(stage, asked(), 5, 0)
    assert stage.servers[0].bodies(KIND[dialect])


@over(faults.LOADS)
def test_a_load_that_fails_once(tmp_path, row, dialect, adapters):
  fault = Fault(row.kind, row.change, [0])
  with staged(tmp_path, dialect, adapters, [fault]) as stage:
    if not row.heals:
      refused(stage, row, 'No server has taken version 0')
    # The server is told again when it is asked to draw.
    stage.engine.load(6, 1)
    engines.complete(stage, asked(), 6, 1)
    assert not stage.said


@over(faults.LOADS)
def test_loads_that_all_fail(tmp_path, row, dialect, adapters):
  with staged(
    tmp_path, dialect, adapters, [Fault(row.kind, row.change)]
  ) as stage:
    refused(stage, row, 'No server has taken version 0')
    assert not stage.servers[0].bodies(KIND[dialect])


@over(faults.LOADS)
def test_one_of_two_servers_cannot_load(tmp_path, row, dialect, adapters):
  with staged(
    tmp_path, dialect, adapters, [], [Fault(row.kind, row.change)]
  ) as stage:
    stage.engine.load(5, 0)
    engines.complete(stage, asked(), 5, 0)
    assert not stage.servers[1].bodies(KIND[dialect])
    (said,) = stage.said
    assert said.startswith('Version 0 goes on without a server')
    assert stage.servers[1].url in said and re.search(
      row.says.split('.*read')[0], said
    )
