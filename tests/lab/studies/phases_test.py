"""The study of phases: what its numbers and verdicts are."""

import json
import re

import numpy as np
import pytest

from grpo_jax.lab import studies
from grpo_jax.lab.studies import claims
from grpo_jax.lab.studies import figures
from grpo_jax.lab.studies import pages
from grpo_jax.lab.studies import phases
from grpo_jax.lab.studies import sweeps
from grpo_jax.lab.studies.claims import FAILS
from grpo_jax.lab.studies.claims import HOLDS
from grpo_jax.lab.studies.claims import OPEN
from tests import runs

STEPS = 120
# Rollouts of the three phases, the first of each of the last two measured.
PARTS = 40, 50, 30
# By phase, as the paper has it: its table 3 and the ends of its figure 3.
PAPER = {
  'plain': (0.45, 0.78, 0.85),
  'gain': (0.0, 0.05, 0.03),
  'reward_std': (0.45, 0.25, 0.2),
  'mean': (0.0, 0.039, 0.056),
  'std': (0.045, 0.066, 0.13),
  'small': (0.977, 0.803, 0.524),
  'negative': (0.495, 0.273, 0.336),
}


def outcomes_of(seed, graded=0.0, **changes):
  """The runs of both arms, with levels by phase and some noise on them."""
  rng = np.random.default_rng([17, seed])

  def levels(name, noise):
    values = np.repeat({**PAPER, **changes}[name], PARTS)
    return values + noise * rng.normal(size=STEPS)

  series = {
    'reward_std': levels('reward_std', 0.01),
    'unequal': np.full(STEPS, 0.9),
    'graded': np.full(STEPS, graded),
  }
  geometry = {
    'reward_std': series['reward_std'],
    'cosine_noise': np.full(STEPS, 0.0156),
    **{
      f'cosine_{name}': levels(name, noise)
      for name, noise in (
        ('mean', 0.003), ('std', 0.002), ('small', 0.01), ('negative', 0.0),
      )
    },
  }  # fmt: skip
  for name, values in geometry.items():
    series[f'geometry_{name}'] = np.where(
      np.arange(STEPS) % 2 == 0, values, np.nan
    )
  plain = levels('plain', 0.02)
  rewards = {
    'plain': plain,
    'divided': plain + levels('gain', 0.004),
  }
  return [
    phases.Outcome(
      arm,
      seed,
      STEPS,
      {
        # As a file has what was not measured.
        name: [None if np.isnan(x) else float(x) for x in values]
        for name, values in {**series, 'reward': rewards[arm.label]}.items()
        if arm.label == 'divided' or not name.startswith('geometry_')
      },
    )
    for arm in phases.ARMS
  ]


def outcomes(seeds=3, **changes):
  return [one for seed in range(seeds) for one in outcomes_of(seed, **changes)]


def verdicts_of(found):
  return {
    row.name: row.verdict for row in claims.check(phases.EXPERIMENT, found)
  }


def copied(found):
  """As `claims.json` has it."""
  return json.loads(json.dumps(pages.without_nan(found)))


NOT_IN_THE_PAPER = {'a4'}  # its own table 3 has pairs that disagree


def test_the_picture_of_the_paper_holds_where_a_run_is_like_it():
  found = phases.numbers(outcomes())
  for one in found['seeds'].values():
    assert (one['second'], one['third']) == (41, 91) and not one['reason']
    spans = {name: x['rollouts'] for name, x in one['phases'].items()}
    assert spans == {'I': [1, 40], 'II': [41, 90], 'III': [91, 120]}
  measured = phases.measure(found)
  assert measured.keys() == phases.CLAIMS.keys()
  for name, value in {
    'orthogonal': 0.977,
    'spread': 0.085,
    'orthogonal_falls': 0.453,
    'c_first': 0.45 * 8 / 3,
    'c_second': 0.25 * 8 / 3,
    'no_gain': 0.0,
    'gain_second': 0.05,
    'gain_third': 0.03,
    'gain_either': 0.05,
    'gain': (50 * 0.05 + 30 * 0.03) / 120,
    'threshold': (50 * 0.05 + 30 * 0.03) / 80,
  }.items():
    assert measured[name].mean == pytest.approx(value, abs=6e-3), name
    assert 0 < measured[name].half < 0.04, name
  # A phase counts with its rollouts: without them this would be 0.04.
  assert measured['threshold'].mean == pytest.approx(0.0425, abs=1.2e-3)
  verdicts = verdicts_of(found)
  assert {k for k, x in verdicts.items() if x != HOLDS} == NOT_IN_THE_PAPER
  assert verdicts['a4'] == FAILS
  assert verdicts_of(copied(found)) == verdicts


