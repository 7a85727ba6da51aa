"""Calling reward functions on a batch of completions."""

import asyncio
from collections.abc import Awaitable
from collections.abc import Sequence
from concurrent import futures
import dataclasses
import inspect
from typing import Any
from typing import NamedTuple

import numpy as np

from grpo_jax.rewards._base import BATCHED_MARK
from grpo_jax.rewards._base import RewardError
from grpo_jax.rewards._base import WeightedReward

_FLOAT32_MAX = float(np.finfo(np.float32).max)


class Scores(NamedTuple):
  """The rewards of N completions by K functions, as host arrays."""

  reward: np.ndarray  # f32[N], sum of weight * part; 0 where not judged
  parts: np.ndarray  # f32[N, K], before weighting; 0 where a part is None
  judged: np.ndarray  # bool[N], no function returned None


def score(
  rewards: Sequence[WeightedReward],
  prompts: Sequence[str],
  completions: Sequence[str],
  examples: Sequence[dict[str, Any]],
  max_concurrency: int = 64,
) -> Scores:
  """Rewards of a batch of completions.

  Plain functions run first, in this thread and in order. Async functions then
  run together, at most `max_concurrency` calls at a time over all functions,
  in an event loop of their own (in a thread of their own if this thread
  already runs a loop, which waits meanwhile). The loop ends with the call, so
  an async client must be opened inside the reward function.

  The sum runs over the functions in the order given, in float64, and is
  rounded to float32 once.

  >>> brevity = WeightedReward('brevity', lambda p, c, e: -len(c), weight=0.5)
  >>> score([brevity], ['1+1='] * 2, ['2', '22'], [{}, {}]).reward
  array([-0.5, -1. ], dtype=float32)

  Args:
    rewards: K terms, at least one, with different names.
    prompts: N prompts.
    completions: N completions, special tokens removed.
    examples: N records with 'index', 'completion_ids' and 'truncated'.
    max_concurrency: how many async calls may be under way at once; a batched
      call counts as one.

  Returns:
    Scores of N completions, in the order given.

  Raises:
    ValueError: no terms, equal names, lists of different lengths, or a
      `max_concurrency` below 1.
    RewardError: a function raised, or returned something other than a finite
      number or None, or a batched one not N of them.
  """
  _check(rewards, prompts, completions, examples, max_concurrency)
  calls = [
    _Call(
      reward,
      column,
      first,
      list(prompts[first:last]),
      list(completions[first:last]),
      list(examples[first:last]),
    )
    for column, reward in enumerate(rewards)
    for first, last in _spans(reward, len(prompts))
  ]
  results = []
  try:
    for call in calls:
      results.append(call.start())
    finished = _finish_all(calls, results, max_concurrency)
  finally:
    for result in results:
      if inspect.iscoroutine(result):
        result.close()  # after an error, those that never ran

  parts = np.zeros((len(prompts), len(rewards)), np.float64)
  judged = np.ones(len(prompts), bool)
  for call, result in zip(calls, finished, strict=True):
    for row, value in enumerate(call.values(result), start=call.first):
      judged[row] &= value is not None
      parts[row, call.column] = 0.0 if value is None else value
  total = np.zeros(len(prompts), np.float64)
  for column, reward in enumerate(rewards):
    total += reward.weight * parts[:, column]
  total = np.where(judged, total, 0.0)
  return Scores(total.astype(np.float32), parts.astype(np.float32), judged)


