"""Runs whose folders share a name are told apart, wherever a page names one."""

import json
from typing import Any

import pytest

from grpo_jax.lab import report
from tests.lab.report import made_runs
from tests.lab.report.pages import page_of
from tests.lab.report.pages import parts_of

pytestmark = pytest.mark.usefixtures('quick_audit')


@pytest.fixture
def two(tmp_path):
  """Two experiments with a run of the same name, and one run of another."""
  revisions = {'e1/seed0': 'first', 'e2/seed0': 'second', 'e2/seed1': 'third'}
  alarms = {'e1/seed0': 9, 'e2/seed0': 20, 'e2/seed1': 30}
  for seed, (name, git) in enumerate(revisions.items()):
    low = {alarms[name]: {'entropy': 0.001}}
    folder = made_runs.run(tmp_path / name, seed=seed, metrics=low.get)
    start = json.loads((folder / 'versions.json').read_text())[0]
    text = json.dumps([{**start, 'git': git}])
    (folder / 'versions.json').write_text(text)
  return report.make_page([str(tmp_path / name) for name in revisions])


def test_each_run_keeps_its_versions(two):
  rows = dict(parts_of(two, 'Versions')[1].rows)
  assert rows['git revision, e1/seed0'] == 'first'
  assert rows['git revision, e2/seed0'] == 'second'
  assert rows['git revision, seed1'] == 'third'  # as short as can be


def test_each_run_keeps_its_alarms(two):
  (table,) = [
    part for part in parts_of(two, 'Alarms') if isinstance(part, report.Table)
  ]
  assert [row[:2] for row in table.rows] == [
    ('e1/seed0', '9'), ('e2/seed0', '20'), ('seed1', '30'),
  ]  # fmt: skip


def test_a_workdir_that_is_given_twice_is_one_run(tmp_path, monkeypatch):
  made_runs.run(tmp_path / 'a')
  monkeypatch.chdir(tmp_path)
  page = report.make_page(['a', 'a/', './a', str(tmp_path / 'a')])
  assert page.title == 'a' and page.about.startswith('1 run,')
  monkeypatch.chdir(tmp_path / 'a')
  assert report.make_page(['.']).title == 'a'


def test_groups_that_nothing_short_tells_apart_have_the_names_of_runs(
  tmp_path,
):
  changes: list[dict[str, Any]] = [
    {},
    {'optim.b1': 0.5},
    {'optim.b2': 0.5, 'optim.epsilon': 0.5},
  ]
  names = ('x/run', 'y/run', 'z/other')
  for name, fields in zip(names, changes):
    made_runs.run(tmp_path / name, **fields)
  text = page_of(*(tmp_path / name for name in names))
  assert '<title>x/run · y/run · other</title>' in text
