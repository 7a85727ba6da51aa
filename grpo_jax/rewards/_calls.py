"""Calls of reward functions in this process, and what they give."""

import asyncio
from collections.abc import Awaitable
from collections.abc import Mapping
from collections.abc import Sequence
from collections.abc import Set
from concurrent import futures
import dataclasses
import inspect
import time
from typing import Any

import numpy as np

from grpo_jax.config import plain_text
from grpo_jax.rewards._base import Outcome
from grpo_jax.rewards._base import RewardError
from grpo_jax.rewards._base import WeightedReward
from grpo_jax.rewards._base import takes_lists
from grpo_jax.rewards.workers import Call

# Annotations of lists, as they are written, without what is inside.
_LISTS = (
  'list',
  "<class 'list'>",
  'typing.list',
  'sequence',
  'typing.sequence',
)
_FLOAT32_MAX = float(np.finfo(np.float32).max)


@dataclasses.dataclass(frozen=True)
class RewardCall:
  """One call of a reward function, on one completion or on all of them."""

  reward: WeightedReward
  column: int  # of this function in `Scores.parts`
  first: int  # row of the first completion
  prompts: list[str]
  completions: list[str]
  examples: list[dict[str, Any]]

  def start(self) -> Any:
    """The function's result, or the coroutine that an async one returns."""
    # Copies, because a function may empty the lists that it is given.
    arguments = [
      list(items) for items in (self.prompts, self.completions, self.examples)
    ]
    # A call that takes no lists has one row; see `_spans`.
    if not takes_lists(self.reward.function):
      arguments = [items[0] for items in arguments]
    try:
      return self.reward.function(*arguments, **self.reward.kwargs)
    except KeyboardInterrupt:  # of a person, or of a signal
      raise
    except BaseException as error:  # `sys.exit` raises what is no Exception
      raise self._raised(error) from error

  def in_worker(self) -> Call:
    """This call as workers make it."""
    lists = takes_lists(self.reward.function)
    arguments: tuple[Any, Any, Any] = (
      self.prompts,
      self.completions,
      self.examples,
    )
    if not lists:
      arguments = self.prompts[0], self.completions[0], self.examples[0]
    function = self.reward.imported_as or self.reward.function
    return Call(function, arguments, lists, self.reward.kwargs)

  async def finish(self, result: Awaitable[Any]) -> Any:
    """What the coroutine of an async function returns."""
    try:
      return await result
    except KeyboardInterrupt:
      raise
    except BaseException as error:  # as above
      if _ended_from_outside(error):
        raise
      raise self._raised(error) from error

  def outcomes(self, result: Any, secs: float) -> list[Outcome]:
    """The result of a call of so many seconds, one outcome per completion."""
    if not takes_lists(self.reward.function):
      return [self._outcome(result, 0, secs)]
    # A dict would give its keys, and a set an order of its own.
    unordered = isinstance(result, Mapping | Set | str | bytes)
    try:
      values = None if unordered else list(result)
    except TypeError:  # a single number, say
      values = None
    if values is None or len(values) != len(self.prompts):
      given = plain_text.kind(result) if values is None else len(values)
      raise RewardError(
        f'{self._where()} returned {given} for {len(self.prompts)}'
        ' completions; return a list with a number or None for each.'
      )
    return [self._outcome(value, row, secs) for row, value in enumerate(values)]

  def _outcome(self, value: Any, row: int, secs: float) -> Outcome:
    if not isinstance(value, Outcome):
      return Outcome(self._number(value, row), '', secs)
    value = value._replace(secs=value.secs or secs)
    if value.failure:
      if not isinstance(value.failure, str):
        return value._replace(failure=plain_text.shown(value.failure))
      return value
    return value._replace(reward=self._number(value.reward, row))

  def _number(self, value: Any, row: int) -> float | None:
    """The value of one completion, if it is a finite number or None."""
    if value is None:
      return None
    if getattr(value, 'ndim', None) == 0:
      value = value.item()  # a scalar of numpy, jax or torch
    if not isinstance(value, int | float):  # a bool is an int, and allowed
      raise RewardError(
        f'{self._where(row)} returned {plain_text.shown(value)} of type'
        f' {plain_text.kind(value)}; return a number, or None for a completion'
        f' that cannot be judged.{self._advice(value)}'
      )
    if not -_FLOAT32_MAX <= value <= _FLOAT32_MAX:  # also refuses NaN
      raise RewardError(
        f'{self._where(row)} returned {plain_text.shown(value)}, which is no'
        ' finite float32; return a finite number, or None for a completion that'
        ' cannot be judged.'
      )
    return float(value)

  def _raised(self, error: BaseException) -> RewardError:
    return RewardError(
      f'{self._where()} raised {plain_text.named(error)}; correct the'
      ' function, or let it return None for completions that it cannot judge.'
      f'{self._advice()}'
    )

  def _advice(self, returned: Any = None) -> str:
    """How to judge all completions at once, if the function means to do so."""
    if takes_lists(self.reward.function):
      return ''
    try:
      taken = inspect.signature(self.reward.function).parameters.values()
    except (TypeError, ValueError):  # some functions written in C have none
      taken = ()
    declares = any(
      one.name in ('prompts', 'completions', 'examples')
      or str(one.annotation).lower().partition('[')[0] in _LISTS
      for one in taken
    )
    if not declares and not isinstance(returned, list | tuple):
      return ''
    return (
      ' It is called for each completion; a function that takes lists and'
      ' returns one needs the mark @grpo_jax.rewards.batched.'
    )

  def _where(self, row: int | None = None) -> str:
    """The subject of every message: the function, and what it was called on."""
    function = self.reward.function
    function_name = getattr(function, '__qualname__', repr(function))
    batch = ''
    if row is None and takes_lists(self.reward.function):
      batch = f'a batch of {len(self.prompts)} completions that starts with '
    return (
      f'The reward {self.reward.name!r} (function {function_name}), called on'
      f' {batch}the example with index {self.examples[row or 0].get("index")}'
      f' and the prompt {self.prompts[row or 0][:80]!r},'
    )


