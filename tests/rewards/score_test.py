"""Tests of score: sums, judged, async, batched, errors."""

import asyncio
import functools
import threading

import numpy as np
import pytest

from grpo_jax import rewards


def _score(*terms, size=3, **options):
  """Scores completions '0', '1', ... of functions or WeightedRewards."""
  terms = [
    term
    if isinstance(term, rewards.WeightedReward)
    else rewards.WeightedReward(f'term_{i}', term)
    for i, term in enumerate(terms)
  ]
  rows = range(size)
  return rewards.score(
    terms,
    [f'prompt {i}' for i in rows],
    [str(i) for i in rows],
    [{'index': 100 + i} for i in rows],
    **options,
  )


def value(prompt, completion, example):
  assert prompt == f'prompt {completion}'
  assert example['index'] == 100 + int(completion)
  return float(completion)


async def async_value(prompt, completion, example):
  await asyncio.sleep(0)
  return value(prompt, completion, example)


@rewards.batched
def batched_value(prompts, completions, examples):
  return [
    value(*row) for row in zip(prompts, completions, examples, strict=True)
  ]


@rewards.batched
async def async_batched_value(prompts, completions, examples):
  await asyncio.sleep(0)
  return np.asarray(batched_value(prompts, completions, examples))


class CallableReward:
  async def __call__(self, prompt, completion, example):
    return await async_value(prompt, completion, example)


KINDS = [
  value,
  async_value,
  batched_value,
  async_batched_value,
  CallableReward(),
  functools.partial(async_value),
  lambda *arguments: async_value(*arguments),
]


@pytest.mark.parametrize('function', KINDS)
def test_every_kind_of_function_gives_the_same(function):
  scores = _score(function)
  np.testing.assert_array_equal(scores.reward, [0, 1, 2])
  np.testing.assert_array_equal(scores.parts, [[0], [1], [2]])
  assert scores.judged.all()
  assert [array.dtype for array in scores] == [np.float32, np.float32, bool]
  assert [array.shape for array in scores] == [(3,), (3, 1), (3,)]


def test_reward_is_the_weighted_sum_and_parts_are_not_weighted():
  scores = _score(
    rewards.WeightedReward('a', value, 2.0),
    rewards.WeightedReward('b', async_value, -0.5),
    rewards.WeightedReward('c', batched_value, 0.0),
  )
  np.testing.assert_array_equal(scores.reward, [0, 1.5, 3])
  np.testing.assert_array_equal(scores.parts, [[0] * 3, [1] * 3, [2] * 3])


def test_the_sum_is_computed_in_float64_and_rounded_once():
  parts = [1e8, 1.0, -1e8]  # in float32 the 1 is lost
  terms = [lambda *_, part=part: part for part in parts]
  np.testing.assert_array_equal(_score(*terms).reward, [1, 1, 1])
  tenth = _score(*[lambda *_: 0.1] * 3)
  np.testing.assert_array_equal(tenth.reward, np.float32(0.1 + 0.1 + 0.1))


@pytest.mark.parametrize('kind', ['plain', 'async', 'batched'])
def test_none_means_not_judged(kind):
  def plain(prompt, completion, example):
    return None if completion == '1' else 5.0

  async def asynchronous(*row):
    return plain(*row)

  @rewards.batched
  def in_batch(*columns):
    return [plain(*row) for row in zip(*columns, strict=True)]

  function = {'plain': plain, 'async': asynchronous, 'batched': in_batch}[kind]
  scores = _score(value, function)
  np.testing.assert_array_equal(scores.judged, [True, False, True])
  np.testing.assert_array_equal(scores.reward, [5, 0, 7])
  np.testing.assert_array_equal(scores.parts, [[0, 5], [1, 0], [2, 5]])


@pytest.mark.parametrize(
  'number', [True, 1, 1.0, np.float32(1), np.int64(1), np.True_, np.array(1.0)]
)
def test_numbers_of_any_kind_are_accepted(number):
  assert _score(lambda *_: number).reward[0] == 1


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
  scores = _score(gauge, size=10, max_concurrency=limit)
  assert gauge.most == most
  np.testing.assert_array_equal(scores.reward, np.arange(10))


def test_the_limit_counts_calls_of_all_functions_together():
  gauge = Gauge()
  _score(gauge, lambda *row: gauge(*row), size=10, max_concurrency=15)
  assert gauge.most == 15


