"""Runs of one group that are not equally long: none is left out of its mean."""

import pytest

from grpo_jax.lab import report
from tests.lab.report import made_runs
from tests.lab.report.pages import parts_of
from tests.lab.report.pages import words

pytestmark = pytest.mark.usefixtures('quick_audit')
LEVELS = 0.2, 0.2, 0.9


def page_of_seeds(folder, lengths, metrics=lambda seed, step: {}):
  """A page of seeds with these numbers of rollouts and constant rewards."""
  for seed, (length, level) in enumerate(zip(lengths, LEVELS)):

    def of_step(step, seed=seed, level=level):
      return {'reward': level, **metrics(seed, step)} if step else {}

    changes = {'optim.decay': 'constant'}  # so that `steps` may differ
    made_runs.run(folder / f's{seed}', length, seed, of_step, **changes)
  workdirs = [str(folder / f's{seed}') for seed in range(len(lengths))]
  return report.make_page(workdirs)


def reward_of(page):
  (chart,) = [
    part
    for part in parts_of(page, 'What was learned')
    if isinstance(part, report.Chart) and part.key == 'reward'
  ]
  return chart


def test_a_seed_that_is_one_rollout_longer_is_not_the_whole_mean(tmp_path):
  page = page_of_seeds(tmp_path, (100, 100, 101))
  rows = dict(parts_of(page, 'Summary')[0].rows)
  assert rows['reward, last tenth'].startswith('0.433 ± ')
  assert reward_of(page).title.startswith('Reward stayed near 0.433 ± ')
  assert 'Runs end at rollouts 100 to 101' in reward_of(page).note
  said = words(report.as_html(page))
  assert 'Each counts with its own first and last tenth.' in said


def test_a_seed_whose_last_value_is_missing_is_in_the_mean(tmp_path):
  def without_the_last(seed, step):
    return {'reward': None} if (seed, step) == (2, 40) else {}

  page = page_of_seeds(tmp_path, (40, 40, 40), without_the_last)
  assert reward_of(page).title.startswith('Reward stayed near 0.433 ± ')
  assert 'Runs end at rollouts 39 to 40' in reward_of(page).note


def test_a_seed_that_begins_later_is_in_the_mean_too(tmp_path):
  def without_the_first(seed, step):
    return {'reward': None} if seed == 2 and step < 3 else {}

  page = page_of_seeds(tmp_path, (40, 40, 40), without_the_first)
  assert reward_of(page).title.startswith('Reward stayed near 0.433 ± ')


def test_a_chart_says_which_runs_it_cannot_show(tmp_path):
  def without(seed, step):
    return {'reward': None} if seed == 2 else {}

  chart = reward_of(page_of_seeds(tmp_path, (40, 40, 40), without))
  assert '1 of 3 runs has no number.' in chart.note


def test_nothing_is_said_of_lengths_that_are_equal(tmp_path):
  page = page_of_seeds(tmp_path, (40, 40, 40))
  assert not reward_of(page).note
  assert 'different numbers of rollouts' not in report.as_html(page)
