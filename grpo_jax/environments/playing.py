"""Plays episodes: calls what a user wrote, and closes what was made.

A play makes an instance for each episode, and closes it on every path: when
the user's code raises, when the policy does, when the episode is cancelled, and
also when it is cancelled while the instance is still being made.
"""

import abc
import asyncio
from collections.abc import Callable
from collections.abc import Mapping
import copy
import inspect
import math
from typing import Any
from typing import NamedTuple
from typing import Protocol

from grpo_jax.config import plain_text
from grpo_jax.environments import base
from grpo_jax.environments import threads
from grpo_jax.environments import tools as tools_lib

TOOL_SECS = 30.0
_FLOAT32_MAX = (2 - 2**-23) * 2.0**127
_CLOSE_SECS = 5.0


class Playing(Protocol):
  """Plays one episode at a time, and may keep what is reusable."""

  async def __call__(
    self, policy: base.Policy, example: Mapping[str, Any], seed: int
  ) -> float | None:
    """Plays an episode, and returns its own reward; None if it has none."""
    ...

  async def close(self) -> None:
    """Closes what was kept for the next episode."""
    ...


def messages(observation: Any, where: str) -> list[base.Message]:
  """What an environment has said, as messages.

  Args:
    observation: A text, a message, or several of either.
    where: The method that returned it, for the sentence.

  Raises:
    ValueError: It is nothing of these.
  """
  if isinstance(observation, str | Mapping):
    observation = [observation]
  if isinstance(observation, list | tuple) and observation:
    found = [
      {'role': 'user', 'content': one} if isinstance(one, str) else one
      for one in observation
    ]
    if all(
      isinstance(one, Mapping)
      and isinstance(one.get('role'), str)
      and 'content' in one
      for one in found
    ):
      return [dict(one) for one in found]
  raise ValueError(
    f'{where} returned {plain_text.shown(observation)}, but a text, or one or '
    "more messages such as {'role': 'user', 'content': 'Hello'} are required."
  )


def number(value: Any, where: str) -> float:
  """A reward as a finite float, which float32 can hold.

  Raises:
    ValueError: It is none.
  """
  try:
    found = math.nan if isinstance(value, str | bytes) else float(value)
  except Exception:
    found = math.nan
  if -_FLOAT32_MAX <= found <= _FLOAT32_MAX:
    return found
  raise ValueError(
    f'{where} is {plain_text.shown(value)}, but a finite number is required.'
  )


class Played:
  """An episode that a function plays."""

  def __init__(
    self,
    function: Callable[..., Any],
    kwargs: dict[str, Any],
    takes_seed: bool,
    name: str,
  ):
    self._function = function
    self._kwargs = kwargs
    self._takes_seed = takes_seed
    self._name = name
    call = getattr(function, '__call__', function)  # noqa: B004
    self._blocks = not any(map(inspect.iscoroutinefunction, (function, call)))

  async def __call__(
    self, policy: base.Policy, example: Mapping[str, Any], seed: int
  ) -> float | None:
    """See `Playing`."""
    kwargs = self._kwargs | ({'seed': seed} if self._takes_seed else {})
    example = copy.deepcopy(dict(example))
    if self._blocks:
      value = await self._in_thread(policy, example, kwargs)
    else:
      playing = self._function(policy, example, **kwargs)
      value = await threads.guarded(playing)
    where = f'What the environment {self._name!r} returned'
    return None if value is None else number(value, where)

  async def _in_thread(
    self, policy: base.Policy, example: dict[str, Any], kwargs: dict[str, Any]
  ) -> Any:
    blocking, thread = threads.Blocking(policy), threads.Thread()
    try:
      return await thread.call(self._function, blocking, example, **kwargs)
    finally:
      blocking.end()
      thread.end()

  async def close(self) -> None:
    """Does nothing: nothing is kept."""


class Form(NamedTuple):
  """What a class of environments is made of.

  Attributes:
    construct: Makes an instance.
    tools: The tools of an instance, by name.
    blocks: Whether some of its methods are not async: then all are called in a
      thread of the instance, always the same.
    reusable: Whether an instance may play another episode.
    owned: Whether it is closed here; a user's own instance is the user's.
    name: For errors.
  """

  construct: Callable[[], Any]
  tools: Callable[[Any], Mapping[str, Callable[..., Any]]]
  blocks: bool
  reusable: bool
  owned: bool
  name: str


