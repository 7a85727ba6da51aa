"""The three forms of an environment, and the one thing that they become.

A function, a class with `reset` and `step`, and tools alone: `resolve` checks
what it is given, before anything is trained, and returns a `Made`, which makes
plays. A play makes an instance for each episode and closes it on every path.
"""

import asyncio
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import functools
import inspect
from typing import Any
from typing import NamedTuple

from grpo_jax.config import importing
from grpo_jax.config import plain_text
from grpo_jax.environments import adapters
from grpo_jax.environments import playing
from grpo_jax.environments import tools as tools_lib

_OWN = {
  'agent': 'grpo_jax.serving.agents:play',  # what plays `config.agent`
  'calculator': 'grpo_jax.environments.calculator:calculator',
  'python': 'grpo_jax.environments.python_tool:Python',
}
_LISTS = list, tuple  # of tools, which a name may stand for
_TAKEN = {'reset': ('example', 'seed'), 'step': ('action',)}
_FORMS = (
  'an async or sync function (policy, example), a class with reset and step, a '
  'class with methods that are marked by @tool, or a list of typed functions'
)


class Made(NamedTuple):
  """An environment that can be played.

  Attributes:
    name: For people.
    make: `make(tool_secs=30.0)` returns a `Playing`: one for episodes that
      follow each other, and several for some at the same time.
    tools: The schemas of its tools.
    reusable: Whether a `Playing` keeps something for the next episode.
  """

  name: str
  make: Callable[..., playing.Playing]
  tools: tuple[dict[str, Any], ...] = ()
  reusable: bool = False


def resolve(environment: Any, kwargs: Mapping[str, Any] | None = None) -> Made:
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


def find(name: str) -> None:
  """Looks for what a name stands for, without importing it.

  Args:
    name: See `resolve`.

  Raises:
    ValueError: There is no such environment; what only importing tells is not
      seen.
  """
  _check_known(name)
  if not adapters.is_name(name):
    subject = f'The environment {name!r}'
    importing.find(_OWN.get(name, name), subject, _LISTS)


def _check_known(name: str) -> None:
  if name not in _OWN and ':' not in name:
    raise ValueError(
      f'There is no environment {name!r}{importing.nearest(name, _OWN)}; give '
      f"one of {', '.join(_OWN)}, or 'module:Thing' of your own."
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
  _check_known(environment)
  if adapters.is_name(environment):
    return adapters.find(environment)
  return importing.imported(
    _OWN.get(environment, environment),
    f'The environment {name!r}',
    also=_LISTS,
  )


def _list(
  functions: Sequence[Any], kwargs: Mapping[str, Any], name: str
) -> Made:
  """Tools alone."""
  if kwargs:
    raise ValueError(
      f'The environment {name!r} is a list of tools, which takes no kwargs, '
      f'but got {sorted(kwargs)}; leave them out.'
    )
  if not functions:
    raise ValueError(
      'The environment is an empty list of tools; give one or more functions.'
    )
  for one in functions:
    if not callable(one) or isinstance(one, type):
      raise ValueError(
        f'The environment {name!r} has {plain_text.shown(one)} among its '
        'tools, but a typed function is required; give a class by itself.'
      )
  schemas = _schemas([(one, False) for one in functions], name)
  named = dict(zip(schemas, functions))
  form = playing.Form(lambda: None, lambda _: named, False, False, True, name)
  make = functools.partial(playing.Tools, form)
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


def _class(
  kind: type, construct: Callable[[], Any], name: str, shared: bool = False
) -> Made:
  """A class with `reset` and `step`, or with tools."""
  marked, steps = _marked(kind), callable(getattr(kind, 'step', None))
  if steps and marked:
    raise ValueError(
      f'The environment {name!r} has the method step and the tools '
      f'{", ".join(marked)}; keep one of the two forms: step is given the '
      'calls of a turn, and tools are called.'
    )
  if not steps and not marked:
    raise ValueError(
      f'The environment {name!r} has neither a method step(action) nor one '
      'that is marked by @tool; give it one of the two.'
    )
  if steps and not callable(getattr(kind, 'reset', None)):
    raise ValueError(
      f'The environment {name!r} has the method step, but no reset(example, '
      'seed), which begins an episode; write one.'
    )
  blocks = _check_methods(kind, name, 'step' if steps else 'reward')
  reusable = shared or bool(getattr(kind, 'reusable', False))
  form = playing.Form(
    construct, lambda _: {}, blocks, reusable, not shared, name
  )
  if steps:
    make = functools.partial(playing.Steps, form)
    return Made(name, make, reusable=form.reusable)
  schemas = _schemas(
    [(getattr(kind, one), _is_method(kind, one)) for one in marked], name
  )
  bound = lambda made: {
    tool: getattr(made, method) for tool, method in zip(schemas, marked)
  }
  make = functools.partial(playing.Tools, form._replace(tools=bound))
  return Made(name, make, tuple(schemas.values()), form.reusable)


def _check_methods(kind: type, name: str, *more: str) -> bool:
  """Checks what the methods of a class take, of those that it has.

  Returns:
    Whether one of them blocks, because it is not async.

  Raises:
    ValueError: One takes something else.
  """
  all_async = True
  for method in ('reset', 'close', *more):
    function = getattr(kind, method, None)
    if callable(function):
      given = _TAKEN.get(method, ())
      given = ('self', *given) if _is_method(kind, method) else given
      subject = f'The method {method} of the environment {name!r}'
      _check(function, given, {}, subject)
      all_async &= inspect.iscoroutinefunction(function)
  return not all_async


def _instance(thing: Any, kwargs: Mapping[str, Any], name: str) -> Made:
  """An instance, which is played by one episode at a time."""
  kind = type(thing)
  if not getattr(thing, 'reusable', False):
    raise ValueError(
      f'The environment is an instance of {kind.__name__}, which all episodes '
      f'would share; give the class {kind.__name__} and the arguments of its '
      'constructor as kwargs, or set reusable = True on it if reset makes it '
      'as new.'
    )
  if kwargs:
    raise ValueError(
      f'The environment {name!r} is an instance, which takes no kwargs, but '
      f'got {sorted(kwargs)}; leave them out.'
    )
  made = _class(kind, lambda: thing, name, shared=True)
  turn = asyncio.Lock()
  return made._replace(
    make=lambda *args, **kw: playing.Shared(made.make(*args, **kw), turn)
  )


def _function(
  function: Callable[..., Any], kwargs: Mapping[str, Any], name: str
) -> Made:
  """A function that plays an episode, or one that makes instances."""
  subject = f'The environment {name!r}'
  try:
    taken = inspect.signature(function).parameters
  except (TypeError, ValueError):  # some functions written in C have none
    taken = {
      'policy': inspect.Parameter('policy', inspect.Parameter.KEYWORD_ONLY)
    }
  required = [
    one.name
    for one in taken.values()
    if one.default is one.empty
    and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    and one.name not in kwargs
  ]
  if not required and 'policy' not in taken:
    return _factory(function, kwargs, name)
  seed = {'seed': 0} if 'seed' in taken and 'seed' not in kwargs else {}
  given = ('policy', 'example')
  _check(function, given, {**kwargs, **seed}, subject)
  form = playing.Played(function, dict(kwargs), bool(seed), name)
  return Made(name, lambda tool_secs=playing.TOOL_SECS: form)


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
