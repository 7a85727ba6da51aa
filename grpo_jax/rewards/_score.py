"""Calls reward functions on a batch of completions, and adds them up.

Calls in this process are made here; those in others by `workers.Workers`.
"""

import asyncio
from collections.abc import Awaitable
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from collections.abc import Set
from concurrent import futures
import contextlib
import dataclasses
import inspect
import operator
import time
from typing import Any
from typing import NamedTuple

import numpy as np

from grpo_jax.config import plain_text
from grpo_jax.rewards._base import Outcome
from grpo_jax.rewards._base import RewardError
from grpo_jax.rewards._base import WeightedReward
from grpo_jax.rewards._base import takes_lists
from grpo_jax.rewards.workers import Call
from grpo_jax.rewards.workers import Stream
from grpo_jax.rewards.workers import Workers

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
    try:
      return self.reward.function(*self._arguments(), **self.reward.kwargs)
    except KeyboardInterrupt:  # of a person, or of a signal
      raise
    except BaseException as error:  # `sys.exit` raises what is no Exception
      raise self._raised(error) from error

  def in_worker(self) -> Call:
    """This call as workers make it."""
    function = self.reward.imported_as or self.reward.function
    lists = takes_lists(self.reward.function)
    return Call(function, self._arguments(), lists, self.reward.kwargs)

  def _arguments(self) -> tuple[Any, Any, Any]:
    """Prompt, completion and example; or lists of them, for such a function."""
    # Copies, because a function may empty the lists that it is given. A call
    # that takes no lists has one row; see `_spans`.
    take = list if takes_lists(self.reward.function) else operator.itemgetter(0)
    return take(self.prompts), take(self.completions), take(self.examples)

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
  calls: Sequence[RewardCall], max_concurrency: int, check: Callable[[], None]
) -> list[tuple[RewardCall, list[Outcome]]]:
  """The outcomes of calls in this process; `check` comes before each."""
  results, secs = [], []
  # Plain functions first: their errors come before a judge's API costs money.
  try:
    for call in calls:
      check()
      begun = time.monotonic()
      results.append(call.start())
      secs.append(time.monotonic() - begun)
    _await_all(calls, results, secs, max_concurrency, check)
  finally:
    for result in results:
      if inspect.iscoroutine(result):
        # After an error some coroutines have never run. Python warns of each
        # unless it is closed.
        result.close()
  return [
    (call, call.outcomes(result, took))
    for call, result, took in zip(calls, results, secs, strict=True)
  ]


def _await_all(
  calls: Sequence[RewardCall],
  results: list[Any],
  secs: list[float],
  max_concurrency: int,
  check: Callable[[], None],
) -> None:
  """Awaits the results of async functions, together, in their places.

  Args:
    calls: In this process.
    results: What each call has returned; what was awaited takes its place.
    secs: How long each took; the time of waiting is added.
    max_concurrency: How many are awaited at once.
    check: Called before each; what it raises ends the waiting.
  """

  async def finish(semaphore, place):
    async with semaphore:
      check()
      begun = time.monotonic()
      results[place] = await calls[place].finish(results[place])
      secs[place] += time.monotonic() - begun

  async def finish_all():
    semaphore = asyncio.Semaphore(max_concurrency)
    await asyncio.gather(*(finish(semaphore, place) for place in waiting))

  waiting = [i for i, item in enumerate(results) if inspect.isawaitable(item)]
  if waiting:
    try:
      _run(finish_all)
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


class Scores(NamedTuple):
  """The rewards of N completions by K functions, as host arrays.

  Attributes:
    reward: f32[N], the weighted sum over the functions that have judged; 0
      where not judged.
    parts: f32[N,K], what each function returned, without its weight; NaN where
      it has not judged: for None, and for a failure without a reward for that.
    judged: bool[N], whether a function has judged whose weight is not 0 (any,
      if all weights are 0), every function that is `required` has, and none
      failed without a reward for that.
    failures: object[N,K], texts: why the function failed, in a worker process
      or as its own `Outcome` tells; '' where it did not. None where nothing has
      been scored.
    secs: f32[N,K], how long the call took, or what an `Outcome` tells; for a
      batched function that of all N. None where nothing has been scored.
  """

  reward: np.ndarray
  parts: np.ndarray
  judged: np.ndarray
  failures: np.ndarray | None = None
  secs: np.ndarray | None = None