@pytest.mark.parametrize(
  'name, changes, wanted',
  [
    ('orthogonal', {'small': (0.7, 0.6, 0.5)}, FAILS),
    ('mean_cosine', {'mean': (0.05, 0.05, 0.05)}, FAILS),
    ('mean_cosine', {'mean': (-0.05, 0.05, 0.05)}, FAILS),
    ('second', {'reward_std': (0.3, 0.3, 0.3)}, FAILS),
    ('third', {'std': (0.06, 0.06, 0.06)}, FAILS),
    ('spread', {'std': (0.3, 0.066, 0.13)}, FAILS),
    ('orthogonal_falls', {'small': (0.9, 0.8, 0.95)}, FAILS),
    ('a4', {'negative': (0.0, 0.0, 0.0)}, HOLDS),
    ('a4', {'std': (0.001, 0.002, 0.003)}, OPEN),  # sketching makes as much
    ('c_first', {'reward_std': (0.3, 0.2, 0.2)}, FAILS),
    ('c_second', {'reward_std': (0.49, 0.4, 0.4)}, FAILS),
    ('c_first', {'graded': 0.5}, OPEN),
    ('no_gain', {'gain': (0.05, 0.05, 0.03)}, FAILS),
    ('no_gain', {'gain': (-0.05, 0.05, 0.03)}, FAILS),
    ('gain_second', {'gain': (0.0, -0.03, 0.03)}, FAILS),
    ('gain_third', {'gain': (0.0, 0.03, -0.03)}, FAILS),
    ('gain_either', {'gain': (0.0, -0.03, 0.03)}, FAILS),
    ('gain', {'gain': (0.0, -0.03, 0.0)}, FAILS),
    ('threshold', {'gain': (0.06, 0.02, 0.02)}, FAILS),
    ('threshold', {'reward_std': (0.3, 0.2, 0.2)}, OPEN),  # all are below
    ('threshold', {'graded': 0.5}, OPEN),
  ],
)
def test_each_verdict_turns_with_what_was_measured(name, changes, wanted):
  found = phases.numbers(outcomes(**changes))
  assert verdicts_of(found)[name] == wanted
  assert verdicts_of(copied(found))[name] == wanted


def test_one_seed_describes_itself_and_gains_nothing_for_sure():
  found = phases.numbers(outcomes(1))
  verdicts, measured = verdicts_of(found), phases.measure(found)
  described = {
    'orthogonal', 'mean_cosine', 'spread', 'orthogonal_falls', 'c_first',
    'c_second',
  }  # fmt: skip
  assert {k for k, x in verdicts.items() if x == HOLDS} == described
  assert 0 < measured['orthogonal'].half < 0.1
  for name in verdicts.keys() - described - NOT_IN_THE_PAPER:
    assert verdicts[name] == OPEN and np.isnan(measured[name].half)
    assert np.isfinite(measured[name].mean)
  said = measured['gain_second'].example
  assert re.fullmatch(r'Over the rollouts of these two .*: 0\.0\d+ ± .*', said)


