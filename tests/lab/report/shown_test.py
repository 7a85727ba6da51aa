"""A page says of which runs it shows completions, where it is not all."""

import pytest

from grpo_jax.lab import report
from tests.lab.report import made_runs
from tests.lab.report.pages import parts_of

pytestmark = pytest.mark.usefixtures('quick_audit')
SECTIONS = 'Completions', 'The same problems, before and after'


def page_of_rates(folder, number, seeds=1):
  """A page of groups with a learning rate each, of so many seeds."""
  workdirs = [
    made_runs.run(folder / f'r{rate}s{seed}', 10, seed, **{'optim.lr': rate})
    for rate in range(1, number + 1)
    for seed in range(seeds)
  ]
  for workdir in workdirs:
    made_runs.with_completions(workdir, 5)
    made_runs.with_evaluations(workdir, [(0, 1)], (0, 10))
  return report.make_page([str(workdir) for workdir in workdirs])


def notes_of(page, section):
  parts = parts_of(page, section)
  return [p.text for p in parts if isinstance(p, report.Text)]


@pytest.mark.parametrize('section', SECTIONS)
def test_groups_of_which_no_completions_are_shown_are_counted(
  section, tmp_path
):
  notes = notes_of(page_of_rates(tmp_path, 4), section)
  assert notes[0] == 'Only the first 3 of 4 groups are read here.'


@pytest.mark.parametrize('section', SECTIONS)
def test_the_run_that_stands_for_its_seeds_is_named(section, tmp_path):
  notes = notes_of(page_of_rates(tmp_path, 2, seeds=2), section)
  assert notes[0].endswith('one is read here: r1s0, r2s0.')


@pytest.mark.parametrize('section', SECTIONS)
def test_nothing_is_said_where_all_runs_are_shown(section, tmp_path):
  notes = notes_of(page_of_rates(tmp_path, 3), section)
  assert not any('read here' in note for note in notes)


@pytest.mark.parametrize('section', SECTIONS)
def test_it_is_said_where_the_first_groups_have_written_nothing(
  section, tmp_path
):
  workdirs = [
    made_runs.run(tmp_path / f'{rate}', 10, 0, None, **{'optim.lr': rate})
    for rate in range(1, 5)
  ]
  made_runs.with_completions(workdirs[3], 5)
  page = report.make_page([str(workdir) for workdir in workdirs])
  assert notes_of(page, section)[0].startswith('Only the first 3 of 4 groups')
