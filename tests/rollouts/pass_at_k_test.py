"""Estimates against enumeration, and intervals against theory."""

import collections
import itertools
import json
import math
import tracemalloc

import numpy as np
import pytest

from grpo_jax import losses
from grpo_jax.episodes.types import Account
from grpo_jax.episodes.types import Rollout
from grpo_jax.rollouts import pass_at_k


def rng(seed=0):
  return np.random.default_rng(seed)


def every_pattern(samples):
  return np.array(list(itertools.product([False, True], repeat=samples)))


@pytest.mark.parametrize('k', range(1, 7))
def test_pass_at_k_is_the_mean_over_all_subsets(k):
  right = every_pattern(6)
  subsets = list(itertools.combinations(range(6), k))
  want = np.mean([right[:, subset].any(1) for subset in subsets], axis=0)
  np.testing.assert_allclose(pass_at_k.pass_at_k(right, k), want, atol=1e-15)


def test_pass_at_k_is_stable_where_binomials_overflow():
  right = np.zeros((3, 5000), bool)
  right[1, 0], right[2, :4000] = True, True
  got = pass_at_k.pass_at_k(right, 2000)
  np.testing.assert_allclose(got, [0, 0.4, 1], atol=1e-12)
  few = pass_at_k.pass_at_k(right[:, :2000], 1)
  np.testing.assert_allclose(few, [0, 1 / 2000, 1], rtol=1e-12)


def vote(answers, right):
  """Right share of the most frequent answers, by counting."""
  counts = collections.Counter(answers)
  most = max(counts.values())
  winners = [answer for answer, count in counts.items() if count == most]
  return np.mean(
    [
      np.mean([r for a, r in zip(answers, right, strict=True) if a == winner])
      for winner in winners
    ]
  )


def polls(prompts, samples, seed=3):
  """Answers with ties among four texts; equal texts may differ in right."""
  draw = rng(seed)
  answers = draw.choice(['1', '2', '3', '4'], (prompts, samples))
  right = (answers == '1') ^ (draw.random(answers.shape) < 0.1)
  return answers.tolist(), right


@pytest.mark.parametrize('k', [1, 2, 4, 5, 7])
def test_majority_is_the_mean_over_all_subsets(k):
  answers, right = polls(20, 7)
  want = [
    np.mean(
      [
        vote([texts[i] for i in subset], correct[list(subset)])
        for subset in itertools.combinations(range(7), k)
      ]
    )
    for texts, correct in zip(answers, right, strict=True)
  ]
  got = pass_at_k.majority_at_k(answers, right, k, rng())
  np.testing.assert_allclose(got, want, atol=1e-12)


def test_majority_over_random_subsets_is_close_and_seeded():
  answers, right = polls(30, 10)
  exact = pass_at_k.majority_at_k(answers, right, 5, rng())  # 252 subsets
  drawn = pass_at_k.majority_at_k(answers, right, 5, rng(1), subsets=200)
  again = pass_at_k.majority_at_k(answers, right, 5, rng(1), subsets=200)
  np.testing.assert_array_equal(drawn, again)
  # The deviation of one subset is at most 0.5, of 200 at most 0.036.
  assert 0 < np.abs(drawn - exact).max() < 0.15
  assert abs(np.mean(drawn - exact)) < 0.02


def test_a_tie_is_shared_and_spaces_do_not_count():
  right = np.array([[True, False, False, True]])
  assert pass_at_k.majority_at_k([['a', 'b', 'b', 'a']], right, 4, rng()) == 0.5
  spaced = [['a ', 'b', 'c', '\ta\n']]
  assert pass_at_k.majority_at_k(spaced, right, 4, rng()) == 1
  apart = [['a', 'b', 'c', 'A']]
  assert pass_at_k.majority_at_k(apart, right, 4, rng()) == 0.5


def test_k_1_is_the_accuracy_of_both():
  answers, right = polls(30, 9)
  np.testing.assert_allclose(pass_at_k.pass_at_k(right, 1), right.mean(1))
  np.testing.assert_allclose(
    pass_at_k.majority_at_k(answers, right, 1, rng()), right.mean(1)
  )


@pytest.mark.parametrize('k', [0, -1, 5])
def test_a_k_that_was_not_drawn_is_refused(k):
  right = np.ones((2, 4), bool)
  with pytest.raises(ValueError, match=f'k={k} with 4 samples per prompt; giv'):
    pass_at_k.pass_at_k(right, k)
  with pytest.raises(ValueError, match=f'k={k} with 4 samples'):
    pass_at_k.majority_at_k([['a'] * 4] * 2, right, k, rng())
  with pytest.raises(ValueError, match=f'k={k} with 4 samples'):
    pass_at_k.summarize(made(), [1, k], 1.0, 0)


def test_the_interval_is_that_of_the_central_limit():
  values = rng(1).normal(3, 2, 400)
  error = values.std() / math.sqrt(400)
  for confidence, deviations in ((0.95, 1.960), (0.5, 0.674)):
    low, high = pass_at_k.bootstrap_interval(values, rng(), confidence)
    want = values.mean() + error * deviations * np.array([-1, 1])
    np.testing.assert_allclose([low, high], want, atol=0.05 * error)