def test_without_phases_thirds_are_told_and_no_gain_by_phase():
  found = phases.numbers(outcomes(reward_std=(0.3, 0.3, 0.3)))
  measured, verdicts = phases.measure(found), verdicts_of(found)
  for name, place, gain in (
    ('no_gain', 'first', 0.0),
    ('gain_second', 'second', 0.05),
    ('gain_third', 'last', (10 * 0.05 + 30 * 0.03) / 40),
  ):
    assert verdicts[name] == OPEN and np.isnan(measured[name].mean)
    said = re.fullmatch(
      rf'In the {place} third of runs without phases: (\S+) ± \S+\.',
      measured[name].example,
    )
    assert said and float(said[1]) == pytest.approx(gain, abs=3e-3)
  # The start is the first third, and the whole is the whole.
  assert verdicts['orthogonal'] == verdicts['mean_cosine'] == HOLDS
  assert verdicts['gain'] == HOLDS and verdicts['a4'] == FAILS
  assert 'No phases can be told' in measured['second'].example
  assert measured['second'].mean == measured['third'].mean == 0
  assert {verdicts[x] for x in ('spread', 'c_first', 'threshold')} == {OPEN}


def test_a_run_without_a_third_phase_ends_in_the_second():
  found = phases.numbers(outcomes(std=(0.06, 0.06, 0.06)))
  (one, *_) = found['seeds'].values()
  assert one['second'] == 41 and one['third'] is None
  assert one['phases'].keys() == {'I', 'II'}
  assert one['phases']['II']['rollouts'] == [41, 120]
  verdicts, measured = verdicts_of(found), phases.measure(found)
  assert verdicts['second'] == verdicts['gain_second'] == HOLDS
  assert verdicts['gain_third'] == OPEN and not measured['gain_third'].example


def test_a_seed_without_phases_is_named():
  some = [*outcomes(2), *outcomes_of(2, reward_std=(0.3, 0.3, 0.3))]
  found = phases.measure(phases.numbers(some))
  assert found['second'].mean == pytest.approx(2 / 3)
  assert found['second'].example.startswith('Smallest case: seed 2. No phases')
  assert found['gain_second'].example == 'Seeds without it: 2.'
  assert found['gain_second'].mean == pytest.approx(0.05, abs=3e-3)


def test_the_one_of_several_seeds_that_has_a_phase_gets_no_interval():
  """It is chosen by chance; a study of one seed describes its run."""
  without = [
    one for k in (0, 1) for one in outcomes_of(k, std=(0.06, 0.06, 0.06))
  ]
  found = phases.numbers([*without, *outcomes_of(2)])
  verdicts, measured = verdicts_of(found), phases.measure(found)
  for name in ('spread', 'orthogonal_falls'):
    assert measured[name].mean > 0 and np.isnan(measured[name].half)
    assert verdicts[name] == OPEN
    assert measured[name].example == '1 of 3 seeds have it.'
  assert verdicts['third'] == OPEN and measured['third'].count == 3


def test_without_an_arm_nothing_is_said_of_gains():
  divided = [one for one in outcomes() if one.arm.label == 'divided']
  verdicts = verdicts_of(phases.numbers(divided))
  assert verdicts['orthogonal'] == HOLDS
  assert {verdicts[x] for x in ('no_gain', 'gain', 'threshold')} == {OPEN}
  plain = [one for one in outcomes() if one.arm.label == 'plain']
  assert {*verdicts_of(phases.numbers(plain)).values()} == {OPEN}


def test_phases_are_those_of_the_run_that_divides():
  """What `plain` has of its own counts for the fair comparison alone."""

  def changed(one, reward_std):
    if one.arm.label == 'plain':
      one.numbers['reward_std'] = reward_std
    return one

  none = [0.3] * STEPS
  found = phases.numbers([changed(one, none) for one in outcomes()])
  assert found['seeds']['0']['second'] == 41
  verdicts = verdicts_of(found)
  assert verdicts['gain_second'] == HOLDS and verdicts['gain_either'] == OPEN

  def fallen(rollout):
    falls = np.repeat([0.45, 0.25], [rollout, STEPS - rollout]).tolist()
    numbers = phases.numbers([changed(one, falls) for one in outcomes()])
    return phases.measure(numbers)

  # It falls early, where the gain is 0 still, and lasts as long as the other's:
  # 20 rollouts without a gain, 50 with one.
  early = fallen(20)
  assert early['gain_either'].mean == pytest.approx(
    (0.05 + 0.05 * 50 / 70) / 2, abs=1e-3
  )
  assert early['gain_second'].mean == pytest.approx(0.05, abs=1e-3)
  # After the third phase of the other run has begun there is no second.
  assert np.isnan(fallen(100)['gain_either'].mean)


