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
  assert spans == [('I', '1 to 41'), ('II', '42 to 91'), ('III', '92 to 121')]
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


def cell(table, row, column):
  return table.rows[row][table.head.index(column)]


@pytest.mark.parametrize('binary', [True, False])
def test_a_page_has_rewards_and_the_bound_by_phase(tmp_path, binary):
  """The bound is of rewards of 0 and 1, whose mean is the accuracy."""
  rewards = levels((20, 0.45), (40, 0.25))
  geometry = metrics(rewards, levels((45, 0.06), (15, 0.13)), 2)

  def made(step):
    reward = 0.5 if step < 42 else 0.7
    accuracy = reward if binary else 0.1
    found = {'reward': reward, 'accuracy': accuracy} if step else {}
    return {**geometry(step), **found}

  (section,) = section_of(tmp_path / 'a', made, 121)
  table = section.parts[0]
  # Rollout 41, which is not measured, is of the first phase too.
  assert [cell(table, k, 'mean reward') for k in range(3)] == [
    '0.5', '0.7', '0.7',
  ]  # fmt: skip
  bound = cell(table, 0, 'C(T)')
  if not binary:
    assert bound == '-'
  else:
    assert float(bound) == pytest.approx(8 / 3 * rewards[:20].mean(), rel=1e-2)
  assert cell(table, 0, 'pairs that are nearly orthogonal') == '80\xa0%'


def test_a_page_says_that_too_few_gradients_were_compared(tmp_path):
  rewards, cosines = levels((NUMBER, 0.4)), levels((NUMBER, 0.06))
  made = metrics(rewards, cosines, 2)
  (section,) = section_of(tmp_path / 'a', made, 19)
  said = 'compared in 9 of the 10 rollouts that it takes'
  assert said in section.parts[0].text
  (section,) = section_of(tmp_path / 'b', made, 21)
  assert 'does not fall in a step' in section.parts[0].text

  def single(step):  # one prompt alone has a gradient: there are no cosines
    found = made(step)
    return {k: x for k, x in found.items() if k == 'geometry_reward_std'}

  (section,) = section_of(tmp_path / 'c', single, 40)
  assert 'two prompts or more were compared in 0 of' in section.parts[0].text


def test_too_few_rollouts_after_the_fall_are_told():
  rewards = levels((20, 0.45), (9, 0.25))
  cosines = levels((20, 0.05), (4, 0.05), (5, 0.2))
  found = gradients.phases(rewards, cosines, NOISE[:29])
  assert found.second == 20 and found.third is None
  assert found.reason.startswith('No third phase') and '9 of' in found.reason


def pair(folder, seeds=(0,), **changes):
  """Runs of two methods: the first earns 0.1 more in phase II, 0 else."""
  rewards = levels((20, 0.45), (40, 0.25))
  geometry = metrics(rewards, levels((45, 0.06), (15, 0.13)), 2)
  made = []
  for name, method in (('one', 'grpo'), ('other', 'dr_grpo')):
    for seed in seeds:

      def of_step(step, name=name, seed=seed):
        gain = (0.1 + 0.01 * seed) * (name == 'one') * (42 <= step < 92)
        found = geometry(step) if name == 'one' else {}
        return {**found, 'reward': 0.5 + gain} if step else {}

      changed = {'learner.method': method, 'learner.method_kwargs': {}}
      if name == 'other':
        changed |= changes
      workdir = made_runs.run(
        folder / f'{name}{seed}', 121, seed, of_step, **changed
      )
      made.append(str(workdir))
  return made


def gain_table(workdirs):
  page = report.make_page(workdirs)
  (section,) = (x for x in page.sections if x.title == 'Gradients of prompts')
  tables = [x for x in section.parts if isinstance(x, report.Table)]
  notes = ' '.join(x.text for x in section.parts if isinstance(x, report.Text))
  return [x for x in tables if x.title.startswith('Reward of')], notes


def test_runs_that_differ_in_their_method_are_compared_by_phase(tmp_path):
  workdirs = pair(tmp_path)
  ((table,), notes) = gain_table(workdirs)
  assert table.title == (
    'Reward of method=grpo minus that of method=dr_grpo, by phase of '
    'method=grpo'
  )
  assert table.rows == [('I', '0', '0'), ('II', '0', '0.1'), ('III', '0', '0')]
  assert 'One seed gives no interval' in notes
  # The other way round: phases are still those of the run that has them.
  ((table,), _) = gain_table(workdirs[::-1])
  assert table.title.startswith('Reward of method=dr_grpo minus')
  assert table.title.endswith('by phase of method=grpo')
  assert float(table.rows[1][2]) == pytest.approx(-0.1)


def test_seeds_are_compared_each_with_its_own(tmp_path):
  ((table,), notes) = gain_table(pair(tmp_path, (0, 1, 2)))
  assert table.rows[1] == ('II', '0, 1, 2', '0.11 ± 0.025')
  assert 'One seed' not in notes


@pytest.mark.parametrize(
  'changes', [{'optim.lr': 0.5}, {'seed': 7}], ids=['rate', 'seed']
)
def test_other_runs_are_not_compared_by_phase(tmp_path, changes):
  workdirs = pair(tmp_path)
  folder = tmp_path / 'third'
  if 'seed' in changes:  # no seed in common
    other = pair(folder, (7,))[1]
  else:
    other = pair(folder, **changes)[1]
  tables, _ = gain_table([workdirs[0], other])
  assert not tables


def test_arguments_of_a_method_are_of_the_method(tmp_path):
  changes = {'learner.method': 'grpo'}
  changes['learner.method_kwargs'] = {'kl_coefficient': 0.5}
  assert len(gain_table(pair(tmp_path, **changes))[0]) == 1


def test_an_interval_over_rollouts_allows_for_what_resembles():
  """Nearly as many intervals as they say have the mean of all series."""

  def covered(share, number):
    some = [
      gradients.mean_over_rollouts(
        resembling(np.random.default_rng(seed), share)[:number]
      )
      for seed in range(300)
    ]
    return np.mean([abs(one.mean) <= one.half for one in some])

  for number in (10, 20, 60):
    assert covered(0.0, number) >= 0.95
    assert covered(0.5, number) >= 0.93
  assert covered(0.8, 60) >= 0.9
  found = gradients.mean_over_rollouts(np.array([1.0, 3.0, 1.0, 3.0]))
  assert found.mean == 2 and found.half > 0
  assert np.isnan(gradients.mean_over_rollouts(np.array([0.5])).half)
