"""What a study leaves behind, also where it did not come to its end."""

import json
import math
import pathlib
import sys

import pytest

from grpo_jax.lab import studies
from grpo_jax.lab.studies import claims
from grpo_jax.lab.studies import pages
from grpo_jax.lab.studies import papers
from grpo_jax.lab.studies import trained
from tests import cli
from tests.lab.studies import made as made_up
from tests.lab.studies import measured


@pytest.mark.parametrize('error', [KeyboardInterrupt, ValueError])
def test_what_was_done_before_a_failure_is_written(
  error, tmp_path, monkeypatch
):
  def fails(full):
    raise error('in the second')

  all_of_them = {
    'first': made_up.experiment(lambda full: {'value': 2.0, 'worst': math.inf}),
    'second': made_up.experiment(fails),
  }
  monkeypatch.setattr(papers, 'EXPERIMENTS', tuple(all_of_them))
  monkeypatch.setattr(papers, 'experiment', all_of_them.__getitem__)
  with pytest.raises(error, match='in the second'):
    papers.run('all', tmp_path / 'out')
  answer = json.loads((tmp_path / 'out' / 'claims.json').read_text())
  assert list(answer) == ['first']
  assert answer['first']['claims'][0]['verdict'] == 'holds'
  assert answer['first']['numbers'] == {'value': 2.0, 'worst': None}


def test_a_folder_that_cannot_be_is_refused_before_anything_is_measured(
  tmp_path,
):
  (tmp_path / 'file').write_text('')
  out = f'--out={tmp_path / "file" / "out"}'
  # It would take far longer than the test may.
  done = cli.call('study', 'all', out)
  cli.assert_refused(done, 'Not a directory')


def test_json_has_no_numbers_that_it_lacks():
  given = {'a': [math.nan, -math.inf, 1.0], 'b': {'c': math.inf, 'd': 'inf'}}
  assert pages.without_nan(given) == {
    'a': [None, None, 1.0],
    'b': {'c': None, 'd': 'inf'},
  }


def test_a_name_is_that_of_one_study():
  assert studies.is_experiment('all') and studies.is_experiment('curvature')
  assert not studies.is_experiment('brakes')
  with pytest.raises(ValueError, match="'dance' is no study; .*, all"):
    studies.is_experiment('dance')


def test_the_table_of_claims_has_what_was_measured_and_nothing_else():
  """Otherwise: `study all`, then `python -m tests.lab.studies.measured`."""
  known, made = measured.values(), measured.experiments()
  assert set(known) <= set(made)
  for study in known:
    assert known[study].keys() == made[study].claims.keys(), study
  assert {*studies.EXPERIMENTS} <= set(known)


def test_the_command_of_the_readme_shows_all_runs_that_are_kept():
  readme = pathlib.Path(studies.__file__).with_name('README.md').read_text()
  kept = ','.join(sorted(one.name for one in measured.RUNS.iterdir()))
  assert f' --run=tests/lab/studies/runs/{{{kept}}}\n' in readme


@pytest.mark.parametrize('workdir', sorted(measured.RUNS.iterdir()))
def test_the_table_has_what_the_runs_that_are_kept_have_measured(workdir):
  """Otherwise: `python -m tests.lab.studies.measured WORKDIR`."""
  ((name, result),) = trained.read([str(workdir)]).items()
  computed = {row.name: row.measured for row in result.rows}
  for claim, (*numbers, example) in measured.values()[name].items():
    *again, of = computed[claim]
    assert numbers == pytest.approx(again, rel=1e-6, nan_ok=True), claim
    assert example == of, claim


def test_verdicts_of_the_table_follow_from_its_numbers(tmp_path, monkeypatch):
  monkeypatch.setattr(measured, 'FILE', tmp_path / 'measured.json')
  done = made_up.experiment(lambda full: {'value': 0.5})
  monkeypatch.setattr(measured, 'experiments', lambda: {'made': done})
  for value in (2.0, 0.5):
    numbers = {'value': value}
    result = pages.Result(done, numbers, claims.check(done, numbers), 1.0)
    answer = pages.to_json({'made': result, 'other': result})
    (tmp_path / 'claims.json').write_text(json.dumps(answer))
    monkeypatch.setattr(sys, 'argv', ['', str(tmp_path / 'claims.json')])
    measured.main()
    assert list(measured.values()) == ['made']
    text = measured.markdown()
    assert text.startswith(f'{value >= 1:d} holds, {value < 1:d} fails, 0 not')
    verdict = 'holds' if value >= 1 else 'fails'
    assert f'| E0 `made` | {verdict} | It is at least 1.' in text
