"""The division by the deviation: runs that go on, and what they say."""

import copy
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from grpo_jax import optim
from grpo_jax.lab.studies import claims
from grpo_jax.lab.studies import normalization
from grpo_jax.lab.studies import sweeps
from grpo_jax.lab.studies.claims import FAILS
from grpo_jax.lab.studies.claims import HOLDS
from grpo_jax.lab.studies.claims import OPEN
from grpo_jax.lab.studies.papers.normalized_optimizer import Optimizer
from grpo_jax.run import bare
from tests import runs

Arm = normalization.Arm
PLAN = normalization.ARITHMETIC
# The optimizers for which the division leaves a fourth of the failures.
HELPED = 'SGD', 'AdamW-epsilon-0.01'


def outcome(arm, seed, steps=20):
  """A made-up run: the third rate is the best, and prompts differ by 0.3."""
  rates = PLAN.optimizers[arm.optimizer].rates
  failure = 0.4 + 0.1 * abs(rates.index(arm.lr) - 2) + 0.001 * seed
  if arm.optimizer in HELPED and arm.method == 'divided':
    failure /= 4 - 0.01 * seed
  return normalization.Outcome(
    arm, seed, steps, failure, 0.2, 0.3 + 0.01 * seed
  )


def verdicts_of(numbers):
  rows = claims.check(normalization.experiment(PLAN), numbers)
  return {row.name: row.verdict for row in rows}


MADE = [outcome(arm, seed) for seed in range(3) for arm in PLAN.arms]


def test_verdicts_follow_from_the_runs():
  numbers = normalization.numbers(PLAN, MADE)
  assert numbers['failure']['Adam']['plain'][2] == [0.4, 0.401, 0.402]
  found = claims.check(normalization.experiment(PLAN), numbers)
  measured = {row.name: row.measured for row in found}
  wanted = np.log2([4, 3.99, 3.98]).mean()
  assert measured['sgd'].mean == pytest.approx(wanted)
  assert measured['adam'] == (0, 0, 3, '')
  # Where both ways leave the same, the division lowers nothing.
  same = {one.lower() for one in PLAN.optimizers if one not in HELPED}
  assert verdicts_of(numbers) == {
    row.name: FAILS if row.name in same else HOLDS for row in found
  }


@pytest.mark.parametrize(
  'name, edit, wanted',
  [
    ('unequal', lambda n: n.update(spread=[0.1, 0.11, 0.12]), FAILS),
    (
      'sgd',
      lambda n: n['failure']['SGD'].update(plain=[[0.01] * 3] * 5),
      FAILS,
    ),
    ('adam', lambda n: n['failure'].pop('Adam'), OPEN),
    (
      'adam_same',
      lambda n: n['failure']['Adam'].update(plain=[[0.5] * 3] * 5),
      FAILS,
    ),
    (
      'inside',
      lambda n: n['failure']['AdamW'].update(
        plain=[[k] * 3 for k in range(1, 6)]
      ),
      FAILS,
    ),
  ],
)
def test_verdicts_turn_with_their_numbers(name, edit, wanted):
  numbers = copy.deepcopy(normalization.numbers(PLAN, MADE))
  edit(numbers)
  assert verdicts_of(numbers)[name] == wanted


def test_an_optimizer_of_which_an_arm_is_missing_has_no_verdict():
  some = [one for one in MADE if one.arm != PLAN.arms[0]]
  numbers = normalization.numbers(PLAN, some)
  assert 'SGD' not in numbers['failure'] and 'momentum' in numbers['failure']
  assert verdicts_of(numbers)['sgd'] == OPEN


def test_of_fewer_optimizers_nothing_is_claimed_of_the_others():
  asked = normalization.experiment(normalization.SMOLLM2).claims
  general = {'unequal', 'adam_same', 'inside'}
  assert {*asked} == {'sgd', 'adam', 'adam-epsilon-0.01', *general}
  assert 'momentum' in normalization.experiment(PLAN).claims


def test_every_arm_has_its_twin_and_its_loss():
  labels = [arm.label for arm in PLAN.arms]
  assert labels[:2] == ['SGD-0.005-divided', 'SGD-0.005-plain']
  assert len(set(labels)) == 50 and len(normalization.SMOLLM2.arms) == 24
  config = runs.small()
  divided, plain = (
    normalization.config_of(config, arm, 7).learner for arm in PLAN.arms[:2]
  )
  assert divided.method == 'grpo'
  assert plain.method.endswith(':grpo_without_std')
  assert divided.method_kwargs == plain.method_kwargs


def taken(optimizer, gradients, settings=None):
  """The parameters after some updates from [1, -2]."""
  params = jnp.array([1.0, -2.0])
  state = optimizer.init(params)
  if settings:
    state = normalization.Settings(*settings), *state[1:]
  update = jax.jit(optimizer.update)
  for gradient in gradients:
    step, state = update(gradient, state, params)
    params = optax.apply_updates(params, step)
  return params


