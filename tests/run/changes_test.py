"""A run that goes on with other values of its config."""

import json
import pathlib

import jax.numpy as jnp
import pytest

import grpo_jax
from grpo_jax import optim
from grpo_jax.run import loop
from grpo_jax.run.keep import records
from grpo_jax.run.keep import workdir
from tests import cli
from tests import runs

SMALL = {
  'steps': 3,
  'reward': 'tests.judges:even',
  'data.heldout': '',
  'evaluation.every_steps': 1,
  'optim.warmup_steps': 0,
  'learner.batches': 2,
  'log.completions_every_steps': 0,
}
BEFORE, AFTER = 1e-3, 1e-2


def small(**changes):
  return runs.small(**{**SMALL, 'optim.lr': BEFORE, **changes})


def changes_in(folder):
  starts = json.loads((pathlib.Path(folder) / 'versions.json').read_text())
  return [(start['after_step'], start.get('changed')) for start in starts]


def test_the_record_of_a_start_has_what_it_changes(tmp_path):
  workdir.record(tmp_path, small(), anew=True, after_step=0)
  changed = small(**{'optim.lr': AFTER, 'log.samples': 5})
  workdir.refuse_another(tmp_path, changed, allowed=('optim.lr',))
  difference = {'optim.lr': [BEFORE, AFTER], 'log.samples': [3, 5]}
  for _ in range(2):  # the second start changes nothing
    workdir.refuse_another(tmp_path, changed, allowed=('optim.lr',))
    workdir.record(tmp_path, changed, anew=False, after_step=2)
    workdir.refuse_another(tmp_path, changed)
  assert changes_in(tmp_path) == [(0, None), (2, difference), (2, None)]
  with pytest.raises(ValueError, match='has config.optim.lr=0.01, and now it'):
    workdir.refuse_another(tmp_path, small())


@pytest.mark.long
def test_a_change_is_refused_or_shown_and_then_stays(tmp_path, capsys):
  """Starts without a rollout to do."""
  loop.train(small(steps=0), tmp_path)
  changed = small(steps=0, **{'optim.lr': AFTER, 'log.samples': 5})
  with pytest.raises(ValueError) as caught:
    loop.train(changed, tmp_path)
  assert str(caught.value) == (
    f'The run in {tmp_path} has config.optim.lr=0.001, and now it is 0.01; '
    'give the same, or another workdir, or go on with the new value by '
    '--allow_changed=optim.lr.'
  )
  capsys.readouterr()
  grpo_jax.train(changed, tmp_path, allow_changed=['optim.lr'])
  told = 'changed   config.optim.lr from 0.001 to 0.01, after rollout 0'
  assert told in capsys.readouterr().err
  loop.train(changed, tmp_path)  # the record has the new value
  assert records.saved_config(tmp_path) == changed
  assert len(changes_in(tmp_path)) == 3


@pytest.mark.long
def test_a_changed_learning_rate_is_that_of_the_same_run_by_hand(
  tmp_path, monkeypatch
):
  """A run in one piece, whose rate is another after its second update."""
  parts, changed = tmp_path / 'parts', {'optim.lr': AFTER}
  loop.train(small(steps=1), parts)
  allowed = ('optim.lr',)
  loop.train(small(steps=2, **changed), parts, allowed=allowed)
  loop.train(small(**changed), parts)
  assert changes_in(parts) == [
    (0, None),
    (1, {'steps': [1, 2], 'optim.lr': [BEFORE, AFTER]}),
    (2, {'steps': [2, 3]}),
  ]
  real = optim.learning_rate

  def by_hand(peak, *args, **kwargs):
    before, after = (real(x, *args, **kwargs) for x in (peak, AFTER))
    return lambda count: jnp.where(count < 2, before(count), after(count))

  monkeypatch.setattr(optim, 'learning_rate', by_hand)
  loop.train(small(), tmp_path / 'whole')
  runs.assert_equal(tmp_path / 'whole', parts)
  rates = [line.get('learning_rate') for line in runs.records(parts)[1:]]
  assert rates == pytest.approx([BEFORE, AFTER, AFTER], rel=1e-6)


@pytest.mark.parametrize(
  'changes, allowed, words',
  [
    ({'seed': 1}, ('optim.lr',), 'config.seed=0, and now it is 1; give the'),
    ({'optim.b1': 0.5}, (), 'b1=0.9, .*; give the same, or another workdir.'),
    ({'optim.decay': 'linear'}, (), 'by --allow_changed=optim.decay'),
    ({'evaluation.right_reward': 0.5}, ('optim.lr',), 'right_reward=1.0'),
    ({'optim.lr': 1e-4, 'optim.b1': 0.5}, ('optim.lr',), 'optim.b1=0.9'),
  ],
)
def test_what_the_flag_does_not_name_is_refused(
  changes, allowed, words, tmp_path
):
  workdir.record(tmp_path, small(), anew=True)
  with pytest.raises(ValueError, match=words):
    workdir.refuse_another(tmp_path, small(**changes), allowed=allowed)


def test_the_weight_of_a_reward_may_change_and_no_more_of_it(tmp_path):
  reward = {'name': 'tests.judges:even', 'where': 'here'}
  rewards = {'rewards': (reward, {**reward, 'name': 'exact_match'})}
  heavier = {'rewards': (reward, {**rewards['rewards'][1], 'weight': 2.0})}
  other = {'rewards': ({**reward, 'where': 'workers'}, heavier['rewards'][1])}

  def config(changes):
    return runs.arithmetic(**{**runs.SMALL, **changes})

  workdir.record(tmp_path, config(rewards), anew=True)
  words = r'rewards\[1\].weight=1.0, and now it is 2.0; .*=rewards.weight\.'
  with pytest.raises(ValueError, match=words):
    workdir.refuse_another(tmp_path, config(heavier))
  allowed = ('rewards.weight',)
  workdir.refuse_another(tmp_path, config(heavier), allowed=allowed)
  with pytest.raises(ValueError, match=r'rewards\[0\].where=.here'):
    workdir.refuse_another(tmp_path, config(other), allowed=allowed)
  fewer = {'rewards': (reward,)}
  with pytest.raises(ValueError, match='has config.rewards=.*another workdir.'):
    workdir.refuse_another(tmp_path, config(fewer), allowed=allowed)


def test_steps_of_a_decay_change_with_the_flag(tmp_path):
  decays = {'optim.decay': 'linear'}
  workdir.record(tmp_path, small(**decays), anew=True)
  more = small(**decays, steps=6)
  with pytest.raises(ValueError, match='by --allow_changed=steps.$'):
    workdir.refuse_another(tmp_path, more)
  workdir.refuse_another(tmp_path, more, allowed=('steps',))


def test_a_fixed_field_is_refused_with_the_flag_before_anything_begins(
  tmp_path,
):
  with pytest.raises(ValueError, match="names 'seed', which stays as it is"):
    grpo_jax.train(small(), tmp_path / 'run', allow_changed='optim.lr,seed')
  assert not (tmp_path / 'run').exists()
  done = cli.call(
    'train', f'--workdir={tmp_path}/run', cli.CONFIG,
    '--allow_changed=optim.lr,seed',
  )  # fmt: skip
  assert done.returncode == 2
  assert "--allow_changed names 'seed', which stays" in done.stderr