@pytest.mark.parametrize(
  'changes, wanted',
  [
    ({}, r'.*; \S+ ± \S+ in phase I; .* in phase II; .* in phase III'),
    ({'reward_std': (0.3, 0.3, 0.3)}, '.*; the phases .* are not found'),
  ],
  ids=['phases', 'none'],
)
def test_a_figure_marks_the_phases(changes, wanted):
  found = copied(phases.numbers(outcomes(2, **changes)))
  figure, title = figures.drawn(phases.EXPERIMENT, found, figures.LIGHT)
  assert re.fullmatch(wanted, title)
  marks = [text.get_text().strip() for text in figure.axes[0].texts]
  assert marks == ['II', 'III', 'II', 'III'] * (not changes)
  rewards = {
    line.get_label(): np.array(line.get_ydata())
    for line in figure.axes[0].lines
    if line.get_label() in ('divided', 'plain')
  }
  gain = rewards['divided'] - rewards['plain']
  assert gain[40:90].mean() == pytest.approx(0.05, abs=5e-3)
  # Of cosines, each second rollout has a point.
  (deviation,) = (
    x for x in figure.axes[2].lines if x.get_label() == 'deviation'
  )
  assert deviation.get_xdata().tolist() == list(range(1, STEPS, 2))


def test_arms_differ_in_the_division_alone():
  config = runs.small(**{'learner.method_kwargs': {'kl_coefficient': 0.1}})
  divided, plain = (phases.config_of(config, x, 5) for x in phases.ARMS)
  assert [arm.label for arm in phases.ARMS] == ['divided', 'plain']
  assert divided.learner.method == 'grpo'
  assert plain.learner.method.endswith(':grpo_without_std')
  assert divided.learner.method_kwargs == {'kl_coefficient': 0.1}
  assert plain.learner.method_kwargs == {'kl_coefficient': 0.1}
  assert divided.seed == plain.seed == 5
  assert divided.log.geometry_every_steps == 2
  assert plain.log.geometry_every_steps == 0


@pytest.mark.long
def test_a_study_of_both_arms(tmp_path):
  """From the same start; the division then makes a difference."""
  config = runs.small(
    **{
      'reward': 'tests.judges:even',
      'warm_up.steps': 2,
      'optim.warmup_steps': 0,
      'optim.lr': 0.01,
    }
  )
  study = studies.study('phases')
  judged = sweeps.conduct(study, config, tmp_path, 1, 4)
  assert (judged.folder / 'claims.html').exists()
  done = sweeps.read(study.sweep, tmp_path, 4)
  divided, plain = (done[arm, 0].outcome.numbers for arm in phases.ARMS)
  assert divided['reward'][0] == plain['reward'][0]
  assert divided['reward_std'][1:] != plain['reward_std'][1:]
  assert not any(name.startswith('geometry_') for name in plain)
  measured = np.array(divided['geometry_reward_std'], float)
  assert np.isfinite(measured).tolist() == [True, False, True, False]
  np.testing.assert_allclose(
    measured[::2], np.array(divided['reward_std'])[::2], rtol=1e-6
  )
  zero = np.array(divided['geometry_zero'], float)[::2]
  np.testing.assert_allclose(np.array(divided['unequal'])[::2], 1 - zero)
  for one in (divided, plain):
    assert {*one['graded']} == {0.0}
  text = json.dumps(study.to_json(judged))
  assert 'gain_second' in text
