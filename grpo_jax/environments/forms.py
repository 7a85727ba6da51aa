"""The three forms of an environment, and the one thing that they become.

A function, a class with `reset` and `step`, and tools alone: `resolve` checks
what it is given, before anything is trained, and returns a `Made`, which makes
plays. A play makes an instance for each episode and closes it on every path.
"""

import asyncio
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import copy
import functools
import inspect
import math
from typing import Any
from typing import NamedTuple
from typing import Protocol

from grpo_jax.config import importing
from grpo_jax.config import plain_text
from grpo_jax.environments import base
from grpo_jax.environments import threads
from grpo_jax.environments import tools as tools_lib

TOOL_SECS = 30.0
_CLOSE_SECS = 5.0
_OWN = {'calculator': 'grpo_jax.environments.calculator:calculator'}
_FORMS = (
  'an async or sync function (policy, example), a class with reset and step, a '
  'class with methods that are marked by @tool, or a list of typed functions'
)


class Playing(Protocol):
  """A `base.Play`, one episode at a time, which may keep what is reusable."""

  async def __call__(
    self, policy: base.Policy, example: Mapping[str, Any], seed: int
  ) -> float | None:
    """Plays an episode, and returns its own reward; None if it has none."""
    ...

  async def close(self) -> None:
    """Closes what was kept for the next episode."""
    ...


class Made(NamedTuple):
  """An environment that can be played.

  Attributes:
    name: For people.
    make: `make(tool_secs=30.0)` returns a `Playing`: one for episodes that
      follow each other, and several for some at the same time.
    tools: The schemas of its tools.
  """

  name: str
  make: Callable[..., Playing]
  tools: tuple[dict[str, Any], ...] = ()


def resolve(
  environment: Any, kwargs: Mapping[str, Any] | None = None
) -> Made:
  """What a user gives as an environment, checked.

  >>> async def episode(policy, example):
  ...   return float((await policy.say('1+1=')).text == '2')
  >>> resolve(episode).name
  'episode'

  Args:
    environment: A name, 'module:Thing' or one of this package; or a function, a
      class, a function that makes instances, tools.
    kwargs: For the constructor of a class, or for a function.

  Returns:
    See `Made`.

  Raises:
    ValueError: It is no environment; the sentence says what is missing.
  """
  kwargs = {} if kwargs is None else dict(kwargs)
  name = environment if isinstance(environment, str) else _name(environment)
  thing = _found(environment, name)
  if isinstance(thing, list | tuple):
    return _list(thing, kwargs, name)
  if isinstance(thing, type):
    _check(thing, (), kwargs, f'The environment {name!r}')
    return _class(thing, lambda: thing(**kwargs), name)
  if _marked(type(thing)) or hasattr(type(thing), 'step'):
    return _instance(thing, kwargs, name)
  if tools_lib.is_tool(thing):
    return _list([thing], kwargs, name)
  if callable(thing):
    return _function(thing, kwargs, name)
  raise ValueError(
    f'The environment {name!r} is a {plain_text.kind(thing)}, but a name or '
    f'{_FORMS} is required; give one.'
  )


def _name(environment: Any) -> str:
  if isinstance(environment, list | tuple):
    return ', '.join(map(_name, environment))
  if isinstance(environment, functools.partial):
    return _name(environment.func)
  if isinstance(environment, str):
    return environment
  return getattr(environment, '__name__', plain_text.kind(environment))


def _found(environment: Any, name: str) -> Any:
  """What a name stands for."""
  if isinstance(environment, list | tuple):
    return [_found(one, _name(one)) for one in environment]
  if not isinstance(environment, str):
    return environment
  if environment not in _OWN and ':' not in environment:
    raise ValueError(
      f'There is no environment {name!r}{importing.nearest(name, _OWN)}; give '
      f"one of {', '.join(_OWN)}, or 'module:Thing' of your own."
    )
  return importing.imported(
    _OWN.get(environment, environment),
    f'The environment {name!r}',
    also=(list, tuple),
  )