def score(
  rewards: Sequence[WeightedReward],
  prompts: Sequence[str],
  completions: Sequence[str],
  examples: Sequence[dict[str, Any]],
  max_concurrency: int = 64,
  workers: Workers | None = None,
) -> Scores:
  """The rewards of a batch of completions.

  Rewards of `where='workers'` are called in worker processes, while this one
  calls the others. One that raises there has failed on the completion, which
  gets the reward's `failed`.

  Of those here, plain functions are called first, one after another in this
  thread. Then the async functions run together, with at most `max_concurrency`
  calls under way over all functions. They run in an event loop that ends with
  this call, so a reward function must open its async client itself, on every
  call. If this thread already runs an event loop, as a notebook does, that loop
  waits while another thread runs the functions.

  The weighted sum is computed in float64, in the order of the functions, and
  rounded to float32 once. A function that returns None has no part in it: tasks
  of several kinds may have a reward for each.

  >>> brevity = WeightedReward('brevity', lambda p, c, e: -len(c), weight=0.5)
  >>> score([brevity], ['1+1='] * 2, ['2', '22'], [{}, {}]).reward
  array([-0.5, -1. ], dtype=float32)

  Args:
    rewards: K terms, at least one; their names differ.
    prompts: N prompts.
    completions: N completions, without special tokens.
    examples: N records with 'index', 'completion_ids' and 'truncated'.
    max_concurrency: how many async calls may be under way at once. A batched
      call counts as one.
    workers: For the rewards that are called in workers.

  Returns:
    The `Scores` of the N completions, in the order given.

  Raises:
    ValueError: there are no terms, two have one name, the lists differ in
      length, `max_concurrency` is below 1, or needed workers are missing.
    RewardError: a function raised an error, or returned neither a finite
      number, nor None, nor an `Outcome` with one of them; or a batched function
      did not return N of these.
  """
  if not len(prompts) == len(completions) == len(examples):
    raise ValueError(
      f'There are {len(prompts)} prompts, {len(completions)} completions and'
      f' {len(examples)} examples, but every completion needs one of each;'
      ' repeat a prompt and its example for each of its completions.'
    )
  with Scoring(rewards, workers, max_concurrency) as scoring:
    for row in zip(prompts, completions, examples, strict=True):
      scoring.add(*row)
    return scoring.scores(range(len(prompts)))