def test_score_works_inside_a_running_event_loop():
  async def caller():
    return _score(async_value, value)

  np.testing.assert_array_equal(asyncio.run(caller()).reward, [0, 2, 4])


def test_plain_functions_run_in_the_calling_thread():
  threads = set()

  def remember(*_):
    threads.add(threading.current_thread())
    return 0.0

  async def caller():
    _score(remember, async_value)

  asyncio.run(caller())
  assert threads == {threading.main_thread()}


def failing(prompt, completion, example):
  if completion == '1':
    raise KeyError('gold')
  return 0.0


async def async_failing(prompt, completion, example):
  return failing(prompt, completion, example)


@rewards.batched
async def batched_failing(prompts, completions, examples):
  raise KeyError('gold')


@pytest.mark.parametrize(
  'function, row', [(failing, 1), (async_failing, 1), (batched_failing, 0)]
)
def test_an_exception_names_function_and_example(function, row):
  term = rewards.WeightedReward('my_term', function)
  with pytest.raises(rewards.RewardError) as caught:
    _score(value, term)
  message = str(caught.value)
  for part in (
    "'my_term'",
    function.__name__,
    f'index {100 + row}',
    f"'prompt {row}'",
    "KeyError: 'gold'",
  ):
    assert part in message
  assert ('a batch of 3' in message) == (function is batched_failing)
  assert isinstance(caught.value, ValueError)
  assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.filterwarnings('error')
@pytest.mark.parametrize('first', [async_failing, async_value])
def test_no_coroutine_is_left_behind_by_an_error(first):
  second = async_value if first is async_failing else failing
  with pytest.raises(rewards.RewardError, match='gold'):
    _score(first, second, size=20, max_concurrency=1)


def test_a_long_prompt_is_cut_to_80_characters():
  term = rewards.WeightedReward('term', failing)
  with pytest.raises(rewards.RewardError) as caught:
    rewards.score([term], ['x' * 500], ['1'], [{}])
  assert 'x' * 80 in str(caught.value) and 'x' * 81 not in str(caught.value)
  assert 'index None' in str(caught.value)


@pytest.mark.parametrize(
  'result, message',
  [
    (float('nan'), 'returned nan, which is no finite'),
    (float('-inf'), 'returned -inf, which is no finite'),
    (1e39, 'no finite float32'),
    (10**400, 'no finite float32'),
    (np.float32('nan'), 'no finite float32'),
    ('1.0', "returned '1.0' of type str"),
    ([1.0], 'of type list'),
    (1j, 'of type complex'),
  ],
)
@pytest.mark.parametrize('in_batch', [False, True])
def test_what_is_no_reward_is_refused(in_batch, result, message):
  def function(prompt, completion, example):
    return result if completion == '2' else 0.0

  @rewards.batched
  def batched_function(*columns):
    return [function(*row) for row in zip(*columns, strict=True)]

  with pytest.raises(rewards.RewardError, match=message) as caught:
    _score(batched_function if in_batch else function)
  for part in ("'term_0'", 'function', 'index 102', "'prompt 2'"):
    assert part in str(caught.value)


@pytest.mark.parametrize(
  'result, given', [([1.0, 2.0], '2'), (None, 'NoneType'), (1.0, 'float')]
)
def test_a_batched_function_must_return_one_value_each(result, given):
  function = rewards.batched(lambda *_: result)
  with pytest.raises(
    rewards.RewardError, match=f"'term_0'.*returned {given} for 3 completions"
  ):
    _score(function)


@pytest.mark.parametrize('function', KINDS)
def test_no_completions_give_empty_scores(function):
  scores = _score(function, function, size=0)
  assert [array.shape for array in scores] == [(0,), (0, 2), (0,)]


def test_bad_calls_are_refused():
  term = rewards.WeightedReward('same', value)
  with pytest.raises(ValueError, match=r"\['same', 'same'\].*must differ"):
    rewards.score([term, term], [], [], [])
  with pytest.raises(ValueError, match='at least one is required'):
    rewards.score([], [], [], [])
  with pytest.raises(ValueError, match='2 prompts, 1 completions and 1 exam'):
    rewards.score([term], ['a', 'b'], ['a'], [{}])
  with pytest.raises(ValueError, match='max_concurrency is 0'):
    _score(value, max_concurrency=0)