def _list(
  functions: Sequence[Any], kwargs: Mapping[str, Any], name: str
) -> Made:
  """Tools alone."""
  if kwargs:
    raise ValueError(
      f'The environment {name!r} is a list of tools, which takes no kwargs, but '
      f'got {sorted(kwargs)}; leave them out.'
    )
  if not functions:
    raise ValueError(
      'The environment is an empty list of tools; give one or more functions.'
    )
  for one in functions:
    if not callable(one) or isinstance(one, type):
      raise ValueError(
        f'The environment {name!r} has {plain_text.shown(one)} among its tools, '
        'but a typed function is required; give a class by itself.'
      )
  schemas = _schemas([(one, False) for one in functions], name)
  named = dict(zip(schemas, functions))
  form = _Form(lambda: None, lambda _: named, False, False, name)
  make = functools.partial(_Tools, form)
  return Made(name, make, tuple(schemas.values()))


def _schemas(
  functions: Sequence[tuple[Any, bool]], name: str
) -> dict[str, dict[str, Any]]:
  """The schemas of tools by the names of these."""
  found = {}
  for function, is_method in functions:
    schema = tools_lib.schema(function, is_method)
    tool = schema['function']['name']
    if tool in found:
      raise ValueError(
        f'The environment {name!r} has two tools with the name {tool!r}, by '
        'which a model calls them; rename one.'
      )
    found[tool] = schema
  return found


def _marked(kind: type) -> list[str]:
  """The names of a class's tools, in the order in which they are defined."""
  names = [name for one in kind.__mro__[::-1] for name in vars(one)]
  return [
    name
    for name in dict.fromkeys(names)
    if tools_lib.is_tool(getattr(kind, name, None))
  ]


def _is_method(kind: type, name: str) -> bool:
  found = inspect.getattr_static(kind, name, None)
  return not isinstance(found, staticmethod | classmethod)


def _class(kind: type, construct: Callable[[], Any], name: str) -> Made:
  """A class with `reset` and `step`, or with tools."""
  marked, steps = _marked(kind), callable(getattr(kind, 'step', None))
  if steps and marked:
    raise ValueError(
      f'The environment {name!r} has the method step and the tools '
      f'{", ".join(marked)}; keep one of the two forms: step is given the calls '
      'of a turn, and tools are called.'
    )
  if not steps and not marked:
    raise ValueError(
      f'The environment {name!r} has neither a method step(action) nor one that '
      'is marked by @tool; give it one of the two.'
    )
  arguments = {
    'reset': ('example', 'seed'),
    'step': ('action',),
    'reward': () if marked else None,
    'close': (),
  }
  if steps and not callable(getattr(kind, 'reset', None)):
    raise ValueError(
      f'The environment {name!r} has the method step, but no reset(example, '
      'seed), which begins an episode; write one.'
    )
  for method, taken in arguments.items():
    if taken is not None and callable(getattr(kind, method, None)):
      given = ('self', *taken) if _is_method(kind, method) else taken
      subject = f'The method {method} of the environment {name!r}'
      _check(getattr(kind, method), given, {}, subject)
  used = [getattr(kind, one, None) for one in arguments]
  blocks = not all(map(inspect.iscoroutinefunction, filter(None, used)))
  reusable = bool(getattr(kind, 'reusable', False))
  if steps:
    form = _Form(construct, lambda _: {}, blocks, reusable, name)
    return Made(name, functools.partial(_Steps, form))
  schemas = _schemas(
    [(getattr(kind, one), _is_method(kind, one)) for one in marked], name
  )
  bound = lambda made: {
    tool: getattr(made, method) for tool, method in zip(schemas, marked)
  }
  form = _Form(construct, bound, blocks, reusable, name)
  return Made(name, functools.partial(_Tools, form), tuple(schemas.values()))