class Instances(abc.ABC):
  """Plays episodes on instances; each is closed, whatever happens."""

  def __init__(self, form: Form, tool_secs: float = TOOL_SECS):
    self.form = form
    self.tool_secs = tool_secs
    self._thread = threads.Thread()
    # The thread itself puts the instance there: if nobody waits for it any
    # more when it is made, it still is closed.
    self._made: list[Any] = []

  async def __call__(
    self, policy: base.Policy, example: Mapping[str, Any], seed: int
  ) -> float | None:
    """See `Playing`."""
    error = None
    try:
      if not self._made:
        await self.run(lambda: self._made.append(self.form.construct()))
      example = copy.deepcopy(dict(example))
      return await self.play(self._made[0], policy, example, seed)
    except BaseException as raised:
      error = raised
      raise
    finally:
      as_new = error is None or isinstance(error, base.Ended)
      if not (as_new and self.form.reusable):
        await self._close_after(error)

  async def _close_after(self, error: BaseException | None) -> None:
    try:
      await self.close()
    except Exception:
      if error is None:  # the first one is the one to tell
        raise

  @abc.abstractmethod
  async def play(
    self, made: Any, policy: base.Policy, example: dict[str, Any], seed: int
  ) -> float | None:
    """Plays an episode on an instance."""

  async def run(self, function: Callable[..., Any], *args: Any) -> Any:
    """Calls code of the user: here, or in the thread of the instance."""
    if self.form.blocks:
      return await self._thread.call(function, *args)

    async def called():
      result = function(*args)
      return await result if inspect.isawaitable(result) else result

    return await threads.guarded(called())

  async def close(self) -> None:
    """Closes the instance; a while later nobody waits for it any more."""
    made, thread = self._made, self._thread
    self._made, self._thread = [], threads.Thread()

    def close():
      closing = getattr(made.pop(), 'close', None) if made else None
      return closing() if closing is not None and self.form.owned else None

    async def closed():
      if self.form.blocks:
        await thread.call(close)
      elif inspect.isawaitable(closing := close()):
        await threads.guarded(closing)

    task = asyncio.ensure_future(closed())
    threads.keep(task)
    task.add_done_callback(lambda _: thread.end())
    await asyncio.wait({task}, timeout=_CLOSE_SECS)
    if task.done():
      task.result()


class Steps(Instances):
  """An episode of steps: the environment answers each turn."""

  async def play(
    self, made: Any, policy: base.Policy, example: dict[str, Any], seed: int
  ) -> float | None:
    """Begins, and then steps until it is done."""
    of = f'of the environment {self.form.name!r}'
    said = await self.run(made.reset, example, seed)
    while True:
      reply = await policy.say(*messages(said, f'reset or step {of}'))
      action = base.Action(
        reply.text, reply.calls, reply.reasoning, reply.finish
      )
      step = await self.run(made.step, action)
      if not isinstance(step, base.Step):
        raise ValueError(
          f'step {of} returned a {plain_text.kind(step)}, but a Step is '
          'required, as in Step(observation, reward=0.0, done=False).'
        )
      policy.reward(
        number(step.reward, f'The reward of a step {of}'), reply.turn
      )
      if step.done:
        return None
      said = step.observation


class Tools(Instances):
  """An episode of calls: it ends with the first turn that has none."""

  async def play(
    self, made: Any, policy: base.Policy, example: dict[str, Any], seed: int
  ) -> float | None:
    """Answers calls until a turn has none."""
    of = f'of the environment {self.form.name!r}'
    said, rewards = None, getattr(made, 'reward', None)
    if hasattr(made, 'reset'):
      said = await self.run(made.reset, example, seed)
    new = (
      _prompt(example, of) if said is None else messages(said, f'reset {of}')
    )
    functions = self.form.tools(made)
    try:
      while (reply := await policy.say(*new)).calls:
        outcomes = await tools_lib.run_calls(
          reply.calls, functions, self.tool_secs
        )
        new = [one.message for one in outcomes]
    except base.Ended:
      if rewards is None:
        raise
    value = None if rewards is None else await self.run(rewards)
    return None if value is None else number(value, f'The reward {of}')


def _prompt(example: Mapping[str, Any], of: str) -> list[base.Message]:
  """What the record asks, where the environment says nothing."""
  if 'prompt' not in example:
    raise ValueError(
      f"The tools {of} need a field 'prompt' of the record, but it has "
      f'{sorted(map(str, example))}; add it, or a method reset that returns '
      'the first message.'
    )
  return messages(example['prompt'], "The field 'prompt' of the record")


class Shared:
  """An instance that somebody else made, for one episode at a time."""

  def __init__(self, playing: Any, turn: asyncio.Lock):
    self._playing = playing
    self._turn = turn

  async def __call__(
    self, policy: base.Policy, example: Mapping[str, Any], seed: int
  ) -> float | None:
    """See `Playing`."""
    async with self._turn:
      return await self._playing(policy, example, seed)

  async def close(self) -> None:
    """Leaves the instance open: who has made it closes it."""
    await self._playing.close()
