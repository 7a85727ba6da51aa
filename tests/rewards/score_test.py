"""Tests of score: sums, judged, async and batched functions."""

import asyncio
import threading

import numpy as np
import pytest

from grpo_jax import rewards
from tests.rewards import cases


@pytest.mark.parametrize('function', cases.KINDS)
def test_every_kind_of_function_gives_the_same(function):
  scores = cases.score_rows(function)
  np.testing.assert_array_equal(scores.reward, [0, 1, 2])
  np.testing.assert_array_equal(scores.parts, [[0], [1], [2]])
  assert scores.judged.all()
  f32 = np.float32
  assert [array.dtype for array in scores] == [f32, f32, bool, object, f32]
  assert [array.shape for array in scores] == [(3,), (3, 1), (3,)] + [
    (3, 1)
  ] * 2


def test_reward_is_the_weighted_sum_and_parts_are_not_weighted():
  scores = cases.score_rows(
    rewards.WeightedReward('a', cases.value, 2.0),
    rewards.WeightedReward('b', cases.async_value, -0.5),
    rewards.WeightedReward('c', cases.batched_value, 0.0),
  )
  np.testing.assert_array_equal(scores.reward, [0, 1.5, 3])
  np.testing.assert_array_equal(scores.parts, [[0] * 3, [1] * 3, [2] * 3])


def test_a_function_that_empties_its_lists_changes_nothing():
  @rewards.batched
  def empties(*columns):
    values = cases.batched_value(*columns)
    for column in columns:
      column.clear()
    return values

  scores = cases.score_rows(empties, cases.batched_value)
  np.testing.assert_array_equal(scores.parts, [[0] * 2, [1] * 2, [2] * 2])


def test_the_sum_is_computed_in_float64_and_rounded_once():
  parts = [1e8, 1.0, -1e8]  # in float32 the 1 is lost
  terms = [lambda *_, part=part: part for part in parts]
  np.testing.assert_array_equal(cases.score_rows(*terms).reward, [1, 1, 1])
  scores = cases.score_rows(  # in float32 the sum is 0.34375
    rewards.WeightedReward('a', lambda *_: 1 / 3, 1e6),
    rewards.WeightedReward('b', lambda *_: 333333, -1.0),
  )
  np.testing.assert_allclose(scores.reward, [1 / 3] * 3, rtol=1e-6)


def test_an_outcome_says_why_a_function_has_failed():
  def judge(prompt, completion, example):
    outcome = rewards.Outcome(float(completion), secs=0.5)
    # What a failure has as its reward is not read.
    return (
      outcome._replace(reward='?', failure='late')
      if completion == '1'
      else outcome
    )

  for failed, parts in ((None, [0, np.nan, 2]), (-1.0, [0, -1, 2])):
    scores = cases.score_rows(
      rewards.WeightedReward('judge', judge, failed=failed)
    )
    np.testing.assert_array_equal(scores.parts[:, 0], parts)
    np.testing.assert_array_equal(scores.failures[:, 0], ['', 'late', ''])
    np.testing.assert_array_equal(
      scores.judged, [True, failed is not None, True]
    )
    np.testing.assert_array_equal(scores.secs[:, 0], [0.5] * 3)
  with pytest.raises(rewards.RewardError, match='returned nan'):
    cases.score_rows(lambda *_: rewards.Outcome(float('nan')))


@pytest.mark.parametrize('kind', ['plain', 'async', 'batched'])
def test_none_has_no_part_in_the_sum(kind):
  def plain(prompt, completion, example):
    return None if completion == '1' else 5.0

  async def asynchronous(*row):
    return plain(*row)

  @rewards.batched
  def in_batch(*columns):
    return [plain(*row) for row in zip(*columns, strict=True)]

  function = {'plain': plain, 'async': asynchronous, 'batched': in_batch}[kind]
  scores = cases.score_rows(cases.value, function, cases.value)
  parts = [[0, 5, 0], [1, np.nan, 1], [2, 5, 2]]
  np.testing.assert_array_equal(scores.parts, parts)
  np.testing.assert_array_equal(scores.judged, [True] * 3)
  np.testing.assert_array_equal(scores.reward, [5, 2, 9])
  # Alone, or required, it leaves the completion without a reward.
  required = rewards.WeightedReward('required', function, required=True)
  for functions in ([function], [cases.value, required]):
    scores = cases.score_rows(*functions)
    np.testing.assert_array_equal(scores.judged, [True, False, True])
    assert scores.reward[1] == 0


