"""Phases are found in series that have them, and in no others."""

import numpy as np
import pytest

from grpo_jax.lab import report
from grpo_jax.lab.report import gradients
from tests.lab.report import made_runs

NUMBER = 60
NOISE = np.full(NUMBER, 0.0156)


def levels(*parts, seed=0, spread=0.05):
  """A series of levels, (how many, value), with relative noise."""
  values = np.concatenate([np.full(n, x, float) for n, x in parts])
  rng = np.random.default_rng(seed)
  return values * (1 + spread * rng.normal(size=len(values)))


def test_three_phases_are_found_where_they_begin():
  """With the deviations of table 3 of the paper."""
  for seed in range(20):
    rewards = levels((20, 0.45), (40, 0.25), seed=seed)
    cosines = levels((20, 0.045), (25, 0.066), (15, 0.13), seed=100 + seed)
    found = gradients.phases(rewards, cosines, NOISE)
    assert found == (20, 45, '')


def test_no_phases_are_told_of_noise():
  false = 0
  for seed in range(300):
    rewards = levels((NUMBER, 0.4), seed=seed)
    cosines = levels((NUMBER, 0.06), seed=1000 + seed)
    found = gradients.phases(rewards, cosines, NOISE)
    false += found.second is not None or found.third is not None
    assert found.second is not None or 'No phases can be told' in found.reason
  assert false <= 3


def wandering(rng):
  return np.cumsum(rng.normal(size=NUMBER))


def resembling(rng, share=0.8):
  """Each value has a share of the one before; the series is stationary."""
  values = rng.normal(size=200 + NUMBER)
  for k in range(1, len(values)):
    values[k] += share * values[k - 1]
  return values[-NUMBER:]


@pytest.mark.parametrize('series', [wandering, resembling])
def test_a_series_that_resembles_its_past_has_rarely_a_phase(series):
  found = [
    gradients.phases(
      series(np.random.default_rng(seed)), np.full(NUMBER, 0.1), NOISE
    )
    for seed in range(200)
  ]
  assert sum(one.second is not None for one in found) <= 10  # 5 %


def test_a_third_phase_is_rarely_found_in_a_series_that_wanders():
  rewards = levels((20, 0.45), (40, 0.25))
  found = [
    gradients.phases(rewards, wandering(np.random.default_rng(seed)), 0 * NOISE)
    for seed in range(200)
  ]
  assert all(one.second == 20 for one in found)
  assert sum(one.third is not None for one in found) <= 10


def test_a_step_is_found_where_neighbours_resemble_each_other_too():
  for seed in range(20):
    noise = 0.01 * resembling(np.random.default_rng(seed), 0.5)
    rewards = np.repeat([0.45, 0.25], [20, 40]) + noise
    assert gradients.phases(rewards, 0 * rewards, NOISE).second == 20


@pytest.mark.parametrize(
  'rewards',
  [
    np.linspace(0.45, 0.2, NUMBER),  # steadily: there is no step
    levels((30, 0.2), (30, 0.4)),  # the wrong way
    np.full(NUMBER, 0.3),
    levels((4, 0.45), (56, 0.2))[:9],  # too few to have two levels
  ],
  ids=['steady', 'rising', 'constant', 'short'],
)
def test_no_phases_are_told_without_a_fall_of_the_deviation(rewards):
  cosines = levels((30, 0.05), (30, 0.2))[: len(rewards)]
  found = gradients.phases(rewards, cosines, NOISE[: len(rewards)])
  assert found.second is None and found.third is None


@pytest.mark.parametrize(
  'cosines',
  [
    levels((NUMBER, 0.06)),
    levels((30, 0.13), (30, 0.06)),  # it falls
    levels((45, 0.002), (15, 0.012)),  # by less than sketching adds
    levels((10, 0.03), (50, 0.13)),  # before the deviation of rewards falls
  ],
  ids=['constant', 'falling', 'noise', 'early'],
)
def test_the_third_phase_wants_a_rise_after_the_second(cosines):
  rewards = levels((20, 0.45), (40, 0.25))
  found = gradients.phases(rewards, cosines, NOISE)
  assert found.second == 20 and found.third is None
  assert 'No third phase' in found.reason


def metrics(rewards, cosines, every=1):
  def of_step(step):
    place = step // every - 1
    if step == 0 or step % every or place >= NUMBER:
      return {}
    return {
      'geometry_reward_std': float(rewards[place]),
      'geometry_cosine_std': float(cosines[place]),
      'geometry_cosine_mean': 0.04,
      'geometry_cosine_noise': 0.0156,
      'geometry_cosine_small': 0.8,
      'geometry_cosine_negative': 0.3,
      'geometry_m': 60.0 + step,
    }

  return of_step


def section_of(folder, made, rollouts):
  made_runs.run(folder, rollouts=rollouts, metrics=made)
  page = report.make_page([str(folder)])
  found = [x for x in page.sections if x.title == 'Gradients of prompts']
  assert 'Gradients of prompts' not in report.as_html(page) or found
  return found


def test_a_page_tells_the_phases_of_a_run(tmp_path):
  rewards = levels((20, 0.45), (40, 0.25))
  cosines = levels((45, 0.06), (15, 0.13))
  (section,) = section_of(tmp_path / 'a', metrics(rewards, cosines, 2), 121)
  table = section.parts[0]
  assert table.title == '3 phases of a, by 60 measured rollouts'
  spans = [row[:2] for row in table.rows]
  assert spans == [('I', '2 to 40'), ('II', '42 to 90'), ('III', '92 to 120')]
  assert len({len(table.head), *map(len, table.rows)}) == 1
  mean = float(table.rows[2][table.head.index('deviation of cosines')])
  assert mean == pytest.approx(cosines[45:].mean(), rel=1e-2)
  keys = [part.key for part in section.parts if isinstance(part, report.Chart)]
  assert {'geometry_cosine_std', 'geometry_m'} <= {*keys}


def test_a_page_says_that_no_phases_can_be_told(tmp_path):
  made = metrics(levels((NUMBER, 0.4)), levels((NUMBER, 0.06)))
  (section,) = section_of(tmp_path / 'a', made, 60)
  assert section.parts[0].text.startswith('a: No phases can be told')


def test_a_page_without_gradients_has_no_such_section(tmp_path):
  assert not section_of(tmp_path / 'a', None, 20)