def _instance(thing: Any, kwargs: Mapping[str, Any], name: str) -> Made:
  """An instance, which is played by one episode at a time."""
  kind = type(thing)
  if not getattr(thing, 'reusable', False):
    raise ValueError(
      f'The environment is an instance of {kind.__name__}, which all episodes '
      f'would share; give the class {kind.__name__} and the arguments of its '
      'constructor as kwargs, or set reusable = True on it if reset makes it as '
      'new.'
    )
  if kwargs:
    raise ValueError(
      f'The environment {name!r} is an instance, which takes no kwargs, but got '
      f'{sorted(kwargs)}; leave them out.'
    )
  made = _class(kind, lambda: thing, name)
  turn = asyncio.Lock()
  return made._replace(
    make=lambda *args, **kw: _Shared(made.make(*args, **kw), turn)
  )


def _function(
  function: Callable[..., Any], kwargs: Mapping[str, Any], name: str
) -> Made:
  """A function that plays an episode, or one that makes instances."""
  subject = f'The environment {name!r}'
  try:
    taken = inspect.signature(function).parameters
  except (TypeError, ValueError):
    taken = {}
  required = [
    one.name
    for one in taken.values()
    if one.default is one.empty
    and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    and one.name not in kwargs
  ]
  if taken and not required and 'policy' not in taken:
    return _factory(function, kwargs, name)
  seed = {'seed': 0} if 'seed' in taken and 'seed' not in kwargs else {}
  given = ('policy', 'example')
  _check(function, given, {**kwargs, **seed}, subject)
  form = _Played(function, dict(kwargs), bool(seed), name)
  return Made(name, lambda tool_secs=TOOL_SECS: form)


def _factory(
  function: Callable[..., Any], kwargs: Mapping[str, Any], name: str
) -> Made:
  """A function that makes instances; one is made to look at it."""
  _check(function, (), kwargs, f'The environment {name!r}')
  try:
    made = function(**kwargs)
  except Exception as error:
    raise ValueError(
      f'The environment {name!r} cannot be made ({plain_text.named(error)}); '
      'correct it, or its kwargs.'
    ) from error
  if inspect.isawaitable(made):
    close = getattr(made, 'close', None)
    if close is not None:
      close()  # a coroutine that nobody awaits is warned of
    raise ValueError(
      f'The environment {name!r} takes no arguments and is async, but (policy, '
      'example) are required; add them.'
    )
  closing = getattr(made, 'close', lambda: None)()
  if inspect.iscoroutine(closing):
    closing.close()
  return _class(type(made), lambda: function(**kwargs), name)


def _check(
  function: Any,
  args: Sequence[str],
  kwargs: Mapping[str, Any],
  subject: str,
) -> None:
  """Checks that a function can be called so.

  Raises:
    ValueError: It cannot.
  """
  try:
    signature = inspect.signature(function)
  except (TypeError, ValueError):  # some functions written in C have none
    return
  try:
    signature.bind(*args, **kwargs)
  except TypeError as error:
    wanted = ', '.join((*args, *(f'{one}=...' for one in kwargs)))
    raise ValueError(
      f'{subject} takes {str(signature).split(" ->")[0]}, but is called with '
      f'({wanted}): {plain_text.said(error)}; correct one of the two.'
    ) from error


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
  """A reward as a finite float.

  Raises:
    ValueError: It is none.
  """
  try:
    found = math.nan if isinstance(value, str | bytes) else float(value)
  except Exception:
    found = math.nan
  if math.isfinite(found):
    return found
  raise ValueError(
    f'{where} is {plain_text.shown(value)}, but a finite number is required.'
  )


class _Played:
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
    pass


class _Form(NamedTuple):
  """What a class of environments is made of.

  Attributes:
    construct: Makes an instance.
    tools: The tools of an instance, by name.
    blocks: Whether some of its methods are not async: then all are called in a
      thread of the instance, always the same.
    reusable: Whether an instance may play another episode.
    name: For errors.
  """

  construct: Callable[[], Any]
  tools: Callable[[Any], Mapping[str, Callable[..., Any]]]
  blocks: bool
  reusable: bool
  name: str