def test_a_reward_of_weight_0_alone_judges_nothing():
  """Else what could not be judged would be trained as worth 0."""

  def some(prompt, completion, example):
    return None if completion == '1' else 5.0

  measured = rewards.WeightedReward('measured', cases.value, weight=0.0)
  scores = cases.score_rows(some, measured)
  np.testing.assert_array_equal(scores.judged, [True, False, True])
  np.testing.assert_array_equal(scores.reward, [5, 0, 5])
  np.testing.assert_array_equal(scores.parts[:, 1], [0, 1, 2])
  # Where nothing is trained on, as in an evaluation, it is what there is.
  assert cases.score_rows(measured).judged.all()


def test_what_fails_leaves_a_completion_unjudged_whoever_else_judges():
  def late(prompt, completion, example):
    return rewards.Outcome(None, 'late' if completion == '1' else '')

  scores = cases.score_rows(cases.value, late)
  np.testing.assert_array_equal(scores.judged, [True, False, True])
  np.testing.assert_array_equal(scores.reward, [0, 0, 2])


def test_tasks_of_several_kinds_have_a_reward_each():
  """Half of the completions are of either; none is lost."""

  def of_kind(rest, value):
    def judge(prompt, completion, example):
      return value if int(completion) % 2 == rest else None

    return judge

  scores = cases.score_rows(of_kind(0, 1.0), of_kind(1, 3.0), size=4)
  np.testing.assert_array_equal(scores.judged, [True] * 4)
  np.testing.assert_array_equal(scores.reward, [1, 3, 1, 3])


@pytest.mark.parametrize(
  'number', [True, 1, 1.0, np.float32(1), np.int64(1), np.True_, np.array(1.0)]
)
def test_numbers_of_any_kind_are_accepted(number):
  assert cases.score_rows(lambda *_: number).reward[0] == 1


class Gauge:
  """An async reward that records how many of its calls run at once."""

  def __init__(self):
    self.running = self.most = 0

  async def __call__(self, prompt, completion, example):
    self.running += 1
    self.most = max(self.most, self.running)
    # Later completions end first, so that order is not arrival order.
    for _ in range(20 - int(completion)):
      await asyncio.sleep(0)
    self.running -= 1
    return float(completion)


@pytest.mark.parametrize('limit, most', [(1, 1), (3, 3), (64, 10)])
def test_async_calls_run_together_up_to_the_limit_in_order(limit, most):
  gauge = Gauge()
  scores = cases.score_rows(gauge, size=10, max_concurrency=limit)
  assert gauge.most == most
  np.testing.assert_array_equal(scores.reward, np.arange(10))


def test_the_limit_counts_calls_of_all_functions_together():
  gauge = Gauge()
  cases.score_rows(gauge, lambda *row: gauge(*row), size=10, max_concurrency=15)
  assert gauge.most == 15


def test_score_works_inside_a_running_event_loop():
  async def caller():
    return cases.score_rows(cases.async_value, cases.value)

  np.testing.assert_array_equal(asyncio.run(caller()).reward, [0, 2, 4])


@pytest.mark.parametrize('is_async', [False, True])
def test_nothing_is_called_once_a_check_has_raised(is_async):
  calls = []

  def plain(prompt, completion, example):
    calls.append(completion)
    return 1.0

  async def later(prompt, completion, example):
    return plain(prompt, completion, example)

  def check():
    if len(calls) == 2:
      raise KeyError

  term = rewards.WeightedReward('term', later if is_async else plain)
  with rewards.Scoring([term], None, 1) as scoring:
    rows = [scoring.add('', completion, {}) for completion in 'abcdef']
    with pytest.raises(KeyError):
      scoring.scores(rows, check)
  assert calls == ['a', 'b']


def test_functions_run_in_the_calling_thread():
  threads = set()

  def remember(*_):
    threads.add(threading.current_thread())
    return 0.0

  async def async_remember(*row):
    return remember(*row)

  async def caller():
    cases.score_rows(remember, cases.async_value)

  asyncio.run(caller())
  cases.score_rows(remember, async_remember)
  assert threads == {threading.current_thread()}


@pytest.mark.parametrize('function', cases.KINDS)
def test_no_completions_give_empty_scores(function):
  scores = cases.score_rows(function, function, size=0)
  assert [array.shape for array in scores] == [(0,), (0, 2), (0,)] + [
    (0, 2)
  ] * 2


def test_a_batched_function_is_not_called_on_nothing():
  @rewards.batched
  def unwilling(prompts, completions, examples):
    raise AssertionError

  assert cases.score_rows(unwilling, size=0).reward.shape == (0,)