@dataclasses.dataclass(frozen=True)
class _Call:
  """One call of a function: on one completion, or batched on all of them."""

  reward: WeightedReward
  column: int
  first: int  # the row of its first completion
  prompts: list[str]
  completions: list[str]
  examples: list[dict[str, Any]]

  def start(self) -> Any:
    """The function's result, or the coroutine that an async one returns."""
    arguments = (self.prompts, self.completions, self.examples)
    if not _takes_lists(self.reward):
      arguments = [items[0] for items in arguments]
    try:
      return self.reward.function(*arguments)
    except Exception as error:
      raise self._raised(error) from error

  async def finish(self, result: Awaitable[Any]) -> Any:
    try:
      return await result
    except Exception as error:
      raise self._raised(error) from error

  def values(self, result: Any) -> list[float | None]:
    """The result as one number or None per completion."""
    if not _takes_lists(self.reward):
      return [self._number(result, 0)]
    try:
      values = list(result)
    except TypeError:
      values = None
    if values is None or len(values) != len(self.prompts):
      given = type(result).__name__ if values is None else len(values)
      raise RewardError(
        f'{self._where()} returned {given} for {len(self.prompts)}'
        ' completions; return a list with a number or None for each.'
      )
    return [self._number(value, row) for row, value in enumerate(values)]

  def _number(self, value: Any, row: int) -> float | None:
    if value is None:
      return None
    if getattr(value, 'ndim', None) == 0:
      value = value.item()  # a scalar of numpy, jax or torch
    if not isinstance(value, int | float):
      raise RewardError(
        f'{self._where(row)} returned {value!r:.80} of type'
        f' {type(value).__name__}; return a number, or None for a completion'
        ' that cannot be judged.'
      )
    if not -_FLOAT32_MAX <= value <= _FLOAT32_MAX:  # also refuses NaN
      raise RewardError(
        f'{self._where(row)} returned {value!r:.80}, which is no finite'
        ' float32; return a finite number, or None for a completion that'
        ' cannot be judged.'
      )
    return float(value)

  def _raised(self, error: Exception) -> RewardError:
    return RewardError(
      f'{self._where()} raised {type(error).__name__}: {error}; correct the'
      ' function, or let it return None for completions that it cannot judge.'
    )

  def _where(self, row: int | None = None) -> str:
    """Function and example: the subject of every message."""
    function = self.reward.function
    function_name = getattr(function, '__qualname__', repr(function))
    batch = ''
    if row is None and _takes_lists(self.reward):
      batch = f'a batch of {len(self.prompts)} completions that starts with '
    return (
      f'The reward {self.reward.name!r} (function {function_name}), called on'
      f' {batch}the example with index {self.examples[row or 0].get("index")}'
      f' and the prompt {self.prompts[row or 0][:80]!r},'
    )


def _takes_lists(reward: WeightedReward) -> bool:
  return getattr(reward.function, BATCHED_MARK, False)


def _spans(reward: WeightedReward, size: int) -> list[tuple[int, int]]:
  """First and last row of every call of a function on `size` rows."""
  if _takes_lists(reward):
    return [(0, size)] if size else []
  return [(row, row + 1) for row in range(size)]


def _finish_all(
  calls: Sequence[_Call], results: Sequence[Any], max_concurrency: int
) -> list[Any]:
  """The results, those of async functions awaited together."""

  async def finish(semaphore, call, result):
    async with semaphore:
      return await call.finish(result)

  async def finish_all():
    semaphore = asyncio.Semaphore(max_concurrency)
    return await asyncio.gather(
      *(finish(semaphore, calls[i], results[i]) for i in waiting)
    )

  waiting = [i for i, item in enumerate(results) if inspect.isawaitable(item)]
  finished = list(results)
  if waiting:
    for i, value in zip(waiting, _run(finish_all), strict=True):
      finished[i] = value
  return finished


def _run(function: Any) -> Any:
  """Runs a coroutine function to its end, inside a running loop too."""
  try:
    asyncio.get_running_loop()
  except RuntimeError:
    return asyncio.run(function())
  with futures.ThreadPoolExecutor(max_workers=1) as executor:
    return executor.submit(lambda: asyncio.run(function())).result()


def _check(rewards, prompts, completions, examples, max_concurrency):
  names = [reward.name for reward in rewards]
  if not names or len(set(names)) != len(names):
    raise ValueError(
      f'The rewards are named {names}, but at least one is required and names'
      ' must differ; rename or remove some.'
    )
  if not len(prompts) == len(completions) == len(examples):
    raise ValueError(
      f'There are {len(prompts)} prompts, {len(completions)} completions and'
      f' {len(examples)} examples, but one of each per completion is required;'
      ' repeat each prompt and example for its completions.'
    )
  if max_concurrency < 1:
    raise ValueError(
      f'max_concurrency is {max_concurrency}, but at least 1 call must be'
      ' allowed; pass a positive number.'
    )