class _Instances:
  """Plays episodes on instances; each is closed, whatever happens."""

  def __init__(self, form: _Form, tool_secs: float = TOOL_SECS):
    self.form = form
    self.tool_secs = tool_secs
    self._thread = threads.Thread()
    # The thread itself puts the instance there: if nobody waits for it any
    # more when it is made, it still is closed.
    self._made: list[Any] = []

  async def __call__(
    self, policy: base.Policy, example: Mapping[str, Any], seed: int
  ) -> float | None:
    kept = False
    try:
      if not self._made:
        await self.run(lambda: self._made.append(self.form.construct()))
      example = copy.deepcopy(dict(example))
      try:
        reward = await self.play(self._made[0], policy, example, seed)
      except base.Ended:
        kept = self.form.reusable
        raise
      kept = self.form.reusable
    except BaseException:
      if not kept:
        try:
          await self.close()
        except Exception:  # the first error is the one to tell
          pass
      raise
    if not kept:
      await self.close()
    return reward

  async def play(
    self, made: Any, policy: base.Policy, example: dict[str, Any], seed: int
  ) -> float | None:
    """Plays an episode on an instance."""
    raise NotImplementedError

  async def run(self, function: Callable[..., Any], *args: Any) -> Any:
    """Calls code of the user: here, or in the thread of the instance."""
    if self.form.blocks:
      return await self._thread.call(function, *args)

    async def called():
      result = function(*args)
      return await result if inspect.isawaitable(result) else result

    return await threads.guarded(called())

  async def close(self) -> None:
    made, thread = self._made, self._thread
    self._made, self._thread = [], threads.Thread()

    def close():
      closing = getattr(made.pop(), 'close', None) if made else None
      return None if closing is None else closing()

    async def closed():
      if self.form.blocks:
        await thread.call(close)
      elif inspect.isawaitable(closing := close()):
        await threads.guarded(closing)

    task = asyncio.ensure_future(closed())
    _closing.add(task)
    task.add_done_callback(_closed)
    task.add_done_callback(lambda _: thread.end())
    await asyncio.wait({task}, timeout=_CLOSE_SECS)
    if task.done():
      task.result()


_closing: set[asyncio.Future[Any]] = set()


def _closed(task: asyncio.Future[Any]) -> None:
  _closing.discard(task)
  if not task.cancelled():
    task.exception()  # which somebody reads, unless it came too late


class _Steps(_Instances):
  """An episode of steps: the environment answers each turn."""

  async def play(
    self, made: Any, policy: base.Policy, example: dict[str, Any], seed: int
  ) -> float | None:
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
          f'step {of} returned a {plain_text.kind(step)}, but a Step is required,'
          ' as in Step(observation, reward=0.0, done=False).'
        )
      policy.reward(number(step.reward, f'The reward of a step {of}'), reply.turn)
      if step.done:
        return None
      said = step.observation


class _Tools(_Instances):
  """An episode of calls: it ends with the first turn that has none."""

  async def play(
    self, made: Any, policy: base.Policy, example: dict[str, Any], seed: int
  ) -> float | None:
    of = f'of the environment {self.form.name!r}'
    said, rewards = None, getattr(made, 'reward', None)
    if hasattr(made, 'reset'):
      said = await self.run(made.reset, example, seed)
    new = _prompt(example, of) if said is None else messages(said, f'reset {of}')
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
      f'{sorted(map(str, example))}; add it, or a method reset that returns the '
      'first message.'
    )
  return messages(example['prompt'], "The field 'prompt' of the record")


class _Shared:
  """An instance that somebody else made, for one episode at a time."""

  def __init__(self, playing: Any, turn: asyncio.Lock):
    self._playing = playing
    self._turn = turn

  async def __call__(
    self, policy: base.Policy, example: Mapping[str, Any], seed: int
  ) -> float | None:
    async with self._turn:
      return await self._playing(policy, example, seed)

  async def close(self) -> None:
    """Leaves the instance open: who has made it closes it."""
