"""Tests of what score refuses, and that its messages name the place."""

import asyncio

import numpy as np
import pytest

from grpo_jax import rewards
from tests.rewards import cases


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
    cases.score_rows(cases.value, term)
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


class Ended(BaseException):
  """Neither an Exception nor a KeyboardInterrupt."""


def ending(error, kind):
  """A reward function that ends the process or the event loop."""

  def plain(prompt, completion, example):
    raise error

  async def own(prompt, completion, example):
    raise error

  async def of_a_task(prompt, completion, example):
    await asyncio.create_task(own(prompt, completion, example))

  return {'plain': plain, 'async': own, 'task': of_a_task}[kind]


@pytest.mark.filterwarnings('error')
@pytest.mark.parametrize('kind', ['plain', 'async', 'task'])
@pytest.mark.parametrize(
  'error',
  [SystemExit(0), GeneratorExit(), asyncio.CancelledError(), Ended('now')],
  ids=lambda error: type(error).__name__,
)
def test_what_ends_the_process_is_an_error_of_the_reward(error, kind):
  term = rewards.WeightedReward('my_term', ending(error, kind))
  with pytest.raises(rewards.RewardError, match='my_term') as caught:
    cases.score_rows(cases.async_value, term)
  assert f'raised {type(error).__name__}' in str(caught.value)


@pytest.mark.parametrize('kind', ['plain', 'async', 'task'])
def test_an_interrupt_is_no_error_of_the_reward(kind):
  with pytest.raises(KeyboardInterrupt):
    cases.score_rows(ending(KeyboardInterrupt(), kind))


@pytest.mark.filterwarnings('error')
@pytest.mark.parametrize('first', [async_failing, cases.async_value])
def test_no_coroutine_is_left_behind_by_an_error(first):
  second = cases.async_value if first is async_failing else failing
  with pytest.raises(rewards.RewardError, match='gold'):
    cases.score_rows(first, second, size=20, max_concurrency=1)


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
    cases.score_rows(batched_function if in_batch else function)
  for part in ("'term_0'", 'function', 'index 102', "'prompt 2'"):
    assert part in str(caught.value)


@pytest.mark.parametrize(
  'result, given',
  [
    ([1.0, 2.0], '2'),
    (None, 'NoneType'),
    (1.0, 'float'),
    ({0.0: 'a', 1.0: 'b', 2.0: 'c'}, 'dict'),
    ({0.0, 1.0, 2.0}, 'set'),
    ('123', 'str'),
  ],
)
def test_a_batched_function_must_return_one_value_each(result, given):
  function = rewards.batched(lambda *_: result)
  with pytest.raises(
    rewards.RewardError, match=f"'term_0'.*returned {given} for 3 completions"
  ):
    cases.score_rows(function)


def test_bad_calls_are_refused():
  term = rewards.WeightedReward('same', cases.value)
  with pytest.raises(ValueError, match=r"\['same', 'same'\].*must differ"):
    rewards.score([term, term], [], [], [])
  with pytest.raises(ValueError, match='at least one is required'):
    rewards.score([], [], [], [])
  with pytest.raises(ValueError, match='2 prompts, 1 completions and 1 exam'):
    rewards.score([term], ['a', 'b'], ['a'], [{}])
  with pytest.raises(ValueError, match='max_concurrency is 0'):
    cases.score_rows(cases.value, max_concurrency=0)


def plural(prompts, completions, examples):
  return len(completions) / prompts


def annotated(prompt: list[str], completion, example):
  return prompt / 2


@pytest.mark.parametrize(
  'function, told',
  [
    (plural, True),
    (annotated, True),
    (lambda prompt, completion, example: [1.0], True),
    (failing, False),
    (lambda prompt, completion, example: 'x', False),
    (rewards.batched(lambda *columns: [[1.0]] * 3), False),
  ],
)
def test_a_function_of_lists_is_told_of_its_mark(function, told):
  with pytest.raises(rewards.RewardError) as caught:
    cases.score_rows(function)
  assert ('needs the mark @grpo_jax.rewards.batched' in str(caught.value)) is (
    told
  )