class Scoring(contextlib.ExitStack):
  """Scores of completions that come one after the other.

  A context manager. Workers judge a completion from the moment that it is
  there, but for functions that take lists; everything else is called at the
  end, as `score` does. Leaving the context ends what is under way.

  >>> brevity = WeightedReward('brevity', lambda p, c, e: -len(c))
  >>> with Scoring([brevity]) as scoring:
  ...   first, second = (scoring.add('1+1=', c, {}) for c in ('2', '22'))
  ...   scoring.scores([second, first]).reward
  array([-2., -1.], dtype=float32)

  Args:
    rewards: See `score`.
    workers: See `score`.
    max_concurrency: See `score`.

  Raises:
    ValueError: See `score`.
  """

  def __init__(
    self,
    rewards: Sequence[WeightedReward],
    workers: Workers | None = None,
    max_concurrency: int = 64,
  ):
    super().__init__()
    _check(rewards, workers, max_concurrency)
    self._rewards = rewards
    self._workers = workers
    self._max_concurrency = max_concurrency
    self._rows: list[tuple[str, str, dict[str, Any]]] = []
    self._begun: dict[tuple[int, int], int] = {}  # calls by column and row
    self._stream: Stream | None = None

  def add(self, prompt: str, completion: str, example: dict[str, Any]) -> int:
    """Takes a completion, and has workers judge it.

    Args:
      prompt: See `score`; as the two others.
      completion: One.
      example: Its record.

    Returns:
      The number of the completion, from 0 on.
    """
    row = len(self._rows)
    self._rows.append((prompt, completion, example))
    for column, reward in enumerate(self._rewards):
      if reward.where == 'workers' and not takes_lists(reward.function):
        call = RewardCall(reward, column, 0, [prompt], [completion], [example])
        with contextlib.suppress(ValueError, RuntimeError):  # see `scores`
          self._begun[column, row] = self._begin(call)
    return row

  def scores(
    self, rows: Sequence[int], check: Callable[[], None] = lambda: None
  ) -> Scores:
    """Waits for the scores.

    Args:
      rows: Numbers of completions, in the order of the result.
      check: Called before each call in this process, and several times a second
        while workers make theirs. What it raises ends them all.

    Returns:
      The `Scores` of these N completions.

    Raises:
      ValueError: The function or an example cannot be sent to a worker, or no
        worker can be started.
      SandboxError: The system cannot confine what must be confined.
      RewardError: See `score`.
    """
    columns = [
      list(of_all) for of_all in zip(*(self._rows[row] for row in rows))
    ]
    calls = [
      RewardCall(
        reward, column, first, *(items[first:last] for items in columns)
      )
      for column, reward in enumerate(self._rewards)
      for first, last in _spans(reward, len(rows))
    ]
    here = [call for call in calls if call.reward.where == 'here']
    there = [call for call in calls if call.reward.where == 'workers']
    numbers = []
    for call in there:
      begun = None
      if not takes_lists(call.reward.function):
        begun = self._begun.get((call.column, rows[call.first]))
      numbers.append(self._begin(call) if begun is None else begun)
    outcomes = make_here(here, self._max_concurrency, check)
    if self._stream is not None:
      made = self._stream.wait(check)
      outcomes += [
        (call, made[number])
        for call, number in zip(there, numbers, strict=True)
      ]
    return _summed(self._rewards, len(rows), outcomes)

  def _begin(self, call: RewardCall) -> int:
    assert self._workers is not None  # `score` and the session see to it
    if self._stream is None:
      self._stream = self.enter_context(self._workers.stream())
    return self._stream.add(call.in_worker())


def _summed(
  rewards: Sequence[WeightedReward],
  number: int,
  outcomes: Sequence[tuple[RewardCall, list[Outcome]]],
) -> Scores:
  shape = number, len(rewards)
  parts, failures = np.zeros(shape, np.float64), np.full(shape, '', object)
  judged, secs = np.ones(number, bool), np.zeros(shape, np.float32)
  for call, of_rows in outcomes:
    for row, outcome in enumerate(of_rows, start=call.first):
      failures[row, call.column] = outcome.failure
      secs[row, call.column] = outcome.secs
      value = call.reward.failed if outcome.failure else outcome.reward
      if value is None:
        judged[row] &= not (outcome.failure or call.reward.required)
        value = np.nan
      parts[row, call.column] = value
  known = ~np.isnan(parts)
  # A sum over rewards of weight 0 alone is no reward of 0.
  counts = [k for k, reward in enumerate(rewards) if reward.weight]
  judged &= known[:, counts or slice(None)].any(axis=1)
  # In a fixed order, so that the same parts always give the same sum.
  total = np.zeros(number, np.float64)
  for column, reward in enumerate(rewards):
    total += reward.weight * np.where(known[:, column], parts[:, column], 0.0)
  total = np.where(judged, total, 0.0)
  f32 = np.float32
  return Scores(total.astype(f32), parts.astype(f32), judged, failures, secs)


def _spans(reward: WeightedReward, size: int) -> list[tuple[int, int]]:
  """For every call of a function on `size` rows: its first row, and its end."""
  if takes_lists(reward.function):
    return [(0, size)] if size else []
  return [(row, row + 1) for row in range(size)]


def _check(rewards, workers, max_concurrency):
  names = [reward.name for reward in rewards]
  if not names or len(set(names)) != len(names):
    raise ValueError(
      f'The rewards are named {names}, but at least one is required, and their'
      ' names must differ; add, rename or remove one.'
    )
  if max_concurrency < 1:
    raise ValueError(
      f'max_concurrency is {max_concurrency}, but at least 1 call must be'
      ' allowed; pass a positive number.'
    )
  remote = [reward.name for reward in rewards if reward.where == 'workers']
  if remote and workers is None:
    raise ValueError(
      f'The rewards {remote} are to be called in workers, but there are none;'
      ' pass workers=Workers(...).'
    )