def make_here(
  calls: Sequence[RewardCall], max_concurrency: int
) -> list[tuple[RewardCall, list[Outcome]]]:
  """The outcomes of calls in this process."""
  results, secs = [], []
  # Plain functions first: their errors come before a judge's API costs money.
  try:
    for call in calls:
      begun = time.monotonic()
      results.append(call.start())
      secs.append(time.monotonic() - begun)
    finished = _finish_all(calls, results, secs, max_concurrency)
  finally:
    for result in results:
      if inspect.iscoroutine(result):
        # After an error some coroutines have never run. Python warns of each
        # unless it is closed.
        result.close()
  return [
    (call, call.outcomes(result, took))
    for call, result, took in zip(calls, finished, secs, strict=True)
  ]


def _finish_all(
  calls: Sequence[RewardCall],
  results: Sequence[Any],
  secs: list[float],
  max_concurrency: int,
) -> list[Any]:
  """The results of all calls; those of async functions are awaited together.

  Args:
    calls: In this process.
    results: What each call has returned.
    secs: How long each took; the time of waiting is added.
    max_concurrency: See `score`.
  """

  async def finish(semaphore, place):
    async with semaphore:
      begun = time.monotonic()
      value = await calls[place].finish(results[place])
      secs[place] += time.monotonic() - begun
      return value

  async def finish_all():
    semaphore = asyncio.Semaphore(max_concurrency)
    return await asyncio.gather(
      *(finish(semaphore, place) for place in waiting)
    )

  waiting = [i for i, item in enumerate(results) if inspect.isawaitable(item)]
  finished = list(results)
  if waiting:
    try:
      values = _run(finish_all)
    except (Exception, KeyboardInterrupt):
      raise
    except BaseException as error:
      # asyncio lets a SystemExit in a task of the user's own end the loop.
      names = sorted({calls[i].reward.name for i in waiting})
      raise RewardError(
        f'A task of one of the async rewards {names} raised '
        f'{plain_text.named(error)}; correct the function, or let it '
        'return None for completions that it cannot judge.'
      ) from error
    for i, value in zip(waiting, values, strict=True):
      finished[i] = value
  return finished


def _ended_from_outside(error: BaseException) -> bool:
  """Whether the event loop ends a coroutine, and not the coroutine itself."""
  try:
    task = asyncio.current_task()
  except RuntimeError:  # no loop is running, so the coroutine is being closed
    return True
  cancelled = isinstance(error, asyncio.CancelledError)
  return cancelled and task is not None and task.cancelling() > 0


def _run(function: Any) -> Any:
  """Runs a coroutine function to its end, even inside a running event loop."""
  try:
    asyncio.get_running_loop()
  except RuntimeError:
    return asyncio.run(function())
  # This thread runs a loop, which cannot run a second one: use another thread.
  with futures.ThreadPoolExecutor(max_workers=1) as executor:
    return executor.submit(lambda: asyncio.run(function())).result()
