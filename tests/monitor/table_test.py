"""Which metrics are shown, in which words, and which cannot move."""

import math

import pytest

from grpo_jax.monitor import table
from grpo_jax.run.build import about
from tests import runs

ROLLOUT = {
  'reward': 0.5,
  'accuracy': 0.5,
  'entropy': 0.81,
  'kl_old_k3': 0.0,
  'clipped_high': 0.0,
  'clipped_low': 0.0,
  'ratio_p01': 1.0,
  'ratio_p99': 1.0,
  'ess_token': 1.0,
  'loss': -5.8e-9,
  'grad_norm': 0.25,
  'staleness_steps': 0.0,
  'idle_steps': 0.0,
  'sample_tokens_per_sec': 1000.0,
  'sample_secs': 0.25,
  'step_secs': 1.0,
}
MOVES = {
  'KL from sampling policy',
  'clipped at high ratios',
  'clipped at low ratios',
  '1st percentile ratio',
  '99th percentile ratio',
  'effective sample size',
  'loss',
}


def labels(scalars, **changes):
  fixed = about.still(runs.arithmetic(**changes))
  groups = table.groups(scalars, fixed)
  return {row.label for rows in groups.values() for row in rows}


def test_one_update_hides_what_cannot_move():
  assert labels(ROLLOUT) == {
    'entropy', 'gradient norm', 'sampling', 'one rollout',
  }  # fmt: skip


@pytest.mark.parametrize(
  'changes',
  [
    {'learner.epochs': 2},
    {'learner.batches': 2},
    {'learner.anchor': 'sampler'},
    {'sampler.resample_rounds': 1},
  ],
)
def test_what_can_move_is_shown_even_where_it_has_not(changes):
  shown = labels(ROLLOUT, **changes)
  assert shown >= MOVES
  resamples = 'sampler.resample_rounds' in changes
  assert ('age of completions' in shown) == resamples


@pytest.mark.parametrize(
  'name, value, label',
  [
    ('kl_old_k3', 0.02, 'KL from sampling policy'),
    ('ratio_p99', 1.02, '99th percentile ratio'),
    ('ess_token', 0.98, 'effective sample size'),
    ('clipped_high', 1e-4, 'clipped at high ratios'),
    ('loss', 0.1, 'loss'),
    ('staleness_steps', 1.0, 'age of completions'),
    ('loss', math.nan, 'loss'),
    ('idle_steps', 3.0, 'updates without signal'),
    ('accuracy', 0.25, 'right answers'),
  ],
)
def test_what_moves_all_the_same_is_shown(name, value, label):
  assert label not in labels(ROLLOUT)
  assert label in labels({**ROLLOUT, name: value})


def test_every_label_fits_and_is_the_only_one_of_its_group():
  for rows in table.GROUPS.values():
    names = [row.label for row in rows.values()]
    assert max(map(len, names)) <= table.LABEL
    assert len(set(names)) == len(names)


def row_of(name, value):
  (rows,) = table.groups({name: value}, {}).values()
  (row,) = rows
  return row.value, row.unit


def test_every_number_has_its_unit():
  assert row_of('entropy', 0.8125) == ('0.812', 'nats per token')
  assert row_of('clipped_high', 0.0123) == ('1.2', '%')
  assert row_of('idle_steps', 3.0) == ('3', '')
  assert row_of('learn_tokens_per_sec', 75_100.0) == (
    '75.1k',
    'tokens per second',
  )


def test_several_rewards_are_shown_one_by_one():
  one = {**ROLLOUT, 'reward/exact_match': 0.5, 'reward/exact_match_std': 0.1}
  assert 'rewards' not in table.groups(one, {})
  several = {**one, 'reward/my.module:a_function_with_a_name': 0.25}
  rows = table.groups(several, {})['rewards']
  assert [row.label for row in rows] == [
    'exact_match', 'e:a_function_with_a_name'[-table.LABEL :],
  ]  # fmt: skip


def test_failures_of_a_reward_are_a_problem_and_no_reward():
  scalars = {
    'reward/exact_match': 0.5,
    'reward/exact_match_std': 0.1,
    'reward/exact_match_failed': 0.25,
    'reward/exact_match_secs_p50': 0.1,
    'reward/exact_match_secs_max': 9.0,
    'reward/my.module:a_long_name_of_a_judge': 0.5,
    'reward/my.module:a_long_name_of_a_judge_failed': 1.0,
    'reward/fine': 0.5,
    'reward/fine_failed': 0.0,
  }
  shown = table.groups(scalars, {})
  assert [row.label for row in shown['rewards']] == [
    'exact_match', ':a_long_name_of_a_judge', 'fine',
  ]  # fmt: skip
  problems = {row.label: (row.value, row.unit) for row in shown['problems']}
  assert problems == {
    'exact_match failed': ('25', '%'),
    'ong_name_of_a_judge failed'[-table.LABEL :]: ('100', '%'),
  }
  assert 'exact_match failed' not in labels({})  # the next rollout has its own


def test_tokens_per_second_are_of_sampling_and_learning_together():
  assert table.headline(ROLLOUT) == {
    'reward': 0.5,
    'tokens per second': 250.0,
  }
  assert table.headline({'heldout_accuracy': 0.75}) == {
    'reward': None,
    'held-out accuracy': 0.75,
    'tokens per second': None,
  }


def test_curves_go_by_rollout():
  history = {
    'reward': [(1, 0.5), (2, 0.75)],
    'heldout_accuracy': [(0, 0.25)],
    'heldout_graded': [],
    'sample_tokens_per_sec': [(1, 1000.0), (2, 500.0)],
    'sample_secs': [(1, 0.25), (2, 1.0)],
    'step_secs': [(1, 1.0), (2, 2.0)],
  }
  assert table.curves(lambda name: history[name]) == {
    'reward': [(1, 0.5), (2, 0.75)],
    'held-out accuracy': [(0, 0.25)],
    'tokens per second': [(1, 250.0), (2, 250.0)],
  }


def test_the_best_is_said_of_held_out_accuracy_alone():
  assert table.remark('held-out accuracy', 0.8125) == 'best 0.812'
  assert table.remark('held-out accuracy', None) == ''
  assert table.remark('reward', 0.8125) == ''


def test_only_what_is_measured_now_and_then_is_kept():
  before = {'overshoot': 0.25, 'entropy': 0.5}
  now = {'reward': 1.0, 'overshoot_carried': None}
  assert table.with_last(before, now) == {'overshoot': 0.25, 'reward': 1.0}
  assert table.with_last(before, {'overshoot': 0.5}) == {'overshoot': 0.5}
  assert table.with_last({'geometry_within': 1.0}, {}) == {
    'geometry_within': 1.0
  }