def test_the_interval_covers_what_it_should():
  draw, covered = rng(2), 0
  for _ in range(400):
    values = (draw.random(60) < 0.3).astype(float)
    low, high = pass_at_k.bootstrap_interval(values, draw, 0.9, resamples=400)
    covered += low <= 0.3 <= high
  assert 0.86 < covered / 400 < 0.94


def test_the_interval_of_two_values_is_in_closed_form():
  """A resample of 0 and 1 has the mean 0, 1/2 or 1: 1/4, 1/2, 1/4."""
  ends = [
    pass_at_k.bootstrap_interval(np.array([0.0, 1.0]), rng(seed), confidence)
    for seed in range(3)
    for confidence in (0.95, 0.4)
  ]
  assert ends == [(0, 1), (0.5, 0.5)] * 3


def test_few_values_have_an_interval_or_say_why_not():
  assert pass_at_k.bootstrap_interval(np.array([0.25]), rng()) == (0.25, 0.25)
  assert pass_at_k.bootstrap_interval(np.zeros(7), rng()) == (0, 0)
  with pytest.raises(ValueError, match='no values'):
    pass_at_k.bootstrap_interval(np.zeros(0), rng())


def test_chunks_bound_the_memory_of_a_bootstrap_and_change_nothing(monkeypatch):
  values = rng(4).random(5000)
  pass_at_k.bootstrap_interval(values, rng(), resamples=2)  # imports scipy

  def measured():
    tracemalloc.start()
    ends = pass_at_k.bootstrap_interval(values, rng(), resamples=2000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return ends, peak

  whole, at_once = measured()
  monkeypatch.setattr(pass_at_k, '_CHUNK', 20 * len(values))
  parts, bounded = measured()
  np.testing.assert_allclose(parts, whole, rtol=1e-12)
  # 838 resamples of 5000 places, 8 bytes each: 34 MB, and SciPy holds three.
  assert 30e6 < at_once < 150e6
  assert bounded < 4e6


REWARD = np.array([[1, 1, 0, 0], [0, 1, 0.5, 0], [1, 0, 0, 0]], np.float32)
LENGTH = np.array([[1, 2, 3, 4], [5, 6, 7, 8], [9, 9, 9, 9]], np.int32)
TEXTS = [['3', '3', '4', '5'], ['6', '9', '6', '7'], ['8', '1', '2', '0']]


def made(valid=None):
  """Three prompts with four completions each."""
  mask = np.arange(9) < LENGTH[:, :, None]
  batch = losses.Batch(
    tokens=mask.astype(np.int32),
    mask=mask,
    keep=mask,
    valid=np.ones(LENGTH.shape, bool) if valid is None else valid,
    reward=-REWARD,
    reward_parts=np.stack([REWARD, -REWARD], -1),
    truncated=LENGTH == 9,
    version=np.zeros(mask.shape, np.int32),
  )
  return Rollout(
    batch, LENGTH, [[1]] * 3, ['p'] * 3, TEXTS, np.arange(3), ('a', 'b')
  )


def test_a_summary_of_a_rollout():
  got = pass_at_k.summarize(made(), [1, 2, 4], 1.0, seed=0)
  json.dumps(got, allow_nan=False)  # plain numbers
  assert (got['examples'], got['samples_per_prompt']) == (3, 4)
  np.testing.assert_allclose(got['mean'], 4.5 / 12)
  np.testing.assert_allclose(got['accuracy'], 4 / 12)
  np.testing.assert_allclose(got['pass@1'], 4 / 12)
  np.testing.assert_allclose(got['pass@2'], (5 / 6 + 1 / 2 + 1 / 2) / 3)
  assert got['pass@4'] == 1
  np.testing.assert_allclose(got['majority@4'], (1 + 0 + 1 / 4) / 3)
  assert got['length_tokens_mean'] == 6 and got['length_tokens_max'] == 9
  assert got['length_tokens_median'] == 6.5
  assert got['length_tokens_p95'] == 9
  assert got['length_tokens_right'] == (1 + 2 + 6 + 9) / 4
  assert got['length_tokens_wrong'] == (3 + 4 + 5 + 7 + 8 + 9 * 3) / 8
  np.testing.assert_allclose(got['truncated'], 4 / 12)
  assert got['not_judged'] == 0
  assert not [name for name in got if 'left_out' in name]
  for name in ('mean', 'accuracy', 'pass@2', 'majority@2'):
    low, high = got[f'{name}_interval']
    assert low < got[name] < high
  assert got['accuracy_interval'] == [0.25, 0.5]
  assert got == pass_at_k.summarize(made(), [1, 2, 4], 1.0, seed=0)
  lenient = pass_at_k.summarize(made(), [1], 0.5, seed=0)
  np.testing.assert_allclose(lenient['accuracy'], 5 / 12)


def test_episodes_that_have_failed_are_left_out_and_the_last_word_counts():
  accounts = [[Account(last_text=text) for text in row] for row in TEXTS]
  whole = made()._replace(texts=[['all of it'] * 4] * 3, accounts=accounts)
  wanted = pass_at_k.summarize(made(), [1, 4], 1.0, seed=0)
  assert pass_at_k.summarize(whole, [1, 4], 1.0, seed=0) == wanted
  accounts[1] = [one._replace(failure='away') for one in accounts[1]]
  # As 'environment' says it, where it is a reward.
  failures = np.full((3, 4, 2), '', object)
  failures[1, :, 0] = 'away'
  spoilt = whole._replace(failures=failures)
  got = pass_at_k.summarize(spoilt, [1, 4], 1.0, seed=0)
  right = (REWARD >= 1)[[0, 2]]
  np.testing.assert_allclose(got['accuracy'], right.mean())
  assert got['prompts_left_out@1'] == 1


@pytest.mark.parametrize('by', ['valid', 'reward_parts'])
def test_what_was_not_judged_is_left_out(by):
  valid = np.array([[0, 1, 1, 1], [0, 0, 0, 0], [1, 1, 0, 0]], bool)
  if by == 'valid':
    spoilt = made(valid)
    spoilt.batch.reward_parts[~valid] = (np.nan, np.nan)
    spoilt.batch.reward_parts[0, 0] = 5
  else:  # another reward has judged them
    spoilt = made()
    spoilt.batch.reward_parts[~valid, 0] = np.nan
  got = pass_at_k.summarize(spoilt, [1, 2, 3, 4], 1.0, seed=0)
  np.testing.assert_allclose(got['accuracy'], (1 / 3 + 1 / 2) / 2)
  np.testing.assert_allclose(got['mean'], (1 / 3 + 1 / 2) / 2)
  np.testing.assert_allclose(got['pass@2'], (2 / 3 + 1) / 2)
  np.testing.assert_allclose(got['majority@3'], 1 / 3)
  left = [got[f'prompts_left_out@{k}'] for k in (1, 2, 3, 4)]
  assert left == [1, 1, 2, 3]
  assert got['pass@4'] is None and got['majority@4_interval'] is None
  assert got['not_judged'] == 7
  assert got['length_tokens_right'] == (2 + 9) / 2
  assert got['length_tokens_wrong'] == (3 + 4 + 9) / 3
  json.dumps(got, allow_nan=False)


def test_a_seed_fixes_what_is_drawn():
  wide = made()._replace(texts=[texts * 4 for texts in TEXTS])
  fields = ('mask', 'valid', 'truncated', 'reward_parts')
  wide = wide._replace(
    length=np.tile(LENGTH, 4),
    batch=wide.batch._replace(
      **{
        name: np.concatenate([getattr(wide.batch, name)] * 4, axis=1)
        for name in fields
      }
    ),
  )
  one, again, other = (
    pass_at_k.summarize(wide, [6], 1.0, seed) for seed in (0, 0, 1)
  )
  assert one == again
  assert one['majority@6'] != other['majority@6']  # 8008 subsets
  assert one['pass@6'] == other['pass@6']


def test_an_answer_on_which_a_reward_failed_is_wrong():
  """Unless only another reward has failed; nothing is left out silently."""
  valid = np.ones(LENGTH.shape, bool)
  failures = np.full((*LENGTH.shape, 2), '', object)
  # Right ones: the first reward fails, gets 1 for it, or the second fails.
  failures[0, 0, 0], valid[0, 0] = 'time limit', False
  failures[0, 1, 0] = 'memory'
  failures[1, 1, 1], valid[1, 1] = 'exit 1', False
  valid[2, 0] = False  # not judged, which is no failure
  got = pass_at_k.summarize(
    made(valid)._replace(failures=failures), [1], 1.0, seed=0
  )
  assert got['failed'] == 3 and got['not_judged'] == 1
  np.testing.assert_allclose(got['accuracy'], (0 / 4 + 1 / 4 + 0 / 3) / 3)
  np.testing.assert_allclose(got['pass@1'], got['accuracy'])
  np.testing.assert_allclose(got['mean'], (0 / 4 + 1.5 / 4 + 0 / 3) / 3)
  lenient = pass_at_k.summarize(
    made(valid)._replace(failures=failures), [1], 0.0, seed=0
  )  # under which all others are right
  np.testing.assert_allclose(lenient['accuracy'], (2 / 4 + 4 / 4 + 3 / 3) / 3)


def test_a_failure_has_no_part_in_the_mean():
  failures = np.full((*LENGTH.shape, 2), '', object)
  failures[1, 0, 0] = failures[1, 3, 0] = 'late'
  rollout = made()._replace(failures=failures)
  got = pass_at_k.summarize(rollout, [1], 1.0, seed=0)
  np.testing.assert_allclose(got['mean'], (2 / 4 + 1.5 / 2 + 1 / 4) / 3)
  np.testing.assert_allclose(got['accuracy'], (2 / 4 + 1 / 4 + 1 / 4) / 3)
  failures[...] = 'late'
  got = pass_at_k.summarize(rollout, [1], 1.0, seed=0)
  assert (got['mean'], got['accuracy'], got['failed']) == (None, 0, 12)
