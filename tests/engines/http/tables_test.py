"""The tables of engines of others are whole, and can say that a check fails."""

import dataclasses

import pytest

from tests import readmes
from tests.engines.http import conformance_test
from tests.engines.http import dialects_test
from tests.engines.http import faults
from tests.engines.http import tables
from tests.serving import served

pytest.importorskip('httpx2', reason="needs pip install 'grpo_jax[http]'")


def cells(name):
  """The cells of a table in a README, without its heads."""
  lines = readmes.written(name).splitlines()[2:]
  return [[cell.strip() for cell in line.split('|')[1:-1]] for line in lines]


def test_each_check_has_a_row():
  rows = cells('conformance')
  assert tuple(row[0] for row in rows[:-2]) == conformance_test.NAMES
  for name, native, *others in rows[:-2]:
    assert native == ('—' if name in tables.OVER_HTTP else 'ok')
    assert others == ['ok', 'ok']
  kinds = [name[0] for name in dialects_test.GOLDEN]
  assert rows[-2][2:] == [str(kinds.count(kind)) for kind in 'VS']


def test_each_fault_is_of_one_kind():
  every = [row for rows, _ in tables.KINDS.values() for row in rows]
  assert len(every) == len(faults.ANSWERS) + len(faults.LOADS)
  assert {*map(id, every)} == {*map(id, (*faults.ANSWERS, *faults.LOADS))}
  written = cells('faults')
  assert sum(int(row[1]) for row in written) == len(every)
  assert sum(int(row[2]) for row in written) == sum(x.heals for x in every)


@pytest.mark.long
def test_an_engine_in_the_process_can_fail():
  with served.opened(served.config_to_serve()) as opened:
    sound = tables.native(opened)
    found = tables.found_natively(sound)
    assert {*found.values()} == {'ok', '—'}
    others = served.with_adapters(opened, 3)
    score = dataclasses.replace(opened.served.scorer, params=others)
    found = tables.found_natively(tables.Native(sound._engine, score))
  assert found['log-probabilities are those of the ids'] == 'FAILED'
  assert found['seeds'] == 'ok'
