"""Studies: sums done by hand, and a real run of two arms that goes on."""

import dataclasses
import functools
import inspect
import json
import math

import jax
import numpy as np
import pytest

from grpo_jax import losses
from grpo_jax.lab.studies import brakes
from grpo_jax.lab.studies import claims
from grpo_jax.lab.studies import sweeps
from grpo_jax.lab.studies.brakes import Arm
from grpo_jax.lab.studies.brakes import Outcome
from grpo_jax.losses import contrib
from grpo_jax.run import sampling
from tests import cli
from tests import runs

BASE, CALM = Arm(), Arm('none', 4, 1e-4)
PROJECT = Arm('project')
COOL = Arm('project', 8, 1e-4)


def outcome(arm, seed, reward, overshoot=1.0, kl=1.0, steps=30):
  others = dict.fromkeys(brakes.METRICS, 0.5)
  changed = {'reward': reward, 'overshoot': overshoot, 'kl_rollout': kl}
  return Outcome(arm, seed, steps, **{**others, **changed})


# Student's 0.975 quantile for one degree of freedom, in closed form.
T_1 = math.tan(0.475 * math.pi)
OUTCOMES = [
  outcome(BASE, 0, 0.5, 0.3, 0.2),
  outcome(BASE, 1, 0.7, 0.5, 0.2),
  outcome(BASE, 2, 0.9, 0.9, 0.2),  # a seed that the others have not
  outcome(PROJECT, 0, 0.6, 0.02, 0.04),
  outcome(PROJECT, 1, 0.72, 0.06, 0.06),
  outcome(CALM, 1, 0.6, kl=0.01),
  outcome(CALM, 0, 0.7, kl=0.01),
  outcome(COOL, 0, 0.68, -0.1, 0.3),
]


def test_arms_are_compared_with_the_base_seed_by_seed():
  base, project, calm, cool = brakes.summarise(OUTCOMES).rows
  assert [row.seeds for row in (base, project, calm, cool)] == [3, 2, 2, 1]
  assert base.gap is None and calm.gap is None  # no base of its own rate
  assert base.means['overshoot'].mean == pytest.approx(1.7 / 3)
  assert project.factors == pytest.approx(  # of seeds 0 and 1 alone
    {'overshoot': 10.0, 'overshoot_positive': 1.0, 'kl_rollout': 4.0}
  )
  assert project.gap == pytest.approx((0.06, T_1 * 0.04, 2))
  assert cool.factors == {}


def test_what_has_no_overshoot_left_has_no_factor():
  gone = outcome(PROJECT, 0, 0.6, -0.1)
  row = brakes.summarise([OUTCOMES[0], gone]).rows[1]
  assert row.factors['overshoot'] is None and row.factors['kl_rollout']


def test_brakes_meet_arms_without_one_by_kl_and_reward():
  summary = brakes.summarise(OUTCOMES)
  assert [row.arm for row in summary.best] == [COOL]  # two rates: project's
  matched = {(m.arm, m.by): (m.control, m.gap) for m in summary.matches}
  # 0.05 is nearer to 0.2 than to 0.01: by their ratio.
  assert matched[PROJECT, 'nearest KL'][0] == BASE
  control, gap = matched[PROJECT, 'no more KL']
  assert control == CALM
  assert gap == pytest.approx((0.01, T_1 * 0.11, 2))  # -0.1 and 0.12
  assert matched[COOL, 'nearest KL'][0] == BASE
  assert matched[COOL, 'no more KL'][0] == BASE  # 0.7 is above 0.65
  assert len(matched) == 4


def test_arms_are_named_by_what_is_not_as_in_the_base():
  labels = [arm.label for arm in brakes.ARMS]
  assert labels[:2] == ['none', 'reset'] and len(set(labels)) == 20
  assert {'none-mu4', 'none-mu4-lr0.0001', 'project-lr5e-05'} <= set(labels)


def test_every_brake_has_a_control_at_each_number_of_updates():
  arms = brakes.STUDIES['brakes_updates']
  assert len({arm.label for arm in arms}) == len(arms) == 70
  made = [outcome(arm, 0, 0.5, kl=arm.lr * arm.updates) for arm in arms]
  summary = brakes.summarise(made)
  assert len(summary.best) == 15  # of four rates each, or five
  nearest = {m.arm: m.control for m in summary.matches if m.by == 'nearest KL'}
  assert len(nearest) == 56  # all arms with a brake
  for arm in (Arm('project', 16, 5e-5), Arm('decay', 4, 2e-4)):
    assert nearest[arm].lr * nearest[arm].updates == arm.lr * arm.updates