@pytest.mark.parametrize('adaptive', [True, False])
def test_settings_in_the_state_act_as_settings_of_optax(adaptive):
  gradients = [jnp.array([0.5, -1.0]), jnp.array([0.1, 2.0])] * 3
  rate = optax.linear_schedule(0.1 / 3, 0.1, 2)
  own = optax.sgd(rate, momentum=0.9)
  if adaptive:
    own = optax.adamw(rate, 0.9, 0.99, eps=0.3, weight_decay=0.9)
  mine = normalization.adjustable(adaptive, lambda params: True)
  given = 0.1, 0.9, 0.3
  np.testing.assert_allclose(
    taken(mine, gradients, given), taken(own, gradients), rtol=1e-6
  )
  # A run that has skipped the first updates is past the rise.
  state = optim.set_schedules(mine.init(jnp.ones(2)), 2)
  later, _ = mine.update(
    jnp.ones(2), (normalization.Settings(*given), *state[1:]), jnp.zeros(2)
  )
  assert later.tolist() == pytest.approx([-0.1 / (1 + 0.3 * adaptive)] * 2)
  # As they are after `init`, settings move nothing.
  assert taken(mine, gradients[:1]).tolist() == [1, -2]


def test_a_study_may_be_shorter_than_the_rise_of_its_config(
  tmp_path, monkeypatch
):
  """Which is that of no run of it."""
  monkeypatch.setattr(bare.warm_up, 'run', lambda parts, *_: parts.config.optim)
  config = runs.small(steps=3, **{'optim.warmup_steps': 10})
  assert bare.warmed_up(config, tmp_path).warmup_steps == 0
  of_arm = normalization.config_of(config, PLAN.arms[0], 0)
  assert of_arm.optim.warmup_steps == 0


def test_runs_that_are_done_are_not_done_again(tmp_path, monkeypatch):
  """The frame of studies, with runs that are made up."""
  begun = []

  def train(config, arm, seed, params):
    begun.append((arm, seed, params))
    return outcome(arm, seed, config.steps)

  monkeypatch.setattr(
    sweeps.bare, 'warmed_up', lambda config, workdir: config.seed
  )
  arms = PLAN.arms[:3]
  made = sweeps.Sweep(
    'made', arms, Arm, normalization.Outcome, train, lambda one: ''
  )
  given = made, runs.small(), tmp_path
  found = sweeps.run(*given, seeds=2, steps=4)
  wanted = [outcome(arm, seed, 4) for seed in (0, 1) for arm in arms]
  assert [one.outcome for one in found] == wanted
  assert begun == [(arm, seed, seed) for seed in (0, 1) for arm in arms]
  lines = (tmp_path / 'made.jsonl').read_text().splitlines()
  assert json.loads(lines[1])['arm'] == {
    'optimizer': 'SGD', 'lr': 0.005, 'method': 'plain',
    'label': 'SGD-0.005-plain',
  }  # fmt: skip
  assert [json.loads(line)['secs'] for line in lines] == [
    one.secs for one in found
  ]
  old = json.loads(lines[0])
  del old['secs']  # as earlier code wrote it
  lines[0] = json.dumps(old)
  (tmp_path / 'made.jsonl').write_text('\n'.join(lines[:4]) + '\n')
  begun.clear()
  again = sweeps.run(*given, seeds=2, steps=4)
  assert [one.outcome for one in again] == wanted
  assert begun == [(arm, 1, 1) for arm in arms[1:]]
  assert [math.isnan(one.secs) for one in again] == [True] + [False] * 5
  only = sweeps.run(*given, seeds=1, steps=4, only=[arms[2].label])
  assert only == again[2:3] and len(begun) == 2


@pytest.mark.long
def test_a_study_trains_each_kind_of_optimizer(tmp_path, monkeypatch):
  plan = normalization.Plan(
    'small',
    'E0',
    'a small one',
    {
      'SGD': Optimizer(False, (0.0, 0.0), (0.0, 0.1)),
      'Adam': Optimizer(True, (0.0, 1e-8), (1e-3, 0.1)),
    },
  )
  made, real = [], normalization.build.updater
  monkeypatch.setattr(
    normalization.build,
    'updater',
    lambda *given: made.append(given) or real(*given),
  )
  config = runs.small(reward='tests.judges:even')
  study = normalization.study_of(plan)
  judged = sweeps.conduct(study, config, tmp_path, seeds=2, steps=3)
  (done,) = judged.results.values()
  assert len(made) == 4  # SGD or Adam, both ways, for all rates and seeds
  failure = done.numbers['failure']
  assert np.shape(failure['Adam']['plain']) == (2, 2)
  # At a rate of 0 both ways are the same; at others the arms differ.
  assert failure['SGD']['plain'][0] == failure['SGD']['divided'][0]
  assert failure['Adam']['plain'][0] != failure['Adam']['plain'][1]
  assert failure['SGD']['plain'][0] != failure['SGD']['plain'][1]
  assert (judged.folder / 'claims.html').exists()
  text = (tmp_path / 'small.jsonl').read_text()
  study.show(judged)
  again = sweeps.conduct(study, config, tmp_path, seeds=2, steps=3)
  assert again.results['small'].numbers == done.numbers
  assert (tmp_path / 'small.jsonl').read_text() == text
