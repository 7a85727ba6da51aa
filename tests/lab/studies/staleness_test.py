"""The study of what older policies drew: what its numbers and verdicts are."""

import dataclasses
import json

import numpy as np
import pytest

from grpo_jax.lab import studies
from grpo_jax.lab.studies import claims
from grpo_jax.lab.studies import figures
from grpo_jax.lab.studies import staleness
from grpo_jax.lab.studies import sweeps
from tests import runs

STEPS = 8
NAMES = 'reward', 'clipped', 'carried', 'moved', 'outside', 'ess'


def outcome(arm, seed, **numbers):
  """An outcome whose numbers do not change from rollout to rollout."""
  every = {name: [numbers.get(name, 0.5)] * STEPS for name in NAMES}
  return staleness.Outcome(arm, seed, STEPS, every)


def made(**by_name):
  """Outcomes of two seeds, by functions of an arm and a seed."""
  return [
    outcome(arm, seed, **{k: f(arm, seed) for k, f in by_name.items()})
    for arm in staleness.ARMS
    for seed in range(2)
  ]


def test_claims_compare_arms_seed_by_seed():
  plain = lambda arm: arm.ratio == 'plain'
  found = staleness.numbers(
    made(
      reward=lambda arm, seed: seed - 0.01 * arm.ahead - 0.1 * plain(arm),
      clipped=lambda arm, seed: 10 * seed + 0.1 * arm.ahead,
      carried=lambda arm, seed: (1 if plain(arm) else -1) * 0.01 * arm.ahead,
      ess=lambda arm, seed: 1 - 0.05 * arm.ahead,
    )
  )
  measured = staleness.measure(found)
  assert measured.keys() == staleness.CLAIMS.keys()
  for name, value in {
    'clipped': 0.4,
    'carried': -0.04,
    'carried_rises': -0.03,
    'plain_carried': 0.04,
    'outside': 0.0,
    'ess': 0.2,
    'one_is_free': 0.01,
    'four_is_free': 0.04,
    'correction': 0.1,
  }.items():
    assert measured[name].mean == pytest.approx(value), name
    assert measured[name].half == pytest.approx(0, abs=1e-9), name
  verdicts = {
    row.name: row.verdict for row in claims.check(staleness.EXPERIMENT, found)
  }
  assert verdicts['carried'] == verdicts['four_is_free'] == claims.FAILS
  assert verdicts['one_is_free'] == verdicts['correction'] == claims.HOLDS


def test_what_is_the_same_is_not_more():
  found = staleness.numbers(made())
  verdicts = {
    row.name: row.verdict for row in claims.check(staleness.EXPERIMENT, found)
  }
  free = {'one_is_free', 'four_is_free'}
  assert {k for k, x in verdicts.items() if x == claims.HOLDS} == free
  assert {x for k, x in verdicts.items() if k not in free} == {claims.FAILS}


def test_a_title_says_what_was_measured():
  title = lambda outcomes: figures.drawn(
    staleness.EXPERIMENT, staleness.numbers(outcomes), figures.LIGHT
  )[1]
  rising = made(reward=lambda arm, seed: 0.25 * arm.ahead)
  assert title(rising).endswith('at age 0 minus that at age 4, -1')
  some = [one for one in rising if one.arm.label in ('0-corrected', '1-plain')]
  assert title(some) == 'Learning from what older policies drew'


def test_rewards_are_of_policies_of_equally_many_updates():
  """Version v earns v, and an arm sees it `ahead` rollouts later."""
  outcomes = []
  for arm in staleness.ARMS:
    one = outcome(arm, 0)
    versions = np.maximum(np.arange(STEPS) - arm.ahead, 0.0)
    numbers = {**one.numbers, 'reward': versions.tolist()}
    # As a file has what was not measured.
    numbers['carried'] = [None, 2.0, None, 4.0] * 2
    outcomes.append(dataclasses.replace(one, numbers=numbers))
  means = staleness.numbers(outcomes)['means']
  assert {x['0'] for x in means['reward'].values()} == {1.5}  # of 0 to 3
  assert {x['0'] for x in means['carried'].values()} == {3.0}


def test_what_was_left_out_has_no_verdict():
  some = [one for one in made() if one.arm.label in ('0-corrected', '4-plain')]
  measured = staleness.measure(staleness.numbers(some))
  assert np.isnan(measured['four_is_free'].mean)
  assert not np.isnan(measured['plain_carried'].mean)


def test_a_study_of_two_arms(tmp_path):
  """By runs that draw as old as their arm says."""
  config = runs.small(
    **{
      'reward': 'tests.judges:even',
      'learner.epochs': 2,
      'warm_up.steps': 2,
      'optim.warmup_steps': 0,
      'optim.lr': 0.01,
    }
  )
  only = '0-corrected', '2-plain'
  study = studies.study('staleness')
  judged = sweeps.conduct(study, config, tmp_path, 1, 6, only)
  assert (judged.folder / 'claims.html').exists()
  done = sweeps.read(study.sweep, tmp_path, 6)
  assert {arm.label for arm, _ in done} == {*only}
  took = [one.secs for one in done.values()]
  assert judged.results['staleness'].seconds == sum(took) and min(took) > 0
  for (arm, _), (one, _) in done.items():
    measured = [x for x in one.numbers['outside'] if x is not None]
    assert len(measured) == 2  # of six rollouts each fifth
    old = one.numbers['ess'][3:]
    assert (np.mean(old) < 0.999) or arm.ahead == 0
  text = json.dumps(study.to_json(judged))
  assert 'plain_carried' in text