@pytest.mark.parametrize('study', ['brakes_updates', 'brakes_smollm2'])
def test_a_brake_is_compared_at_its_own_number_of_updates(study):
  made = [
    outcome(arm, 0, reward=arm.updates / 100 + 0.5 * (arm.brake != 'none'))
    for arm in brakes.STUDIES[study]
  ]
  for row in brakes.summarise(made).rows:
    if row.arm.brake != 'none':
      assert row.gap is not None and row.gap[0] == pytest.approx(0.5)


def numbers(**gains):
  """Made-up runs; at its best rate a brake adds what is told of it."""
  made = []
  for arm in brakes.STUDIES['brakes_updates']:
    alike = {
      x.lr for x in brakes.STUDIES['brakes_updates'] if x.updates == arm.updates
    }
    rates = sorted(alike)
    for seed in range(3):
      reward = 0.7 + 0.001 * seed - 0.1 * (arm.lr != rates[1])
      gain = gains.get(arm.brake, 0.0) * (1 + 0.01 * seed)
      over = 0.001 if arm.brake == 'project' else 0.1 + 0.01 * seed
      # The nearest in KL is the twin, and not one of other updates.
      kl = arm.lr * arm.updates * (1 + arm.updates / 1000)
      one = outcome(arm, seed, reward + gain, over, kl)
      parts = {'overshoot_carried': over, 'overshoot_fresh': -0.01 * over}
      made.append(dataclasses.replace(one, **parts))
  return brakes.numbers(made)


def verdicts_of(found):
  made = claims.asked(brakes.experiment('brakes_updates'), found)
  return {row.name: row.verdict for row in claims.check(made, found)}


def test_verdicts_on_brakes_follow_from_the_runs():
  found = verdicts_of(numbers(decay=0.02, rollback=-0.02))
  assert len(found) == 5 + 24
  for kind in ('', '_kl'):
    for updates in (4, 8, 16):
      assert found[f'decay_{updates}{kind}'] == claims.HOLDS
      assert found[f'rollback_{updates}{kind}'] == claims.FAILS
  general = [found[name] for name in brakes.GENERAL]
  assert general == [claims.HOLDS] * 5


@pytest.mark.parametrize(
  'name, edit',
  [
    ('carried', lambda one: one.update(overshoot_carried=-0.1)),
    ('fresh', lambda one: one.update(overshoot_fresh=0.1)),
    ('project', lambda one: one.update(overshoot=0.1)),
    (
      'gain',
      lambda one: one.update(reward=1 - (one['arm']['brake'] == 'none')),
    ),
    ('inside', lambda one: one.update(reward=one['arm']['lr'])),
  ],
)
def test_verdicts_on_brakes_turn_with_the_runs(name, edit):
  found = numbers()
  for one in found['runs']:
    edit(one)
  assert verdicts_of(found)[name] == claims.FAILS


def test_no_brake_gains_only_if_none_may():
  """The largest mean is another one's than the widest interval."""
  found = numbers(decay=0.02)
  for one in found['runs']:
    if one['arm']['brake'] == 'narrow':
      one['reward'] += 0.1 * (one['seed'] - 1)
  made = brakes.measure(found)['gain']
  assert 'narrow' in made.example and made.mean < 0.01 < made.half
  assert verdicts_of(found)['gain'] == claims.OPEN


def test_what_was_not_run_or_has_one_seed_has_no_verdict():
  found = numbers(decay=0.02)
  runs_of = lambda kept: {'runs': [one for one in found['runs'] if kept(one)]}
  one_seed = verdicts_of(runs_of(lambda one: one['seed'] == 0))
  assert one_seed['decay_4'] == claims.OPEN
  some = verdicts_of(runs_of(lambda one: one['arm']['brake'] != 'decay'))
  assert 'decay_4' not in some and some['inside'] == claims.HOLDS
  no_base = verdicts_of(runs_of(lambda one: one['arm']['brake'] != 'none'))
  assert no_base['decay_4'] == no_base['decay_4_kl'] == claims.OPEN
  assert no_base['carried'] == no_base['gain'] == claims.OPEN


def test_each_brake_has_its_config():
  config = runs.small(steps=30)
  narrow = brakes.config_of(config, Arm('narrow', 4, 1e-4), 7)
  assert narrow.learner.method.endswith(':coasting_grpo')
  assert narrow.optim.brake == 'none' and narrow.optim.lr == 1e-4
  assert narrow.optim.warmup_steps == 20 and narrow.learner.epochs == 4
  assert narrow.seed == 7 and narrow.sampler.group == 8
  project = brakes.config_of(config, PROJECT, 7)
  assert project.optim.brake == 'project'
  assert project.learner.method == config.learner.method
  assert project.optim.overshoot_every_steps == 5
  short = brakes.config_of(runs.small(steps=6), PROJECT, 7)
  assert short.optim.warmup_steps == 2 * PROJECT.updates


@pytest.mark.parametrize('brake', ['narrow', 'rollback'])
@pytest.mark.parametrize(
  'kwargs', [{}, {'kl_coefficient': 0.1}, {'kl_coefficient': 0.0, 'high': 0.3}]
)
def test_a_brake_that_is_a_loss_is_the_method_with_another_clip(brake, kwargs):
  plain = with_method('grpo', kwargs)
  given = brakes.config_of(plain, Arm(brake), 0).learner
  _, _, name = given.method.partition(':')
  braked = arguments_of(getattr(contrib, name), given.method_kwargs)
  wanted = arguments_of(losses.methods.grpo, kwargs)
  common = ('low', 'high', 'kl_coefficient')
  assert [braked[one] for one in common] == [wanted[one] for one in common]


def with_method(name, kwargs):
  config = runs.small()
  learner = dataclasses.replace(
    config.learner, method=name, method_kwargs=kwargs
  )
  return dataclasses.replace(config, learner=learner)


def arguments_of(function, kwargs):
  bound = inspect.signature(function).bind(**kwargs)
  bound.apply_defaults()
  return bound.arguments


def test_brakes_of_another_method_are_refused(tmp_path):
  config = with_method('dapo', {})
  with pytest.raises(ValueError, match="give learner.method='grpo'"):
    sweeps.conduct(brakes.study('brakes'), config, tmp_path, 1, 2)
  assert not any(tmp_path.iterdir())


def test_means_are_over_the_rollouts_that_were_measured():
  records = [
    {'reward': 0.1, 'overshoot': 1.0},
    {'reward': 0.2, 'secs_per_update': 100.0},
    {'reward': 0.3, 'secs_per_update': 100.0},
    {'reward': 0.4, 'secs_per_update': 2.0},
    {'reward': 0.6, 'overshoot': 3.0},
    {'reward': 0.8, 'secs_per_update': 4.0},
  ]
  found = brakes._outcome(BASE, 0, records, None)
  assert found.steps == 6 and found.reward == pytest.approx(0.4)
  assert found.reward_last == pytest.approx(0.7)
  assert found.overshoot == 2 and found.secs_per_update == 3
  assert math.isnan(found.accuracy) and math.isnan(found.kl_rollout)
  shorter = brakes._outcome(BASE, 0, records[1:], 0.25)
  assert shorter.reward_last == pytest.approx(0.7)  # two of five
  assert shorter.accuracy == 0.25 and shorter.secs_per_update == 4


def test_what_a_person_sees(capsys, monkeypatch, tmp_path):
  monkeypatch.setenv('COLUMNS', '160')
  study = brakes.study('brakes')
  judged = sweeps.judge(study, OUTCOMES, tmp_path)
  study.show(judged)
  seen = capsys.readouterr().out
  assert '0.040±0.254 (x10.0)' in seen and '+0.010±1.398' in seen
  assert 'E3c: brakes on clipped tokens' in seen and 'claims.html' in seen
  page = (tmp_path / 'claims' / 'claims.html').read_text()
  assert 'no brake raises the mean reward by more than 0.05' in page
  cells = brakes.tables(brakes.summarise([outcome(BASE, 0, math.nan)]))
  assert cells['what is learned'][0]['reward'] == '-'
  answer = study.to_json(judged)
  assert json.loads(json.dumps(answer, allow_nan=False)) == answer
  assert answer['claims']['brakes']['claims'][0]['name'] == 'carried'


@pytest.mark.long
def test_a_study_runs_and_goes_on_where_it_was(tmp_path, monkeypatch, capsys):
  arms = (Arm('none', 2), Arm('rollback', 2))
  begun, versions, real, sampled = [], [], brakes.run_arm, sampling.sampled

  def run_arm(config, arm, seed, params):
    begun.append((arm, seed, jax.tree.map(np.array, params)))
    return real(config, arm, seed, params)

  def sample(*given):
    drawn = sampled(*given)
    versions.append(int(drawn[0].batch.version.max()))
    return drawn

  monkeypatch.setattr(brakes, 'run_arm', run_arm)
  monkeypatch.setattr(sampling, 'sampled', sample)
  config = runs.small(reward='tests.judges:even')
  study = brakes.study('brakes')
  study = study._replace(sweep=study.sweep._replace(arms=arms))
  conduct = functools.partial(sweeps.conduct, study, config, tmp_path, 1)
  first = conduct(2).summary
  assert versions == [0, 1, 0, 1]  # by the policy after the last updates
  assert '2/2  rollback-mu2  seed 0' in capsys.readouterr().err
  assert [row.arm for row in first.rows] == list(arms)
  assert all(row.means['kl_rollout'].mean > 0 for row in first.rows)
  assert 0 < first.rows[0].means['accuracy'].mean < 1
  file = tmp_path / 'brakes.jsonl'
  lines = file.read_text().splitlines()
  assert json.loads(lines[0])['arm']['label'] == 'none-mu2'
  assert json.loads(lines[1])['secs_per_update'] is None

  file.write_text(f'{lines[0]}\n')  # interrupted in the second run
  real = lambda config, arm, seed, params: outcome(
    arm, seed, 0.5, steps=config.steps
  )
  assert len(conduct(2).summary.rows) == 2
  assert [one[:2] for one in begun] == [(arms[0], 0), (arms[1], 0)] + [
    (arms[1], 0)
  ]
  for _, _, params in begun[1:]:
    jax.tree.map(np.testing.assert_array_equal, begun[0][2], params)
  seen = study.to_json(conduct(2, ['none-mu2']))
  wanted = brakes.summary_to_json(first)['arms'][:1]
  np.testing.assert_equal(seen['arms'], wanted)
  assert len(begun) == 3  # nothing was left to run
  conduct(1)
  assert len(begun) == 5  # another length is another run
  file.write_text(f'{lines[0]}\n{lines[1][:40]}')  # while it was written
  capsys.readouterr()
  assert len(conduct(2).summary.rows) == 2
  assert 'was cut off; its run is done again' in capsys.readouterr().err
  assert [json.loads(x)['seed'] for x in file.read_text().splitlines()] == [
    0,
    0,
  ]
  file.write_text(f'{lines[0]}\n{lines[1][:40]}\n')
  with pytest.raises(ValueError, match='Line 2 of .* is no outcome'):
    conduct(2)


@pytest.mark.parametrize(
  'given, said',
  [
    ({'only': ['none', 'brick']}, '--only has brick, .* none, reset,'),
    ({'seeds': 0}, '--seeds=0'),
    ({'steps': 0}, '--steps=0'),
  ],
)
def test_what_cannot_be_studied(given, said, tmp_path):
  place = runs.small(), tmp_path / 'none'
  with pytest.raises(ValueError, match=said):
    sweeps.conduct(
      brakes.study('brakes'), *place, **{'seeds': 3, 'steps': 30, **given}
    )
  assert not (tmp_path / 'none').exists()


def test_the_command_refuses_an_unknown_study(tmp_path):
  place = f'--workdir={tmp_path}/run'
  done = cli.call('study', 'dance', cli.SMALL, place)
  cli.assert_refused(done, "'dance' is no study; the studies are: brakes")
  assert not (tmp_path / 'run').exists()
  alone = cli.call('study', 'dance')
  cli.assert_refused(alone, "'dance' is no study; the studies are: brakes")
  missing = cli.call('study', cli.SMALL, place)
  cli.assert_refused(missing, 'needs a study. As in:')


@pytest.mark.parametrize(
  'given, vain',
  [
    (['curvature', '--out=x', '--seeds=7'], '--seeds, which it does not read'),
    (['all', '--out=x', cli.SMALL], '--config, which it does not read'),
    (['brakes', cli.SMALL, '--workdir=x', '--full'], '--full, which it'),
  ],
)
def test_a_study_refuses_what_only_others_read(given, vain):
  cli.assert_refused(cli.call('study', *given), vain)
